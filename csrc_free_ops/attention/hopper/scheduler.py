"""The tile scheduler of the Hopper attention kernels.

Programs are persistent: one for each multiprocessor, and each takes tiles from a shared counter. A tile has up to
64 GROUPS rows of one segment and head, 64 for each consumer warpgroup. Rows are queries in the forward and keys in the
backward. Lengths of segments are known on the device alone, so a program computes what a tile index stands for:

    SINGLE      one segment: as EVEN, but tiles of the last wave are lower if all heads fit one wave
    EVEN        one segment: tiles of one height, for as many heads at a time as the L2 cache holds, or for one head
    DENSE       a batch of sequences of one length, as EVEN; its heads count as those of one segment
    DENSE_CUT   a batch, as SINGLE
    DENSE_ENDS  a batch whose later rows see more keys, with 1 to 2 blocks of 64 rows for each program: a tile has a
                block from either end of its sequence, so that all tiles take about as long
    BY_LENGTH   few segments, the longest first, so that the last tiles are small; each segment as EVEN
    CLOSED_FORM many segments, one head after the other, by the closed form of `tiles.segments`
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core

from csrc_free_ops.tiles.hopper.memory import increment_counter
from csrc_free_ops.tiles.hopper.versions import aggregate
from csrc_free_ops.tiles.hopper.warpgroup import made_anew
from csrc_free_ops.tiles.segments import clamp_rows

# Segments that one warp ranks by length, and boundaries that it loads at once in a search and, of each direction, in a
# survey: a producer of the backward has fewer registers left.
RANKED, SEARCHED = gl.constexpr(32), gl.constexpr(128)
SURVEYED_FORWARD, SURVEYED_BACKWARD = gl.constexpr(128), gl.constexpr(64)
# Bytes that the operands of concurrent tiles may take of the L2 cache, 50 MiB on H100 and H200: in general, and for one
# segment. There more heads at a time fill the last wave, or have less to wait for in order. Heads of at least ALONE
# bytes run one at a time if not all heads fit. Measured in docs/attention.md.
CACHED, CACHED_OF_ONE, ALONE = (gl.constexpr(size * 2**20) for size in (16, 32, 2))
# Orders of tiles.
SINGLE, EVEN, BY_LENGTH, CLOSED_FORM, DENSE, DENSE_CUT, DENSE_ENDS = (gl.constexpr(order) for order in range(7))


@gluon.constexpr_function
def has_one_segment(order):
    return order in (SINGLE, EVEN)


@gluon.constexpr_function
def is_dense(order):
    return order in (DENSE, DENSE_CUT, DENSE_ENDS)


@gluon.constexpr_function
def has_many_segments(order):
    return order in (BY_LENGTH, CLOSED_FORM)


@gluon.jit
def head_count(num_segments, HEADS: gl.constexpr, ORDER: gl.constexpr):
    """Heads of a segment. A batch of num_segments sequences counts as one segment with all their heads."""
    if is_dense(ORDER):
        return num_segments * HEADS
    else:
        return HEADS


@gluon.jit
def boundaries(cu_ptr, ORDER: gl.constexpr):
    """`cu` of the functions below: for one segment both boundaries, which a kernel can load before all else."""
    if has_one_segment(ORDER):
        first = gl.load(cu_ptr)
        return first, gl.maximum(gl.load(cu_ptr + 1), first)
    elif is_dense(ORDER):
        return 0, 0
    else:
        return cu_ptr


@gluon.jit
def _survey(cu_ptr, num_segments, total, SURVEYED: gl.constexpr):
    """(last segment that has rows, segment before the first boundary that falls, rows of the longest segment)."""
    last, most, longest, index = 0, 0, 0, 0
    fall = num_segments
    while index <= num_segments:
        # Not kept after this, because a producer has few registers.
        local = made_anew(gl.arange(0, SURVEYED, gl.BlockedLayout([SURVEYED // 32], [32], [1], [0])))
        at = index + local  # [SURVEYED]
        start = clamp_rows(gl.load(cu_ptr + at, mask=at <= num_segments, other=0), total)
        end = clamp_rows(gl.load(cu_ptr + at + 1, mask=at < num_segments, other=0), total)
        fall = gl.minimum(fall, gl.min(gl.where(end < start, at, num_segments), 0))
        longest = gl.maximum(longest, gl.max(end - start, 0))
        highest = gl.max(start, 0)
        last = gl.where(highest > most, gl.min(gl.where(start == highest, at, num_segments), 0), last)
        most = gl.maximum(most, highest)
        index += SURVEYED
    return last, fall, longest


@gluon.jit
def survey_segments(
    cu, streamed_cu, num_segments, total, total_streamed, ORDER: gl.constexpr, SURVEYED: gl.constexpr
):  # fmt: skip
    """`segments` of a scheduler, and the rows of the longest segment.

    `segments` is num_segments, or of several the last that has rows, and ~ that if a boundary falls. No program looks
    for tiles in the segments behind the last that has rows, so boundaries behind it may fall, in both tensors. A
    streamed boundary before it that falls counts even behind all streamed rows: a later one may rise again.
    """
    segments = num_segments
    longest = total
    if has_many_segments(ORDER):
        last, fall, longest = _survey(cu, num_segments, total, SURVEYED)
        if streamed_cu.to(gl.int64, bitcast=True) != cu.to(gl.int64, bitcast=True):
            _, streamed_fall, _ = _survey(streamed_cu, num_segments, total_streamed, SURVEYED)
            fall = gl.minimum(fall, streamed_fall)
        segments = last ^ -(fall < last).to(gl.int32)
    return segments, longest


@gluon.jit
def tiles_besides_short(
    cu, segments, longest, total, tiles_per_head, ROWS: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """(number of tiles of a head to look at, the first of them) for all rows but those of segments of up to ROWS rows.

    If there is no longer segment, these are the tiles behind the last segment.
    """
    first = 0
    if (longest <= ROWS) & (segments >= 0):
        last_end = clamp_rows(gl.load(cu + segments), total)
        first = gl.where(last_end < total, last_end // BLOCK_M + segments + 1, tiles_per_head)
        first = gl.where(gl.load(cu) > 0, 0, first)
    return tiles_per_head - first, first


@gluon.jit
def last_segment(segments, ORDER: gl.constexpr):
    return segments ^ (segments >> 31) if has_many_segments(ORDER) else segments


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
        start = clamp_rows(start, total)
        length = gl.maximum(clamp_rows(end, total) - start, 0)
        length = gl.where(segment <= num_segments + 1, length, 0)
    return start, length


@gluon.jit
def is_inside(segment, num_segments):
    """Whether this is a segment, and not the rows before the first or after the last one."""
    return (segment > 0) & (segment <= num_segments)


@gluon.jit
def _rank_segments(cu, num_segments, total, BLOCK_M: gl.constexpr, ORDER: gl.constexpr):
    """For at most RANKED - 2 segments, the longest first: each one's first tile and its number of tiles.

    Segments of equal length keep their order. Rows outside of segments see no key, so they come last.
    """
    segment = gl.arange(0, RANKED, gl.BlockedLayout([1], [32], [1], [0]))  # [RANKED]
    rows = rows_of(cu, segment, num_segments, total, ORDER)[1]
    length = gl.where(is_inside(segment, num_segments), rows, -1)
    counts = (rows + BLOCK_M - 1) // BLOCK_M
    first = gl.zeros_like(rows)
    for rival in range(num_segments + 2):
        # The lane that holds the rival's length is nearer than memory.
        rival_length = gl.sum(gl.where(segment == rival, length, 0), 0)
        rival_count = gl.sum(gl.where(segment == rival, counts, 0), 0)
        is_ahead = (rival_length > length) | ((rival_length == length) & (rival < segment))
        first += gl.where(is_ahead, rival_count, 0)
    return segment, first, counts


@gluon.jit
def _search_segment(cu, num_segments, total, tile, BLOCK_M: gl.constexpr):
    segment = 0
    end = num_segments + 2
    while end - segment > 1:
        distance = (end - segment + SEARCHED - 1) // SEARCHED
        probe = segment + gl.arange(0, SEARCHED, gl.BlockedLayout([SEARCHED // 32], [32], [1], [0])) * distance
        found = gl.load(cu + probe - 1, mask=(probe > 0) & (probe < end), other=0)  # [SEARCHED]
        first_tile = clamp_rows(found, total) // BLOCK_M + probe
        count = gl.sum(((probe < end) & (first_tile <= tile)).to(gl.int32), 0)
        segment += gl.maximum(count - 1, 0) * distance
        end = gl.minimum(end, segment + distance)
    return segment


@gluon.jit
def _split_last_wave(row_blocks, heads, programs, GROUPS: gl.constexpr):
    """Full tiles of a head of `row_blocks` times 64 rows, and 64-row blocks of each lower tile that follows them.

    Full waves have full tiles. The rows left get the lowest tiles that still fit one wave.
    """
    waves = row_blocks * heads // (GROUPS * programs)
    full = gl.minimum(waves * programs // heads, row_blocks // GROUPS)
    left = row_blocks - full * GROUPS
    low = GROUPS
    for height in gl.static_range(GROUPS - 1, 0, -1):
        if (left + height - 1) // height * heads <= programs:
            low = height
    return full, low


@gluon.jit
def _tiles_of_one(start, length, total, BLOCK_M: gl.constexpr):
    """Full tiles of the one segment, of the rows before it and of the rows after it."""
    inside = (length + BLOCK_M - 1) // BLOCK_M
    before = (start + BLOCK_M - 1) // BLOCK_M
    return inside, before, (total - start - length + BLOCK_M - 1) // BLOCK_M


@gluon.jit
def _segment_of_one(tile, inside, before):
    """The tile's segment and that segment's first tile. Tiles of segment 1 come first, then 0 and 2."""
    segment = gl.where(tile < inside, 1, gl.where(tile - inside < before, 0, 2))
    return segment, gl.where(segment == 1, 0, inside) + gl.where(segment == 2, before, 0)


@gluon.jit
def _heads_together(length, heads, CACHED_ROWS: gl.constexpr, ALONE_ROWS: gl.constexpr):
    """How many heads of a segment run at a time: 1 from ALONE_ROWS rows on, else an even share within CACHED_ROWS."""
    most = gl.minimum(gl.maximum(CACHED_ROWS // gl.maximum(length, 1), 1), heads)
    passes = (heads + most - 1) // most
    return gl.where(length < ALONE_ROWS, (heads + passes - 1) // passes, 1)


@gluon.jit
def _head_and_tile(index, tiles, length, heads, CACHED_ROWS: gl.constexpr, ALONE_ROWS: gl.constexpr):
    """Head and tile of an index among the tiles of a segment. Heads that run together have their first tiles first."""
    head = index % heads
    tile = index // heads
    if length > CACHED_ROWS // heads:
        together = _heads_together(length, heads, CACHED_ROWS, ALONE_ROWS)
        first_head = index // (together * tiles) * together
        within = index % (together * tiles)
        together = gl.minimum(together, heads - first_head)
        head = first_head + within % together
        tile = within // together
    return head, tile


@gluon.constexpr_function
def _as_value(x):
    """A constexpr function takes constants out of their wrappers; fields of an aggregate need them back."""
    if isinstance(x, core.tuple):
        return core.tuple([_as_value(each) for each in x])
    return x if isinstance(x, core.base_value) else gl.constexpr(x)


@aggregate
class TileScheduler:
    """All tiles of all heads, found by an index. It holds no state: `next_tile` gives indices."""

    cu: core.base_value  # what `boundaries` returns
    segments: core.base_value  # what `survey_segments` returns
    total: core.base_value  # rows of the tensor, or of a sequence of a batch
    heads: core.base_value  # `head_count`
    GROUPS: gl.constexpr
    ORDER: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, cu, segments, total, heads, GROUPS, ORDER):
        self.cu = _as_value(cu)
        self.segments = _as_value(segments)
        self.total = _as_value(total)
        self.heads = _as_value(heads)
        self.GROUPS = gl.constexpr(GROUPS)
        self.ORDER = gl.constexpr(ORDER)

    @gluon.jit
    def split(self):
        """Tiles of one head, and the values by which `locate` tells them apart."""
        BLOCK_M: gl.constexpr = 64 * self.GROUPS
        num_segments = last_segment(self.segments, self.ORDER)
        if self.ORDER == DENSE or self.ORDER == DENSE_ENDS:
            tiles_per_head = (self.total + BLOCK_M - 1) // BLOCK_M
            split = (tiles_per_head,)
        elif self.ORDER == DENSE_CUT:
            row_blocks = (self.total + 63) // 64
            full, low = _split_last_wave(row_blocks, self.heads, gl.num_programs(0), self.GROUPS)
            tiles_per_head = full + (row_blocks - full * self.GROUPS + low - 1) // low
            split = (full, low)
        elif self.ORDER == SINGLE:
            start, length = rows_of(self.cu, 1, num_segments, self.total, self.ORDER)
            row_blocks = (length + 63) // 64
            full, low = _split_last_wave(row_blocks, self.heads, gl.num_programs(0), self.GROUPS)
            inside = full + (row_blocks - full * self.GROUPS + low - 1) // low
            _, before, after = _tiles_of_one(start, length, self.total, BLOCK_M)
            tiles_per_head = inside + before + after
            split = (full, low, inside, before)
        elif self.ORDER == EVEN:
            start, length = rows_of(self.cu, 1, num_segments, self.total, self.ORDER)
            inside, before, after = _tiles_of_one(start, length, self.total, BLOCK_M)
            tiles_per_head = inside + before + after
            split = (tiles_per_head,)
        elif self.ORDER == BY_LENGTH:
            segments, first, counts = _rank_segments(self.cu, num_segments, self.total, BLOCK_M, self.ORDER)
            tiles_per_head = gl.sum(counts, 0)
            if self.segments < 0:
                tiles_per_head = self.total // BLOCK_M + num_segments + 2
            split = (segments, first, counts)
        else:
            tiles_per_head = self.total // BLOCK_M + num_segments + 2
            split = (tiles_per_head,)
        return tiles_per_head, split

    @gluon.jit
    def locate(self, index, tiles_per_head, split, CACHED_ROWS: gl.constexpr, ALONE_ROWS: gl.constexpr):
        """Tile `index`: head, segment, start and length of the segment, the tile's first 64-row block and its number.

        The tile is empty if its first block lies past the length. CACHED_ROWS rows of a head fit the L2 cache; heads of
        at least ALONE_ROWS rows run one at a time if not all heads fit.
        """
        BLOCK_M: gl.constexpr = 64 * self.GROUPS
        num_segments = last_segment(self.segments, self.ORDER)
        GROUPS: gl.constexpr = self.GROUPS
        total = self.total
        heads = self.heads
        if self.ORDER == DENSE_ENDS:
            # The block at the end. The other warpgroup's block is as far from the start.
            head, tile = index % heads, index // heads
            segment, start, length, block, num_blocks = 1, 0, total, tiles_per_head * GROUPS - 1 - tile, 1
        elif self.ORDER == DENSE:
            head, tile = _head_and_tile(index, tiles_per_head, total, heads, CACHED_ROWS, ALONE_ROWS)
            segment, start, length, block, num_blocks = 1, 0, total, tile * GROUPS, GROUPS
        elif self.ORDER == DENSE_CUT:
            full, low = split
            head, tile = _head_and_tile(index, tiles_per_head, total, heads, CACHED_ROWS, ALONE_ROWS)
            segment, start, length = 1, 0, total
            num_blocks = gl.where(tile >= full, low, GROUPS)
            block = gl.where(tile < full, tile * GROUPS, full * GROUPS + (tile - full) * low)
        elif self.ORDER == SINGLE:
            full, low, inside, before = split
            _, length = rows_of(self.cu, 1, num_segments, total, self.ORDER)
            head, tile = _head_and_tile(index, tiles_per_head, length, heads, CACHED_ROWS, ALONE_ROWS)
            segment, first_tile = _segment_of_one(tile, inside, before)
            num_blocks = gl.where((segment == 1) & (tile >= full), low, GROUPS)
            block_outside = (tile - first_tile) * GROUPS
            block_inside = gl.where(tile < full, tile * GROUPS, full * GROUPS + (tile - full) * low)
            block = gl.where(segment == 1, block_inside, block_outside)
            start, length = rows_of(self.cu, segment, num_segments, total, self.ORDER)
        elif self.ORDER == EVEN:
            num_blocks = GROUPS
            start, length = rows_of(self.cu, 1, num_segments, total, self.ORDER)
            inside, before, _ = _tiles_of_one(start, length, total, BLOCK_M)
            head, tile = _head_and_tile(index, tiles_per_head, length, heads, CACHED_ROWS, ALONE_ROWS)
            segment, first_tile = _segment_of_one(tile, inside, before)
            block = (tile - first_tile) * GROUPS
            start, length = rows_of(self.cu, segment, num_segments, total, self.ORDER)
        elif self.ORDER == BY_LENGTH:
            segments, firsts, counts = split
            found = (firsts <= index // heads) & (index // heads < firsts + counts)
            segment = gl.sum(gl.where(found, segments, 0), 0)
            tiles = gl.sum(gl.where(found, counts, 0), 0)
            num_blocks = GROUPS
            start, length = rows_of(self.cu, segment, num_segments, total, self.ORDER)
            within = index - gl.sum(gl.where(found, firsts, 0), 0) * heads
            head, tile = _head_and_tile(within, tiles, length, heads, CACHED_ROWS, ALONE_ROWS)
            block = tile * GROUPS
        else:
            head = index // tiles_per_head
            tile = index % tiles_per_head
            segment = _search_segment(self.cu, num_segments, total, tile, BLOCK_M)
            num_blocks = GROUPS
            start, length = rows_of(self.cu, segment, num_segments, total, self.ORDER)
            block = (tile - start // BLOCK_M - segment) * GROUPS
        return head, segment, start, length, block, num_blocks

    @gluon.jit
    def locate_falling(self, index, tiles_per_head, streamed_cu, total_streamed):
        """`locate`, and start and length of the segment's streamed rows, where a boundary falls.

        A boundary that falls counts as the largest before it, so all are looked at, one after the other.
        """
        BLOCK_M: gl.constexpr = 64 * self.GROUPS
        num_segments = last_segment(self.segments, self.ORDER)
        tile = index % tiles_per_head
        segment, start, latest = 0, 0, 0
        for boundary in range(num_segments + 1):
            latest = gl.maximum(latest, clamp_rows(gl.load(self.cu + boundary), self.total))
            if latest // BLOCK_M + boundary + 1 <= tile:
                segment = boundary + 1
                start = latest
        streamed_start = 0
        for boundary in range(segment):
            streamed_start = gl.maximum(streamed_start, clamp_rows(gl.load(streamed_cu + boundary), total_streamed))
        end = gl.load(self.cu + segment, mask=segment <= num_segments, other=self.total)
        streamed_end = gl.load(streamed_cu + segment, mask=segment <= num_segments, other=0)
        length = gl.maximum(clamp_rows(end, self.total) - start, 0)
        streamed_length = gl.maximum(clamp_rows(streamed_end, total_streamed) - streamed_start, 0)
        block = (tile - start // BLOCK_M - segment) * self.GROUPS
        return index // tiles_per_head, segment, start, length, block, streamed_start, streamed_length


@gluon.jit
def next_tile(counter_ptr, num_tiles):
    """Take the next index from the counter; num_tiles or more mean the end. The first tile is the program's own id.

    The counter is 0 before and after a launch: whoever takes the last index resets it.
    """
    programs = gl.num_programs(0)
    index = num_tiles
    if num_tiles > programs:
        index = programs + increment_counter(counter_ptr, num_tiles - 1)
    return index


@gluon.jit
def next_tile_in_order(counter_ptr, num_tiles):
    """`next_tile` for programs that wait for earlier tiles: the first tile comes from the counter too.

    Every earlier tile then has a program that already runs, and the earliest waits for none. So no wait is forever.
    """
    return increment_counter(counter_ptr, num_tiles + gl.num_programs(0) - 1)
