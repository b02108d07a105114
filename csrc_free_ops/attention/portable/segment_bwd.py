"""Attention backward over shared keys in portable Triton: two kernels without atomics, with the maths of `bwd.py`.

The dq kernel owns query rows and passes over the pieces of their sequence, as the forward does; it stores delta. The
dkdv kernel owns BLOCK_N rows of k, whatever pieces hold them. It loops over these pieces, then over the segments of
each sequence, then over the heads of a group. Each loop has a fixed order. It stores once, also rows that no segment
sees.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.bwd import accumulate_dq
from csrc_free_ops.attention.portable.bwd_dkdv import accumulate_dkdv
from csrc_free_ops.attention.portable.fwd import STRIDES
from csrc_free_ops.attention.portable.segment_fwd import SIZES
from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.pieces import (
    COUNT,
    END_PIECE,
    FIRST_PIECE,
    KEY_COUNT,
    KEY_FIRST,
    KEY_LAST,
    KEYS,
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
    key_span,
    piece_span,
)
from csrc_free_ops.tiles.rows import (
    add_rows,
    column_starts,
    delta_of_rows,
    load_rows,
    row_base,
    row_step,
    scale_rows,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.score_mod import head_score_mod, sequence_score_mod
from csrc_free_ops.tiles.scores import exponent_of_norm
from csrc_free_ops.tiles.segments import LOOK

KEY_SIZES = (
    "total_q", "total_k", "num_tiles", "num_segments", "num_sequences", "num_key_tiles", "num_pieces", "k_heads",
    "window_left", "window_right", *STRIDES,
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _segment_attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, tiles_ptr, bounds_ptr, rows_ptr, slopes_ptr, seed_ptr,
    delta_ptr, dq_ptr,
    stride_qh, stride_kh, stride_vh, stride_oh, stride_doh,
    stride_qt, stride_kt, stride_vt, stride_ot, stride_dot, stride_dqt, stride_slopes,
    total_q, total_k, num_tiles, num_pieces, heads, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows times heads): delta and dq. dlse_ptr is read only with HAS_DLSE."""
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    count = tl.load(tiles_ptr + COUNT * num_tiles + tile)
    if count <= 0:
        return
    first_row = tl.load(tiles_ptr + ROW * num_tiles + tile)
    position = tl.load(tiles_ptr + POSITION * num_tiles + tile)
    keys = tl.load(tiles_ptr + KEYS * num_tiles + tile)
    sequence = tl.load(tiles_ptr + SEQUENCE * num_tiles + tile)
    piece = tl.load(tiles_ptr + FIRST_PIECE * num_tiles + tile)
    end_piece = tl.load(tiles_ptr + END_PIECE * num_tiles + tile)

    score_mod = sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS)
    score_mod = head_score_mod(score_mod, slopes_ptr, None, sequence, head, stride_slopes, SCORE_MODS, keys > 0)
    STEP_K = row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
    STEP_V = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT)
    STEP_Q = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT)
    STEP_O = row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
    STEP_DO = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    STEP_DQ = row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT)
    scale = tl.cast(scale, tl.float32)
    k_head = head // GROUP
    starts = column_starts(k_head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_M)
    inside = local < count
    q_base = row_base(q_ptr, first_row, head, stride_qh, STEP_Q, STRIDE_UNIT)
    out_base = row_base(out_ptr, first_row, head, stride_oh, STEP_O, STRIDE_UNIT)
    dout_base = row_base(dout_ptr, first_row, head, stride_doh, STEP_DO, STRIDE_UNIT)
    q = load_rows(q_base, starts, local, count, STEP_Q, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    dout = load_rows(dout_base, starts, local, count, STEP_DO, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    out = load_rows(out_base, starts, local, count, STEP_O, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    statistics = tl.cast(head, tl.int64) * total_q + first_row + local
    lse = tl.load(lse_ptr + statistics, mask=inside, other=float("-inf"))
    delta = delta_of_rows(out, dout, lse, dlse_ptr + statistics, inside, HAS_DLSE)
    tl.store(delta_ptr + statistics, delta, mask=inside)
    lse = exponent_of_norm(lse, q[0].dtype == tl.float32)
    positions = position + local
    dq = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)

    low, full_low, full_high, high = block_span(
        position, position + count - 1, 0, window_left, window_right, keys, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    piece_bounds = bounds_ptr + tl.maximum(sequence, 0).to(tl.int64) * (num_pieces + 1)
    piece_rows = rows_ptr + tl.maximum(sequence, 0).to(tl.int64) * num_pieces
    for index in range(piece, end_piece):
        begin = tl.load(piece_bounds + index).to(tl.int64)
        end = tl.load(piece_bounds + index + 1).to(tl.int64)
        row = tl.load(piece_rows + index).to(tl.int64)
        first_key, piece_low, piece_full_low, piece_full_high, piece_high = piece_span(
            low, full_low, full_high, high, begin, end, row, total_k, BLOCK_N
        )
        k_base = row_base(k_ptr, row - begin, k_head, stride_kh, STEP_K, STRIDE_UNIT)
        v_base = row_base(v_ptr, row - begin, k_head, stride_vh, STEP_V, STRIDE_UNIT)
        dq = accumulate_dq(
            dq, q, dout, lse, delta, positions, k_base, v_base, starts, piece_low, piece_full_low, 0, piece_high,
            scale, score_mod, window_left, window_right, STEP_K, STEP_V, HEAD_DIM, MAIN, TAIL,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True, first_key,
        )  # fmt: skip
        dq = accumulate_dq(
            dq, q, dout, lse, delta, positions, k_base, v_base, starts, piece_full_low, piece_full_high, 0, piece_high,
            scale, score_mod, window_left, window_right, STEP_K, STEP_V, HEAD_DIM, MAIN, TAIL,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, False, first_key,
        )  # fmt: skip
        dq = accumulate_dq(
            dq, q, dout, lse, delta, positions, k_base, v_base, starts, piece_full_high, piece_high, 0, piece_high,
            scale, score_mod, window_left, window_right, STEP_K, STEP_V, HEAD_DIM, MAIN, TAIL,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True, first_key,
        )  # fmt: skip
    dq_base = row_base(dq_ptr, first_row, head, HEAD_DIM // STRIDE_UNIT, STEP_DQ, STRIDE_UNIT)
    store_rows(dq_base, starts, local, count, scale_rows(dq, scale), STEP_DQ, HEAD_DIM, MAIN, TAIL)


@triton.jit
def _next_piece(bounds_ptr, rows_ptr, piece, last, num_pieces, first_row, end_row):
    """The next of the pieces up to `last`, which is one, that has rows in first_row .. end_row-1."""
    found = NO_PIECE
    index = piece + 1
    while (found == NO_PIECE) & (index <= last):
        at = index + tl.arange(0, LOOK)
        bounds_offset = at.to(tl.int64) + at // num_pieces
        begin = tl.load(bounds_ptr + bounds_offset, mask=at <= last, other=0)
        behind = tl.load(bounds_ptr + bounds_offset + 1, mask=at <= last, other=0)
        is_next = has_rows(begin, behind, tl.load(rows_ptr + at, mask=at <= last, other=0), first_row, end_row)
        found = tl.min(tl.where(is_next, at, NO_PIECE), 0)
        index += LOOK
    return found


@triton.jit(do_not_specialize=KEY_SIZES)
def _segment_attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, tiles_ptr, bounds_ptr, rows_ptr, slopes_ptr, seed_ptr,
    dk_ptr, dv_ptr,
    stride_qh, stride_kh, stride_vh, stride_doh,
    stride_qt, stride_kt, stride_vt, stride_dot, stride_dkt, stride_slopes,
    total_q, total_k, num_tiles, num_segments, num_sequences, num_key_tiles, num_pieces, k_heads,
    scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_DOT: tl.constexpr,
    STRIDE_DKT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N rows of k times key heads): dk and dv, in the dtype of their memory."""
    tile, k_head = tl.program_id(0) // k_heads, tl.program_id(0) % k_heads
    segments_ptr = tiles_ptr + QUERY_FIELDS * num_tiles
    starts_ptr = segments_ptr + SEGMENT_FIELDS * num_segments
    keys_ptr = starts_ptr + num_sequences + 1
    piece = tl.load(keys_ptr + KEY_FIRST * num_key_tiles + tile)
    last_piece = tl.load(keys_ptr + KEY_LAST * num_key_tiles + tile)
    count = tl.load(keys_ptr + KEY_COUNT * num_key_tiles + tile)

    STEP_Q = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT)
    STEP_K = row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
    STEP_V = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT)
    STEP_DO = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    STEP_DK = row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT)
    scale = tl.cast(scale, tl.float32)
    starts = column_starts(k_head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_N)
    first_row = tile * BLOCK_N
    remaining = tl.minimum(total_k - first_row, BLOCK_N)
    k_base = row_base(k_ptr, first_row, k_head, stride_kh, STEP_K, STRIDE_UNIT)
    v_base = row_base(v_ptr, first_row, k_head, stride_vh, STEP_V, STRIDE_UNIT)
    k = load_rows(k_base, starts, local, remaining, STEP_K, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_N, D]
    v = load_rows(v_base, starts, local, remaining, STEP_V, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_N, D]
    dk = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
    dv = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
    # In fp32 each segment and head has its own accumulators: a shorter chain of additions rounds less.
    SUM_PER_PASS: tl.constexpr = k[0].dtype == tl.float32
    for index in tl.range(0, count, disable_licm=True):
        sequence = piece // num_pieces
        bounds_offset = piece.to(tl.int64) + sequence
        begin = tl.load(bounds_ptr + bounds_offset)
        end = tl.load(bounds_ptr + bounds_offset + 1)
        row = tl.load(rows_ptr + piece)
        # Key numbers of the tile's first and last row, as this piece counts them.
        first_key = first_row + begin - row
        last_key = first_key + remaining - 1
        cols = first_key + local
        seen_from = tl.maximum(begin, 0)
        score_mod = sequence_score_mod(seed_ptr, sequence, k_heads * GROUP, softcap, dropout, SCORE_MODS)
        segment = tl.load(starts_ptr + sequence)
        # Segments of the sequence, and of each all heads of the group.
        passes = (tl.load(starts_ptr + sequence + 1) - segment) * GROUP
        # Loop invariants stay in the loop, because hoisted ones would spill.
        for iteration in tl.range(0, passes, disable_licm=True):
            segment_ptr = segments_ptr + segment + iteration // GROUP
            q_start = tl.load(segment_ptr + SEGMENT_ROW * num_segments)
            q_length = tl.load(segment_ptr + SEGMENT_ROWS * num_segments)
            keys = tl.load(segment_ptr + SEGMENT_KEYS * num_segments)
            q_position = tl.load(segment_ptr + SEGMENT_START * num_segments)
            seen_to = tl.minimum(end, keys)
            low, full_low, full_high, high = key_span(
                first_key, last_key, seen_from, seen_to, -q_position, window_right, window_left, q_length,
                HAS_RIGHT, HAS_LEFT, BLOCK_M,
            )  # fmt: skip
            head = k_head * GROUP + iteration % GROUP
            own_score_mod = head_score_mod(
                score_mod, slopes_ptr, None, sequence, head, stride_slopes, SCORE_MODS
            )  # fmt: skip
            q_base = row_base(q_ptr, q_start, head, stride_qh, STEP_Q, STRIDE_UNIT)
            dout_base = row_base(dout_ptr, q_start, head, stride_doh, STEP_DO, STRIDE_UNIT)
            statistics = tl.cast(head, tl.int64) * total_q + q_start
            lse_base = lse_ptr + statistics
            delta_base = delta_ptr + statistics
            if SUM_PER_PASS:
                dk_before, dv_before = dk, dv
                dk = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
                dv = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, cols, first_key, q_base, dout_base, lse_base, delta_base, starts, low, full_low,
                q_length, q_position, scale, own_score_mod, window_left, window_right,
                STEP_Q, STEP_DO, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION,
                GROUP, BLOCK_M, True, (seen_from, seen_to),
            )  # fmt: skip
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, cols, first_key, q_base, dout_base, lse_base, delta_base, starts, full_low, full_high,
                q_length, q_position, scale, own_score_mod, window_left, window_right,
                STEP_Q, STEP_DO, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION,
                GROUP, BLOCK_M, False, (seen_from, seen_to),
            )  # fmt: skip
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, cols, first_key, q_base, dout_base, lse_base, delta_base, starts, full_high, high,
                q_length, q_position, scale, own_score_mod, window_left, window_right,
                STEP_Q, STEP_DO, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION,
                GROUP, BLOCK_M, True, (seen_from, seen_to),
            )  # fmt: skip
            if SUM_PER_PASS:
                dk = add_rows(dk_before, dk)
                dv = add_rows(dv_before, dv)
        if index + 2 < count:
            piece = _next_piece(bounds_ptr, rows_ptr, piece, last_piece, num_pieces, first_row, first_row + remaining)
        else:
            piece = last_piece
    dk_base = row_base(dk_ptr, first_row, k_head, HEAD_DIM // STRIDE_UNIT, STEP_DK, STRIDE_UNIT)
    dv_base = row_base(dv_ptr, first_row, k_head, HEAD_DIM // STRIDE_UNIT, STEP_DK, STRIDE_UNIT)
    store_rows(dk_base, starts, local, remaining, scale_rows(dk, scale), STEP_DK, HEAD_DIM, MAIN, TAIL)
    store_rows(dv_base, starts, local, remaining, dv, STEP_DK, HEAD_DIM, MAIN, TAIL)
