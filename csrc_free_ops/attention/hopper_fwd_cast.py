"""Attention forward on Hopper of fp32 inputs in a half type: `hopper_fwd`, with inputs cast as it goes (`hopper_cast`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from csrc_free_ops.attention.hopper_cast import CASTERS, STAGE_FLOATS, cast
from csrc_free_ops.attention.hopper_fwd import ARRIVALS, consume, produce
from csrc_free_ops.attention.hopper_work import NOTE, NOTES, POINTERS, keep
from csrc_free_ops.tiles.hopper import check_base, make_barriers, shared_base
from csrc_free_ops.tiles.hopper_memory import await_kernel, columns_of

STAGE_BYTES = gl.constexpr(STAGE_FLOATS.value * 4)
# The first of the casters' barriers, which come behind those of `hopper_fwd`.
CAST_FULL = gl.constexpr(len(ARRIVALS.value))
CAST_ARRIVALS = gl.constexpr((*ARRIVALS.value, *(1,) * 2 * CASTERS.value))


@gluon.jit
def _attention_fwd_cast_hopper_kernel(
    q_main, q_tail, k_main, k_tail, v_desc, q_source, k_source, v_source,
    q_half, k_half, v_half, out_ptr, lse_ptr, sinks_ptr, counts_ptr, ticket_ptr,
    stride_ob, stride_oh, total_q, total_k, batch, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, OUT_STRIDE: gl.constexpr,
    FOLDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). *_source describe fp32 [B, H, S, D], *_half and the other descriptors what it is cast to.

    counts_ptr are int32, one for each key head of each sequence and one more; they, and ticket_ptr, hold 0, and do again
    when the kernel ends. FOLDED has a bit for each of q, k, v and out in the half type, and the sources of q, k and v.
    The rest is as in `_attention_fwd_hopper_kernel`, of two warpgroups.
    """
    MAIN: gl.constexpr = columns_of(q_main)
    WIDTH: gl.constexpr = columns_of(v_desc)
    V_TILES: gl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    DTYPE: gl.constexpr = q_main.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    await_kernel()
    # The largest, and first, as in `hopper_fwd`: v's tiles, barriers, and the casters' stages.
    TILE_BYTES: gl.constexpr = BLOCK_N * WIDTH * 2
    BARS_AT: gl.constexpr = STAGES * V_TILES * TILE_BYTES
    FIRST_STAGE: gl.constexpr = BARS_AT // STAGE_BYTES + 1
    PLACES: gl.constexpr = ((FIRST_STAGE + 2 * CASTERS) * STAGE_BYTES + TILE_BYTES - 1) // TILE_BYTES
    v_tiles = gl.allocate_shared_memory(DTYPE, [PLACES] + v_desc.block_shape, v_desc.layout)
    check_base(v_tiles.index(0).reshape([BLOCK_N, WIDTH]))
    stages = v_tiles._reinterpret(
        gl.float32, [FIRST_STAGE + 2 * CASTERS] + q_source.block_shape, q_source.layout
    )  # fmt: skip
    k_tiles = (gl.allocate_shared_memory(DTYPE, [STAGES] + k_main.block_shape, k_main.layout),)
    q_tiles = (gl.allocate_shared_memory(DTYPE, [GROUPS] + q_main.block_shape, q_main.layout),)
    q_descs = (q_main,)
    k_descs = (k_main,)
    if HEAD_DIM > MAIN:
        k_tiles = k_tiles + (gl.allocate_shared_memory(DTYPE, [STAGES] + k_tail.block_shape, k_tail.layout),)
        q_tiles = q_tiles + (gl.allocate_shared_memory(DTYPE, [GROUPS] + q_tail.block_shape, q_tail.layout),)
        q_descs = q_descs + (q_tail,)
        k_descs = k_descs + (k_tail,)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * NOTE, 1], VECTOR)
    addresses = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    keep(addresses, (out_ptr, lse_ptr, ticket_ptr, stride_ob, stride_oh, counts_ptr))
    bars = v_tiles.index(STAGES * V_TILES)._reinterpret(gl.int64, [32, 1], mbarrier.MBarrierLayout())
    bars_at = shared_base() + BARS_AT
    make_barriers(bars_at, CAST_ARRIVALS)
    fence_async_shared()
    OPTIONS: gl.constexpr = (
        "HEAD_DIM", HEAD_DIM, "GROUP", GROUP, "HAS_LEFT", HAS_LEFT, "HAS_RIGHT", HAS_RIGHT, "GROUPS", GROUPS,
        "BLOCK_N", BLOCK_N, "STAGES", STAGES, "OVERLAP", OVERLAP, "HEADS", HEADS, "ORDER", ORDER,
        "HAS_LSE", HAS_LSE, "HAS_SINKS", HAS_SINKS, "OUT_STRIDE", OUT_STRIDE,
        "FOLDED", FOLDED, "OUT_DTYPE", gl.float32, "CASTERS", CASTERS,
    )  # fmt: skip
    descs = (q_descs, k_descs, v_desc)
    filled = (q_tiles, k_tiles, v_tiles, notes, addresses)
    sizes = (total_q, total_k, batch, window_left, window_right)
    # out is stored from registers.
    used = filled + (q_tiles,)
    sinks = lse_ptr
    if HAS_SINKS:
        sinks = sinks_ptr
    sources = (q_source, k_source, v_source)
    halves = (q_half, k_half, v_half)
    lengths = (total_q, total_k, batch)
    gl.static_assert(GROUPS == 2 and CASTERS == 3)
    gl.warp_specialize(
        [
            (consume, (0, q_descs, used, bars, scale, total_q, sinks, OPTIONS)),
            (consume, (1, q_descs, used, bars, scale, total_q, sinks, OPTIONS)),
            (produce, (descs, (0, 0), filled, bars, sizes, OPTIONS)),
            (cast, (0, FIRST_STAGE, CAST_FULL, sources, halves, counts_ptr, stages, bars, bars_at, lengths, OPTIONS)),
            (cast, (1, FIRST_STAGE, CAST_FULL, sources, halves, counts_ptr, stages, bars, bars_at, lengths, OPTIONS)),
            (cast, (2, FIRST_STAGE, CAST_FULL, sources, halves, counts_ptr, stages, bars, bars_at, lengths, OPTIONS)),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
