"""Gradients of keys and values of fp32 on Hopper, in Gluon: the maths of `portable_bwd`, on tensor cores.

A number is the sum of three bfloat16 parts, x = x0 + x1 + x2, and of the nine products of two such sums the six largest
are summed (`bf16x6`, as stock Triton has it). A program owns 128 keys, whose parts stay in shared memory, and passes
over blocks of query rows, the parts of which take turns in one place. Two warpgroups own 64 keys each:

    rows = q        s = k q^T
    rows = dout     dp = v dout^T beside p = exp(scale s - lse);  dv += p dout
    rows = q        ds = p (dp - delta);  dk += ds q

The products of a sum are in flight together, where stock Triton waits for each. A block's share of dk and dv has an
accumulator of its own, since tensor cores cut off what they add up, and is then added as fp32 numbers are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from csrc_free_ops.tiles.masks import block_span, share_of_span, within_bounds
from csrc_free_ops.tiles.scores import exponent_of_norm, exponential
from csrc_free_ops.tiles.segments import place_dense

BLOCK_M, BLOCK_N, WIDTH = (gl.constexpr(size) for size in (32, 128, 64))
# Which parts the five smaller products are of. The largest is that of the first ones.
SMALL_LEFT, SMALL_RIGHT = (gl.constexpr(parts) for parts in ((1, 0, 2, 0, 1), (1, 2, 0, 1, 0)))


@gluon.constexpr_function
def _product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.jit
def _split(x):
    """Three bfloat16 parts; of an infinity the last two are NaN, which `_numbers` drops from sums."""
    first = x.to(gl.bfloat16)
    rest = x - first.to(gl.float32)
    second = rest.to(gl.bfloat16)
    return first, second, (rest - second.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _load(ptr, first, length, STRIDE: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr):
    """ROWS rows from `first` on in halves of WIDTH columns, 0 from row `length` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    place = ptr + rows.to(gl.int64) * STRIDE + columns
    inside = (rows < length) & (columns >= 0)
    halves = ()
    for half in gl.static_range(HALVES):
        halves = halves + (gl.load(place + half * WIDTH, mask=inside, other=0.0),)
    return halves


@gluon.jit
def _put(halves, tiles):
    """The parts of halves to shared memory, where products read them.

    Triton has all warps meet before the stores, and between them and the products.
    """
    for half in gl.static_range(len(halves)):
        first, second, third = _split(halves[half])
        tiles[half].store(first)
        tiles[len(halves) + half].store(second)
        tiles[2 * len(halves) + half].store(third)
    fence_async_shared()


@gluon.jit
def _begin_scores(keys, rows, HALVES: gl.constexpr, zeros):
    """Begins keys rows^T: the sum of the five smaller products and, of each half of the columns, of the largest."""
    small = zeros
    for product in gl.static_range(len(SMALL_LEFT)):
        for half in gl.static_range(HALVES):
            left = keys[SMALL_LEFT[product] * HALVES + half]
            right = rows[SMALL_RIGHT[product] * HALVES + half].permute([1, 0])
            small = warpgroup_mma(left, right, small, use_acc=product + half > 0, is_async=True)
    sums = (small,)
    for half in gl.static_range(HALVES):
        large = warpgroup_mma(keys[half], rows[half].permute([1, 0]), zeros, use_acc=False, is_async=True)
        sums = sums + (large,)
    return sums


@gluon.jit
def _numbers(small):
    """The smaller products, or 0 where they are NaN: then an infinity is among the numbers, and the largest right."""
    return gl.where(small == small, small, 0.0)


@gluon.jit
def _whole(sums):
    sums = warpgroup_mma_wait(0, sums)
    large = sums[1]
    for half in gl.static_range(2, len(sums)):
        large += sums[half]
    return large + _numbers(sums[0])


@gluon.jit
def _add_products(sums, weights, rows, zeros):
    """sums + weights rows, in halves."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    HALVES: gl.constexpr = len(sums)
    first, second, third = _split(weights)
    parts = (
        gl.convert_layout(first, OPERAND), gl.convert_layout(second, OPERAND), gl.convert_layout(third, OPERAND)
    )  # fmt: skip
    added = ()
    for half in gl.static_range(HALVES):
        share = zeros
        for product in gl.static_range(len(SMALL_LEFT)):
            right = rows[SMALL_RIGHT[product] * HALVES + half]
            share = warpgroup_mma(parts[SMALL_LEFT[product]], right, share, use_acc=product > 0, is_async=True)
        share = _numbers(warpgroup_mma_wait(0, [share]))
        share = warpgroup_mma_wait(0, [warpgroup_mma(parts[0], rows[half], share, is_async=True)])
        added = added + (sums[half] + share,)
    return added


@gluon.jit
def _store(ptr, sums, factor, first, length, STRIDE: gl.constexpr):
    LAYOUT: gl.constexpr = sums[0].type.layout
    rows = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    place = ptr + rows.to(gl.int64) * STRIDE + columns
    for half in gl.static_range(len(sums)):
        gl.store(place + half * WIDTH, sums[half] * factor, mask=(rows < length) & (columns >= 0))


@gluon.jit
def _attention_bwd_keys_hopper_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_dkb, stride_dkh, stride_dvb, stride_dvh, q_length, k_length, scale, window_left, window_right,
    STRIDE_QT: gl.constexpr, STRIDE_KT: gl.constexpr, STRIDE_VT: gl.constexpr, STRIDE_DOT: gl.constexpr,
    STRIDE_DKT: gl.constexpr, STRIDE_DVT: gl.constexpr, UNIT: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N keys of all sequences, heads, SPLITS): dk and dv of fp32 [B, H, S, D] of one head each.

    Of several splits each makes a part of them, by its share of the rows; those of a head follow each other, as so many
    heads. HEAD_DIM is a multiple of WIDTH; strides of batch and head are in units of UNIT.
    """
    HALVES: gl.constexpr = HEAD_DIM // WIDTH
    SCORES: gl.constexpr = _product_layout(BLOCK_M)
    SUMS: gl.constexpr = _product_layout(WIDTH)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    head = gl.program_id(1).to(gl.int64)
    heads = gl.num_programs(1)
    # The first keys are seen by the most queries, and come first.
    batch, first = place_dense(gl.program_id(0), k_length, False, BLOCK_N)
    sequence = batch.to(gl.int64)
    q_ptr += (sequence * stride_qb + head * stride_qh) * UNIT
    k_ptr += (sequence * stride_kb + head * stride_kh) * UNIT
    v_ptr += (sequence * stride_vb + head * stride_vh) * UNIT
    dout_ptr += (sequence * stride_dob + head * stride_doh) * UNIT
    statistics = (sequence * heads + head) * q_length

    # Each tile by itself: between stores to tiles of one tensor Triton would have all warps meet.
    keys = ()
    values = ()
    rows = ()
    for _ in gl.static_range(3 * HALVES):
        keys = keys + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, WIDTH], SHARED),)
        values = values + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, WIDTH], SHARED),)
        rows = rows + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, WIDTH], SHARED),)
    _put(_load(k_ptr, first, k_length, STRIDE_KT, BLOCK_N, HALVES), keys)
    _put(_load(v_ptr, first, k_length, STRIDE_VT, BLOCK_N, HALVES), values)

    low, full_low, full_high, high = block_span(
        first, gl.minimum(first + BLOCK_N, k_length) - 1, q_length - k_length, window_right, window_left, q_length,
        HAS_RIGHT, HAS_LEFT, BLOCK_M,
    )  # fmt: skip
    if SPLITS > 1:
        low, full_low, full_high, high = share_of_span(
            low, full_low, full_high, high, gl.program_id(2), SPLITS, BLOCK_M
        )
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    no_sums = gl.zeros([BLOCK_N, WIDTH], gl.float32, SUMS)
    dk = (no_sums,)
    dv = (no_sums,)
    for _ in gl.static_range(HALVES - 1):
        dk = dk + (no_sums,)
        dv = dv + (no_sums,)
    local = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
    cols = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))
    q = _load(q_ptr, low, q_length, STRIDE_QT, BLOCK_M, HALVES)
    for start in range(low, high, BLOCK_M):
        _put(q, rows)
        dout = _load(dout_ptr, start, q_length, STRIDE_DOT, BLOCK_M, HALVES)
        lse = gl.load(lse_ptr + statistics + start + local, mask=start + local < q_length, other=0.0)
        s = _whole(_begin_scores(keys, rows, HALVES, no_scores))
        _put(dout, rows)
        products = _begin_scores(values, rows, HALVES, no_scores)
        delta = gl.load(delta_ptr + statistics + start + local, mask=start + local < q_length, other=0.0)
        p = exponential(s * scale - exponent_of_norm(lse, True)[None, :], True)
        if (start < full_low) | (start >= full_high):
            seen = within_bounds(
                (start + local < q_length)[None, :], start + local[None, :], cols[:, None], k_length - q_length,
                window_left, window_right, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            p = gl.where(seen, p, 0.0)
        ds = p * (_whole(products) - delta[None, :])
        dv = _add_products(dv, p, rows, no_sums)
        _put(q, rows)
        # What comes next is on its way during the products.
        q = _load(q_ptr, start + BLOCK_M, q_length, STRIDE_QT, BLOCK_M, HALVES)
        dk = _add_products(dk, ds, rows, no_sums)
    part = head * SPLITS + gl.program_id(2)
    dk_ptr += (sequence * stride_dkb + part * stride_dkh) * UNIT
    dv_ptr += (sequence * stride_dvb + part * stride_dvh) * UNIT
    _store(dk_ptr, dk, scale, first, k_length, STRIDE_DKT)
    _store(dv_ptr, dv, 1.0, first, k_length, STRIDE_DVT)
