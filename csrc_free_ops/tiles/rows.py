"""Row blocks of a head dimension that need not be a power of two.

`tl.dot` wants powers of two, and padding D = 72 to 128 would waste 1.8 times the matrix work. A block of rows is
therefore a tuple of column chunks: as many of MAIN columns as HEAD_DIM holds, then one of TAIL if TAIL > 0. D = 72 is
64 + 8, read as chunks of 64 and 16. Columns past HEAD_DIM read as zero and are never stored.

Addresses are `base + row * STRIDE + column`. Row strides are constants of the layout: H D, or 3 H D for views of a
packed projection. They compile into the kernel, so that loads are 16 bytes wide and the rows of a thread share one
register. Run-time strides take a third more registers at D = 72, which costs the second block on each multiprocessor.
A stride that follows from a batch or a length is a number at run time all the same (`row_step`). As a constant it would
cost a build for each size.
"""

import triton
import triton.language as tl

# With a larger stride, offsets within a tile may pass 2^31 elements.
WIDE_STRIDE = tl.constexpr(2**22)


@triton.jit
def of_unit(stride, STRIDE_UNIT: tl.constexpr):
    """Return a run-time stride, which counts STRIDE_UNIT elements. The compiler knows no divisor of one in elements.

    Inductor lets Triton specialize all integers, also arguments in `do_not_specialize`. Without this function, loads
    would be wider than in eager calls, and sums would add in another order.
    """
    if STRIDE_UNIT > 1:
        return stride
    else:
        return stride & (0x7FFFFFFF if stride.dtype == tl.int32 else 0x7FFFFFFFFFFFFFFF)


@triton.jit
def row_step(stride, STRIDE: tl.constexpr, STRIDE_UNIT: tl.constexpr):
    """From a row to the next: STRIDE, or where it is not positive `stride` times STRIDE_UNIT, a number at run time.

    The number has 32 bits where STRIDE is 0, and 64 bits where it is -1 (`row_constants` of torch_ops/_core/launch.py).
    """
    if STRIDE > 0:
        return STRIDE
    elif STRIDE == 0:
        return of_unit(tl.cast(stride, tl.int32), STRIDE_UNIT) * STRIDE_UNIT
    else:
        return of_unit(tl.cast(stride, tl.int64), STRIDE_UNIT) * STRIDE_UNIT


@triton.jit
def row_base(ptr, row, head, stride_head, STRIDE, STRIDE_UNIT: tl.constexpr):
    """The address of a row of a head. Head strides count STRIDE_UNIT elements, so their alignment is known."""
    stride_head = of_unit(tl.cast(stride_head, tl.int64), STRIDE_UNIT)
    return ptr + tl.cast(row, tl.int64) * STRIDE + tl.cast(head, tl.int64) * stride_head * STRIDE_UNIT


@triton.jit
def batch_base(ptr, sequence, stride_batch, STRIDE_UNIT: tl.constexpr):
    """The address of a sequence of a batch. Its stride counts STRIDE_UNIT elements too."""
    return ptr + tl.cast(sequence, tl.int64) * of_unit(tl.cast(stride_batch, tl.int64), STRIDE_UNIT) * STRIDE_UNIT


@triton.jit
def row_offsets(rows, STRIDE):
    """rows * STRIDE as [rows, 1], in 64 bits if it might overflow 32, as the type of a run-time stride tells."""
    if not isinstance(STRIDE, tl.tensor):
        if STRIDE > WIDE_STRIDE:
            rows = rows.to(tl.int64)
    return (rows * STRIDE)[:, None]


@triton.jit
def column_starts(head, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr):
    """The first columns of the main chunks and of the tail, equal for all tensors of a program.

    With a tail of 8 columns (D = 72) every other head begins in the middle of a 32-byte sector. Main then takes columns
    8 .. D-1 and the tail 0 .. 7, so that no sector is fetched twice; the order of columns does not change a sum over
    them. On an H200 this makes the forward 8 % faster at D = 72.
    """
    if HEAD_DIM - MAIN == 8:
        shifted = (head % 2).to(tl.int32)
        starts = (8 * shifted, MAIN - MAIN * shifted)
    else:
        starts = (0, HEAD_DIM // MAIN * MAIN)
    return starts


@triton.jit
def load_chunk(
    base, start, rows, num_rows, STRIDE,
    WIDTH: tl.constexpr, VALID: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, WIDTH)
    pointers = base + row_offsets(rows, STRIDE) + (start + cols)[None, :]
    if CHECK_ROWS and VALID < WIDTH:
        chunk = tl.load(pointers, mask=(rows < num_rows)[:, None] & (cols < VALID)[None, :], other=0.0)
    elif CHECK_ROWS:
        chunk = tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
    elif VALID < WIDTH:
        chunk = tl.load(pointers, mask=(cols < VALID)[None, :], other=0.0)
    else:
        chunk = tl.load(pointers)
    return chunk  # [BLOCK, WIDTH]


@triton.jit
def load_rows(
    base, starts, rows, num_rows, STRIDE,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of one head, [BLOCK, D]. With CHECK_ROWS rows from num_rows on read as zero, else all rows must exist."""
    chunks = (load_chunk(base, starts[0], rows, num_rows, STRIDE, MAIN, HEAD_DIM, CHECK_ROWS),)
    for begin in tl.static_range(MAIN, HEAD_DIM - MAIN + 1, MAIN):
        chunks += (load_chunk(base, starts[0] + begin, rows, num_rows, STRIDE, MAIN, MAIN, CHECK_ROWS),)
    if TAIL > 0:
        chunks += (load_chunk(base, starts[1], rows, num_rows, STRIDE, TAIL, HEAD_DIM % MAIN, CHECK_ROWS),)
    return chunks


@triton.jit
def store_chunk(
    base,
    start,
    rows,
    num_rows,
    chunk,
    STRIDE,
    WIDTH: tl.constexpr,
    VALID: tl.constexpr,
):
    cols = tl.arange(0, WIDTH)
    mask = (rows < num_rows)[:, None] & (cols < VALID)[None, :]
    tl.store(
        base + row_offsets(rows, STRIDE) + (start + cols)[None, :],
        chunk.to(base.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def store_rows(
    base, starts, rows, num_rows, chunks, STRIDE,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    store_chunk(base, starts[0], rows, num_rows, chunks[0], STRIDE, MAIN, HEAD_DIM)
    for begin in tl.static_range(MAIN, HEAD_DIM - MAIN + 1, MAIN):
        store_chunk(base, starts[0] + begin, rows, num_rows, chunks[begin // MAIN], STRIDE, MAIN, MAIN)
    if TAIL > 0:
        store_chunk(base, starts[1], rows, num_rows, chunks[len(chunks) - 1], STRIDE, TAIL, HEAD_DIM % MAIN)


@triton.jit
def zero_rows(BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """An fp32 accumulator of zeros, [BLOCK, D]."""
    chunks = (tl.zeros((BLOCK, MAIN), tl.float32),)
    for _ in tl.static_range(MAIN, HEAD_DIM - MAIN + 1, MAIN):
        chunks += (tl.zeros((BLOCK, MAIN), tl.float32),)
    if TAIL > 0:
        chunks += (tl.zeros((BLOCK, TAIL), tl.float32),)
    return chunks


@triton.jit
def scale_rows(chunks, factor):
    """Rows times a factor for each row [BLOCK, 1], or times one number."""
    scaled = (chunks[0] * factor,)
    for index in tl.static_range(1, len(chunks)):
        scaled += (chunks[index] * factor,)
    return scaled


@triton.jit
def add_rows(a, b):
    total = (a[0] + b[0],)
    for index in tl.static_range(1, len(a)):
        total += (a[index] + b[index],)
    return total


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x rounded to tf32 if PRECISION is "tf32". Tensor cores would truncate fp32 instead, with twice the error."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        if tl.target_info.cuda_capability_geq(9, 0):
            TEXT: tl.constexpr = "cvt.rn.tf32.f32 $0, $1;"
            bits = tl.inline_asm_elementwise(TEXT, "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
            x = bits.to(tl.float32, bitcast=True)
        else:
            # Half of tf32's last place added to the magnitude, as PTX's cvt.rna.tf32.f32 does. Tensor cores cut off the
            # bits below.
            nearest = (bits + 0x1000).to(tl.float32, bitcast=True)
            x = tl.where(tl.abs(x) < float("inf"), nearest, x)
    return x


@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    """a b^T over the head dimension: [BLOCK_A, BLOCK_B].

    In fp32 each chunk has its own accumulator, because one long chain of additions would round far more than a matrix
    product does. An fma adds the accumulators; the compiler would fold a plain addition into the dot.
    """
    product = tl.dot(rounded(a[0], PRECISION), tl.trans(rounded(b[0], PRECISION)), input_precision=PRECISION)
    for index in tl.static_range(1, len(a)):
        left, right = rounded(a[index], PRECISION), tl.trans(rounded(b[index], PRECISION))
        if a[0].dtype == tl.float32:
            product = tl.fma(tl.dot(left, right, input_precision=PRECISION), 1.0, product)
        else:
            product = tl.dot(left, right, product, input_precision=PRECISION)
    return product


@triton.jit
def accumulate_rows(acc, weights, rows, PRECISION: tl.constexpr):
    """acc + weights rows: [BLOCK, D], from weights [BLOCK, BLOCK_ROWS] and rows [BLOCK_ROWS, D]."""
    weights = rounded(weights, PRECISION)
    total = (tl.dot(weights, rounded(rows[0], PRECISION), acc[0], input_precision=PRECISION),)
    for index in tl.static_range(1, len(rows)):
        total += (tl.dot(weights, rounded(rows[index], PRECISION), acc[index], input_precision=PRECISION),)
    return total


@triton.jit
def sum_of_products(a, b):
    """The sum of a * b over each row, in fp32: [BLOCK]."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for index in tl.static_range(1, len(a)):
        total += tl.sum(a[index].to(tl.float32) * b[index].to(tl.float32), 1)
    return total


@triton.jit
def delta_of_rows(out, dout, lse, dlse_ptr, inside, HAS_DLSE: tl.constexpr):
    """sum(out dout) - dlse for each row: [BLOCK]; 0 for a row that saw no key, whatever its dlse is."""
    delta = sum_of_products(out, dout)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr, mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), 0.0, delta)
