"""Attention forward on Hopper, in Gluon: the maths of `portable_fwd`, by warp specialization.

A program has one producer warp, which brings tiles to shared memory by TMA, and two or three consumer warpgroups of 64
query rows each, which multiply and exponentiate. K and V pass through a ring of STAGES stages that all consumers read.
A consumer's step on key block i, after FlashAttention-3 (arXiv 2407.08608, algorithm 2):

    issue  s = q k_i^T
    issue  o += p_{i-1} v_{i-1}              both on the tensor cores, while the other warpgroups exponentiate
    wait s;  m' = max s where that is far above m, else m;  p_i = 2^(s - m');  l = l 2^(m - m') + sum p_i
    wait o;  o *= 2^(m - m')

Without OVERLAP o is waited for before s is issued: there are no registers for both.

The producer draws the next tile (`hopper_work`) while the consumers are busy with the last, and tells them by a note in
shared memory.
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

from csrc_free_ops.attention.hopper.fwd_producer import (
    ARRIVALS,
    BLOCKS,
    FIRST_BARRIER,
    HEAD,
    HEAD_MASKED,
    INSIDE,
    K_FULL,
    KEYS,
    LSE,
    OUT,
    Q_FULL,
    ROW,
    ROWS,
    SEEN_HIGH,
    SEEN_LOW,
    SHARED,
    TAIL_MASKED,
    V_FULL,
    produce,
)
from csrc_free_ops.attention.hopper.scheduler import (
    DENSE_ENDS,
    NOTE,
    NOTES,
    POINTERS,
    boundaries,
    is_dense,
    keep,
    pass_over,
    read_note,
)
from csrc_free_ops.tiles.hopper.memory import (
    await_kernel,
    clear_rows,
    columns_of,
    coordinates,
    flat,
    store_float_rows,
    store_rows,
)
from csrc_free_ops.tiles.hopper.warpgroup import (
    accumulate,
    await_phase,
    barrier_arrive,
    barrier_arrive_among,
    check_base,
    exp2,
    join_strips,
    make_barriers,
    meet,
    option,
    per_row,
    rescale_strips,
    row_maximum,
    row_partial_sums,
    scale_strips,
    shared_base,
    strips,
    turn_around,
    wait_strips,
    wgmma_layout,
    zero_strips,
)
from csrc_free_ops.tiles.scores import LN2, LOG2E

# Below every finite score: rows that have seen no key have a maximum from which -inf can be subtracted.
LOWEST = gl.constexpr(-1e38)
# By so many powers of 2 a score may pass its row's peak before the peak follows and all sums are scaled: most blocks
# then leave them alone, as in FlashAttention-4.
SLACK = gl.constexpr(8.0)


@gluon.jit
def _arrive(barrier, block, shared, ALONE: gl.constexpr, EMPTY: gl.constexpr):
    """This warpgroup has read a block; with ALONE, only the first `shared` of them have other readers."""
    if ALONE:
        barrier_arrive_among(barrier, gl.where(block < shared, EMPTY, 160))
    else:
        barrier_arrive(barrier, EMPTY)


@gluon.jit
def _multiply_qk(q, k_tiles, stage, zeros):
    """Begins q k^T. The products of the parts of the head dimension add up in one accumulator."""
    s = zeros
    for part in gl.static_range(len(q)):
        k = flat(k_tiles[part].index(stage))
        s = warpgroup_mma(q[part], k.permute([1, 0]), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def _mask(s, notes, slot, left, row, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    LAYOUT: gl.constexpr = s.type.layout
    BLOCK_N: gl.constexpr = s.shape[1]
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    block = read_note(notes, slot, BLOCKS) - left
    cols = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
    s = gl.where((cols < read_note(notes, slot, KEYS)) & (rows >= 0), s, float("-inf"))
    if HAS_RIGHT:
        s = gl.where(cols <= rows + read_note(notes, slot, SEEN_HIGH), s, float("-inf"))
    if HAS_LEFT:
        s = gl.where(cols >= rows + read_note(notes, slot, SEEN_LOW), s, float("-inf"))
    return s


@gluon.jit
def _store_strips(tile, o, FIRST: gl.constexpr):
    """The strips from FIRST on into a tile of shared memory, which may be wider than they are."""
    COUNT: gl.constexpr = tile.shape[1] // 8
    padded = o
    for _ in gl.static_range(FIRST + COUNT - len(o)):
        padded = padded + (o[0],)
    tile.store(join_strips(padded, FIRST, COUNT).to(tile.dtype))


@gluon.jit
def group_rows(q_tiles, INDEX: gl.constexpr):
    """The parts of a warpgroup's rows."""
    parts = ()
    for part in gl.static_range(len(q_tiles)):
        parts = parts + (flat(q_tiles[part].index(INDEX)),)
    return parts


@gluon.jit
def _read_columns(source, FIRST: gl.constexpr, like):
    WIDTH: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [4, 1], [1, 0])
    return source.slice(FIRST, WIDTH, 1).load(LAYOUT).to(like.dtype)


@gluon.jit
def _cast_rows(parts, source, APART: gl.constexpr):
    """The parts of a tile of fp32, rounded; to where it lies, if not APART. By one warpgroup."""
    rounded = ()
    for index in gl.static_range(len(parts)):
        rounded = rounded + (_read_columns(source, parts[0].shape[1] * index, parts[index]),)
    if not APART:
        meet()
    for index in gl.static_range(len(parts)):
        parts[index].store(rounded[index])
    fence_async_shared()
    meet()


@gluon.jit
def consume(INDEX: gl.constexpr, q, out, tiles, bars, scale, total_q, sinks_ptr, OPTIONS: gl.constexpr):
    """Of rows q, the parts of a tile; where they come in fp32, `q_source` has them, which lies where they will.

    `out` are descriptors and tiles, or neither where out is fp32.
    """
    Q_APART: gl.constexpr = option(OPTIONS, "Q_APART")
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    BLOCK_N: gl.constexpr = option(OPTIONS, "BLOCK_N")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    OVERLAP: gl.constexpr = option(OPTIONS, "OVERLAP")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    HAS_LSE: gl.constexpr = option(OPTIONS, "HAS_LSE")
    HAS_SINKS: gl.constexpr = option(OPTIONS, "HAS_SINKS")
    OUT_STRIDE: gl.constexpr = option(OPTIONS, "OUT_STRIDE")
    FOLDED: gl.constexpr = option(OPTIONS, "FOLDED")
    k_tiles, v_tiles, notes, addresses, q_source = tiles
    out_descs, out_tiles = out
    EMPTY: gl.constexpr = 32 + 128 * GROUPS
    K_EMPTY: gl.constexpr = FIRST_BARRIER
    V_EMPTY: gl.constexpr = K_EMPTY + STAGES
    Q_EMPTY: gl.constexpr = V_EMPTY + STAGES
    WIDTH: gl.constexpr = v_tiles.shape[len(v_tiles.shape) - 1]
    OUT_PARTS: gl.constexpr = len(out_descs)
    OUT_WIDTH: gl.constexpr = columns_of(out_descs[0]) if OUT_PARTS > 0 else 0
    OUT_BYTES: gl.constexpr = option(OPTIONS, "OUT_DTYPE").primitive_bitwidth // 8
    V_TILES: gl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    STAGE_BYTES: gl.constexpr = BLOCK_N * WIDTH * 2 * V_TILES
    SCORES: gl.constexpr = wgmma_layout(BLOCK_N)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    DTYPE: gl.constexpr = v_tiles.dtype
    STRIPS: gl.constexpr = HEAD_DIM // 8
    ENDS: gl.constexpr = option(OPTIONS, "ORDER") == DENSE_ENDS
    OWN: gl.constexpr = 0 if ENDS else INDEX * 64
    # The second has rows that see no more blocks than the first one's.
    ALONE: gl.constexpr = ENDS and INDEX == 0

    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    base = shared_base()
    k_full = base + STAGES * STAGE_BYTES + K_FULL * 8
    v_full = base + STAGES * STAGE_BYTES + V_FULL * 8
    stage = 0
    phase = 0
    turn = 0
    mbarrier.wait(bars.index(Q_FULL + INDEX), 0)
    slot = INDEX if ENDS else 0
    blocks = read_note(notes, slot, BLOCKS)
    while blocks > 0:
        shared = 0
        if ALONE:
            shared = read_note(notes, slot, SHARED)
        if OWN >= read_note(notes, slot, ROWS):
            stage, phase = pass_over(blocks, stage, phase, k_full, v_full, K_EMPTY, V_EMPTY, EMPTY, STAGES)
            barrier_arrive(Q_EMPTY + INDEX, 160)
        else:
            if option(OPTIONS, "CASTERS") > 0:
                _cast_rows(q, q_source, Q_APART)
            if Q_APART:
                barrier_arrive(Q_EMPTY + INDEX, 160)
            await_phase(k_full + stage * 8, phase)
            s = warpgroup_mma_wait(0, [_multiply_qk(q, k_tiles, stage, zeros)])
            _arrive(K_EMPTY + stage, 0, shared, ALONE, EMPTY)
            if blocks == 1 and not Q_APART:
                barrier_arrive(Q_EMPTY + INDEX, 160)
            # Blocks are counted from the last: the first ones and the last ones may need masks.
            tail_masked = read_note(notes, slot, TAIL_MASKED)
            masked = blocks <= tail_masked
            if HAS_LEFT:
                head_masked = read_note(notes, slot, HEAD_MASKED)
                masked = masked | (blocks > head_masked)
            if masked:
                s = _mask(s, notes, slot, blocks, OWN, HAS_LEFT, HAS_RIGHT)
            peak = gl.maximum(row_maximum(s) * scale, LOWEST)
            p = exp2(s * scale - peak[:, None])
            norm = row_partial_sums(p)
            weights = strips(p.to(DTYPE))
            o = zero_strips(STRIPS)
            await_phase(v_full + stage * 8, phase)
            behind = stage
            stage, wrapped = turn_around(stage, STAGES)
            phase = phase ^ wrapped
            left = blocks - 1
            while left > 0:
                if not OVERLAP:
                    o = wait_strips(accumulate(o, weights, base + behind * STAGE_BYTES, BLOCK_N, WIDTH), 0)
                    _arrive(V_EMPTY + behind, blocks - left - 1, shared, ALONE, EMPTY)
                await_phase(k_full + stage * 8, phase)
                s = _multiply_qk(q, k_tiles, stage, zeros)
                if OVERLAP:
                    o = accumulate(o, weights, base + behind * STAGE_BYTES, BLOCK_N, WIDTH)
                    s = warpgroup_mma_wait(1, [s])
                else:
                    s = warpgroup_mma_wait(0, [s])
                _arrive(K_EMPTY + stage, blocks - left, shared, ALONE, EMPTY)
                # The next tile's rows come while this one's last block is at work.
                if left == 1 and not Q_APART:
                    barrier_arrive(Q_EMPTY + INDEX, 160)
                masked = left <= tail_masked
                if HAS_LEFT:
                    masked = masked | (left > head_masked)
                if masked:
                    s = _mask(s, notes, slot, left, OWN, HAS_LEFT, HAS_RIGHT)
                before = peak
                highest = row_maximum(s) * scale
                # A peak need not be the highest score; what it is below stays far from overflow.
                peak = gl.where(highest > before + SLACK, highest, before)
                rescale = exp2(before - peak)
                p = exp2(s * scale - peak[:, None])
                norm = norm * per_row(rescale, norm) + row_partial_sums(p)
                # Also the end of a basic block: without one ptxas moves the wait below above the exponentials.
                await_phase(v_full + stage * 8, phase)
                if OVERLAP:
                    o = wait_strips(o, 0)
                    _arrive(V_EMPTY + behind, blocks - left - 1, shared, ALONE, EMPTY)
                weights = strips(p.to(DTYPE))
                o = rescale_strips(o, per_row(rescale, o[0]))
                behind = stage
                stage, wrapped = turn_around(stage, STAGES)
                phase = phase ^ wrapped
                left -= 1
            keys = read_note(notes, slot, KEYS) - (read_note(notes, slot, BLOCKS) - 1) * BLOCK_N
            row = read_note(notes, slot, ROW) + OWN
            head = read_note(notes, slot, HEAD)
            rows = read_note(notes, slot, ROWS) - OWN
            out_address = read_note(addresses, slot, OUT) + OWN * OUT_STRIDE * OUT_BYTES
            lse_address = read_note(addresses, slot, LSE) + OWN * 4
            if HAS_SINKS:
                has_sink = read_note(notes, slot, INSIDE) > 0
            if keys < BLOCK_N:
                clear_rows(base + behind * STAGE_BYTES, keys, BLOCK_N, WIDTH, V_TILES)
                fence_async_shared()
                meet()
            o = wait_strips(accumulate(o, weights, base + behind * STAGE_BYTES, BLOCK_N, WIDTH), 0)
            _arrive(V_EMPTY + behind, blocks - 1, shared, ALONE, EMPTY)

            total = gl.convert_layout(gl.sum(norm, 1), ROW_LAYOUT, assert_trivial=True)
            if HAS_SINKS:
                sink = gl.load(sinks_ptr + head % HEADS).to(gl.float32) * LOG2E
                highest = gl.maximum(peak, gl.where(has_sink, sink, LOWEST))
                share = exp2(peak - highest)
                total = total * share + gl.where(has_sink, exp2(sink - highest), 0.0)
                peak = highest
            # Not total > 0: a row of NaN is no row without keys.
            inverse = gl.where(total == 0, 0.0, 1.0 / total)
            if HAS_LSE:
                lse = gl.where(total == 0, float("-inf"), (peak + gl.log2(total)) * LN2)
                local = gl.arange(0, 64, ROW_LAYOUT)
                gl.store(lse_address.to(gl.pointer_type(gl.float32), bitcast=True) + local, lse, mask=local < rows)
            if HAS_SINKS:
                inverse = inverse * share
            o = scale_strips(o, per_row(inverse, o[0]))
            if OUT_BYTES == 4:
                store_float_rows(out_address, o, rows, OUT_STRIDE)
            elif rows >= 64:
                tma.store_wait(0)
                for part in gl.static_range(OUT_PARTS):
                    _store_strips(flat(out_tiles[part].index(INDEX)), o, part * (OUT_WIDTH // 8))
                fence_async_shared()
                meet()
                for part in gl.static_range(OUT_PARTS):
                    at = coordinates(out_descs[part], row, head, part * OUT_WIDTH, (total_q, HEADS, FOLDED & 8))
                    tma.async_copy_shared_to_global(out_descs[part], at, out_tiles[part].index(INDEX))
            else:
                store_rows(out_address, o, rows, DTYPE, OUT_STRIDE)
        turn += 1
        mbarrier.wait(bars.index(Q_FULL + INDEX), turn & 1)
        slot = turn % 2 * GROUPS + INDEX if ENDS else turn % NOTES
        blocks = read_note(notes, slot, BLOCKS)
    tma.store_wait(0)


@gluon.jit
def _attention_fwd_hopper_kernel(
    q_main, q_tail, k_main, k_tail, v_desc, out_main, out_tail,
    out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, ticket_ptr,
    stride_ob, stride_oh, total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, OUT_STRIDE: gl.constexpr,
    FOLDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). scale is that of softmax times log2(e); *_tail count only where HEAD_DIM has a tail.

    ticket_ptr is an int32 that holds 0, and does again when the kernel ends; no other launch may use it meanwhile.
    ORDER is SINGLE for one segment, BY_LENGTH for at most RANKED - 2 of them, else IN_PLACE. Of [B, H, S, D], which has
    no boundaries, it is DENSE_CUT or DENSE_ENDS, total_* is the length of a sequence and num_segments their number;
    FOLDED has a bit for each of q, k, v and out (`coordinates`).
    """
    MAIN: gl.constexpr = columns_of(q_main)
    WIDTH: gl.constexpr = columns_of(v_desc)
    V_TILES: gl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    DTYPE: gl.constexpr = q_main.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Reads and writes are behind it, of the other partitions too: they begin where this one hands over to them.
    await_kernel()
    # Loaded now, they are there when the producer asks for them.
    boundaries_of = (boundaries(cu_q_ptr, ORDER), boundaries(cu_k_ptr, ORDER))
    # The largest, and first: it lies where `accumulate` looks for it. The tile behind those of v is for barriers.
    PLACES: gl.constexpr = max(STAGES * V_TILES, GROUPS * 64 * MAIN // (BLOCK_N * WIDTH)) + 1
    v_tiles = gl.allocate_shared_memory(DTYPE, [PLACES] + v_desc.block_shape, v_desc.layout)
    check_base(v_tiles.index(0).reshape([BLOCK_N, WIDTH]))
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
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * NOTE, 1], VECTOR)
    addresses = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    if is_dense(ORDER):
        keep(addresses, (out_ptr, lse_ptr, ticket_ptr, stride_ob, stride_oh))
    else:
        keep(addresses, (out_ptr, lse_ptr, ticket_ptr))
    bars = v_tiles.index(STAGES * V_TILES)._reinterpret(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    make_barriers(shared_base() + STAGES * V_TILES * BLOCK_N * WIDTH * 2, ARRIVALS)
    fence_async_shared()
    OPTIONS: gl.constexpr = (
        "HEAD_DIM", HEAD_DIM, "GROUP", GROUP, "HAS_LEFT", HAS_LEFT, "HAS_RIGHT", HAS_RIGHT, "GROUPS", GROUPS,
        "BLOCK_N", BLOCK_N, "STAGES", STAGES, "OVERLAP", OVERLAP, "HEADS", HEADS, "ORDER", ORDER,
        "HAS_LSE", HAS_LSE, "HAS_SINKS", HAS_SINKS, "OUT_STRIDE", OUT_STRIDE,
        "FOLDED", FOLDED, "OUT_DTYPE", DTYPE, "CASTERS", 0, "Q_APART", False,
    )  # fmt: skip
    descs = (q_descs, k_descs, v_desc)
    filled = (q_tiles, k_tiles, v_tiles, notes, addresses)
    sizes = (total_q, total_k, num_segments, window_left, window_right)
    used = (k_tiles, v_tiles, notes, addresses, ())
    out = (out_descs, out_tiles)
    # Not used where there are none.
    sinks = lse_ptr
    if HAS_SINKS:
        sinks = sinks_ptr
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, group_rows(q_tiles, 0), out, used, bars, scale, total_q, sinks, OPTIONS)),
                (consume, (1, group_rows(q_tiles, 1), out, used, bars, scale, total_q, sinks, OPTIONS)),
                (produce, (descs, boundaries_of, filled, bars, sizes, OPTIONS)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, group_rows(q_tiles, 0), out, used, bars, scale, total_q, sinks, OPTIONS)),
                (consume, (1, group_rows(q_tiles, 1), out, used, bars, scale, total_q, sinks, OPTIONS)),
                (consume, (2, group_rows(q_tiles, 2), out, used, bars, scale, total_q, sinks, OPTIONS)),
                (produce, (descs, boundaries_of, filled, bars, sizes, OPTIONS)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
