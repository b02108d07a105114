"""The producer of the Hopper backward: it takes tiles from the scheduler, publishes their info and loads them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_free_ops.attention.hopper.bwd_protocol import (
    ADDRESS,
    BLOCK_M,
    BLOCK_N,
    DOUT_STAGES,
    KV_THREADS,
    LSE_ROW,
    MBAR,
    NAMED,
    NUMBER,
    ROW_BYTES,
    STAGE_THREADS,
    TILE,
    gradient_stride,
    lse_to_subtract,
    m_block_of_step,
)
from csrc_free_ops.attention.hopper.dq_order import acc2_distance, start_block_of
from csrc_free_ops.attention.hopper.scheduler import (
    CACHED,
    CACHED_OF_ONE,
    SURVEYED_BACKWARD,
    TileScheduler,
    has_many_segments,
    has_one_segment,
    head_count,
    is_dense,
    is_inside,
    last_segment,
    next_tile_in_order,
    rows_of,
    survey_segments,
)
from csrc_free_ops.tiles.hopper.memory import await_kernel, load_blocks
from csrc_free_ops.tiles.hopper.warpgroup import advance_index, barrier_sync, made_anew, publish, shared_base
from csrc_free_ops.tiles.masks import block_span


@gluon.jit
def _boundaries(info, SPAN: gl.constexpr, POINTER: gl.constexpr, ORDER: gl.constexpr):
    """Boundaries as the functions of `scheduler` take them."""
    if has_one_segment(ORDER):
        return info.number(SPAN), info.number(SPAN + 1)
    elif is_dense(ORDER):
        return 0, 0
    else:
        return info.pointer(POINTER, gl.int32)


@gluon.jit
def _k_boundaries(info, ORDER: gl.constexpr):
    return _boundaries(info, NUMBER.K_SPAN, ADDRESS.CU_K, ORDER)


@gluon.jit
def _publish_gradients(tile, info, k_row, head, DTYPE: gl.constexpr, config):
    """Publish the addresses of the tile's dk and dv."""
    K_HEADS: gl.constexpr = config.HEADS // config.GROUP
    STRIDES: gl.constexpr = (config.STRIDE_DKT, config.STRIDE_DVT)
    for index in gl.static_range(2):
        gradient = info.pointer(ADDRESS.DK + index, DTYPE) + k_row * gradient_stride(info, STRIDES[index], index)
        if is_dense(config.ORDER):
            gradient += head // K_HEADS * info.stride(ADDRESS.BATCH_STRIDES + index)
            gradient += head % K_HEADS * info.stride(ADDRESS.HEAD_STRIDES + index)
        else:
            gradient += head * config.HEAD_DIM
        tile.publish_address(ADDRESS.DK + index, gradient.to(gl.int64))


@gluon.jit
def produce(kv_descs, q_desc, dout_desc, shared, config):
    """Take tiles of keys until none is left; publish each tile's info, and load its keys and blocks of queries."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    GROUP: gl.constexpr = config.GROUP
    HEADS: gl.constexpr = config.HEADS
    ORDER: gl.constexpr = config.ORDER
    KV_STAGES: gl.constexpr = config.KV_STAGES
    STAGES: gl.constexpr = config.STAGES
    TILES: gl.constexpr = config.TILES
    STAGE_BYTES: gl.constexpr = config.STAGE_BYTES
    Q_TILE: gl.constexpr = KV_STAGES * 4 * TILES
    DOUT_TILE: gl.constexpr = Q_TILE + STAGES * TILES
    K_HEADS: gl.constexpr = HEADS // GROUP
    L2_BYTES: gl.constexpr = CACHED_OF_ONE if has_one_segment(ORDER) and config.ORDERED else CACHED
    # No head goes alone: its tiles would wait for each other at the semaphores.
    NEVER: gl.constexpr = 2**31 - 1
    tiles, bars, info = shared.tiles, shared.bars, shared.info
    bars_at = shared_base() + config.BARRIERS_AT
    heads = head_count(info.number(NUMBER.NUM_SEGMENTS), K_HEADS, ORDER)
    segments, _ = survey_segments(
        _k_boundaries(info, ORDER), _boundaries(info, NUMBER.Q_SPAN, ADDRESS.CU_Q, ORDER),
        info.number(NUMBER.NUM_SEGMENTS), info.number(NUMBER.TOTAL_K), info.number(NUMBER.TOTAL_Q), ORDER,
        SURVEYED_BACKWARD,
    )  # fmt: skip
    info.write_number(NUMBER.SEGMENTS, segments)
    tiles_per_head, split = TileScheduler(
        _k_boundaries(info, ORDER), segments, info.number(NUMBER.TOTAL_K), heads, 2, ORDER
    ).split()
    info.write_number(NUMBER.NUM_TILES, tiles_per_head * heads)
    q_stage = 0
    stage = 0
    blocks_loaded = 0
    count = 0
    index = next_tile_in_order(info.pointer(ADDRESS.TILE_COUNTER, gl.int32), info.number(NUMBER.NUM_TILES))
    while index < info.number(NUMBER.NUM_TILES):
        segments = info.number(NUMBER.SEGMENTS)
        scheduler = TileScheduler(
            _k_boundaries(info, ORDER), segments, info.number(NUMBER.TOTAL_K),
            head_count(segments, K_HEADS, ORDER), 2, ORDER,
        )  # fmt: skip
        head, segment, k_start, k_length, row_block, _ = scheduler.locate(
            index, tiles_per_head, split, L2_BYTES // (GROUP * HEAD_DIM * ROW_BYTES), NEVER
        )
        q_boundaries = _boundaries(info, NUMBER.Q_SPAN, ADDRESS.CU_Q, ORDER)
        last = last_segment(segments, ORDER)
        q_start, q_length = rows_of(q_boundaries, segment, last, info.number(NUMBER.TOTAL_Q), ORDER)
        if has_many_segments(ORDER):
            if segments < 0:
                head, segment, k_start, k_length, row_block, q_start, q_length = scheduler.locate_falling(
                    index, tiles_per_head, q_boundaries, info.number(NUMBER.TOTAL_Q)
                )
        q_length = gl.where(is_inside(segment, last), q_length, 0)
        if row_block * BLOCK_M < k_length:
            n_start = row_block * BLOCK_M
            num_keys = gl.minimum(BLOCK_N, k_length - n_start)
            shift = q_length - k_length
            window_right = info.number(NUMBER.WINDOW_RIGHT)
            window_left = info.number(NUMBER.WINDOW_LEFT)
            m_start, full_low, full_high, m_end = block_span(
                n_start, n_start + num_keys - 1, shift, window_right, window_left, q_length,
                config.HAS_RIGHT, config.HAS_LEFT, BLOCK_M,
            )  # fmt: skip
            seen_blocks = gl.maximum((m_end - m_start + BLOCK_M - 1) // BLOCK_M, 0)
            num_blocks = gl.maximum(seen_blocks, 1)
            start_block = 0
            if config.WAVE > 1:
                start_block = start_block_of(
                    row_block // 2, num_blocks, acc2_distance(info.number(NUMBER.TOTAL_Q), BLOCK_M), config.WAVE
                )
            tile = info.tile(count)
            kv_stage = count % KV_STAGES
            k_head = head // config.DKDV_SPLITS
            k_batch = (info.number(NUMBER.TOTAL_K), K_HEADS // config.DKDV_SPLITS, config.FOLDED & 2)
            v_batch = (info.number(NUMBER.TOTAL_K), K_HEADS // config.DKDV_SPLITS, config.FOLDED & 4)
            if KV_STAGES == 1:
                if count > 0:
                    barrier_sync(NAMED.V_EMPTY, STAGE_THREADS)
                mbarrier.expect(bars.index(MBAR.KV_FULL + 1), 2 * STAGE_BYTES)
                v_bar = bars.index(MBAR.KV_FULL + 1)
                load_blocks(kv_descs[1], k_start + n_start, k_head, v_batch, v_bar, tiles, 2 * TILES, TILES, 2)
            if count >= KV_STAGES:
                barrier_sync(NAMED.KV_EMPTY + kv_stage, KV_THREADS)
            bar = bars.index(MBAR.KV_FULL + kv_stage)
            k_tile = kv_stage * 4 * TILES
            if KV_STAGES > 1:
                load_blocks(kv_descs[0], k_start + n_start, k_head, k_batch, bar, tiles, k_tile, TILES, 2)
                v_tile = (kv_stage * 4 + 2) * TILES
                load_blocks(kv_descs[1], k_start + n_start, k_head, v_batch, bar, tiles, v_tile, TILES, 2)
            tile.publish(TILE.NUM_BLOCKS, num_blocks)
            tile.publish(TILE.NUM_SEEN_BLOCKS, seen_blocks)
            tile.publish(TILE.NUM_QUERIES, gl.minimum(m_end, q_length) - m_start)
            if config.HAS_LEFT or config.HAS_RIGHT:
                tile.publish(TILE.UNMASKED_HEAD, num_blocks - (full_low - m_start) // BLOCK_M)
            elif config.WAVE > 1:
                tile.publish(TILE.START_BLOCK, start_block)
            tile.publish(TILE.MASKED_TAIL, num_blocks - (full_high - m_start) // BLOCK_M)
            tile.publish(TILE.SEEN_LOW, n_start + shift - m_start - window_right)
            tile.publish(TILE.SEEN_HIGH, n_start + shift - m_start + window_left)
            tile.publish(TILE.NUM_KEYS, num_keys)
            tile.publish(TILE.HEAD, head)
            tile.publish(TILE.N_BLOCK, row_block // 2)
            tile.publish(TILE.M_START, m_start)
            tile.publish(TILE.Q_START, q_start)
            tile.publish(TILE.Q_LENGTH, q_length)
            if is_dense(ORDER):
                tile.publish(TILE.SEMAPHORE, 0)
            else:
                tile.publish(TILE.SEMAPHORE, q_start // BLOCK_M + segment)
            tile.publish(TILE.SHIFT, shift)
            tile.publish(TILE.LAST_N_BLOCK, (k_length - 1) // BLOCK_N)
            _publish_gradients(tile, info, (k_start + n_start).to(gl.int64), head, tiles.dtype, config)
            if KV_STAGES == 1:
                load_blocks(kv_descs[0], k_start + n_start, k_head, k_batch, bar, tiles, k_tile, TILES, 2)
            mbarrier.expect(bar, (4 if KV_STAGES > 1 else 2) * STAGE_BYTES)
            publish(bars_at + (MBAR.KV_FULL + kv_stage) * 8)
            for group_head in range(GROUP):
                q_head = head * GROUP + group_head
                q_batch = (info.number(NUMBER.TOTAL_Q), HEADS, config.FOLDED & 1)
                dout_batch = (info.number(NUMBER.TOTAL_Q), HEADS, config.FOLDED & 8)
                for step in range(num_blocks):
                    m_row = m_start + m_block_of_step(step, start_block, num_blocks, config.HAS_RIGHT) * BLOCK_M
                    if blocks_loaded >= STAGES:
                        barrier_sync(NAMED.Q_EMPTY + q_stage, STAGE_THREADS)
                    q_bar = bars.index(MBAR.Q_FULL + q_stage)
                    mbarrier.expect(q_bar, STAGE_BYTES)
                    q_tile = Q_TILE + q_stage * TILES
                    load_blocks(q_desc, q_start + m_row, q_head, q_batch, q_bar, tiles, q_tile, TILES, 1)
                    local = made_anew(gl.arange(0, BLOCK_M, gl.BlockedLayout([2], [32], [1], [0])))
                    inside = m_row + local < q_length
                    row = q_head.to(gl.int64) * info.number(NUMBER.TOTAL_Q) + q_start + m_row
                    lse_ptr = info.pointer(ADDRESS.LSE, gl.float32) + row
                    lse = gl.load(lse_ptr + local, mask=inside, other=float("inf"))  # [BLOCK_M]
                    if blocks_loaded == 0:
                        await_kernel()
                    delta_ptr = info.pointer(ADDRESS.DELTA, gl.float32) + row
                    delta = gl.load(delta_ptr + local, mask=inside, other=0.0)  # [BLOCK_M]
                    if blocks_loaded >= DOUT_STAGES:
                        barrier_sync(NAMED.DOUT_EMPTY + stage, STAGE_THREADS)
                    dout_bar = bars.index(MBAR.DOUT_FULL + stage)
                    mbarrier.expect(dout_bar, STAGE_BYTES)
                    dout_tile = DOUT_TILE + stage * TILES
                    load_blocks(dout_desc, q_start + m_row, q_head, dout_batch, dout_bar, tiles, dout_tile, TILES, 1)
                    shared.lse.index(LSE_ROW + q_stage).store(lse_to_subtract(lse))
                    shared.delta.index(q_stage).store(delta)
                    publish(bars_at + (MBAR.Q_FULL + q_stage) * 8)
                    blocks_loaded += 1
                    stage, _ = advance_index(stage, DOUT_STAGES)
                    q_stage, _ = advance_index(q_stage, STAGES)
            count += 1
        index = next_tile_in_order(info.pointer(ADDRESS.TILE_COUNTER, gl.int32), info.number(NUMBER.NUM_TILES))
    # This kernel must not end before the kernel that it overlaps.
    await_kernel()
    kv_stage = count % KV_STAGES
    if count >= KV_STAGES:
        barrier_sync(NAMED.KV_EMPTY + kv_stage, KV_THREADS)
    info.tile(count).publish(TILE.NUM_BLOCKS, 0)
    mbarrier.arrive(bars.index(MBAR.KV_FULL + kv_stage), count=1)
    publish(bars_at + (MBAR.KV_FULL + kv_stage) * 8)
    # Named barriers must be complete when the kernel ends.
    if KV_STAGES == 1:
        if count > 0:
            barrier_sync(NAMED.V_EMPTY, STAGE_THREADS)
    elif count > 0:
        barrier_sync(NAMED.KV_EMPTY + 1 - kv_stage, KV_THREADS)
    for index in gl.static_range(STAGES):
        if index < blocks_loaded:
            barrier_sync(NAMED.Q_EMPTY + index, STAGE_THREADS)
    for index in gl.static_range(DOUT_STAGES):
        if index < blocks_loaded:
            barrier_sync(NAMED.DOUT_EMPTY + index, STAGE_THREADS)
