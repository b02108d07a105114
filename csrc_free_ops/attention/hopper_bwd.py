"""Attention backward on Hopper, in Gluon: the maths of `portable_bwd` in one pass, five products instead of seven.

A program owns 128 keys of a key head, two consumer warpgroups 64 each, and goes over the queries that see them. dk and
dv stay in registers. dq is a sum over programs: it is added up in fp32 in global memory, by two warps of their own,
which send the blocks' parts from shared memory in turns while the consumers go on (`hopper_bwd_sums` gets the memory
ready and rounds it). A consumer's step on a block of 64 queries, all scores transposed, [keys, queries]:

    issue  s = k q^T
    issue  dp = v dout^T
    wait s;  p = 2^(s - lse)                        under dp
    issue  dv += p dout
    wait dp;  ds = p (dp - delta), to registers and to shared memory
    issue  dk += ds q
    issue  dq = ds^T k                              over the keys of both warpgroups
    wait dq;  dq to shared memory, for a sending warp

The warpgroups make dq in turns, of every other block: a product of two shared operands of 64 columns takes 32 cycles,
two of half of them 24 each. Where wider sums leave no registers for that, each makes some of the columns of every one.

A warpgroup says when its ds is there and goes on until it needs the other's. So the two come apart, and one multiplies
while the other exponentiates. No product is under way across the loop's end, which ptxas would answer by waiting for
each of them at once.

ORDERED fixes the order in which programs add, so that the bits are the same every time. A part is sent when a counter
says that those before it have arrived, and those before it belong to programs that drew their keys earlier
(`hopper_work.draw_in_order`): the earliest that is not done yet waits for nobody, so no set of running programs can
wait in a circle, however few of them the GPU has room for. Boundaries that fall, which no caller may pass, leave no
such order; then none is kept (`hopper_bwd_sums`). Keys are added from the first to the last. With a bound on later keys
a tile goes over its queries from the last to the first, so that the tiles before it, which see more, come to a block
before it does; and tiles that take long come first, which leaves little to do at the end. Of one segment without bounds
all tiles begin at once; where ROUND is more than 1 each does at another block, and sums have a second lane (`lanes`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from csrc_free_ops.attention.hopper_bwd_notes import (
    AFTER,
    BATCH_STRIDES,
    BEFORE,
    BLOCK,
    BLOCKS,
    CONSUMERS,
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
    FREE,
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
    SCORED,
    SECOND_GRADIENT,
    SEEN_HIGH,
    SEEN_LOW,
    SEGMENTS,
    SENDERS,
    SENT,
    SHIFT,
    SLOT,
    STAGED,
    TAIL_MASKED,
    TICKET,
    TOTAL_OTHER,
    TOTAL_OWN,
    V_EMPTY,
    WORD_BYTES,
    WORK,
    arrivals,
    block_at,
    in_turns,
    lse_to_subtract,
    makers,
    sum_bytes,
    sums_at,
    tile_columns,
    tile_count,
)
from csrc_free_ops.attention.hopper_bwd_send import send, stage_dq
from csrc_free_ops.attention.hopper_work import (
    CACHED,
    CACHED_OF_ONE,
    NOTE,
    NOTES,
    POINTERS,
    boundaries,
    deal,
    draw_in_order,
    has_one_segment,
    head_count,
    is_dense,
    is_inside,
    keep,
    kept_number,
    kept_pointer,
    kept_stride,
    place,
    read_note,
    rows_of,
    write_note,
)
from csrc_free_ops.tiles.hopper import (
    accumulate,
    await_phase,
    barrier_arrive,
    barrier_sync,
    check_base,
    exp2,
    keep_strips,
    made_anew,
    make_barriers,
    meet,
    multiply,
    multiply_columns,
    narrow_strips,
    option,
    scale_strips,
    shared_base,
    tell,
    turn_around,
    wait_strips,
    wgmma_layout,
    widen,
    zero_strips,
)
from csrc_free_ops.tiles.hopper_memory import (
    await_kernel,
    clear_rows,
    flat,
    load_blocks,
    put_pairs,
    read_columns,
    store_rows,
)
from csrc_free_ops.tiles.lanes import lane_distance, lead_of
from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.scores import LOG2E


@gluon.jit
def _mask_weights(p, notes, slot, left, row, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr):
    """p [64, BLOCK], 0 where row and column do not see each other or the column is none of the segment."""
    LAYOUT: gl.constexpr = p[0].type.layout
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    begin = (read_note(notes, slot, BLOCKS) - left) * BLOCK
    seen_parts = ()
    for index in gl.static_range(len(p)):
        cols = begin + index * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
        part = gl.where((cols < read_note(notes, slot, OTHERS)) & (rows >= 0), p[index], 0.0)
        if HAS_HIGH:
            part = gl.where(cols <= rows + read_note(notes, slot, SEEN_HIGH), part, 0.0)
        if HAS_LOW:
            part = gl.where(cols >= rows + read_note(notes, slot, SEEN_LOW), part, 0.0)
        seen_parts = seen_parts + (part,)
    return seen_parts


@gluon.jit
def _clear_tail(address, rows, HEAD_DIM: gl.constexpr):
    """Rows past a segment's end may hold anything; what they are multiplied by 0 with must be numbers."""
    clear_rows(address, rows, BLOCK, tile_columns(HEAD_DIM), tile_count(HEAD_DIM))
    fence_async_shared()
    meet()


@gluon.jit
def _kept_boundaries(notes, addresses, NUMBERS: gl.constexpr, POINTER: gl.constexpr, ORDER: gl.constexpr):
    if has_one_segment(ORDER):
        return kept_number(notes, NUMBERS), kept_number(notes, NUMBERS + 1)
    elif is_dense(ORDER):
        return 0, 0
    else:
        return kept_pointer(addresses, POINTER, gl.int32)


@gluon.jit
def _produce(descs, memory, bars, vectors, SUMS_AT: gl.constexpr, OPTIONS: gl.constexpr):
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


@gluon.jit
def _consume(INDEX: gl.constexpr, told, bars, vectors, scale, SUMS_AT: gl.constexpr, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    STRIDE_DKT: gl.constexpr = option(OPTIONS, "STRIDE_DKT")
    STRIDE_DVT: gl.constexpr = option(OPTIONS, "STRIDE_DVT")
    DTYPE: gl.constexpr = option(OPTIONS, "DTYPE")
    OWN_STAGES: gl.constexpr = option(OPTIONS, "OWN_STAGES")
    ROUND: gl.constexpr = option(OPTIONS, "ROUND")
    notes, addresses = told
    lses, deltas = vectors
    COLUMNS: gl.constexpr = tile_columns(HEAD_DIM)
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    STRIPS: gl.constexpr = HEAD_DIM // 8
    STAGE_BYTES: gl.constexpr = TILES * COLUMNS * BLOCK * 2
    DS_BYTES: gl.constexpr = 4 * WORD_BYTES
    # Beside two sums of more columns there are registers for the rounded weights alone.
    ROUNDED: gl.constexpr = HEAD_DIM > 80
    OWN: gl.constexpr = INDEX * BLOCK
    # Strips of dq that this warpgroup makes, of every block or of every other.
    IN_TURNS: gl.constexpr = in_turns(HEAD_DIM)
    MAKERS: gl.constexpr = makers(HEAD_DIM)
    HALF: gl.constexpr = (HEAD_DIM + 31) // 32 * 2
    FIRST: gl.constexpr = 0 if IN_TURNS else HALF * INDEX
    WIDE: gl.constexpr = STRIPS if IN_TURNS else HALF if INDEX == 0 else STRIPS - HALF
    FIRST_BYTE: gl.constexpr = (8 * FIRST // COLUMNS * COLUMNS * BLOCK + 8 * FIRST % COLUMNS) * 2
    base = shared_base()
    q = base + OWN_STAGES * 4 * STAGE_BYTES
    dout = q + STAGES * STAGE_BYTES
    scores = dout + DOUT_STAGES * STAGE_BYTES
    sums = base + SUMS_AT
    bars_at = sums + sum_bytes(HEAD_DIM)
    LAYOUT: gl.constexpr = wgmma_layout(8)
    lines = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    places = lines * 32 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :] * 2
    flip = ((lines >> 2) & 1) * 16 + gl.zeros([64, 8], gl.int32, LAYOUT)
    factor = scale * LOG2E
    q_stage = 0
    q_phase = 0
    passed = 0
    turn = 0
    mbarrier.wait(bars.index(OWN_FULL), 0)
    blocks = read_note(notes, 0, BLOCKS)
    while blocks > 0:
        slot = turn % NOTES
        own = base + turn % OWN_STAGES * (4 * STAGE_BYTES)
        k = own + INDEX * STAGE_BYTES
        v = own + (2 + INDEX) * STAGE_BYTES
        columns = own + FIRST_BYTE
        if OWN_STAGES == 1:
            mbarrier.wait(bars.index(OWN_FULL + 1), turn & 1)
        rows = read_note(notes, slot, ROWS) - OWN
        first_row = read_note(notes, slot, ROW_OTHER)
        if rows < BLOCK:
            clear_rows(k, rows, BLOCK, COLUMNS, TILES)
            clear_rows(v, rows, BLOCK, COLUMNS, TILES)
            fence_async_shared()
            meet()
        dk = zero_strips(STRIPS)
        dv = zero_strips(STRIPS)
        tail = read_note(notes, slot, OTHERS) - (blocks - 1) * BLOCK
        # What is `left` at the last block.
        left_at_tail = 1
        if ROUND > 1:
            lead = read_note(notes, slot, LEAD)
            left_at_tail = gl.where(lead > 0, blocks - lead + 1, 1)
        remaining = GROUP * blocks
        await_phase(bars_at + (Q_FULL + q_stage) * 8, q_phase)
        lse = read_columns(lses.index(q_stage), BLOCK // 8)
        while remaining > 0:
            left = remaining if GROUP == 1 else (remaining - 1) % blocks + 1
            if HAS_RIGHT:
                left = blocks + 1 - left
            # Of the two places for a block of dout, for ds and for dq.
            stage = passed & 1
            if (left == left_at_tail) & (tail < BLOCK):
                _clear_tail(q + q_stage * STAGE_BYTES, tail, HEAD_DIM)
            s = multiply(k, q + q_stage * STAGE_BYTES, BLOCK // 8, HEAD_DIM, COLUMNS, DTYPE)
            await_phase(bars_at + (DOUT_FULL + stage) * 8, (passed >> 1) & 1)
            if (left == left_at_tail) & (tail < BLOCK):
                _clear_tail(dout + stage * STAGE_BYTES, tail, HEAD_DIM)
            dp = multiply(v, dout + stage * STAGE_BYTES, BLOCK // 8, HEAD_DIM, COLUMNS, DTYPE)
            s = wait_strips(s, 1)
            p = ()
            for index in gl.static_range(BLOCK // 8):
                p = p + (exp2(s[index] * factor - lse[index][None, :]),)
            masked = rows < BLOCK
            if HAS_LEFT or HAS_RIGHT:
                masked = masked | (left <= read_note(notes, slot, TAIL_MASKED))
                if HAS_RIGHT:
                    masked = masked | (left > read_note(notes, slot, HEAD_MASKED))
            if masked:
                kept = ()
                for index in gl.static_range(BLOCK // 8):
                    kept = kept + (gl.where(lines < rows, p[index], 0.0),)
                p = kept
                if HAS_LEFT or HAS_RIGHT:
                    p = _mask_weights(p, notes, slot, left, OWN, HAS_RIGHT, HAS_LEFT)
            weights = narrow_strips(p, DTYPE)
            delta = read_columns(deltas.index(q_stage), BLOCK // 8)
            dv = accumulate(dv, weights, dout + stage * STAGE_BYTES, BLOCK, COLUMNS)
            dp = wait_strips(dp, 1)
            if OWN_STAGES == 1:
                if remaining == 1:
                    barrier_arrive(V_EMPTY, MEETING)
            ds = ()
            for index in gl.static_range(BLOCK // 8):
                weight = widen(weights[index]) if ROUNDED else p[index]
                ds = ds + (weight * (dp[index] - delta[index][None, :]),)
            rounded = narrow_strips(ds, DTYPE)
            at = scores + stage * (2 * DS_BYTES) + INDEX * DS_BYTES + places
            for index in gl.static_range(BLOCK // 8):
                put_pairs(at + (index // 2 * WORD_BYTES) + (flip ^ (index % 2 * 16)), rounded[index])
            fence_async_shared()
            makes = (stage == INDEX) | (not IN_TURNS)
            helps = (stage != INDEX) | (not IN_TURNS)
            # The block before's dq, which was stored after its own fence.
            if (remaining < GROUP * blocks) & helps:
                barrier_arrive(STAGED + (stage ^ 1), MAKERS)
            if helps:
                barrier_arrive(SCORED + 2 * stage + INDEX, CONSUMERS)
            dk = accumulate(dk, rounded, q + q_stage * STAGE_BYTES, BLOCK, COLUMNS)
            next_stage, wrapped = turn_around(q_stage, STAGES)
            q_phase = q_phase ^ wrapped
            # lse is loaded where no product is under way: beside those that read both operands, loads take long. After
            # the last block it is what nobody writes, and not used.
            next_lse = gl.where(remaining > 1, next_stage, STAGES)
            if makes:
                barrier_sync(SCORED + 2 * stage + 1 - INDEX, CONSUMERS)
                dq = multiply_columns(
                    scores + stage * (2 * DS_BYTES), columns, WIDE, DS_BYTES, STAGE_BYTES, COLUMNS, DTYPE
                )
                dv = wait_strips(dv, 2)
                barrier_arrive(DOUT_EMPTY + stage, MEETING)
                await_phase(bars_at + (FREE + stage) * 8, ((passed >> 1) & 1) ^ 1)
                dk = wait_strips(dk, 1)
                barrier_arrive(Q_EMPTY + q_stage, MEETING)
                if remaining > 1:
                    await_phase(bars_at + (Q_FULL + next_stage) * 8, q_phase)
                dq = wait_strips(dq, 0)
                lse = read_columns(lses.index(next_lse), BLOCK // 8)
                if IN_TURNS:
                    # None may write ds of the block after next before all have read this one's.
                    meet()
                stage_dq(dq, sums, stage, first_row, FIRST, HEAD_DIM)
            else:
                dv = wait_strips(dv, 1)
                barrier_arrive(DOUT_EMPTY + stage, MEETING)
                if remaining > 1:
                    await_phase(bars_at + (Q_FULL + next_stage) * 8, q_phase)
                dk = wait_strips(dk, 0)
                barrier_arrive(Q_EMPTY + q_stage, MEETING)
                lse = read_columns(lses.index(next_lse), BLOCK // 8)
            q_stage = next_stage
            passed += 1
            remaining -= 1
        barrier_arrive(OWN_EMPTY + turn % OWN_STAGES, MEETING + 32 * SENDERS)
        if (((passed - 1) & 1) == INDEX) | (not IN_TURNS):
            fence_async_shared()
            barrier_arrive(STAGED + ((passed - 1) & 1), MAKERS)
        dk_address = read_note(addresses, slot, FIRST_GRADIENT) + OWN * STRIDE_DKT * 2
        dv_address = read_note(addresses, slot, SECOND_GRADIENT) + OWN * STRIDE_DVT * 2
        seen = read_note(notes, slot, SENT) > 0
        store_rows(dk_address, keep_strips(scale_strips(dk, scale), seen), rows, DTYPE, STRIDE_DKT)
        store_rows(dv_address, keep_strips(dv, seen), rows, DTYPE, STRIDE_DVT)
        turn += 1
        mbarrier.wait(bars.index(OWN_FULL + turn % OWN_STAGES), (turn // OWN_STAGES) & 1)
        blocks = read_note(notes, turn % NOTES, BLOCKS)


@gluon.jit
def _attention_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, lane_desc, lane_rest_desc,
    lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, sums_ptr, counts_ptr, ticket_ptr, dk_ptr, dv_ptr, dq_ptr,
    stride_dkb, stride_dvb, stride_dqb, stride_dkh, stride_dvh, stride_dqh,
    total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, OWN_STAGES: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr, ROUND: gl.constexpr,
    STRIDE_DKT: gl.constexpr, STRIDE_DVT: gl.constexpr, STRIDE_DQT: gl.constexpr, FOLDED: gl.constexpr,
    MEMBERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs): dk, dv and the sums of dq, between the kernels of `hopper_bwd_sums`.

    ORDER is any without a cut: all tiles but the last have OWNED keys. ticket_ptr, and the sizes of a batch, are as in
    the forward; the last bit of FOLDED is dout's. With MEMBERS GROUP is 1: each of so many query heads on a key head
    has programs, dk and dv of its own.
    The kernel begins while the one before it ends, and reads what that one does not write: inputs and tickets. Before
    delta the producer waits for it, and senders before counters; nothing else is touched before delta is there. That
    one must not admit this one before it has itself awaited those before it, of which nothing here knows.
    """
    own_boundaries = boundaries(cu_k_ptr, ORDER)
    other_boundaries = boundaries(cu_q_ptr, ORDER)
    COLUMNS: gl.constexpr = tile_columns(HEAD_DIM)
    TILE_BYTES: gl.constexpr = BLOCK * COLUMNS * 2
    DTYPE: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BLOCKS_HELD: gl.constexpr = 4 * OWN_STAGES + STAGES + DOUT_STAGES
    BEFORE_SUMS: gl.constexpr = sums_at(BLOCKS_HELD * tile_count(HEAD_DIM) + 16 * WORD_BYTES // TILE_BYTES, HEAD_DIM)
    SUMS_AT: gl.constexpr = BEFORE_SUMS * TILE_BYTES
    BARS_AT: gl.constexpr = SUMS_AT + sum_bytes(HEAD_DIM)
    # The largest, and first: tiles, sums, and barriers behind them.
    whole = gl.allocate_shared_memory(DTYPE, [BARS_AT // 256 + 1, 128], VECTOR)
    tiles = whole._reinterpret(DTYPE, [BARS_AT // TILE_BYTES] + q_desc.block_shape, q_desc.layout)
    check_base(flat(tiles.index(0)))
    bars = whole.index(BARS_AT // 256)._reinterpret(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    make_barriers(shared_base() + BARS_AT, arrivals(OWN_STAGES))
    fence_async_shared()
    notes = gl.allocate_shared_memory(gl.int32, [POINTERS + NOTE, 1], VECTOR)
    addresses = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    vectors = (
        gl.allocate_shared_memory(gl.float32, [STAGES + 1, BLOCK], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], VECTOR),
    )
    OPTIONS: gl.constexpr = (
        "HEAD_DIM", HEAD_DIM, "GROUP", GROUP, "HAS_LEFT", HAS_LEFT, "HAS_RIGHT", HAS_RIGHT, "STAGES", STAGES,
        "HEADS", HEADS, "ORDER", ORDER, "DTYPE", DTYPE, "ORDERED", ORDERED, "OWN_STAGES", OWN_STAGES,
        "ROUND", ROUND, "STRIDE_DKT", STRIDE_DKT, "STRIDE_DVT", STRIDE_DVT, "FOLDED", FOLDED,
        "MEMBERS", MEMBERS, "ROUNDS", is_dense(ORDER) and ORDERED, "STRIDE_DQT", STRIDE_DQT,
    )  # fmt: skip
    descs = ((k_desc, v_desc), q_desc, dout_desc)
    # In the order of their fields.
    kept = (dk_ptr, dv_ptr, lse_ptr, delta_ptr, sums_ptr, counts_ptr, ticket_ptr)
    if is_dense(ORDER):
        kept = kept + (dq_ptr, stride_dkb, stride_dvb, stride_dqb, stride_dkh, stride_dvh, stride_dqh)
    else:
        kept = kept + (cu_k_ptr, cu_q_ptr)
    keep(addresses, kept)
    sizes = (total_k, total_q, num_segments, window_right, window_left)
    if has_one_segment(ORDER):
        sizes = sizes + own_boundaries + other_boundaries
    if is_dense(ORDER):
        sizes = sizes + (scale.to(gl.int32, bitcast=True),)
    keep(notes, sizes)
    memory = (tiles, notes, addresses)
    told = (notes, addresses)
    lane_descs = ()
    if ROUND > 1:
        lane_descs = (lane_desc,)
        if lane_rest_desc is not None:
            lane_descs = (lane_desc, lane_rest_desc)
    lane = (lane_descs, tiles)
    gl.warp_specialize(
        [
            (_consume, (0, told, bars, vectors, scale, SUMS_AT, OPTIONS)),
            (_consume, (1, told, bars, vectors, scale, SUMS_AT, OPTIONS)),
            (_produce, (descs, memory, bars, vectors, SUMS_AT, OPTIONS)),
            (send, (0, told, bars, lane, SUMS_AT, OPTIONS)),
            (send, (1, told, bars, lane, SUMS_AT, OPTIONS)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
