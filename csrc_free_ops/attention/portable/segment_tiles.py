"""The list of tiles for attention over shared keys, made on the device: lengths are known nowhere else.

Segments come in the order of the keys that they see, most first, and within a segment the last tile comes first. Long
programs start early, and the launch ends evenly. The rows before and behind all segments form two more segments, as in
`tiles/segments.py`. Boundaries are clamped, and one that falls counts as the largest before it.

Fields are in `tiles/pieces.py`. Arrays lie behind each other: query tiles, segments, the first segment of each sequence
and its end, key tiles. A forward has query tiles alone.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.pieces import (
    COUNT,
    END_PIECE,
    FIRST_PIECE,
    KEY_COUNT,
    KEY_FIRST,
    KEY_LAST,
    KEYS,
    MOST_KEYS,
    NO_PIECE,
    POSITION,
    QUERY_FIELDS,
    ROW,
    SEGMENT_FIELDS,
    SEGMENT_KEYS,
    SEGMENT_ROW,
    SEGMENT_ROWS,
    SEGMENT_START,
    SEQUENCE,
    has_rows,
)
from csrc_free_ops.tiles.segments import LOOK, clamp_rows

SIZES = (
    "total_q", "total_k", "num_segments", "num_sequences", "num_pieces", "num_tiles", "num_key_tiles", "window_left",
)  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _starts(before, highest, total_q):
    """First rows of segments behind the boundaries `before`, where no earlier boundary is above `highest`."""
    return tl.maximum(tl.associative_scan(clamp_rows(before, total_q), 0, _larger), highest)


@triton.jit
def _ends(boundaries, starts, is_last, total_q):
    return tl.where(is_last, total_q, tl.minimum(tl.maximum(boundaries, starts), total_q))


@triton.jit
def _seen(limit, length):
    """How many keys of a sequence a segment sees."""
    return tl.maximum(tl.minimum(tl.minimum(limit, length), MOST_KEYS), 0)


@triton.jit
def _list_queries(
    cu_ptr, sequence_ptr, limit_ptr, bounds_ptr, start_ptr, tiles_ptr, segment,
    total_q, num_segments, num_sequences, num_pieces, num_tiles, window_left,
    HAS_LEFT: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the tiles of `segment`; 0 and num_segments + 1 are the rows outside of all segments.

    This function loads and stores. If an address depends on the result of another function, torch's mutation analysis
    takes the pointers that enter it for written (`tiles/segments.py`).
    """
    last = num_segments + 1
    is_segment = (segment > 0) & (segment < last)
    sequence = tl.load(sequence_ptr + segment - 1, mask=is_segment, other=-1)
    has_keys = (sequence >= 0) & (sequence < num_sequences)
    limit = tl.load(limit_ptr + segment - 1, mask=has_keys, other=0)
    own_bounds = bounds_ptr + sequence.to(tl.int64) * (num_pieces + 1)
    keys = _seen(limit, tl.load(own_bounds + num_pieces, mask=has_keys, other=0))
    offset, used, highest, start, end = 0, 0, 0, 0, 0
    for index in range(0, last + 1, LOOK):
        at = index + tl.arange(0, LOOK)
        starts = _starts(tl.load(cu_ptr + at - 1, mask=(at > 0) & (at <= last), other=0), highest, total_q)
        ends = _ends(tl.load(cu_ptr + at, mask=at <= num_segments, other=0), starts, at > num_segments, total_q)
        sequences = tl.load(sequence_ptr + at - 1, mask=(at > 0) & (at < last), other=-1)
        have_keys = (sequences >= 0) & (sequences < num_sequences)
        limits = tl.load(limit_ptr + at - 1, mask=have_keys, other=0)
        lengths_at = sequences.to(tl.int64) * (num_pieces + 1) + num_pieces
        other_keys = _seen(limits, tl.load(bounds_ptr + lengths_at, mask=have_keys, other=0))
        tiles = tl.where(at <= last, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
        is_before = (other_keys > keys) | ((other_keys == keys) & (at < segment))
        offset += tl.sum(tl.where(is_before, tiles, 0), 0)
        used += tl.sum(tiles, 0)
        start += tl.sum(tl.where(at == segment, starts, 0), 0)
        end += tl.sum(tl.where(at == segment, ends, 0), 0)
        highest = tl.maximum(highest, tl.max(tl.where(at <= num_segments, ends, 0), 0))
    rows = end - start
    first_position = keys - rows
    if HAS_STARTS:
        first_position = tl.load(start_ptr + segment - 1, mask=is_segment, other=0)
    own_tiles = (rows + BLOCK_M - 1) // BLOCK_M
    if own_tiles > 0:
        # The pieces with keys that a row of the segment may see.
        seen_from = 0
        if HAS_LEFT:
            seen_from = tl.maximum(first_position - window_left, 0)
        first_piece, end_piece = NO_PIECE, 0
        if keys > 0:
            for index in range(0, num_pieces, LOOK):
                at = index + tl.arange(0, LOOK)
                begin = tl.load(own_bounds + at, mask=at < num_pieces, other=0)
                behind = tl.load(own_bounds + at + 1, mask=at < num_pieces, other=0)
                is_seen = (begin < behind) & (begin < keys) & (behind > seen_from)
                first_piece = tl.minimum(first_piece, tl.min(tl.where(is_seen, at, NO_PIECE), 0))
                end_piece = tl.maximum(end_piece, tl.max(tl.where(is_seen, at + 1, 0), 0))
        owner = tl.where(is_segment, tl.maximum(sequence, 0), -1)
        for index in range(0, own_tiles, LOOK):
            at = index + tl.arange(0, LOOK)
            first = (own_tiles - 1 - at) * BLOCK_M
            pointers = tiles_ptr + offset + at
            mask = (at < own_tiles) & (offset + at < num_tiles)
            tl.store(pointers + ROW * num_tiles, start + first, mask=mask)
            tl.store(pointers + COUNT * num_tiles, tl.minimum(rows - first, BLOCK_M), mask=mask)
            tl.store(pointers + POSITION * num_tiles, first + first_position, mask=mask)
            tl.store(pointers + KEYS * num_tiles, keys, mask=mask)
            tl.store(pointers + SEQUENCE * num_tiles, owner, mask=mask)
            tl.store(pointers + FIRST_PIECE * num_tiles, tl.minimum(first_piece, end_piece), mask=mask)
            tl.store(pointers + END_PIECE * num_tiles, end_piece, mask=mask)
    if segment == last:
        for index in range(used, num_tiles, LOOK):
            at = index + tl.arange(0, LOOK)
            tl.store(tiles_ptr + COUNT * num_tiles + at, 0, mask=at < num_tiles)


@triton.jit
def _list_segments(
    cu_ptr, sequence_ptr, limit_ptr, bounds_ptr, start_ptr, segments_ptr, sequence,
    total_q, num_segments, num_sequences, num_pieces, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Store the segments that name `sequence`, in their order, and where its segments begin."""
    offset = 0
    for index in range(0, num_segments, LOOK):
        at = index + tl.arange(0, LOOK)
        named = tl.load(sequence_ptr + at, mask=at < num_segments, other=-1)
        offset += tl.sum(((named >= 0) & (named < sequence)).to(tl.int32), 0)
    starts_ptr = segments_ptr + SEGMENT_FIELDS * num_segments
    tl.store(starts_ptr + sequence, offset)
    highest = 0
    length = tl.load(bounds_ptr + tl.cast(sequence, tl.int64) * (num_pieces + 1) + num_pieces)
    for index in range(0, num_segments, LOOK):
        at = index + tl.arange(0, LOOK)
        inside = at < num_segments
        starts = _starts(tl.load(cu_ptr + at, mask=inside, other=0), highest, total_q)
        ends = _ends(tl.load(cu_ptr + at + 1, mask=inside, other=0), starts, at < 0, total_q)
        is_own = tl.load(sequence_ptr + at, mask=inside, other=-1) == sequence
        keys = _seen(tl.load(limit_ptr + at, mask=is_own, other=0), length)
        positions = keys - (ends - starts)
        if HAS_STARTS:
            positions = tl.load(start_ptr + at, mask=is_own, other=0)
        pointers = segments_ptr + offset + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pointers + SEGMENT_ROW * num_segments, starts, mask=is_own)
        tl.store(pointers + SEGMENT_ROWS * num_segments, ends - starts, mask=is_own)
        tl.store(pointers + SEGMENT_KEYS * num_segments, keys, mask=is_own)
        tl.store(pointers + SEGMENT_START * num_segments, positions, mask=is_own)
        offset += tl.sum(is_own.to(tl.int32), 0)
        highest = tl.maximum(highest, tl.max(tl.where(inside, ends, 0), 0))
    if sequence == num_sequences - 1:
        tl.store(starts_ptr + num_sequences, offset)


@triton.jit
def _list_keys(
    bounds_ptr, rows_ptr, tiles_ptr, tile, num_pieces, all_pieces, num_tiles, total_k, BLOCK_N: tl.constexpr
):
    """Store which pieces have rows in a tile of BLOCK_N rows of k."""
    first_row = tile.to(tl.int64) * BLOCK_N
    end_row = tl.minimum(first_row + BLOCK_N, total_k)
    first, last, count = NO_PIECE, 0, 0
    for index in range(0, all_pieces, LOOK):
        at = index + tl.arange(0, LOOK)
        offset = at.to(tl.int64) + at // num_pieces
        begin = tl.load(bounds_ptr + offset, mask=at < all_pieces, other=0)
        behind = tl.load(bounds_ptr + offset + 1, mask=at < all_pieces, other=0)
        found = has_rows(begin, behind, tl.load(rows_ptr + at, mask=at < all_pieces, other=0), first_row, end_row)
        first = tl.minimum(first, tl.min(tl.where(found, at, NO_PIECE), 0))
        last = tl.maximum(last, tl.max(tl.where(found, at, 0), 0))
        count += tl.sum(found.to(tl.int32), 0)
    tl.store(tiles_ptr + KEY_FIRST * num_tiles + tile, first)
    tl.store(tiles_ptr + KEY_LAST * num_tiles + tile, last)
    tl.store(tiles_ptr + KEY_COUNT * num_tiles + tile, count)


@triton.jit(do_not_specialize=SIZES)
def _segment_tiles_kernel(
    cu_ptr, sequence_ptr, limit_ptr, bounds_ptr, rows_ptr, start_ptr, tiles_ptr,
    total_q, total_k, num_segments, num_sequences, num_pieces, num_tiles, num_key_tiles, window_left,
    HAS_LEFT: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (segments and two more, and with HAS_KEYS sequences and key tiles): the list of tiles.

    start_ptr is read only with HAS_STARTS; without, segments end at the last key that they see.
    """
    program = tl.program_id(0)
    if program < num_segments + 2:
        _list_queries(
            cu_ptr, sequence_ptr, limit_ptr, bounds_ptr, start_ptr, tiles_ptr, program,
            total_q, num_segments, num_sequences, num_pieces, num_tiles, window_left, HAS_LEFT, HAS_STARTS, BLOCK_M,
        )  # fmt: skip
    if HAS_KEYS:
        program -= num_segments + 2
        segments_ptr = tiles_ptr + QUERY_FIELDS * num_tiles
        if (program >= 0) & (program < num_sequences):
            _list_segments(
                cu_ptr, sequence_ptr, limit_ptr, bounds_ptr, start_ptr, segments_ptr, program,
                total_q, num_segments, num_sequences, num_pieces, HAS_STARTS,
            )  # fmt: skip
        program -= num_sequences
        keys_ptr = segments_ptr + SEGMENT_FIELDS * num_segments + num_sequences + 1
        if program >= 0:
            _list_keys(
                bounds_ptr, rows_ptr, keys_ptr, program, num_pieces, num_sequences * num_pieces, num_key_tiles, total_k,
                BLOCK_N,
            )  # fmt: skip
