"""Pieces of Hopper kernels in Gluon: wgmma of exact width, barriers between partitions, row reductions in registers.

wgmma leaves a warpgroup's tile [64, N] in registers. Thread t of a warp holds rows t / 4 and t / 4 + 8. In each row it
holds columns 8 j + 2 (t % 4) and the next one, for every j. A strip is a tensor of 8 columns. Cutting a tile into
strips moves no value, and a tuple of any number of strips is a tile. D = 72 has 9 strips, whereas one tensor must be a
power of two wide.

Triton would issue one wgmma for each strip. `accumulate` writes a single wgmma over all strips instead. On an H200, 72
columns take 289 cycles for 128 keys, and 64 + 16 columns take 360. That instruction needs the address of its right
operand, which Gluon does not reveal; see `shared_base`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_free_ops.tiles.hopper.limits import buffer_bytes
from csrc_free_ops.tiles.hopper.versions import aggregate, meet, reinterpret

STRIP = gl.constexpr(8)


@gluon.constexpr_function
def option(options, name):
    """The value of a name in a flat tuple of names and values."""
    plain = [getattr(each, "value", each) for each in options]
    return plain[plain.index(name) + 1]


@gluon.jit
def advance_index(counter, limit):
    """(counter + 1 modulo limit, 1 where it wraps to 0 and else 0)."""
    wrapped = counter == limit - 1
    return gl.where(wrapped, 0, counter + 1), wrapped.to(gl.int32)


@aggregate
class PipelineState:
    """A stage of a pipeline of STAGES, and the parity of its mbarrier's next phase."""

    index: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, index, phase, STAGES):
        self.index = index
        self.phase = phase
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def advance(self):
        """The next stage. The parity changes when the pipeline starts again at stage 0."""
        index, wrapped = advance_index(self.index, self.STAGES)
        return PipelineState(index, self.phase ^ wrapped, self.STAGES)


@gluon.jit
def first_stage(STAGES: gl.constexpr):
    return PipelineState(gl.to_tensor(0), gl.to_tensor(0), STAGES)


@gluon.constexpr_function
def wgmma_layout(columns):
    """The layout of a tile [64, columns] of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _repeat(item, count):
    return tuple([item] * count)


@gluon.constexpr_function
def _type_name(dtype):
    return "f16" if dtype == gl.float16 else "bf16"


@gluon.constexpr_function
def _barrier_text(action, threads):
    return f"bar.{action} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def barrier_sync(barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads have arrived, here or by `barrier_arrive`."""
    text: gl.constexpr = _barrier_text("sync", THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting.

    Gluon's arrive at an mbarrier would first synchronise the whole warpgroup.
    """
    text: gl.constexpr = _barrier_text("arrive", THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_sync_among(barrier, threads):
    """`barrier_sync` for a number of threads that is known only at run time."""
    TEXT: gl.constexpr = "bar.sync $1, $2; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive_among(barrier, threads):
    """`barrier_arrive` for a number of threads that is known only at run time."""
    TEXT: gl.constexpr = "bar.arrive $1, $2; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barriers_in(buffer):
    """All of a buffer in shared memory as mbarriers, for Gluon's functions."""
    COUNT: gl.constexpr = buffer_bytes(buffer) // 8
    return reinterpret(buffer, gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.constexpr_function
def _make_text(counts):
    inits = [
        f"mbarrier.init.shared::cta.b64 [$1+{8 * index}], {getattr(count, 'value', count)};"
        for index, count in enumerate(counts)
    ]
    thread = "{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x; setp.ne.u32 other, thread, 0;"
    return "\n".join([thread, "@other bra MADE;", *inits, "MADE: mov.b32 $0, 0; }"])


@gluon.jit
def make_barriers(address, COUNTS: gl.constexpr):
    """Initialise neighbouring mbarriers from shared `address` on, each with its count of arrivals.

    Gluon's mbarrier.init would synchronise all threads after each one.
    """
    TEXT: gl.constexpr = _make_text(COUNTS)
    gl.inline_asm_elementwise(TEXT, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


# Arrivals at an mbarrier that waits for a TMA load and for the stores of one warp: one lane expects the load's bytes,
# and every lane arrives for its own stores (`publish`).
PUBLISHED = gl.constexpr(1 + 32)


@gluon.jit
def publish(address):
    """Let every lane of the warp arrive at the mbarrier at shared `address`, which releases the lane's own stores."""
    meet()
    gl.inline_asm_elementwise(
        "mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0;",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_phase(address, phase):
    """Wait until the mbarrier at shared `address` has completed its phase of that parity.

    Triton may synchronise the whole warpgroup before Gluon's wait, and every warp would then wait for the slowest.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; @!done bra AGAIN;
        mov.b32 $0, 0;
        }""",
        "=r,r,r", [address, phase], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def exp2(x):
    """2^x in one instruction; denormal results are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction, within 1 unit in the last place; 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def row_maximum(x):
    """The maximum of each row [64], in the layout of x's rows.

    Strip by strip: each thread has four chains, which need no registers beyond their own results.
    """
    tile = strips(x)  # [64, 8] each
    peak = tile[0]
    for index in gl.static_range(1, len(tile)):
        peak = gl.maximum(peak, tile[index])
    return gl.convert_layout(gl.max(peak, 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def row_partial_sums(x):
    """Sums within each thread, [64, 8] or [64, 4]; `gl.sum` over their columns completes them.

    Strip by strip like `row_maximum`. Up to 64 columns are halved instead, because registers suffice for the shorter
    chains.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS > 64:
        tile = strips(x)  # [64, 8] each
        total = tile[0]
        for index in gl.static_range(1, len(tile)):
            total = total + tile[index]
        return total
    else:
        for level in gl.static_range(5):
            if (COLUMNS >> level) > STRIP:
                x = gl.sum(x.reshape([ROWS, 2, COLUMNS >> (level + 1)]), 1)
        return gl.sum(x.reshape([ROWS, STRIP // 2, 2]), 2)


@gluon.jit
def per_row(x, like):
    """x [64] as [64, 1] in the layout of `like`, whose rows lie in the same threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def strips(x):
    """x [64, N] as N / 8 strips [64, 8]."""
    COLUMNS: gl.constexpr = x.shape[1]
    blocks = (x,)
    for level in gl.static_range(5):
        if (COLUMNS >> level) > STRIP:
            halves = ()
            for index in gl.static_range(len(blocks)):
                pair = blocks[index].reshape([x.shape[0], 2, COLUMNS >> (level + 1)]).permute([0, 2, 1])
                left, right = gl.split(pair)
                halves = halves + (left, right)
            blocks = halves
    tile = ()
    for index in gl.static_range(len(blocks)):
        tile = tile + (gl.convert_layout(blocks[index], wgmma_layout(STRIP), assert_trivial=True),)
    return tile


@gluon.jit
def join_strips(tile, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """COUNT strips from strip FIRST on as one tensor [64, 8 COUNT]."""
    gl.static_assert(COUNT & (COUNT - 1) == 0, "a tensor is a power of two wide, so it joins a power of two of strips")
    joined = ()
    for index in gl.static_range(COUNT):
        joined = joined + (tile[FIRST + index],)
    for _ in gl.static_range(5):
        if len(joined) > 1:
            pairs = ()
            for index in gl.static_range(0, len(joined), 2):
                pair = gl.join(joined[index], joined[index + 1]).permute([0, 2, 1])
                pairs = pairs + (pair.reshape([pair.shape[0], 2 * pair.shape[2]]),)
            joined = pairs
    return gl.convert_layout(joined[0], wgmma_layout(STRIP * COUNT), assert_trivial=True)


@gluon.jit
def zero_strips(COUNT: gl.constexpr):
    """COUNT strips of zeros in fp32."""
    tile = ()
    for _ in gl.static_range(COUNT):
        tile = tile + (gl.zeros([64, STRIP], gl.float32, wgmma_layout(STRIP)),)
    return tile


@gluon.jit
def scale_strips(tile, factor):
    """tile times one factor, or times a factor for each row [64, 1]."""
    scaled = ()
    for index in gl.static_range(len(tile)):
        scaled = scaled + (tile[index] * factor,)
    return scaled


@gluon.constexpr_function
def _rescale_text(strip_count):
    registers = 4 * strip_count
    low, high = 2 * registers, 2 * registers + 2
    lines = [
        "{ .reg .pred any;",
        f"setp.neu.f32 any, ${low}, 0f3F800000; setp.neu.or.f32 any, ${high}, 0f3F800000, any;",
        "vote.sync.any.pred any, any, 0xffffffff; @!any bra SKIP;",
    ]
    for index in range(registers):
        lines.append(f"mul.rn.f32 ${index}, ${index}, ${high if index % 4 >= 2 else low};")
    return "\n".join([*lines, "SKIP: }"])


@gluon.constexpr_function
def _rescale_constraints(strip_count):
    registers = 4 * strip_count
    return ",".join(["=f"] * registers + [str(index) for index in range(registers)] + ["f"] * 4)


@gluon.jit
def rescale_strips(tile, factor):
    """tile times a factor for each row [64, 1]. A warp skips the products if all of its factors are 1."""
    TEXT: gl.constexpr = _rescale_text(len(tile))
    CONSTRAINTS: gl.constexpr = _rescale_constraints(len(tile))
    TYPES: gl.constexpr = _repeat(gl.float32, len(tile))
    factors = factor + gl.zeros([64, STRIP], gl.float32, wgmma_layout(STRIP))
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, tile + (factors,), dtype=TYPES, is_pure=False, pack=4)


@gluon.jit
def mask_strips(tile, condition):
    """tile, or zeros if the scalar condition is false. A product by 0 would not do, because 0 times NaN is NaN."""
    masked = ()
    for index in gl.static_range(len(tile)):
        masked = masked + (gl.where(condition, tile[index], 0.0),)
    return masked


@gluon.constexpr_function
def _select_text(relation, fill):
    number = "0fFF800000" if fill == float("-inf") else "0f00000000"
    return f"{{ .reg .pred kept; setp.{relation}.s32 kept, $2, $3; selp.f32 $0, $1, {number}, kept; }}"


@gluon.jit
def select_below(x, at, end, FILL: gl.constexpr):
    """x where `at` is below `end`, else FILL, which is 0 or -inf.

    Triton 3.9 would pack the conditions of many `gl.where` into words, which takes registers.
    """
    TEXT: gl.constexpr = _select_text("lt", FILL)
    return gl.inline_asm_elementwise(TEXT, "=f,f,r,r", [x, at, end], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def select_from(x, at, begin, FILL: gl.constexpr):
    """x where `at` is not below `begin`, else FILL, which is 0 or -inf."""
    TEXT: gl.constexpr = _select_text("ge", FILL)
    return gl.inline_asm_elementwise(TEXT, "=f,f,r,r", [x, at, begin], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _narrow_text(dtype):
    return f"cvt.rn.{_type_name(dtype)}x2.f32 $0, $2, $1;"


@gluon.jit
def narrow_strips(tile, DTYPE: gl.constexpr):
    """fp32 strips rounded to a half type, two values to a register. LLVM might else use one register for each value."""
    TEXT: gl.constexpr = _narrow_text(DTYPE)
    narrowed = ()
    for index in gl.static_range(len(tile)):
        # Two branches, because inline_asm_elementwise takes no constexpr for its dtype.
        if DTYPE == gl.float16:
            strip = gl.inline_asm_elementwise(TEXT, "=r,f,f", [tile[index]], dtype=gl.float16, is_pure=True, pack=2)
        else:
            strip = gl.inline_asm_elementwise(TEXT, "=r,f,f", [tile[index]], dtype=gl.bfloat16, is_pure=True, pack=2)
        narrowed = narrowed + (strip,)
    return narrowed


@gluon.constexpr_function
def _widen_text(dtype):
    if dtype == gl.float16:
        return "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    return "{ .reg .b32 word; shl.b32 word, $2, 16; mov.b32 $0, word; and.b32 word, $2, 0xffff0000; mov.b32 $1, word; }"


@gluon.jit
def widen(strip):
    """A strip of `narrow_strips` in fp32."""
    TEXT: gl.constexpr = _widen_text(strip.dtype)
    return gl.inline_asm_elementwise(TEXT, "=f,=f,r", [strip], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def shared_base():
    """The address at which the kernel's shared memory begins.

    Triton places the largest allocation there, or the first of several. A kernel that relies on this order calls
    `check_base` on that allocation before it reads or writes any other.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; add.u32 $0, $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def made_anew(x):
    """x, 32 bits wide, as a value that the compiler cannot hoist: registers do not hold it through a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.constexpr_function
def _check_text(dtype):
    one = "0x3C00" if dtype == gl.float16 else "0x3F80"
    return (
        "{ .reg .pred other; .reg .b16 seen; ld.shared.b16 seen, [$1]; "
        f"setp.ne.b16 other, seen, {one}; @other trap; mov.b32 $0, 0; }}"
    )


@gluon.jit
def check_base(buffer):
    """Trap unless `buffer` [rows, columns], of a half type, begins at `shared_base`. Overwrites its first 16 rows."""
    COLUMNS: gl.constexpr = buffer.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    buffer.slice(0, 16, 0).store(gl.full([16, COLUMNS], 1.0, buffer.dtype, LAYOUT))
    meet()
    TEXT: gl.constexpr = _check_text(buffer.dtype)
    gl.inline_asm_elementwise(TEXT, "=r,r", [shared_base()], dtype=gl.int32, is_pure=False, pack=1)
    meet()


@gluon.jit
def check_first_row(buffer, address):
    """Trap unless `buffer` [rows, 64] of fp32 begins at shared `address`. Overwrites its first row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    buffer.index(0).store(gl.full([64], 1.0, gl.float32, LAYOUT))
    meet()
    TEXT: gl.constexpr = (
        "{ .reg .pred other; .reg .b32 seen; ld.shared.b32 seen, [$1]; setp.ne.b32 other, seen, 0x3F800000; "
        "@other trap; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(TEXT, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)
    meet()


@gluon.constexpr_function
def _accumulate_text(strip_count, steps, high, advance, dtype):
    """One wgmma for each 16 rows of the right operand. The first inputs are the accumulators, tied to the outputs."""
    registers = 4 * strip_count
    accumulators = ",".join(f"${index}" for index in range(registers))
    low = 2 * registers + 4 * steps
    lines = ["{ .reg .b64 right; .reg .b32 low;", "wgmma.fence.sync.aligned;"]
    for step in range(steps):
        left = ",".join(f"${2 * registers + 4 * step + index}" for index in range(4))
        lines += [
            f"add.s32 low, ${low}, {step * advance};",
            f"mov.b64 right, {{low, {high}}};",
            f"wgmma.mma_async.sync.aligned.m64n{8 * strip_count}k16.f32.{dtype}.{dtype}"
            f" {{{accumulators}}}, {{{left}}}, right, 1, 1, 1, 1;",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _accumulate_constraints(strip_count, steps):
    registers = 4 * strip_count
    tied = [str(index) for index in range(registers)]
    return ",".join(["=f"] * registers + tied + ["r"] * (4 * steps + 4))


@gluon.constexpr_function
def _multiply_text(strip_count, head_dim, columns, high, dtype):
    registers = 4 * strip_count
    products = ",".join(f"${index}" for index in range(registers))
    lines = ["{ .reg .b64 left, right; .reg .b32 low; .reg .pred add;", "wgmma.fence.sync.aligned;"]
    for first in range(0, head_dim, 16):
        step = (first // columns * 64 * columns + first % columns) * 2 // 16
        lines += [
            f"add.s32 low, ${registers}, {step}; mov.b64 left, {{low, {high}}};",
            f"add.s32 low, ${registers + 4}, {step}; mov.b64 right, {{low, {high}}};",
            f"setp.ne.b32 add, {min(first, 1)}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{8 * strip_count}k16.f32.{dtype}.{dtype}"
            f" {{{products}}}, left, right, add, 1, 1, 0, 0;",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _multiply_constraints(strip_count):
    return ",".join(["=f"] * (4 * strip_count) + ["r"] * 8)


@gluon.jit
def multiply(left, right, STRIPS: gl.constexpr, HEAD_DIM: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """Issue left @ right^T, [64, 8 STRIPS]; `wait_strips` waits for it.

    Both operands are HEAD_DIM wide and lie in shared memory as tiles of 64 rows and COLUMNS columns.
    """
    gl.static_assert(HEAD_DIM % 8 == 0, "wgmma reads 16 columns at a time, padded from a multiple of 8")
    HIGH: gl.constexpr = right_operand(64, COLUMNS)[1]
    TEXT: gl.constexpr = _multiply_text(STRIPS, HEAD_DIM, COLUMNS, HIGH, _type_name(DTYPE))
    CONSTRAINTS: gl.constexpr = _multiply_constraints(STRIPS)
    TYPES: gl.constexpr = _repeat(gl.float32, STRIPS)
    like = gl.zeros([64, STRIP], gl.int32, wgmma_layout(STRIP))
    operands = [like + ((left >> 4) + (1 << 16)), like + ((right >> 4) + (1 << 16))]
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=4)


@gluon.constexpr_function
def _products_text(strip_count, steps, high, dtype, by_rows):
    registers = 4 * strip_count
    accumulators = ",".join(f"${index}" for index in range(registers))
    lines = ["{ .reg .b64 left, right; .reg .b32 low;", "wgmma.fence.sync.aligned;"]
    # In units of 16 bytes: 16 columns take 32 bytes, and 16 rows of 64 columns take 2048.
    advance = 128 if by_rows else 2
    for step in range(steps):
        lines += [
            f"add.s32 low, ${2 * registers}, {2 * step}; mov.b64 left, {{low, {high}}};",
            f"add.s32 low, ${2 * registers + 4}, {advance * step}; mov.b64 right, {{low, {high}}};",
            f"wgmma.mma_async.sync.aligned.m64n{8 * strip_count}k16.f32.{dtype}.{dtype}"
            f" {{{accumulators}}}, left, right, 1, 1, 1, 0, {int(by_rows)};",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _products_constraints(strip_count):
    registers = 4 * strip_count
    return ",".join(["=f"] * registers + [str(index) for index in range(registers)] + ["r"] * 8)


@gluon.jit
def add_products(acc, left, right, STEPS: gl.constexpr, DTYPE: gl.constexpr, BY_ROWS: gl.constexpr = False):
    """Issue acc += left @ right^T over 16 STEPS columns; `wait_strips` waits for it.

    Both operands lie in shared memory as tiles of 64 columns. left has 64 rows, right has 8 rows for every strip. With
    BY_ROWS right is not transposed: acc += left @ right over 16 STEPS rows of right.
    """
    gl.static_assert(STEPS <= 4, "a tile of an operand has 64 columns, which are four steps of 16")
    OPERAND: gl.constexpr = right_operand(64, 64)
    HIGH: gl.constexpr = OPERAND[1]
    LOW: gl.constexpr = OPERAND[0] if BY_ROWS else 1 << 16
    TEXT: gl.constexpr = _products_text(len(acc), STEPS, HIGH, _type_name(DTYPE), BY_ROWS)
    CONSTRAINTS: gl.constexpr = _products_constraints(len(acc))
    TYPES: gl.constexpr = _repeat(gl.float32, len(acc))
    like = gl.zeros([64, STRIP], gl.int32, wgmma_layout(STRIP))
    operands = acc + (like + ((left >> 4) + (1 << 16)), like + ((right >> 4) + LOW))
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=4)


@gluon.constexpr_function
def _wait_text(pending):
    return f"wgmma.wait_group.sync.aligned {pending};"


@gluon.constexpr_function
def _wait_constraints(strip_count):
    registers = 4 * strip_count
    return ",".join(["=f"] * registers + [str(index) for index in range(registers)])


@gluon.constexpr_function
def right_operand(rows, columns):
    """(low word without the address, high word) of a wgmma matrix descriptor, as the PTX ISA defines it.

    Tiles of `rows` rows and `columns` columns follow each other in memory; each is swizzled over its whole width. The
    low word holds the distance between tiles. The high word holds the distance between groups of 8 rows. Both are in
    units of 16 bytes.
    """
    swizzle = {16: 3, 32: 2, 64: 1}[columns]
    return (rows * columns * 2 >> 4) << 16, (8 * columns * 2 >> 4) + (swizzle << 30)


@gluon.jit
def accumulate(acc, weights, address, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Issue acc += weights @ right; `wait_strips` waits for it. acc is fp32 strips, weights strips of a half type.

    right has ROWS rows and lies at shared `address` as tiles of COLUMNS columns (`right_operand`).
    """
    gl.static_assert(ROWS % 16 == 0, "wgmma reads 16 rows of the right operand at a time")
    WORDS: gl.constexpr = right_operand(ROWS, COLUMNS)
    TEXT: gl.constexpr = _accumulate_text(
        len(acc), ROWS // 16, WORDS[1], 16 * COLUMNS * 2 // 16, _type_name(weights[0].dtype)
    )
    CONSTRAINTS: gl.constexpr = _accumulate_constraints(len(acc), ROWS // 16)
    TYPES: gl.constexpr = _repeat(gl.float32, len(acc))
    low = (address >> 4) + WORDS[0]
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, acc + weights + (low,), dtype=TYPES, is_pure=False, pack=4)


@gluon.jit
def wait_strips(acc, PENDING: gl.constexpr):
    """acc, once no more than PENDING groups of products are still in flight."""
    TEXT: gl.constexpr = _wait_text(PENDING)
    CONSTRAINTS: gl.constexpr = _wait_constraints(len(acc))
    TYPES: gl.constexpr = _repeat(gl.float32, len(acc))
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, acc, dtype=TYPES, is_pure=False, pack=4)


@gluon.constexpr_function
def _columns_text(strip_count, left_area, right_area, left_high, right_high, columns, dtype):
    registers = 4 * strip_count
    products = ",".join(f"${index}" for index in range(registers))
    lines = ["{ .reg .b64 left, right; .reg .b32 low; .reg .pred add;", "wgmma.fence.sync.aligned;"]
    for area in range(2):
        for step in range(4):
            lines += [
                f"add.s32 low, ${registers}, {(area * left_area + step * 512) // 16};",
                f"mov.b64 left, {{low, {left_high}}};",
                f"add.s32 low, ${registers + 4}, {(area * right_area + step * 32 * columns) // 16};",
                f"mov.b64 right, {{low, {right_high}}};",
                f"setp.ne.b32 add, {min(area + step, 1)}, 0;",
                f"wgmma.mma_async.sync.aligned.m64n{8 * strip_count}k16.f32.{dtype}.{dtype}"
                f" {{{products}}}, left, right, add, 1, 1, 1, 1;",
            ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _columns_constraints(strip_count):
    return ",".join(["=f"] * (4 * strip_count) + ["r"] * 8)


@gluon.jit
def multiply_columns(
    left, right, STRIPS: gl.constexpr, LEFT_AREA: gl.constexpr, RIGHT_AREA: gl.constexpr, COLUMNS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Issue left^T @ right, [64, 8 STRIPS]; `wait_strips` waits for it.

    Both operands have 128 rows in two areas of 64 rows, LEFT_AREA and RIGHT_AREA bytes apart. left has tiles of 16
    columns, right has tiles of COLUMNS.
    """
    LEFT: gl.constexpr = right_operand(64, 16)
    RIGHT: gl.constexpr = right_operand(64, COLUMNS)
    TEXT: gl.constexpr = _columns_text(STRIPS, LEFT_AREA, RIGHT_AREA, LEFT[1], RIGHT[1], COLUMNS, _type_name(DTYPE))
    CONSTRAINTS: gl.constexpr = _columns_constraints(STRIPS)
    TYPES: gl.constexpr = _repeat(gl.float32, STRIPS)
    like = gl.zeros([64, STRIP], gl.int32, wgmma_layout(STRIP))
    operands = [like + ((left >> 4) + LEFT[0]), like + ((right >> 4) + RIGHT[0])]
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=4)
