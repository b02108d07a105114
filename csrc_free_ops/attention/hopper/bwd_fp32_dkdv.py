"""Gradients of fp32 keys and values on Hopper, in Gluon: the maths of `portable.bwd`, on tensor cores.

A number is the sum of three bfloat16 terms, x = x0 + x1 + x2. From the nine products of two such sums, the six largest
are added (`bf16x6`, as in stock Triton). A program has 128 keys, whose terms stay in shared memory. It goes over blocks
of query rows; the terms of q and dout take turns in one buffer. Two warpgroups have 64 keys each:

    rows = q        s = k q^T
    rows = dout     dp = v dout^T beside p = exp(scale s - lse);  dv += p dout
    rows = q        ds = p (dp - delta);  dk += ds q

The products of a sum are in flight together, where stock Triton waits for each. A block's contribution to dk and dv has
an accumulator of its own, because tensor cores truncate what they add, and is then added in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from csrc_free_ops.attention.portable.fwd import DENSE_SIZES
from csrc_free_ops.tiles.hopper.limits import SHARED_BYTES
from csrc_free_ops.tiles.masks import block_span, share_of_span, within_bounds
from csrc_free_ops.tiles.rows import row_step
from csrc_free_ops.tiles.scores import exponent_of_norm, exponential
from csrc_free_ops.tiles.segments import locate_dense

BLOCK_M, BLOCK_N, WIDTH = (gl.constexpr(size) for size in (32, 128, 64))
# The terms that the five smaller products multiply. The largest product multiplies the first terms.
SMALL_LEFT, SMALL_RIGHT = (gl.constexpr(terms) for terms in ((1, 0, 2, 0, 1), (1, 2, 0, 1, 0)))


@gluon.constexpr_function
def _product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.jit
def _split(x):
    """Three bfloat16 terms. The last two terms of an infinity are NaN, which `_numbers` replaces."""
    first = x.to(gl.bfloat16)
    residual = x - first.to(gl.float32)
    second = residual.to(gl.bfloat16)
    return first, second, (residual - second.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _load(ptr, first, length, STRIDE, ROWS: gl.constexpr, HALVES: gl.constexpr):
    """ROWS rows from `first` on, in halves of WIDTH columns; 0 from row `length` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    pointers = ptr + rows.to(gl.int64) * STRIDE + columns
    inside = (rows < length) & (columns >= 0)
    halves = ()
    for half in gl.static_range(HALVES):
        halves = halves + (gl.load(pointers + half * WIDTH, mask=inside, other=0.0),)  # [ROWS, WIDTH]
    return halves


@gluon.jit
def _stage(halves, tiles):
    """Store the terms of halves to shared memory, where products read them.

    Triton makes all warps meet before the stores, and between the stores and the products.
    """
    for half in gl.static_range(len(halves)):
        first, second, third = _split(halves[half])
        tiles[half].store(first)
        tiles[len(halves) + half].store(second)
        tiles[2 * len(halves) + half].store(third)
    fence_async_shared()


@gluon.jit
def _issue_scores(kv_tiles, row_tiles, HALVES: gl.constexpr, zeros):
    """Issue keys rows^T: the sum of the five smaller products, and the largest product of each half of the columns."""
    small = zeros
    for product in gl.static_range(len(SMALL_LEFT)):
        for half in gl.static_range(HALVES):
            left = kv_tiles[SMALL_LEFT[product] * HALVES + half]  # [BLOCK_N, WIDTH]
            right = row_tiles[SMALL_RIGHT[product] * HALVES + half].permute([1, 0])  # [WIDTH, BLOCK_M]
            small = warpgroup_mma(left, right, small, use_acc=product + half > 0, is_async=True)  # [BLOCK_N, BLOCK_M]
    products = (small,)
    for half in gl.static_range(HALVES):
        large = warpgroup_mma(kv_tiles[half], row_tiles[half].permute([1, 0]), zeros, use_acc=False, is_async=True)
        products = products + (large,)
    return products


@gluon.jit
def _numbers(small):
    """The smaller products, or 0 where they are NaN: then a factor is infinite, and the largest product is right."""
    return gl.where(small == small, small, 0.0)


@gluon.jit
def _wait_scores(products):
    """The sum of what `_issue_scores` issued, [BLOCK_N, BLOCK_M]."""
    products = warpgroup_mma_wait(0, products)
    large = products[1]
    for half in gl.static_range(2, len(products)):
        large += products[half]
    return large + _numbers(products[0])


@gluon.jit
def _accumulate(accumulators, weights, row_tiles, zeros):
    """accumulators + weights rows, in halves, [BLOCK_N, WIDTH] each."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    HALVES: gl.constexpr = len(accumulators)
    first, second, third = _split(weights)
    # [BLOCK_N, BLOCK_M]
    terms = (
        gl.convert_layout(first, OPERAND), gl.convert_layout(second, OPERAND), gl.convert_layout(third, OPERAND)
    )  # fmt: skip
    added = ()
    for half in gl.static_range(HALVES):
        block = zeros
        for product in gl.static_range(len(SMALL_LEFT)):
            right = row_tiles[SMALL_RIGHT[product] * HALVES + half]  # [BLOCK_M, WIDTH]
            block = warpgroup_mma(terms[SMALL_LEFT[product]], right, block, use_acc=product > 0, is_async=True)
        block = _numbers(warpgroup_mma_wait(0, [block]))
        block = warpgroup_mma_wait(0, [warpgroup_mma(terms[0], row_tiles[half], block, is_async=True)])
        added = added + (accumulators[half] + block,)
    return added


@gluon.jit
def _store(ptr, accumulators, factor, first, length, STRIDE):
    LAYOUT: gl.constexpr = accumulators[0].type.layout
    rows = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    pointers = ptr + rows.to(gl.int64) * STRIDE + columns
    for half in gl.static_range(len(accumulators)):
        gl.store(pointers + half * WIDTH, accumulators[half] * factor, mask=(rows < length) & (columns >= 0))


@gluon.jit(do_not_specialize=DENSE_SIZES)
def _attention_bwd_fp32_dkdv_hopper_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    stride_qt, stride_kt, stride_vt, stride_dot, stride_dkt, stride_dvt,
    q_length, k_length, splits, scale, window_left, window_right,
    STRIDE_QT: gl.constexpr, STRIDE_KT: gl.constexpr, STRIDE_VT: gl.constexpr, STRIDE_DOT: gl.constexpr,
    STRIDE_DKT: gl.constexpr, STRIDE_DVT: gl.constexpr, STRIDE_UNIT: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N keys of all sequences, heads, splits): dk and dv of fp32 [B, H, S, D] of one head each.

    With several splits, each computes a contribution from its share of the rows. The contributions to a head lie behind
    each other, like those of so many heads. HEAD_DIM is a multiple of WIDTH. Strides of batch and head are in units of
    STRIDE_UNIT.
    """
    gl.static_assert(HEAD_DIM % WIDTH == 0, "HEAD_DIM must be a multiple of 64, the columns of a tile")
    gl.static_assert(
        3 * HEAD_DIM * (2 * BLOCK_N + BLOCK_M) * 2 <= SHARED_BYTES,
        "three terms of k, v and a block of rows need more than the 227 KiB of shared memory of a Hopper GPU",
    )
    HALVES: gl.constexpr = HEAD_DIM // WIDTH
    SCORES: gl.constexpr = _product_layout(BLOCK_M)
    GRADIENTS: gl.constexpr = _product_layout(WIDTH)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    head = gl.program_id(1).to(gl.int64)
    heads = gl.num_programs(1)
    # The first keys are seen by the most queries, and come first.
    batch, first = locate_dense(gl.program_id(0), k_length, False, BLOCK_N)
    sequence = batch.to(gl.int64)
    q_ptr += (sequence * stride_qb + head * stride_qh) * STRIDE_UNIT
    k_ptr += (sequence * stride_kb + head * stride_kh) * STRIDE_UNIT
    v_ptr += (sequence * stride_vb + head * stride_vh) * STRIDE_UNIT
    dout_ptr += (sequence * stride_dob + head * stride_doh) * STRIDE_UNIT
    statistics = (sequence * heads + head) * q_length

    # Each tile is an allocation of its own: between stores to tiles of one tensor Triton would make all warps meet.
    k_tiles = ()
    v_tiles = ()
    row_tiles = ()
    for _ in gl.static_range(3 * HALVES):
        k_tiles = k_tiles + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, WIDTH], SHARED),)
        v_tiles = v_tiles + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, WIDTH], SHARED),)
        row_tiles = row_tiles + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, WIDTH], SHARED),)
    _stage(_load(k_ptr, first, k_length, row_step(stride_kt, STRIDE_KT, STRIDE_UNIT), BLOCK_N, HALVES), k_tiles)
    _stage(_load(v_ptr, first, k_length, row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), BLOCK_N, HALVES), v_tiles)

    low, full_low, full_high, high = block_span(
        first, gl.minimum(first + BLOCK_N, k_length) - 1, q_length - k_length, window_right, window_left, q_length,
        HAS_RIGHT, HAS_LEFT, BLOCK_M,
    )  # fmt: skip
    if IS_SPLIT:
        low, full_low, full_high, high = share_of_span(
            low, full_low, full_high, high, gl.program_id(2), splits, BLOCK_M
        )
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    no_gradient = gl.zeros([BLOCK_N, WIDTH], gl.float32, GRADIENTS)
    dk = (no_gradient,)
    dv = (no_gradient,)
    for _ in gl.static_range(HALVES - 1):
        dk = dk + (no_gradient,)
        dv = dv + (no_gradient,)
    local = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
    cols = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))
    step_q = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT)
    step_do = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    q = _load(q_ptr, low, q_length, step_q, BLOCK_M, HALVES)
    for start in range(low, high, BLOCK_M):
        _stage(q, row_tiles)
        dout = _load(dout_ptr, start, q_length, step_do, BLOCK_M, HALVES)
        lse = gl.load(lse_ptr + statistics + start + local, mask=start + local < q_length, other=0.0)  # [BLOCK_M]
        s = _wait_scores(_issue_scores(k_tiles, row_tiles, HALVES, no_scores))  # [BLOCK_N, BLOCK_M]
        _stage(dout, row_tiles)
        dp = _issue_scores(v_tiles, row_tiles, HALVES, no_scores)
        delta = gl.load(delta_ptr + statistics + start + local, mask=start + local < q_length, other=0.0)  # [BLOCK_M]
        p = exponential(s * scale - exponent_of_norm(lse, True)[None, :], True)
        if (start < full_low) | (start >= full_high):
            seen = within_bounds(
                (start + local < q_length)[None, :], start + local[None, :], cols[:, None], k_length - q_length,
                window_left, window_right, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            p = gl.where(seen, p, 0.0)
        ds = p * (_wait_scores(dp) - delta[None, :])  # [BLOCK_N, BLOCK_M]
        dv = _accumulate(dv, p, row_tiles, no_gradient)
        _stage(q, row_tiles)
        # The next block is loaded during the products.
        q = _load(q_ptr, start + BLOCK_M, q_length, step_q, BLOCK_M, HALVES)
        dk = _accumulate(dk, ds, row_tiles, no_gradient)
    split_head = head
    if IS_SPLIT:
        split_head = head * splits + gl.program_id(2)
    dk_ptr += (sequence * stride_dkb + split_head * stride_dkh) * STRIDE_UNIT
    dv_ptr += (sequence * stride_dvb + split_head * stride_dvh) * STRIDE_UNIT
    _store(dk_ptr, dk, scale, first, k_length, row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT))
    _store(dv_ptr, dv, 1.0, first, k_length, row_step(stride_dvt, STRIDE_DVT, STRIDE_UNIT))
