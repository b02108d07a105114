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

from csrc_free_ops.attention.hopper.bwd_dq_reduce import send, stage_dq
from csrc_free_ops.attention.hopper.bwd_producer import produce
from csrc_free_ops.attention.hopper.bwd_protocol import (
    BLOCK,
    BLOCKS,
    CONSUMERS,
    DOUT_EMPTY,
    DOUT_FULL,
    DOUT_STAGES,
    FIRST_GRADIENT,
    FREE,
    HEAD_MASKED,
    LEAD,
    MEETING,
    OTHERS,
    OWN_EMPTY,
    OWN_FULL,
    Q_EMPTY,
    Q_FULL,
    ROW_OTHER,
    ROWS,
    SCORED,
    SECOND_GRADIENT,
    SEEN_HIGH,
    SEEN_LOW,
    SENDERS,
    SENT,
    STAGED,
    TAIL_MASKED,
    V_EMPTY,
    WORD_BYTES,
    arrivals,
    in_turns,
    makers,
    sum_bytes,
    sums_at,
    tile_columns,
    tile_count,
)
from csrc_free_ops.attention.hopper.scheduler import (
    NOTE,
    NOTES,
    POINTERS,
    boundaries,
    has_one_segment,
    is_dense,
    keep,
    read_note,
)
from csrc_free_ops.tiles.hopper.memory import clear_rows, flat, put_pairs, read_columns, store_rows
from csrc_free_ops.tiles.hopper.warpgroup import (
    accumulate,
    await_phase,
    barrier_arrive,
    barrier_sync,
    check_base,
    exp2,
    keep_strips,
    make_barriers,
    meet,
    multiply,
    multiply_columns,
    narrow_strips,
    option,
    scale_strips,
    shared_base,
    turn_around,
    wait_strips,
    wgmma_layout,
    widen,
    zero_strips,
)
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
            (produce, (descs, memory, bars, vectors, SUMS_AT, OPTIONS)),
            (send, (0, told, bars, lane, SUMS_AT, OPTIONS)),
            (send, (1, told, bars, lane, SUMS_AT, OPTIONS)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
