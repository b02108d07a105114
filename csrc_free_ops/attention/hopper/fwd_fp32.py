"""Attention forward on Hopper for fp32 inputs, computed in a half type.

The kernel is that of `fwd` with cast warps (`fwd_fp32_producer`): they round keys and values, and each consumer rounds
its own rows of q. out is fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from csrc_free_ops.attention.hopper.fwd import consume, group_rows
from csrc_free_ops.attention.hopper.fwd_config import ARRIVALS, BARRIER_BYTES, ForwardConfig
from csrc_free_ops.attention.hopper.fwd_fp32_producer import STAGE_BYTES, cast_kv, cast_warps
from csrc_free_ops.attention.hopper.fwd_producer import produce
from csrc_free_ops.attention.hopper.tile_info import COUNTS, SIZES, make_info
from csrc_free_ops.tiles.hopper.memory import await_kernel, columns_of, flat
from csrc_free_ops.tiles.hopper.versions import reinterpret
from csrc_free_ops.tiles.hopper.warpgroup import barriers_in, check_base, make_barriers, shared_base


@gluon.constexpr_function
def _columns(tile):
    return tile.shape[-1]


@gluon.jit
def _fp32_rows(q_tiles, INDEX: gl.constexpr):
    """A consumer's rows of q in fp32, not swizzled: [64, COLUMNS]."""
    COLUMNS: gl.constexpr = _columns(q_tiles)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret(q_tiles, gl.float32, [q_tiles.shape[0], 64, COLUMNS], PLAIN).index(INDEX)


@gluon.jit
def _half_columns(q_tiles, like, AT: gl.constexpr, DTYPE: gl.constexpr):
    """64 rows of the half type at byte AT of q's memory, as wide and laid out as the tile `like`."""
    WIDTH: gl.constexpr = _columns(like)
    BYTES: gl.constexpr = 64 * 2 * WIDTH
    COUNT: gl.constexpr = q_tiles.shape[0] * 64 * 4 * _columns(q_tiles) // BYTES
    return flat(reinterpret(q_tiles, DTYPE, [COUNT, 64, 1, WIDTH], like.layout).index(AT // BYTES))


@gluon.jit
def _half_rows(q_tiles, k_tiles, INDEX: gl.constexpr, DTYPE: gl.constexpr):
    """A consumer's rows of q in the half type, main columns and tail, in the memory of their fp32 values."""
    AT: gl.constexpr = INDEX * 64 * 4 * _columns(q_tiles)
    rows = (_half_columns(q_tiles, k_tiles[0], AT, DTYPE),)
    if len(k_tiles) > 1:
        rows = rows + (_half_columns(q_tiles, k_tiles[1], AT + 64 * 2 * _columns(k_tiles[0]), DTYPE),)
    return rows


@gluon.jit
def _third_cast_warp(STAGES_AT: gl.constexpr, sources, halves, counters, sizes, config):
    """Warps of partitions come in fours, so the third one is there even if only two cast."""
    if config.CAST_WARPS == 3:
        cast_kv(2, STAGES_AT, sources, halves, counters, sizes, config)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_fp32_hopper_kernel(
    q_desc_fp32, k_main, k_tail, v_desc,
    k_ptr, v_ptr, k_half, v_half, out_ptr, lse_ptr, sinks_ptr, cast_counters_ptr, tile_counter_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_kt, stride_vt, stride_ob, stride_oh, stride_ot,
    total_q, total_k, batch, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ORDER: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr,
    K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr,
    FOLDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). q, k and v are fp32 [B, H, S, D]: q_desc_fp32 describes q, k_ptr and v_ptr point to k and v.

    k_half and v_half receive k and v rounded; the other descriptors describe them. cast_counters_ptr has an int32 for
    each key head of each sequence and one more. They and tile_counter_ptr are 0 before and after a launch. All else is
    as in `_attention_fwd_hopper_kernel` with two consumers.
    """
    MAIN: gl.constexpr = columns_of(k_main)
    V_WIDTH: gl.constexpr = columns_of(v_desc)
    DTYPE: gl.constexpr = k_main.dtype
    CAST_WARPS: gl.constexpr = cast_warps(HEAD_DIM)
    # Wider rows leave no memory for the next tile's.
    SEPARATE_Q: gl.constexpr = HEAD_DIM == 64
    config = ForwardConfig(
        HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, ORDER, GROUPS, BLOCK_N, STAGES, OVERLAP, HAS_LSE, HAS_SINKS,
        OUT_STRIDE, FOLDED, gl.float32, V_WIDTH, CAST_WARPS, SEPARATE_Q, K_STRIDE, V_STRIDE,
    )  # fmt: skip
    gl.static_assert(GROUPS == 2, "the kernel for fp32 inputs has two consumer warpgroups: BLOCK_M must be 128")
    gl.static_assert(config.has_barriers(), "too many STAGES: Hopper has 16 named barriers")
    gl.static_assert(
        config.has_registers(CONSUMER_REGISTERS, PRODUCER_REGISTERS),
        "CONSUMER_REGISTERS and PRODUCER_REGISTERS exceed the 65536 registers of a multiprocessor",
    )
    await_kernel()
    # The largest buffer and so the first: v's tiles, then barriers, then the stages of the cast warps (`check_base`).
    TILE_BYTES: gl.constexpr = BLOCK_N * V_WIDTH * 2
    STAGES_AT: gl.constexpr = config.BARRIERS_AT + BARRIER_BYTES
    V_BUFFERS: gl.constexpr = (STAGES_AT + 2 * CAST_WARPS * STAGE_BYTES + TILE_BYTES - 1) // TILE_BYTES
    v_tiles = gl.allocate_shared_memory(DTYPE, [V_BUFFERS] + v_desc.block_shape, v_desc.layout)
    check_base(v_tiles.index(0).reshape([BLOCK_N, V_WIDTH]))
    k_tiles = (gl.allocate_shared_memory(DTYPE, [STAGES] + k_main.block_shape, k_main.layout),)
    k_descs = (k_main,)
    if HEAD_DIM > MAIN:
        k_tiles = k_tiles + (gl.allocate_shared_memory(DTYPE, [STAGES] + k_tail.block_shape, k_tail.layout),)
        k_descs = k_descs + (k_tail,)
    q_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS] + q_desc_fp32.block_shape, q_desc_fp32.layout)
    info = make_info(False)
    info.fill((), (out_ptr, lse_ptr, tile_counter_ptr, stride_ob, stride_oh, stride_ot, cast_counters_ptr))
    bars = barriers_in(v_tiles.index(STAGES * config.V_TILES))
    make_barriers(shared_base() + config.BARRIERS_AT, ARRIVALS)
    fence_async_shared()
    sizes = (total_q, total_k, batch, window_left, window_right)
    sinks = lse_ptr
    if HAS_SINKS:
        sinks = sinks_ptr
    k_strides = (stride_kb, stride_kh)
    v_strides = (stride_vb, stride_vh)
    if K_STRIDE == 0:
        k_strides = k_strides + (stride_kt,)
        v_strides = v_strides + (stride_vt,)
    sources = (k_ptr, v_ptr, k_strides, v_strides)
    halves = (k_half, v_half)
    lengths = (total_k, batch)
    if SEPARATE_Q:
        q_half = (gl.allocate_shared_memory(DTYPE, [GROUPS, 64, 1, MAIN], k_main.layout),)
        first_q = group_rows(q_half, 0)
        second_q = group_rows(q_half, 1)
        q_buffers = (q_tiles,) + q_half
    else:
        first_q = _half_rows(q_tiles, k_tiles, 0, DTYPE)
        second_q = _half_rows(q_tiles, k_tiles, 1, DTYPE)
        q_buffers = (q_tiles,)
    gl.static_assert(
        config.has_memory((v_tiles,) + k_tiles + q_buffers),
        "the tile needs more than the 227 KiB of shared memory: lower BLOCK_N or STAGES",
    )
    first_tiles = (k_tiles, v_tiles, _fp32_rows(q_tiles, 0))
    second_tiles = (k_tiles, v_tiles, _fp32_rows(q_tiles, 1))
    all_tiles = ((q_tiles,), k_tiles, v_tiles)
    gl.warp_specialize(
        [
            (consume, (0, first_q, ((), ()), first_tiles, info, bars, scale, total_q, sinks, config)),
            (consume, (1, second_q, ((), ()), second_tiles, info, bars, scale, total_q, sinks, config)),
            (produce, (((q_desc_fp32,), k_descs, v_desc), (0, 0), all_tiles, info, bars, sizes, config)),
            (cast_kv, (0, STAGES_AT, sources, halves, cast_counters_ptr, lengths, config)),
            (cast_kv, (1, STAGES_AT, sources, halves, cast_counters_ptr, lengths, config)),
            (_third_cast_warp, (STAGES_AT, sources, halves, cast_counters_ptr, lengths, config)),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
