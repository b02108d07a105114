"""Row blocks of a head dimension that need not be a power of two.

A block of rows is a tuple of column parts: `(main,)`, or `(main, tail)` when the head dimension is split, as
72 = 64 + 8 is into 64 + 16 columns. `tl.dot` wants powers of two; padding 72 to 128 would waste 1.8 times the
matrix work, the split wastes a tenth. Columns past HEAD_DIM read as zero and are never stored.

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
def _row_offsets(rows, STRIDE: tl.constexpr):
    if STRIDE > WIDE_STRIDE:
        rows = rows.to(tl.int64)
    return (rows * STRIDE)[:, None]


@triton.jit
def column_starts(head, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr):
    """Where the main and the tail part begin, the same for all tensors of one program.

    With a tail of 8 columns (D = 72) every other head begins in the middle of a 32-byte sector. There main takes
    columns 8 .. D-1 and tail 0 .. 7: a sum over columns does not mind their order, and no sector is fetched twice.
    Measured on an H200 at D = 72: 8 % of the forward, 10 % of the backward.
    """
    if HEAD_DIM - MAIN == 8:
        shifted = (head % 2).to(tl.int32)
        starts = (8 * shifted, MAIN - MAIN * shifted)
    else:
        starts = (0, MAIN)
    return starts


@triton.jit
def _load_part(
    base, start, rows, num_rows,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, VALID: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, WIDTH)
    pointers = base + _row_offsets(rows, STRIDE) + (start + cols)[None, :]
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
    if TAIL > 0:
        parts = (
            _load_part(base, starts[0], rows, num_rows, STRIDE, MAIN, MAIN, CHECK_ROWS),
            _load_part(base, starts[1], rows, num_rows, STRIDE, TAIL, HEAD_DIM - MAIN, CHECK_ROWS),
        )
    else:
        parts = (_load_part(base, starts[0], rows, num_rows, STRIDE, MAIN, HEAD_DIM, CHECK_ROWS),)
    return parts


@triton.jit
def _store_part(
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
        base + _row_offsets(rows, STRIDE) + (start + cols)[None, :],
        part.to(base.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def store_rows(
    base, starts, rows, num_rows, parts, STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if TAIL > 0:
        _store_part(base, starts[0], rows, num_rows, parts[0], STRIDE, MAIN, MAIN)
        _store_part(base, starts[1], rows, num_rows, parts[1], STRIDE, TAIL, HEAD_DIM - MAIN)
    else:
        _store_part(base, starts[0], rows, num_rows, parts[0], STRIDE, MAIN, HEAD_DIM)


@triton.jit
def zero_rows(BLOCK: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    main = tl.zeros((BLOCK, MAIN), tl.float32)
    if TAIL > 0:
        parts = (main, tl.zeros((BLOCK, TAIL), tl.float32))
    else:
        parts = (main,)
    return parts


@triton.jit
def scale_rows(parts, factor, TAIL: tl.constexpr):
    """Each row times its entry of factor [BLOCK, 1], or all rows times one number."""
    if TAIL > 0:
        scaled = (parts[0] * factor, parts[1] * factor)
    else:
        scaled = (parts[0] * factor,)
    return scaled


@triton.jit
def dot_rows(a, b, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T summed over the head dimension: [BLOCK_A, BLOCK_B]."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if TAIL > 0:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def accumulate_rows(acc, weights, rows, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weights rows, with weights [BLOCK, BLOCK_ROWS]."""
    main = tl.dot(weights, rows[0], acc[0], input_precision=PRECISION)
    if TAIL > 0:
        total = (main, tl.dot(weights, rows[1], acc[1], input_precision=PRECISION))
    else:
        total = (main,)
    return total


@triton.jit
def sum_of_products(a, b, TAIL: tl.constexpr):
    """Row by row sum of a * b in fp32: [BLOCK]."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if TAIL > 0:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total
