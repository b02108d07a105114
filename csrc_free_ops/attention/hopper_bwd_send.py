"""The way of dq's parts in the Hopper backward: from a consumer's registers to shared memory, and on to the sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from csrc_free_ops.attention.hopper_bwd_notes import (
    AFTER,
    BEFORE,
    BLOCK,
    BLOCKS,
    COUNTS,
    FIRST_OTHER,
    HEAD,
    LAST,
    LEAD,
    LENGTH,
    MEETING,
    OWN_EMPTY,
    OWNED,
    PLACE,
    ROW_OTHER,
    SEGMENTS,
    SENDERS,
    SENT,
    SHIFT,
    SLOT,
    STAGED,
    SUMS,
    TOTAL_OTHER,
    lane_count,
    makers,
)
from csrc_free_ops.attention.hopper_work import NOTES, kept_number, kept_pointer, read_note_by_warp
from csrc_free_ops.tiles.hopper import barrier_arrive, barrier_sync, shared_base
from csrc_free_ops.tiles.hopper_memory import add_tile, await_turn, pass_turn, put_float_pairs, send_sums, sent_all
from csrc_free_ops.tiles.lanes import block_of_step, lane_distance, turn_in_lane
from csrc_free_ops.tiles.masks import turn_among


@gluon.jit
def stage_dq(dq, address, first_row, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Strips of dq to shared memory, row by row, in the order of columns that `hopper_bwd_sums` tells."""
    LAYOUT: gl.constexpr = dq[0].type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
    begin = address + rows * (HEAD_DIM * 4) + cols * 4
    for index in gl.static_range(len(dq)):
        if HEAD_DIM % 32 == 0:
            put_float_pairs(begin + (((FIRST + index) ^ ((rows + first_row) & 3)) * 32), dq[index])
        else:
            put_float_pairs(begin + (FIRST + index) * 32, dq[index])


@gluon.jit
def _send_to_lane(lane, INDEX: gl.constexpr, head, row, is_first, SUMS_AT: gl.constexpr):
    """Adds a part of dq to its block in the second lane, at `row` of that, or writes it there where it is the first."""
    desc, tiles = lane
    ROWS: gl.constexpr = desc.block_shape[1]
    TILE: gl.constexpr = desc.block_type.nbytes
    COUNT: gl.constexpr = BLOCK // ROWS
    parts = tiles._reinterpret(gl.float32, [SUMS_AT // TILE + SENDERS * COUNT] + desc.block_shape, desc.layout)
    for index in gl.static_range(COUNT):
        tile = parts.index(SUMS_AT // TILE + INDEX * COUNT + index)
        if is_first != 0:
            tma.async_copy_shared_to_global(desc, [head, row + index * ROWS, 0, 0], tile)
        else:
            add_tile(desc, [head, row + index * ROWS, 0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def send(INDEX: gl.constexpr, told, full, free, lane, SUMS_AT: gl.constexpr, OPTIONS: gl.constexpr):
    """Adds the consumers' parts of dq to those of other programs, each in its turn; SENDERS warps do so in turns."""
    HEAD_DIM: gl.constexpr = OPTIONS[0]
    GROUP: gl.constexpr = OPTIONS[1]
    HAS_LEFT: gl.constexpr = OPTIONS[2]
    HAS_RIGHT: gl.constexpr = OPTIONS[3]
    HEADS: gl.constexpr = OPTIONS[5]
    ORDERED: gl.constexpr = OPTIONS[8]
    OWN_STAGES: gl.constexpr = OPTIONS[9]
    ROUND: gl.constexpr = OPTIONS[10]
    notes, addresses = told
    own_full = full[0]
    MAKERS: gl.constexpr = makers(HEAD_DIM)
    source = shared_base() + SUMS_AT + INDEX * (BLOCK * HEAD_DIM * 4)
    turn = 0
    skipped = INDEX
    total = kept_number(notes, TOTAL_OTHER)
    slots = total // BLOCK + kept_number(notes, SEGMENTS) + 2
    # Segments that overlap share counters, or are not found: then there is no order, and nobody waits.
    ordered = gl.load(kept_pointer(addresses, COUNTS, gl.int32) + lane_count(ROUND) * HEADS * slots) == 0
    mbarrier.wait(own_full.index(0), 0)
    blocks = read_note_by_warp(notes, 0, BLOCKS)
    while blocks > 0:
        slot = turn % NOTES
        sent = read_note_by_warp(notes, slot, SENT)
        first = read_note_by_warp(notes, slot, FIRST_OTHER)
        length = read_note_by_warp(notes, slot, LENGTH)
        own = read_note_by_warp(notes, slot, PLACE)
        row = read_note_by_warp(notes, slot, ROW_OTHER)
        tile = read_note_by_warp(notes, slot, SLOT)
        head = read_note_by_warp(notes, slot, HEAD) * GROUP
        last = read_note_by_warp(notes, slot, LAST)
        shift = read_note_by_warp(notes, slot, SHIFT)
        lead = read_note_by_warp(notes, slot, LEAD) if ROUND > 1 else 0
        barrier_arrive(OWN_EMPTY + turn % OWN_STAGES, MEETING + 32 * SENDERS)
        part = skipped
        while part < GROUP * blocks:
            step = part % blocks
            if step < sent:
                other = first + block_of_step(step, lead, blocks) * BLOCK
                of_head = (head + part // blocks).to(gl.int64)
                address = kept_pointer(addresses, SUMS, gl.float32) + (of_head * total + row + other) * HEAD_DIM
                size = gl.minimum(length - other, BLOCK) * (HEAD_DIM * 4)
                is_first = 0
                counter = kept_pointer(addresses, COUNTS, gl.int32) + of_head * slots + tile + other // BLOCK
                if ORDERED:
                    if ROUND > 1:
                        position = turn_in_lane(own, step, lead, blocks, lane_distance(total, BLOCK), ROUND)
                        counter += gl.where(step < lead, HEADS * slots, 0)
                    else:
                        position = turn_among(
                            own, last, other, shift, kept_number(notes, BEFORE), kept_number(notes, AFTER),
                            HAS_RIGHT, HAS_LEFT, OWNED, BLOCK,
                        )  # fmt: skip
                    is_first = (position == 0).to(gl.int32)
                    # Awaited while the consumers still make the part.
                    if ordered:
                        await_turn(counter.to(gl.int64), position)
                barrier_sync(STAGED + INDEX, MAKERS)
                if ROUND == 1:
                    send_sums(address.to(gl.int64), source, size, is_first)
                elif step < lead:
                    lane_row = row + other - lane_distance(total, BLOCK) * BLOCK
                    _send_to_lane(lane, INDEX, of_head.to(gl.int32), lane_row, is_first, SUMS_AT)
                else:
                    send_sums(address.to(gl.int64), source, size, is_first)
                mbarrier.arrive(free.index(INDEX), count=1)
                if ORDERED:
                    pass_turn(counter.to(gl.int64))
            else:
                barrier_sync(STAGED + INDEX, MAKERS)
                mbarrier.arrive(free.index(INDEX), count=1)
            part += SENDERS
        skipped = part - GROUP * blocks
        turn += 1
        mbarrier.wait(own_full.index(turn % OWN_STAGES), (turn // OWN_STAGES) & 1)
        blocks = read_note_by_warp(notes, turn % NOTES, BLOCKS)
    # Shared memory must not end before what is sent from it.
    sent_all(turn)
