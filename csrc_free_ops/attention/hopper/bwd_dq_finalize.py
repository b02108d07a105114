"""What stands before the Hopper backward and after its one pass, in stock Triton.

It adds dq up in memory, in fp32 and by rows, sums [H, T, D]; each program that has keys of a segment adds its part. The
first kernel here makes delta and gets the sums and their counters ready, the others round them to dq.

At head dimensions 72 and 80 sums are two tensors, one after the other: of 64 columns, and of the rest. In the first,
column c of a row lies at c ^ 8 (row % 4): the rows that a warp writes to shared memory at once would else meet in the
same banks.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.hopper.lanes import lane_distance, longest_lead
from csrc_free_ops.attention.portable.fwd import COUNTS, DENSE_SIZES, SIZES
from csrc_free_ops.tiles.masks import is_seen
from csrc_free_ops.tiles.rows import (
    batch_base,
    column_starts,
    delta_of_rows,
    load_rows,
    row_base,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.segments import clamp_span, falls, find_one, narrow_segments, place_tile, probe_segments

# Columns of sums that a thread reads at once, 16 bytes; fewer where there are not so many.
RUN = tl.constexpr(4)


@triton.constexpr_function
def first_columns(head_dim):
    """Columns of the first tensor of sums. TMA, which sends to a second lane of them, takes powers of two."""
    return head_dim if head_dim % 32 == 0 else 64


@triton.jit
def _runs(first, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns of BLOCK_M rows from `first` on, as [runs, RUN]: rows, which of a row's runs, and where in it.

    In a run places follow each other, which Triton does not see of swizzled columns: it would load number by number.
    Runs of all rows share an axis because threads lie side by side along it; of two Triton may choose the rows'.
    """
    COUNT: tl.constexpr = WIDTH // RUN
    each = tl.arange(0, BLOCK_M * COUNT)[:, None]
    return first + each // COUNT, each % COUNT, tl.arange(0, RUN)[None, :]


@triton.jit
def _places(head, heads, row, run, within, total, START: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where in sums, of so many heads, the numbers of `_runs` lie, whose first column is START."""
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    line = head.to(tl.int64) * total + row
    if START < FIRST:
        places = line * FIRST + ((START // RUN + run) ^ (row % 4 * (8 // RUN))) * RUN + within
    else:
        first_numbers = heads.to(tl.int64) * total * FIRST
        places = first_numbers + line * (HEAD_DIM - FIRST) + (START - FIRST) + run * RUN + within
    return places


@triton.jit
def _clear(base, rows, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """The first `rows` of BLOCK_M rows that follow each other, all where there are more, none where there are fewer."""
    numbers = tl.minimum(rows, BLOCK_M) * COLUMNS
    for start in tl.static_range(0, BLOCK_M * COLUMNS, BLOCK_M * 8):
        places = start + tl.arange(0, BLOCK_M * 8)
        tl.store(base + places, tl.zeros((BLOCK_M * 8,), tl.float32), mask=places < numbers)


@triton.jit
def _clear_sums(sums_ptr, line, rows, numbers, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of `rows` rows from `line`, counted over all heads, on; there are so many `numbers` of lines in all."""
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    _clear(sums_ptr + line * FIRST, rows, BLOCK_M, FIRST)
    if FIRST < HEAD_DIM:
        REST: tl.constexpr = HEAD_DIM - FIRST
        _clear(sums_ptr + numbers * FIRST + line * REST, rows, BLOCK_M, REST)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_delta_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, cu_q_ptr, cu_k_ptr, delta_ptr, sums_ptr, counts_ptr,
    stride_oh, stride_doh, total_q, total_k, num_segments, window_left, window_right,
    STRIDE_OT: tl.constexpr, STRIDE_DOT: tl.constexpr, UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ORDERED: tl.constexpr,
    LANES: tl.constexpr, ONE: tl.constexpr, OVERLAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows, heads): delta, the tile's counters at 0, and its sums where they must be 0.

    With ORDERED the first program to add writes, so they need not be where there is one. BLOCK_N are its keys. There is
    a counter for each of LANES; the number behind them says whether boundaries fall. Without LANES there are neither
    sums nor counters, and delta is all. With ONE there is one segment.
    With OVERLAPPED the next kernel may begin while this one ends; it must call `await_kernel`.
    """
    if OVERLAPPED:
        # What the next kernel reads early was there before this one went on.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    # Of delta a tile's rows are those of the tensor: they are loaded before it is known whose they are. Of tiles there
    # may be far more.
    row = tl.minimum(tile, total_q // BLOCK_M + 1) * BLOCK_M
    local = tl.arange(0, BLOCK_M)
    remaining = total_q - row
    starts = column_starts(head, HEAD_DIM, MAIN)
    out_base = row_base(out_ptr, row, head, stride_oh, STRIDE_OT, UNIT)
    dout_base = row_base(dout_ptr, row, head, stride_doh, STRIDE_DOT, UNIT)
    out = load_rows(out_base, starts, local, remaining, STRIDE_OT, HEAD_DIM, MAIN, TAIL, True)
    dout = load_rows(dout_base, starts, local, remaining, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, True)
    statistics = head * total_q + row + local
    lse = tl.load(lse_ptr + statistics, mask=local < remaining, other=float("-inf"))
    if LANES > 0:
        falling_ptr = counts_ptr + LANES * tl.num_programs(1) * tl.num_programs(0)
        # By one that has the least to do: rows end before the last tile.
        tells = (tile == tl.num_programs(0) - 1) & (head == 0)
        if ONE:
            # All in one look at memory, where a search takes one after another.
            q_begin, q_end = tl.load(cu_q_ptr), tl.load(cu_q_ptr + 1)
            k_begin, k_end = tl.load(cu_k_ptr), tl.load(cu_k_ptr + 1)
            if tells:
                tl.store(falling_ptr, ((q_end < q_begin) | (k_end < k_begin)).to(tl.int32))
            segment, q_begin, q_end = find_one(q_begin, q_end, total_q, tile, BLOCK_M)
            k_end = tl.where(segment == 1, k_end, k_begin)
        else:
            if tells:
                tl.store(falling_ptr, falls(cu_q_ptr, num_segments) | falls(cu_k_ptr, num_segments))
            segment = 0
            beyond = num_segments + 2
            while beyond - segment > 1:
                probe, apart = probe_segments(segment, beyond)
                cu = tl.load(cu_q_ptr + probe - 1, mask=(probe > 0) & (probe < beyond), other=0)
                segment, beyond = narrow_segments(cu, probe, apart, segment, beyond, total_q, tile, BLOCK_M)
            before = tl.maximum(segment - 1, 0)
            behind = tl.minimum(segment, num_segments)
            q_begin = tl.load(cu_q_ptr + before, mask=segment > 0, other=0)
            q_end = tl.load(cu_q_ptr + behind, mask=segment <= num_segments, other=total_q)
            k_begin, k_end = tl.load(cu_k_ptr + before), tl.load(cu_k_ptr + behind)
    delta = delta_of_rows(out, dout, lse, dlse_ptr + statistics, local < remaining, HAS_DLSE)
    tl.store(delta_ptr + statistics, delta, mask=local < remaining)
    if LANES > 0:
        for lane in tl.static_range(LANES):
            tl.store(counts_ptr + (lane * tl.num_programs(1) + head) * tl.num_programs(0) + tile, 0)
        # Of sums they are those of a segment.
        q_start, q_length, first, k_start, k_length = place_tile(
            q_begin, q_end, k_begin, k_end, segment, total_q, total_k, tile, BLOCK_M
        )
        shift = q_length - k_length
        seen = is_seen(first, shift, window_right, window_left, k_length, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M)
        if not (ORDERED and seen):
            lines = tl.num_programs(1).to(tl.int64) * total_q
            _clear_sums(sums_ptr, head * total_q + q_start + first, q_length - first, lines, HEAD_DIM, BLOCK_M)


@triton.jit(do_not_specialize=DENSE_SIZES)
def _attention_bwd_delta_dense_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, delta_ptr, dq_ptr, counts_ptr,
    stride_ob, stride_oh, stride_dob, stride_doh, stride_dqb, stride_dqh,
    heads, q_length, k_length, window_left, window_right,
    STRIDE_OT: tl.constexpr, STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (heads of all sequences, tiles of BLOCK_M query rows): the same of [B, H, S, D], of one lane, overlapped.

    No boundaries fall, of which there are none. Sums are always made in order and rounded by who adds last, so that
    none need be 0; dq is, of rows that nobody adds to. Without counters delta is all.
    """
    # What the next kernel reads early was there before this one went on.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    batch, head = line // heads, line % heads
    first = tile * BLOCK_M
    local = tl.arange(0, BLOCK_M)
    remaining = q_length - first
    starts = column_starts(head, HEAD_DIM, MAIN)
    out_base = row_base(batch_base(out_ptr, batch, stride_ob, UNIT), first, head, stride_oh, STRIDE_OT, UNIT)
    dout_base = row_base(batch_base(dout_ptr, batch, stride_dob, UNIT), first, head, stride_doh, STRIDE_DOT, UNIT)
    out = load_rows(out_base, starts, local, remaining, STRIDE_OT, HEAD_DIM, MAIN, TAIL, True)
    dout = load_rows(dout_base, starts, local, remaining, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, True)
    statistics = line * q_length + first + local
    lse = tl.load(lse_ptr + statistics, mask=local < remaining, other=float("-inf"))
    delta = delta_of_rows(out, dout, lse, dlse_ptr + statistics, local < remaining, HAS_DLSE)
    tl.store(delta_ptr + statistics, delta, mask=local < remaining)
    if counts_ptr is not None:
        tl.store(counts_ptr + line * tl.num_programs(1) + tile, 0)
        shift = q_length - k_length
        if not is_seen(first, shift, window_right, window_left, k_length, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M):
            dq_base = row_base(batch_base(dq_ptr, batch, stride_dqb, UNIT), first, head, stride_dqh, STRIDE_DQT, UNIT)
            nothing = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
            store_rows(dq_base, starts, local, remaining, nothing, STRIDE_DQT, HEAD_DIM, MAIN, TAIL)


@triton.jit
def _store_rounded(
    dq_base, part, row, run, within, scale, mask, START: tl.constexpr, STRIDE_DQT: tl.constexpr
):  # fmt: skip
    """Writes dq = scale part, [runs, RUN] as of `_runs`, whose first column is START; a head's dq is at dq_base."""
    dq = dq_base + row.to(tl.int64) * STRIDE_DQT + START + run * RUN + within
    tl.store(dq, (part * tl.cast(scale, tl.float32)).to(dq_base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("total_q",))
def _attention_bwd_round_kernel(
    sums_ptr, dq_ptr, total_q, scale, STRIDE_DQT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK_M rows, heads): dq = scale sums, rounded.

    With OVERLAPS it may begin while the kernel before it ends.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.program_id(0) * BLOCK_M
    dq_base = dq_ptr + head * HEAD_DIM
    row, run, within = _runs(first, BLOCK_M, MAIN)
    for START in tl.static_range(0, HEAD_DIM - MAIN + 1, MAIN):
        places = _places(head, heads, row, run, within, total_q, START, HEAD_DIM)
        part = tl.load(sums_ptr + places, mask=row < total_q, other=0.0)
        _store_rounded(dq_base, part, row, run, within, scale, row < total_q, START, STRIDE_DQT)
    if TAIL > 0:
        LAST: tl.constexpr = HEAD_DIM // MAIN * MAIN
        row, run, within = _runs(first, BLOCK_M, TAIL)
        mask = (row < total_q) & (LAST + RUN * run < HEAD_DIM)
        places = _places(head, heads, row, run, within, total_q, LAST, HEAD_DIM)
        part = tl.load(sums_ptr + places, mask=mask, other=0.0)
        _store_rounded(dq_base, part, row, run, within, scale, mask, LAST, STRIDE_DQT)


@triton.jit
def _load_lanes(
    sums_ptr, lane_ptr, head, row, run, within, back, total,
    START: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_DQT: tl.constexpr,
):  # fmt: skip
    """The numbers of `_runs` in sums and in the second lane, and those in sums of the rows `back` before."""
    HALF: tl.constexpr = WIDTH // 2 // RUN
    inside = row < total
    at = run
    if START == 0:
        at ^= row % 4 * (8 // RUN)
    # Half of a row's columns are in another row.
    line = tl.where(at < HALF, row - back, row).to(tl.int64)
    of_lane = line * (STRIDE_DQT // 2) + head * (HEAD_DIM // 2) + START // 2 + at % HALF * RUN + within
    heads = tl.num_programs(1)
    part = tl.load(sums_ptr + _places(head, heads, row, run, within, total, START, HEAD_DIM), mask=inside, other=0.0)
    second = tl.load(lane_ptr + of_lane, mask=inside, other=0.0)
    places = _places(head, heads, row - back, run, within, total, START, HEAD_DIM)
    return part, second, tl.load(sums_ptr + places, mask=inside, other=0.0)


@triton.jit
def _store_lanes(
    dq_ptr, part, second, before, head, row, run, within, back, begin, end, total, scale,
    START: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_DQT: tl.constexpr,
):  # fmt: skip
    """Writes dq of these rows, and of those `back` before, of what `_load_lanes` gave.

    Rows begin .. end - 1 have numbers in the second lane.
    """
    in_lane = (row >= begin) & (row < end)
    # The program of such a row writes it too.
    lent = (row >= begin - back) & (row < end - back)
    own = (row < total) & (lent == 0)
    paired = (row < total) & ((row < 2 * back) | in_lane)
    part += tl.where(in_lane, second, 0.0)
    dq_base = dq_ptr + head * HEAD_DIM
    _store_rounded(dq_base, part, row, run, within, scale, own, START, STRIDE_DQT)
    _store_rounded(dq_base, before, row - back, run, within, scale, paired, START, STRIDE_DQT)


@triton.jit(do_not_specialize=("total_q", "total_k"))
def _attention_bwd_round_lanes_kernel(
    sums_ptr, lane_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, total_q, total_k, scale,
    STRIDE_DQT: tl.constexpr, HEAD_DIM: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, OWNED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The same of one segment whose blocks of BLOCK rows have a second lane of sums (`tiles.lanes`), which lies in dq.

    Grid (blocks of BLOCK_M rows from row `back` on, heads). lane_ptr is dq as fp32. A row of the lane lies in its own
    row of dq and in the one `back` rows before; the program that reads it writes both. All is read in one look, before
    the boundaries tell which rows the lane has; of the others what lies in dq, or is being written there, is left out.
    """
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    REST: tl.constexpr = HEAD_DIM - FIRST
    head = tl.program_id(1)
    distance = lane_distance(total_q, BLOCK)
    back = distance * BLOCK
    first = back + tl.program_id(0) * BLOCK_M
    row, run, within = _runs(first, BLOCK_M, FIRST)
    q_begin, q_end = tl.load(cu_q_ptr), tl.load(cu_q_ptr + 1)
    k_begin, k_end = tl.load(cu_k_ptr), tl.load(cu_k_ptr + 1)
    if OVERLAPS:
        # For sums; boundaries are inputs.
        tl.extra.cuda.gdc_wait()
    part, second, before = _load_lanes(
        sums_ptr, lane_ptr, head, row, run, within, back, total_q, 0, FIRST, HEAD_DIM, STRIDE_DQT
    )
    if REST > 0:
        last_row, last_run, _ = _runs(first, BLOCK_M, REST)
        last_part, last_second, last_before = _load_lanes(
            sums_ptr, lane_ptr, head, last_row, last_run, within, back, total_q, FIRST, REST, HEAD_DIM, STRIDE_DQT
        )
    q_start, q_length = clamp_span(q_begin, q_end, total_q)
    _, k_length = clamp_span(k_begin, k_end, total_k)
    blocks = (q_length + BLOCK - 1) // BLOCK
    lead = longest_lead((k_length + OWNED - 1) // OWNED - 1, blocks, distance, ROUND)
    begin = q_start + (blocks - lead) * BLOCK
    end = tl.where(lead > 0, q_start + q_length, begin)
    # All of the lane's rows are read before any is written.
    tl.debug_barrier()
    _store_lanes(
        dq_ptr, part, second, before, head, row, run, within, back, begin, end, total_q, scale,
        0, HEAD_DIM, STRIDE_DQT,
    )  # fmt: skip
    if REST > 0:
        _store_lanes(
            dq_ptr, last_part, last_second, last_before, head, last_row, last_run, within, back, begin, end, total_q,
            scale, FIRST, HEAD_DIM, STRIDE_DQT,
        )  # fmt: skip
