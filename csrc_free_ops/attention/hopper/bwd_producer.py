"""The producer of the Hopper backward: draws tiles, says what others must know of each, and brings what they read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_free_ops.attention.hopper.bwd_protocol import (
    AFTER,
    BATCH_STRIDES,
    BEFORE,
    BLOCK,
    BLOCKS,
    CU_OTHER,
    CU_OWN,
    DELTA,
    DOUT_EMPTY,
    DOUT_FULL,
    DOUT_STAGES,
    FIRST_GRADIENT,
    FIRST_OTHER,
    FIRST_OTHERS,
    FIRST_OWN,
    HEAD,
    HEAD_MASKED,
    HEAD_STRIDES,
    LAST,
    LEAD,
    LENGTH,
    LSE,
    MEETING,
    OTHERS,
    OWN_EMPTY,
    OWN_FULL,
    OWNED,
    PLACE,
    Q_EMPTY,
    Q_FULL,
    ROW_BYTES,
    ROW_OTHER,
    ROWS,
    SEEN_HIGH,
    SEEN_LOW,
    SEGMENTS,
    SENDERS,
    SENT,
    SHIFT,
    SLOT,
    TAIL_MASKED,
    TICKET,
    TOTAL_OTHER,
    TOTAL_OWN,
    V_EMPTY,
    WORK,
    block_at,
    lse_to_subtract,
    sum_bytes,
    tile_columns,
    tile_count,
)
from csrc_free_ops.attention.hopper.lanes import lane_distance, lead_of
from csrc_free_ops.attention.hopper.scheduler import (
    CACHED,
    CACHED_OF_ONE,
    NOTES,
    deal,
    draw_in_order,
    has_one_segment,
    head_count,
    is_dense,
    is_inside,
    kept_number,
    kept_pointer,
    kept_stride,
    place,
    rows_of,
    write_note,
)
from csrc_free_ops.tiles.hopper.memory import await_kernel, load_blocks
from csrc_free_ops.tiles.hopper.warpgroup import barrier_sync, made_anew, option, shared_base, tell, turn_around
from csrc_free_ops.tiles.masks import block_span


@gluon.jit
def _kept_boundaries(notes, addresses, NUMBERS: gl.constexpr, POINTER: gl.constexpr, ORDER: gl.constexpr):
    if has_one_segment(ORDER):
        return kept_number(notes, NUMBERS), kept_number(notes, NUMBERS + 1)
    elif is_dense(ORDER):
        return 0, 0
    else:
        return kept_pointer(addresses, POINTER, gl.int32)


@gluon.jit
def produce(descs, memory, bars, vectors, SUMS_AT: gl.constexpr, OPTIONS: gl.constexpr):
    """Draws tiles, tells the others of each, and loads what they read: `own` rows are keys, the others queries."""
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    ORDER: gl.constexpr = option(OPTIONS, "ORDER")
    OWN_STAGES: gl.constexpr = option(OPTIONS, "OWN_STAGES")
    ORDERED: gl.constexpr = option(OPTIONS, "ORDERED")
    ROUND: gl.constexpr = option(OPTIONS, "ROUND")
    STRIDES: gl.constexpr = (option(OPTIONS, "STRIDE_DKT"), option(OPTIONS, "STRIDE_DVT"))
    FOLDED: gl.constexpr = option(OPTIONS, "FOLDED")
    MEMBERS: gl.constexpr = option(OPTIONS, "MEMBERS")
    own_descs, q_desc, dout_desc = descs
    tiles, notes, addresses = memory
    lses, deltas = vectors
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    STAGE_BYTES: gl.constexpr = TILES * tile_columns(HEAD_DIM) * BLOCK * 2
    FIRST_STAGE: gl.constexpr = OWN_STAGES * 4 * TILES
    FIRST_DOUT: gl.constexpr = FIRST_STAGE + STAGES * TILES
    K_HEADS: gl.constexpr = HEADS // GROUP
    RESIDENT: gl.constexpr = CACHED_OF_ONE if has_one_segment(ORDER) and ORDERED else CACHED
    # No head goes alone: its tiles would wait for each other's turns.
    NEVER: gl.constexpr = 2**31 - 1
    bars_at = shared_base() + SUMS_AT + sum_bytes(HEAD_DIM)
    heads = head_count(kept_number(notes, SEGMENTS), K_HEADS, ORDER)
    num_tiles, dealt = deal(
        _kept_boundaries(notes, addresses, FIRST_OWN, CU_OWN, ORDER), kept_number(notes, SEGMENTS),
        kept_number(notes, TOTAL_OWN), heads, 2, ORDER,
    )  # fmt: skip
    write_note(notes, NOTES, WORK, num_tiles * heads)
    q_stage = 0
    stage = 0
    loaded = 0
    count = 0
    work = draw_in_order(kept_pointer(addresses, TICKET, gl.int32), kept_number(notes, WORK))
    while work < kept_number(notes, WORK):
        num_segments = kept_number(notes, SEGMENTS)
        head, segment, start, length, unit, _ = place(
            work, num_tiles, dealt, _kept_boundaries(notes, addresses, FIRST_OWN, CU_OWN, ORDER), num_segments,
            kept_number(notes, TOTAL_OWN), head_count(num_segments, K_HEADS, ORDER), 2, ORDER,
            RESIDENT // (GROUP * HEAD_DIM * ROW_BYTES), NEVER,
        )  # fmt: skip
        cu_other = _kept_boundaries(notes, addresses, FIRST_OTHERS, CU_OTHER, ORDER)
        other_start, other_length = rows_of(cu_other, segment, num_segments, kept_number(notes, TOTAL_OTHER), ORDER)
        other_length = gl.where(is_inside(segment, num_segments), other_length, 0)
        if unit * BLOCK < length:
            first = unit * BLOCK
            rows = gl.minimum(OWNED, length - first)
            shift = other_length - length
            before = kept_number(notes, BEFORE)
            after = kept_number(notes, AFTER)
            low, full_low, full_high, high = block_span(
                first, first + rows - 1, shift, before, after, other_length, HAS_RIGHT, HAS_LEFT, BLOCK
            )
            sent = gl.maximum((high - low + BLOCK - 1) // BLOCK, 0)
            blocks = gl.maximum(sent, 1)
            lead = 0
            if ROUND > 1:
                lead = lead_of(unit // 2, blocks, lane_distance(kept_number(notes, TOTAL_OTHER), BLOCK), ROUND)
            slot = count % NOTES
            own_stage = count % OWN_STAGES
            own_head = head // MEMBERS
            of_k = (kept_number(notes, TOTAL_OWN), K_HEADS // MEMBERS, FOLDED & 2)
            of_v = (kept_number(notes, TOTAL_OWN), K_HEADS // MEMBERS, FOLDED & 4)
            if OWN_STAGES == 1:
                if count > 0:
                    barrier_sync(V_EMPTY, MEETING)
                mbarrier.expect(bars.index(OWN_FULL + 1), 2 * STAGE_BYTES)
                v_bar = bars.index(OWN_FULL + 1)
                load_blocks(own_descs[1], start + first, own_head, of_v, v_bar, tiles, 2 * TILES, TILES, 2)
            if count >= OWN_STAGES:
                barrier_sync(OWN_EMPTY + own_stage, MEETING + 32 * SENDERS)
            bar = bars.index(OWN_FULL + own_stage)
            if OWN_STAGES > 1:
                load_blocks(own_descs[0], start + first, own_head, of_k, bar, tiles, own_stage * 4 * TILES, TILES, 2)
                place_of_v = (own_stage * 4 + 2) * TILES
                load_blocks(own_descs[1], start + first, own_head, of_v, bar, tiles, place_of_v, TILES, 2)
            write_note(notes, slot, BLOCKS, blocks)
            write_note(notes, slot, SENT, sent)
            write_note(notes, slot, OTHERS, gl.minimum(high, other_length) - low)
            if HAS_LEFT or HAS_RIGHT:
                write_note(notes, slot, HEAD_MASKED, blocks - (full_low - low) // BLOCK)
            elif ROUND > 1:
                write_note(notes, slot, LEAD, lead)
            write_note(notes, slot, TAIL_MASKED, blocks - (full_high - low) // BLOCK)
            write_note(notes, slot, SEEN_LOW, first + shift - low - before)
            write_note(notes, slot, SEEN_HIGH, first + shift - low + after)
            write_note(notes, slot, ROWS, rows)
            write_note(notes, slot, HEAD, head)
            write_note(notes, slot, PLACE, unit // 2)
            write_note(notes, slot, FIRST_OTHER, low)
            write_note(notes, slot, ROW_OTHER, other_start)
            write_note(notes, slot, LENGTH, other_length)
            if is_dense(ORDER):
                write_note(notes, slot, SLOT, 0)
            else:
                write_note(notes, slot, SLOT, other_start // BLOCK + segment)
            write_note(notes, slot, SHIFT, shift)
            write_note(notes, slot, LAST, (length - 1) // OWNED)
            own_row = (start + first).to(gl.int64)
            for index in gl.static_range(2):
                gradient = kept_pointer(addresses, FIRST_GRADIENT + index, tiles.dtype) + own_row * STRIDES[index]
                if is_dense(ORDER):
                    gradient += head // K_HEADS * kept_stride(addresses, BATCH_STRIDES + index)
                    gradient += head % K_HEADS * kept_stride(addresses, HEAD_STRIDES + index)
                else:
                    gradient += head * HEAD_DIM
                write_note(addresses, slot, FIRST_GRADIENT + index, gradient.to(gl.int64))
            if OWN_STAGES == 1:
                load_blocks(own_descs[0], start + first, own_head, of_k, bar, tiles, own_stage * 4 * TILES, TILES, 2)
            mbarrier.expect(bar, (4 if OWN_STAGES > 1 else 2) * STAGE_BYTES)
            tell(bars_at + (OWN_FULL + own_stage) * 8)
            for member in range(GROUP):
                other_head = head * GROUP + member
                of_q = (kept_number(notes, TOTAL_OTHER), HEADS, FOLDED & 1)
                of_dout = (kept_number(notes, TOTAL_OTHER), HEADS, FOLDED & 8)
                for step in range(blocks):
                    other = low + block_at(step, lead, blocks, HAS_RIGHT) * BLOCK
                    if loaded >= STAGES:
                        barrier_sync(Q_EMPTY + q_stage, MEETING)
                    q_bar = bars.index(Q_FULL + q_stage)
                    mbarrier.expect(q_bar, STAGE_BYTES)
                    place_of_q = FIRST_STAGE + q_stage * TILES
                    load_blocks(q_desc, other_start + other, other_head, of_q, q_bar, tiles, place_of_q, TILES, 1)
                    local = made_anew(gl.arange(0, BLOCK, gl.BlockedLayout([2], [32], [1], [0])))
                    inside = other + local < other_length
                    place_of_row = other_head.to(gl.int64) * kept_number(notes, TOTAL_OTHER) + other_start + other
                    lse_ptr = kept_pointer(addresses, LSE, gl.float32) + place_of_row
                    lse = gl.load(lse_ptr + local, mask=inside, other=float("inf"))
                    if loaded == 0:
                        await_kernel()
                    delta_ptr = kept_pointer(addresses, DELTA, gl.float32) + place_of_row
                    delta = gl.load(delta_ptr + local, mask=inside, other=0.0)
                    if loaded >= DOUT_STAGES:
                        barrier_sync(DOUT_EMPTY + stage, MEETING)
                    bar = bars.index(DOUT_FULL + stage)
                    mbarrier.expect(bar, STAGE_BYTES)
                    place_of_dout = FIRST_DOUT + stage * TILES
                    load_blocks(
                        dout_desc, other_start + other, other_head, of_dout, bar, tiles, place_of_dout, TILES, 1
                    )
                    lses.index(q_stage).store(lse_to_subtract(lse))
                    deltas.index(q_stage).store(delta)
                    tell(bars_at + (Q_FULL + q_stage) * 8)
                    loaded += 1
                    stage, _ = turn_around(stage, DOUT_STAGES)
                    q_stage, _ = turn_around(q_stage, STAGES)
            count += 1
        work = draw_in_order(kept_pointer(addresses, TICKET, gl.int32), kept_number(notes, WORK))
    # Nor may this kernel be done before the one that it overlaps.
    await_kernel()
    own_stage = count % OWN_STAGES
    if count >= OWN_STAGES:
        barrier_sync(OWN_EMPTY + own_stage, MEETING + 32 * SENDERS)
    write_note(notes, count % NOTES, BLOCKS, 0)
    mbarrier.arrive(bars.index(OWN_FULL + own_stage), count=1)
    tell(bars_at + (OWN_FULL + own_stage) * 8)
    if OWN_STAGES == 1:
        if count > 0:
            barrier_sync(V_EMPTY, MEETING)
    elif count > 0:
        barrier_sync(OWN_EMPTY + 1 - own_stage, MEETING + 32 * SENDERS)
    for index in gl.static_range(STAGES):
        if index < loaded:
            barrier_sync(Q_EMPTY + index, MEETING)
    for index in gl.static_range(DOUT_STAGES):
        if index < loaded:
            barrier_sync(DOUT_EMPTY + index, MEETING)
