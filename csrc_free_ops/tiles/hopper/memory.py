"""Loads and stores of Hopper kernels in Gluon, and the counters by which programs order them.

A tile is a tuple of strips of 8 columns, as in `tiles/hopper/warpgroup.py`.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from csrc_free_ops.tiles.hopper.versions import async_load
from csrc_free_ops.tiles.hopper.warpgroup import narrow_strips, wgmma_layout


@gluon.constexpr_function
def columns_of(desc):
    """Columns of the tiles that a descriptor loads."""
    return desc.block_shape[-1]


@gluon.jit
def coordinates(desc, row, head, column, batch):
    """The coordinates at which a tile begins.

    Packed sequences are described as [T, H, D]. A batch is (rows of a sequence, HEADS, FOLDED). It is described as
    [S, B H, D], [B S, H, D] (FOLDED) or [B, H, S, D]. In a batch `head` counts the heads of all sequences.
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
    """Issue the TMA load of a tile; it completes on `bar`.

    A function of its own, because a loop over descriptors of different rank could not keep the coordinates in one
    variable.
    """
    async_load(desc, coordinates(desc, row, head, column, batch), bar, tile)


@gluon.jit
def load_blocks(
    desc, row, head, batch, bar, tiles, first, TILES: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Issue the TMA loads of BLOCKS blocks of rows from `row` on, each TILES tiles wide; they complete on `bar`.

    They fill the tiles from `first` on, block by block.
    """
    ROWS: gl.constexpr = desc.block_shape[0] * desc.block_shape[len(desc.block_shape) - 2]
    COLUMNS: gl.constexpr = columns_of(desc)
    for block in gl.static_range(BLOCKS):
        for tile in gl.static_range(TILES):
            target = tiles.index(first + block * TILES + tile)
            load_tile(desc, row + block * ROWS, head, tile * COLUMNS, batch, bar, target)


@gluon.jit
def read_columns(vector, COUNT: gl.constexpr):
    """A vector in shared memory as one number for each column: COUNT tensors [8]."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, wgmma_layout(8))
    columns = ()
    for index in gl.static_range(COUNT):
        columns = columns + (vector.slice(8 * index, 8).load(COLUMN),)  # [8]
    return columns


@gluon.jit
def put_pairs(address, strip):
    """Store a strip of a half type to the shared addresses of its elements, two columns at a time."""
    TEXT: gl.constexpr = "st.shared.b32 [$2], $4; mov.b32 $0, 0; mov.b32 $1, 0;"
    gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r", [address, strip], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def put_float_pairs(address, strip):
    """`put_pairs` for fp32."""
    TEXT: gl.constexpr = "st.shared.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;"
    gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,f,f", [address, strip], dtype=gl.int32, is_pure=False, pack=2)


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
    """Each thread rounds eight fp32 numbers at shared `source` times scale to global `target`.

    Triton would store them one by one, because it does not see that swizzled columns are contiguous.
    """
    TEXT: gl.constexpr = _round_text(DTYPE)
    operands = [source, target, scale, inside]
    gl.inline_asm_elementwise(TEXT, "=r,r,l,f,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def round_rows(
    address, target, rows, scale,
    MOST: gl.constexpr, COLUMNS: gl.constexpr, SWIZZLED: gl.constexpr, STRIDE,
):  # fmt: skip
    """One warp stores scale times the first `rows` of MOST rows of fp32 at shared `address`, rounded, to `target`.

    Rows have COLUMNS columns. SWIZZLED rows have the order of `attention/hopper/bwd_dq_finalize.py`.
    """
    COUNT: gl.constexpr = COLUMNS // 8
    # Unsigned, because a signed division needs registers that the warp does not have.
    run = lane_of_warp()
    for _ in range(MOST * COUNT // 32):
        row = run // COUNT
        at = run % COUNT
        column = at
        if SWIZZLED:
            column = at ^ (row % 4)
        _round_floats(
            (address + run * 32).to(gl.int32), target.to(gl.int64) + (row * STRIDE + column * 8) * 2, scale,
            (row < rows).to(gl.int32), target.dtype.element_ty,
        )  # fmt: skip
        run += 32


@gluon.jit
def fetch_run(source, target, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIDE):
    """One warp starts to copy the first `rows` of ROWS rows of fp32 to shared `target`, 16 bytes for each thread.

    After `await_fetched` a thread may read what it has copied itself, as `round_run` does. The copies have no L2
    policy: with one, ptxas (CUDA 12.8) encodes addresses in uniform registers as no GPU accepts them.
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
    """Commit the copies that each thread has started since the last call as one group."""
    TEXT: gl.constexpr = "cp.async.commit_group; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_fetched(PENDING: gl.constexpr):
    """Wait until at most PENDING groups of this thread's copies are in flight."""
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
    """One warp stores the first `limit` of NUMBERS fp32 numbers at shared `address`, rounded, to `target`.

    Each thread takes four numbers at a time, so `limit` is a multiple of 4.
    """
    gl.static_assert(NUMBERS % 128 == 0, "a warp rounds 128 numbers at a time: 4 in each of 32 threads")
    TEXT: gl.constexpr = _round_run_text(target.dtype.element_ty, NUMBERS)
    lane = lane_of_warp().to(gl.int32)
    operands = [address + lane * 16, target.to(gl.int64) + lane * 8, limit - lane * 4]
    gl.inline_asm_elementwise(TEXT, "=r,r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reduce_bulk(address, source, size, position):
    """One warp adds `size` bytes of fp32 from shared `source` to global `address`; at position 0 it overwrites them.

    It must call `await_bulk_reads` before `source` is overwritten.
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
def load_bulk(address, target, size, bar):
    """One warp loads `size` bytes from global `address` to shared `target`; they complete on the mbarrier at `bar`.

    The load is issued after all bulk stores of this warp are complete. It needs no fence, because loads and stores use
    one proxy.
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
    """The lane of each thread of one warp, as uint32.

    The compiler would hold `gl.arange` in a register through loops; it does not hoist this value.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    TEXT: gl.constexpr = "mov.u32 $0, %laneid;"
    lane = gl.arange(0, 32, THREADS)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [lane], dtype=gl.uint32, is_pure=False, pack=1)


@gluon.jit
def meet_in_warp():
    """Barrier of the threads of one warp."""
    TEXT: gl.constexpr = "bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def add_tile(desc, coord, tile, _semantic=None):
    """Add a tile in shared memory to global memory by TMA: `async_store` with a sum."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, tile.handle)


@gluon.jit
def await_bulk_reads():
    """Wait until this warp's bulk stores have read their source."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_bulk_writes():
    """Wait until this warp's bulk stores are complete."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_kernel():
    """Wait until the previous kernel, which may still run (`launch_pdl`), is complete and its writes are visible."""
    TEXT: gl.constexpr = "griddepcontrol.wait; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def admit_kernel():
    """Let the next kernel start early (`launch_pdl`), once all programs of this one have called this or ended."""
    TEXT: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def increment_counter(counter, last):
    """One warp increments global `counter`, from `last` back to 0, and gets the old value in all lanes.

    With `gl.atomic_add`, ptxas separates the first lane from the others, which then read its result too early.
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
def acquire_semaphore(semaphore, value):
    """Wait until the global `semaphore` has this value; bulk stores before its `release_semaphore` are then complete.

    PTX also asks for `fence.proxy.async` after the wait. The fence is left out: this warp issues no bulk store before
    the wait has ended, and fences here and in `release_semaphore` made 1024 rows 25 % slower.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred other;
        AGAIN: ld.acquire.gpu.global.b32 $0, [$1]; setp.ne.s32 other, $0, $2; @other bra AGAIN;
        }""",
        "=r,l,r", [semaphore, value], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release_semaphore(semaphore):
    """Increment the global `semaphore` once this warp's bulk stores are complete.

    The wait makes the stores visible to this warp only; the release makes them visible to all. Without the release the
    store of another warp could come first.
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
        "=r,l", [semaphore], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def announce(counter):
    """Increment global `counter` for this warp's stores to global memory, which TMA may then read."""
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
    """Wait until `announce` has raised global `counter` to `number`; TMA loads of this warp then see the stores."""
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
    """For each strip two values of each of two rows. The last operands are the rows' addresses and masks."""
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
def store_float_rows(address, o, num_rows, STRIDE):
    """`store_rows` for fp32."""
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
    """One warpgroup sets the rows from `first` on of an operand of TILES tiles (`accumulate`) to zero.

    Rows past a segment's end may hold NaN, and the product multiplies them by 0, which would give NaN.
    """
    rows = gl.arange(0, ROWS, gl.BlockedLayout([max(ROWS // 128, 1)], [32], [4], [0]))
    TEXT: gl.constexpr = _clear_text(TILES, ROWS * COLUMNS * 2, COLUMNS * 2)
    gl.inline_asm_elementwise(
        TEXT, "=r,r,r", [address + rows * (COLUMNS * 2), (rows >= first).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def flat(tile):
    """A tile that a descriptor filled, [rows, 1, columns] or [1, 1, rows, columns], as [rows, columns]."""
    RANK: gl.constexpr = len(tile.shape)
    return tile.reshape([tile.shape[0] * tile.shape[RANK - 2], tile.shape[RANK - 1]])


@gluon.constexpr_function
def _store_text(strip_count):
    """Store 1 or 4 strips. With 4, the four threads of a row exchange words until each has 16 bytes of one strip."""
    # Numbers of the operands that follow the strips: four values of each for a thread.
    quarter, address, inside = (4 + 2 * strip_count + 4 * index for index in range(3))
    lines = [
        "{ .reg .pred odd, high, inside; .reg .b32 t0, t1, a0, a1, a2, a3; .reg .b64 at;",
        f"and.b32 t0, ${quarter}, 1; setp.ne.u32 odd, t0, 0; and.b32 t0, ${quarter}, 2; setp.ne.u32 high, t0, 0;",
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
def _store_strips(strips, quarter, address, inside, DTYPE: gl.constexpr):
    TEXT: gl.constexpr = _store_text(len(strips))
    CONSTRAINTS: gl.constexpr = _store_constraints(len(strips))
    operands = narrow_strips(strips, DTYPE) + (quarter, address, inside)
    gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def store_rows(address, o, num_rows, DTYPE: gl.constexpr, STRIDE):
    """One warpgroup stores the first num_rows rows of o; row 0 goes to `address`, and rows are 16-byte aligned.

    Triton would store values of a half type one by one.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, o[0].type.layout))[:, None]
    quarter = (gl.arange(0, 8, gl.SliceLayout(0, o[0].type.layout))[None, :] >> 1) + gl.zeros_like(rows)
    inside = (rows < num_rows).to(gl.int32) + gl.zeros_like(quarter)
    # The bound depends on num_rows, so the compiler cannot hoist the addresses and hold them through a kernel's loops.
    begin = address + gl.minimum(rows, num_rows).to(gl.int64) * (STRIDE * 2)
    WHOLE: gl.constexpr = len(o) // 4 * 4
    for first in gl.static_range(0, WHOLE, 4):
        strips = (o[first], o[first + 1], o[first + 2], o[first + 3])
        _store_strips(strips, quarter, begin + (first * 16 + quarter * 16), inside, DTYPE)
    for strip in gl.static_range(WHOLE, len(o)):
        _store_strips((o[strip],), quarter, begin + (strip * 16 + quarter * 4), inside, DTYPE)
