"""The producer warp of the Hopper forward: it takes tiles, publishes their info, and loads what consumers read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_free_ops.attention.hopper.fwd_config import (
    BLOCKS,
    CAST_COUNTERS,
    HEAD,
    INSIDE,
    K_FULL,
    LSE,
    MASKED_ABOVE,
    MASKED_UP_TO,
    NUM_KEYS,
    OUT,
    OUT_BATCH_STRIDE,
    OUT_HEAD_STRIDE,
    Q_FULL,
    ROW,
    ROWS,
    SEEN_HIGH,
    SEEN_LOW,
    SHARED,
    TILE_COUNTER,
    V_FULL,
    info_index,
    out_row_stride,
)
from csrc_free_ops.attention.hopper.fwd_fp32_producer import await_cast, next_tile_and_clear
from csrc_free_ops.attention.hopper.scheduler import (
    ALONE,
    CACHED,
    CACHED_OF_ONE,
    SURVEYED_FORWARD,
    TileScheduler,
    has_many_segments,
    has_one_segment,
    head_count,
    is_dense,
    is_inside,
    last_segment,
    next_tile,
    rows_of,
    survey_segments,
    tiles_besides_short,
)
from csrc_free_ops.attention.hopper.tile_info import TILE_INFOS
from csrc_free_ops.tiles.hopper.memory import columns_of, load_tile
from csrc_free_ops.tiles.hopper.warpgroup import advance_index, barrier_sync, barrier_sync_among, publish, shared_base
from csrc_free_ops.tiles.masks import block_span

# Bytes of a key and its value, per column.
ROW_BYTES = gl.constexpr(4)


@gluon.jit
def _publish_tile(info, index, span, first, rows, location, sizes, config):
    """Publish the info of a tile and return how many blocks of keys it sees.

    The tile has `rows` rows from row `first` of its segment on. One that sees no key gets one block, masked as a whole.
    """
    low, full_low, full_high, high = span
    head, segment, q_start, shift, k_length = location
    total_q, total_k, segments, window_left, window_right = sizes
    tile = info.at(index)
    blocks = gl.maximum((high - low + config.BLOCK_N - 1) // config.BLOCK_N, 1)
    row = q_start + first
    tile.publish(BLOCKS, blocks)
    if config.ENDS:
        # The other consumer sees keys of these blocks that this one does not.
        tile.publish(NUM_KEYS, gl.minimum(blocks * config.BLOCK_N, k_length))
    else:
        tile.publish(NUM_KEYS, gl.minimum(high, k_length) - low)
    tile.publish(MASKED_ABOVE, blocks - (full_low - low) // config.BLOCK_N)
    tile.publish(MASKED_UP_TO, blocks - (full_high - low) // config.BLOCK_N)
    tile.publish(SEEN_LOW, first + shift - low - window_left)
    tile.publish(SEEN_HIGH, first + shift - low + window_right)
    tile.publish(ROW, row)
    tile.publish(ROWS, rows)
    tile.publish(HEAD, head)
    if config.HAS_SINKS:
        tile.publish(INSIDE, is_inside(segment, last_segment(segments, config.ORDER)))
    out_ptr = info.pointer(OUT, config.OUT_DTYPE) + row.to(gl.int64) * out_row_stride(info, config)
    if is_dense(config.ORDER):
        out_ptr += head // config.HEADS * info.stride(OUT_BATCH_STRIDE)
        out_ptr += head % config.HEADS * info.stride(OUT_HEAD_STRIDE)
    else:
        out_ptr += head * config.HEAD_DIM
    tile.publish_address(OUT, out_ptr.to(gl.int64))
    lse_ptr = info.pointer(LSE, gl.float32)
    tile.publish_address(LSE, (lse_ptr + head.to(gl.int64) * total_q + row).to(gl.int64))
    return blocks


@gluon.jit
def produce(descs, boundaries_of, tiles, info, bars, sizes, config):
    q_descs, k_descs, v_desc = descs
    cu_q, cu_k = boundaries_of
    q_tiles, k_tiles, v_tiles = tiles
    total_q, total_k, num_segments, window_left, window_right = sizes
    GROUPS: gl.constexpr = config.GROUPS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    V_TILES: gl.constexpr = config.V_TILES
    V_WIDTH: gl.constexpr = config.V_WIDTH
    K_SPLITS: gl.constexpr = len(k_descs)
    MAIN: gl.constexpr = columns_of(k_descs[0])
    TAIL: gl.constexpr = columns_of(k_descs[K_SPLITS - 1]) if K_SPLITS > 1 else 0
    Q_MAIN: gl.constexpr = columns_of(q_descs[0])
    Q_BYTES: gl.constexpr = 64 * (Q_MAIN * 4 if config.CAST_WARPS > 0 else (MAIN + TAIL) * 2)
    # Keys that are still being rounded: with fewer heads at a time, the first are ready sooner.
    CACHED_HERE: gl.constexpr = CACHED // 2 if config.CAST_WARPS > 0 else CACHED
    CACHED_BYTES: gl.constexpr = CACHED_OF_ONE if has_one_segment(config.ORDER) else CACHED_HERE
    CACHED_ROWS: gl.constexpr = CACHED_BYTES * config.GROUP // (config.HEAD_DIM * ROW_BYTES)
    ALONE_ROWS: gl.constexpr = ALONE * config.GROUP // (config.HEAD_DIM * ROW_BYTES)

    q_batch = (total_q, config.HEADS, config.FOLDED & 1)
    k_batch = (total_k, config.HEADS // config.GROUP, config.FOLDED & 2)
    v_batch = (total_k, config.HEADS // config.GROUP, config.FOLDED & 4)
    bars_at = shared_base() + config.BARRIERS_AT
    segments, longest = survey_segments(cu_q, cu_k, num_segments, total_q, total_k, config.ORDER, SURVEYED_FORWARD)
    sizes = (total_q, total_k, segments, window_left, window_right)
    heads = head_count(num_segments, config.HEADS, config.ORDER)
    scheduler = TileScheduler(cu_q, segments, total_q, heads, GROUPS, config.ORDER)
    tiles_per_head, split = scheduler.split()
    num_tiles = tiles_per_head * heads
    if config.SKIPPED_ROWS > 0:
        looked_at, first_tile = tiles_besides_short(
            cu_q, segments, longest, total_q, tiles_per_head, config.SKIPPED_ROWS, 64 * GROUPS
        )
        num_tiles = looked_at * heads
    stage = 0
    loaded = 0
    count = 0
    shared = 0
    index = gl.program_id(0)
    while index < num_tiles:
        at = index
        if config.SKIPPED_ROWS > 0:
            at = index // looked_at * tiles_per_head + first_tile + index % looked_at
        head, segment, q_start, q_length, row_block, num_blocks = scheduler.locate(
            at, tiles_per_head, split, CACHED_ROWS, ALONE_ROWS
        )  # fmt: skip
        last = last_segment(segments, config.ORDER)
        k_start, k_length = rows_of(cu_k, segment, last, total_k, config.ORDER)
        if has_many_segments(config.ORDER):
            if segments < 0:
                head, segment, q_start, q_length, row_block, k_start, k_length = scheduler.locate_falling(
                    at, tiles_per_head, cu_k, total_k
                )
        k_length = gl.where(is_inside(segment, last), k_length, 0)
        first = row_block * 64
        if config.HAS_RIGHT and not config.ENDS:
            # Later rows see more keys, so the last tile comes first.
            first = gl.maximum((q_length + 63) // 64 - num_blocks - row_block, 0) * 64
            num_blocks = gl.minimum(num_blocks, (q_length + 63) // 64 - row_block)
        if config.SKIPPED_ROWS > 0:
            is_short = is_inside(segment, last) & (q_length <= config.SKIPPED_ROWS) & (segments >= 0)
            q_length = gl.where(is_short, 0, q_length)
        if row_block * 64 < q_length:
            rows = gl.minimum(num_blocks * 64, q_length - first)
            shift = k_length - q_length
            low, full_low, full_high, high = block_span(
                first, first + rows - 1, shift, window_left, window_right, k_length,
                config.HAS_LEFT, config.HAS_RIGHT, BLOCK_N,
            )  # fmt: skip
            info_at = count % TILE_INFOS
            for group in gl.static_range(GROUPS):
                if count > 0:
                    barrier_sync(config.Q_EMPTY + group, config.Q_THREADS)
            row = q_start + first
            group_stride = 64
            location = (head, segment, q_start, shift, k_length)
            span = (low, full_low, full_high, high)
            if config.ENDS:
                info_at = info_index(count, 0, config)
                mirrored = tiles_per_head * (GROUPS * 64) - 64 - first
                group_stride = mirrored - first
                mirrored_span = block_span(
                    mirrored, mirrored + 63, shift, window_left, window_right, k_length,
                    config.HAS_LEFT, config.HAS_RIGHT, BLOCK_N,
                )  # fmt: skip
                shared = _publish_tile(info, info_at + 1, mirrored_span, mirrored, 64, location, sizes, config)
                info.at(info_at).publish(SHARED, shared)
            blocks = _publish_tile(info, info_at, span, first, rows, location, sizes, config)
            for group in gl.static_range(GROUPS):
                bar = bars.index(Q_FULL + group)
                mbarrier.expect(bar, Q_BYTES)
                publish(bars_at + (Q_FULL + group) * 8)
                for split_index in gl.static_range(len(q_descs)):
                    load_tile(
                        q_descs[split_index], row + group * group_stride, head, split_index * Q_MAIN, q_batch, bar,
                        q_tiles[split_index].index(group),
                    )  # fmt: skip
            k_head = head // config.GROUP
            if config.CAST_WARPS > 0:
                await_cast(info.pointer(CAST_COUNTERS, gl.int32), k_head, total_k, config.HEAD_DIM)
            for block in range(blocks):
                key = k_start + low + block * BLOCK_N
                readers = gl.where(loaded - STAGES < shared, config.STAGE_THREADS, config.Q_THREADS)
                if loaded >= STAGES:
                    if config.ENDS:
                        barrier_sync_among(config.K_EMPTY + stage, readers)
                    else:
                        barrier_sync(config.K_EMPTY + stage, config.STAGE_THREADS)
                bar = bars.index(K_FULL + stage)
                mbarrier.expect(bar, BLOCK_N * (MAIN + TAIL) * 2)
                for split_index in gl.static_range(K_SPLITS):
                    load_tile(
                        k_descs[split_index], key, k_head, split_index * MAIN, k_batch, bar,
                        k_tiles[split_index].index(stage),
                    )  # fmt: skip
                if loaded >= STAGES:
                    if config.ENDS:
                        barrier_sync_among(config.V_EMPTY + stage, readers)
                    else:
                        barrier_sync(config.V_EMPTY + stage, config.STAGE_THREADS)
                bar = bars.index(V_FULL + stage)
                mbarrier.expect(bar, BLOCK_N * V_TILES * V_WIDTH * 2)
                for v_tile in gl.static_range(V_TILES):
                    load_tile(
                        v_desc, key, k_head, v_tile * V_WIDTH, v_batch, bar, v_tiles.index(stage * V_TILES + v_tile)
                    )
                loaded += 1
                stage, _ = advance_index(stage, STAGES)
            count += 1
        if config.CAST_WARPS > 0:
            index = next_tile_and_clear(
                info.pointer(TILE_COUNTER, gl.int32), info.pointer(CAST_COUNTERS, gl.int32), num_tiles,
                num_segments * (config.HEADS // config.GROUP),
            )  # fmt: skip
        else:
            index = next_tile(info.pointer(TILE_COUNTER, gl.int32), num_tiles)
    for group in gl.static_range(GROUPS):
        if count > 0:
            barrier_sync(config.Q_EMPTY + group, config.Q_THREADS)
    for group in gl.static_range(GROUPS):
        info.at(info_index(count, group, config)).publish(BLOCKS, 0)
        mbarrier.arrive(bars.index(Q_FULL + group), count=1)
        publish(bars_at + (Q_FULL + group) * 8)
    # Consumers arrived at these named barriers for the last stages; a kernel must leave none half full.
    for stage_index in gl.static_range(STAGES):
        if stage_index < loaded:
            if config.ENDS:
                # The last block that was in this stage.
                last = loaded - 1 - (loaded - 1 - stage_index) % STAGES
                readers = gl.where(last < shared, config.STAGE_THREADS, config.Q_THREADS)
                barrier_sync_among(config.K_EMPTY + stage_index, readers)
                barrier_sync_among(config.V_EMPTY + stage_index, readers)
            else:
                barrier_sync(config.K_EMPTY + stage_index, config.STAGE_THREADS)
                barrier_sync(config.V_EMPTY + stage_index, config.STAGE_THREADS)
