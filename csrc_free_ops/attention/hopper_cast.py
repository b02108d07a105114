"""Keys and values of fp32 that the Hopper forward multiplies in a half type: cast by the kernel that uses them.

Beside the producer each program has CASTERS warps. They draw pieces of k and v in the order in which tiles want them, a
key head's together, bring each piece to shared memory by TMA, and write it to global memory rounded; from there the
producer brings it like any other input, once a counter says that all of its key head is there. So the cast takes
the time of its memory traffic, and most of that beside the products of the heads before.

A piece is two stages of STAGE_FLOATS numbers, of which one is on its way while the other is rounded. A caster waits for
nobody, and whoever has drawn a piece is running: so every wait ends, however many programs run at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from csrc_free_ops.tiles.hopper import await_phase, option, shared_base
from csrc_free_ops.tiles.hopper_memory import (
    announce,
    await_announced,
    coordinates,
    meet_in_warp,
    round_rows,
    round_run,
    take_ticket,
)

CASTERS = gl.constexpr(3)
STAGE_FLOATS = gl.constexpr(2048)


@gluon.constexpr_function
def stage_columns(head_dim):
    return 64 if head_dim <= 64 else 128


@gluon.constexpr_function
def stage_rows(head_dim):
    return STAGE_FLOATS.value // stage_columns(head_dim)


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
def _bring(place, half, sources, tile, bar, total_k, OPTIONS: gl.constexpr):
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    FOLDED: gl.constexpr = option(OPTIONS, "FOLDED")
    k_source, v_source = sources
    head, is_v, row = place
    row += half * stage_rows(option(OPTIONS, "HEAD_DIM"))
    mbarrier.expect(bar, STAGE_FLOATS * 4)
    if is_v:
        at = coordinates(v_source, row, head, 0, (total_k, HEADS // GROUP, FOLDED & 32))
        tma.async_copy_global_to_shared(v_source, at, bar, tile)
    else:
        at = coordinates(k_source, row, head, 0, (total_k, HEADS // GROUP, FOLDED & 16))
        tma.async_copy_global_to_shared(k_source, at, bar, tile)


@gluon.jit
def cast(
    INDEX: gl.constexpr, FIRST_STAGE: gl.constexpr, FIRST_BAR: gl.constexpr,
    sources, halves, counts, stages, bars, bars_at, sizes, OPTIONS: gl.constexpr,
):  # fmt: skip
    """One caster. `halves` are of contiguous [B, H, S, D]; stages begin where the kernel's shared memory does."""
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    ROWS: gl.constexpr = stage_rows(HEAD_DIM)
    COLUMNS: gl.constexpr = stage_columns(HEAD_DIM)
    STAGE_BYTES: gl.constexpr = STAGE_FLOATS * 4
    OWN_STAGE: gl.constexpr = FIRST_STAGE + 2 * INDEX
    OWN_BAR: gl.constexpr = FIRST_BAR + 2 * INDEX
    k_half, v_half = halves
    DTYPE: gl.constexpr = k_half.dtype.element_ty
    total_k, batch = sizes
    k_heads = batch * (HEADS // GROUP)
    num_pieces = k_heads * 2 * _pieces(total_k, HEAD_DIM)
    last = num_pieces + CASTERS * gl.num_programs(0) - 1
    ticket_ptr = counts + k_heads
    piece = take_ticket(ticket_ptr, last)
    head, is_v, row = _locate(piece, total_k, HEAD_DIM)
    if piece < num_pieces:
        for half in gl.static_range(2):
            tile = stages.index(OWN_STAGE + half)
            _bring((head, is_v, row), half, sources, tile, bars.index(OWN_BAR + half), total_k, OPTIONS)
    phase = 0
    while piece < num_pieces:
        behind = take_ticket(ticket_ptr, last)
        next_head, next_is_v, next_row = _locate(behind, total_k, HEAD_DIM)
        target = gl.where(is_v, v_half.to(gl.int64), k_half.to(gl.int64))
        target += (head.to(gl.int64) * total_k + row) * (HEAD_DIM * 2)
        for half in gl.static_range(2):
            await_phase(bars_at + (OWN_BAR + half) * 8, phase)
            source = shared_base() + (OWN_STAGE + half) * STAGE_BYTES
            half_ptr = (target + half * (ROWS * HEAD_DIM * 2)).to(gl.pointer_type(DTYPE), bitcast=True)
            rows = gl.maximum(total_k - row - half * ROWS, 0)
            if HEAD_DIM == COLUMNS:
                round_run(source, half_ptr, rows * HEAD_DIM, STAGE_FLOATS)
            else:
                round_rows(source, half_ptr, rows, 1.0, ROWS, HEAD_DIM, COLUMNS, False, HEAD_DIM)
            meet_in_warp()
            if behind < num_pieces:
                tile = stages.index(OWN_STAGE + half)
                _bring(
                    (next_head, next_is_v, next_row), half, sources, tile, bars.index(OWN_BAR + half), total_k, OPTIONS
                )
        announce(counts + head)
        piece = behind
        head = next_head
        is_v = next_is_v
        row = next_row
        phase = phase ^ 1
