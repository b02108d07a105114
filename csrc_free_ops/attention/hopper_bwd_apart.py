"""Attention backward on Hopper for one short segment: dk and dv by some programs, dq by others beside them, in Gluon.

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

from csrc_free_ops.attention.hopper_bwd_notes import (
    BLOCK,
    MEETING,
    OWNED,
    lse_to_subtract,
    tile_columns,
    tile_count,
)
from csrc_free_ops.attention.hopper_work import SINGLE, boundaries, rows_of
from csrc_free_ops.tiles.hopper import (
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
from csrc_free_ops.tiles.hopper_memory import await_kernel, clear_rows, flat, load_blocks, read_columns, store_rows
from csrc_free_ops.tiles.scores import LOG2E

# Blocks of the others in shared memory, and the named barriers at which consumers let them go: behind Triton's own.
STAGES = gl.constexpr(4)
EMPTY = gl.constexpr(3)
# Barriers in shared memory: own rows of a and of b, and of each stage x, y, and lse and delta, which all lanes store.
A_FULL, B_FULL = gl.constexpr(0), gl.constexpr(1)
X_FULL, Y_FULL, VECTORS_FULL = (gl.constexpr(2 + kind * STAGES.value) for kind in range(3))
ARRIVALS = gl.constexpr((1,) * VECTORS_FULL.value + (32,) * STAGES.value)


@gluon.jit
def _produce(ON_KEYS: gl.constexpr, descs, memory, vectors, place, statistics, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    q_desc, k_desc, v_desc, dout_desc = descs
    tiles, bars = memory
    lses, deltas = vectors
    head, first, other_start, other_length = place
    lse_ptr, delta_ptr, total_q = statistics
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    STAGE_BYTES: gl.constexpr = TILES * tile_columns(HEAD_DIM) * BLOCK * 2
    BARS_AT: gl.constexpr = (4 + 2 * STAGES) * STAGE_BYTES
    HEADS_OVER: gl.constexpr = GROUP if ON_KEYS else 1
    if ON_KEYS:
        a_desc, b_desc, x_desc, y_desc = k_desc, v_desc, q_desc, dout_desc
        first_head = head * GROUP
    else:
        a_desc, b_desc, x_desc, y_desc = q_desc, dout_desc, k_desc, v_desc
        first_head = head // GROUP
    vectors_full = shared_base() + BARS_AT + VECTORS_FULL * 8
    packed = (0, 1, 0)
    mbarrier.expect(bars.index(A_FULL), 2 * STAGE_BYTES)
    mbarrier.expect(bars.index(B_FULL), 2 * STAGE_BYTES)
    load_blocks(a_desc, first, head, packed, bars.index(A_FULL), tiles, 0, TILES, 2)
    load_blocks(b_desc, first, head, packed, bars.index(B_FULL), tiles, 2 * TILES, TILES, 2)
    stage = 0
    loaded = 0
    for member in range(HEADS_OVER):
        other_head = first_head + member
        for other in range(0, other_length, BLOCK):
            if loaded >= STAGES:
                barrier_sync(EMPTY + stage, MEETING)
            row = other_start + other
            mbarrier.expect(bars.index(X_FULL + stage), STAGE_BYTES)
            x_bar = bars.index(X_FULL + stage)
            load_blocks(x_desc, row, other_head, packed, x_bar, tiles, (4 + stage) * TILES, TILES, 1)
            mbarrier.expect(bars.index(Y_FULL + stage), STAGE_BYTES)
            place_of_y = (4 + STAGES + stage) * TILES
            y_bar = bars.index(Y_FULL + stage)
            load_blocks(y_desc, row, other_head, packed, y_bar, tiles, place_of_y, TILES, 1)
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
    INDEX: gl.constexpr, ON_KEYS: gl.constexpr, vectors, place, statistics, results, scale, OPTIONS: gl.constexpr
):  # fmt: skip
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    DTYPE: gl.constexpr = option(OPTIONS, "DTYPE")
    lses, deltas = vectors
    head, first, start, length, total, other_length = place
    lse_ptr, delta_ptr, total_q = statistics
    dq_ptr, dk_ptr, dv_ptr = results
    COLUMNS: gl.constexpr = tile_columns(HEAD_DIM)
    TILES: gl.constexpr = tile_count(HEAD_DIM)
    STRIPS: gl.constexpr = HEAD_DIM // 8
    STAGE_BYTES: gl.constexpr = TILES * COLUMNS * BLOCK * 2
    OWN_HEADS: gl.constexpr = HEADS // GROUP if ON_KEYS else HEADS
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
    blocks = (other_length + BLOCK - 1) // BLOCK
    tail = other_length - (blocks - 1) * BLOCK
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
        if ON_KEYS:
            dv = accumulate(dv, narrow_strips(p, DTYPE), y + stage * STAGE_BYTES, BLOCK, COLUMNS)
            dp = wait_strips(dp, 1)
        else:
            if ends:
                # Of the others' rows past the segment's end no lse tells that they weigh nothing.
                cols = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
                kept = ()
                for index in gl.static_range(BLOCK // 8):
                    kept = kept + (gl.where(index * 8 + cols < tail, p[index], 0.0),)
                p = kept
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
    stored = total - first - INDEX * BLOCK
    offset = ((first + INDEX * BLOCK).to(gl.int64) * OWN_HEADS + head) * (HEAD_DIM * 2)
    sums = keep_strips(scale_strips(sums, scale), inside[:, None])
    if ON_KEYS:
        dv = keep_strips(dv, inside[:, None])
        store_rows(dk_ptr.to(gl.int64) + offset, sums, stored, DTYPE, OWN_HEADS * HEAD_DIM)
        store_rows(dv_ptr.to(gl.int64) + offset, dv, stored, DTYPE, OWN_HEADS * HEAD_DIM)
    else:
        store_rows(dq_ptr.to(gl.int64) + offset, sums, stored, DTYPE, OWN_HEADS * HEAD_DIM)


@gluon.jit
def _produce_either(on_keys, descs, memory, vectors, place, statistics, OPTIONS: gl.constexpr):
    if on_keys != 0:
        _produce(True, descs, memory, vectors, place, statistics, OPTIONS)
    else:
        _produce(False, descs, memory, vectors, place, statistics, OPTIONS)


@gluon.jit
def _consume_either(INDEX: gl.constexpr, on_keys, vectors, place, statistics, results, scale, OPTIONS: gl.constexpr):
    if on_keys != 0:
        _consume(INDEX, True, vectors, place, statistics, results, scale, OPTIONS)
    else:
        _consume(INDEX, False, vectors, place, statistics, results, scale, OPTIONS)


@gluon.jit
def _attention_bwd_apart_kernel(
    q_desc, k_desc, v_desc, dout_desc,
    lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dq_ptr, dk_ptr, dv_ptr, total_q, total_k, scale,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of 128 keys times key heads, then of 128 queries times heads): dq, dk and dv of one segment.

    Tiles are those of all rows, in the segment or not; rows outside have gradients of 0. The kernel begins while the
    one before it, which makes delta, ends; all but delta must have been there before that one began.
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
    cu_q = boundaries(cu_q_ptr, SINGLE)
    cu_k = boundaries(cu_k_ptr, SINGLE)
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
    OPTIONS: gl.constexpr = ("HEAD_DIM", HEAD_DIM, "GROUP", GROUP, "HEADS", HEADS, "DTYPE", DTYPE)
    q_start, q_length = rows_of(cu_q, 1, 1, total_q, SINGLE)
    k_start, k_length = rows_of(cu_k, 1, 1, total_k, SINGLE)
    program = gl.program_id(0)
    key_programs = (total_k + OWNED - 1) // OWNED * K_HEADS
    on_keys = program < key_programs
    own = gl.where(on_keys, program, program - key_programs)
    heads = gl.where(on_keys, K_HEADS, HEADS)
    head = own % heads
    first = own // heads * OWNED
    start, length = gl.where(on_keys, k_start, q_start), gl.where(on_keys, k_length, q_length)
    other_start, other_length = gl.where(on_keys, q_start, k_start), gl.where(on_keys, q_length, k_length)
    place_of_rows = (head, first, start, length, gl.where(on_keys, total_k, total_q), other_length)
    place_of_others = (head, first, other_start, other_length)
    statistics = (lse_ptr, delta_ptr, total_q)
    results = (dq_ptr, dk_ptr, dv_ptr)
    descs = (q_desc, k_desc, v_desc, dout_desc)
    either = on_keys.to(gl.int32)
    gl.warp_specialize(
        [
            (_consume_either, (0, either, vectors, place_of_rows, statistics, results, scale, OPTIONS)),
            (_consume_either, (1, either, vectors, place_of_rows, statistics, results, scale, OPTIONS)),
            (_produce_either, (either, descs, (tiles, bars), vectors, place_of_others, statistics, OPTIONS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
