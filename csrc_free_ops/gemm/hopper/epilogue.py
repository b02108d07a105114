"""The epilogue of the Hopper GEMM: apply f to a tile in shared memory, and store out.

A tile has 64 rows of a linear layer's result in a half type, in sub-tiles of 64 columns. f reads the tile in fp32 and
rounds once. A logistic function takes two instructions of the special function unit: an exponential and a reciprocal.

    gelu_tanh(x) = x / (1 + e^(-2 u)),  u = sqrt(2/pi) (x + 0.044715 x^3)
    quick_gelu(x) = x / (1 + e^(-1.702 x)),  silu(x) = x / (1 + e^(-x)),  swiglu(a, b) = silu(a) b
    gelu(x) = x (1 - t(|z|)) for x >= 0, x t(|z|) below; z = x / sqrt(2), t(z) = erfc(z) / 2 within 1e-7
              (Abramowitz and Stegun, 7.1.26: no difference of numbers close to each other)
    rotary (a, b) -> (a cos - b sin, b cos + a sin) for the first and second half of each head

For a gradient the tile is dh, and shared memory also holds pre, the input of f: dpre = dh f'(pre), h = f(pre). With
s(z) = 1 / (1 + e^-z), f(x) = x s(z) and z = 2 u for gelu_tanh, the slope is s + x s (1 - s) z'. Neither s nor 1 - s is
computed as a difference. The slope of gelu is gelu(x) / x + x e^(-x^2 / 2) / sqrt(2 pi).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.versions import reinterpret
from csrc_free_ops.tiles.hopper.warpgroup import exp2, reciprocal, shared_base

LOG2E = gl.constexpr(1.4426950408889634)


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
        # The constants are 2 sqrt(2/pi) log2(e), and 0.044715 times as much.
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
            # s is 0 or 1 beyond |x| = 64. Without the bound, infinity times 0 would be NaN.
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
def _store_columns(smem, FIRST: gl.constexpr, row, n, pointers, total, options):
    """Store f of a tile with four warps, 32 rows at a time: as many as the warps hold at once."""
    WIDTH: gl.constexpr = options.WIDTH
    EPILOGUE: gl.constexpr = options.EPILOGUE
    KEEPS_PRE: gl.constexpr = options.KEEPS_PRE
    STRIDE_OUT: gl.constexpr = options.STRIDE_OUT
    HALVES: gl.constexpr = options.HALVES
    HALF: gl.constexpr = options.COLUMNS // HALVES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    out_ptr, _, _, pre_ptr, _, _ = pointers
    width = gl.minimum(WIDTH - n * HALF, HALF)
    pieces = reinterpret(smem, smem.dtype, [smem.shape[0] * 2, 32, 64], smem.type.layout)
    for subtile in range((width + 63) // 64):
        column = subtile * 64 + cols
        valid = column < width
        # Rows of out that are longer than WIDTH are padded with zeros.
        stored = column < gl.minimum(STRIDE_OUT - n * HALF, HALF)
        for index in gl.static_range(2):
            first = row + index * 32
            inside = (rows < total - first)[:, None] & valid[None, :]
            half = pieces.index((FIRST + subtile) * 2 + index).load(LAYOUT)  # [32, 64]
            pre_at = pre_ptr + first.to(gl.int64) * (WIDTH * HALVES) + n * HALF
            pre_at = pre_at + (rows * (WIDTH * HALVES))[:, None] + column[None, :]
            if EPILOGUE == "swiglu":
                up = pieces.index((FIRST + HALF // 64 + subtile) * 2 + index).load(LAYOUT)  # [32, 64]
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
def _store_gradients(smem, FIRST: gl.constexpr, PRE: gl.constexpr, row, n, pointers, total, options):
    """Store dpre and h with four warps; with COLUMN_SUMS also four sums of dpre over every 64 rows, before rounding.

    dpre and h are stored from registers: a TMA store would pass through shared memory twice more, and the products need
    its bandwidth.
    """
    COLUMNS: gl.constexpr = options.COLUMNS
    WIDTH: gl.constexpr = options.WIDTH
    ACTIVATION: gl.constexpr = options.ACTIVATION
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    dpre_ptr, h_ptr, column_sums_ptr, _, _, _ = pointers
    width = gl.minimum(WIDTH - n * COLUMNS, COLUMNS)
    pieces = reinterpret(smem, smem.dtype, [smem.shape[0] * 2, 32, 64], smem.type.layout)
    for subtile in range((width + 63) // 64):
        column = subtile * 64 + cols
        column_acc = gl.zeros([32, 64], gl.float32, LAYOUT)
        for index in gl.static_range(2):
            first = row + index * 32
            pre = pieces.index((PRE + subtile) * 2 + index).load(LAYOUT)  # [32, 64]
            h, slope = _activate_with_slope(pre.to(gl.float32), ACTIVATION)
            dpre = pieces.index((FIRST + subtile) * 2 + index).load(LAYOUT).to(gl.float32) * slope
            column_acc = column_acc + dpre
            at = first.to(gl.int64) * WIDTH + n * COLUMNS + (rows * WIDTH)[:, None] + column[None, :]
            inside = (rows < total - first)[:, None] & (column < width)[None, :]
            gl.store(dpre_ptr + at, dpre.to(smem.dtype), mask=inside)
            gl.store(h_ptr + at, h.to(smem.dtype), mask=inside)
        if options.COLUMN_SUMS:
            # Each warp keeps its own sums: one sum over all four would make the warps wait for each other.
            warp_acc = gl.sum(gl.sum(column_acc.reshape([2, 4, 4, 64]), 0), 1)  # [4, 64]
            warps = row // 64 * 4 + gl.arange(0, 4, gl.SliceLayout(1, warp_acc.type.layout))
            local = subtile * 64 + gl.arange(0, 64, gl.SliceLayout(0, warp_acc.type.layout))
            at = (warps.to(gl.int64) * WIDTH)[:, None] + (n * COLUMNS + local)[None, :]
            gl.store(column_sums_ptr + at, warp_acc, mask=(row < total) & (local < width)[None, :])


@gluon.jit
def _read_four(address, DTYPE: gl.constexpr):
    """Load four neighbouring values of a half type for every four addresses, from the first of them, in fp32."""
    TEXT: gl.constexpr = "ld.shared.v2.b32 {$0, $1}, [$2];"
    if DTYPE == gl.float16:
        x = gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r,r", [address], dtype=gl.float16, is_pure=False, pack=4)
    else:
        x = gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r,r", [address], dtype=gl.bfloat16, is_pure=False, pack=4)
    return x.to(gl.float32)


@gluon.jit
def _shared_at(column, row):
    """The offset in bytes of a column of a row, in sub-tiles of 64 columns that are swizzled over 128 bytes."""
    byte = column % 64 * 2
    return column // 64 * (64 * 128) + row * 128 + (((byte >> 4) ^ (row % 8)) << 4) + byte % 16


@gluon.jit
def _load_angles(pointers, row, local, columns, wanted, options):
    """cos and sin of four columns of each row, for both halves of a head."""
    STRIDE_COS: gl.constexpr = options.STRIDE_COS
    STRIDE_SIN: gl.constexpr = options.STRIDE_SIN
    HALF: gl.constexpr = options.HEAD_DIM // 2
    _, _, _, _, cos_ptr, sin_ptr = pointers
    begin = row.to(gl.int64)
    cos_at = cos_ptr + begin * STRIDE_COS + (local * STRIDE_COS)[:, :, None] + columns
    sin_at = sin_ptr + begin * STRIDE_SIN + (local * STRIDE_SIN)[:, :, None] + columns
    # [2 warps, 32, 4] each
    angles = (gl.load(cos_at, mask=wanted, other=0.0), gl.load(sin_at, mask=wanted, other=0.0))
    if options.SHARED_ANGLES:
        angles = angles + angles
    else:
        second = (gl.load(cos_at + HALF, mask=wanted, other=0.0), gl.load(sin_at + HALF, mask=wanted, other=0.0))
        angles = angles + second
    return angles


@gluon.jit
def _store_rotated(FIRST: gl.constexpr, row, n, pointers, total, DTYPE: gl.constexpr, options):
    """Rotate a tile's heads and store q, k and v.

    The columns of a pair are half a head apart, which is no multiple of a sub-tile, so lanes read them by address: four
    pairs at a time. FOURS lanes share a row, and a warp goes over the heads with the same angles. The angles come from
    global memory; those of the next rows are loaded before these rows are rotated.
    """
    HEAD_DIM: gl.constexpr = options.HEAD_DIM
    NUM_HEADS: gl.constexpr = options.NUM_HEADS
    NUM_K_HEADS: gl.constexpr = options.NUM_K_HEADS
    HEADS: gl.constexpr = options.COLUMNS // HEAD_DIM
    HALF: gl.constexpr = HEAD_DIM // 2
    FOURS: gl.constexpr = HEAD_DIM // 8
    ROWS: gl.constexpr = 32 // FOURS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    # A lane has two rows; with more, registers would not hold the angles of these rows and of the next.
    HEIGHT: gl.constexpr = 2 * gl.num_warps()
    PIECES: gl.constexpr = (64 + ROWS * HEIGHT - 1) // (ROWS * HEIGHT)
    q_ptr, k_ptr, v_ptr, _, _, _ = pointers
    tile_at = shared_base() + FIRST * (64 * 128)
    lane = gl.arange(0, 32, gl.SliceLayout(0, COLUMN))[None, :]
    rows = gl.arange(0, HEIGHT, gl.SliceLayout(1, COLUMN))[:, None] * ROWS + lane // FOURS
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    fours = lane % FOURS * 4
    columns = fours[:, :, None] + four
    spread = gl.zeros([HEIGHT, 32, 4], gl.int32, LAYOUT)
    left = gl.minimum(total - row, 64)
    # Lanes beyond whole rows have no row.
    rows = gl.where(lane < FOURS * ROWS, rows, 64)
    rotates = n * HEADS < NUM_HEADS + NUM_K_HEADS
    angles = _load_angles(pointers, row, rows, columns, (rotates & (rows < left))[:, :, None], options)
    for piece in range(PIECES):
        local = piece * (HEIGHT * ROWS) + rows
        cos, sin, cos_b, sin_b = angles
        ahead = local + HEIGHT * ROWS
        angles = _load_angles(pointers, row, ahead, columns, (rotates & (ahead < left))[:, :, None], options)
        inside = (local < left)[:, :, None]
        within = gl.minimum(local, 63)
        for index in gl.static_range(HEADS):
            head = n * HEADS + index
            in_q = head < NUM_HEADS
            in_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_K_HEADS)
            column = index * HEAD_DIM + fours
            a = _read_four(spread + (tile_at + _shared_at(column, within))[:, :, None], DTYPE)  # [HEIGHT, 32, 4]
            b = _read_four(spread + (tile_at + _shared_at(column + HALF, within))[:, :, None], DTYPE)
            if in_q | in_k:
                first = a * cos.to(gl.float32) - b * sin.to(gl.float32)
                second = b * cos_b.to(gl.float32) + a * sin_b.to(gl.float32)
            else:
                first, second = a, b
            local_head = gl.where(in_q, head, (head - NUM_HEADS) % NUM_K_HEADS)
            width = gl.where(in_q, NUM_HEADS, NUM_K_HEADS) * HEAD_DIM
            begin = gl.where(in_q, q_ptr, gl.where(in_k, k_ptr, v_ptr))
            begin = begin + row.to(gl.int64) * width + local_head * HEAD_DIM
            at = begin + (local * width)[:, :, None] + columns
            exists = inside & (head < NUM_HEADS + 2 * NUM_K_HEADS)
            gl.store(at, first.to(DTYPE), mask=exists)
            gl.store(at + HALF, second.to(DTYPE), mask=exists)


@gluon.jit
def store_epilogue(smem, FIRST: gl.constexpr, PRE: gl.constexpr, row, n, pointers, total, options):
    """Apply f to the 64 rows from `row` on, which begin at sub-tile FIRST, and store out.

    For a gradient, pre begins at sub-tile PRE. All warps of the calling partition take part.
    """
    if options.EPILOGUE == "rotary":
        _store_rotated(FIRST, row, n, pointers, total, smem.dtype, options)
    elif options.GRADIENT:
        _store_gradients(smem, FIRST, PRE, row, n, pointers, total, options)
    else:
        _store_columns(smem, FIRST, row, n, pointers, total, options)
