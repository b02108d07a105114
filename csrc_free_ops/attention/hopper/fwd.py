"""Attention forward on Hopper, in Gluon: the maths of `portable.fwd`, warp-specialized.

A program has one producer warp, which loads tiles to shared memory by TMA, and two or three consumer warpgroups of 64
query rows each, which multiply and exponentiate. K and V pass through a pipeline of STAGES stages that all consumers
read. A consumer's iteration for key block i follows FlashAttention-3 (arXiv 2407.08608, algorithm 2):

    issue  s = q k_i^T
    issue  o += p_{i-1} v_{i-1}              both on the tensor cores, while the other warpgroups exponentiate
    wait s;  m' = max s where that is far above m, else m;  p_i = 2^(s - m');  l = l 2^(m - m') + sum p_i
    wait o;  o *= 2^(m - m')

Without OVERLAP, o is waited for before s is issued, because registers do not hold both.

The producer takes the next tile from the scheduler while the consumers compute the last one, and publishes its
`TileInfo`. docs/glossary.md explains the words.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from csrc_free_ops.attention.hopper.fwd_config import (
    ARRIVALS,
    BLOCKS,
    HEAD,
    INSIDE,
    K_FULL,
    LSE,
    MASKED_ABOVE,
    MASKED_UP_TO,
    NUM_KEYS,
    OUT,
    Q_FULL,
    ROW,
    ROWS,
    SEEN_HIGH,
    SEEN_LOW,
    SHARED,
    V_FULL,
    ForwardConfig,
    info_index,
    out_row_stride,
)
from csrc_free_ops.attention.hopper.fwd_producer import produce
from csrc_free_ops.attention.hopper.scheduler import boundaries, is_dense
from csrc_free_ops.attention.hopper.tile_info import COUNTS, SIZES, make_info
from csrc_free_ops.tiles.hopper.memory import (
    await_kernel,
    clear_rows,
    columns_of,
    coordinates,
    flat,
    store_float_rows,
    store_rows,
)
from csrc_free_ops.tiles.hopper.versions import async_store, meet
from csrc_free_ops.tiles.hopper.warpgroup import (
    accumulate,
    await_phase,
    barrier_arrive,
    barrier_arrive_among,
    barriers_in,
    check_base,
    exp2,
    first_stage,
    join_strips,
    make_barriers,
    per_row,
    rescale_strips,
    row_maximum,
    row_partial_sums,
    scale_strips,
    select_below,
    select_from,
    shared_base,
    strips,
    wait_strips,
    wgmma_layout,
    zero_strips,
)
from csrc_free_ops.tiles.scores import LN2, LOG2E

# Below every finite score: a row that has seen no key has a maximum from which -inf can be subtracted.
LOWEST = gl.constexpr(-1e38)
# A score may exceed its row's peak by this many powers of 2 before the peak follows. Most blocks then need no rescaling
# of sums and accumulators, as in FlashAttention-4.
SLACK = gl.constexpr(8.0)


@gluon.jit
def _release(barrier, block, shared, INDEX: gl.constexpr, config):
    """Tell the producer that this consumer has read a block. In DENSE_ENDS only the first has blocks of its own."""
    if config.ENDS and INDEX == 0:
        barrier_arrive_among(barrier, gl.where(block < shared, config.STAGE_THREADS, config.Q_THREADS))
    else:
        barrier_arrive(barrier, config.STAGE_THREADS)


@gluon.jit
def _skip_tile(blocks, state, k_full, v_full, config):
    """Release all stages of a tile in which this consumer has no rows."""
    for _ in range(blocks):
        await_phase(k_full + state.index * 8, state.phase)
        barrier_arrive(config.K_EMPTY + state.index, config.STAGE_THREADS)
        await_phase(v_full + state.index * 8, state.phase)
        barrier_arrive(config.V_EMPTY + state.index, config.STAGE_THREADS)
        state = state.advance()
    return state


@gluon.jit
def _multiply_qk(q, k_tiles, stage, zeros):
    """Issue q k^T. The products of main and tail columns add up in one accumulator."""
    s = zeros
    for index in gl.static_range(len(q)):
        k = flat(k_tiles[index].index(stage))  # [BLOCK_N, columns]
        s = warpgroup_mma(q[index], k.permute([1, 0]), s, use_acc=index > 0, is_async=True)  # [64, BLOCK_N]
    return s


@gluon.jit
def _mask(s, tile, remaining, row, config):
    """s [64, BLOCK_N] with -inf where a key is not visible. `row` is the consumer's first row within the tile."""
    LAYOUT: gl.constexpr = s.type.layout
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]  # [64, 1]
    block = tile.read(BLOCKS) - remaining
    cols = block * config.BLOCK_N + gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]  # [1, BLOCK_N]
    end = tile.read(NUM_KEYS) + gl.zeros_like(rows)
    if config.HAS_RIGHT:
        end = gl.minimum(end, rows + (tile.read(SEEN_HIGH) + 1))
    s = select_below(s, cols, end, float("-inf"))
    if config.HAS_LEFT:
        s = select_from(s, cols, rows + tile.read(SEEN_LOW), float("-inf"))
    return s


@gluon.jit
def _store_strips(tile, o, FIRST: gl.constexpr):
    """Store the strips from FIRST on into a tile of shared memory, which may be wider than they are."""
    COUNT: gl.constexpr = tile.shape[1] // 8
    padded = o
    for _ in gl.static_range(FIRST + COUNT - len(o)):
        padded = padded + (o[0],)
    tile.store(join_strips(padded, FIRST, COUNT).to(tile.dtype))  # [64, 8 COUNT]


@gluon.jit
def group_rows(q_tiles, INDEX: gl.constexpr):
    """The rows of consumer INDEX: main columns, and the tail if any."""
    rows = ()
    for index in gl.static_range(len(q_tiles)):
        rows = rows + (flat(q_tiles[index].index(INDEX)),)
    return rows


@gluon.jit
def _read_columns(source, FIRST: gl.constexpr, like):
    WIDTH: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [4, 1], [1, 0])
    return source.slice(FIRST, WIDTH, 1).load(LAYOUT).to(like.dtype)  # [64, WIDTH]


@gluon.jit
def _cast_rows(q, source, config):
    """Round a consumer's fp32 rows. Without SEPARATE_Q, q lies in the memory of `source`."""
    rounded = ()
    for index in gl.static_range(len(q)):
        rounded = rounded + (_read_columns(source, q[0].shape[1] * index, q[index]),)
    if not config.SEPARATE_Q:
        meet()
    for index in gl.static_range(len(q)):
        q[index].store(rounded[index])
    fence_async_shared()
    meet()


@gluon.jit
def _store_out(o, out, address, row, head, rows, total_q, info, INDEX: gl.constexpr, config):
    """Store the first `rows` rows of o, at most 64. All 64 of a half type go through shared memory and TMA."""
    descs, tiles = out
    SPLITS: gl.constexpr = len(descs)
    WIDTH: gl.constexpr = columns_of(descs[0]) if SPLITS > 0 else 0
    if config.OUT_DTYPE == gl.float32:
        store_float_rows(address, o, rows, out_row_stride(info, config))
    elif rows >= 64:
        tma.store_wait(0)
        for index in gl.static_range(SPLITS):
            _store_strips(flat(tiles[index].index(INDEX)), o, index * (WIDTH // 8))
        fence_async_shared()
        meet()
        for index in gl.static_range(SPLITS):
            batch = (total_q, config.HEADS, config.FOLDED & 8)
            at = coordinates(descs[index], row, head, index * WIDTH, batch)
            async_store(descs[index], at, tiles[index].index(INDEX))
    else:
        store_rows(address, o, rows, config.OUT_DTYPE, out_row_stride(info, config))


@gluon.jit
def consume(INDEX: gl.constexpr, q, out, tiles, info, bars, scale, total_q, sinks_ptr, config):
    """Consumer warpgroup INDEX. `q` are its rows in shared memory, main and tail columns.

    If inputs are fp32, `tiles` hold the fp32 rows too. `out` are descriptors and tiles; both are empty if out is fp32.
    """
    k_tiles, v_tiles, q_desc_fp32 = tiles
    BLOCK_N: gl.constexpr = config.BLOCK_N
    V_WIDTH: gl.constexpr = config.V_WIDTH
    V_BYTES: gl.constexpr = BLOCK_N * V_WIDTH * 2 * config.V_TILES
    OUT_BYTES: gl.constexpr = config.OUT_DTYPE.primitive_bitwidth // 8
    SCORES: gl.constexpr = wgmma_layout(BLOCK_N)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    DTYPE: gl.constexpr = v_tiles.dtype
    # In DENSE_ENDS each consumer has a tile info of its own.
    FIRST_ROW: gl.constexpr = 0 if config.ENDS else INDEX * 64
    HAS_UNSHARED_BLOCKS: gl.constexpr = config.ENDS and INDEX == 0

    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    base = shared_base()
    k_full = base + config.BARRIERS_AT + K_FULL * 8
    v_full = base + config.BARRIERS_AT + V_FULL * 8
    state = first_stage(config.STAGES)
    count = 0
    mbarrier.wait(bars.index(Q_FULL + INDEX), 0)
    index = INDEX if config.ENDS else 0
    blocks = info.at(index).read(BLOCKS)
    while blocks > 0:
        tile = info.at(index)
        shared = 0
        if HAS_UNSHARED_BLOCKS:
            shared = tile.read(SHARED)
        if FIRST_ROW >= tile.read(ROWS):
            state = _skip_tile(blocks, state, k_full, v_full, config)
            barrier_arrive(config.Q_EMPTY + INDEX, config.Q_THREADS)
        else:
            if config.CAST_WARPS > 0:
                _cast_rows(q, q_desc_fp32, config)
            if config.SEPARATE_Q:
                barrier_arrive(config.Q_EMPTY + INDEX, config.Q_THREADS)
            await_phase(k_full + state.index * 8, state.phase)
            s = warpgroup_mma_wait(0, [_multiply_qk(q, k_tiles, state.index, zeros)])  # [64, BLOCK_N]
            _release(config.K_EMPTY + state.index, 0, shared, INDEX, config)
            if blocks == 1 and not config.SEPARATE_Q:
                barrier_arrive(config.Q_EMPTY + INDEX, config.Q_THREADS)
            masked_up_to = tile.read(MASKED_UP_TO)
            masked = blocks <= masked_up_to
            if config.HAS_LEFT:
                masked_above = tile.read(MASKED_ABOVE)
                masked = masked | (blocks > masked_above)
            if masked:
                s = _mask(s, tile, blocks, FIRST_ROW, config)
            peak = gl.maximum(row_maximum(s) * scale, LOWEST)  # [64]
            p = exp2(s * scale - peak[:, None])  # [64, BLOCK_N]
            norm = row_partial_sums(p)
            weights = strips(p.to(DTYPE))
            o = zero_strips(config.HEAD_DIM // 8)
            await_phase(v_full + state.index * 8, state.phase)
            v_stage = state.index
            state = state.advance()
            remaining = blocks - 1
            while remaining > 0:
                if not config.OVERLAP:
                    o = wait_strips(accumulate(o, weights, base + v_stage * V_BYTES, BLOCK_N, V_WIDTH), 0)
                    _release(config.V_EMPTY + v_stage, blocks - remaining - 1, shared, INDEX, config)
                await_phase(k_full + state.index * 8, state.phase)
                s = _multiply_qk(q, k_tiles, state.index, zeros)  # [64, BLOCK_N]
                if config.OVERLAP:
                    o = accumulate(o, weights, base + v_stage * V_BYTES, BLOCK_N, V_WIDTH)  # [64, HEAD_DIM]
                    s = warpgroup_mma_wait(1, [s])
                else:
                    s = warpgroup_mma_wait(0, [s])
                _release(config.K_EMPTY + state.index, blocks - remaining, shared, INDEX, config)
                # The last block has read q, so the next tile's rows can load meanwhile.
                if remaining == 1 and not config.SEPARATE_Q:
                    barrier_arrive(config.Q_EMPTY + INDEX, config.Q_THREADS)
                masked = remaining <= masked_up_to
                if config.HAS_LEFT:
                    masked = masked | (remaining > masked_above)
                if masked:
                    s = _mask(s, tile, remaining, FIRST_ROW, config)
                last_peak = peak
                highest = row_maximum(s) * scale
                # The peak need not be the highest score: sums stay far below overflow with SLACK.
                peak = gl.where(highest > last_peak + SLACK, highest, last_peak)
                rescale = exp2(last_peak - peak)
                p = exp2(s * scale - peak[:, None])  # [64, BLOCK_N]
                norm = norm * per_row(rescale, norm) + row_partial_sums(p)
                # This ends a basic block. Otherwise ptxas moves the wait for o above the exponentials.
                await_phase(v_full + state.index * 8, state.phase)
                if config.OVERLAP:
                    o = wait_strips(o, 0)
                    _release(config.V_EMPTY + v_stage, blocks - remaining - 1, shared, INDEX, config)
                weights = strips(p.to(DTYPE))
                o = rescale_strips(o, per_row(rescale, o[0]))
                v_stage = state.index
                state = state.advance()
                remaining -= 1
            last_keys = tile.read(NUM_KEYS) - (tile.read(BLOCKS) - 1) * BLOCK_N
            row = tile.read(ROW) + FIRST_ROW
            head = tile.read(HEAD)
            rows = tile.read(ROWS) - FIRST_ROW
            out_address = tile.read_address(OUT) + FIRST_ROW * out_row_stride(info, config) * OUT_BYTES
            lse_address = tile.read_address(LSE) + FIRST_ROW * 4
            if config.HAS_SINKS:
                has_sink = tile.read(INSIDE) > 0
            if last_keys < BLOCK_N:
                clear_rows(base + v_stage * V_BYTES, last_keys, BLOCK_N, V_WIDTH, config.V_TILES)
                fence_async_shared()
                meet()
            o = wait_strips(accumulate(o, weights, base + v_stage * V_BYTES, BLOCK_N, V_WIDTH), 0)  # [64, HEAD_DIM]
            _release(config.V_EMPTY + v_stage, blocks - 1, shared, INDEX, config)

            total = gl.convert_layout(gl.sum(norm, 1), ROW_LAYOUT, assert_trivial=True)  # [64]
            if config.HAS_SINKS:
                sink = gl.load(sinks_ptr + head % config.HEADS).to(gl.float32) * LOG2E
                highest = gl.maximum(peak, gl.where(has_sink, sink, LOWEST))
                share = exp2(peak - highest)
                total = total * share + gl.where(has_sink, exp2(sink - highest), 0.0)
                peak = highest
            # Not total > 0, because a row of NaN is not a row without keys.
            inverse = gl.where(total == 0, 0.0, 1.0 / total)
            if config.HAS_LSE:
                lse = gl.where(total == 0, float("-inf"), (peak + gl.log2(total)) * LN2)
                local = gl.arange(0, 64, ROW_LAYOUT)
                gl.store(lse_address.to(gl.pointer_type(gl.float32), bitcast=True) + local, lse, mask=local < rows)
            if config.HAS_SINKS:
                inverse = inverse * share
            o = scale_strips(o, per_row(inverse, o[0]))
            _store_out(o, out, out_address, row, head, rows, total_q, info, INDEX, config)
        count += 1
        mbarrier.wait(bars.index(Q_FULL + INDEX), count & 1)
        index = info_index(count, INDEX, config)
        blocks = info.at(index).read(BLOCKS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_hopper_kernel(
    q_main, q_tail, k_main, k_tail, v_desc, out_main, out_tail,
    out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, tile_counter_ptr,
    stride_ob, stride_oh, stride_ot, total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, OUT_STRIDE: gl.constexpr,
    FOLDED: gl.constexpr, SKIPPED_ROWS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). scale is the softmax scale times log2(e). *_tail count only if HEAD_DIM has a tail.

    tile_counter_ptr is an int32 that is 0 before and after a launch; no concurrent launch may use it. ORDER is SINGLE
    for one segment, BY_LENGTH for at most RANKED - 2 segments, else CLOSED_FORM. A batch [B, H, S, D] has no
    boundaries: ORDER is DENSE_CUT or DENSE_ENDS, total_* is the length of a sequence, and num_segments the number of
    sequences. FOLDED has a bit for each of q, k, v and out (`coordinates`). With SKIPPED_ROWS,
    segments of up to so many rows are left to the kernel before, unless a boundary falls.
    """
    MAIN: gl.constexpr = columns_of(q_main)
    V_WIDTH: gl.constexpr = columns_of(v_desc)
    DTYPE: gl.constexpr = q_main.dtype
    config = ForwardConfig(
        HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, ORDER, GROUPS, BLOCK_N, STAGES, OVERLAP, HAS_LSE, HAS_SINKS,
        OUT_STRIDE, FOLDED, DTYPE, V_WIDTH, SKIPPED_ROWS=SKIPPED_ROWS,
    )  # fmt: skip
    gl.static_assert(GROUPS == 2 or GROUPS == 3, "the kernel has two or three consumer warpgroups: BLOCK_M 128 or 192")
    gl.static_assert(config.has_barriers(), "too many STAGES or GROUPS: Hopper has 16 named barriers")
    gl.static_assert(
        config.has_registers(CONSUMER_REGISTERS, PRODUCER_REGISTERS),
        "CONSUMER_REGISTERS and PRODUCER_REGISTERS exceed the 65536 registers of a multiprocessor",
    )
    # Reads and writes come after it in all partitions, because they begin where this one starts them.
    await_kernel()
    # Loaded now, they are there when the producer asks for them.
    boundaries_of = (boundaries(cu_q_ptr, ORDER), boundaries(cu_k_ptr, ORDER))
    # The largest buffer and so the first: `accumulate` finds v at the base. The tile behind those of v holds barriers.
    V_BUFFERS: gl.constexpr = max(STAGES * config.V_TILES, GROUPS * 64 * MAIN // (BLOCK_N * V_WIDTH)) + 1
    v_tiles = gl.allocate_shared_memory(DTYPE, [V_BUFFERS] + v_desc.block_shape, v_desc.layout)
    check_base(v_tiles.index(0).reshape([BLOCK_N, V_WIDTH]))
    k_tiles = (gl.allocate_shared_memory(DTYPE, [STAGES] + k_main.block_shape, k_main.layout),)
    q_tiles = (gl.allocate_shared_memory(DTYPE, [GROUPS] + q_main.block_shape, q_main.layout),)
    out_tiles = (gl.allocate_shared_memory(DTYPE, [GROUPS] + q_main.block_shape, q_main.layout),)
    q_descs = (q_main,)
    k_descs = (k_main,)
    out_descs = (out_main,)
    if HEAD_DIM > MAIN:
        k_tiles = k_tiles + (gl.allocate_shared_memory(DTYPE, [STAGES] + k_tail.block_shape, k_tail.layout),)
        q_tiles = q_tiles + (gl.allocate_shared_memory(DTYPE, [GROUPS] + q_tail.block_shape, q_tail.layout),)
        out_tiles = out_tiles + (gl.allocate_shared_memory(DTYPE, [GROUPS] + q_tail.block_shape, q_tail.layout),)
        q_descs = q_descs + (q_tail,)
        k_descs = k_descs + (k_tail,)
        out_descs = out_descs + (out_tail,)
    gl.static_assert(
        config.has_memory((v_tiles,) + k_tiles + q_tiles + out_tiles),
        "the tile needs more than the 227 KiB of shared memory: lower BLOCK_N or STAGES",
    )
    info = make_info(False)
    if is_dense(ORDER):
        info.fill((), (out_ptr, lse_ptr, tile_counter_ptr, stride_ob, stride_oh, stride_ot))
    else:
        info.fill((), (out_ptr, lse_ptr, tile_counter_ptr))
    bars = barriers_in(v_tiles.index(STAGES * config.V_TILES))
    make_barriers(shared_base() + config.BARRIERS_AT, ARRIVALS)
    fence_async_shared()
    descs = (q_descs, k_descs, v_desc)
    all_tiles = (q_tiles, k_tiles, v_tiles)
    sizes = (total_q, total_k, num_segments, window_left, window_right)
    tiles = (k_tiles, v_tiles, ())
    out = (out_descs, out_tiles)
    # Without sinks any pointer will do.
    sinks = lse_ptr
    if HAS_SINKS:
        sinks = sinks_ptr
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, group_rows(q_tiles, 0), out, tiles, info, bars, scale, total_q, sinks, config)),
                (consume, (1, group_rows(q_tiles, 1), out, tiles, info, bars, scale, total_q, sinks, config)),
                (produce, (descs, boundaries_of, all_tiles, info, bars, sizes, config)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, group_rows(q_tiles, 0), out, tiles, info, bars, scale, total_q, sinks, config)),
                (consume, (1, group_rows(q_tiles, 1), out, tiles, info, bars, scale, total_q, sinks, config)),
                (consume, (2, group_rows(q_tiles, 2), out, tiles, info, bars, scale, total_q, sinks, config)),
                (produce, (descs, boundaries_of, all_tiles, info, bars, sizes, config)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
