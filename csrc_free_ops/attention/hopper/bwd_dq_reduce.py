"""The way of dq's parts in the Hopper backward: from a consumer's registers to shared memory, and on to the sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from csrc_free_ops.attention.hopper.bwd_dq_finalize import first_columns
from csrc_free_ops.attention.hopper.bwd_protocol import (
    AFTER,
    BATCH_STRIDES,
    BEFORE,
    BLOCK,
    BLOCKS,
    COUNTS,
    DQ,
    FETCHED,
    FIRST_OTHER,
    FREE,
    HEAD,
    HEAD_STRIDES,
    LAST,
    LEAD,
    LENGTH,
    MEETING,
    OWN_EMPTY,
    OWN_FULL,
    OWNED,
    PLACE,
    ROW_OTHER,
    SCALE,
    SEGMENTS,
    SENDERS,
    SENT,
    SHIFT,
    SLOT,
    STAGED,
    SUMS,
    TOTAL_OTHER,
    block_at,
    lane_count,
    makers,
    slot_count,
    sum_bytes,
)
from csrc_free_ops.attention.hopper.lanes import lane_distance, turn_in_lane
from csrc_free_ops.attention.hopper.scheduler import (
    NOTES,
    head_count,
    is_dense,
    kept_number,
    kept_pointer,
    kept_stride,
    read_note_by_warp,
)
from csrc_free_ops.tiles.hopper.memory import (
    add_tile,
    admit_kernel,
    await_kernel,
    await_turn,
    fetch_sums,
    meet_in_warp,
    pass_turn,
    put_float_pairs,
    round_rows,
    send_sums,
    sent_all,
    sent_from,
)
from csrc_free_ops.tiles.hopper.warpgroup import await_phase, barrier_arrive, barrier_sync, option, shared_base
from csrc_free_ops.tiles.masks import tiles_seeing


@gluon.constexpr_function
def stage_bytes(head_dim):
    """Of a part of dq in shared memory: of its columns in the first tensor of sums, and of the rest."""
    first = first_columns(head_dim)
    return BLOCK.value * first * 4, BLOCK.value * (head_dim - first) * 4


@gluon.jit
def stage_dq(dq, address, stage, first_row, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Strips of dq, the first of which is FIRST, to shared memory as `hopper_bwd_sums` tells, at one of SENDERS stages.

    All stages of the first columns lie at `address`, those of the rest behind them.
    """
    BYTES: gl.constexpr = stage_bytes(HEAD_DIM)
    STRIPS: gl.constexpr = first_columns(HEAD_DIM) // 8
    LAYOUT: gl.constexpr = dq[0].type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :] * 4
    begin = address + stage * BYTES[0] + rows * (BYTES[0] // BLOCK) + cols
    rest = address + SENDERS * BYTES[0] + stage * BYTES[1] + rows * (BYTES[1] // BLOCK) + cols
    for index in gl.static_range(len(dq)):
        if FIRST + index < STRIPS:
            put_float_pairs(begin + (((FIRST + index) ^ ((rows + first_row) & 3)) * 32), dq[index])
        else:
            put_float_pairs(rest + (FIRST + index - STRIPS) * 32, dq[index])


@gluon.jit
def _send_to_lane(desc, tiles, AT: gl.constexpr, head, row, position):
    """Adds columns of a part, at byte AT of `tiles`, to the second lane from `row` on, or writes them at position 0."""
    ROWS: gl.constexpr = desc.block_shape[1]
    TILE: gl.constexpr = desc.block_type.nbytes
    gl.static_assert(AT % TILE == 0 and BLOCK % ROWS == 0)
    parts = tiles._reinterpret(gl.float32, [AT // TILE + BLOCK // ROWS] + desc.block_shape, desc.layout)
    for index in gl.static_range(BLOCK // ROWS):
        tile = parts.index(AT // TILE + index)
        if position == 0:
            tma.async_copy_shared_to_global(desc, [head, row + index * ROWS, 0, 0], tile)
        else:
            add_tile(desc, [head, row + index * ROWS, 0, 0], tile)


@gluon.jit
def _round_block(
    INDEX: gl.constexpr, bars, notes, addresses, tiles, head, other, rows, line, SUMS_AT: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """dq of the block at `other`, the last part of whose sums, which begin at `line`, this warp has just sent."""
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    STRIDE: gl.constexpr = option(OPTIONS, "STRIDE_DQT")
    BYTES: gl.constexpr = stage_bytes(HEAD_DIM)
    FIRST: gl.constexpr = first_columns(HEAD_DIM)
    REST: gl.constexpr = HEAD_DIM - FIRST
    base = shared_base()
    first_at = base + SUMS_AT + INDEX * BYTES[0]
    rest_at = base + SUMS_AT + SENDERS * BYTES[0] + INDEX * BYTES[1]
    bar = base + SUMS_AT + sum_bytes(HEAD_DIM) + (FETCHED + INDEX) * 8
    sums = kept_pointer(addresses, SUMS, gl.float32)
    fetch_sums((sums + line * FIRST).to(gl.int64), first_at, rows * (FIRST * 4), bar)
    await_phase(bar, 0)
    if REST > 0:
        total = kept_number(notes, TOTAL_OTHER).to(gl.int64)
        rest = sums + total * (kept_number(notes, SEGMENTS) * HEADS * FIRST) + line * REST
        fetch_sums(rest.to(gl.int64), rest_at, rows * (REST * 4), bar)
        await_phase(bar, 1)
    dq = kept_pointer(addresses, DQ, tiles.dtype) + other.to(gl.int64) * STRIDE
    dq += head // HEADS * kept_stride(addresses, BATCH_STRIDES + 2)
    dq += head % HEADS * kept_stride(addresses, HEAD_STRIDES + 2)
    scale = kept_number(notes, SCALE).to(gl.float32, bitcast=True)
    round_rows(first_at, dq, rows, scale, BLOCK, FIRST, True, STRIDE)
    if REST > 0:
        round_rows(rest_at, dq + FIRST, rows, scale, BLOCK, REST, False, STRIDE)
    meet_in_warp()
    if REST == 0:
        # Two phases each time, so that none has to be remembered.
        mbarrier.arrive(bars.index(FETCHED + INDEX), count=1)


@gluon.jit
def _let_go(free, counter, ORDERED: gl.constexpr):
    sent_from()
    mbarrier.arrive(free, count=1)
    if ORDERED:
        pass_turn(counter.to(gl.int64))


@gluon.jit
def send(INDEX: gl.constexpr, told, bars, lane, SUMS_AT: gl.constexpr, OPTIONS: gl.constexpr):
    """Adds the consumers' parts of dq to those of other programs, each in its turn; SENDERS warps do so in turns.

    With ROUNDS the last part of a block's is followed by dq itself: its sum comes back, and is rounded.
    """
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    ORDERED: gl.constexpr = option(OPTIONS, "ORDERED")
    OWN_STAGES: gl.constexpr = option(OPTIONS, "OWN_STAGES")
    ROUND: gl.constexpr = option(OPTIONS, "ROUND")
    ORDER: gl.constexpr = option(OPTIONS, "ORDER")
    ROUNDS: gl.constexpr = option(OPTIONS, "ROUNDS")
    notes, addresses = told
    MAKERS: gl.constexpr = makers(HEAD_DIM)
    BYTES: gl.constexpr = stage_bytes(HEAD_DIM)
    FIRST: gl.constexpr = first_columns(HEAD_DIM)
    FIRST_AT: gl.constexpr = SUMS_AT + INDEX * BYTES[0]
    REST_AT: gl.constexpr = SUMS_AT + SENDERS * BYTES[0] + INDEX * BYTES[1]
    base = shared_base()
    lane_descs, tiles = lane
    turn = 0
    skipped = INDEX
    total = kept_number(notes, TOTAL_OTHER)
    segments = kept_number(notes, SEGMENTS)
    slots = slot_count(total, segments, ORDER)
    heads = head_count(segments, HEADS, ORDER)
    mbarrier.wait(bars.index(OWN_FULL), 0)
    if ORDERED:
        await_kernel()
        # Segments that overlap share counters, or are not found: then there is no order, and nobody waits.
        ordered = True
        if not is_dense(ORDER):
            ordered = gl.load(kept_pointer(addresses, COUNTS, gl.int32) + lane_count(ROUND) * heads * slots) == 0
    blocks = read_note_by_warp(notes, 0, BLOCKS)
    while blocks > 0:
        slot = turn % NOTES
        sent = read_note_by_warp(notes, slot, SENT)
        first = read_note_by_warp(notes, slot, FIRST_OTHER)
        row = 0
        tile = 0
        if not is_dense(ORDER):
            row = read_note_by_warp(notes, slot, ROW_OTHER)
            tile = read_note_by_warp(notes, slot, SLOT)
        head = read_note_by_warp(notes, slot, HEAD) * GROUP
        lead = read_note_by_warp(notes, slot, LEAD) if ROUND > 1 else 0
        barrier_arrive(OWN_EMPTY + turn % OWN_STAGES, MEETING + 32 * SENDERS)
        part = skipped
        while part < GROUP * blocks:
            step = part % blocks
            if step < sent:
                other = first + block_at(step, lead, blocks, HAS_RIGHT) * BLOCK
                of_head = (head + part // blocks).to(gl.int64)
                # Not the first, where there is no order.
                position = 1
                is_last = False
                counter = kept_pointer(addresses, COUNTS, gl.int32) + of_head * slots + tile + other // BLOCK
                if ORDERED:
                    # Read here: a sender has few registers.
                    own = read_note_by_warp(notes, slot, PLACE)
                    if ROUND > 1:
                        position = turn_in_lane(own, step, lead, blocks, lane_distance(total, BLOCK), ROUND)
                        counter += gl.where(step < lead, heads * slots, 0)
                    else:
                        shift = read_note_by_warp(notes, slot, SHIFT)
                        earliest, latest = tiles_seeing(
                            read_note_by_warp(notes, slot, LAST), other, shift, kept_number(notes, BEFORE),
                            kept_number(notes, AFTER), HAS_RIGHT, HAS_LEFT, OWNED, BLOCK,
                        )  # fmt: skip
                        position = own - earliest
                        is_last = own == latest
                    # Awaited while the consumers still make the part.
                    if ordered:
                        await_turn(counter.to(gl.int64), position)
                barrier_sync(STAGED + INDEX, MAKERS)
                rows = gl.minimum(read_note_by_warp(notes, slot, LENGTH) - other, BLOCK)
                line = of_head * total + row + other
                if step < lead:
                    if ROUND > 1:
                        lane_row = row + other - lane_distance(total, BLOCK) * BLOCK
                        _send_to_lane(lane_descs[0], tiles, FIRST_AT, of_head.to(gl.int32), lane_row, position)
                        if FIRST < HEAD_DIM:
                            _send_to_lane(lane_descs[1], tiles, REST_AT, of_head.to(gl.int32), lane_row, position)
                else:
                    sums = kept_pointer(addresses, SUMS, gl.float32)
                    send_sums((sums + line * FIRST).to(gl.int64), base + FIRST_AT, rows * (FIRST * 4), position)
                    if FIRST < HEAD_DIM:
                        rest = sums + total.to(gl.int64) * (heads * FIRST) + line * (HEAD_DIM - FIRST)
                        send_sums(rest.to(gl.int64), base + REST_AT, rows * ((HEAD_DIM - FIRST) * 4), position)
                if ROUNDS:
                    if is_last:
                        _round_block(INDEX, bars, notes, addresses, tiles, of_head, other, rows, line, SUMS_AT, OPTIONS)
                        mbarrier.arrive(bars.index(FREE + INDEX), count=1)
                    else:
                        _let_go(bars.index(FREE + INDEX), counter, ORDERED)
                else:
                    _let_go(bars.index(FREE + INDEX), counter, ORDERED)
            else:
                barrier_sync(STAGED + INDEX, MAKERS)
                mbarrier.arrive(bars.index(FREE + INDEX), count=1)
            part += SENDERS
        skipped = part - GROUP * blocks
        turn += 1
        mbarrier.wait(bars.index(OWN_FULL + turn % OWN_STAGES), (turn // OWN_STAGES) & 1)
        blocks = read_note_by_warp(notes, turn % NOTES, BLOCKS)
    admit_kernel()
    # Shared memory must not end before what is sent from it.
    sent_all()
