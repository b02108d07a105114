"""The cast warps of the Hopper forward with fp32 inputs: they round keys and values to the half type of the products.

Each program has two or three of them. They take pieces of k and v from a counter, in the order in which tiles need
them, load a piece to shared memory, and write it rounded to global memory. The producer warp loads it from there like
any other input, once a counter says that its key head is complete. So the cast takes the time of its memory traffic,
and where heads run one after another most of it overlaps the products of earlier heads.

A piece is two stages: one is loaded while the other is rounded. A thread loads the 16 bytes that it rounds itself, with
no descriptor. A cast warp never waits for another warp, and each piece that was taken has a running warp. So every wait
for a key head ends, however many programs run at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.memory import (
    announce,
    await_announced,
    await_fetched,
    end_fetch,
    fetch_run,
    increment_counter,
    round_run,
)
from csrc_free_ops.tiles.hopper.warpgroup import shared_base

STAGE_BYTES = gl.constexpr(8192)


@gluon.constexpr_function
def cast_warps(head_dim):
    """For 64 columns a third warp costs more than it saves: 4 x 32 x 1024 rows took an H100 82.4 us instead of 80.2."""
    return 2 if head_dim <= 64 else 3


@gluon.constexpr_function
def stage_rows(head_dim):
    """Rows of a stage: all threads of a warp load equally many 16-byte chunks of it."""
    return 32 if head_dim <= 64 else 16


@gluon.jit
def _piece_count(total_k, HEAD_DIM: gl.constexpr):
    """Pieces of k, or of v, of one head."""
    ROWS: gl.constexpr = 2 * stage_rows(HEAD_DIM)
    return (total_k + ROWS - 1) // ROWS


@gluon.jit
def await_cast(counters, head, total_k, HEAD_DIM: gl.constexpr):
    """Wait until k and v of this key head are rounded."""
    await_announced(counters + head, 2 * _piece_count(total_k, HEAD_DIM))


@gluon.jit
def next_tile_and_clear(tile_counter, cast_counters, num_tiles, k_heads):
    """`next_tile`. Whoever takes the last index clears the cast counters, since nobody waits for them any more."""
    index = gl.num_programs(0) + increment_counter(tile_counter, num_tiles - 1)
    if index == gl.num_programs(0) + num_tiles - 1:
        offsets = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for first in range(0, k_heads, 32):
            gl.store(cast_counters + first + offsets, gl.zeros_like(offsets), mask=first + offsets < k_heads)
    return index


@gluon.jit
def _locate(piece, total_k, HEAD_DIM: gl.constexpr):
    """The key head of a piece, counted through all sequences, whether it is of v, and its first row."""
    count = _piece_count(total_k, HEAD_DIM)
    head = piece // (2 * count)
    within = piece - head * (2 * count)
    is_v = within >= count
    return head, is_v, gl.where(is_v, within - count, within) * (2 * stage_rows(HEAD_DIM))


@gluon.jit
def _row_step(strides, STRIDE: gl.constexpr):
    """Elements from a row to the next: a constant, or the last of the strides, which follows from a batch."""
    if STRIDE > 0:
        return STRIDE
    else:
        return strides[2]


@gluon.jit
def _load_stage(location, half, sources, stage_at, total_k, config):
    """Begin to load half a piece. The caller commits the loads, even if there are none, because they are counted."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    K_HEADS: gl.constexpr = config.HEADS // config.GROUP
    ROWS: gl.constexpr = stage_rows(HEAD_DIM)
    k_ptr, v_ptr, k_strides, v_strides = sources
    head, is_v, row = location
    row += half * ROWS
    batch = (head // K_HEADS).to(gl.int64)
    within = (head % K_HEADS).to(gl.int64)
    if is_v:
        step = _row_step(v_strides, config.V_STRIDE)
        begin = v_ptr + batch * v_strides[0] + within * v_strides[1] + row.to(gl.int64) * step
        fetch_run(begin, stage_at, total_k - row, ROWS, HEAD_DIM, step)  # [ROWS, HEAD_DIM]
    else:
        step = _row_step(k_strides, config.K_STRIDE)
        begin = k_ptr + batch * k_strides[0] + within * k_strides[1] + row.to(gl.int64) * step
        fetch_run(begin, stage_at, total_k - row, ROWS, HEAD_DIM, step)  # [ROWS, HEAD_DIM]


@gluon.jit
def cast_kv(INDEX: gl.constexpr, STAGES_AT: gl.constexpr, sources, halves, counters, sizes, config):
    """Cast warp INDEX. `halves` are contiguous [B, H, S, D]; stages begin STAGES_AT bytes behind the base."""
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    ROWS: gl.constexpr = stage_rows(HEAD_DIM)
    FIRST_STAGE: gl.constexpr = STAGES_AT + 2 * INDEX * STAGE_BYTES
    k_half, v_half = halves
    DTYPE: gl.constexpr = k_half.dtype.element_ty
    total_k, batch = sizes
    k_heads = batch * (config.HEADS // config.GROUP)
    num_pieces = k_heads * 2 * _piece_count(total_k, HEAD_DIM)
    last = num_pieces + config.CAST_WARPS * gl.num_programs(0) - 1
    piece_counter = counters + k_heads
    piece = increment_counter(piece_counter, last)
    head, is_v, row = _locate(piece, total_k, HEAD_DIM)
    for half in gl.static_range(2):
        if piece < num_pieces:
            _load_stage(
                (head, is_v, row), half, sources, shared_base() + FIRST_STAGE + half * STAGE_BYTES, total_k, config
            )
        end_fetch()
    while piece < num_pieces:
        next_piece = increment_counter(piece_counter, last)
        next_head, next_is_v, next_row = _locate(next_piece, total_k, HEAD_DIM)
        target = gl.where(is_v, v_half.to(gl.int64), k_half.to(gl.int64))
        target += (head.to(gl.int64) * total_k + row) * (HEAD_DIM * 2)
        for half in gl.static_range(2):
            stage_at = shared_base() + FIRST_STAGE + half * STAGE_BYTES
            await_fetched(1)
            half_ptr = (target + half * (ROWS * HEAD_DIM * 2)).to(gl.pointer_type(DTYPE), bitcast=True)
            round_run(stage_at, half_ptr, (total_k - row - half * ROWS) * HEAD_DIM, ROWS * HEAD_DIM)
            if next_piece < num_pieces:
                _load_stage((next_head, next_is_v, next_row), half, sources, stage_at, total_k, config)
            end_fetch()
        announce(counters + head)
        piece = next_piece
        head = next_head
        is_v = next_is_v
        row = next_row
