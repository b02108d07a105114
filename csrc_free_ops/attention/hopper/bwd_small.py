"""Attention backward on Hopper for few tiles, in Gluon: some programs make dk and dv, others make dq beside them.

`bwd` computes scores once, accumulates dq over programs in an order, and rounds the sums. If keys are so few that half
of the GPU has nothing to do, computing scores twice is faster. Here a program has 128 resident rows, of keys or of
queries, 64 for each of two consumer warpgroups, and goes over blocks of the streamed side. That takes seven products
instead of five, but side by side: no program needs what another makes, so there is no accumulator in memory, no order,
and nothing to wait for. With resident rows of a and b, and streamed rows of x and y (k, v; q, dout; or the other way
around):

    s = scale a x^T,  dp = b y^T
    p = e^(s - lse),  ds = p (dp - delta)
    for keys:     dv += p y,  dk += scale ds x
    for queries:  dq += scale ds x

lse and delta belong to queries. Those of resident rows stay in registers, those of streamed rows come block by block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from csrc_free_ops.attention.hopper.bwd_protocol import (
    BLOCK_M,
    BLOCK_N,
    ROWS,
    STAGE_THREADS,
    lse_to_subtract,
    tile_columns,
    tile_count,
)
from csrc_free_ops.attention.hopper.scheduler import boundaries, head_count, rows_of
from csrc_free_ops.attention.hopper.tile_info import COUNTS, SIZES, SLOTS, TILE_INFOS, LaunchInfo
from csrc_free_ops.configs import attention_hopper_backward
from csrc_free_ops.tiles.hopper.limits import REGISTERS, SHARED_BYTES
from csrc_free_ops.tiles.hopper.memory import await_kernel, clear_rows, flat, load_blocks, read_columns, store_rows
from csrc_free_ops.tiles.hopper.versions import aggregate, meet
from csrc_free_ops.tiles.hopper.warpgroup import (
    accumulate,
    advance_index,
    await_phase,
    barrier_arrive,
    barrier_sync,
    barriers_in,
    check_base,
    exp2,
    make_barriers,
    mask_strips,
    multiply,
    narrow_strips,
    publish,
    scale_strips,
    shared_base,
    wait_strips,
    wgmma_layout,
    zero_strips,
)
from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.scores import LOG2E

# Stages of streamed blocks, of BLOCK_M rows. At EMPTY, behind the named barriers that Triton takes, consumers release
# them.
STAGES, EMPTY = gl.constexpr(attention_hopper_backward.SMALL_STAGES), gl.constexpr(3)
# Barriers in shared memory: for resident rows of a and of b, and in each stage for x, for y, and for lse and delta, at
# which all threads of the producer arrive.
A_FULL, B_FULL = gl.constexpr(0), gl.constexpr(1)
X_FULL, Y_FULL, VECTORS_FULL = (gl.constexpr(2 + kind * STAGES.value) for kind in range(3))
ARRIVALS = gl.constexpr((1,) * VECTORS_FULL.value + (32,) * STAGES.value)
# Slots of the launch: addresses of dk or dq, and of dv; rows of the tensor from the tile's first row on; where in the
# segment that row is; the segment's length; and row strides of the gradients at both addresses, if no constants.
FIRST_GRADIENT, DV, NUM_ROWS, SEGMENT_ROW, LENGTH, FIRST_STRIDE, DV_STRIDE = (gl.constexpr(slot) for slot in range(7))


@aggregate
class SmallConfig:
    """Constants of a launch, and what follows from them."""

    HEAD_DIM: gl.constexpr
    HEADS: gl.constexpr
    GROUP: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    DTYPE: gl.constexpr
    FOLDED: gl.constexpr
    STRIDE_DKT: gl.constexpr
    STRIDE_DVT: gl.constexpr
    STRIDE_DQT: gl.constexpr
    # Shared memory: tiles of one block, their columns and bytes, and where in bytes the barriers begin.
    TILES: gl.constexpr
    COLUMNS: gl.constexpr
    STAGE_BYTES: gl.constexpr
    BARRIERS_AT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, DTYPE, FOLDED, STRIDE_DKT, STRIDE_DVT, STRIDE_DQT
    ):  # fmt: skip
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.DTYPE = gl.constexpr(DTYPE)
        self.FOLDED = gl.constexpr(FOLDED)
        self.STRIDE_DKT = gl.constexpr(STRIDE_DKT)
        self.STRIDE_DVT = gl.constexpr(STRIDE_DVT)
        self.STRIDE_DQT = gl.constexpr(STRIDE_DQT)
        tiles, columns = tile_count(HEAD_DIM), tile_columns(HEAD_DIM)
        stage_bytes = tiles * columns * ROWS.value * 2
        self.TILES = gl.constexpr(tiles)
        self.COLUMNS = gl.constexpr(columns)
        self.STAGE_BYTES = gl.constexpr(stage_bytes)
        self.BARRIERS_AT = gl.constexpr((4 + 2 * STAGES.value) * stage_bytes)


@aggregate
class ConsumerTile:
    """Resident rows of a head, and the streamed rows low .. high - 1 that they see, of which the middle is not masked.

    Spare captures take shared memory, so each kind of warp gets what it uses.
    """

    head: gl.tensor
    first_row: gl.tensor
    start: gl.tensor
    length: gl.tensor
    shift: gl.tensor
    low: gl.tensor
    full_low: gl.tensor
    full_high: gl.tensor
    high: gl.tensor

    @gluon.constexpr_function
    def __init__(self, head, first_row, start, length, shift, span):
        self.head = head
        self.first_row = first_row
        self.start = start
        self.length = length
        self.shift = shift
        self.low, self.full_low, self.full_high, self.high = span


@aggregate
class ProducerTile:
    """The first resident row of a head; start and length of the streamed segment; its rows low .. high - 1 to load."""

    head: gl.tensor
    first_row: gl.tensor
    start: gl.tensor
    length: gl.tensor
    low: gl.tensor
    high: gl.tensor

    @gluon.constexpr_function
    def __init__(self, head, first_row, start, length, span):
        self.head = head
        self.first_row = first_row
        self.start = start
        self.length = length
        self.low, _, _, self.high = span


@gluon.jit
def _span(on_keys, first, length, streamed_length, bounds, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """`block_span` of the streamed rows that resident rows from position `first` on see; none if there are no rows."""
    left, right = bounds
    lowest = gl.maximum(first, 0)
    highest = gl.minimum(first + BLOCK_N, length) - 1
    shift = streamed_length - length
    for_queries = block_span(lowest, highest, shift, left, right, streamed_length, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    for_keys = block_span(lowest, highest, shift, right, left, streamed_length, HAS_RIGHT, HAS_LEFT, BLOCK_M)
    span = ()
    for index in gl.static_range(4):
        span = span + (gl.where(on_keys, for_keys[index], for_queries[index]),)
    low, full_low, full_high, high = span
    return low, full_low, full_high, gl.where(highest >= lowest, high, low)


@gluon.jit
def _mask(p, begin, limit, rows, shift, bounds, ON_KEYS: gl.constexpr, config):
    """p [64, BLOCK_M], of streamed rows from `begin` on: 0 from `limit` on and where resident rows do not see them."""
    LAYOUT: gl.constexpr = p[0].type.layout
    left, right = bounds
    masked = ()
    for index in gl.static_range(len(p)):
        cols = begin + index * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
        seen = (cols < limit) & (rows == rows)
        if config.HAS_LEFT:
            seen = seen & ((cols <= rows + (shift + left)) if ON_KEYS else (cols >= rows + (shift - left)))
        if config.HAS_RIGHT:
            seen = seen & ((cols >= rows + (shift - right)) if ON_KEYS else (cols <= rows + (shift + right)))
        masked = masked + (gl.where(seen, p[index], 0.0),)
    return masked


@gluon.jit
def _produce(ON_KEYS: gl.constexpr, descs, memory, vectors, tile, statistics, config):
    """Load the resident rows, and block by block the streamed rows, with lse and delta if these are queries."""
    HEADS: gl.constexpr = config.HEADS
    GROUP: gl.constexpr = config.GROUP
    FOLDED: gl.constexpr = config.FOLDED
    TILES: gl.constexpr = config.TILES
    STAGE_BYTES: gl.constexpr = config.STAGE_BYTES
    STREAMED_HEADS: gl.constexpr = GROUP if ON_KEYS else 1
    q_desc, k_desc, v_desc, dout_desc = descs
    tiles, bars = memory
    lses, deltas = vectors
    lse_ptr, delta_ptr, total_q, total_k = statistics
    head = tile.head
    q_batch = (total_q, HEADS, FOLDED & 1)
    k_batch = (total_k, HEADS // GROUP, FOLDED & 2)
    v_batch = (total_k, HEADS // GROUP, FOLDED & 4)
    dout_batch = (total_q, HEADS, FOLDED & 8)
    if ON_KEYS:
        a_desc, b_desc, x_desc, y_desc = k_desc, v_desc, q_desc, dout_desc
        a_batch, b_batch, x_batch, y_batch = k_batch, v_batch, q_batch, dout_batch
        first_head = head * GROUP
    else:
        a_desc, b_desc, x_desc, y_desc = q_desc, dout_desc, k_desc, v_desc
        a_batch, b_batch, x_batch, y_batch = q_batch, dout_batch, k_batch, v_batch
        first_head = head // GROUP
    vectors_full = shared_base() + config.BARRIERS_AT + VECTORS_FULL * 8
    mbarrier.expect(bars.index(A_FULL), 2 * STAGE_BYTES)
    mbarrier.expect(bars.index(B_FULL), 2 * STAGE_BYTES)
    load_blocks(a_desc, tile.first_row, head, a_batch, bars.index(A_FULL), tiles, 0, TILES, 2)
    load_blocks(b_desc, tile.first_row, head, b_batch, bars.index(B_FULL), tiles, 2 * TILES, TILES, 2)
    stage = 0
    blocks_loaded = 0
    for index in range(STREAMED_HEADS):
        streamed_head = first_head + index
        for streamed in range(tile.low, tile.high, BLOCK_M):
            if blocks_loaded >= STAGES:
                barrier_sync(EMPTY + stage, STAGE_THREADS)
            row = tile.start + streamed
            mbarrier.expect(bars.index(X_FULL + stage), STAGE_BYTES)
            x_bar = bars.index(X_FULL + stage)
            load_blocks(x_desc, row, streamed_head, x_batch, x_bar, tiles, (4 + stage) * TILES, TILES, 1)
            mbarrier.expect(bars.index(Y_FULL + stage), STAGE_BYTES)
            y_tile = (4 + STAGES + stage) * TILES
            y_bar = bars.index(Y_FULL + stage)
            load_blocks(y_desc, row, streamed_head, y_batch, y_bar, tiles, y_tile, TILES, 1)
            if ON_KEYS:
                local = gl.arange(0, BLOCK_M, gl.BlockedLayout([2], [32], [1], [0]))
                inside = streamed + local < tile.length
                offset = streamed_head.to(gl.int64) * total_q + row
                lse = gl.load(lse_ptr + offset + local, mask=inside, other=float("inf"))  # [BLOCK_M]
                lses.index(stage).store(lse_to_subtract(lse))
                if blocks_loaded == 0:
                    await_kernel()
                delta = gl.load(delta_ptr + offset + local, mask=inside, other=0.0)  # [BLOCK_M]
                deltas.index(stage).store(delta)
                publish(vectors_full + stage * 8)
            blocks_loaded += 1
            stage, _ = advance_index(stage, STAGES)
    # This kernel must not end before the kernel that it overlaps.
    await_kernel()
    for index in gl.static_range(STAGES):
        if index < blocks_loaded:
            barrier_sync(EMPTY + index, STAGE_THREADS)


@gluon.jit
def _streamed_statistics(lses, deltas, stage):
    """lse and delta of streamed queries, [1, 8] for each strip."""
    lse_columns = read_columns(lses.index(stage), BLOCK_M // 8)  # [BLOCK_M]
    delta_columns = read_columns(deltas.index(stage), BLOCK_M // 8)  # [BLOCK_M]
    lse = ()
    delta = ()
    for index in gl.static_range(BLOCK_M // 8):
        lse = lse + (lse_columns[index][None, :],)
        delta = delta + (delta_columns[index][None, :],)
    return lse, delta


@gluon.jit
def _resident_statistics(lse, delta):
    """lse and delta of resident queries, [64, 1], for each strip."""
    lses = ()
    deltas = ()
    for _ in gl.static_range(BLOCK_M // 8):
        lses = lses + (lse,)
        deltas = deltas + (delta,)
    return lses, deltas


@gluon.jit
def _stride(launch, STRIDE: gl.constexpr, SLOT: gl.constexpr):
    """Elements from a row of a gradient to the next: a constant, or what follows from a batch."""
    if STRIDE > 0:
        return STRIDE
    else:
        return launch.read_address(SLOT)


@gluon.jit
def _store_gradients(INDEX: gl.constexpr, ON_KEYS: gl.constexpr, gradient, dv, info, scale, config):
    """Store the resident rows of dk and dv, or of dq. Rows of the tensor outside of the segment get 0."""
    LAYOUT: gl.constexpr = wgmma_layout(8)
    launch = info.at(TILE_INFOS)
    num_rows = launch.read_address(NUM_ROWS).to(gl.int32) - INDEX * ROWS
    address = launch.read_address(FIRST_GRADIENT)
    segment_row = launch.read_address(SEGMENT_ROW).to(gl.int32) + INDEX * ROWS
    positions = segment_row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    inside = (positions >= 0) & (positions < launch.read_address(LENGTH).to(gl.int32))
    gradient = mask_strips(scale_strips(gradient, scale), inside[:, None])
    if ON_KEYS:
        dv = mask_strips(dv, inside[:, None])
        dk_stride = _stride(launch, config.STRIDE_DKT, FIRST_STRIDE)
        dv_stride = _stride(launch, config.STRIDE_DVT, DV_STRIDE)
        store_rows(address + INDEX * ROWS * dk_stride * 2, gradient, num_rows, config.DTYPE, dk_stride)
        store_rows(launch.read_address(DV) + INDEX * ROWS * dv_stride * 2, dv, num_rows, config.DTYPE, dv_stride)
    else:
        dq_stride = _stride(launch, config.STRIDE_DQT, FIRST_STRIDE)
        store_rows(address + INDEX * ROWS * dq_stride * 2, gradient, num_rows, config.DTYPE, dq_stride)


@gluon.jit
def _consume(
    INDEX: gl.constexpr, ON_KEYS: gl.constexpr, vectors, tile, bounds, statistics, info, scale, config
):  # fmt: skip
    """Make dk and dv, or dq, of 64 resident rows."""
    GROUP: gl.constexpr = config.GROUP
    HAS_BOUNDS: gl.constexpr = config.HAS_LEFT or config.HAS_RIGHT
    COLUMNS: gl.constexpr = config.COLUMNS
    TILES: gl.constexpr = config.TILES
    STRIPS: gl.constexpr = config.HEAD_DIM // 8
    STAGE_BYTES: gl.constexpr = config.STAGE_BYTES
    LAYOUT: gl.constexpr = wgmma_layout(8)
    lses, deltas = vectors
    lse_ptr, delta_ptr, total_q, total_k = statistics
    base = shared_base()
    a = base + INDEX * STAGE_BYTES
    b = base + (2 + INDEX) * STAGE_BYTES
    x = base + 4 * STAGE_BYTES
    y = x + STAGES * STAGE_BYTES
    bars_at = y + STAGES * STAGE_BYTES
    scale_log2 = scale * LOG2E
    row = tile.first_row + INDEX * ROWS + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    inside = (row >= tile.start) & (row < tile.start + tile.length)
    num_blocks = (tile.high - tile.low + BLOCK_M - 1) // BLOCK_M
    tail = tile.high - tile.low - (num_blocks - 1) * BLOCK_M
    remaining = num_blocks
    # dk or dq.
    gradient = zero_strips(STRIPS)  # [64, HEAD_DIM]
    dv = ()
    if ON_KEYS:
        remaining = GROUP * num_blocks
        dv = zero_strips(STRIPS)  # [64, HEAD_DIM]
    else:
        offset = tile.head.to(gl.int64) * total_q + row
        resident_lse = lse_to_subtract(gl.load(lse_ptr + offset, mask=inside, other=float("inf")))[:, None]  # [64, 1]
        await_kernel()
        resident_delta = gl.load(delta_ptr + offset, mask=inside, other=0.0)[:, None]  # [64, 1]
    stage = 0
    phase = 0
    await_phase(bars_at + A_FULL * 8, 0)
    await_phase(bars_at + B_FULL * 8, 0)
    while remaining > 0:
        is_partial = ((remaining - 1) % num_blocks == 0) & (tail < BLOCK_M)
        await_phase(bars_at + (X_FULL + stage) * 8, phase)
        if is_partial:
            clear_rows(x + stage * STAGE_BYTES, tail, ROWS, COLUMNS, TILES)
            await_phase(bars_at + (Y_FULL + stage) * 8, phase)
            clear_rows(y + stage * STAGE_BYTES, tail, ROWS, COLUMNS, TILES)
            fence_async_shared()
            meet()
        s = multiply(a, x + stage * STAGE_BYTES, BLOCK_M // 8, config.HEAD_DIM, COLUMNS, config.DTYPE)  # [64, BLOCK_M]
        await_phase(bars_at + (Y_FULL + stage) * 8, phase)
        dp = multiply(b, y + stage * STAGE_BYTES, BLOCK_M // 8, config.HEAD_DIM, COLUMNS, config.DTYPE)
        if ON_KEYS:
            await_phase(bars_at + (VECTORS_FULL + stage) * 8, phase)
            lse, delta = _streamed_statistics(lses, deltas, stage)
        else:
            lse, delta = _resident_statistics(resident_lse, resident_delta)
        s = wait_strips(s, 1)
        p = ()
        for index in gl.static_range(BLOCK_M // 8):
            p = p + (exp2(s[index] * scale_log2 - lse[index]),)
        if HAS_BOUNDS:
            begin = tile.low + (num_blocks - 1 - (remaining - 1) % num_blocks) * BLOCK_M
            if (begin < tile.full_low) | (begin >= tile.full_high):
                positions = (row - tile.start)[:, None]
                p = _mask(p, begin, tile.high, positions, tile.shift, bounds, ON_KEYS, config)
        if ON_KEYS:
            p_half = narrow_strips(p, config.DTYPE)
            dv = accumulate(dv, p_half, y + stage * STAGE_BYTES, ROWS, COLUMNS)  # [64, HEAD_DIM]
            dp = wait_strips(dp, 1)
        else:
            if not HAS_BOUNDS:
                if is_partial:
                    # Keys past the segment's end have no lse that would make their weights 0.
                    p = _mask(p, 0, tail, row[:, None], 0, bounds, ON_KEYS, config)
            dp = wait_strips(dp, 0)
        ds = ()
        for index in gl.static_range(BLOCK_M // 8):
            ds = ds + (p[index] * (dp[index] - delta[index]),)
        ds_half = narrow_strips(ds, config.DTYPE)
        gradient = accumulate(gradient, ds_half, x + stage * STAGE_BYTES, ROWS, COLUMNS)  # [64, HEAD_DIM]
        if ON_KEYS:
            dv = wait_strips(dv, 1)
        gradient = wait_strips(gradient, 0)
        barrier_arrive(EMPTY + stage, STAGE_THREADS)
        stage, wrapped = advance_index(stage, STAGES)
        phase = phase ^ wrapped
        remaining -= 1
    _store_gradients(INDEX, ON_KEYS, gradient, dv, info, scale, config)


@gluon.jit
def _produce_either(on_keys, descs, memory, vectors, tile, statistics, config):
    if on_keys != 0:
        _produce(True, descs, memory, vectors, tile, statistics, config)
    else:
        _produce(False, descs, memory, vectors, tile, statistics, config)


@gluon.jit
def _consume_either(INDEX: gl.constexpr, on_keys, vectors, tile, bounds, statistics, info, scale, config):
    if on_keys != 0:
        _consume(INDEX, True, vectors, tile, bounds, statistics, info, scale, config)
    else:
        _consume(INDEX, False, vectors, tile, bounds, statistics, info, scale, config)


@gluon.jit
def _gradient_address(ptr, batch, head, row, stride_batch, stride_head, stride_row, STRIDE: gl.constexpr):
    offset = batch.to(gl.int64) * stride_batch + head.to(gl.int64) * stride_head
    if STRIDE > 0:
        offset += row.to(gl.int64) * STRIDE
    else:
        offset += row.to(gl.int64) * stride_row
    return (ptr + offset).to(gl.int64)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_small_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc,
    lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr, dq_ptr,
    stride_dkb, stride_dvb, stride_dqb, stride_dkh, stride_dvh, stride_dqh, stride_dkt, stride_dvt, stride_dqt,
    total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, STRIDE_DKT: gl.constexpr, STRIDE_DVT: gl.constexpr, STRIDE_DQT: gl.constexpr,
    FOLDED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N keys times key heads, then of BLOCK_N queries times heads): dq, dk and dv.

    There is one segment, or a batch, whose heads are all one segment's. ORDER is SINGLE or DENSE. The sizes of a batch
    are as in the forward, and the last bit of FOLDED is dout's. Tiles cover all rows, in the segment or not; rows
    outside get gradients of 0. The kernel begins while the kernel before it, which makes delta, ends. Everything but
    delta must be there before that kernel admits this one.
    """
    config = SmallConfig(
        HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, q_desc.dtype, FOLDED, STRIDE_DKT, STRIDE_DVT, STRIDE_DQT
    )
    gl.static_assert(EMPTY + STAGES <= 16, "STAGES is too large: there are 16 named barriers, and Triton takes three")
    gl.static_assert(VECTORS_FULL + STAGES <= 16, "STAGES is too large: 16 barriers in shared memory have room")
    TILE_BYTES: gl.constexpr = config.STAGE_BYTES // config.TILES
    VECTOR_BYTES: gl.constexpr = 2 * STAGES * BLOCK_M * 4 + (TILE_INFOS + 1) * SLOTS * 8
    gl.static_assert(
        config.BARRIERS_AT + TILE_BYTES + VECTOR_BYTES <= SHARED_BYTES,
        "tiles need more than the 227 KiB of shared memory of a Hopper GPU: use fewer STAGES",
    )
    gl.static_assert(
        256 * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= REGISTERS,
        "two consumers and four other warps need more than the 65536 registers of a multiprocessor",
    )
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    K_HEADS: gl.constexpr = HEADS // GROUP
    # Loaded early, because they are needed soon.
    cu_q = boundaries(cu_q_ptr, ORDER)
    cu_k = boundaries(cu_k_ptr, ORDER)
    # The largest allocation, and so the first. Behind the tiles is one for barriers.
    TILE_COUNT: gl.constexpr = config.BARRIERS_AT // TILE_BYTES
    tiles = gl.allocate_shared_memory(config.DTYPE, [TILE_COUNT + 1] + q_desc.block_shape, q_desc.layout)
    check_base(flat(tiles.index(0)))
    bars = barriers_in(tiles.index(TILE_COUNT))
    make_barriers(shared_base() + config.BARRIERS_AT, ARRIVALS)
    fence_async_shared()
    # lse and delta of each stage.
    vectors = (
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR),
    )
    q_start, q_length = rows_of(cu_q, 1, 1, total_q, ORDER)
    k_start, k_length = rows_of(cu_k, 1, 1, total_k, ORDER)
    program = gl.program_id(0)
    k_heads = head_count(num_segments, K_HEADS, ORDER)
    key_programs = (total_k + BLOCK_N - 1) // BLOCK_N * k_heads
    on_keys = program < key_programs
    index = gl.where(on_keys, program, program - key_programs)
    heads = gl.where(on_keys, k_heads, k_heads * GROUP)
    head = index % heads
    first_row = index // heads * BLOCK_N
    start, length = gl.where(on_keys, k_start, q_start), gl.where(on_keys, k_length, q_length)
    streamed_start, streamed_length = gl.where(on_keys, q_start, k_start), gl.where(on_keys, q_length, k_length)
    bounds = (window_left, window_right)
    span = _span(on_keys, first_row - start, length, streamed_length, bounds, HAS_LEFT, HAS_RIGHT)
    consumer_tile = ConsumerTile(head, first_row, start, length, streamed_length - length, span)
    producer_tile = ProducerTile(head, first_row, streamed_start, streamed_length, span)
    statistics = (lse_ptr, delta_ptr, total_q, total_k)
    batch_heads = gl.where(on_keys, K_HEADS, HEADS)
    batch, batch_head = head // batch_heads, head % batch_heads
    dk_address = _gradient_address(dk_ptr, batch, batch_head, first_row, stride_dkb, stride_dkh, stride_dkt, STRIDE_DKT)
    dq_address = _gradient_address(dq_ptr, batch, batch_head, first_row, stride_dqb, stride_dqh, stride_dqt, STRIDE_DQT)
    dv_address = _gradient_address(dv_ptr, batch, batch_head, first_row, stride_dvb, stride_dvh, stride_dvt, STRIDE_DVT)
    # In shared memory, because wide heads leave no registers. There are addresses alone, which need one buffer.
    addresses = gl.allocate_shared_memory(gl.int64, [(TILE_INFOS + 1) * SLOTS, 1], VECTOR)
    info = LaunchInfo(addresses, addresses)
    num_rows = gl.where(on_keys, total_k, total_q) - first_row
    values = (gl.where(on_keys, dk_address, dq_address), dv_address, num_rows, first_row - start, length)
    if STRIDE_DKT == 0:
        values = values + (gl.where(on_keys, stride_dkt, stride_dqt), stride_dvt)
    info.fill((), values)
    descs = (q_desc, k_desc, v_desc, dout_desc)
    either = on_keys.to(gl.int32)
    gl.warp_specialize(
        [
            (_consume_either, (0, either, vectors, consumer_tile, bounds, statistics, info, scale, config)),
            (_consume_either, (1, either, vectors, consumer_tile, bounds, statistics, info, scale, config)),
            (_produce_either, (either, descs, (tiles, bars), vectors, producer_tile, statistics, config)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
