"""Attention forward on Hopper of fp32 inputs in a half type: `hopper_fwd`, inputs cast as it goes (`hopper_cast`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from csrc_free_ops.attention.hopper.fwd import consume, group_rows
from csrc_free_ops.attention.hopper.fwd_fp32_producer import STAGE_BYTES, cast, caster_count
from csrc_free_ops.attention.hopper.fwd_producer import ARRIVALS, produce
from csrc_free_ops.attention.hopper.scheduler import NOTE, NOTES, POINTERS, keep
from csrc_free_ops.tiles.hopper.memory import await_kernel, columns_of, flat
from csrc_free_ops.tiles.hopper.warpgroup import check_base, make_barriers, option, shared_base

# For barriers.
BARS_BYTES = gl.constexpr(16 * 8)


@gluon.constexpr_function
def _columns(tile):
    return tile.shape[-1]


@gluon.jit
def _source(q_tiles, INDEX: gl.constexpr):
    """A warpgroup's rows of q in fp32, as they lie."""
    COLUMNS: gl.constexpr = _columns(q_tiles)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return q_tiles._reinterpret(gl.float32, [q_tiles.shape[0], 64, COLUMNS], ROWS).index(INDEX)


@gluon.jit
def _part(q_tiles, like, AT: gl.constexpr, DTYPE: gl.constexpr):
    """Rows of the half type, as wide as those of `like` and laid out as they, at byte AT of q's memory."""
    WIDTH: gl.constexpr = _columns(like)
    BYTES: gl.constexpr = 64 * 2 * WIDTH
    COUNT: gl.constexpr = q_tiles.shape[0] * 64 * 4 * _columns(q_tiles) // BYTES
    return flat(q_tiles._reinterpret(DTYPE, [COUNT, 64, 1, WIDTH], like.layout).index(AT // BYTES))


@gluon.jit
def _rows(q_tiles, k_tiles, INDEX: gl.constexpr, DTYPE: gl.constexpr):
    """The parts of its rows in the half type, in the place of the first of those in fp32."""
    AT: gl.constexpr = INDEX * 64 * 4 * _columns(q_tiles)
    parts = (_part(q_tiles, k_tiles[0], AT, DTYPE),)
    if len(k_tiles) > 1:
        parts = parts + (_part(q_tiles, k_tiles[1], AT + 64 * 2 * _columns(k_tiles[0]), DTYPE),)
    return parts


@gluon.jit
def _cast_third(FIRST_AT: gl.constexpr, sources, halves, counts, sizes, OPTIONS: gl.constexpr):
    """Where there are only two, nothing: warps come by fours, so this one is there in any case."""
    if option(OPTIONS, "CASTERS") == 3:
        cast(2, FIRST_AT, sources, halves, counts, sizes, OPTIONS)


@gluon.jit
def _attention_fwd_cast_hopper_kernel(
    q_source, k_main, k_tail, v_desc,
    k_ptr, v_ptr, k_half, v_half, out_ptr, lse_ptr, sinks_ptr, counts_ptr, ticket_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh,
    total_q, total_k, batch, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr,
    K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr,
    FOLDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). q_source describes fp32 [B, H, S, D], as k and v are; k_half, v_half and other descriptors are
    what those are cast to.

    counts_ptr are int32, one for each key head of each sequence and one more; they, and ticket_ptr, hold 0, and do
    again when the kernel ends. The rest is as in `_attention_fwd_hopper_kernel`, of two warpgroups.
    """
    MAIN: gl.constexpr = columns_of(k_main)
    WIDTH: gl.constexpr = columns_of(v_desc)
    V_TILES: gl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    DTYPE: gl.constexpr = k_main.dtype
    CASTERS: gl.constexpr = caster_count(HEAD_DIM)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    await_kernel()
    # The largest, and first, as in `hopper_fwd`: v's tiles, barriers, and the casters' stages.
    TILE_BYTES: gl.constexpr = BLOCK_N * WIDTH * 2
    BARS_AT: gl.constexpr = STAGES * V_TILES * TILE_BYTES
    FIRST_AT: gl.constexpr = BARS_AT + BARS_BYTES
    # There is room for the next tile's rows only where they are this narrow.
    Q_APART: gl.constexpr = HEAD_DIM == 64
    PLACES: gl.constexpr = (FIRST_AT + 2 * CASTERS * STAGE_BYTES + TILE_BYTES - 1) // TILE_BYTES
    v_tiles = gl.allocate_shared_memory(DTYPE, [PLACES] + v_desc.block_shape, v_desc.layout)
    check_base(v_tiles.index(0).reshape([BLOCK_N, WIDTH]))
    k_tiles = (gl.allocate_shared_memory(DTYPE, [STAGES] + k_main.block_shape, k_main.layout),)
    k_descs = (k_main,)
    if HEAD_DIM > MAIN:
        k_tiles = k_tiles + (gl.allocate_shared_memory(DTYPE, [STAGES] + k_tail.block_shape, k_tail.layout),)
        k_descs = k_descs + (k_tail,)
    q_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS] + q_source.block_shape, q_source.layout)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * NOTE, 1], VECTOR)
    addresses = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    keep(addresses, (out_ptr, lse_ptr, ticket_ptr, stride_ob, stride_oh, counts_ptr))
    bars = v_tiles.index(STAGES * V_TILES)._reinterpret(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    make_barriers(shared_base() + BARS_AT, ARRIVALS)
    fence_async_shared()
    OPTIONS: gl.constexpr = (
        "HEAD_DIM", HEAD_DIM, "GROUP", GROUP, "HAS_LEFT", HAS_LEFT, "HAS_RIGHT", HAS_RIGHT, "GROUPS", GROUPS,
        "BLOCK_N", BLOCK_N, "STAGES", STAGES, "OVERLAP", OVERLAP, "HEADS", HEADS, "ORDER", ORDER,
        "HAS_LSE", HAS_LSE, "HAS_SINKS", HAS_SINKS, "OUT_STRIDE", OUT_STRIDE,
        "FOLDED", FOLDED, "OUT_DTYPE", gl.float32, "CASTERS", CASTERS, "Q_APART", Q_APART,
        "K_STRIDE", K_STRIDE, "V_STRIDE", V_STRIDE,
    )  # fmt: skip
    descs = ((q_source,), k_descs, v_desc)
    filled = ((q_tiles,), k_tiles, v_tiles, notes, addresses)
    sizes = (total_q, total_k, batch, window_left, window_right)
    sinks = lse_ptr
    if HAS_SINKS:
        sinks = sinks_ptr
    sources = (k_ptr, v_ptr, (stride_kb, stride_kh), (stride_vb, stride_vh))
    halves = (k_half, v_half)
    lengths = (total_k, batch)
    if Q_APART:
        q_half = (gl.allocate_shared_memory(DTYPE, [GROUPS, 64, 1, MAIN], k_main.layout),)
        first = group_rows(q_half, 0)
        second = group_rows(q_half, 1)
    else:
        first = _rows(q_tiles, k_tiles, 0, DTYPE)
        second = _rows(q_tiles, k_tiles, 1, DTYPE)
    first_used = (k_tiles, v_tiles, notes, addresses, _source(q_tiles, 0))
    second_used = (k_tiles, v_tiles, notes, addresses, _source(q_tiles, 1))
    gl.static_assert(GROUPS == 2)
    gl.warp_specialize(
        [
            (consume, (0, first, ((), ()), first_used, bars, scale, total_q, sinks, OPTIONS)),
            (consume, (1, second, ((), ()), second_used, bars, scale, total_q, sinks, OPTIONS)),
            (produce, (descs, (0, 0), filled, bars, sizes, OPTIONS)),
            (cast, (0, FIRST_AT, sources, halves, counts_ptr, lengths, OPTIONS)),
            (cast, (1, FIRST_AT, sources, halves, counts_ptr, lengths, OPTIONS)),
            (_cast_third, (FIRST_AT, sources, halves, counts_ptr, lengths, OPTIONS)),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
