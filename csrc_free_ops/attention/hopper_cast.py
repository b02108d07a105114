"""Inputs of fp32 that the Hopper forward multiplies in a half type: cast by the kernel that uses them, as it goes.

Beside the producer each program has CASTERS warps. They draw pieces of k, v and q in the order in which tiles want
them, a key head's together, bring each piece to shared memory by TMA, and write it to global memory rounded; from there
the producer brings it like any other input, once a counter says that all of its key head is there. So the cast takes the
time of its memory traffic, and most of that beside the products of the heads before.

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
    columns_of,
    coordinates,
    meet_in_warp,
    round_rows,
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
def _pieces(total_q, total_k, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    """Of one key head: those of its k or v, those of one of its query heads, and all."""
    ROWS: gl.constexpr = 2 * stage_rows(HEAD_DIM)
    of_k = (total_k + ROWS - 1) // ROWS
    of_q = (total_q + ROWS - 1) // ROWS
    return of_k, of_q, 2 * of_k + GROUP * of_q


@gluon.jit
def await_cast(counts, k_head, total_q, total_k, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    """Until all that the tiles of this key head read is there."""
    _, _, of_group = _pieces(total_q, total_k, HEAD_DIM, GROUP)
    await_announced(counts + k_head, of_group)


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
def _locate(piece, half, total_q, total_k, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    """0, 1 or 2 for k, v or q; the head, counted through all sequences, and the row at which half of a piece begins."""
    ROWS: gl.constexpr = stage_rows(HEAD_DIM)
    of_k, of_q, of_group = _pieces(total_q, total_k, HEAD_DIM, GROUP)
    group = piece // of_group
    within = piece % of_group
    beyond = within - 2 * of_k
    which = gl.where(beyond >= 0, 2, within // of_k)
    head = gl.where(beyond >= 0, group * GROUP + beyond // of_q, group)
    row = gl.where(beyond >= 0, beyond % of_q, within % of_k) * (2 * ROWS) + half * ROWS
    return which, head, row


@gluon.jit
def _bring(piece, half, sources, tile, bar, lengths, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    FOLDED: gl.constexpr = option(OPTIONS, "FOLDED")
    q_source, k_source, v_source = sources
    total_q, total_k = lengths
    which, head, row = _locate(piece, half, total_q, total_k, HEAD_DIM, GROUP)
    mbarrier.expect(bar, STAGE_FLOATS * 4)
    if which == 2:
        at = coordinates(q_source, row, head, 0, (total_q, HEADS, FOLDED & 16))
        tma.async_copy_global_to_shared(q_source, at, bar, tile)
    elif which == 1:
        at = coordinates(v_source, row, head, 0, (total_k, HEADS // GROUP, FOLDED & 64))
        tma.async_copy_global_to_shared(v_source, at, bar, tile)
    else:
        at = coordinates(k_source, row, head, 0, (total_k, HEADS // GROUP, FOLDED & 32))
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
    STAGE_BYTES: gl.constexpr = STAGE_FLOATS * 4
    OWN_STAGE: gl.constexpr = FIRST_STAGE + 2 * INDEX
    OWN_BAR: gl.constexpr = FIRST_BAR + 2 * INDEX
    q_half, k_half, v_half = halves
    DTYPE: gl.constexpr = q_half.dtype.element_ty
    total_q, total_k, batch = sizes
    lengths = (total_q, total_k)
    _, _, of_group = _pieces(total_q, total_k, HEAD_DIM, GROUP)
    k_heads = batch * (HEADS // GROUP)
    num_pieces = k_heads * of_group
    last = num_pieces + CASTERS * gl.num_programs(0) - 1
    ticket_ptr = counts + k_heads
    piece = take_ticket(ticket_ptr, last)
    if piece < num_pieces:
        for half in gl.static_range(2):
            _bring(piece, half, sources, stages.index(OWN_STAGE + half), bars.index(OWN_BAR + half), lengths, OPTIONS)
    phase = 0
    while piece < num_pieces:
        behind = take_ticket(ticket_ptr, last)
        for half in gl.static_range(2):
            which, head, row = _locate(piece, half, total_q, total_k, HEAD_DIM, GROUP)
            length = gl.where(which == 2, total_q, total_k)
            half_ptr = gl.where(which == 1, v_half.to(gl.int64), k_half.to(gl.int64))
            half_ptr = gl.where(which == 2, q_half.to(gl.int64), half_ptr)
            target = half_ptr + (head.to(gl.int64) * length + row) * (HEAD_DIM * 2)
            await_phase(bars_at + (OWN_BAR + half) * 8, phase)
            round_rows(
                shared_base() + (OWN_STAGE + half) * STAGE_BYTES, target.to(gl.pointer_type(DTYPE), bitcast=True),
                gl.maximum(length - row, 0), 1.0, stage_rows(HEAD_DIM), HEAD_DIM, stage_columns(HEAD_DIM), False, HEAD_DIM,
            )  # fmt: skip
            meet_in_warp()
            if behind < num_pieces:
                _bring(
                    behind, half, sources, stages.index(OWN_STAGE + half), bars.index(OWN_BAR + half), lengths, OPTIONS
                )
        announce(counts + piece // of_group)
        piece = behind
        phase = phase ^ 1
