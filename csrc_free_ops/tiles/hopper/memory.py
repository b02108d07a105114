"""What Hopper kernels in Gluon read from memory and put there, and how programs and their partitions hand it over.

Strips are those of `tiles.hopper`: tensors of 8 columns, together a tile.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from csrc_free_ops.tiles.hopper.warpgroup import narrow_strips, wgmma_layout


@gluon.constexpr_function
def columns_of(desc):
    """Of the tiles that a descriptor brings."""
    return desc.block_shape[-1]


@gluon.jit
def coordinates(desc, row, head, column, batch):
    """Where a tile begins in [T, H, D], or in what a batch is described as; there `head` counts those of all sequences.

    batch is (rows of a sequence, HEADS of one, FOLDED): it is described as [S, B H, D], or FOLDED as [B S, H, D], or as
    [B, H, S, D].
    """
    length, HEADS, FOLDED = batch
    if len(desc.block_shape) == 4:
        return [head // HEADS, head % HEADS, row, column]
    elif FOLDED != 0:
        return [head // HEADS * length + row, head % HEADS, column]
    else:
        return [row, head, column]


@gluon.jit
def load_tile(desc, row, head, column, batch, bar, tile):
    """Begins to bring a tile; `bar` tells.

    In a loop that brings several, a variable of their places would have the rank of one descriptor.
    """
    tma.async_copy_global_to_shared(desc, coordinates(desc, row, head, column, batch), bar, tile)


@gluon.jit
def load_blocks(
    desc, row, head, batch, bar, tiles, first, TILES: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Begins to bring BLOCKS blocks of rows, from `row` on, to TILES tiles each, from tile `first` on; `bar` tells."""
    ROWS: gl.constexpr = desc.block_shape[0] * desc.block_shape[len(desc.block_shape) - 2]
    COLUMNS: gl.constexpr = columns_of(desc)
    for block in gl.static_range(BLOCKS):
        for tile in gl.static_range(TILES):
            target = tiles.index(first + block * TILES + tile)
            load_tile(desc, row + block * ROWS, head, tile * COLUMNS, batch, bar, target)


@gluon.jit
def read_columns(vector, COUNT: gl.constexpr):
    """Of a vector in shared memory, one number for each column of COUNT strips."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, wgmma_layout(8))
    parts = ()
    for index in gl.static_range(COUNT):
        parts = parts + (vector.slice(8 * index, 8).load(COLUMN),)
    return parts


@gluon.jit
def put_pairs(address, part):
    """A strip of a half type to the shared addresses of its elements; columns two by two."""
    TEXT: gl.constexpr = "st.shared.b32 [$2], $4; mov.b32 $0, 0; mov.b32 $1, 0;"
    gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r", [address, part], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def put_float_pairs(address, part):
    """The same of fp32."""
    TEXT: gl.constexpr = "st.shared.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;"
    gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,f,f", [address, part], dtype=gl.int32, is_pure=False, pack=2)


@gluon.constexpr_function
def _round_text(dtype):
    pair = "cvt.rn.f16x2.f32" if dtype == gl.float16 else "cvt.rn.bf16x2.f32"
    lines = [
        "{ .reg .pred inside; .reg .f32 a<8>; .reg .b32 w<4>; setp.ne.s32 inside, $4, 0;",
        "ld.shared.v4.f32 {a0, a1, a2, a3}, [$1]; ld.shared.v4.f32 {a4, a5, a6, a7}, [$1+16];",
        *[f"mul.f32 a{index}, a{index}, $3;" for index in range(8)],
        *[f"{pair} w{index}, a{2 * index + 1}, a{2 * index};" for index in range(4)],
    ]
    return "\n".join([*lines, "@inside st.global.v4.b32 [$2], {w0, w1, w2, w3}; mov.b32 $0, 0; }"])


@gluon.jit
def _round_floats(source, target, scale, inside, DTYPE: gl.constexpr):
    """Of each thread, eight times fp32 at shared `source`, times scale, to global `target` as a half type.

    Triton would store them one by one, since it does not see that places of swizzled columns follow each other.
    """
    TEXT: gl.constexpr = _round_text(DTYPE)
    operands = [source, target, scale, inside]
    gl.inline_asm_elementwise(TEXT, "=r,r,l,f,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def round_rows(
    address, target, rows, scale,
    MOST: gl.constexpr, COLUMNS: gl.constexpr, SWIZZLED: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """target = scale times the first `rows` of MOST rows of fp32 at shared `address`, rounded. By one warp.

    They are of COLUMNS columns; SWIZZLED is as in `hopper_bwd_sums`.
    """
    COUNT: gl.constexpr = COLUMNS // 8
    # Without a sign, for there are no registers to divide one.
    run = lane_of_warp()
    for _ in range(MOST * COUNT // 32):
        row = run // COUNT
        at = run % COUNT
        place = at
        if SWIZZLED:
            place = at ^ (row % 4)
        _round_floats(
            (address + run * 32).to(gl.int32), target.to(gl.int64) + (row * STRIDE + place * 8) * 2, scale,
            (row < rows).to(gl.int32), target.dtype.element_ty,
        )  # fmt: skip
        run += 32


@gluon.jit
def fetch_run(source, target, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIDE: gl.constexpr):
    """Begins to bring the first `rows` of ROWS rows of fp32 to shared `target`, dense, 16 bytes after 16. By one warp.

    Each thread may read what it has brought (`await_fetched`), which is what `round_run` does. No policy of the L2
    cache goes with it: beside one ptxas (CUDA 12.8) encodes uniform registers of addresses as no GPU takes them.
    """
    CHUNKS: gl.constexpr = COLUMNS // 4
    TEXT: gl.constexpr = """{
        .reg .pred inside;
        setp.ne.s32 inside, $3, 0;
        @inside cp.async.cg.shared.global [$1], [$2], 16;
        mov.b32 $0, 0;
        }"""
    lane = lane_of_warp()
    rows = gl.maximum(rows, 0).to(gl.uint32)
    for first in gl.static_range(0, ROWS * CHUNKS, 32):
        chunk = lane + first
        row = chunk // CHUNKS
        address = source.to(gl.int64) + (row.to(gl.int64) * STRIDE + chunk % CHUNKS * 4) * 4
        operands = [(target + chunk * 16).to(gl.int32), address, (row < rows).to(gl.int32)]
        gl.inline_asm_elementwise(TEXT, "=r,r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_fetch():
    """Of each thread: what it has begun to bring since the last one is one fetch."""
    TEXT: gl.constexpr = "cp.async.commit_group; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_fetched(PENDING: gl.constexpr):
    """Until all fetches of this thread but the last PENDING are there."""
    TEXT: gl.constexpr = _await_fetched_text(PENDING)
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _await_fetched_text(pending):
    return f"cp.async.wait_group {pending}; mov.b32 $0, $1;"


@gluon.constexpr_function
def _round_run_text(dtype, numbers):
    pair = "cvt.rn.f16x2.f32" if dtype == gl.float16 else "cvt.rn.bf16x2.f32"
    lines = ["{ .reg .pred inside; .reg .f32 a<4>; .reg .b32 w<2>;"]
    for begin in range(0, numbers, 128):
        lines += [
            f"ld.shared.v4.f32 {{a0, a1, a2, a3}}, [$1+{4 * begin}];",
            f"{pair} w0, a1, a0; {pair} w1, a3, a2;",
            f"setp.gt.s32 inside, $3, {begin};",
            f"@inside st.global.v2.b32 [$2+{2 * begin}], {{w0, w1}};",
        ]
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.jit
def round_run(address, target, limit, NUMBERS: gl.constexpr):
    """target = the first `limit` of NUMBERS numbers of fp32 at shared `address`, a multiple of 128, rounded.

    By one warp, four by four, so `limit` is a multiple of that.
    """
    TEXT: gl.constexpr = _round_run_text(target.dtype.element_ty, NUMBERS)
    lane = lane_of_warp().to(gl.int32)
    operands = [address + lane * 16, target.to(gl.int64) + lane * 8, limit - lane * 4]
    gl.inline_asm_elementwise(TEXT, "=r,r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_sums(address, source, size, position):
    """Adds `size` bytes of fp32 from shared `source` to global `address`, or writes them there at position 0.

    By one warp, which must call `sent_from` before `source` is overwritten.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred one, put, add; .reg .b32 lane;
        mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0;
        setp.eq.and.s32 put, $4, 0, one; setp.ne.and.s32 add, $4, 0, one;
        @put cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;
        @add cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$1], [$2], $3;
        @one cp.async.bulk.commit_group;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r", [address, source, size, position], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_sums(address, target, size, bar):
    """Once all that this warp sends has arrived: brings `size` bytes from global `address` to shared `target`.

    By one warp; the barrier at shared `bar` tells. All goes by the same proxy, so no fence is between.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 lane;
        mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0;
        cp.async.bulk.wait_group 0;
        @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $3;
        @one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$2], [$1], $3, [$4];
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r", [address, target, size, bar], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lane_of_warp():
    """Of each thread of one warp, as uint32. Not `gl.arange`, which would be kept in a register through loops."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    TEXT: gl.constexpr = "mov.u32 $0, %laneid;"
    lanes = gl.arange(0, 32, THREADS)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [lanes], dtype=gl.uint32, is_pure=False, pack=1)


@gluon.jit
def meet_in_warp():
    TEXT: gl.constexpr = "bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def add_tile(desc, coord, tile, _semantic=None):
    """Adds a tile in shared memory to global memory by TMA, as `tma.async_copy_shared_to_global` stores it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, tile.handle)


@gluon.jit
def sent_from():
    """Waits until all that this warp sends has been read."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sent_all():
    """Waits until all that this warp has sent has arrived."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_kernel():
    """Until the kernel before, whose end this one may overlap (`launch_pdl`), is done and what it wrote is seen."""
    TEXT: gl.constexpr = "griddepcontrol.wait; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def admit_kernel():
    """Lets the kernel behind begin, if it was launched to overlap this one (`launch_pdl`), once all programs say so."""
    TEXT: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_ticket(counter, last):
    """The number at global `counter`, which goes up by one, and from `last` back to 0. By one warp.

    Not `gl.atomic_add`: ptxas then parts the first lane from the others, which read its answer before it is there.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 lane, old;
        mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; mov.b32 old, 0;
        @one atom.relaxed.gpu.global.inc.u32 old, [$1], $2;
        shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;
        }""",
        "=r,l,r", [counter.to(gl.int64), last], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_turn(counter, turn):
    """Until the number at global `counter` is `turn`; what was sent before `pass_turn` made it so has then arrived.

    PTX asks for `fence.proxy.async` behind it as well. It is left out: nothing is sent before the look that allows it
    has its answer, and with one here and one in `pass_turn` 1024 rows took a quarter longer.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred other;
        AGAIN: ld.acquire.gpu.global.b32 $0, [$1]; setp.ne.s32 other, $0, $2; @other bra AGAIN;
        }""",
        "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_turn(counter):
    """One more at global `counter`, once all that this warp has sent has arrived.

    The wait for that makes it known to this warp alone. It is the release that makes it so for all; without it what
    another warp sends may come first.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 lane;
        mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        @one red.release.gpu.global.add.u32 [$1], 1;
        bar.warp.sync 0xffffffff; mov.b32 $0, 0;
        }""",
        "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def announce(counter):
    """One more at global `counter`, for what this warp has stored to global memory: TMA may then read it there."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 lane;
        mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        @one red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_announced(counter, number):
    """Until `number` times `announce` was called of global `counter`. TMA of this warp then reads what was stored."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred fewer;
        AGAIN: ld.acquire.gpu.global.b32 $0, [$1]; setp.lt.s32 fewer, $0, $2; @fewer bra AGAIN;
        fence.proxy.async.global;
        }""",
        "=r,l,r", [counter.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _float_rows_text(strip_count):
    """Of each strip two values in each of two rows, whose addresses and whether they are stored come last."""
    address, inside = 4 + 4 * strip_count, 4 + 4 * strip_count + 4
    lines = ["{ .reg .pred low, high;"]
    lines.append(f"setp.ne.s32 low, ${inside}, 0; setp.ne.s32 high, ${inside + 2}, 0;")
    for strip in range(strip_count):
        values = [f"${4 + 4 * strip + index}" for index in range(4)]
        lines.append(f"@low st.global.v2.f32 [${address}+{32 * strip}], {{{values[0]}, {values[1]}}};")
        lines.append(f"@high st.global.v2.f32 [${address + 2}+{32 * strip}], {{{values[2]}, {values[3]}}};")
    return "\n".join([*lines, "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"])


@gluon.constexpr_function
def _float_rows_constraints(strip_count):
    return ",".join(["=r"] * 4 + ["f"] * (4 * strip_count) + ["l"] * 4 + ["r"] * 4)


@gluon.jit
def store_float_rows(address, o, num_rows, STRIDE: gl.constexpr):
    """`store_rows` of fp32."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, o[0].type.layout))[:, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, o[0].type.layout))[None, :] + gl.zeros_like(rows)
    inside = (rows < num_rows).to(gl.int32) + gl.zeros_like(column)
    begin = address + gl.minimum(rows, num_rows).to(gl.int64) * (STRIDE * 4) + column * 4
    TEXT: gl.constexpr = _float_rows_text(len(o))
    CONSTRAINTS: gl.constexpr = _float_rows_constraints(len(o))
    gl.inline_asm_elementwise(TEXT, CONSTRAINTS, o + (begin, inside), dtype=gl.int32, is_pure=False, pack=4)


@gluon.constexpr_function
def _clear_text(tiles, tile_bytes, row_bytes):
    lines = ["{ .reg .pred clear; .reg .b32 zero; mov.b32 zero, 0; setp.ne.s32 clear, $2, 0;"]
    for tile in range(tiles):
        for begin in range(0, row_bytes, 16):
            lines.append(f"@clear st.shared.v4.b32 [$1+{tile * tile_bytes + begin}], {{zero, zero, zero, zero}};")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.jit
def clear_rows(address, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr):
    """Zeroes the rows from `first` on of an operand of TILES tiles (`accumulate`), by the threads of one warpgroup.

    What a product multiplies by 0 must be a number: what lies past a segment's end may be anything.
    """
    rows = gl.arange(0, ROWS, gl.BlockedLayout([max(ROWS // 128, 1)], [32], [4], [0]))
    TEXT: gl.constexpr = _clear_text(TILES, ROWS * COLUMNS * 2, COLUMNS * 2)
    gl.inline_asm_elementwise(
        TEXT, "=r,r,r", [address + rows * (COLUMNS * 2), (rows >= first).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def flat(tile):
    """[rows, columns] of a tile that a descriptor filled, [rows, 1, columns] or [1, 1, rows, columns]."""
    RANK: gl.constexpr = len(tile.shape)
    return tile.reshape([tile.shape[0] * tile.shape[RANK - 2], tile.shape[RANK - 1]])


@gluon.constexpr_function
def _store_text(strip_count):
    """Of 1 or 4 strips, of which the four threads of a row trade words until each has 16 bytes of one of them."""
    # The first operand of every thread's rows, four values to each of the operands that follow the strips.
    part, address, inside = (4 + 2 * strip_count + 4 * index for index in range(3))
    lines = [
        "{ .reg .pred odd, high, inside; .reg .b32 t0, t1, a0, a1, a2, a3; .reg .b64 at;",
        f"and.b32 t0, ${part}, 1; setp.ne.u32 odd, t0, 0; and.b32 t0, ${part}, 2; setp.ne.u32 high, t0, 0;",
    ]
    for half in range(2):
        words = [f"${4 + 2 * strip + half}" for strip in range(strip_count)]
        lines.append(f"setp.ne.s32 inside, ${inside + 2 * half}, 0; mov.b64 at, ${address + 2 * half};")
        if strip_count == 1:
            lines.append(f"@inside st.global.b32 [at], {words[0]};")
            continue
        lines += [
            f"mov.b32 a0, {words[0]}; mov.b32 a1, {words[1]}; mov.b32 a2, {words[2]}; mov.b32 a3, {words[3]};",
            "selp.b32 t0, a0, a1, odd; selp.b32 t1, a2, a3, odd;",
            "shfl.sync.bfly.b32 t0, t0, 1, 31, 0xffffffff; shfl.sync.bfly.b32 t1, t1, 1, 31, 0xffffffff;",
            "selp.b32 a0, t0, a0, odd; selp.b32 a1, a1, t0, odd; selp.b32 a2, t1, a2, odd; selp.b32 a3, a3, t1, odd;",
            "selp.b32 t0, a0, a2, high; selp.b32 t1, a1, a3, high;",
            "shfl.sync.bfly.b32 t0, t0, 2, 31, 0xffffffff; shfl.sync.bfly.b32 t1, t1, 2, 31, 0xffffffff;",
            "selp.b32 a0, t0, a0, high; selp.b32 a1, t1, a1, high;",
            "selp.b32 a2, a2, t0, high; selp.b32 a3, a3, t1, high;",
            "@inside st.global.v4.b32 [at], {a0, a1, a2, a3};",
        ]
    return "\n".join([*lines, "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"])


@gluon.constexpr_function
def _store_constraints(strip_count):
    return ",".join(["=r"] * 4 + ["r"] * (2 * strip_count + 4) + ["l"] * 4 + ["r"] * 4)


@gluon.jit
def _store_group(parts, part, address, inside, DTYPE: gl.constexpr):
    TEXT: gl.constexpr = _store_text(len(parts))
    CONSTRAINTS: gl.constexpr = _store_constraints(len(parts))
    operands = narrow_strips(parts, DTYPE) + (part, address, inside)
    gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def store_rows(address, o, num_rows, DTYPE: gl.constexpr, STRIDE: gl.constexpr):
    """The first num_rows rows of o to where the first is to lie, on 16 bytes as every row. By one warpgroup.

    Triton would store values of a half type one by one.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, o[0].type.layout))[:, None]
    part = (gl.arange(0, 8, gl.SliceLayout(0, o[0].type.layout))[None, :] >> 1) + gl.zeros_like(rows)
    inside = (rows < num_rows).to(gl.int32) + gl.zeros_like(part)
    # Rows that are not stored have no address of their own: so it is made here and not kept through a kernel's loops.
    begin = address + gl.minimum(rows, num_rows).to(gl.int64) * (STRIDE * 2)
    WHOLE: gl.constexpr = len(o) // 4 * 4
    for first in gl.static_range(0, WHOLE, 4):
        parts = (o[first], o[first + 1], o[first + 2], o[first + 3])
        _store_group(parts, part, begin + (first * 16 + part * 16), inside, DTYPE)
    for strip in gl.static_range(WHOLE, len(o)):
        _store_group((o[strip],), part, begin + (strip * 16 + part * 4), inside, DTYPE)
