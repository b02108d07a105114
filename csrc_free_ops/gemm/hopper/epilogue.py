"""What follows a product on Hopper: f of a tile in shared memory, and out.

Tiles are 64 rows of a linear layer's result in a half type, in parts of 64 columns. f reads them in fp32 and is rounded
once. Logistic functions take two instructions of the special function unit a value, an exponential and a reciprocal:

    gelu_tanh(x) = x / (1 + e^(-2 u)),  u = sqrt(2/pi) (x + 0.044715 x^3)
    quick_gelu(x) = x / (1 + e^(-1.702 x)),  silu(x) = x / (1 + e^(-x)),  swiglu(a, b) = silu(a) b
    gelu(x) = x (1 - t(|z|)) for x >= 0, x t(|z|) below; z = x / sqrt(2), t(z) = erfc(z) / 2 within 1e-7
              (Abramowitz and Stegun, 7.1.26: no difference of numbers close to each other)
    rotary (a, b) -> (a cos - b sin, b cos + a sin) for the first and second half of each head

Of a gradient the tile is dh, and pre, what f was of, lies beside it: dpre = dh f'(pre), h = f(pre). Of x s(z), with
s(z) = 1 / (1 + e^-z) and z = 2 u for gelu_tanh, the slope is s + x s (1 - s) z', and neither s nor 1 - s comes of a
difference; of gelu it is gelu(x) / x + x e^(-x^2 / 2) / sqrt(2 pi).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.warpgroup import exp2, option, reciprocal, shared_base

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def parts_of(columns):
    """Units of 64 columns that a tile takes."""
    return (columns + 63) // 64


GRADIENT = "_gradient"


@gluon.constexpr_function
def is_gradient(epilogue):
    return epilogue.endswith(GRADIENT)


@gluon.constexpr_function
def _activation_of(epilogue):
    return epilogue.removesuffix(GRADIENT)


@gluon.constexpr_function
def halves_of(epilogue):
    """From how many places of the weight a tile's columns come."""
    return 2 if epilogue == "swiglu" else 1


@gluon.jit
def _logistic(x, RATE: gl.constexpr):
    return reciprocal(1.0 + exp2(x * (-RATE * LOG2E)))


@gluon.jit
def _half_erfc(z):
    """erfc(z) / 2 for z >= 0."""
    t = reciprocal(1.0 + 0.3275911 * z)
    poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return poly * exp2(z * z * -LOG2E)


@gluon.jit
def _activate(x, EPILOGUE: gl.constexpr):
    if EPILOGUE == "gelu_tanh":
        # The exponent with all constants in it: 2 sqrt(2/pi) log2(e), and 0.044715 times as much.
        y = x * reciprocal(1.0 + exp2(x * (-2.3022082 - 0.10294324 * x * x)))
    elif EPILOGUE == "gelu":
        tail = _half_erfc(gl.abs(x) * 0.7071067811865476)
        y = x * gl.where(x >= 0, 1.0 - tail, tail)
    elif EPILOGUE == "quick_gelu":
        y = x * _logistic(x, 1.702)
    elif EPILOGUE == "silu":
        y = x * _logistic(x, 1.0)
    else:
        y = x
    return y


@gluon.jit
def _activate_with_slope(x, ACTIVATION: gl.constexpr):
    """f(x) and f'(x)."""
    if ACTIVATION == "gelu":
        tail = _half_erfc(gl.abs(x) * 0.7071067811865476)
        share = gl.where(x >= 0, 1.0 - tail, tail)
        rise = exp2(x * x * (-0.5 * LOG2E)) * 0.3989422804014327
    else:
        if ACTIVATION == "gelu_tanh":
            # Beyond, s is 0 or 1, and what would be infinite times 0 stays 0.
            square = gl.minimum(x * x, 4096.0)
            inner = x * (1.5957691216057308 + 0.0713548162726 * square)
            slope = 1.5957691216057308 + 0.2140644488178 * square
        elif ACTIVATION == "quick_gelu":
            inner = x * 1.702
            slope = 1.702
        else:
            inner = x
            slope = 1.0
        decay = exp2(gl.abs(inner) * -LOG2E)
        inverse = reciprocal(1.0 + decay)
        share = gl.where(inner < 0, decay * inverse, inverse)
        rise = decay * inverse * inverse * slope
    return x * share, share + x * rise


@gluon.jit
def _store_columns(units, FIRST: gl.constexpr, row, n, pointers, total, OPTIONS: gl.constexpr):
    """By four warps, as high a piece at a time as they reach at once."""
    COLUMNS: gl.constexpr = option(OPTIONS, "COLUMNS")
    WIDTH: gl.constexpr = option(OPTIONS, "WIDTH")
    EPILOGUE: gl.constexpr = option(OPTIONS, "EPILOGUE")
    KEEPS_PRE: gl.constexpr = option(OPTIONS, "KEEPS_PRE")
    STRIDE_OUT: gl.constexpr = option(OPTIONS, "STRIDE_OUT")
    HALVES: gl.constexpr = halves_of(EPILOGUE)
    HALF: gl.constexpr = COLUMNS // HALVES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    out_ptr, _, _, pre_ptr, _, _ = pointers
    width = gl.minimum(WIDTH - n * HALF, HALF)
    pieces = units._reinterpret(units.dtype, [units.shape[0] * 2, 32, 64], units.type.layout)
    for part in range((width + 63) // 64):
        column = part * 64 + cols
        valid = column < width
        # Of rows that are longer than the weight has columns, the rest is zero.
        stored = column < gl.minimum(STRIDE_OUT - n * HALF, HALF)
        for index in gl.static_range(2):
            first = row + index * 32
            inside = (rows < total - first)[:, None] & valid[None, :]
            half = pieces.index((FIRST + part) * 2 + index).load(LAYOUT)
            pre_at = pre_ptr + first.to(gl.int64) * (WIDTH * HALVES) + n * HALF
            pre_at = pre_at + (rows * (WIDTH * HALVES))[:, None] + column[None, :]
            if EPILOGUE == "swiglu":
                up = pieces.index((FIRST + HALF // 64 + part) * 2 + index).load(LAYOUT)
                gate = half.to(gl.float32)
                y = gate * _logistic(gate, 1.0) * up.to(gl.float32)
                if KEEPS_PRE:
                    gl.store(pre_at + WIDTH, up, mask=inside)
            else:
                y = _activate(half.to(gl.float32), EPILOGUE)
            if KEEPS_PRE:
                gl.store(pre_at, half, mask=inside)
            if STRIDE_OUT > WIDTH:
                y = gl.where(valid[None, :], y, 0.0)
            at = out_ptr + first.to(gl.int64) * STRIDE_OUT + n * HALF
            wanted = (rows < total - first)[:, None] & stored[None, :]
            gl.store(at + (rows * STRIDE_OUT)[:, None] + column[None, :], y.to(half.dtype), mask=wanted)


@gluon.jit
def _store_gradients(
    units, FIRST: gl.constexpr, PRE: gl.constexpr, row, n, pointers, total, OPTIONS: gl.constexpr
):  # fmt: skip
    """dpre and h, and with SUMS of every 64 rows four sums of dpre before it is rounded. By four warps.

    From registers: rows that TMA stores pass through shared memory twice more, whose ports the products need.
    """
    COLUMNS: gl.constexpr = option(OPTIONS, "COLUMNS")
    WIDTH: gl.constexpr = option(OPTIONS, "WIDTH")
    ACTIVATION: gl.constexpr = _activation_of(option(OPTIONS, "EPILOGUE"))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    dpre_ptr, h_ptr, sums_ptr, _, _, _ = pointers
    width = gl.minimum(WIDTH - n * COLUMNS, COLUMNS)
    halves = units._reinterpret(units.dtype, [units.shape[0] * 2, 32, 64], units.type.layout)
    for part in range((width + 63) // 64):
        column = part * 64 + cols
        added = gl.zeros([32, 64], gl.float32, LAYOUT)
        for half in gl.static_range(2):
            first = row + half * 32
            pre = halves.index((PRE + part) * 2 + half).load(LAYOUT)
            h, slope = _activate_with_slope(pre.to(gl.float32), ACTIVATION)
            dpre = halves.index((FIRST + part) * 2 + half).load(LAYOUT).to(gl.float32) * slope
            added = added + dpre
            at = first.to(gl.int64) * WIDTH + n * COLUMNS + (rows * WIDTH)[:, None] + column[None, :]
            inside = (rows < total - first)[:, None] & (column < width)[None, :]
            gl.store(dpre_ptr + at, dpre.to(units.dtype), mask=inside)
            gl.store(h_ptr + at, h.to(units.dtype), mask=inside)
        if option(OPTIONS, "SUMS"):
            # A thread's rows, then those of its warp: sums of all warps would have to wait for each other.
            sums = gl.sum(gl.sum(added.reshape([2, 4, 4, 64]), 0), 1)
            lines = row // 64 * 4 + gl.arange(0, 4, gl.SliceLayout(1, sums.type.layout))
            own = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, sums.type.layout))
            at = (lines.to(gl.int64) * WIDTH)[:, None] + (n * COLUMNS + own)[None, :]
            gl.store(sums_ptr + at, sums, mask=(row < total) & (own < width)[None, :])


@gluon.jit
def _read_four(address, DTYPE: gl.constexpr):
    """Four values of a half type from where the first of each four of `address` points."""
    TEXT: gl.constexpr = "ld.shared.v2.b32 {$0, $1}, [$2];"
    if DTYPE == gl.float16:
        x = gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r,r", [address], dtype=gl.float16, is_pure=False, pack=4)
    else:
        x = gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r,r", [address], dtype=gl.bfloat16, is_pure=False, pack=4)
    return x.to(gl.float32)


@gluon.jit
def _shared_at(column, row):
    """Where a column of a row lies in parts of 64 columns, whose rows are swizzled over 128 bytes."""
    byte = column % 64 * 2
    return column // 64 * (64 * 128) + row * 128 + (((byte >> 4) ^ (row % 8)) << 4) + byte % 16


@gluon.jit
def _load_angles(pointers, row, local, place, wanted, OPTIONS: gl.constexpr):
    """cos and sin of four columns of each row, of both halves of a head."""
    STRIDE_COS: gl.constexpr = option(OPTIONS, "STRIDE_COS")
    STRIDE_SIN: gl.constexpr = option(OPTIONS, "STRIDE_SIN")
    HALF: gl.constexpr = option(OPTIONS, "HEAD_DIM") // 2
    _, _, _, _, cos_ptr, sin_ptr = pointers
    begin = row.to(gl.int64)
    cos_at = cos_ptr + begin * STRIDE_COS + (local * STRIDE_COS)[:, :, None] + place
    sin_at = sin_ptr + begin * STRIDE_SIN + (local * STRIDE_SIN)[:, :, None] + place
    angles = (gl.load(cos_at, mask=wanted, other=0.0), gl.load(sin_at, mask=wanted, other=0.0))
    if option(OPTIONS, "SHARED_ANGLES"):
        angles = angles + angles
    else:
        second = (gl.load(cos_at + HALF, mask=wanted, other=0.0), gl.load(sin_at + HALF, mask=wanted, other=0.0))
        angles = angles + second
    return angles


@gluon.jit
def _store_rotated(FIRST: gl.constexpr, row, n, pointers, total, DTYPE: gl.constexpr, OPTIONS: gl.constexpr):
    """Pairs of columns are half a head apart, and no unit apart: read by address, four pairs at a time.

    A warp has so many rows at once that their fours are its lanes, and goes over the heads, which share the angles.
    Those come from far: of the next rows they are on their way while these are turned.
    """
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    NUM_HEADS: gl.constexpr = option(OPTIONS, "NUM_HEADS")
    NUM_K_HEADS: gl.constexpr = option(OPTIONS, "NUM_K_HEADS")
    HEADS: gl.constexpr = option(OPTIONS, "COLUMNS") // HEAD_DIM
    HALF: gl.constexpr = HEAD_DIM // 2
    FOURS: gl.constexpr = HEAD_DIM // 8
    ROWS: gl.constexpr = 32 // FOURS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    # Two rows of a lane: of more, registers do not hold the angles, of these and of the next.
    HEIGHT: gl.constexpr = 2 * gl.num_warps()
    PIECES: gl.constexpr = (64 + ROWS * HEIGHT - 1) // (ROWS * HEIGHT)
    q_ptr, k_ptr, v_ptr, _, _, _ = pointers
    tile_at = shared_base() + FIRST * (64 * 128)
    lanes = gl.arange(0, 32, gl.SliceLayout(0, COLUMN))[None, :]
    rows = gl.arange(0, HEIGHT, gl.SliceLayout(1, COLUMN))[:, None] * ROWS + lanes // FOURS
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    fours = lanes % FOURS * 4
    place = fours[:, :, None] + four
    spread = gl.zeros([HEIGHT, 32, 4], gl.int32, LAYOUT)
    left = gl.minimum(total - row, 64)
    # Lanes that are left over have no row.
    rows = gl.where(lanes < FOURS * ROWS, rows, 64)
    turned = n * HEADS < NUM_HEADS + NUM_K_HEADS
    angles = _load_angles(pointers, row, rows, place, (turned & (rows < left))[:, :, None], OPTIONS)
    for piece in range(PIECES):
        local = piece * (HEIGHT * ROWS) + rows
        cos, sin, cos_b, sin_b = angles
        ahead = local + HEIGHT * ROWS
        angles = _load_angles(pointers, row, ahead, place, (turned & (ahead < left))[:, :, None], OPTIONS)
        inside = (local < left)[:, :, None]
        within = gl.minimum(local, 63)
        for index in gl.static_range(HEADS):
            head = n * HEADS + index
            in_q = head < NUM_HEADS
            in_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_K_HEADS)
            column = index * HEAD_DIM + fours
            a = _read_four(spread + (tile_at + _shared_at(column, within))[:, :, None], DTYPE)
            b = _read_four(spread + (tile_at + _shared_at(column + HALF, within))[:, :, None], DTYPE)
            if in_q | in_k:
                first = a * cos.to(gl.float32) - b * sin.to(gl.float32)
                second = b * cos_b.to(gl.float32) + a * sin_b.to(gl.float32)
            else:
                first, second = a, b
            own = gl.where(in_q, head, (head - NUM_HEADS) % NUM_K_HEADS)
            width = gl.where(in_q, NUM_HEADS, NUM_K_HEADS) * HEAD_DIM
            begin = gl.where(in_q, q_ptr, gl.where(in_k, k_ptr, v_ptr)) + row.to(gl.int64) * width + own * HEAD_DIM
            at = begin + (local * width)[:, :, None] + place
            exists = inside & (head < NUM_HEADS + 2 * NUM_K_HEADS)
            gl.store(at, first.to(DTYPE), mask=exists)
            gl.store(at + HALF, second.to(DTYPE), mask=exists)


@gluon.jit
def finish_rows(units, FIRST: gl.constexpr, PRE: gl.constexpr, row, n, pointers, total, OPTIONS: gl.constexpr):
    """Of the 64 rows from `row` on, in units from FIRST on: f, and out. By the warps of the partition that calls it.

    Of a gradient, what f was of is in units from PRE on.
    """
    if option(OPTIONS, "EPILOGUE") == "rotary":
        _store_rotated(FIRST, row, n, pointers, total, units.dtype, OPTIONS)
    elif is_gradient(option(OPTIONS, "EPILOGUE")):
        _store_gradients(units, FIRST, PRE, row, n, pointers, total, OPTIONS)
    else:
        _store_columns(units, FIRST, row, n, pointers, total, OPTIONS)
