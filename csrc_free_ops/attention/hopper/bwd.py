"""Attention backward on Hopper, in Gluon: the maths of `portable.bwd` in one pass, five products instead of seven.

A program has 128 keys of a key head, 64 for each of two consumer warpgroups, and goes over the queries that see them.
dk and dv stay in registers. dq is a sum over programs, accumulated in fp32 in global memory. Two warps of their own
write it: they add each block of dq from shared memory while the consumers go on. `bwd_dq_finalize` prepares the
accumulator and rounds it. A consumer's step on a block of 64 queries, all scores transposed, [keys, queries]:

    issue  s = k q^T
    issue  dp = v dout^T
    wait s;  p = 2^(s - lse)                        under dp
    issue  dv += p dout
    wait dp;  ds = p (dp - delta), to registers and to shared memory
    issue  dk += ds q
    issue  dq = ds^T k                              over the keys of both warpgroups
    wait dq;  dq to shared memory, for a dq writer

The warpgroups take turns at dq, each for every other block: a product of two shared operands of 64 columns takes 32
cycles, two products of half the columns take 24 each. Wide accumulators leave no registers for all columns; then each
warpgroup makes some columns of every block.

A warpgroup signals that its ds is there and goes on until it needs the other's ds. So the two warpgroups come apart:
one multiplies while the other exponentiates. No product is under way across the loop's end, because ptxas would then
wait for each product at once.

ORDERED fixes the order in which programs add, so that the bits are the same every time. A dq writer waits until a
semaphore says that all earlier tiles have added their block. Those tiles belong to programs that took them from the
scheduler earlier (`scheduler.next_tile_in_order`). The earliest unfinished tile waits for nobody, so no set of running
programs can wait in a circle, however few of them the GPU has room for. That holds for boundaries of any values,
because every row has one segment or none (`scheduler.locate_falling`).

Tiles add from the first keys to the last. With a bound on later keys, a tile goes over its queries from the last to the
first: earlier tiles see more queries and reach a block first. Tiles that take long come first, which leaves little to
do at the end. For one segment without bounds all tiles begin at once. If WAVE is more than 1 each of them begins at
another block, and dq has a second accumulator (`dq_order`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from csrc_free_ops.attention.hopper.bwd_dq_reduce import stage_dq, write_dq
from csrc_free_ops.attention.hopper.bwd_producer import produce
from csrc_free_ops.attention.hopper.bwd_protocol import (
    ADDRESS,
    BLOCK_M,
    CONSUMER_THREADS,
    KV_THREADS,
    LSE_ROW,
    MBAR,
    NAMED,
    ROWS,
    STAGE_THREADS,
    STRIP_PAIR_BYTES,
    TILE,
    BackwardConfig,
    Shared,
    barrier_arrivals,
    check_sizes,
    gradient_stride,
)
from csrc_free_ops.attention.hopper.scheduler import boundaries, has_one_segment, is_dense
from csrc_free_ops.attention.hopper.tile_info import COUNTS, SIZES, make_info
from csrc_free_ops.tiles.hopper.memory import clear_rows, flat, put_pairs, read_columns, store_rows
from csrc_free_ops.tiles.hopper.versions import aggregate, meet
from csrc_free_ops.tiles.hopper.warpgroup import (
    accumulate,
    advance_index,
    await_phase,
    barrier_arrive,
    barrier_sync,
    barriers_in,
    check_base,
    check_first_row,
    exp2,
    make_barriers,
    mask_strips,
    multiply,
    multiply_columns,
    narrow_strips,
    scale_strips,
    shared_base,
    wait_strips,
    wgmma_layout,
    widen,
    zero_strips,
)
from csrc_free_ops.tiles.scores import LOG2E

# Bytes of one warpgroup's ds, [64 keys, BLOCK_M], as tiles of 16 columns.
DS_BYTES = gl.constexpr(4 * STRIP_PAIR_BYTES.value)


@gluon.jit
def _clear_tail(address, num_rows, config):
    """Zero the rows past a segment's end: what a product multiplies by 0 must be a number."""
    clear_rows(address, num_rows, ROWS, config.COLUMNS, config.TILES)
    fence_async_shared()
    meet()


@gluon.jit
def _issue_scores(k, v, q, dout, bars_at, q_stage, blocks_done, is_last_block, num_queries, config):
    """Issue s = k q^T and dp = v dout^T, strips of [64 keys, BLOCK_M]."""
    STAGE_BYTES: gl.constexpr = config.STAGE_BYTES
    stage = blocks_done & 1
    if is_last_block & (num_queries < BLOCK_M):
        _clear_tail(q + q_stage * STAGE_BYTES, num_queries, config)
    s = multiply(k, q + q_stage * STAGE_BYTES, BLOCK_M // 8, config.HEAD_DIM, config.COLUMNS, config.DTYPE)
    await_phase(bars_at + (MBAR.DOUT_FULL + stage) * 8, (blocks_done >> 1) & 1)
    if is_last_block & (num_queries < BLOCK_M):
        _clear_tail(dout + stage * STAGE_BYTES, num_queries, config)
    dp = multiply(v, dout + stage * STAGE_BYTES, BLOCK_M // 8, config.HEAD_DIM, config.COLUMNS, config.DTYPE)
    return s, dp


@gluon.jit
def _weights(s, lse, scale_log2):
    """p = 2^(s - lse), [64 keys, BLOCK_M]."""
    p = ()
    for index in gl.static_range(BLOCK_M // 8):
        p = p + (exp2(s[index] * scale_log2 - lse[index][None, :]),)
    return p


@gluon.jit
def _mask_weights(p, tile, blocks_left, first_key, config):
    """p, 0 where key and query do not see each other or the query is none of the segment."""
    LAYOUT: gl.constexpr = p[0].type.layout
    rows = first_key + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    begin = (tile.read(TILE.NUM_BLOCKS) - blocks_left) * BLOCK_M
    masked = ()
    for index in gl.static_range(len(p)):
        cols = begin + index * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
        strip = gl.where((cols < tile.read(TILE.NUM_QUERIES)) & (rows >= 0), p[index], 0.0)
        if config.HAS_LEFT:
            strip = gl.where(cols <= rows + tile.read(TILE.SEEN_HIGH), strip, 0.0)
        if config.HAS_RIGHT:
            strip = gl.where(cols >= rows + tile.read(TILE.SEEN_LOW), strip, 0.0)
        masked = masked + (strip,)
    return masked


@gluon.jit
def _mask(p, tile, blocks_left, rows, num_keys, first_key, config):
    """p, 0 where it must be; a block without a bound inside, of a whole tile of keys, is passed over."""
    is_masked = num_keys < ROWS
    if config.HAS_LEFT or config.HAS_RIGHT:
        is_masked = is_masked | (blocks_left <= tile.read(TILE.MASKED_TAIL))
        if config.HAS_RIGHT:
            is_masked = is_masked | (blocks_left > tile.read(TILE.UNMASKED_HEAD))
    if is_masked:
        masked = ()
        for index in gl.static_range(BLOCK_M // 8):
            masked = masked + (gl.where(rows < num_keys, p[index], 0.0),)
        p = masked
        if config.HAS_LEFT or config.HAS_RIGHT:
            p = _mask_weights(p, tile, blocks_left, first_key, config)
    return p


@gluon.jit
def _score_gradients(p, p_half, dp, delta, config):
    """ds = p (dp - delta), [64 keys, BLOCK_M]."""
    # Next to wide accumulators there are registers for the rounded weights alone.
    ROUNDED: gl.constexpr = config.HEAD_DIM > 80
    ds = ()
    for index in gl.static_range(BLOCK_M // 8):
        weight = widen(p_half[index]) if ROUNDED else p[index]
        ds = ds + (weight * (dp[index] - delta[index][None, :]),)
    return ds


@gluon.jit
def _store_ds(address, swizzle, ds):
    """ds to shared memory, where the product for dq reads it."""
    for index in gl.static_range(BLOCK_M // 8):
        put_pairs(address + (index // 2 * STRIP_PAIR_BYTES) + (swizzle ^ (index % 2 * 16)), ds[index])
    fence_async_shared()


@gluon.constexpr_function
def _dq_strips(index, head_dim, alternates):
    """The first strip of dq that consumer `index` makes, and how many."""
    strips, half = head_dim // 8, (head_dim + 31) // 32 * 2
    if alternates:
        return 0, strips
    return (0, half) if index == 0 else (half, strips - half)


@gluon.constexpr_function
def _column_at(column, columns):
    """The offset in bytes of a column in a tile of keys."""
    return (column // columns * columns * ROWS.value + column % columns) * 2


@aggregate
class Block:
    """A consumer's place in its blocks: how many it has done, the stages of q and of lse, and how many remain."""

    done: gl.tensor
    q_stage: gl.tensor
    next_stage: gl.tensor
    next_phase: gl.tensor
    next_lse: gl.tensor
    remaining: gl.tensor

    @gluon.constexpr_function
    def __init__(self, done, q_stage, next_stage, next_phase, next_lse, remaining):
        self.done = done
        self.q_stage = q_stage
        self.next_stage = next_stage
        self.next_phase = next_phase
        self.next_lse = next_lse
        self.remaining = remaining


@gluon.jit
def _make_dq(INDEX: gl.constexpr, dk, dv, k_columns, dq_at, q_start, block, shared, config):
    """Make this consumer's dq of a block, and wait for all products. Return dk, dv and the next block's lse."""
    STAGE_BYTES: gl.constexpr = config.STAGE_BYTES
    STRIPS: gl.constexpr = _dq_strips(INDEX, config.HEAD_DIM, config.ALTERNATES)
    base = shared_base()
    bars_at = base + config.BARRIERS_AT
    stage = block.done & 1
    # [BLOCK_M, 8 STRIPS[1]]
    dq = multiply_columns(
        base + config.DS_AT + stage * (2 * DS_BYTES), k_columns, STRIPS[1], DS_BYTES, STAGE_BYTES, config.COLUMNS,
        config.DTYPE,
    )  # fmt: skip
    dv = wait_strips(dv, 2)
    barrier_arrive(NAMED.DOUT_EMPTY + stage, STAGE_THREADS)
    await_phase(bars_at + (MBAR.DQ_EMPTY + stage) * 8, ((block.done >> 1) & 1) ^ 1)
    dk = wait_strips(dk, 1)
    barrier_arrive(NAMED.Q_EMPTY + block.q_stage, STAGE_THREADS)
    if block.remaining > 1:
        await_phase(bars_at + (MBAR.Q_FULL + block.next_stage) * 8, block.next_phase)
    dq = wait_strips(dq, 0)
    lse = read_columns(shared.lse.index(LSE_ROW + block.next_lse), BLOCK_M // 8)  # [BLOCK_M]
    if config.ALTERNATES:
        # No warp may write ds of the block after next before all have read this block's.
        meet()
    stage_dq(dq, dq_at, stage, q_start, STRIPS[0], config.HEAD_DIM)
    return dk, dv, lse


@gluon.jit
def _wait_gradients(dk, dv, block, shared, config):
    """Wait for all products of a block whose dq the other consumer makes. Return dk, dv and the next block's lse."""
    stage = block.done & 1
    dv = wait_strips(dv, 1)
    barrier_arrive(NAMED.DOUT_EMPTY + stage, STAGE_THREADS)
    if block.remaining > 1:
        await_phase(shared_base() + config.BARRIERS_AT + (MBAR.Q_FULL + block.next_stage) * 8, block.next_phase)
    dk = wait_strips(dk, 0)
    barrier_arrive(NAMED.Q_EMPTY + block.q_stage, STAGE_THREADS)
    lse = read_columns(shared.lse.index(LSE_ROW + block.next_lse), BLOCK_M // 8)  # [BLOCK_M]
    return dk, dv, lse


@gluon.jit
def _consume(INDEX: gl.constexpr, shared, scale, config):
    """Make dk and dv of 64 keys of each tile, and dq of its blocks together with the other consumer."""
    STAGE_BYTES: gl.constexpr = config.STAGE_BYTES
    COLUMNS: gl.constexpr = config.COLUMNS
    ALTERNATES: gl.constexpr = config.ALTERNATES
    STRIPS: gl.constexpr = config.HEAD_DIM // 8
    FIRST_KEY: gl.constexpr = INDEX * ROWS
    DQ_STRIPS: gl.constexpr = _dq_strips(INDEX, config.HEAD_DIM, ALTERNATES)
    bars, info = shared.bars, shared.info
    base = shared_base()
    q = base + config.Q_AT
    dout = q + config.STAGES * STAGE_BYTES
    ds_at = base + config.DS_AT
    dq_at = base + config.DQ_AT
    bars_at = base + config.BARRIERS_AT
    LAYOUT: gl.constexpr = wgmma_layout(8)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    ds_offsets = rows * 32 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :] * 2
    swizzle = ((rows >> 2) & 1) * 16 + gl.zeros([64, 8], gl.int32, LAYOUT)
    scale_log2 = scale * LOG2E
    q_stage = 0
    q_phase = 0
    blocks_done = 0
    count = 0
    mbarrier.wait(bars.index(MBAR.KV_FULL), 0)
    num_blocks = info.tile(0).read(TILE.NUM_BLOCKS)
    while num_blocks > 0:
        tile = info.tile(count)
        kv = base + count % config.KV_STAGES * (4 * STAGE_BYTES)
        k = kv + INDEX * STAGE_BYTES
        v = kv + (2 + INDEX) * STAGE_BYTES
        k_columns = kv + _column_at(8 * DQ_STRIPS[0], COLUMNS)
        if config.KV_STAGES == 1:
            mbarrier.wait(bars.index(MBAR.KV_FULL + 1), count & 1)
        num_keys = tile.read(TILE.NUM_KEYS) - FIRST_KEY
        q_start = tile.read(TILE.Q_START)
        if num_keys < ROWS:
            clear_rows(k, num_keys, ROWS, COLUMNS, config.TILES)
            clear_rows(v, num_keys, ROWS, COLUMNS, config.TILES)
            fence_async_shared()
            meet()
        dk = zero_strips(STRIPS)  # [64, HEAD_DIM]
        dv = zero_strips(STRIPS)  # [64, HEAD_DIM]
        # Queries of the last block, and `blocks_left` there.
        tail = tile.read(TILE.NUM_QUERIES) - (num_blocks - 1) * BLOCK_M
        blocks_left_at_tail = 1
        if config.WAVE > 1:
            start_block = tile.read(TILE.START_BLOCK)
            blocks_left_at_tail = gl.where(start_block > 0, num_blocks - start_block + 1, 1)
        remaining = config.GROUP * num_blocks
        await_phase(bars_at + (MBAR.Q_FULL + q_stage) * 8, q_phase)
        lse = read_columns(shared.lse.index(LSE_ROW + q_stage), BLOCK_M // 8)  # [BLOCK_M]
        while remaining > 0:
            blocks_left = remaining if config.GROUP == 1 else (remaining - 1) % num_blocks + 1
            if config.HAS_RIGHT:
                blocks_left = num_blocks + 1 - blocks_left
            # The stage of dout, of ds and of dq.
            stage = blocks_done & 1
            s, dp = _issue_scores(
                k, v, q, dout, bars_at, q_stage, blocks_done, blocks_left == blocks_left_at_tail, tail, config
            )
            s = wait_strips(s, 1)
            p = _weights(s, lse, scale_log2)
            p = _mask(p, tile, blocks_left, rows, num_keys, FIRST_KEY, config)
            p_half = narrow_strips(p, config.DTYPE)
            delta = read_columns(shared.delta.index(q_stage), BLOCK_M // 8)  # [BLOCK_M]
            dv = accumulate(dv, p_half, dout + stage * STAGE_BYTES, ROWS, COLUMNS)  # [64, HEAD_DIM]
            dp = wait_strips(dp, 1)
            if config.KV_STAGES == 1:
                if remaining == 1:
                    barrier_arrive(NAMED.V_EMPTY, STAGE_THREADS)
            ds = narrow_strips(_score_gradients(p, p_half, dp, delta, config), config.DTYPE)
            _store_ds(ds_at + stage * (2 * DS_BYTES) + INDEX * DS_BYTES + ds_offsets, swizzle, ds)
            makes_dq = (stage == INDEX) | (not ALTERNATES)
            helps_dq = (stage != INDEX) | (not ALTERNATES)
            # The dq of the block before, which was stored after the fence of that block.
            if (remaining < config.GROUP * num_blocks) & helps_dq:
                barrier_arrive(NAMED.DQ_FULL + (stage ^ 1), config.DQ_THREADS)
            if helps_dq:
                barrier_arrive(NAMED.DS_FULL + 2 * stage + INDEX, CONSUMER_THREADS)
            dk = accumulate(dk, ds, q + q_stage * STAGE_BYTES, ROWS, COLUMNS)  # [64, HEAD_DIM]
            next_stage, wrapped = advance_index(q_stage, config.STAGES)
            q_phase = q_phase ^ wrapped
            # lse is loaded where no product is under way, because loads take long next to products that read both
            # operands from shared memory. After the last block, the stage is one that nobody writes, and lse is unused.
            next_lse = gl.where(remaining > 1, next_stage, config.STAGES)
            block = Block(blocks_done, q_stage, next_stage, q_phase, next_lse, remaining)
            if makes_dq:
                barrier_sync(NAMED.DS_FULL + 2 * stage + 1 - INDEX, CONSUMER_THREADS)
                dk, dv, lse = _make_dq(INDEX, dk, dv, k_columns, dq_at, q_start, block, shared, config)
            else:
                dk, dv, lse = _wait_gradients(dk, dv, block, shared, config)
            q_stage = next_stage
            blocks_done += 1
            remaining -= 1
        barrier_arrive(NAMED.KV_EMPTY + count % config.KV_STAGES, KV_THREADS)
        if (((blocks_done - 1) & 1) == INDEX) | (not ALTERNATES):
            fence_async_shared()
            barrier_arrive(NAMED.DQ_FULL + ((blocks_done - 1) & 1), config.DQ_THREADS)
        dk_address = tile.read_address(ADDRESS.DK) + FIRST_KEY * gradient_stride(info, config.STRIDE_DKT, 0) * 2
        dv_address = tile.read_address(ADDRESS.DV) + FIRST_KEY * gradient_stride(info, config.STRIDE_DVT, 1) * 2
        is_seen = tile.read(TILE.NUM_SEEN_BLOCKS) > 0
        dk = mask_strips(scale_strips(dk, scale), is_seen)
        store_rows(dk_address, dk, num_keys, config.DTYPE, gradient_stride(info, config.STRIDE_DKT, 0))
        dv_stride = gradient_stride(info, config.STRIDE_DVT, 1)
        store_rows(dv_address, mask_strips(dv, is_seen), num_keys, config.DTYPE, dv_stride)
        count += 1
        mbarrier.wait(bars.index(MBAR.KV_FULL + count % config.KV_STAGES), (count // config.KV_STAGES) & 1)
        num_blocks = info.tile(count).read(TILE.NUM_BLOCKS)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_acc2_desc, dq_acc2_second_desc,
    lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dq_acc_ptr, semaphores_ptr, tile_counter_ptr, dk_ptr, dv_ptr, dq_ptr,
    stride_dkb, stride_dvb, stride_dqb, stride_dkh, stride_dvh, stride_dqh, stride_dkt, stride_dvt, stride_dqt,
    total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, KV_STAGES: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr, WAVE: gl.constexpr,
    STRIDE_DKT: gl.constexpr, STRIDE_DVT: gl.constexpr, STRIDE_DQT: gl.constexpr, FOLDED: gl.constexpr,
    DKDV_SPLITS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs): dk, dv and the accumulated dq, between the kernels of `bwd_dq_finalize`.

    ORDER is any without a cut: all tiles but the last have BLOCK_N keys. The tile counter and the sizes of a batch are
    as in the forward; the last bit of FOLDED is dout's. With several splits of dk and dv GROUP is 1: each of so many
    query heads on a key head has programs, dk and dv of its own.

    The kernel begins while the kernel before it ends. It reads inputs and the tile counter at once, because that kernel
    does not write them. The producer waits for it before it reads delta, and dq writers before they read semaphores;
    nothing else is touched before delta is there. So the kernel before must not admit this one before it has itself
    waited: this kernel relies on everything before it being done.
    """
    k_boundaries = boundaries(cu_k_ptr, ORDER)
    q_boundaries = boundaries(cu_q_ptr, ORDER)
    config = BackwardConfig(
        HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, ORDER, q_desc.dtype, KV_STAGES, STAGES, ORDERED, WAVE,
        STRIDE_DKT, STRIDE_DVT, STRIDE_DQT, FOLDED, DKDV_SPLITS,
    )  # fmt: skip
    check_sizes(config, CONSUMER_REGISTERS, PRODUCER_REGISTERS)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE_BYTES: gl.constexpr = config.STAGE_BYTES // config.TILES
    # The largest allocation, and so the first: tiles, ds and dq. The second largest follows: barriers, then lse of each
    # stage, then a row that nobody writes.
    tiles = gl.allocate_shared_memory(
        config.DTYPE, [config.BARRIERS_AT // TILE_BYTES] + q_desc.block_shape, q_desc.layout
    )  # fmt: skip
    lse = gl.allocate_shared_memory(gl.float32, [LSE_ROW + STAGES + 1, BLOCK_M], VECTOR)
    check_base(flat(tiles.index(0)))
    check_first_row(lse, shared_base() + config.BARRIERS_AT)
    bars = barriers_in(lse.index(0))
    make_barriers(shared_base() + config.BARRIERS_AT, barrier_arrivals(KV_STAGES))
    fence_async_shared()
    info = make_info()
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    shared = Shared(tiles, bars, lse, delta, info)
    # Both in the order of their slots.
    addresses = (dk_ptr, dv_ptr, lse_ptr, delta_ptr, dq_acc_ptr, semaphores_ptr, tile_counter_ptr)
    if is_dense(ORDER):
        addresses = addresses + (dq_ptr, stride_dkb, stride_dvb, stride_dqb, stride_dkh, stride_dvh, stride_dqh)
    else:
        addresses = addresses + (cu_k_ptr, cu_q_ptr)
    numbers = (total_k, total_q, num_segments, window_right, window_left)
    if has_one_segment(ORDER):
        numbers = numbers + k_boundaries + q_boundaries
    if is_dense(ORDER):
        numbers = numbers + (scale.to(gl.int32, bitcast=True), stride_dkt, stride_dvt, stride_dqt)
    info.fill(numbers, addresses)
    dq_acc2_descs = ()
    if WAVE > 1:
        dq_acc2_descs = (dq_acc2_desc,)
        if dq_acc2_second_desc is not None:
            dq_acc2_descs = (dq_acc2_desc, dq_acc2_second_desc)
    gl.warp_specialize(
        [
            (_consume, (0, shared, scale, config)),
            (_consume, (1, shared, scale, config)),
            (produce, ((k_desc, v_desc), q_desc, dout_desc, shared, config)),
            (write_dq, (0, dq_acc2_descs, shared, config)),
            (write_dq, (1, dq_acc2_descs, shared, config)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
