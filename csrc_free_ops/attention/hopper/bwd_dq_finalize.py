"""The kernels before and after the one pass of the Hopper backward, in stock Triton.

The pass accumulates dq in memory, in fp32 and by rows, as dq_acc [H, T, D]. Each program that has keys of a segment
adds its contribution. The first kernel here makes delta and prepares dq_acc and its semaphores, the others round
dq_acc to dq.

At head dimensions 72 and 80 dq_acc is two tensors, one behind the other: of 64 columns, and of the remaining ones. In
the first tensor, column c of a row lies at c ^ 8 (row % 4). Otherwise the rows that a warp writes to shared memory at
once would meet in the same banks.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.hopper.dq_order import acc2_blocks, acc2_distance
from csrc_free_ops.attention.portable.fwd import COUNTS, DENSE_SIZES, SIZES
from csrc_free_ops.tiles.masks import is_seen
from csrc_free_ops.tiles.rows import (
    batch_base,
    column_starts,
    delta_of_rows,
    load_rows,
    row_base,
    row_step,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.segments import (
    LOOK,
    NO_BOUNDARY,
    advance_start,
    clamp_span,
    count_segments,
    find_one,
    locate_tile,
    narrow_segment,
)

# Columns of dq_acc that a thread reads at once: 16 bytes.
RUN = tl.constexpr(4)


@triton.constexpr_function
def first_columns(head_dim):
    """Columns of the first tensor of dq_acc. TMA adds to a second accumulator in powers of two."""
    return head_dim if head_dim % 32 == 0 else 64


@triton.jit
def _runs(first, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns of BLOCK_M rows from `first` on, as [runs, RUN]: the row, the run in the row, the place in the run.

    A run is contiguous. Triton does not see that of swizzled columns, and would load number by number. Runs of all rows
    share an axis, because threads lie side by side along it; of two axes Triton may choose that of the rows.
    """
    COUNT: tl.constexpr = WIDTH // RUN
    index = tl.arange(0, BLOCK_M * COUNT)[:, None]
    return first + index // COUNT, index % COUNT, tl.arange(0, RUN)[None, :]


@triton.jit
def _acc_offsets(head, heads, row, run, within, total, START: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Offsets in dq_acc, of so many heads, of the numbers of `_runs`, whose first column is START."""
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    acc_row = head.to(tl.int64) * total + row
    if START < FIRST:
        offsets = acc_row * FIRST + ((START // RUN + run) ^ (row % 4 * (8 // RUN))) * RUN + within
    else:
        first_numbers = heads.to(tl.int64) * total * FIRST
        offsets = first_numbers + acc_row * (HEAD_DIM - FIRST) + (START - FIRST) + run * RUN + within
    return offsets


@triton.jit
def _clear(base, rows, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the first `rows` of BLOCK_M contiguous rows: all if `rows` is larger, none if it is negative."""
    numbers = tl.minimum(rows, BLOCK_M) * COLUMNS
    for start in tl.static_range(0, BLOCK_M * COLUMNS, BLOCK_M * 8):
        offsets = start + tl.arange(0, BLOCK_M * 8)
        tl.store(base + offsets, tl.zeros((BLOCK_M * 8,), tl.float32), mask=offsets < numbers)


@triton.jit
def _clear_dq_acc(dq_acc_ptr, acc_row, rows, acc_rows, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """Zero `rows` rows from `acc_row` on, which counts the rows of all heads; there are `acc_rows` of them."""
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    _clear(dq_acc_ptr + acc_row * FIRST, rows, BLOCK_M, FIRST)
    if FIRST < HEAD_DIM:
        SECOND: tl.constexpr = HEAD_DIM - FIRST
        _clear(dq_acc_ptr + acc_rows * FIRST + acc_row * SECOND, rows, BLOCK_M, SECOND)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_delta_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, cu_q_ptr, cu_k_ptr, delta_ptr, dq_acc_ptr, semaphores_ptr,
    stride_oh, stride_doh, stride_ot, stride_dot, total_q, total_k, num_segments, window_left, window_right,
    STRIDE_OT: tl.constexpr, STRIDE_DOT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ORDERED: tl.constexpr,
    DQ_ACCS: tl.constexpr, ONE_SEGMENT: tl.constexpr, OVERLAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows, heads): delta, the tile's semaphores at 0, and its dq_acc where it must be 0.

    With ORDERED the first program to add writes, so only rows that no program sees must be 0. A program has BLOCK_N
    keys. Each accumulator has a semaphore. Without accumulators delta is all. ONE_SEGMENT skips the search.
    With OVERLAPPED the next kernel may begin while this one ends; it must call `await_kernel`.
    """
    if OVERLAPPED:
        # The next kernel reads early what was there before this wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    # delta follows the tensor's rows, not the segments, so it is loaded before the segment is found. There may be far
    # more tiles than rows.
    row = tl.minimum(tile, total_q // BLOCK_M + 1) * BLOCK_M
    local = tl.arange(0, BLOCK_M)
    remaining = total_q - row
    starts = column_starts(head, HEAD_DIM, MAIN)
    step_o = row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
    step_do = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    out_base = row_base(out_ptr, row, head, stride_oh, step_o, STRIDE_UNIT)
    dout_base = row_base(dout_ptr, row, head, stride_doh, step_do, STRIDE_UNIT)
    out = load_rows(out_base, starts, local, remaining, step_o, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    dout = load_rows(dout_base, starts, local, remaining, step_do, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    statistics = head * total_q + row + local
    lse = tl.load(lse_ptr + statistics, mask=local < remaining, other=float("-inf"))
    if DQ_ACCS > 0:
        if ONE_SEGMENT:
            # All boundaries in one round trip to memory, where a search takes several.
            q_begin, q_end = tl.load(cu_q_ptr), tl.load(cu_q_ptr + 1)
            k_begin, k_end = tl.load(cu_k_ptr), tl.load(cu_k_ptr + 1)
            segment, q_begin, q_end = find_one(q_begin, q_end, total_q, tile, BLOCK_M)
            k_end = tl.where(segment == 1, k_end, k_begin)
        else:
            segment, falls, index, seen = 0, 0, 0, LOOK
            while (seen == LOOK) & (index <= num_segments):
                at = index + tl.arange(0, LOOK)
                cu_q = tl.load(cu_q_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
                cu_k = tl.load(cu_k_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
                q_behind = tl.load(cu_q_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
                k_behind = tl.load(cu_k_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
                seen, falling = count_segments(cu_q, q_behind, cu_k, k_behind, at, total_q, tile, BLOCK_M)
                segment += seen
                falls += falling
                index += LOOK
            q_begin = tl.load(cu_q_ptr + segment - 1, mask=segment > 0, other=0)
            k_begin = tl.load(cu_k_ptr + segment - 1, mask=segment > 0, other=0)
            if falls > 0:
                segment = num_segments + 1
                q_begin, k_begin, index = 0, 0, 0
                while index < segment:
                    at = index + tl.arange(0, LOOK)
                    cu_q = tl.load(cu_q_ptr + at, mask=at <= num_segments, other=0)
                    cu_k = tl.load(cu_k_ptr + at, mask=at <= num_segments, other=0)
                    segment = narrow_segment(cu_q, at, segment, total_q, tile, BLOCK_M)
                    q_begin = advance_start(cu_q, at, segment, q_begin, total_q)
                    k_begin = advance_start(cu_k, at, segment, k_begin, total_k)
                    index += LOOK
            inside = (segment > 0) & (segment <= num_segments)
            q_end = tl.load(cu_q_ptr + segment, mask=segment <= num_segments, other=total_q)
            k_end = tl.load(cu_k_ptr + segment, mask=inside, other=0)
    delta = delta_of_rows(out, dout, lse, dlse_ptr + statistics, local < remaining, HAS_DLSE)
    tl.store(delta_ptr + statistics, delta, mask=local < remaining)
    if DQ_ACCS > 0:
        for accumulator in tl.static_range(DQ_ACCS):
            tl.store(semaphores_ptr + (accumulator * tl.num_programs(1) + head) * tl.num_programs(0) + tile, 0)
        # dq_acc follows the segments.
        q_start, q_length, first, k_start, k_length = locate_tile(
            q_begin, q_end, k_begin, k_end, segment, total_q, total_k, tile, BLOCK_M
        )
        shift = q_length - k_length
        seen = is_seen(first, shift, window_right, window_left, k_length, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M)
        if not (ORDERED and seen):
            acc_rows = tl.num_programs(1).to(tl.int64) * total_q
            _clear_dq_acc(dq_acc_ptr, head * total_q + q_start + first, q_length - first, acc_rows, HEAD_DIM, BLOCK_M)


@triton.jit(do_not_specialize=DENSE_SIZES)
def _attention_bwd_delta_dense_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, delta_ptr, dq_ptr, semaphores_ptr,
    stride_ob, stride_oh, stride_dob, stride_doh, stride_dqb, stride_dqh,
    stride_ot, stride_dot, stride_dqt, heads, q_length, k_length, window_left, window_right,
    STRIDE_OT: tl.constexpr, STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (heads of all sequences, tiles of BLOCK_M query rows): delta of [B, H, S, D], semaphores at 0, overlapped.

    Dense tensors have no boundaries. Programs always add in order, and the last one rounds, so dq_acc need not be 0. dq
    must be 0 in rows to which no program adds. Without semaphores delta is all.
    """
    # The next kernel reads early what was there before this wait.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    all_heads = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    sequence, head = all_heads // heads, all_heads % heads
    first = tile * BLOCK_M
    local = tl.arange(0, BLOCK_M)
    step_o = row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
    step_do = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    step_dq = row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT)
    remaining = q_length - first
    starts = column_starts(head, HEAD_DIM, MAIN)
    out_base = row_base(
        batch_base(out_ptr, sequence, stride_ob, STRIDE_UNIT), first, head, stride_oh, step_o, STRIDE_UNIT
    )
    dout_base = row_base(
        batch_base(dout_ptr, sequence, stride_dob, STRIDE_UNIT), first, head, stride_doh, step_do, STRIDE_UNIT
    )
    out = load_rows(out_base, starts, local, remaining, step_o, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    dout = load_rows(dout_base, starts, local, remaining, step_do, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    statistics = all_heads * q_length + first + local
    lse = tl.load(lse_ptr + statistics, mask=local < remaining, other=float("-inf"))
    delta = delta_of_rows(out, dout, lse, dlse_ptr + statistics, local < remaining, HAS_DLSE)
    tl.store(delta_ptr + statistics, delta, mask=local < remaining)
    if semaphores_ptr is not None:
        tl.store(semaphores_ptr + all_heads * tl.num_programs(1) + tile, 0)
        shift = q_length - k_length
        if not is_seen(first, shift, window_right, window_left, k_length, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M):
            dq_base = row_base(
                batch_base(dq_ptr, sequence, stride_dqb, STRIDE_UNIT), first, head, stride_dqh, step_dq, STRIDE_UNIT
            )
            nothing = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
            store_rows(dq_base, starts, local, remaining, nothing, step_dq, HEAD_DIM, MAIN, TAIL)


@triton.jit
def _store_rounded(
    dq_base, acc, row, run, within, scale, mask, START: tl.constexpr, STRIDE_DQT: tl.constexpr
):  # fmt: skip
    """Write dq = scale acc, [runs, RUN] as from `_runs`, whose first column is START; a head's dq is at dq_base."""
    dq = dq_base + row.to(tl.int64) * STRIDE_DQT + START + run * RUN + within
    tl.store(dq, (acc * tl.cast(scale, tl.float32)).to(dq_base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("total_q",))
def _attention_bwd_round_kernel(
    dq_acc_ptr, dq_ptr, total_q, scale, STRIDE_DQT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK_M rows, heads): dq = scale dq_acc, rounded.

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
        offsets = _acc_offsets(head, heads, row, run, within, total_q, START, HEAD_DIM)
        acc = tl.load(dq_acc_ptr + offsets, mask=row < total_q, other=0.0)  # [BLOCK_M MAIN / RUN, RUN]
        _store_rounded(dq_base, acc, row, run, within, scale, row < total_q, START, STRIDE_DQT)
    if TAIL > 0:
        LAST: tl.constexpr = HEAD_DIM // MAIN * MAIN
        row, run, within = _runs(first, BLOCK_M, TAIL)
        mask = (row < total_q) & (LAST + RUN * run < HEAD_DIM)
        offsets = _acc_offsets(head, heads, row, run, within, total_q, LAST, HEAD_DIM)
        acc = tl.load(dq_acc_ptr + offsets, mask=mask, other=0.0)  # [BLOCK_M TAIL / RUN, RUN]
        _store_rounded(dq_base, acc, row, run, within, scale, mask, LAST, STRIDE_DQT)


@triton.jit
def _load_accumulators(
    dq_acc_ptr, dq_acc2_ptr, head, row, run, within, back, total,
    START: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_DQT: tl.constexpr,
):  # fmt: skip
    """The numbers of `_runs` in both accumulators, and in the first one those of the rows `back` before."""
    HALF: tl.constexpr = WIDTH // 2 // RUN
    inside = row < total
    at = run
    if START == 0:
        at ^= row % 4 * (8 // RUN)
    # Half of a row's columns are in another row.
    acc2_row = tl.where(at < HALF, row - back, row).to(tl.int64)
    acc2_offsets = acc2_row * (STRIDE_DQT // 2) + head * (HEAD_DIM // 2) + START // 2 + at % HALF * RUN + within
    heads = tl.num_programs(1)
    offsets = _acc_offsets(head, heads, row, run, within, total, START, HEAD_DIM)
    acc = tl.load(dq_acc_ptr + offsets, mask=inside, other=0.0)  # [BLOCK_M WIDTH / RUN, RUN]
    acc2 = tl.load(dq_acc2_ptr + acc2_offsets, mask=inside, other=0.0)
    offsets_before = _acc_offsets(head, heads, row - back, run, within, total, START, HEAD_DIM)
    return acc, acc2, tl.load(dq_acc_ptr + offsets_before, mask=inside, other=0.0)


@triton.jit
def _store_dq(
    dq_ptr, acc, acc2, acc_before, head, row, run, within, back, begin, end, total, scale,
    START: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_DQT: tl.constexpr,
):  # fmt: skip
    """Write dq of these rows, and of the rows `back` before, from what `_load_accumulators` returned.

    Rows begin .. end - 1 have numbers in the second accumulator.
    """
    has_acc2 = (row >= begin) & (row < end)
    # The program of a row that the second accumulator lies in writes it too.
    is_lent = (row >= begin - back) & (row < end - back)
    writes = (row < total) & (is_lent == 0)
    writes_before = (row < total) & ((row < 2 * back) | has_acc2)
    acc += tl.where(has_acc2, acc2, 0.0)
    dq_base = dq_ptr + head * HEAD_DIM
    _store_rounded(dq_base, acc, row, run, within, scale, writes, START, STRIDE_DQT)
    _store_rounded(dq_base, acc_before, row - back, run, within, scale, writes_before, START, STRIDE_DQT)


@triton.jit(do_not_specialize=("total_q", "total_k"))
def _attention_bwd_round_acc2_kernel(
    dq_acc_ptr, dq_acc2_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, total_q, total_k, scale,
    STRIDE_DQT: tl.constexpr, HEAD_DIM: tl.constexpr, WAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, ACC_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """dq of one segment whose blocks of ACC_BLOCK rows have a second accumulator (`dq_order`), which lies in dq.

    Grid (blocks of BLOCK_M rows from row `back` on, heads). The second accumulator is dq as fp32. A row of it lies in
    its own row of dq and in the row `back` before; the program that reads it writes both. Everything is read before the
    boundaries say which rows the second accumulator has. For other rows, what lies in dq is dropped.
    """
    FIRST: tl.constexpr = first_columns(HEAD_DIM)
    SECOND: tl.constexpr = HEAD_DIM - FIRST
    head = tl.program_id(1)
    distance = acc2_distance(total_q, ACC_BLOCK)
    back = distance * ACC_BLOCK
    first = back + tl.program_id(0) * BLOCK_M
    row, run, within = _runs(first, BLOCK_M, FIRST)
    q_begin, q_end = tl.load(cu_q_ptr), tl.load(cu_q_ptr + 1)
    k_begin, k_end = tl.load(cu_k_ptr), tl.load(cu_k_ptr + 1)
    if OVERLAPS:
        # For the accumulators; boundaries are inputs.
        tl.extra.cuda.gdc_wait()
    acc, acc2, acc_before = _load_accumulators(
        dq_acc_ptr, dq_acc2_ptr, head, row, run, within, back, total_q, 0, FIRST, HEAD_DIM, STRIDE_DQT
    )
    if SECOND > 0:
        last_row, last_run, _ = _runs(first, BLOCK_M, SECOND)
        last_acc, last_acc2, last_acc_before = _load_accumulators(
            dq_acc_ptr,
            dq_acc2_ptr,
            head,
            last_row,
            last_run,
            within,
            back,
            total_q,
            FIRST,
            SECOND,
            HEAD_DIM,
            STRIDE_DQT,
        )
    q_start, q_length = clamp_span(q_begin, q_end, total_q)
    _, k_length = clamp_span(k_begin, k_end, total_k)
    blocks = (q_length + ACC_BLOCK - 1) // ACC_BLOCK
    num_acc2_blocks = acc2_blocks((k_length + BLOCK_N - 1) // BLOCK_N - 1, blocks, distance, WAVE)
    begin = q_start + (blocks - num_acc2_blocks) * ACC_BLOCK
    end = tl.where(num_acc2_blocks > 0, q_start + q_length, begin)
    # All rows of the second accumulator are read before any row is written.
    tl.debug_barrier()
    _store_dq(
        dq_ptr, acc, acc2, acc_before, head, row, run, within, back, begin, end, total_q, scale,
        0, HEAD_DIM, STRIDE_DQT,
    )  # fmt: skip
    if SECOND > 0:
        _store_dq(
            dq_ptr, last_acc, last_acc2, last_acc_before, head, last_row, last_run, within, back, begin, end, total_q,
            scale, FIRST, HEAD_DIM, STRIDE_DQT,
        )  # fmt: skip
