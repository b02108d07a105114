"""LayerNorm and RMSNorm over the last dimension, with or without a residual sum first, forward and backward.

For a row x of C columns; with a residual r first x = round(x + r) to the dtype, which is a result of its own:

    mean_i = 1/C sum_c x_ic                        RMSNorm: 0
    rstd_i = 1 / sqrt(1/C sum_c (x_ic - mean_i)^2 + eps)
    xhat   = (x - mean) rstd
    out    = xhat weight + bias

LayerNorm: arXiv 1607.06450; RMSNorm: arXiv 1910.07467. The variance is that of differences from the mean, because
E[x^2] - E[x]^2 cancels. Everything is fp32, and out is rounded once.

fp32 rows also subtract the mean of x - mean. If all values of a row are equal, only the rounding error of the mean
would be left, and rstd would multiply it by 1000. Equal values of a half type add up exactly.

Squares of values from 2^64 on overflow, and squares of values below 2^-63 underflow. Such a row is scaled by a power of
two before it is squared, which changes no bits of out. The sum of squares alone tells, so other rows pay one branch.

Backward, for upstream gradients dout of out and dsum of the residual sum, with g = dout weight:

    dx      = rstd (g - xhat mean_c(g xhat) - mean_c(g)) + dsum      RMSNorm: without mean_c(g)
    dweight = sum_i dout xhat
    dbias   = sum_i dout

Only the inputs are saved: a row is in registers anyway, so its statistics are recomputed. x and the residual have one
gradient, dx. Each program of the backward takes every num_programs-th tile of rows and prefetches the next ones to
shared memory. It accumulates dweight and dbias in fp32, and the sums kernel adds the accumulators of all programs in a
fixed order: results have the same bits every time.

A row is held as chunks of MAIN columns (`tiles/rows.py`, with WIDTH for HEAD_DIM). 1152 columns are five chunks of 256,
and the last one is half empty. One power of two would be 2048. All chunks have one shape, so that a thread holds the
same columns of each. If a warp spans a chunk, warps exchange nothing.

The wide kernels are for rows that registers cannot hold. They pass over blocks of columns several times and keep their
column sums in memory.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import (
    add_rows,
    load_chunk,
    load_rows,
    row_step,
    scale_rows,
    store_chunk,
    store_rows,
    zero_rows,
)

SIZES = ("num_rows", "num_programs", "stride_x", "stride_r", "stride_do", "stride_ds")
# A row in registers has no more.
MOST_COLUMNS = tl.constexpr(16384.0)
# Below the first, fp32 holds the sum of squares of any row and the next one. Above the second, squares too small for
# fp32 are no part of the sum. If eps is above the third, a sum below the second is no part of their sum.
LARGEST_SQUARES = tl.constexpr(2.0**126)
SMALLEST_SQUARES = tl.constexpr(2.0**-100)
SMALLEST_EPS = tl.constexpr(2.0**-70)


@triton.jit
def _multiply(a, b):
    product = (a[0].to(tl.float32) * b[0].to(tl.float32),)
    for index in tl.static_range(1, len(a)):
        product += (a[index].to(tl.float32) * b[index].to(tl.float32),)
    return product


@triton.jit
def _add_rounded(a, b):
    """a + b as PyTorch adds: in fp32, then rounded to the dtype of a."""
    total = ((a[0].to(tl.float32) + b[0].to(tl.float32)).to(a[0].dtype),)
    for index in tl.static_range(1, len(a)):
        total += ((a[index].to(tl.float32) + b[index].to(tl.float32)).to(a[0].dtype),)
    return total


@triton.jit
def _row_sums(chunks, BLOCK_M: tl.constexpr):
    """The sum of each row, [BLOCK_M]. A single row gives a scalar, whose layout suits every chunk."""
    total = chunks[0].to(tl.float32)
    for index in tl.static_range(1, len(chunks)):
        total += chunks[index].to(tl.float32)
    return tl.sum(total) if BLOCK_M == 1 else tl.sum(total, 1)


@triton.jit
def _row_maxima(chunks, BLOCK_M: tl.constexpr):
    """The largest magnitude of each row, as `_row_sums`."""
    most = tl.abs(chunks[0].to(tl.float32))
    for index in tl.static_range(1, len(chunks)):
        most = tl.maximum(most, tl.abs(chunks[index].to(tl.float32)))
    return tl.max(most) if BLOCK_M == 1 else tl.max(most, 1)


@triton.jit
def _along_rows(value, BLOCK_M: tl.constexpr):
    """A number of each row as a factor of chunks."""
    return value if BLOCK_M == 1 else value[:, None]


@triton.jit
def _center_chunk(chunk, mean, VALID: tl.constexpr, HAS_MEAN: tl.constexpr):
    centered = chunk.to(tl.float32)
    if HAS_MEAN:
        centered -= mean
        if VALID < chunk.shape[1]:
            # Padding must not count in the variance.
            centered = tl.where((tl.arange(0, chunk.shape[1]) < VALID)[None, :], centered, 0.0)
    return centered


@triton.jit
def _center(chunks, mean, WIDTH: tl.constexpr, MAIN: tl.constexpr, HAS_MEAN: tl.constexpr):
    centered = (_center_chunk(chunks[0], mean, WIDTH, HAS_MEAN),)
    for index in tl.static_range(1, len(chunks)):
        centered += (_center_chunk(chunks[index], mean, WIDTH - index * MAIN, HAS_MEAN),)
    return centered


@triton.jit
def _mean_of_rows(chunks, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Values are divided by a power of two before they are added, so that their sum stays in fp32."""
    total = _row_sums(scale_rows(chunks, tl.full((1, 1), 1.0 / MOST_COLUMNS, tl.float32)), BLOCK_M)
    return _along_rows(tl.div_rn(total, WIDTH / MOST_COLUMNS), BLOCK_M)


@triton.jit
def _reciprocal_deviation(squares, eps, WIDTH: tl.constexpr):
    """1 / sqrt(squares / WIDTH + eps), correctly rounded at each step, because its error would reach every column."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, 1.0 * WIDTH) + eps))


@triton.jit
def _out_of_range(squares, eps):
    """Whether a sum of squares overflowed, or lost bits to underflow that eps does not hide. NaN counts as well."""
    smallest = tl.where(eps < SMALLEST_EPS, SMALLEST_SQUARES, 0.0)
    return tl.where(squares < LARGEST_SQUARES, squares, -1.0) < smallest


@triton.jit
def _power_of_two(most, eps):
    """The power of two that brings the larger of `most` and sqrt(eps) near 1, so that no square leaves fp32."""
    exponent = tl.maximum(most, tl.sqrt_rn(eps)).to(tl.int32, bitcast=True) >> 23
    return (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _standardize(
    x, eps, rows, num_rows,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, HAS_MEAN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(x minus its mean in fp32, rstd as a factor); rstd is 0 for rows from num_rows on, which hold only zeros."""
    mean = 0.0
    if HAS_MEAN:
        mean = _mean_of_rows(x, WIDTH, BLOCK_M)
    centered = _center(x, mean, WIDTH, MAIN, HAS_MEAN)
    if HAS_MEAN and x[0].dtype == tl.float32:
        centered = _center(centered, _mean_of_rows(centered, WIDTH, BLOCK_M), WIDTH, MAIN, True)
    squares = _row_sums(_multiply(centered, centered), BLOCK_M)
    scale = tl.cast(1.0, tl.float32) if BLOCK_M == 1 else tl.full((BLOCK_M,), 1.0, tl.float32)
    if x[0].dtype != tl.float16:
        unfit = _out_of_range(squares, eps)
        if unfit if BLOCK_M == 1 else tl.max(unfit.to(tl.int32), 0) > 0:
            # Bits of a row must not depend on other rows of its tile, so fit rows are scaled by 1.
            scale = tl.where(unfit, _power_of_two(_row_maxima(centered, BLOCK_M), eps), scale)
            scaled = scale_rows(centered, _along_rows(scale, BLOCK_M))
            squares = _row_sums(_multiply(scaled, scaled), BLOCK_M)
    rstd = _reciprocal_deviation(squares, eps * scale * scale, WIDTH) * scale
    if BLOCK_M > 1:
        rstd = tl.where(rows < num_rows, rstd, 0.0)
    return centered, _along_rows(rstd, BLOCK_M)


@triton.jit
def _parameter_chunk(
    ptr, chunks, index: tl.constexpr, rows,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Chunk `index` of weight or bias in fp32, [BLOCK_M, MAIN]. A row stride of 0 repeats it in the layout of x."""
    if EARLY:
        chunk = chunks[index]
    else:
        chunk = load_chunk(ptr, index * MAIN, rows, BLOCK_M, 0, MAIN, WIDTH - index * MAIN, False)
    return chunk.to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_rows, eps, stride_x, stride_r,
    STRIDE_X: tl.constexpr, STRIDE_R: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M rows). The module's docstring has the maths.

    With EARLY weight and bias are loaded together with x. Else they are loaded chunk by chunk after the row's
    statistics, which needs half the registers.
    """
    await_before(OVERLAPS)
    eps = tl.cast(eps, tl.float32)
    step_x = row_step(stride_x, STRIDE_X, STRIDE_UNIT)
    step_r = row_step(stride_r, STRIDE_R, STRIDE_UNIT)
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    remaining = tl.minimum(num_rows - first, BLOCK_M).to(tl.int32) if BLOCK_M > 1 else 1
    starts = (0, WIDTH // MAIN * MAIN)
    rows = tl.arange(0, BLOCK_M)
    x = load_rows(x_ptr + first * step_x, starts, rows, remaining, step_x, WIDTH, MAIN, TAIL, BLOCK_M > 1)
    weight = x
    bias = x
    if EARLY and HAS_WEIGHT:
        weight = load_rows(weight_ptr, starts, rows, BLOCK_M, 0, WIDTH, MAIN, TAIL, False)
    if EARLY and HAS_BIAS:
        bias = load_rows(bias_ptr, starts, rows, BLOCK_M, 0, WIDTH, MAIN, TAIL, False)
    if HAS_RESIDUAL:
        residual = load_rows(
            residual_ptr + first * step_r, starts, rows, remaining, step_r, WIDTH, MAIN, TAIL, BLOCK_M > 1
        )
        x = _add_rounded(x, residual)
        store_rows(sum_ptr + first * WIDTH, starts, rows, remaining, x, WIDTH, WIDTH, MAIN, TAIL)
    centered, rstd = _standardize(x, eps, rows, remaining, WIDTH, MAIN, HAS_MEAN, BLOCK_M)
    out_ptr += first * WIDTH
    for index in tl.static_range(0, len(centered)):
        out = centered[index] * rstd
        if HAS_WEIGHT:
            out *= _parameter_chunk(weight_ptr, weight, index, rows, WIDTH, MAIN, BLOCK_M, EARLY)
        if HAS_BIAS:
            out += _parameter_chunk(bias_ptr, bias, index, rows, WIDTH, MAIN, BLOCK_M, EARLY)
        store_chunk(out_ptr, index * MAIN, rows, remaining, out, WIDTH, MAIN, WIDTH - index * MAIN)


@triton.jit
def _differentiate_chunk(g, xhat, rstd, mean_gx, mean_g, HAS_MEAN: tl.constexpr):
    """A chunk of dx, without dsum. mean_gx and mean_g are the row's means of g xhat and, with HAS_MEAN, of g."""
    centered = g - xhat * mean_gx
    if HAS_MEAN:
        centered -= mean_g
    return centered * rstd


@triton.jit
def _sum_rows(chunks):
    """Column sums over the rows of a tile, [1, WIDTH]."""
    total = (tl.sum(chunks[0], 0)[None, :],)
    for index in tl.static_range(1, len(chunks)):
        total += (tl.sum(chunks[index], 0)[None, :],)
    return total


@triton.jit(do_not_specialize=SIZES)
def _norm_bwd_kernel(
    dout_ptr, dsum_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, num_rows, eps,
    stride_do, stride_ds, stride_x,
    STRIDE_DO: tl.constexpr, STRIDE_DS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, NEEDS_DBIAS: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs), any number. dweight and dbias are [programs, WIDTH] in fp32: the column sums of each program."""
    await_before(OVERLAPS)
    eps = tl.cast(eps, tl.float32)
    step_do = row_step(stride_do, STRIDE_DO, STRIDE_UNIT)
    step_ds = row_step(stride_ds, STRIDE_DS, STRIDE_UNIT)
    step_x = row_step(stride_x, STRIDE_X, STRIDE_UNIT)
    program = tl.program_id(0)
    starts = (0, WIDTH // MAIN * MAIN)
    rows = tl.arange(0, BLOCK_M)
    if HAS_WEIGHT and NEEDS_DX:
        weight = load_rows(weight_ptr, starts, rows, BLOCK_M, 0, WIDTH, MAIN, TAIL, False)
    if NEEDS_DWEIGHT:
        dweight = zero_rows(BLOCK_M, WIDTH, MAIN, TAIL)
    if NEEDS_DBIAS:
        dbias = zero_rows(BLOCK_M, WIDTH, MAIN, TAIL)
    for tile in tl.range(program, tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        remaining = tl.minimum(num_rows - first, BLOCK_M).to(tl.int32) if BLOCK_M > 1 else 1
        dout = load_rows(dout_ptr + first * step_do, starts, rows, remaining, step_do, WIDTH, MAIN, TAIL, BLOCK_M > 1)
        if NEEDS_DX or NEEDS_DWEIGHT:
            x = load_rows(x_ptr + first * step_x, starts, rows, remaining, step_x, WIDTH, MAIN, TAIL, BLOCK_M > 1)
        if NEEDS_DBIAS:
            dbias = add_rows(dbias, dout)
        if NEEDS_DX or NEEDS_DWEIGHT:
            centered, rstd = _standardize(x, eps, rows, remaining, WIDTH, MAIN, HAS_MEAN, BLOCK_M)
            xhat = scale_rows(centered, rstd)
        if NEEDS_DWEIGHT:
            dweight = add_rows(dweight, _multiply(dout, xhat))
        if NEEDS_DX:
            if HAS_WEIGHT:
                g = _multiply(dout, weight)
            else:
                g = scale_rows(dout, tl.full((1, 1), 1.0, tl.float32))
            mean_gx = _along_rows(_row_sums(_multiply(g, xhat), BLOCK_M) * (1.0 / WIDTH), BLOCK_M)
            mean_g = mean_gx
            if HAS_MEAN:
                mean_g = _along_rows(_row_sums(g, BLOCK_M) * (1.0 / WIDTH), BLOCK_M)
            dx = (_differentiate_chunk(g[0], xhat[0], rstd, mean_gx, mean_g, HAS_MEAN),)
            for index in tl.static_range(1, len(g)):
                dx += (_differentiate_chunk(g[index], xhat[index], rstd, mean_gx, mean_g, HAS_MEAN),)
            if HAS_DSUM:
                # Added last, so that registers need not hold it before; the pipeline has prefetched it.
                dsum = load_rows(
                    dsum_ptr + first * step_ds, starts, rows, remaining, step_ds, WIDTH, MAIN, TAIL, BLOCK_M > 1
                )
                dx = add_rows(dx, dsum)
            store_rows(dx_ptr + first * WIDTH, starts, rows, remaining, dx, WIDTH, WIDTH, MAIN, TAIL)
    offset = program.to(tl.int64) * WIDTH
    if NEEDS_DWEIGHT:
        store_rows(dweight_ptr + offset, starts, tl.arange(0, 1), 1, _sum_rows(dweight), WIDTH, WIDTH, MAIN, TAIL)
    if NEEDS_DBIAS:
        store_rows(dbias_ptr + offset, starts, tl.arange(0, 1), 1, _sum_rows(dbias), WIDTH, WIDTH, MAIN, TAIL)


@triton.jit
def _add_programs(
    ptr, out_ptr, num_programs, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out = the sums of [num_programs, WIDTH] over programs, for this program's BLOCK_N columns."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    for first in tl.range(0, num_programs, BLOCK_M):
        seen = ((first + rows) < num_programs)[:, None] & (cols < WIDTH)[None, :]
        total += tl.load(ptr + ((first + rows) * WIDTH)[:, None] + cols[None, :], mask=seen, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


@triton.jit(do_not_specialize=SIZES)
def _norm_bwd_sums_kernel(
    dweights_ptr, dbiases_ptr, dweight_ptr, dbias_ptr, num_programs,
    WIDTH: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, NEEDS_DBIAS: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK_N columns, those of dweight and dbias that are needed): add up the sums of all programs."""
    await_before(OVERLAPS)
    if NEEDS_DWEIGHT:
        if tl.program_id(1) == 0:
            _add_programs(dweights_ptr, dweight_ptr, num_programs, WIDTH, BLOCK_M, BLOCK_N)
    if NEEDS_DBIAS:
        if tl.program_id(1) == tl.num_programs(1) - 1:
            _add_programs(dbiases_ptr, dbias_ptr, num_programs, WIDTH, BLOCK_M, BLOCK_N)


@triton.jit
def _load_block(ptr, cols, WIDTH: tl.constexpr):
    return tl.load(ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _load_sum(x_ptr, residual_ptr, cols, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    x = _load_block(x_ptr, cols, WIDTH)
    if HAS_RESIDUAL:
        x = (x + _load_block(residual_ptr, cols, WIDTH)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _center_block(x, mean, scale):
    """x times `scale` minus both parts of its mean, which one number would round."""
    return x * scale - mean[0] - mean[1]


@triton.jit
def _wide_deviations(
    x_ptr, residual_ptr, scale,
    WIDTH: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(both parts of the mean, the sum of squared differences from it) of one row times `scale`."""
    local = tl.arange(0, BLOCK_N)
    mean = 0.0
    correction = 0.0
    if HAS_MEAN:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_N):
            total += _load_sum(x_ptr, residual_ptr, start + local, WIDTH, HAS_RESIDUAL) * scale
        mean = tl.div_rn(tl.sum(total), 1.0 * WIDTH)
        if x_ptr.dtype.element_ty == tl.float32:
            total = tl.zeros((BLOCK_N,), tl.float32)
            for start in tl.range(0, WIDTH, BLOCK_N):
                x = _load_sum(x_ptr, residual_ptr, start + local, WIDTH, HAS_RESIDUAL)
                total += tl.where(start + local < WIDTH, x * scale - mean, 0.0)
            correction = tl.div_rn(tl.sum(total), 1.0 * WIDTH)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_N):
        x = _load_sum(x_ptr, residual_ptr, start + local, WIDTH, HAS_RESIDUAL)
        centered = tl.where(start + local < WIDTH, _center_block(x, (mean, correction), scale), 0.0)
        squares += centered * centered
    return (mean, correction), tl.sum(squares)


@triton.jit
def _wide_statistics(
    x_ptr, residual_ptr, eps,
    WIDTH: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(mean, scale, the factor that makes xhat of centered blocks, rstd) of one row, of x plus any residual."""
    scale = tl.cast(1.0, tl.float32)
    mean, squares = _wide_deviations(x_ptr, residual_ptr, scale, WIDTH, HAS_MEAN, HAS_RESIDUAL, BLOCK_N)
    if x_ptr.dtype.element_ty != tl.float16:
        if _out_of_range(squares, eps):
            most = tl.zeros((BLOCK_N,), tl.float32)
            for start in tl.range(0, WIDTH, BLOCK_N):
                x = _load_sum(x_ptr, residual_ptr, start + tl.arange(0, BLOCK_N), WIDTH, HAS_RESIDUAL)
                most = tl.maximum(most, tl.abs(x))
            scale = _power_of_two(tl.max(most), eps)
            mean, squares = _wide_deviations(x_ptr, residual_ptr, scale, WIDTH, HAS_MEAN, HAS_RESIDUAL, BLOCK_N)
    factor = _reciprocal_deviation(squares, eps * scale * scale, WIDTH)
    return mean, scale, factor, factor * scale


@triton.jit(do_not_specialize=SIZES)
def _norm_fwd_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_rows, eps, stride_x, stride_r,
    STRIDE_X: tl.constexpr, STRIDE_R: tl.constexpr, STRIDE_UNIT: tl.constexpr, WIDTH: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    await_before(OVERLAPS)
    eps = tl.cast(eps, tl.float32)
    step_x = row_step(stride_x, STRIDE_X, STRIDE_UNIT)
    step_r = row_step(stride_r, STRIDE_R, STRIDE_UNIT)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * step_x
    residual_ptr += row * step_r
    mean, scale, factor, _ = _wide_statistics(x_ptr, residual_ptr, eps, WIDTH, HAS_MEAN, HAS_RESIDUAL, BLOCK_N)
    for start in tl.range(0, WIDTH, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = _load_sum(x_ptr, residual_ptr, cols, WIDTH, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(sum_ptr + row * WIDTH + cols, x.to(sum_ptr.dtype.element_ty), mask=cols < WIDTH)
        out = _center_block(x, mean, scale) * factor
        if HAS_WEIGHT:
            out *= _load_block(weight_ptr, cols, WIDTH)
        if HAS_BIAS:
            out += _load_block(bias_ptr, cols, WIDTH)
        tl.store(out_ptr + row * WIDTH + cols, out.to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def _add_to_block(ptr, cols, values, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    if not FIRST:
        values += _load_block(ptr, cols, WIDTH)
    tl.store(ptr + cols, values, mask=cols < WIDTH)


@triton.jit(do_not_specialize=SIZES)
def _norm_bwd_wide_kernel(
    dout_ptr, dsum_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, num_rows, eps,
    stride_do, stride_ds, stride_x,
    STRIDE_DO: tl.constexpr, STRIDE_DS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, NEEDS_DBIAS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (programs), any number, as `_norm_bwd_kernel`; a program keeps its column sums in its own row of memory."""
    eps = tl.cast(eps, tl.float32)
    step_do = row_step(stride_do, STRIDE_DO, STRIDE_UNIT)
    step_ds = row_step(stride_ds, STRIDE_DS, STRIDE_UNIT)
    step_x = row_step(stride_x, STRIDE_X, STRIDE_UNIT)
    program = tl.program_id(0)
    local = tl.arange(0, BLOCK_N)
    dweight_ptr += program.to(tl.int64) * WIDTH
    dbias_ptr += program.to(tl.int64) * WIDTH
    for start in tl.range(0, WIDTH, BLOCK_N):
        if NEEDS_DWEIGHT:
            _add_to_block(dweight_ptr, start + local, tl.zeros((BLOCK_N,), tl.float32), True, WIDTH)
        if NEEDS_DBIAS:
            _add_to_block(dbias_ptr, start + local, tl.zeros((BLOCK_N,), tl.float32), True, WIDTH)
    for index in tl.range(program, num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        dout_row = dout_ptr + row * step_do
        x_row = x_ptr + row * step_x
        # Another thread may have added to a column for the previous row.
        tl.debug_barrier()
        if NEEDS_DX or NEEDS_DWEIGHT:
            mean, scale, factor, rstd = _wide_statistics(x_row, x_row, eps, WIDTH, HAS_MEAN, False, BLOCK_N)
        if NEEDS_DX:
            products = tl.zeros((BLOCK_N,), tl.float32)
            total = tl.zeros((BLOCK_N,), tl.float32)
            for start in tl.range(0, WIDTH, BLOCK_N):
                g = _load_block(dout_row, start + local, WIDTH)
                if HAS_WEIGHT:
                    g *= _load_block(weight_ptr, start + local, WIDTH)
                x = _load_block(x_row, start + local, WIDTH)
                products += g * (_center_block(x, mean, scale) * factor)
                total += g
            mean_gx = tl.div_rn(tl.sum(products), 1.0 * WIDTH)
            mean_g = tl.div_rn(tl.sum(total), 1.0 * WIDTH)
        for start in tl.range(0, WIDTH, BLOCK_N):
            cols = start + local
            dout = _load_block(dout_row, cols, WIDTH)
            if NEEDS_DX or NEEDS_DWEIGHT:
                xhat = _center_block(_load_block(x_row, cols, WIDTH), mean, scale) * factor
            if NEEDS_DWEIGHT:
                _add_to_block(dweight_ptr, cols, dout * xhat, False, WIDTH)
            if NEEDS_DBIAS:
                _add_to_block(dbias_ptr, cols, dout, False, WIDTH)
            if NEEDS_DX:
                g = dout
                if HAS_WEIGHT:
                    g *= _load_block(weight_ptr, cols, WIDTH)
                dx = g - xhat * mean_gx
                if HAS_MEAN:
                    dx -= mean_g
                dx *= rstd
                if HAS_DSUM:
                    dx += _load_block(dsum_ptr + row * step_ds, cols, WIDTH)
                tl.store(dx_ptr + row * WIDTH + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < WIDTH)
