"""Append keys and values of new tokens to a KV cache, with the rotary embedding on the way.

Token i of sequence b, which has n_b keys so far, goes to position p = n_b + i:

    k_cache[b, h, p] = R_p(k[b, h, i])        v_cache[b, h, p] = v[b, h, i]        q'[b, h, i] = R_p(q[b, h, i])

In a paged cache position p is row p % PAGE_SIZE of page table[b, p // PAGE_SIZE]. R_p rotates pairs of the first
ROTARY_DIM columns of a head by row p of the tables (tiles/rope.py). It is computed in fp32 and rounded once to the
stored dtype. The other columns are copied. Pairs are columns i and i + ROTARY_DIM / 2 (order of GPT-NeoX), or 2 i and
2 i + 1 (GPT-J, INTERLEAVED).

A program moves BLOCK_M rows of k, of v or of q; a row is a head of a token, and the heads of a token are neighbours. It
treats all columns as pairs, BLOCK_N at a time, whether they are rotated or not. The kernel is memory-bound.

Nothing is written for a sequence of negative length, past the capacity, or to a page that does not exist. Positions
past the tables read their last row.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.rope import rotate
from csrc_free_ops.tiles.rows import row_step

SIZES = (
    "num_tokens", "capacity", "num_pages", "num_angles",
    *[f"stride_{name}s" for name in ("k", "v", "q", "o", "kc", "vc")],
)  # fmt: skip


@triton.jit
def _locate_rows(tile, num_tokens, NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(token, head, whether the token exists) of each row."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows // NUM_HEADS, (rows % NUM_HEADS).to(tl.int64), rows // NUM_HEADS < num_tokens


@triton.jit
def _column_pairs(pairs, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The two columns of each pair: first the rotated pairs, then the columns that are copied."""
    first = pairs
    second = pairs + HEAD_DIM // 2
    if ROTARY_DIM > 0 and ROTARY_DIM < HEAD_DIM:
        rotated = pairs < ROTARY_DIM // 2
        first = tl.where(rotated, first, pairs + ROTARY_DIM // 2)
        second = tl.where(rotated, pairs + ROTARY_DIM // 2, second)
    return first, second


@triton.jit
def _load_pairs(
    rows, inside, begin,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first and the second elements of pairs in fp32, [BLOCK_M, BLOCK_N] each."""
    if INTERLEAVED:
        columns = 2 * begin + tl.arange(0, 2 * BLOCK_N)
        mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
        block = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(block, (rows.shape[0], BLOCK_N, 2)))
    else:
        pairs = begin + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (pairs < HEAD_DIM // 2)[None, :]
        first, second = _column_pairs(pairs, HEAD_DIM, ROTARY_DIM)
        a = tl.load(rows[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rows[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    rows, a, b, inside, begin,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = rows.dtype.element_ty
    if INTERLEAVED:
        columns = 2 * begin + tl.arange(0, 2 * BLOCK_N)
        mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
        block = tl.reshape(tl.join(a, b), (rows.shape[0], 2 * BLOCK_N))
        tl.store(rows[:, None] + columns[None, :], block.to(dtype), mask=mask)
    else:
        pairs = begin + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (pairs < HEAD_DIM // 2)[None, :]
        first, second = _column_pairs(pairs, HEAD_DIM, ROTARY_DIM)
        tl.store(rows[:, None] + first[None, :], a.to(dtype), mask=mask)
        tl.store(rows[:, None] + second[None, :], b.to(dtype), mask=mask)


@triton.jit
def _load_angles(
    rows, inside, begin,
    ROTARY_DIM: tl.constexpr, SHARED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A table's entries for the first and the second element of each pair; with SHARED one serves both."""
    if SHARED:
        pairs = begin + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (pairs < ROTARY_DIM // 2)[None, :]
        of_first = tl.load(rows[:, None] + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        of_second = of_first
    else:
        of_first, of_second = _load_pairs(rows, inside, begin, ROTARY_DIM, 0, INTERLEAVED, BLOCK_N)
    return of_first, of_second


@triton.jit
def _move_rows(
    source, cos, sin, target, inside,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, SHARED_ANGLES: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Move rows from `source` to `target`, rotated if ROTARY_DIM > 0.

    source, cos, sin and target are the addresses of the rows, [BLOCK_M]; cos and sin are read only if ROTARY_DIM > 0.
    """
    for begin in tl.static_range(0, HEAD_DIM // 2, BLOCK_N):
        a, b = _load_pairs(source, inside, begin, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_N)
        if ROTARY_DIM > 0:
            cos_of = _load_angles(cos, inside, begin, ROTARY_DIM, SHARED_ANGLES, INTERLEAVED, BLOCK_N)
            sin_of = _load_angles(sin, inside, begin, ROTARY_DIM, SHARED_ANGLES, INTERLEAVED, BLOCK_N)
            rotated_a, rotated_b = rotate(a, b, cos_of, sin_of)
            # A select, because columns that are copied may be infinite, and products by 0 would make them NaN.
            rotated = (begin + tl.arange(0, BLOCK_N) < ROTARY_DIM // 2)[None, :]
            a = tl.where(rotated, rotated_a, a)
            b = tl.where(rotated, rotated_b, b)
        _store_pairs(target, a, b, inside, begin, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_N)


@triton.jit
def _rows_of(
    ptr, outer, head, row, stride_outer, stride_head, stride_row, STRIDE: tl.constexpr, STRIDE_UNIT: tl.constexpr
):  # fmt: skip
    """The addresses of rows. Outer and head strides count STRIDE_UNIT elements, so their alignment is known."""
    step = row_step(stride_row, STRIDE, STRIDE_UNIT)
    of_outer = outer * tl.cast(stride_outer, tl.int64) * STRIDE_UNIT
    return ptr + of_outer + head * tl.cast(stride_head, tl.int64) * STRIDE_UNIT + row.to(tl.int64) * step


@triton.jit(do_not_specialize=SIZES)
def _kv_cache_append_kernel(
    k_ptr, v_ptr, q_ptr, cos_ptr, sin_ptr, seqlens_ptr, lengths_ptr, table_ptr, k_cache_ptr, v_cache_ptr, out_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_qb, stride_qh, stride_ob, stride_oh,
    stride_kcb, stride_kch, stride_vcb, stride_vch,
    stride_ks, stride_vs, stride_qs, stride_os, stride_kcs, stride_vcs, stride_table,
    num_tokens, capacity, num_pages, num_angles,
    STRIDE_KS: tl.constexpr, STRIDE_VS: tl.constexpr, STRIDE_QS: tl.constexpr, STRIDE_OS: tl.constexpr,
    STRIDE_KCS: tl.constexpr, STRIDE_VCS: tl.constexpr, STRIDE_CS: tl.constexpr, STRIDE_SS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARED_ANGLES: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of k's rows, then as many of v's, then those of q's; sequences).

    NUM_HEADS is 0 without q, ROTARY_DIM is 0 without a rotation, PAGE_SIZE is 0 for a contiguous cache. In a contiguous
    cache sequence b has page b.
    """
    tile = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    num_tokens = tl.cast(num_tokens, tl.int32)
    k_tiles = (num_tokens * NUM_K_HEADS + BLOCK_M - 1) // BLOCK_M
    before = tl.load(seqlens_ptr + sequence).to(tl.int64)
    last_angle = tl.cast(num_angles, tl.int64) - 1
    if tile < 2 * k_tiles:
        token, head, inside = _locate_rows(tile % k_tiles, num_tokens, NUM_K_HEADS, BLOCK_M)
        position = before + token
        inside &= (before >= 0) & (position < tl.cast(capacity, tl.int64))
        if HAS_LENGTHS:
            inside &= token < tl.load(lengths_ptr + sequence)
        if PAGE_SIZE > 0:
            table = table_ptr + sequence * tl.cast(stride_table, tl.int64)
            page = tl.load(table + position // PAGE_SIZE, mask=inside, other=-1).to(tl.int64)
            inside &= (page >= 0) & (page < tl.cast(num_pages, tl.int64))
            row = position % PAGE_SIZE
        else:
            page = sequence
            row = position
        if tile < k_tiles:
            angle = tl.minimum(tl.maximum(position, 0), last_angle)
            _move_rows(
                _rows_of(k_ptr, sequence, head, token, stride_kb, stride_kh, stride_ks, STRIDE_KS, STRIDE_UNIT),
                cos_ptr + angle * STRIDE_CS, sin_ptr + angle * STRIDE_SS,
                _rows_of(k_cache_ptr, page, head, row, stride_kcb, stride_kch, stride_kcs, STRIDE_KCS, STRIDE_UNIT),
                inside, HEAD_DIM, ROTARY_DIM, SHARED_ANGLES, INTERLEAVED, BLOCK_N,
            )  # fmt: skip
        else:
            _move_rows(
                _rows_of(v_ptr, sequence, head, token, stride_vb, stride_vh, stride_vs, STRIDE_VS, STRIDE_UNIT),
                None, None,
                _rows_of(v_cache_ptr, page, head, row, stride_vcb, stride_vch, stride_vcs, STRIDE_VCS, STRIDE_UNIT),
                inside, HEAD_DIM, 0, True, False, BLOCK_N,
            )  # fmt: skip
    elif NUM_HEADS > 0:
        token, head, inside = _locate_rows(tile - 2 * k_tiles, num_tokens, NUM_HEADS, BLOCK_M)
        angle = tl.minimum(tl.maximum(before + token, 0), last_angle)
        _move_rows(
            _rows_of(q_ptr, sequence, head, token, stride_qb, stride_qh, stride_qs, STRIDE_QS, STRIDE_UNIT),
            cos_ptr + angle * STRIDE_CS, sin_ptr + angle * STRIDE_SS,
            _rows_of(out_ptr, sequence, head, token, stride_ob, stride_oh, stride_os, STRIDE_OS, STRIDE_UNIT), inside,
            HEAD_DIM, ROTARY_DIM, SHARED_ANGLES, INTERLEAVED, BLOCK_N,
        )  # fmt: skip
