"""Attention backward on Hopper of few tiles: dk and dv by some programs, dq by others beside them, in Gluon.

`hopper_bwd` works scores out once, adds dq up over programs, in turns, and rounds the sums. Where keys are so few that
half of the GPU has nothing to do, that takes longer than to work scores out twice: here a program owns 128 rows of keys
or of queries, two consumer warpgroups 64 each, and goes over blocks of the others, whose scores it needs. Seven
products instead of five, but side by side; no program needs what another makes, so there are no sums, no turns, and
nothing to wait for. With own rows of a and b, and x and y of the others (k, v; q, dout; or the other way around):

    s = scale a x^T,  dp = b y^T
    p = e^(s - lse),  ds = p (dp - delta)
    of keys:     dv += p y,  dk += scale ds x
    of queries:  dq += scale ds x

lse and delta belong to queries: those of own rows stay in registers, those of the others come block by block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from csrc_free_ops.attention.hopper.bwd_protocol import BLOCK, MEETING, OWNED, lse_to_subtract, tile_columns, tile_count
from csrc_free_ops.attention.hopper.scheduler import (
    NOTE,
    NOTES,
    POINTERS,
    boundaries,
    head_count,
    keep,
    read_note,
    rows_of,
)
from csrc_free_ops.tiles.hopper.memory import await_kernel, clear_rows, flat, load_blocks, read_columns, store_rows
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
    narrow_strips,
    option,
    scale_strips,
    shared_base,
    tell,
    turn_around,
    wait_strips,
    wgmma_layout,
    zero_strips,
)
from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.scores import LOG2E

# Blocks of the others in shared memory, and the named barriers at which consumers let them go: behind Triton's own.
STAGES = gl.constexpr(4)
EMPTY = gl.constexpr(3)
# Barriers in shared memory: own rows of a and of b, and of each stage x, y, and lse and delta, which all lanes store.
A_FULL, B_FULL = gl.constexpr(0), gl.constexpr(1)
X_FULL, Y_FULL, VECTORS_FULL = (gl.constexpr(2 + kind * STAGES.value) for kind in range(3))
# Where results begin, dk or dq and dv; behind them how many rows of the tile there are, where in the segment the first
# one is, and the segment's length.
STORED, POSITION, LENGTH = (gl.constexpr(2 + field) for field in range(3))
ARRIVALS = gl.constexpr((1,) * VECTORS_FULL.value + (32,) * STAGES.value)


@gluon.jit
def _span(on_keys, first, length, other_length, bounds, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """`block_span` of the others that own rows from position `first` on see; of no rows none."""
    left, right = bounds
    lowest = gl.maximum(first, 0)
    highest = gl.minimum(first + OWNED, length) - 1
    shift = other_length - length
    of_queries = block_span(lowest, highest, shift, left, right, other_length, HAS_LEFT, HAS_RIGHT, BLOCK)
    of_keys = block_span(lowest, highest, shift, right, left, other_length, HAS_RIGHT, HAS_LEFT, BLOCK)
    span = ()
    for index in gl.static_range(4):
        span = span + (gl.where(on_keys, of_keys[index], of_queries[index]),)
    low, full_low, full_high, high = span
    return low, full_low, full_high, gl.where(highest >= lowest, high, low)


@gluon.jit
def _mask(p, begin, limit, rows, shift, bounds, ON_KEYS: gl.constexpr, OPTIONS: gl.constexpr):
    """p [64, BLOCK], of others from `begin` on, 0 from `limit` on and where own rows do not see them."""
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    LAYOUT: gl.constexpr = p[0].type.layout
    left, right = bounds
    seen_parts = ()
    for index in gl.static_range(len(p)):
        cols = begin + index * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
        seen = (cols < limit) & (rows == rows)
        if HAS_LEFT:
            seen = seen & ((cols <= rows + (shift + left)) if ON_KEYS else (cols >= rows + (shift - left)))
        if HAS_RIGHT:
            seen = seen & ((cols >= rows + (shift - right)) if ON_KEYS else (cols <= rows + (shift + right)))
        seen_parts = seen_parts + (gl.where(seen, p[index], 0.0),)
    return seen_parts


@gluon.jit
def _produce(ON_KEYS: gl.constexpr, descs, memory, vectors, place, statistics, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    FOLDED: gl.constexpr = option(OPTIONS, "FOLDED")
    q_desc, k_desc, v_desc, dout_desc = descs
    tiles, bars = memory
    lses, deltas = vectors
    head, first, other_start, other_length, low, high = place
    lse_ptr, delta_ptr, total_q, total_k = statistics
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    STAGE_BYTES: gl.constexpr = TILES * tile_columns(HEAD_DIM) * BLOCK * 2
    BARS_AT: gl.constexpr = (4 + 2 * STAGES) * STAGE_BYTES
    HEADS_OVER: gl.constexpr = GROUP if ON_KEYS else 1
    if ON_KEYS:
        a_desc, b_desc, x_desc, y_desc = k_desc, v_desc, q_desc, dout_desc
        of_a = (total_k, HEADS // GROUP, FOLDED & 2)
        of_b = (total_k, HEADS // GROUP, FOLDED & 4)
        of_x = (total_q, HEADS, FOLDED & 1)
        of_y = (total_q, HEADS, FOLDED & 8)
        first_head = head * GROUP
    else:
        a_desc, b_desc, x_desc, y_desc = q_desc, dout_desc, k_desc, v_desc
        of_a = (total_q, HEADS, FOLDED & 1)
        of_b = (total_q, HEADS, FOLDED & 8)
        of_x = (total_k, HEADS // GROUP, FOLDED & 2)
        of_y = (total_k, HEADS // GROUP, FOLDED & 4)
        first_head = head // GROUP
    vectors_full = shared_base() + BARS_AT + VECTORS_FULL * 8
    mbarrier.expect(bars.index(A_FULL), 2 * STAGE_BYTES)
    mbarrier.expect(bars.index(B_FULL), 2 * STAGE_BYTES)
    load_blocks(a_desc, first, head, of_a, bars.index(A_FULL), tiles, 0, TILES, 2)
    load_blocks(b_desc, first, head, of_b, bars.index(B_FULL), tiles, 2 * TILES, TILES, 2)
    stage = 0
    loaded = 0
    for member in range(HEADS_OVER):
        other_head = first_head + member
        for other in range(low, high, BLOCK):
            if loaded >= STAGES:
                barrier_sync(EMPTY + stage, MEETING)
            row = other_start + other
            mbarrier.expect(bars.index(X_FULL + stage), STAGE_BYTES)
            x_bar = bars.index(X_FULL + stage)
            load_blocks(x_desc, row, other_head, of_x, x_bar, tiles, (4 + stage) * TILES, TILES, 1)
            mbarrier.expect(bars.index(Y_FULL + stage), STAGE_BYTES)
            place_of_y = (4 + STAGES + stage) * TILES
            y_bar = bars.index(Y_FULL + stage)
            load_blocks(y_desc, row, other_head, of_y, y_bar, tiles, place_of_y, TILES, 1)
            if ON_KEYS:
                local = gl.arange(0, BLOCK, gl.BlockedLayout([2], [32], [1], [0]))
                inside = other + local < other_length
                line = other_head.to(gl.int64) * total_q + row
                lse = gl.load(lse_ptr + line + local, mask=inside, other=float("inf"))
                lses.index(stage).store(lse_to_subtract(lse))
                if loaded == 0:
                    await_kernel()
                deltas.index(stage).store(gl.load(delta_ptr + line + local, mask=inside, other=0.0))
                tell(vectors_full + stage * 8)
            loaded += 1
            stage, _ = turn_around(stage, STAGES)
    # This kernel may not be done before the one that it overlaps.
    await_kernel()
    for index in gl.static_range(STAGES):
        if index < loaded:
            barrier_sync(EMPTY + index, MEETING)


@gluon.jit
def _consume(
    INDEX: gl.constexpr, ON_KEYS: gl.constexpr, vectors, place, bounds, statistics, results, scale,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    STRIDE_DKT: gl.constexpr = option(OPTIONS, "STRIDE_DKT")
    STRIDE_DVT: gl.constexpr = option(OPTIONS, "STRIDE_DVT")
    STRIDE_DQT: gl.constexpr = option(OPTIONS, "STRIDE_DQT")
    DTYPE: gl.constexpr = option(OPTIONS, "DTYPE")
    lses, deltas = vectors
    head, first, start, length, shift, low, full_low, full_high, high = place
    lse_ptr, delta_ptr, total_q, total_k = statistics
    COLUMNS: gl.constexpr = tile_columns(HEAD_DIM)
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    STRIPS: gl.constexpr = HEAD_DIM // 8
    STAGE_BYTES: gl.constexpr = TILES * COLUMNS * BLOCK * 2
    LAYOUT: gl.constexpr = wgmma_layout(8)
    base = shared_base()
    a = base + INDEX * STAGE_BYTES
    b = base + (2 + INDEX) * STAGE_BYTES
    x = base + 4 * STAGE_BYTES
    y = x + STAGES * STAGE_BYTES
    bars_at = y + STAGES * STAGE_BYTES
    factor = scale * LOG2E
    row = first + INDEX * BLOCK + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    inside = (row >= start) & (row < start + length)
    blocks = (high - low + BLOCK - 1) // BLOCK
    tail = high - low - (blocks - 1) * BLOCK
    remaining = blocks
    sums = zero_strips(STRIPS)
    if ON_KEYS:
        remaining = GROUP * blocks
        dv = zero_strips(STRIPS)
    else:
        line = head.to(gl.int64) * total_q + row
        own_lse = lse_to_subtract(gl.load(lse_ptr + line, mask=inside, other=float("inf")))[:, None]
        await_kernel()
        own_delta = gl.load(delta_ptr + line, mask=inside, other=0.0)[:, None]
    stage = 0
    phase = 0
    await_phase(bars_at + A_FULL * 8, 0)
    await_phase(bars_at + B_FULL * 8, 0)
    while remaining > 0:
        ends = ((remaining - 1) % blocks == 0) & (tail < BLOCK)
        await_phase(bars_at + (X_FULL + stage) * 8, phase)
        if ends:
            clear_rows(x + stage * STAGE_BYTES, tail, BLOCK, COLUMNS, TILES)
            await_phase(bars_at + (Y_FULL + stage) * 8, phase)
            clear_rows(y + stage * STAGE_BYTES, tail, BLOCK, COLUMNS, TILES)
            fence_async_shared()
            meet()
        s = multiply(a, x + stage * STAGE_BYTES, BLOCK // 8, HEAD_DIM, COLUMNS, DTYPE)
        await_phase(bars_at + (Y_FULL + stage) * 8, phase)
        dp = multiply(b, y + stage * STAGE_BYTES, BLOCK // 8, HEAD_DIM, COLUMNS, DTYPE)
        lse = ()
        delta = ()
        if ON_KEYS:
            await_phase(bars_at + (VECTORS_FULL + stage) * 8, phase)
            of_columns = read_columns(lses.index(stage), BLOCK // 8)
            delta_of_columns = read_columns(deltas.index(stage), BLOCK // 8)
            for index in gl.static_range(BLOCK // 8):
                lse = lse + (of_columns[index][None, :],)
                delta = delta + (delta_of_columns[index][None, :],)
        else:
            for _ in gl.static_range(BLOCK // 8):
                lse = lse + (own_lse,)
                delta = delta + (own_delta,)
        s = wait_strips(s, 1)
        p = ()
        for index in gl.static_range(BLOCK // 8):
            p = p + (exp2(s[index] * factor - lse[index]),)
        if HAS_LEFT or HAS_RIGHT:
            begin = low + (blocks - 1 - (remaining - 1) % blocks) * BLOCK
            if (begin < full_low) | (begin >= full_high):
                rows = (row - start)[:, None]
                p = _mask(p, begin, high, rows, shift, bounds, ON_KEYS, OPTIONS)
        if ON_KEYS:
            dv = accumulate(dv, narrow_strips(p, DTYPE), y + stage * STAGE_BYTES, BLOCK, COLUMNS)
            dp = wait_strips(dp, 1)
        else:
            if not (HAS_LEFT or HAS_RIGHT):
                if ends:
                    # Of the others' rows past the segment's end no lse tells that they weigh nothing.
                    p = _mask(p, 0, tail, row[:, None], 0, bounds, ON_KEYS, OPTIONS)
            dp = wait_strips(dp, 0)
        ds = ()
        for index in gl.static_range(BLOCK // 8):
            ds = ds + (p[index] * (dp[index] - delta[index]),)
        sums = accumulate(sums, narrow_strips(ds, DTYPE), x + stage * STAGE_BYTES, BLOCK, COLUMNS)
        if ON_KEYS:
            dv = wait_strips(dv, 1)
        sums = wait_strips(sums, 0)
        barrier_arrive(EMPTY + stage, MEETING)
        stage, wrapped = turn_around(stage, STAGES)
        phase = phase ^ wrapped
        remaining -= 1
    stored = read_note(results, NOTES, STORED).to(gl.int32) - INDEX * BLOCK
    first_address = read_note(results, NOTES, 0)
    position = read_note(results, NOTES, POSITION).to(gl.int32) + INDEX * BLOCK
    own_positions = position + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    inside = (own_positions >= 0) & (own_positions < read_note(results, NOTES, LENGTH).to(gl.int32))
    sums = keep_strips(scale_strips(sums, scale), inside[:, None])
    if ON_KEYS:
        dv = keep_strips(dv, inside[:, None])
        store_rows(first_address + INDEX * BLOCK * STRIDE_DKT * 2, sums, stored, DTYPE, STRIDE_DKT)
        store_rows(read_note(results, NOTES, 1) + INDEX * BLOCK * STRIDE_DVT * 2, dv, stored, DTYPE, STRIDE_DVT)
    else:
        store_rows(first_address + INDEX * BLOCK * STRIDE_DQT * 2, sums, stored, DTYPE, STRIDE_DQT)


@gluon.jit
def _produce_either(on_keys, descs, memory, vectors, place, statistics, OPTIONS: gl.constexpr):
    if on_keys != 0:
        _produce(True, descs, memory, vectors, place, statistics, OPTIONS)
    else:
        _produce(False, descs, memory, vectors, place, statistics, OPTIONS)


@gluon.jit
def _consume_either(
    INDEX: gl.constexpr, on_keys, vectors, place, bounds, statistics, results, scale, OPTIONS: gl.constexpr
):  # fmt: skip
    if on_keys != 0:
        _consume(INDEX, True, vectors, place, bounds, statistics, results, scale, OPTIONS)
    else:
        _consume(INDEX, False, vectors, place, bounds, statistics, results, scale, OPTIONS)


@gluon.jit
def _address(ptr, batch, head, row, stride_batch, stride_head, STRIDE: gl.constexpr):
    """Of a row of a gradient."""
    offset = batch.to(gl.int64) * stride_batch + head.to(gl.int64) * stride_head + row.to(gl.int64) * STRIDE
    return (ptr + offset).to(gl.int64)


@gluon.jit
def _attention_bwd_apart_kernel(
    q_desc, k_desc, v_desc, dout_desc,
    lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr, dq_ptr,
    stride_dkb, stride_dvb, stride_dqb, stride_dkh, stride_dvh, stride_dqh,
    total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, STRIDE_DKT: gl.constexpr, STRIDE_DVT: gl.constexpr, STRIDE_DQT: gl.constexpr,
    FOLDED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of 128 keys times key heads, then of 128 queries times heads): dq, dk and dv of one segment, or of
    a batch, whose heads are all one segment's.

    ORDER is SINGLE or DENSE; sizes of a batch are as in the forward, and the last bit of FOLDED is dout's. Tiles are
    those of all rows, in the segment or not; rows outside have gradients of 0. The kernel begins while the one before
    it, which makes delta, ends; all but delta must have been there before that one went on.
    """
    COLUMNS: gl.constexpr = tile_columns(HEAD_DIM)
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    TILE_BYTES: gl.constexpr = BLOCK * COLUMNS * 2
    DTYPE: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HELD: gl.constexpr = (4 + 2 * STAGES) * TILES
    BARS_AT: gl.constexpr = HELD * TILE_BYTES
    K_HEADS: gl.constexpr = HEADS // GROUP
    # Loaded now, they are there when they are asked for.
    cu_q = boundaries(cu_q_ptr, ORDER)
    cu_k = boundaries(cu_k_ptr, ORDER)
    # The largest, and first: tiles, and barriers behind them.
    whole = gl.allocate_shared_memory(DTYPE, [BARS_AT // 256 + 1, 128], VECTOR)
    tiles = whole._reinterpret(DTYPE, [HELD] + q_desc.block_shape, q_desc.layout)
    check_base(flat(tiles.index(0)))
    bars = whole.index(BARS_AT // 256)._reinterpret(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    make_barriers(shared_base() + BARS_AT, ARRIVALS)
    fence_async_shared()
    vectors = (
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], VECTOR),
    )
    OPTIONS: gl.constexpr = (
        "HEAD_DIM", HEAD_DIM, "GROUP", GROUP, "HEADS", HEADS, "DTYPE", DTYPE, "HAS_LEFT", HAS_LEFT,
        "HAS_RIGHT", HAS_RIGHT, "FOLDED", FOLDED,
        "STRIDE_DKT", STRIDE_DKT, "STRIDE_DVT", STRIDE_DVT, "STRIDE_DQT", STRIDE_DQT,
    )  # fmt: skip
    q_start, q_length = rows_of(cu_q, 1, 1, total_q, ORDER)
    k_start, k_length = rows_of(cu_k, 1, 1, total_k, ORDER)
    program = gl.program_id(0)
    k_heads = head_count(num_segments, K_HEADS, ORDER)
    key_programs = (total_k + OWNED - 1) // OWNED * k_heads
    on_keys = program < key_programs
    own = gl.where(on_keys, program, program - key_programs)
    heads = gl.where(on_keys, k_heads, k_heads * GROUP)
    head = own % heads
    first = own // heads * OWNED
    start, length = gl.where(on_keys, k_start, q_start), gl.where(on_keys, k_length, q_length)
    other_start, other_length = gl.where(on_keys, q_start, k_start), gl.where(on_keys, q_length, k_length)
    bounds = (window_left, window_right)
    low, full_low, full_high, high = _span(
        on_keys, first - start, length, other_length, bounds, HAS_LEFT, HAS_RIGHT
    )  # fmt: skip
    place_of_rows = (head, first, start, length, other_length - length, low, full_low, full_high, high)
    place_of_others = (head, first, other_start, other_length, low, high)
    statistics = (lse_ptr, delta_ptr, total_q, total_k)
    of_batch = gl.where(on_keys, K_HEADS, HEADS)
    batch, within = head // of_batch, head % of_batch
    dk_address = _address(dk_ptr, batch, within, first, stride_dkb, stride_dkh, STRIDE_DKT)
    dq_address = _address(dq_ptr, batch, within, first, stride_dqb, stride_dqh, STRIDE_DQT)
    dv_address = _address(dv_ptr, batch, within, first, stride_dvb, stride_dvh, STRIDE_DVT)
    # Not in registers, of which wide heads leave none.
    results = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    rows_from_first = gl.where(on_keys, total_k, total_q) - first
    keep(results, (gl.where(on_keys, dk_address, dq_address), dv_address, rows_from_first, first - start, length))
    descs = (q_desc, k_desc, v_desc, dout_desc)
    either = on_keys.to(gl.int32)
    gl.warp_specialize(
        [
            (_consume_either, (0, either, vectors, place_of_rows, bounds, statistics, results, scale, OPTIONS)),
            (_consume_either, (1, either, vectors, place_of_rows, bounds, statistics, results, scale, OPTIONS)),
            (_produce_either, (either, descs, (tiles, bars), vectors, place_of_others, statistics, OPTIONS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
