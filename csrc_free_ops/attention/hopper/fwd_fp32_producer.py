"""Keys and values of fp32 that the Hopper forward multiplies in a half type: cast by the kernel that uses them.

Beside the producer each program has two or three warps that cast. They draw pieces of k and v in the order in which
tiles want them, a key head's together, bring each piece to shared memory, and write it to global memory rounded; from
there the producer brings it like any other input, once a counter says that all of its key head is there. So the cast
takes the time of its memory traffic, and where heads do not all go together most of that beside the products of those
before.

A piece is two stages, of which one is on its way while the other is rounded. Each thread brings itself what it rounds,
16 bytes at a time, with no descriptor. A caster waits for nobody, and whoever has drawn a piece is running: so every
wait ends, however many programs run at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.memory import (
    announce,
    await_announced,
    await_fetched,
    end_fetch,
    fetch_run,
    round_run,
    take_ticket,
)
from csrc_free_ops.tiles.hopper.warpgroup import option, shared_base

STAGE_BYTES = gl.constexpr(8192)


@gluon.constexpr_function
def caster_count(head_dim):
    """At 64 columns what a third brings costs more than waiting: 4 x 32 x 1024 rows took an H100 82.4 us, not 80.2."""
    return 2 if head_dim <= 64 else 3


@gluon.constexpr_function
def stage_rows(head_dim):
    """Such that all threads of a warp bring as many chunks."""
    return 32 if head_dim <= 64 else 16


@gluon.jit
def _pieces(total_k, HEAD_DIM: gl.constexpr):
    """Of k, or v, of one head."""
    ROWS: gl.constexpr = 2 * stage_rows(HEAD_DIM)
    return (total_k + ROWS - 1) // ROWS


@gluon.jit
def await_cast(counts, head, total_k, HEAD_DIM: gl.constexpr):
    """Until k and v of this key head are there."""
    await_announced(counts + head, 2 * _pieces(total_k, HEAD_DIM))


@gluon.jit
def draw_and_clear(ticket_ptr, counts, num_work, k_heads):
    """The next tile, as `draw`; whoever draws last clears the counters, for which nobody waits any more."""
    work = gl.num_programs(0) + take_ticket(ticket_ptr, num_work - 1)
    if work == gl.num_programs(0) + num_work - 1:
        places = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for first in range(0, k_heads, 32):
            gl.store(counts + first + places, gl.zeros_like(places), mask=first + places < k_heads)
    return work


@gluon.jit
def _locate(piece, total_k, HEAD_DIM: gl.constexpr):
    """Head, counted through all sequences, whether it is of v, and the row at which a piece begins."""
    each = _pieces(total_k, HEAD_DIM)
    head = piece // (2 * each)
    within = piece - head * (2 * each)
    is_v = within >= each
    return head, is_v, gl.where(is_v, within - each, within) * (2 * stage_rows(HEAD_DIM))


@gluon.jit
def _bring(place, half, sources, stage_at, total_k, OPTIONS: gl.constexpr):
    """Begins to bring a stage of a piece. A fetch is ended in any case, since they are counted."""
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    K_HEADS: gl.constexpr = option(OPTIONS, "HEADS") // option(OPTIONS, "GROUP")
    K_STRIDE: gl.constexpr = option(OPTIONS, "K_STRIDE")
    V_STRIDE: gl.constexpr = option(OPTIONS, "V_STRIDE")
    ROWS: gl.constexpr = stage_rows(HEAD_DIM)
    k_ptr, v_ptr, k_strides, v_strides = sources
    head, is_v, row = place
    row += half * ROWS
    batch = (head // K_HEADS).to(gl.int64)
    within = (head % K_HEADS).to(gl.int64)
    if is_v:
        begin = v_ptr + batch * v_strides[0] + within * v_strides[1] + row.to(gl.int64) * V_STRIDE
        fetch_run(begin, stage_at, total_k - row, ROWS, HEAD_DIM, V_STRIDE)
    else:
        begin = k_ptr + batch * k_strides[0] + within * k_strides[1] + row.to(gl.int64) * K_STRIDE
        fetch_run(begin, stage_at, total_k - row, ROWS, HEAD_DIM, K_STRIDE)


@gluon.jit
def cast(INDEX: gl.constexpr, FIRST_AT: gl.constexpr, sources, halves, counts, sizes, OPTIONS: gl.constexpr):
    """One caster. `halves` are contiguous [B, H, S, D]; stages begin FIRST_AT bytes behind the shared memory's base."""
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    CASTERS: gl.constexpr = option(OPTIONS, "CASTERS")
    ROWS: gl.constexpr = stage_rows(HEAD_DIM)
    OWN_AT: gl.constexpr = FIRST_AT + 2 * INDEX * STAGE_BYTES
    k_half, v_half = halves
    DTYPE: gl.constexpr = k_half.dtype.element_ty
    total_k, batch = sizes
    k_heads = batch * (HEADS // GROUP)
    num_pieces = k_heads * 2 * _pieces(total_k, HEAD_DIM)
    last = num_pieces + CASTERS * gl.num_programs(0) - 1
    ticket_ptr = counts + k_heads
    piece = take_ticket(ticket_ptr, last)
    head, is_v, row = _locate(piece, total_k, HEAD_DIM)
    for half in gl.static_range(2):
        if piece < num_pieces:
            _bring((head, is_v, row), half, sources, shared_base() + OWN_AT + half * STAGE_BYTES, total_k, OPTIONS)
        end_fetch()
    while piece < num_pieces:
        behind = take_ticket(ticket_ptr, last)
        next_head, next_is_v, next_row = _locate(behind, total_k, HEAD_DIM)
        target = gl.where(is_v, v_half.to(gl.int64), k_half.to(gl.int64))
        target += (head.to(gl.int64) * total_k + row) * (HEAD_DIM * 2)
        for half in gl.static_range(2):
            stage_at = shared_base() + OWN_AT + half * STAGE_BYTES
            await_fetched(1)
            half_ptr = (target + half * (ROWS * HEAD_DIM * 2)).to(gl.pointer_type(DTYPE), bitcast=True)
            round_run(stage_at, half_ptr, (total_k - row - half * ROWS) * HEAD_DIM, ROWS * HEAD_DIM)
            if behind < num_pieces:
                _bring((next_head, next_is_v, next_row), half, sources, stage_at, total_k, OPTIONS)
            end_fetch()
        announce(counts + head)
        piece = behind
        head = next_head
        is_v = next_is_v
        row = next_row
