"""Products on Hopper, in Gluon: out = f(x weight^T + bias), or a gradient (x weight) f'(pre), by warp specialization.

A program has one producer warp, which brings tiles of x and of weight [COLUMNS, 64] by TMA to a ring of STAGES stages;
GROUPS consumer warpgroups, two or three, of 64 rows each, which multiply them by one wgmma of exact width; and four
warps, of a rotation two, that finish a tile while the consumers are at the next: f, and out (`hopper_finish`). Of a
gradient they also bring what f was of. Tiles are dealt out in order of rows, so that programs side by side share rows
of x and, over all of them, weight stays in the L2 cache.

    consumer    acc = sum over k of x_k weight_k^T      in fp32
                half = round(acc + bias)                to shared memory
    finisher    out = round(f(half))                    the roundings of a linear layer and of f behind it

On an H200 f hides behind the products: 25088 x 4304 by 1152 take 393 us with GELU, and cuBLAS 430 without. A gradient,
which reads and writes three times as much, does not quite: 522 us, 430 of the bare product, 714 with a kernel behind.
Whose tile is the last of its program finishes it by itself, since nothing is left to hide behind.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from csrc_free_ops.gemm.hopper.epilogue import finish_rows, halves_of, is_gradient, parts_of
from csrc_free_ops.tiles.hopper.memory import admit_kernel, await_kernel
from csrc_free_ops.tiles.hopper.warpgroup import (
    add_products,
    await_phase,
    barrier_arrive,
    barrier_sync,
    check_base,
    join_strips,
    make_barriers,
    meet,
    narrow_strips,
    option,
    shared_base,
    turn_around,
    wait_strips,
    wgmma_layout,
    zero_strips,
)

# The first named barrier that is not Triton's, with five partitions.
FIRST_BARRIER = gl.constexpr(6)
# Tiles lie in shared memory in units of 64 rows and 64 columns.
UNIT_BYTES = gl.constexpr(64 * 64 * 2)
# Threads at a tile's barrier, AT_TILE, are a consumer's and the finishers'; at a stage's, the producer's and all
# consumers'.


@gluon.jit
def _dealt(work, tall, TILES_N: gl.constexpr):
    """The tile of a program at `work`.

    Rounds of short tiles alone are dealt out from the other end: who had a short one where others had a whole one comes
    first.
    """
    turned = work - gl.program_id(0) >= tall * TILES_N
    return gl.where(turned, work + gl.num_programs(0) - 1 - 2 * gl.program_id(0), work)


@gluon.jit
def _end(tall, num_tiles, TILES_N: gl.constexpr):
    """Where the work of this program ends: of a last round that is not full only some programs have a tile."""
    full = num_tiles // gl.num_programs(0) * gl.num_programs(0)
    return full + gl.where(_dealt(full + gl.program_id(0), tall, TILES_N) < num_tiles, gl.num_programs(0), 0)


@gluon.jit
def _place(work, tall, GROUPS: gl.constexpr, TILES_N: gl.constexpr):
    """Of a program's tile, its first row, which columns it has, and whether it has rows for all consumers."""
    work = _dealt(work, tall, TILES_N)
    tile = work // TILES_N
    row = gl.minimum(tile, tall) * (64 * GROUPS) + gl.maximum(tile - tall, 0) * (64 * GROUPS - 64)
    return row, work % TILES_N, tile < tall


@gluon.jit
def _produce(descs, units, bars, tall, end, OPTIONS: gl.constexpr):
    COLUMNS: gl.constexpr = option(OPTIONS, "COLUMNS")
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    TILES_N: gl.constexpr = option(OPTIONS, "TILES_N")
    STEPS: gl.constexpr = option(OPTIONS, "STEPS")
    PARTNER: gl.constexpr = option(OPTIONS, "PARTNER")
    HALVES: gl.constexpr = halves_of(option(OPTIONS, "EPILOGUE"))
    BY_ROWS: gl.constexpr = is_gradient(option(OPTIONS, "EPILOGUE"))
    PARTS: gl.constexpr = parts_of(COLUMNS)
    WHOLE: gl.constexpr = COLUMNS // HALVES // 64
    x_desc, w_desc, other_desc = descs
    TAIL: gl.constexpr = other_desc.block_shape[0] if COLUMNS % 64 else 0
    BYTES: gl.constexpr = (GROUPS * 64 + HALVES * WHOLE * 64 + TAIL) * 128

    admit_kernel()
    await_kernel()
    stage = 0
    loaded = 0
    for work in range(gl.program_id(0), end, gl.num_programs(0)):
        row, n, whole = _place(work, tall, GROUPS, TILES_N)
        for step in range(STEPS):
            if loaded >= STAGES:
                barrier_sync(FIRST_BARRIER + stage, 32 + 128 * GROUPS)
            bar = bars.index(stage)
            mbarrier.expect(bar, BYTES, pred=whole)
            mbarrier.expect(bar, BYTES - UNIT_BYTES, pred=whole == 0)
            first = stage * (GROUPS + PARTS)
            for group in gl.static_range(GROUPS):
                wanted = whole if group == GROUPS - 1 else True
                at = [row + group * 64, step * 64]
                tma.async_copy_global_to_shared(x_desc, at, bar, units.index(first + group), pred=wanted)
            for half in gl.static_range(HALVES):
                column = n * (COLUMNS // HALVES) + half * PARTNER
                place = first + GROUPS + half * WHOLE
                for unit in gl.static_range(WHOLE):
                    if BY_ROWS:
                        at = [step * 64, column + unit * 64]
                    else:
                        at = [column + unit * 64, step * 64]
                    if half == 0:
                        tma.async_copy_global_to_shared(w_desc, at, bar, units.index(place + unit))
                    else:
                        tma.async_copy_global_to_shared(other_desc, at, bar, units.index(place + unit))
                if TAIL > 0:
                    at = [column + WHOLE * 64, step * 64]
                    tma.async_copy_global_to_shared(other_desc, at, bar, units.index(place + WHOLE).slice(0, TAIL, 0))
            loaded += 1
            stage, _ = turn_around(stage, STAGES)
    # What consumers arrived at must be left as it was found.
    for index in gl.static_range(STAGES):
        if index < loaded:
            barrier_sync(FIRST_BARRIER + index, 32 + 128 * GROUPS)


@gluon.jit
def _load_bias(biases, n, OPTIONS: gl.constexpr):
    """Of this tile's columns, one number for each, strip by strip."""
    COLUMNS: gl.constexpr = option(OPTIONS, "COLUMNS")
    WIDTH: gl.constexpr = option(OPTIONS, "WIDTH")
    PARTNER: gl.constexpr = option(OPTIONS, "PARTNER")
    HALVES: gl.constexpr = halves_of(option(OPTIONS, "EPILOGUE"))
    HALF: gl.constexpr = COLUMNS // HALVES
    # One address and one limit for all strips, which differ from them by numbers that stand in the instructions. Of an
    # even width a thread's two columns have one limit, and are one load.
    lane = gl.arange(0, 8, gl.SliceLayout(0, wgmma_layout(8)))
    limit = WIDTH - n * HALF - (lane // 2 * 2 if WIDTH % 2 == 0 else lane)
    starts = (biases[0] + n * HALF + lane, biases[1] + n * HALF + lane)
    bias = ()
    for strip in gl.static_range(COLUMNS // 8):
        at = starts[strip * 8 // HALF] + (strip * 8 // HALF * PARTNER + strip * 8 % HALF)
        value = gl.load(at, mask=limit > strip * 8 % HALF, other=0.0)
        bias = bias + (value,)
    return bias


@gluon.jit
def _make_tile(
    INDEX: gl.constexpr, units, pointers, biases, row, n, total, turn, is_last, stage, phase, OPTIONS: gl.constexpr
):  # fmt: skip
    """A consumer's part of a tile: the products, to shared memory, and of the program's last tile what follows them."""
    COLUMNS: gl.constexpr = option(OPTIONS, "COLUMNS")
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    STEPS: gl.constexpr = option(OPTIONS, "STEPS")
    BY_ROWS: gl.constexpr = is_gradient(option(OPTIONS, "EPILOGUE"))
    HAS_BIAS: gl.constexpr = option(OPTIONS, "HAS_BIAS")
    PARTS: gl.constexpr = parts_of(COLUMNS)
    STRIPS: gl.constexpr = COLUMNS // 8
    STAGE_BYTES: gl.constexpr = (GROUPS + PARTS) * UNIT_BYTES
    DTYPE: gl.constexpr = units.dtype
    OWN: gl.constexpr = option(OPTIONS, "RING") + INDEX * PARTS
    TILE_FULL: gl.constexpr = FIRST_BARRIER + STAGES + INDEX
    TILE_EMPTY: gl.constexpr = TILE_FULL + GROUPS
    AT_TILE: gl.constexpr = 128 + 32 * option(OPTIONS, "FINISHERS")

    base = shared_base()
    bars_at = base + option(OPTIONS, "PLACES") * UNIT_BYTES
    sums = zero_strips(STRIPS)
    behind = 0
    for step in range(STEPS):
        await_phase(bars_at + stage * 8, phase)
        at = base + stage * STAGE_BYTES
        sums = add_products(sums, at + INDEX * UNIT_BYTES, at + GROUPS * UNIT_BYTES, 4, DTYPE, BY_ROWS)
        sums = wait_strips(sums, 1)
        if step > 0:
            barrier_arrive(FIRST_BARRIER + behind, 32 + 128 * GROUPS)
        behind = stage
        stage, wrapped = turn_around(stage, STAGES)
        phase = phase ^ wrapped
    if HAS_BIAS:
        bias = _load_bias(biases, n, OPTIONS)
    sums = wait_strips(sums, 0)
    barrier_arrive(FIRST_BARRIER + behind, 32 + 128 * GROUPS)
    if HAS_BIAS:
        shifted = ()
        for strip in gl.static_range(STRIPS):
            shifted = shifted + (sums[strip] + bias[strip].to(gl.float32)[None, :],)
        halves = narrow_strips(shifted, DTYPE)
    else:
        halves = narrow_strips(sums, DTYPE)
    if turn > 0:
        barrier_sync(TILE_EMPTY, AT_TILE)
    for part in gl.static_range(PARTS):
        # Of a last part that is not full, the first strip stands in for those that are not there.
        strips = ()
        for strip in gl.static_range(part * 8, part * 8 + 8):
            strips = strips + (halves[strip if strip < STRIPS else 0],)
        units.index(OWN + part).store(join_strips(strips, 0, 8))
    if is_last:
        meet()
        if BY_ROWS:
            await_phase(bars_at + (STAGES + INDEX) * 8, turn & 1)
        finish_rows(units, OWN, OWN + GROUPS * PARTS, row + INDEX * 64, n, pointers, total, OPTIONS)
    else:
        barrier_arrive(TILE_FULL, AT_TILE)
    return stage, phase


@gluon.jit
def _pass_tile(stage, phase, OPTIONS: gl.constexpr):
    """Of a tile that has no rows for this consumer: what is loaded for the others is let go of by all."""
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    bars_at = shared_base() + option(OPTIONS, "PLACES") * UNIT_BYTES
    for _ in range(option(OPTIONS, "STEPS")):
        await_phase(bars_at + stage * 8, phase)
        barrier_arrive(FIRST_BARRIER + stage, 32 + 128 * GROUPS)
        stage, wrapped = turn_around(stage, STAGES)
        phase = phase ^ wrapped
    return stage, phase


@gluon.jit
def _consume(INDEX: gl.constexpr, units, pointers, biases, total, tall, end, OPTIONS: gl.constexpr):
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    TILES_N: gl.constexpr = option(OPTIONS, "TILES_N")
    AT_TILE: gl.constexpr = 128 + 32 * option(OPTIONS, "FINISHERS")
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), end, gl.num_programs(0)):
        row, n, whole = _place(work, tall, GROUPS, TILES_N)
        turn = work // gl.num_programs(0)
        is_last = work + gl.num_programs(0) >= end
        if INDEX < GROUPS - 1:
            stage, phase = _make_tile(
                INDEX, units, pointers, biases, row, n, total, turn, is_last, stage, phase, OPTIONS
            )  # fmt: skip
        else:
            if whole:
                stage, phase = _make_tile(
                    INDEX, units, pointers, biases, row, n, total, turn, is_last, stage, phase, OPTIONS
                )  # fmt: skip
            else:
                stage, phase = _pass_tile(stage, phase, OPTIONS)
                # None of its tiles comes after a short one, so that nothing else takes what the finishers arrive at;
                # they do so late, and the other consumers are not to wait.
                _, _, before = _place(work - gl.num_programs(0), tall, GROUPS, TILES_N)
                if before & (turn > 0):
                    barrier_sync(FIRST_BARRIER + option(OPTIONS, "STAGES") + GROUPS + INDEX, AT_TILE)


@gluon.jit
def _bring_pre(GROUP: gl.constexpr, desc, units, bars, row, n, wanted, OPTIONS: gl.constexpr):
    """Of a gradient, what its activation was of, of one consumer's part of a tile."""
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    COLUMNS: gl.constexpr = option(OPTIONS, "COLUMNS")
    PARTS: gl.constexpr = parts_of(COLUMNS)
    bar = bars.index(option(OPTIONS, "STAGES") + GROUP)
    mbarrier.expect(bar, PARTS * UNIT_BYTES, pred=wanted)
    for part in gl.static_range(PARTS):
        place = units.index(option(OPTIONS, "RING") + (GROUPS + GROUP) * PARTS + part)
        tma.async_copy_global_to_shared(desc, [row + GROUP * 64, n * COLUMNS + part * 64], bar, place, pred=wanted)


@gluon.jit
def _finish_part(GROUP: gl.constexpr, pre_desc, units, bars, pointers, work, total, tall, OPTIONS: gl.constexpr):
    PARTS: gl.constexpr = parts_of(option(OPTIONS, "COLUMNS"))
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    TILES_N: gl.constexpr = option(OPTIONS, "TILES_N")
    GRADIENT: gl.constexpr = is_gradient(option(OPTIONS, "EPILOGUE"))
    FIRST: gl.constexpr = option(OPTIONS, "RING") + GROUP * PARTS
    AT_TILE: gl.constexpr = 128 + 32 * option(OPTIONS, "FINISHERS")
    row, n, _ = _place(work, tall, GROUPS, TILES_N)
    barrier_sync(FIRST_BARRIER + STAGES + GROUP, AT_TILE)
    if GRADIENT:
        bars_at = shared_base() + option(OPTIONS, "PLACES") * UNIT_BYTES
        await_phase(bars_at + (STAGES + GROUP) * 8, work // gl.num_programs(0) & 1)
    finish_rows(units, FIRST, FIRST + GROUPS * PARTS, row + GROUP * 64, n, pointers, total, OPTIONS)
    if GRADIENT:
        meet()
        # There is a next tile: the last is not finished here.
        row, n, whole = _place(work + gl.num_programs(0), tall, GROUPS, TILES_N)
        _bring_pre(GROUP, pre_desc, units, bars, row, n, whole | (GROUP < GROUPS - 1), OPTIONS)
    barrier_arrive(FIRST_BARRIER + STAGES + GROUPS + GROUP, AT_TILE)


@gluon.jit
def _finish(pre_desc, units, bars, pointers, total, tall, end, OPTIONS: gl.constexpr):
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    TILES_N: gl.constexpr = option(OPTIONS, "TILES_N")
    if is_gradient(option(OPTIONS, "EPILOGUE")):
        await_kernel()
        row, n, whole = _place(gl.program_id(0), tall, GROUPS, TILES_N)
        for group in gl.static_range(GROUPS):
            wanted = (gl.program_id(0) < end) & (whole | (group < GROUPS - 1))
            _bring_pre(group, pre_desc, units, bars, row, n, wanted, OPTIONS)
    for work in range(gl.program_id(0), end - gl.num_programs(0), gl.num_programs(0)):
        _, _, whole = _place(work, tall, GROUPS, TILES_N)
        for group in gl.static_range(GROUPS):
            if group == GROUPS - 1:
                if whole:
                    _finish_part(group, pre_desc, units, bars, pointers, work, total, tall, OPTIONS)
            else:
                _finish_part(group, pre_desc, units, bars, pointers, work, total, tall, OPTIONS)


@gluon.jit(do_not_specialize=["total", "tall"])
def _gemm_hopper_kernel(
    x_desc, w_desc, other_desc, bias_ptr, up_bias_ptr, out_ptr, second_ptr, third_ptr, pre_ptr, cos_ptr, sin_ptr,
    total, tall, N: gl.constexpr, K: gl.constexpr, PARTNER: gl.constexpr,
    GROUPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    KEEPS_PRE: gl.constexpr, SUMS: gl.constexpr, STRIDE_OUT: gl.constexpr, HEAD_DIM: gl.constexpr,
    NUM_HEADS: gl.constexpr, NUM_K_HEADS: gl.constexpr, STRIDE_COS: gl.constexpr, STRIDE_SIN: gl.constexpr,
    SHARED_ANGLES: gl.constexpr, FINISHERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    FINISHER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). x [total, K], weight [N, K], bias [N].

    Of "swiglu" weight and bias hold N / 2 gates; what they gate stands PARTNER rows on in up and up_bias, which are
    tensors of their own, or the same where both are packed. other_desc is up's; of a gradient it is pre's; of
    "rotary" it counts where COLUMNS is no multiple of 64, and has tiles of what is left over.

    The first `tall` tiles of rows have GROUPS x 64, the others 64 less, and come last: programs are done at about the
    same time then.

    out [total, N] in rows of STRIDE_OUT, zeros behind; of "swiglu" N / 2 wide. Of "rotary" out, second and third are q,
    k and v [total, heads, HEAD_DIM], and COLUMNS holds whole heads. pre [total, N], contiguous, takes what f is of,
    where KEEPS_PRE.

    Of a gradient, "gelu_tanh_gradient" and its like, out = (x weight) f'(pre) and second = f(pre), both [total, N]:
    weight is [K, N], and with SUMS third takes four rows of sums of out for every 64 rows, fp32
    [4 ceil(total / 64), N].
    """
    HALVES: gl.constexpr = halves_of(EPILOGUE)
    DTYPE: gl.constexpr = x_desc.dtype
    PARTS: gl.constexpr = parts_of(COLUMNS)
    TILES_N: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    # Units of shared memory: of the stages, and with those of a finished tile, of a gradient with as many of pre.
    RING: gl.constexpr = STAGES * (GROUPS + PARTS)
    PLACES: gl.constexpr = RING + GROUPS * PARTS * (2 if is_gradient(EPILOGUE) else 1)
    OPTIONS: gl.constexpr = (
        "WIDTH", N // HALVES, "PARTNER", PARTNER, "GROUPS", GROUPS,
        "FINISHERS", FINISHERS, "COLUMNS", COLUMNS, "STAGES", STAGES, "TILES_N", TILES_N, "STEPS", (K + 63) // 64,
        "RING", RING, "PLACES", PLACES, "EPILOGUE", EPILOGUE, "HAS_BIAS", HAS_BIAS, "KEEPS_PRE", KEEPS_PRE,
        "SUMS", SUMS, "STRIDE_OUT", STRIDE_OUT,
        "HEAD_DIM", HEAD_DIM, "NUM_HEADS", NUM_HEADS, "NUM_K_HEADS", NUM_K_HEADS,
        "STRIDE_COS", STRIDE_COS, "STRIDE_SIN", STRIDE_SIN, "SHARED_ANGLES", SHARED_ANGLES,
    )  # fmt: skip
    SHORT: gl.constexpr = GROUPS * 64 - 64
    num_tiles = (tall + (gl.maximum(total - tall * (GROUPS * 64), 0) + SHORT - 1) // SHORT) * TILES_N
    end = _end(tall, num_tiles, TILES_N)
    # One allocation, so that it lies where `shared_base` says, with a unit for barriers at its end.
    units = gl.allocate_shared_memory(DTYPE, [PLACES + 1, 64, 64], x_desc.layout)
    check_base(units.index(0))
    bars = units.index(PLACES)._reinterpret(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    make_barriers(shared_base() + PLACES * UNIT_BYTES, (1,) * (STAGES + GROUPS))
    fence_async_shared()
    pointers = (out_ptr, second_ptr, third_ptr, pre_ptr, cos_ptr, sin_ptr)
    biases = (bias_ptr, up_bias_ptr)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, units, pointers, biases, total, tall, end, OPTIONS)),
                (_consume, (1, units, pointers, biases, total, tall, end, OPTIONS)),
                (_finish, (other_desc, units, bars, pointers, total, tall, end, OPTIONS)),
                (_produce, ((x_desc, w_desc, other_desc), units, bars, tall, end, OPTIONS)),
            ],
            [4, FINISHERS, 1], [CONSUMER_REGISTERS, FINISHER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, units, pointers, biases, total, tall, end, OPTIONS)),
                (_consume, (1, units, pointers, biases, total, tall, end, OPTIONS)),
                (_consume, (2, units, pointers, biases, total, tall, end, OPTIONS)),
                (_finish, (other_desc, units, bars, pointers, total, tall, end, OPTIONS)),
                (_produce, ((x_desc, w_desc, other_desc), units, bars, tall, end, OPTIONS)),
            ],
            [4, 4, FINISHERS, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, FINISHER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
