"""Keys and values of new tokens into a cache, behind those that a sequence has, and the rotary embedding on the way.

Token i of sequence b, which has n_b keys, goes to position p = n_b + i:

    k_cache[b, h, p] = R_p(k[b, h, i])        v_cache[b, h, p] = v[b, h, i]        q'[b, h, i] = R_p(q[b, h, i])

of a paged cache to row p % PAGE_SIZE of page table[b, p // PAGE_SIZE]. R_p turns pairs of the first TURNED columns of a
head by row p of the tables (tiles/rope.py), in fp32 and rounded once, to the dtype that is stored; the other columns
pass. Pairs are columns i and i + TURNED / 2 (GPT-NeoX's order), or 2 i and 2 i + 1 (GPT-J's, INTERLEAVED).

A program moves BLOCK_M rows of k, of v or of q: a row is a head of a token, and the heads of a token are neighbours.
All are pairs of columns, BLOCK_N at a time, whether turned or not. Memory-bound.

Nothing is written for a sequence of negative length, past the capacity, or to a page that is not there. Of the tables
the row nearest to p is read.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.rope import rotate

SIZES = ("num_tokens", "capacity", "num_pages", "num_angles")


@triton.jit
def _place_rows(tile, num_tokens, NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(token, head, whether there is such a token) of each row."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows // NUM_HEADS, (rows % NUM_HEADS).to(tl.int64), rows // NUM_HEADS < num_tokens


@triton.jit
def _column_pairs(pairs, HEAD_DIM: tl.constexpr, TURNED: tl.constexpr):
    """The columns of each pair: first those of what is turned, then those of the rest."""
    first = pairs
    second = pairs + HEAD_DIM // 2
    if TURNED > 0 and TURNED < HEAD_DIM:
        turned = pairs < TURNED // 2
        first = tl.where(turned, first, pairs + TURNED // 2)
        second = tl.where(turned, pairs + TURNED // 2, second)
    return first, second


@triton.jit
def _load_pairs(
    rows, inside, begin,
    HEAD_DIM: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first and the second of each pair, in fp32: [BLOCK_M, BLOCK_N] both."""
    if INTERLEAVED:
        columns = 2 * begin + tl.arange(0, 2 * BLOCK_N)
        mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
        block = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(block, (rows.shape[0], BLOCK_N, 2)))
    else:
        pairs = begin + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (pairs < HEAD_DIM // 2)[None, :]
        first, second = _column_pairs(pairs, HEAD_DIM, TURNED)
        a = tl.load(rows[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rows[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    rows, a, b, inside, begin,
    HEAD_DIM: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
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
        first, second = _column_pairs(pairs, HEAD_DIM, TURNED)
        tl.store(rows[:, None] + first[None, :], a.to(dtype), mask=mask)
        tl.store(rows[:, None] + second[None, :], b.to(dtype), mask=mask)


@triton.jit
def _load_angles(
    rows, inside, begin,
    TURNED: tl.constexpr, SHARED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A table's entries for the first and the second of each pair; SHARED: one for both."""
    if SHARED:
        pairs = begin + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (pairs < TURNED // 2)[None, :]
        of_first = tl.load(rows[:, None] + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        of_second = of_first
    else:
        of_first, of_second = _load_pairs(rows, inside, begin, TURNED, 0, INTERLEAVED, BLOCK_N)
    return of_first, of_second


@triton.jit
def _move_rows(
    source, cos, sin, target, inside,
    HEAD_DIM: tl.constexpr, TURNED: tl.constexpr, SHARED_ANGLES: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """source, cos, sin, target: where each row begins, [BLOCK_M]; cos and sin are read where TURNED > 0."""
    for begin in tl.static_range(0, HEAD_DIM // 2, BLOCK_N):
        a, b = _load_pairs(source, inside, begin, HEAD_DIM, TURNED, INTERLEAVED, BLOCK_N)
        if TURNED > 0:
            cos_of = _load_angles(cos, inside, begin, TURNED, SHARED_ANGLES, INTERLEAVED, BLOCK_N)
            sin_of = _load_angles(sin, inside, begin, TURNED, SHARED_ANGLES, INTERLEAVED, BLOCK_N)
            turned_a, turned_b = rotate(a, b, cos_of, sin_of)
            # By a select, since products by 0 would not pass what is infinite.
            turned = (begin + tl.arange(0, BLOCK_N) < TURNED // 2)[None, :]
            a = tl.where(turned, turned_a, a)
            b = tl.where(turned, turned_b, b)
        _store_pairs(target, a, b, inside, begin, HEAD_DIM, TURNED, INTERLEAVED, BLOCK_N)


@triton.jit
def _rows_of(
    ptr, outer, head, row, stride_outer, stride_head, STRIDE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Where rows begin; outer and head strides arrive in units of UNIT elements, so that their alignment is known."""
    of_outer = outer * tl.cast(stride_outer, tl.int64) * UNIT
    return ptr + of_outer + head * tl.cast(stride_head, tl.int64) * UNIT + row.to(tl.int64) * STRIDE


@triton.jit(do_not_specialize=SIZES)
def _kv_cache_append_kernel(
    k_ptr, v_ptr, q_ptr, cos_ptr, sin_ptr, seqlens_ptr, lengths_ptr, table_ptr, k_cache_ptr, v_cache_ptr, out_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_qb, stride_qh, stride_ob, stride_oh,
    stride_kcb, stride_kch, stride_vcb, stride_vch, stride_table,
    num_tokens, capacity, num_pages, num_angles,
    STRIDE_KS: tl.constexpr, STRIDE_VS: tl.constexpr, STRIDE_QS: tl.constexpr, STRIDE_OS: tl.constexpr,
    STRIDE_KCS: tl.constexpr, STRIDE_VCS: tl.constexpr, STRIDE_CS: tl.constexpr, STRIDE_SS: tl.constexpr,
    UNIT: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TURNED: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARED_ANGLES: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of k's rows, as many of v's, then those of q's; sequences).

    NUM_HEADS is 0 where there is no q, TURNED where nothing is turned, PAGE_SIZE where the cache is contiguous: there a
    sequence has the page of its number.
    """
    tile = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    num_tokens = tl.cast(num_tokens, tl.int32)
    k_tiles = (num_tokens * NUM_K_HEADS + BLOCK_M - 1) // BLOCK_M
    before = tl.load(seqlens_ptr + sequence).to(tl.int64)
    last_angle = tl.cast(num_angles, tl.int64) - 1
    if tile < 2 * k_tiles:
        token, head, inside = _place_rows(tile % k_tiles, num_tokens, NUM_K_HEADS, BLOCK_M)
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
                _rows_of(k_ptr, sequence, head, token, stride_kb, stride_kh, STRIDE_KS, UNIT),
                cos_ptr + angle * STRIDE_CS, sin_ptr + angle * STRIDE_SS,
                _rows_of(k_cache_ptr, page, head, row, stride_kcb, stride_kch, STRIDE_KCS, UNIT), inside,
                HEAD_DIM, TURNED, SHARED_ANGLES, INTERLEAVED, BLOCK_N,
            )  # fmt: skip
        else:
            _move_rows(
                _rows_of(v_ptr, sequence, head, token, stride_vb, stride_vh, STRIDE_VS, UNIT), None, None,
                _rows_of(v_cache_ptr, page, head, row, stride_vcb, stride_vch, STRIDE_VCS, UNIT), inside,
                HEAD_DIM, 0, True, False, BLOCK_N,
            )  # fmt: skip
    elif NUM_HEADS > 0:
        token, head, inside = _place_rows(tile - 2 * k_tiles, num_tokens, NUM_HEADS, BLOCK_M)
        angle = tl.minimum(tl.maximum(before + token, 0), last_angle)
        _move_rows(
            _rows_of(q_ptr, sequence, head, token, stride_qb, stride_qh, STRIDE_QS, UNIT),
            cos_ptr + angle * STRIDE_CS, sin_ptr + angle * STRIDE_SS,
            _rows_of(out_ptr, sequence, head, token, stride_ob, stride_oh, STRIDE_OS, UNIT), inside,
            HEAD_DIM, TURNED, SHARED_ANGLES, INTERLEAVED, BLOCK_N,
        )  # fmt: skip
