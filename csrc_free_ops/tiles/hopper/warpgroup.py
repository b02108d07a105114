"""Pieces of Hopper kernels in Gluon: products of exact width, barriers between partitions, row reductions in registers.

A warpgroup's tile [64, N] lies in registers as wgmma leaves it: thread t of a warp holds, of rows t / 4 and t / 4 + 8,
columns 8 j + 2 (t % 4) and the next for every j. Cut into tensors of 8 columns, no value moves, and any number of them
is a tile: 9 are D = 72, where a tensor by itself must be a power of two wide.

Triton multiplies such tensors by one wgmma each. `accumulate` writes the instruction itself, over all of them at once:
72 columns for the time of 72, where 64 + 16 cost that of 90 (measured on an H200: 289 and 360 cycles for 128 keys).
It needs the address of its right operand, which Gluon does not tell; see `shared_base`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STRIP = gl.constexpr(8)
# Of the threads of one partition; Triton 3.7 renames it.
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def option(options, name):
    """Of what a kernel hands to its partitions: each name and, after it, its value."""
    plain = [getattr(each, "value", each) for each in options]
    return plain[plain.index(name) + 1]


@gluon.jit
def turn_around(counter, limit):
    """The next of 0 .. limit-1 after `counter`, and 1 where it begins anew."""
    wrapped = counter == limit - 1
    return gl.where(wrapped, 0, counter + 1), wrapped.to(gl.int32)


@gluon.constexpr_function
def wgmma_layout(columns):
    """Of a tile [64, columns] of one warpgroup."""
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
    """Waits at a named barrier until THREADS threads have come, by this or by `barrier_arrive`."""
    text: gl.constexpr = _barrier_text("sync", THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(barrier, THREADS: gl.constexpr):
    """Comes to a named barrier and goes on. An mbarrier's arrive would first make the whole warpgroup meet."""
    text: gl.constexpr = _barrier_text("arrive", THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_sync_among(barrier, threads):
    """`barrier_sync` of so many threads, a number that is not known before."""
    TEXT: gl.constexpr = "bar.sync $1, $2; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive_among(barrier, threads):
    TEXT: gl.constexpr = "bar.arrive $1, $2; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _make_text(counts):
    places = [
        f"mbarrier.init.shared::cta.b64 [$1+{8 * index}], {getattr(count, 'value', count)};"
        for index, count in enumerate(counts)
    ]
    thread = "{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x; setp.ne.u32 other, thread, 0;"
    return "\n".join([thread, "@other bra MADE;", *places, "MADE: mov.b32 $0, 0; }"])


@gluon.jit
def make_barriers(address, COUNTS: gl.constexpr):
    """Makes mbarriers of so many arrivals from shared `address` on. Between Gluon's own all threads would meet."""
    TEXT: gl.constexpr = _make_text(COUNTS)
    gl.inline_asm_elementwise(TEXT, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


# Arrivals at an mbarrier that says that TMA has brought something, which one lane announces, and a warp has stored.
TOLD = gl.constexpr(1 + 32)


@gluon.jit
def tell(address):
    """Every lane of the warp arrives at the mbarrier at shared `address`: it speaks for what it has stored itself."""
    meet()
    gl.inline_asm_elementwise(
        "mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0;",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_phase(address, phase):
    """Waits until the mbarrier at shared `address` has completed its phase of that parity.

    Before Gluon's wait Triton may make the whole warpgroup meet, and every warp waits for the slowest.
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
    """One instruction; 0 for what would be denormal."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    """One instruction, within 1 unit in the last place; of infinity 0."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def row_maximum(x):
    """[64] in the layout of x's rows: strip by strip, four chains in a thread, which need no register but their own."""
    parts = strips(x)
    most = parts[0]
    for index in gl.static_range(1, len(parts)):
        most = gl.maximum(most, parts[index])
    return gl.convert_layout(gl.max(most, 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def row_partial_sums(x):
    """[64, 8] or [64, 4]: sums that need no other thread; `gl.sum` over their columns makes them whole.

    Strip by strip, as `row_maximum`; of few columns by halves, whose chains are shorter, and registers suffice.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS > 64:
        parts = strips(x)
        total = parts[0]
        for index in gl.static_range(1, len(parts)):
            total = total + parts[index]
        return total
    else:
        for level in gl.static_range(5):
            if (COLUMNS >> level) > STRIP:
                x = gl.sum(x.reshape([ROWS, 2, COLUMNS >> (level + 1)]), 1)
        return gl.sum(x.reshape([ROWS, STRIP // 2, 2]), 2)


@gluon.jit
def per_row(x, like):
    """x, one value per row, beside `like`, whose rows lie in the same threads in another layout: [64, 1]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def strips(x):
    """The columns of x [64, N], eight by eight."""
    COLUMNS: gl.constexpr = x.shape[1]
    parts = (x,)
    for level in gl.static_range(5):
        if (COLUMNS >> level) > STRIP:
            halves = ()
            for index in gl.static_range(len(parts)):
                left, right = gl.split(parts[index].reshape([x.shape[0], 2, COLUMNS >> (level + 1)]).permute([0, 2, 1]))
                halves = halves + (left, right)
            parts = halves
    cut = ()
    for index in gl.static_range(len(parts)):
        cut = cut + (gl.convert_layout(parts[index], wgmma_layout(STRIP), assert_trivial=True),)
    return cut


@gluon.jit
def join_strips(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """COUNT strips, a power of two, from the FIRST on as one tensor [64, 8 COUNT]."""
    joined = ()
    for index in gl.static_range(COUNT):
        joined = joined + (parts[FIRST + index],)
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
    parts = ()
    for _ in gl.static_range(COUNT):
        parts = parts + (gl.zeros([64, STRIP], gl.float32, wgmma_layout(STRIP)),)
    return parts


@gluon.jit
def scale_strips(parts, factor):
    scaled = ()
    for index in gl.static_range(len(parts)):
        scaled = scaled + (parts[index] * factor,)
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
def rescale_strips(parts, factor):
    """parts times a factor for each row, [64, 1]; a warp all of whose factors are 1 passes over it."""
    TEXT: gl.constexpr = _rescale_text(len(parts))
    CONSTRAINTS: gl.constexpr = _rescale_constraints(len(parts))
    TYPES: gl.constexpr = _repeat(gl.float32, len(parts))
    factors = factor + gl.zeros([64, STRIP], gl.float32, wgmma_layout(STRIP))
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, parts + (factors,), dtype=TYPES, is_pure=False, pack=4)


@gluon.jit
def keep_strips(parts, condition):
    """parts, or 0 where the condition, of one value, does not hold: 0 times NaN would be NaN."""
    kept = ()
    for index in gl.static_range(len(parts)):
        kept = kept + (gl.where(condition, parts[index], 0.0),)
    return kept


@gluon.constexpr_function
def _narrow_text(dtype):
    return f"cvt.rn.{_type_name(dtype)}x2.f32 $0, $2, $1;"


@gluon.jit
def narrow_strips(parts, DTYPE: gl.constexpr):
    """fp32 strips rounded to a half type, two to a register: LLVM may else hold each value in one of its own."""
    TEXT: gl.constexpr = _narrow_text(DTYPE)
    narrowed = ()
    for index in gl.static_range(len(parts)):
        # Its dtype must be a plain one.
        if DTYPE == gl.float16:
            part = gl.inline_asm_elementwise(TEXT, "=r,f,f", [parts[index]], dtype=gl.float16, is_pure=True, pack=2)
        else:
            part = gl.inline_asm_elementwise(TEXT, "=r,f,f", [parts[index]], dtype=gl.bfloat16, is_pure=True, pack=2)
        narrowed = narrowed + (part,)
    return narrowed


@gluon.constexpr_function
def _widen_text(dtype):
    if dtype == gl.float16:
        return "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    return "{ .reg .b32 word; shl.b32 word, $2, 16; mov.b32 $0, word; and.b32 word, $2, 0xffff0000; mov.b32 $1, word; }"


@gluon.jit
def widen(part):
    """What `narrow_strips` made of a strip, in fp32."""
    TEXT: gl.constexpr = _widen_text(part.dtype)
    return gl.inline_asm_elementwise(TEXT, "=f,=f,r", [part], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def shared_base():
    """Where the kernel's shared memory begins. Triton places the first of its largest allocations there.

    A kernel that relies on it calls `check_base` first, on that allocation.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; add.u32 $0, $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def made_anew(x):
    """x, of 32 bits. The compiler keeps neither it nor what follows from it in registers through a loop."""
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
    """Stops the kernel unless `buffer` [rows, columns] of a half type begins at `shared_base`. Overwrites its start."""
    COLUMNS: gl.constexpr = buffer.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    buffer.slice(0, 16, 0).store(gl.full([16, COLUMNS], 1.0, buffer.dtype, LAYOUT))
    meet()
    TEXT: gl.constexpr = _check_text(buffer.dtype)
    gl.inline_asm_elementwise(TEXT, "=r,r", [shared_base()], dtype=gl.int32, is_pure=False, pack=1)
    meet()


@gluon.constexpr_function
def _accumulate_text(strip_count, steps, high, advance, dtype):
    """One wgmma per 16 rows of the right operand. Its inputs begin with the accumulators, tied to the outputs."""
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
    """Begins left @ right^T, [64, 8 STRIPS]. `wait_strips` ends it.

    Both are HEAD_DIM wide and lie in shared memory as tiles of 64 rows and COLUMNS columns.
    """
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
    sums = ",".join(f"${index}" for index in range(registers))
    lines = ["{ .reg .b64 left, right; .reg .b32 low;", "wgmma.fence.sync.aligned;"]
    # 16 columns are 32 bytes on, 16 rows of 64 columns 2048.
    advance = 128 if by_rows else 2
    for step in range(steps):
        lines += [
            f"add.s32 low, ${2 * registers}, {2 * step}; mov.b64 left, {{low, {high}}};",
            f"add.s32 low, ${2 * registers + 4}, {advance * step}; mov.b64 right, {{low, {high}}};",
            f"wgmma.mma_async.sync.aligned.m64n{8 * strip_count}k16.f32.{dtype}.{dtype}"
            f" {{{sums}}}, left, right, 1, 1, 1, 0, {int(by_rows)};",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _products_constraints(strip_count):
    registers = 4 * strip_count
    return ",".join(["=f"] * registers + [str(index) for index in range(registers)] + ["r"] * 8)


@gluon.jit
def add_products(sums, left, right, STEPS: gl.constexpr, DTYPE: gl.constexpr, BY_ROWS: gl.constexpr = False):
    """Begins sums += left @ right^T over 16 STEPS columns, at most 64. `wait_strips` ends it.

    Both lie in shared memory as tiles of 64 columns: left of 64 rows, right of 8 for every strip. BY_ROWS: right is
    transposed, and sums += left @ right over 16 STEPS rows of 64, in tiles of 64 columns.
    """
    OPERAND: gl.constexpr = right_operand(64, 64)
    HIGH: gl.constexpr = OPERAND[1]
    LOW: gl.constexpr = OPERAND[0] if BY_ROWS else 1 << 16
    TEXT: gl.constexpr = _products_text(len(sums), STEPS, HIGH, _type_name(DTYPE), BY_ROWS)
    CONSTRAINTS: gl.constexpr = _products_constraints(len(sums))
    TYPES: gl.constexpr = _repeat(gl.float32, len(sums))
    like = gl.zeros([64, STRIP], gl.int32, wgmma_layout(STRIP))
    operands = sums + (like + ((left >> 4) + (1 << 16)), like + ((right >> 4) + LOW))
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
    """The low word, without the address, and the high word of a wgmma descriptor (PTX ISA, matrix descriptor).

    For an operand of which `columns` columns of `rows` rows make one tile, swizzled over its whole width, and tiles
    follow each other in memory: between tiles, then between groups of 8 rows, in units of 16 bytes.
    """
    swizzle = {16: 3, 32: 2, 64: 1}[columns]
    return (rows * columns * 2 >> 4) << 16, (8 * columns * 2 >> 4) + (swizzle << 30)


@gluon.jit
def accumulate(sums, weights, address, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Begins sums += weights @ right: strips of fp32 and of a half type. `wait_strips` ends it.

    right, ROWS rows, lies at shared `address` as tiles of COLUMNS columns each (`right_operand`).
    """
    WORDS: gl.constexpr = right_operand(ROWS, COLUMNS)
    TEXT: gl.constexpr = _accumulate_text(
        len(sums), ROWS // 16, WORDS[1], 16 * COLUMNS * 2 // 16, _type_name(weights[0].dtype)
    )
    CONSTRAINTS: gl.constexpr = _accumulate_constraints(len(sums), ROWS // 16)
    TYPES: gl.constexpr = _repeat(gl.float32, len(sums))
    low = (address >> 4) + WORDS[0]
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, sums + weights + (low,), dtype=TYPES, is_pure=False, pack=4)


@gluon.jit
def wait_strips(sums, PENDING: gl.constexpr):
    """sums, when no more than PENDING groups of products are under way."""
    TEXT: gl.constexpr = _wait_text(PENDING)
    CONSTRAINTS: gl.constexpr = _wait_constraints(len(sums))
    TYPES: gl.constexpr = _repeat(gl.float32, len(sums))
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, sums, dtype=TYPES, is_pure=False, pack=4)


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
    """Begins left^T @ right, [64, 8 STRIPS]. `wait_strips` ends it.

    Both have 128 rows, in two areas of 64, so many bytes apart: left's of tiles of 16 columns, right's of COLUMNS.
    """
    LEFT: gl.constexpr = right_operand(64, 16)
    RIGHT: gl.constexpr = right_operand(64, COLUMNS)
    TEXT: gl.constexpr = _columns_text(STRIPS, LEFT_AREA, RIGHT_AREA, LEFT[1], RIGHT[1], COLUMNS, _type_name(DTYPE))
    CONSTRAINTS: gl.constexpr = _columns_constraints(STRIPS)
    TYPES: gl.constexpr = _repeat(gl.float32, STRIPS)
    like = gl.zeros([64, STRIP], gl.int32, wgmma_layout(STRIP))
    operands = [like + ((left >> 4) + LEFT[0]), like + ((right >> 4) + RIGHT[0])]
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=4)
