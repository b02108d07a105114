"""GEMMs with fused epilogues, in portable Triton: out = epilogue(x weight^T + bias).

x is [M, K] with contiguous columns, weight is [N, K] with any strides. Accumulators are fp32 and are rounded once,
after the epilogue. `_gemm_kernel` computes one product; its epilogue is the bias and an activation. `_gemm_pair_kernel`
multiplies one tile of x with two sets of rows of the weight and combines both accumulators elementwise:

    swiglu      row f of two weights [I, K], or rows f         out_f = silu(a_f) b_f
                and I + f of one [2 I, K]
    rotary      the two rows of a pair of columns              (q, k) rotated by the tables of their row, v unchanged
                (tiles/rope.py)

Partners meet in the registers of one thread: no shuffle between threads, no head padded to a power of two.

A tile is BLOCK_M x BLOCK_N of the result. Tiles run in groups of GROUP_M rows of tiles, column by column, so that tiles
in flight share their operands in the L2 cache. K is read in steps of BLOCK_K without masks. The remainder is one last
step of the next power of two (4304 = 67 * 64 + 16).
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.activations import activate, swiglu
from csrc_free_ops.tiles.blocks import store_block, store_padded
from csrc_free_ops.tiles.rope import OF_Q, OF_V, count_tiles, first_columns, load_angles, locate_pairs, rotate
from csrc_free_ops.tiles.rows import row_offsets, row_step

# Not specialized: Triton would build the same code again for sizes of another divisibility.
COUNTS = ("num_rows", "stride_xm")


@triton.jit
def _locate_tile(num_rows, column_tiles, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(first row, index along N) of this program's tile."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    group = program // (GROUP_M * column_tiles)
    position = program % (GROUP_M * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    tile = group * GROUP_M + position % height
    return tile.to(tl.int64) * BLOCK_M, position // height


@triton.jit
def _add_product(acc, x, w, PRECISION: tl.constexpr):
    """acc + x w^T, [BLOCK_M, BLOCK_N].

    In fp32 each step has its own accumulator, because one long chain of additions would round far more than a matrix
    product does. An fma adds the accumulators; the compiler would fold a plain addition into the dot.
    """
    if x.dtype == tl.float32:
        acc = tl.fma(tl.dot(x, tl.trans(w), input_precision=PRECISION), 1.0, acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _load_weight(
    base, offsets, valid, STRIDE_WK: tl.constexpr,
    WIDTH: tl.constexpr, VALID: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    depth = tl.arange(0, WIDTH)
    pointers = base + offsets + (depth * STRIDE_WK)[None, :]
    if CHECK_ROWS and VALID < WIDTH:
        w = tl.load(pointers, mask=valid[:, None] & (depth < VALID)[None, :], other=0.0)
    elif CHECK_ROWS:
        w = tl.load(pointers, mask=valid[:, None], other=0.0)
    elif VALID < WIDTH:
        w = tl.load(pointers, mask=(depth < VALID)[None, :], other=0.0)
    else:
        w = tl.load(pointers)
    return w  # [BLOCK_N, WIDTH]


@triton.jit
def _multiply_step(
    a, b, x_base, x_offsets, a_base, a_offsets, b_base, b_offsets, valid,
    STRIDE_WK: tl.constexpr, WIDTH: tl.constexpr, VALID: tl.constexpr, CHECK_ROWS: tl.constexpr,
    PAIRED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(a, b) after one step over WIDTH columns of K, of which VALID exist."""
    depth = tl.arange(0, WIDTH)
    pointers = x_base + x_offsets + depth[None, :]
    if VALID < WIDTH:
        x = tl.load(pointers, mask=(depth < VALID)[None, :], other=0.0)
    else:
        x = tl.load(pointers)  # [BLOCK_M, WIDTH]
    a = _add_product(a, x, _load_weight(a_base, a_offsets, valid, STRIDE_WK, WIDTH, VALID, CHECK_ROWS), PRECISION)
    if PAIRED:
        b = _add_product(b, x, _load_weight(b_base, b_offsets, valid, STRIDE_WK, WIDTH, VALID, CHECK_ROWS), PRECISION)
    return a, b


@triton.jit
def _multiply(
    x_ptr, a_ptr, b_ptr, first_row, num_rows, a_rows, b_rows, valid,
    STRIDE_XM, K: tl.constexpr, STRIDE_WN: tl.constexpr, STRIDE_WK: tl.constexpr,
    CHECK_ROWS: tl.constexpr, PAIRED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of x from `first_row` on with rows `a_rows` of a and `b_rows` of b (only if PAIRED).

    Returns two fp32 accumulators [BLOCK_M, BLOCK_N]. a and b have equal strides and may be one weight. Rows of x past
    the last one repeat it and are not stored. Rows of a and b that are not `valid` read as zero.
    """
    tl.static_assert(TAIL_K >= K % BLOCK_K, "TAIL_K must hold the remainder of K: at least K % BLOCK_K")
    rows = tl.minimum(tl.arange(0, BLOCK_M), (num_rows - first_row).to(tl.int32) - 1)
    x_offsets = row_offsets(rows, STRIDE_XM)
    a_offsets = (a_rows.to(tl.int64) * STRIDE_WN)[:, None]
    b_offsets = (b_rows.to(tl.int64) * STRIDE_WN)[:, None]
    x_base = x_ptr + first_row * STRIDE_XM
    a_base = a_ptr
    b_base = b_ptr
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = a
    for _ in tl.range(0, K // BLOCK_K):
        a, b = _multiply_step(
            a, b, x_base, x_offsets, a_base, a_offsets, b_base, b_offsets, valid,
            STRIDE_WK, BLOCK_K, BLOCK_K, CHECK_ROWS, PAIRED, PRECISION,
        )  # fmt: skip
        x_base += BLOCK_K
        a_base += BLOCK_K * STRIDE_WK
        if PAIRED:
            b_base += BLOCK_K * STRIDE_WK
    if K % BLOCK_K > 0:
        a, b = _multiply_step(
            a, b, x_base, x_offsets, a_base, a_offsets, b_base, b_offsets, valid,
            STRIDE_WK, TAIL_K, K % BLOCK_K, CHECK_ROWS, PAIRED, PRECISION,
        )  # fmt: skip
    return a, b


@triton.jit
def _add_bias(acc, bias_ptr, cols, valid):
    """acc [BLOCK_M, BLOCK_N] plus the bias of its columns [BLOCK_N]."""
    return acc + tl.load(bias_ptr + cols, mask=valid, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=COUNTS)
def _gemm_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, pre_ptr, num_rows, stride_xm,
    N: tl.constexpr, K: tl.constexpr, STRIDE_XM: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    STRIDE_WN: tl.constexpr, STRIDE_WK: tl.constexpr, STRIDE_OM: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS_PRE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAIL_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Grid (all tiles,). out = activation(pre) with pre = x w^T + bias; KEEPS_PRE stores pre [M, N]."""
    first_row, tile = _locate_tile(num_rows, tl.cdiv(N, BLOCK_N), BLOCK_M, GROUP_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = cols < N
    pre, _ = _multiply(
        x_ptr, w_ptr, w_ptr, first_row, num_rows, cols, cols, valid,
        row_step(stride_xm, STRIDE_XM, STRIDE_UNIT), K, STRIDE_WN, STRIDE_WK,
        N % BLOCK_N > 0, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, TAIL_K,
    )  # fmt: skip
    if HAS_BIAS:
        pre = _add_bias(pre, bias_ptr, cols, valid)
    rows = first_row + tl.arange(0, BLOCK_M)
    mask = (rows < num_rows)[:, None] & valid[None, :]
    if KEEPS_PRE:
        store_block(pre_ptr, pre, rows, cols, mask, N)
    out = activate(pre, ACTIVATION, x_ptr.dtype.element_ty == tl.float32)
    store_padded(out_ptr, out, rows, cols, mask, num_rows, N, STRIDE_OM)


@triton.jit(do_not_specialize=COUNTS)
def _gemm_pair_kernel(
    x_ptr, a_ptr, b_ptr, a_bias_ptr, b_bias_ptr, cos_ptr, sin_ptr, first_ptr, second_ptr, third_ptr,
    num_rows, stride_xm,
    HALF: tl.constexpr, PARTNER: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, K: tl.constexpr,
    STRIDE_XM: tl.constexpr, STRIDE_UNIT: tl.constexpr, STRIDE_WN: tl.constexpr, STRIDE_WK: tl.constexpr,
    STRIDE_OM: tl.constexpr, STRIDE_CT: tl.constexpr, STRIDE_ST: tl.constexpr,
    ROTARY: tl.constexpr, SHARED_ANGLES: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS_PRE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAIL_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Grid (all tiles,). A tile has BLOCK_N pairs: a row of a, and the row of b that is PARTNER rows further.

    ROTARY: a holds NUM_HEADS heads of q, NUM_K_HEADS of k and as many of v, with 2 HALF rows each, and b is a. q, k and
    v go to `first`, `second` and `third`, contiguous. No tile holds columns of two of them (`locate_pairs`).

    Otherwise a begins with HALF rows of gates, and b has the HALF rows that they gate, PARTNER rows further. b is a
    weight of its own or, if both are packed, a. The result goes to `first`; KEEPS_PRE stores both accumulators in
    `second`.
    """
    tiles = count_tiles(NUM_HEADS, HALF, BLOCK_N) + 2 * count_tiles(NUM_K_HEADS, HALF, BLOCK_N)
    first_row, tile = _locate_tile(num_rows, tiles, BLOCK_M, GROUP_M)
    section, pairs, valid, begin = locate_pairs(tile, NUM_HEADS, NUM_K_HEADS, HALF, BLOCK_N)
    cols = pairs
    a_rows = pairs
    if ROTARY:
        cols = first_columns(pairs, HALF)
        a_rows = begin + cols
    a, b = _multiply(
        x_ptr, a_ptr, b_ptr, first_row, num_rows, a_rows, a_rows + PARTNER, valid,
        row_step(stride_xm, STRIDE_XM, STRIDE_UNIT), K, STRIDE_WN, STRIDE_WK,
        (NUM_HEADS * HALF) % BLOCK_N > 0 or (NUM_K_HEADS * HALF) % BLOCK_N > 0, True,
        PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, TAIL_K,
    )  # fmt: skip
    if HAS_BIAS:
        a = _add_bias(a, a_bias_ptr, a_rows, valid)
        b = _add_bias(b, b_bias_ptr, a_rows + PARTNER, valid)
    rows = first_row + tl.arange(0, BLOCK_M)
    mask = (rows < num_rows)[:, None] & valid[None, :]
    QUERY_COLUMNS: tl.constexpr = 2 * HALF * NUM_HEADS
    KEY_COLUMNS: tl.constexpr = 2 * HALF * NUM_K_HEADS
    if ROTARY:
        if section == OF_V:
            store_block(third_ptr, a, rows, cols, mask, KEY_COLUMNS)
            store_block(third_ptr, b, rows, cols + HALF, mask, KEY_COLUMNS)
        else:
            cos = load_angles(cos_ptr, rows, pairs, mask, STRIDE_CT, HALF, SHARED_ANGLES)
            sin = load_angles(sin_ptr, rows, pairs, mask, STRIDE_ST, HALF, SHARED_ANGLES)
            rotated_a, rotated_b = rotate(a, b, cos, sin)
            if section == OF_Q:
                store_block(first_ptr, rotated_a, rows, cols, mask, QUERY_COLUMNS)
                store_block(first_ptr, rotated_b, rows, cols + HALF, mask, QUERY_COLUMNS)
            else:
                store_block(second_ptr, rotated_a, rows, cols, mask, KEY_COLUMNS)
                store_block(second_ptr, rotated_b, rows, cols + HALF, mask, KEY_COLUMNS)
    else:
        if KEEPS_PRE:
            store_block(second_ptr, a, rows, cols, mask, 2 * HALF)
            store_block(second_ptr, b, rows, cols + HALF, mask, 2 * HALF)
        out = swiglu(a, b, x_ptr.dtype.element_ty == tl.float32)
        store_padded(first_ptr, out, rows, cols, mask, num_rows, HALF, STRIDE_OM)
