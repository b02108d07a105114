"""Attention forward over shared keys in portable Triton: several segments of queries may see one sequence of keys.

The maths is that of `fwd.py`. A program owns BLOCK_M query rows of a head. It passes over the pieces of its sequence
(`tiles/pieces.py`) and reads their keys in place. The list of tiles comes from `segment_tiles.py`.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.fwd import STRIDES, attend_blocks
from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.pieces import (
    COUNT,
    END_PIECE,
    FIRST_PIECE,
    KEYS,
    POSITION,
    ROW,
    SEQUENCE,
    piece_span,
)
from csrc_free_ops.tiles.rows import column_starts, load_rows, row_base, row_step, store_rows, zero_rows
from csrc_free_ops.tiles.score_mod import SINKS, head_score_mod, sequence_score_mod, without_sink
from csrc_free_ops.tiles.softmax import normalize

SIZES = ("total_q", "total_k", "num_tiles", "num_pieces", "heads", "window_left", "window_right", *STRIDES)


@triton.jit(do_not_specialize=SIZES)
def _segment_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, bounds_ptr, rows_ptr, slopes_ptr, sinks_ptr, seed_ptr,
    stride_qh, stride_kh, stride_vh, stride_qt, stride_kt, stride_vt, stride_ot, stride_slopes,
    total_q, total_k, num_tiles, num_pieces, heads, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows times heads). Heads are innermost, so long tiles of all heads start first."""
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
    score_mod = head_score_mod(
        score_mod, slopes_ptr, sinks_ptr, sequence, head, stride_slopes, SCORE_MODS, keys > 0
    )  # fmt: skip
    if SINKS & SCORE_MODS:
        score_mod = without_sink(score_mod, sequence < 0)
    STEP_K = row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
    STEP_V = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT)
    STEP_Q = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT)
    STEP_O = row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
    scale = tl.cast(scale, tl.float32)
    k_head = head // GROUP
    starts = column_starts(k_head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_M)
    q_base = row_base(q_ptr, first_row, head, stride_qh, STEP_Q, STRIDE_UNIT)
    q = load_rows(q_base, starts, local, count, STEP_Q, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    positions = position + local
    acc = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)

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
        acc, peak, norm = attend_blocks(
            acc, peak, norm, q, positions, k_base, v_base, starts, piece_low, piece_full_low, 0, piece_high,
            scale, score_mod, window_left, window_right, STEP_K, STEP_V, HEAD_DIM, MAIN, TAIL,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True, first_key,
        )  # fmt: skip
        acc, peak, norm = attend_blocks(
            acc, peak, norm, q, positions, k_base, v_base, starts, piece_full_low, piece_full_high, 0, piece_high,
            scale, score_mod, window_left, window_right, STEP_K, STEP_V, HEAD_DIM, MAIN, TAIL,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, False, first_key,
        )  # fmt: skip
        acc, peak, norm = attend_blocks(
            acc, peak, norm, q, positions, k_base, v_base, starts, piece_full_high, piece_high, 0, piece_high,
            scale, score_mod, window_left, window_right, STEP_K, STEP_V, HEAD_DIM, MAIN, TAIL,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True, first_key,
        )  # fmt: skip

    out, lse = normalize(acc, peak, norm, score_mod, q[0].dtype == tl.float32, SCORE_MODS)
    out_base = row_base(out_ptr, first_row, head, HEAD_DIM // STRIDE_UNIT, STEP_O, STRIDE_UNIT)
    store_rows(out_base, starts, local, count, out, STEP_O, HEAD_DIM, MAIN, TAIL)
    if HAS_LSE:
        statistics = tl.cast(head, tl.int64) * total_q + first_row + local
        tl.store(lse_ptr + statistics, lse, mask=local < count)
