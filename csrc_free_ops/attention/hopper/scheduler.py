"""How the tiles of a Hopper kernel are dealt out to its programs, and how a program's producer tells its consumers.

Programs are as many as the GPU has multiprocessors, and draw tiles one after another: up to GROUPS times 64 rows of one
segment and head, one times 64 for each consumer warpgroup; rows are queries in the forward and keys in the backward.
Lengths are known on the device alone:

    SINGLE      one segment, as in EVEN, but cut so that the last round of tiles is full where all heads go together
    EVEN        one segment, cut into tiles of one height, of some heads at a time, as many as what their tiles go over
                stays in the L2 cache for, or one
    DENSE       a batch of sequences of one length, whose heads are all one segment's, cut as in EVEN
    DENSE_CUT   the same, cut as in SINGLE
    DENSE_ENDS  the same, where whole tiles of two would make one round, of rows the later of which see more keys: of
                each tile one unit of 64 rows from either end of the sequence, so that all tiles take about as long
    BY_LENGTH   few segments, each as in EVEN, the longest first, so that what is left at the end is small
    IN_PLACE    many segments, one head after the other, by the closed form of `tiles.segments`
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.memory import take_ticket
from csrc_free_ops.tiles.hopper.warpgroup import await_phase, barrier_arrive, turn_around
from csrc_free_ops.tiles.segments import narrow_segments

# Segments that one warp ranks by length, and those that it looks at in one step of a search.
RANKED = gl.constexpr(32)
SEARCHED = gl.constexpr(128)
# Bytes to count on of the L2 cache of an H100 or H200, of 50 MiB, for what programs go over side by side; and for one
# segment, where more heads together make the last round of tiles a full one, or have less to wait for in order. From so
# many bytes on a head goes alone where not all go together. By measured figures (docs/attention.md).
CACHED, CACHED_OF_ONE, ALONE = (gl.constexpr(size * 2**20) for size in (16, 32, 2))
# Orders of tiles.
SINGLE, EVEN, BY_LENGTH, IN_PLACE, DENSE, DENSE_CUT, DENSE_ENDS = (gl.constexpr(order) for order in range(7))

# A note is so many numbers. Of the notes there is one more than places for tiles at the least: what is read of the last
# tile after its place was let go has then not been written over.
NOTE = gl.constexpr(16)
NOTES = gl.constexpr(4)
# Where pointers and sizes lie behind the notes: a producer has too few registers to hold them.
POINTERS = gl.constexpr(NOTES.value * NOTE.value)


@gluon.constexpr_function
def _scalar(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def write_note(notes, slot, FIELD: gl.constexpr, value):
    notes.index(slot * NOTE + FIELD).store(gl.full([1], value, notes.dtype, _scalar(1)))


@gluon.jit
def read_note(notes, slot, FIELD: gl.constexpr):
    return gl.max(notes.index(slot * NOTE + FIELD).load(_scalar(4)), 0)


@gluon.jit
def read_note_by_warp(notes, slot, FIELD: gl.constexpr):
    return gl.max(notes.index(slot * NOTE + FIELD).load(_scalar(1)), 0)


@gluon.jit
def keep(notes, values):
    """For all partitions, in the note behind the last: each at its place, by one store.

    Between several Triton would have all threads meet.
    """
    place = gl.arange(0, NOTE, _scalar(gl.num_warps()))
    kept = gl.zeros_like(place).to(notes.dtype)
    for index in gl.static_range(len(values)):
        kept = gl.where(place == index, values[index].to(notes.dtype), kept)
    notes._reinterpret(notes.dtype, [NOTES + 1, NOTE], notes.layout).index(NOTES).store(kept)


@gluon.jit
def kept_number(notes, FIELD: gl.constexpr):
    return gl.max(notes.index(POINTERS + FIELD).load(_scalar(1)), 0)


@gluon.jit
def kept_pointer(addresses, FIELD: gl.constexpr, DTYPE: gl.constexpr):
    return gl.max(addresses.index(POINTERS + FIELD).load(_scalar(1)), 0).to(gl.pointer_type(DTYPE), bitcast=True)


@gluon.jit
def kept_stride(addresses, FIELD: gl.constexpr):
    return gl.max(addresses.index(POINTERS + FIELD).load(_scalar(1)), 0)


@gluon.constexpr_function
def has_one_segment(order):
    return order in (SINGLE, EVEN)


@gluon.constexpr_function
def is_dense(order):
    return order in (DENSE, DENSE_CUT, DENSE_ENDS)


@gluon.jit
def head_count(num_segments, HEADS: gl.constexpr, ORDER: gl.constexpr):
    """Heads of a segment; those of all sequences, whose number is num_segments, where they are one segment's."""
    if is_dense(ORDER):
        return num_segments * HEADS
    else:
        return HEADS


@gluon.jit
def boundaries(cu_ptr, ORDER: gl.constexpr):
    """`cu` of the functions below: both boundaries of one segment, which a kernel can load before all else."""
    if has_one_segment(ORDER):
        return gl.load(cu_ptr), gl.load(cu_ptr + 1)
    elif is_dense(ORDER):
        return 0, 0
    else:
        return cu_ptr


@gluon.jit
def rows_of(cu, segment, num_segments, total, ORDER: gl.constexpr):
    """Start and number of the rows of segments 0 .. num_segments + 1, counted as in `tiles.segments`."""
    if is_dense(ORDER):
        start = 0
        length = total
    else:
        if has_one_segment(ORDER):
            first, last = cu
            start = gl.where(segment == 0, 0, gl.where(segment == 1, first, last))
            end = gl.where(segment == 0, first, gl.where(segment == 1, last, total))
        else:
            start = gl.load(cu + segment - 1, mask=(segment > 0) & (segment <= num_segments + 1), other=0)
            end = gl.load(cu + segment, mask=segment <= num_segments, other=total)
        start = gl.minimum(gl.maximum(start, 0), total)
        length = gl.maximum(gl.minimum(gl.maximum(end, 0), total) - start, 0)
        length = gl.where(segment <= num_segments + 1, length, 0)
    return start, length


@gluon.jit
def is_inside(segment, num_segments):
    """Whether it is one of the segments and not the rows before or after them."""
    return (segment > 0) & (segment <= num_segments)


@gluon.jit
def _rank_segments(cu, num_segments, total, BLOCK_M: gl.constexpr, ORDER: gl.constexpr):
    """For at most RANKED - 2 segments: each one's first tile when the longest come first, and its number of tiles.

    Rows of no segment see no key, so they come last, and among equals the first come first.
    """
    segment = gl.arange(0, RANKED, gl.BlockedLayout([1], [32], [1], [0]))
    rows = rows_of(cu, segment, num_segments, total, ORDER)[1]
    length = gl.where(is_inside(segment, num_segments), rows, -1)
    counts = (rows + BLOCK_M - 1) // BLOCK_M
    first = gl.zeros_like(rows)
    for other in range(num_segments + 2):
        # From the other threads, which are nearer than memory.
        other_length = gl.sum(gl.where(segment == other, length, 0), 0)
        other_count = gl.sum(gl.where(segment == other, counts, 0), 0)
        ahead = (other_length > length) | ((other_length == length) & (other < segment))
        first += gl.where(ahead, other_count, 0)
    return segment, first, counts


@gluon.jit
def _search_segment(cu, num_segments, total, tile, BLOCK_M: gl.constexpr):
    segment = 0
    beyond = num_segments + 2
    while beyond - segment > 1:
        step = (beyond - segment + SEARCHED - 1) // SEARCHED
        probe = segment + gl.arange(0, SEARCHED, gl.BlockedLayout([SEARCHED // 32], [32], [1], [0])) * step
        found = gl.load(cu + probe - 1, mask=(probe > 0) & (probe < beyond), other=0)
        segment, beyond = narrow_segments(found, probe, step, segment, beyond, total, tile, BLOCK_M)
    return segment


@gluon.jit
def _cut(units, heads, programs, GROUPS: gl.constexpr):
    """How one segment of `units` times 64 rows is cut: whole tiles per head, and units of the narrower ones after them.

    Whole rounds of the programs take whole tiles; what is left takes the narrowest that still make one round.
    """
    rounds = units * heads // (GROUPS * programs)
    whole = gl.minimum(rounds * programs // heads, units // GROUPS)
    left = units - whole * GROUPS
    narrow = GROUPS
    for width in gl.static_range(GROUPS - 1, 0, -1):
        if (left + width - 1) // width * heads <= programs:
            narrow = width
    return whole, narrow


@gluon.jit
def _tiles_of_one(start, length, total, BLOCK_M: gl.constexpr):
    """Whole tiles of the one segment, and of the rows before and after it."""
    own = (length + BLOCK_M - 1) // BLOCK_M
    before = (start + BLOCK_M - 1) // BLOCK_M
    return own, before, (total - start - length + BLOCK_M - 1) // BLOCK_M


@gluon.jit
def _segment_of_one(tile, own, before):
    """The tile's segment, and how many tiles come before that one's: those of segment 1 do, then those of 0 and 2."""
    segment = gl.where(tile < own, 1, gl.where(tile - own < before, 0, 2))
    return segment, gl.where(segment == 1, 0, own) + gl.where(segment == 2, before, 0)


@gluon.jit
def deal(cu, num_segments, total, heads, GROUPS: gl.constexpr, ORDER: gl.constexpr):
    """The number of tiles of one head, and what `place` needs to know. `heads` is that of `head_count`."""
    BLOCK_M: gl.constexpr = 64 * GROUPS
    if ORDER == DENSE or ORDER == DENSE_ENDS:
        num_tiles = (total + BLOCK_M - 1) // BLOCK_M
        dealt = (num_tiles,)
    elif ORDER == DENSE_CUT:
        units = (total + 63) // 64
        whole, narrow = _cut(units, heads, gl.num_programs(0), GROUPS)
        num_tiles = whole + (units - whole * GROUPS + narrow - 1) // narrow
        dealt = (whole, narrow)
    elif ORDER == SINGLE:
        start, length = rows_of(cu, 1, num_segments, total, ORDER)
        units = (length + 63) // 64
        whole, narrow = _cut(units, heads, gl.num_programs(0), GROUPS)
        own = whole + (units - whole * GROUPS + narrow - 1) // narrow
        _, before, behind = _tiles_of_one(start, length, total, BLOCK_M)
        num_tiles = own + before + behind
        dealt = (whole, narrow, own, before)
    elif ORDER == EVEN:
        start, length = rows_of(cu, 1, num_segments, total, ORDER)
        own, before, behind = _tiles_of_one(start, length, total, BLOCK_M)
        num_tiles = own + before + behind
        dealt = (num_tiles,)
    elif ORDER == BY_LENGTH:
        segments, first, counts = _rank_segments(cu, num_segments, total, BLOCK_M, ORDER)
        num_tiles = gl.sum(counts, 0)
        dealt = (segments, first, counts)
    else:
        num_tiles = total // BLOCK_M + num_segments + 2
        dealt = (num_tiles,)
    return num_tiles, dealt


@gluon.jit
def _heads_together(length, heads, RESIDENT: gl.constexpr, LONE: gl.constexpr):
    """How many heads of a segment go together: one of LONE rows and more, else what RESIDENT rows hold, evenly."""
    most = gl.minimum(gl.maximum(RESIDENT // gl.maximum(length, 1), 1), heads)
    rounds = (heads + most - 1) // most
    return gl.where(length < LONE, (heads + rounds - 1) // rounds, 1)


@gluon.jit
def _share(work, tiles, length, heads, RESIDENT: gl.constexpr, LONE: gl.constexpr):
    """Head and tile of a segment's piece of work. The first tiles of a head come first."""
    head = work % heads
    tile = work // heads
    if length > RESIDENT // heads:
        together = _heads_together(length, heads, RESIDENT, LONE)
        first_head = work // (together * tiles) * together
        within = work % (together * tiles)
        together = gl.minimum(together, heads - first_head)
        head = first_head + within % together
        tile = within // together
    return head, tile


@gluon.jit
def place(
    work, num_tiles, dealt, cu, num_segments, total, heads,
    GROUPS: gl.constexpr, ORDER: gl.constexpr, RESIDENT: gl.constexpr, LONE: gl.constexpr,
):  # fmt: skip
    """Of one piece of work: head, segment, the segment's start and length, its first unit of 64 rows, and how many.

    There is nothing to do where that unit lies past the length. The L2 cache has room for RESIDENT rows of a head; a
    head of LONE rows and more goes alone where it has none for all.
    """
    BLOCK_M: gl.constexpr = 64 * GROUPS
    if ORDER == DENSE_ENDS:
        # The unit from the end of the sequence; the other one is as far from its beginning.
        head, tile = work % heads, work // heads
        segment, start, length, unit, taken = 1, 0, total, num_tiles * GROUPS - 1 - tile, 1
    elif ORDER == DENSE:
        head, tile = _share(work, num_tiles, total, heads, RESIDENT, LONE)
        segment, start, length, unit, taken = 1, 0, total, tile * GROUPS, GROUPS
    elif ORDER == DENSE_CUT:
        whole, narrow = dealt
        head, tile = _share(work, num_tiles, total, heads, RESIDENT, LONE)
        segment, start, length = 1, 0, total
        taken = gl.where(tile >= whole, narrow, GROUPS)
        unit = gl.where(tile < whole, tile * GROUPS, whole * GROUPS + (tile - whole) * narrow)
    elif ORDER == SINGLE:
        whole, narrow, own, before = dealt
        _, length = rows_of(cu, 1, num_segments, total, ORDER)
        head, tile = _share(work, num_tiles, length, heads, RESIDENT, LONE)
        segment, passed = _segment_of_one(tile, own, before)
        taken = gl.where((segment == 1) & (tile >= whole), narrow, GROUPS)
        outside = (tile - passed) * GROUPS
        inside = gl.where(tile < whole, tile * GROUPS, whole * GROUPS + (tile - whole) * narrow)
        unit = gl.where(segment == 1, inside, outside)
        start, length = rows_of(cu, segment, num_segments, total, ORDER)
    elif ORDER == EVEN:
        taken = GROUPS
        start, length = rows_of(cu, 1, num_segments, total, ORDER)
        own, before, _ = _tiles_of_one(start, length, total, BLOCK_M)
        head, tile = _share(work, num_tiles, length, heads, RESIDENT, LONE)
        segment, passed = _segment_of_one(tile, own, before)
        unit = (tile - passed) * GROUPS
        start, length = rows_of(cu, segment, num_segments, total, ORDER)
    elif ORDER == BY_LENGTH:
        segments, firsts, counts = dealt
        found = (firsts <= work // heads) & (work // heads < firsts + counts)
        segment = gl.sum(gl.where(found, segments, 0), 0)
        tiles = gl.sum(gl.where(found, counts, 0), 0)
        taken = GROUPS
        start, length = rows_of(cu, segment, num_segments, total, ORDER)
        within = work - gl.sum(gl.where(found, firsts, 0), 0) * heads
        head, tile = _share(within, tiles, length, heads, RESIDENT, LONE)
        unit = tile * GROUPS
    else:
        head = work // num_tiles
        tile = work % num_tiles
        segment = _search_segment(cu, num_segments, total, tile, BLOCK_M)
        taken = GROUPS
        start, length = rows_of(cu, segment, num_segments, total, ORDER)
        unit = (tile - start // BLOCK_M - segment) * GROUPS
    return head, segment, start, length, unit, taken


@gluon.jit
def draw(ticket_ptr, num_work):
    """The next piece of work, num_work or more where there is none. ticket_ptr holds 0 before and after a launch."""
    programs = gl.num_programs(0)
    work = num_work
    if num_work > programs:
        # The last ticket: all other programs have drawn theirs.
        work = programs + take_ticket(ticket_ptr, num_work - 1)
    return work


@gluon.jit
def draw_in_order(ticket_ptr, num_work):
    """The same where a program waits for what others do with earlier pieces: each piece is drawn, the first one too.

    So whoever has an earlier piece is running, and the one with the earliest of all waits for nobody.
    """
    # The last ticket: all other programs have drawn one of which there is no work.
    return take_ticket(ticket_ptr, num_work + gl.num_programs(0) - 1)


@gluon.jit
def pass_over(
    count, stage, phase, first_full, second_full,
    FIRST_EMPTY: gl.constexpr, SECOND_EMPTY: gl.constexpr, EMPTY: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Over stages that other warpgroups use. Their barriers lie at these shared addresses."""
    for _ in range(count):
        await_phase(first_full + stage * 8, phase)
        barrier_arrive(FIRST_EMPTY + stage, EMPTY)
        await_phase(second_full + stage * 8, phase)
        barrier_arrive(SECOND_EMPTY + stage, EMPTY)
        stage, wrapped = turn_around(stage, STAGES)
        phase = phase ^ wrapped
    return stage, phase
