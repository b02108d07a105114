"""Row blocks of a head dimension that need not be a power of two.

A block of rows is a tuple of column parts: as many of MAIN columns as HEAD_DIM holds, then one of TAIL if TAIL > 0.
`tl.dot` wants powers of two: 72 = 64 + 8 is read into parts of 64 and 16, where padding it to 128 would waste 1.8 times
the matrix work. Columns past HEAD_DIM read as zero and are never stored.

Addresses are `base + row * STRIDE + column`. Row strides are constants of the layout (H D, or 3 H D for views of a
packed projection) and compile into the kernel: loads are 16 bytes wide, and the rows that one thread reads are one
register and constants apart. Run-time strides cost D = 72 a third more registers, and with them the second
block on each SM.
"""

import triton
import triton.language as tl

# Beyond this, offsets inside a tile may pass 2^31 elements.
WIDE_STRIDE = tl.constexpr(2**22)


@triton.jit
def row_base(ptr, row, head, stride_head, STRIDE: tl.constexpr, UNIT: tl.constexpr):
    """Where a row of a head begins. Head strides arrive in units of UNIT elements, so that their alignment is known."""
    return ptr + tl.cast(row, tl.int64) * STRIDE + tl.cast(head, tl.int64) * tl.cast(stride_head, tl.int64) * UNIT


@triton.jit
def batch_base(ptr, batch, stride_batch, UNIT: tl.constexpr):
    """Where a sequence of a batch begins, by a stride in the same units."""
    return ptr + tl.cast(batch, tl.int64) * tl.cast(stride_batch, tl.int64) * UNIT


@triton.jit
def row_offsets(rows, STRIDE: tl.constexpr):
    if STRIDE > WIDE_STRIDE:
        rows = rows.to(tl.int64)
    return (rows * STRIDE)[:, None]


@triton.jit
def column_starts(head, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr):
    """Where the main parts and the tail begin, the same for all tensors of one program.

    With a tail of 8 columns (D = 72) every other head begins in the middle of a 32-byte sector. There main takes
    columns 8 .. D-1 and tail 0 .. 7: a sum over columns does not mind their order, and no sector is fetched twice.
    Measured on an H200 at D = 72: 8 % of the forward, 10 % of the backward.
    """
    if HEAD_DIM - MAIN == 8:
        shifted = (head % 2).to(tl.int32)
        starts = (8 * shifted, MAIN - MAIN * shifted)
    else:
        starts = (0, HEAD_DIM // MAIN * MAIN)
    return starts


@triton.jit
def load_part(
    base, start, rows, num_rows,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, VALID: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, WIDTH)
    pointers = base + row_offsets(rows, STRIDE) + (start + cols)[None, :]
    if CHECK_ROWS and VALID < WIDTH:
        part = tl.load(pointers, mask=(rows < num_rows)[:, None] & (cols < VALID)[None, :], other=0.0)
    elif CHECK_ROWS:
        part = tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
    elif VALID < WIDTH:
        part = tl.load(pointers, mask=(cols < VALID)[None, :], other=0.0)
    else:
        part = tl.load(pointers)
    return part  # [BLOCK, WIDTH]


@triton.jit
def load_rows(
    base, starts, rows, num_rows, STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of one head; with CHECK_ROWS, rows from num_rows on read as zero, else all of them must exist."""
    parts = (load_part(base, starts[0], rows, num_rows, STRIDE, MAIN, HEAD_DIM, CHECK_ROWS),)
    for begin in tl.static_range(MAIN, HEAD_DIM - MAIN + 1, MAIN):
        parts += (load_part(base, starts[0] + begin, rows, num_rows, STRIDE, MAIN, MAIN, CHECK_ROWS),)
    if TAIL > 0:
        parts += (load_part(base, starts[1], rows, num_rows, STRIDE, TAIL, HEAD_DIM % MAIN, CHECK_ROWS),)
    return parts


@triton.jit
def store_part(
    base,
    start,
    rows,
    num_rows,
    part,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALID: tl.constexpr,
):
    cols = tl.arange(0, WIDTH)
    mask = (rows < num_rows)[:, None] & (cols < VALID)[None, :]
    tl.store(
        base + row_offsets(rows, STRIDE) + (start + cols)[None, :],
        part.to(base.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def store_rows(
    base, starts, rows, num_rows, parts, STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    store_part(base, starts[0], rows, num_rows, parts[0], STRIDE, MAIN, HEAD_DIM)
    for begin in tl.static_range(MAIN, HEAD_DIM - MAIN + 1, MAIN):
        store_part(base, starts[0] + begin, rows, num_rows, parts[begin // MAIN], STRIDE, MAIN, MAIN)
    if TAIL > 0:
        store_part(base, starts[1], rows, num_rows, parts[len(parts) - 1], STRIDE, TAIL, HEAD_DIM % MAIN)


@triton.jit
def zero_rows(BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    parts = (tl.zeros((BLOCK, MAIN), tl.float32),)
    for _ in tl.static_range(MAIN, HEAD_DIM - MAIN + 1, MAIN):
        parts += (tl.zeros((BLOCK, MAIN), tl.float32),)
    if TAIL > 0:
        parts += (tl.zeros((BLOCK, TAIL), tl.float32),)
    return parts


@triton.jit
def scale_rows(parts, factor):
    """Each row times its entry of factor [BLOCK, 1], or all rows times one number."""
    scaled = (parts[0] * factor,)
    for index in tl.static_range(1, len(parts)):
        scaled += (parts[index] * factor,)
    return scaled


@triton.jit
def add_rows(a, b):
    total = (a[0] + b[0],)
    for index in tl.static_range(1, len(a)):
        total += (a[index] + b[index],)
    return total


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """fp32 as tensor cores shall take it in tf32: they cut off what it does not hold, which is off by twice as much."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        if tl.target_info.cuda_capability_geq(9, 0):
            TEXT: tl.constexpr = "cvt.rn.tf32.f32 $0, $1;"
            bits = tl.inline_asm_elementwise(TEXT, "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
            x = bits.to(tl.float32, bitcast=True)
        else:
            # Half of the last place that it holds, added to the magnitude, is PTX's cvt.rna.tf32.f32 on every GPU, but
            # for what is then cut off.
            nearest = (bits + 0x1000).to(tl.float32, bitcast=True)
            x = tl.where(tl.abs(x) < float("inf"), nearest, x)
    return x


@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    """a b^T summed over the head dimension: [BLOCK_A, BLOCK_B].

    In fp32 each part has a sum of its own, and the sums are added: the rounding of one long chain of additions would
    be far beyond that of a matrix product. An fma adds them, since a plain addition would be folded into the dot.
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
    """acc + weights rows, with weights [BLOCK, BLOCK_ROWS]."""
    weights = rounded(weights, PRECISION)
    total = (tl.dot(weights, rounded(rows[0], PRECISION), acc[0], input_precision=PRECISION),)
    for index in tl.static_range(1, len(rows)):
        total += (tl.dot(weights, rounded(rows[index], PRECISION), acc[index], input_precision=PRECISION),)
    return total


@triton.jit
def sum_of_products(a, b):
    """Row by row sum of a * b in fp32: [BLOCK]."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for index in tl.static_range(1, len(a)):
        total += tl.sum(a[index].to(tl.float32) * b[index].to(tl.float32), 1)
    return total


@triton.jit
def delta_of_rows(out, dout, lse, dlse_ptr, inside, HAS_DLSE: tl.constexpr):
    """sum(out dout) - dlse of each row; 0 where it saw no key and has no gradient, whatever came in for its lse."""
    delta = sum_of_products(out, dout)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr, mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), 0.0, delta)
