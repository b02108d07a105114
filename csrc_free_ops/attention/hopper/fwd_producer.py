"""The producer of the Hopper forward: draws tiles, notes what consumers must know of them, brings what they read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_free_ops.attention.hopper.fwd_fp32_producer import await_cast, draw_and_clear
from csrc_free_ops.attention.hopper.scheduler import (
    ALONE,
    CACHED,
    CACHED_OF_ONE,
    DENSE_ENDS,
    NOTES,
    deal,
    draw,
    has_one_segment,
    head_count,
    is_dense,
    is_inside,
    kept_pointer,
    kept_stride,
    place,
    rows_of,
    write_note,
)
from csrc_free_ops.tiles.hopper.memory import columns_of, load_tile
from csrc_free_ops.tiles.hopper.warpgroup import (
    TOLD,
    barrier_sync,
    barrier_sync_among,
    option,
    shared_base,
    tell,
    turn_around,
)
from csrc_free_ops.tiles.masks import block_span

# The first named barrier that is not Triton's, with three warpgroups.
FIRST_BARRIER = gl.constexpr(5)
# Of a key and its value, per column.
ROW_BYTES = gl.constexpr(4)
# A note: what the producer tells the consumers of a tile. BLOCKS is 0 after the last tile; the first SHARED of them are
# those of the other warpgroup too, where each has a note of its own.
BLOCKS, KEYS, HEAD_MASKED, TAIL_MASKED, SEEN_LOW, SEEN_HIGH, ROW, ROWS, HEAD, INSIDE, SHARED = (
    gl.constexpr(field) for field in range(11)
)
# Barriers of memory, as many as GROUPS and STAGES at the most.
Q_FULL, K_FULL, V_FULL = (gl.constexpr(at) for at in (0, 4, 8))
ARRIVALS = gl.constexpr((TOLD.value,) * 4 + (1,) * 8)
# Addresses, in notes of their own and of the whole tensors; there also out's strides of batch and head.
OUT, LSE, TICKET, OUT_BATCH, OUT_HEAD, COUNTS = (gl.constexpr(field) for field in range(6))


@gluon.jit
def _note_tile(notes, addresses, slot, span, first, rows, place, sizes, OPTIONS: gl.constexpr):
    """Writes the note of a tile of so many rows, the first of which is its segment's `first`; how many blocks it sees.

    A tile that sees no key passes over one block that is all masked.
    """
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    BLOCK_N: gl.constexpr = option(OPTIONS, "BLOCK_N")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    ORDER: gl.constexpr = option(OPTIONS, "ORDER")
    HAS_SINKS: gl.constexpr = option(OPTIONS, "HAS_SINKS")
    OUT_STRIDE: gl.constexpr = option(OPTIONS, "OUT_STRIDE")
    OUT_DTYPE: gl.constexpr = option(OPTIONS, "OUT_DTYPE")
    low, full_low, full_high, high = span
    head, segment, q_start, shift, k_length = place
    total_q, total_k, num_segments, window_left, window_right = sizes
    blocks = gl.maximum((high - low + BLOCK_N - 1) // BLOCK_N, 1)
    row = q_start + first
    write_note(notes, slot, BLOCKS, blocks)
    if ORDER == DENSE_ENDS:
        # The others see keys that these rows do not.
        write_note(notes, slot, KEYS, gl.minimum(blocks * BLOCK_N, k_length))
    else:
        write_note(notes, slot, KEYS, gl.minimum(high, k_length) - low)
    write_note(notes, slot, HEAD_MASKED, blocks - (full_low - low) // BLOCK_N)
    write_note(notes, slot, TAIL_MASKED, blocks - (full_high - low) // BLOCK_N)
    write_note(notes, slot, SEEN_LOW, first + shift - low - window_left)
    write_note(notes, slot, SEEN_HIGH, first + shift - low + window_right)
    write_note(notes, slot, ROW, row)
    write_note(notes, slot, ROWS, rows)
    write_note(notes, slot, HEAD, head)
    if HAS_SINKS:
        write_note(notes, slot, INSIDE, is_inside(segment, num_segments))
    out_ptr = kept_pointer(addresses, OUT, OUT_DTYPE) + row.to(gl.int64) * OUT_STRIDE
    if is_dense(ORDER):
        out_ptr += head // HEADS * kept_stride(addresses, OUT_BATCH)
        out_ptr += head % HEADS * kept_stride(addresses, OUT_HEAD)
    else:
        out_ptr += head * HEAD_DIM
    write_note(addresses, slot, OUT, out_ptr.to(gl.int64))
    lse_ptr = kept_pointer(addresses, LSE, gl.float32)
    write_note(addresses, slot, LSE, (lse_ptr + head.to(gl.int64) * total_q + row).to(gl.int64))
    return blocks


@gluon.jit
def produce(descs, boundaries_of, tiles, bars, sizes, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = option(OPTIONS, "HEAD_DIM")
    GROUP: gl.constexpr = option(OPTIONS, "GROUP")
    HAS_LEFT: gl.constexpr = option(OPTIONS, "HAS_LEFT")
    HAS_RIGHT: gl.constexpr = option(OPTIONS, "HAS_RIGHT")
    GROUPS: gl.constexpr = option(OPTIONS, "GROUPS")
    BLOCK_N: gl.constexpr = option(OPTIONS, "BLOCK_N")
    STAGES: gl.constexpr = option(OPTIONS, "STAGES")
    HEADS: gl.constexpr = option(OPTIONS, "HEADS")
    ORDER: gl.constexpr = option(OPTIONS, "ORDER")
    FOLDED: gl.constexpr = option(OPTIONS, "FOLDED")
    CASTERS: gl.constexpr = option(OPTIONS, "CASTERS")
    # Each warpgroup has rows, and a note, of its own.
    ENDS: gl.constexpr = ORDER == DENSE_ENDS
    q_descs, k_descs, v_desc = descs
    cu_q, cu_k = boundaries_of
    q_tiles, k_tiles, v_tiles, notes, addresses = tiles
    total_q, total_k, num_segments, window_left, window_right = sizes
    EMPTY: gl.constexpr = 32 + 128 * GROUPS
    K_EMPTY: gl.constexpr = FIRST_BARRIER
    V_EMPTY: gl.constexpr = K_EMPTY + STAGES
    Q_EMPTY: gl.constexpr = V_EMPTY + STAGES
    PARTS: gl.constexpr = len(k_descs)
    MAIN: gl.constexpr = columns_of(k_descs[0])
    TAIL: gl.constexpr = columns_of(k_descs[PARTS - 1]) if PARTS > 1 else 0
    Q_MAIN: gl.constexpr = columns_of(q_descs[0])
    Q_BYTES: gl.constexpr = 64 * (Q_MAIN * 4 if CASTERS > 0 else (MAIN + TAIL) * 2)
    WIDTH: gl.constexpr = columns_of(v_desc)
    V_TILES: gl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    # Of what is being cast, fewer heads together: the first are soon there.
    BYTES: gl.constexpr = CACHED_OF_ONE if has_one_segment(ORDER) else CACHED // 2 if CASTERS > 0 else CACHED
    RESIDENT: gl.constexpr = BYTES * GROUP // (HEAD_DIM * ROW_BYTES)
    LONE: gl.constexpr = ALONE * GROUP // (HEAD_DIM * ROW_BYTES)

    q_batch = (total_q, HEADS, FOLDED & 1)
    k_batch = (total_k, HEADS // GROUP, FOLDED & 2)
    v_batch = (total_k, HEADS // GROUP, FOLDED & 4)
    bars_at = shared_base() + STAGES * V_TILES * BLOCK_N * WIDTH * 2
    heads = head_count(num_segments, HEADS, ORDER)
    num_tiles, dealt = deal(cu_q, num_segments, total_q, heads, GROUPS, ORDER)
    num_work = num_tiles * heads
    stage = 0
    loaded = 0
    count = 0
    shared = 0
    work = gl.program_id(0)
    while work < num_work:
        head, segment, q_start, q_length, unit, taken = place(
            work, num_tiles, dealt, cu_q, num_segments, total_q, heads, GROUPS, ORDER, RESIDENT, LONE
        )  # fmt: skip
        k_start, k_length = rows_of(cu_k, segment, num_segments, total_k, ORDER)
        k_length = gl.where(is_inside(segment, num_segments), k_length, 0)
        first = unit * 64
        if HAS_RIGHT and not ENDS:
            # The longest first: the later a row, the more keys it sees.
            first = gl.maximum((q_length + 63) // 64 - taken - unit, 0) * 64
            taken = gl.minimum(taken, (q_length + 63) // 64 - unit)
        if unit * 64 < q_length:
            rows = gl.minimum(taken * 64, q_length - first)
            shift = k_length - q_length
            low, full_low, full_high, high = block_span(
                first, first + rows - 1, shift, window_left, window_right, k_length, HAS_LEFT, HAS_RIGHT, BLOCK_N
            )  # fmt: skip
            slot = count % NOTES
            for group in gl.static_range(GROUPS):
                if count > 0:
                    barrier_sync(Q_EMPTY + group, 160)
            row = q_start + first
            apart = 64
            place_of_tile = (head, segment, q_start, shift, k_length)
            span = (low, full_low, full_high, high)
            if ENDS:
                slot = count % 2 * GROUPS
                other = num_tiles * (GROUPS * 64) - 64 - first
                apart = other - first
                other_span = block_span(
                    other, other + 63, shift, window_left, window_right, k_length, HAS_LEFT, HAS_RIGHT, BLOCK_N
                )  # fmt: skip
                shared = _note_tile(
                    notes, addresses, slot + 1, other_span, other, 64, place_of_tile, sizes, OPTIONS
                )  # fmt: skip
                write_note(notes, slot, SHARED, shared)
            blocks = _note_tile(notes, addresses, slot, span, first, rows, place_of_tile, sizes, OPTIONS)
            for group in gl.static_range(GROUPS):
                bar = bars.index(Q_FULL + group)
                mbarrier.expect(bar, Q_BYTES)
                tell(bars_at + (Q_FULL + group) * 8)
                for part in gl.static_range(len(q_descs)):
                    load_tile(
                        q_descs[part],
                        row + group * apart,
                        head,
                        part * Q_MAIN,
                        q_batch,
                        bar,
                        q_tiles[part].index(group),
                    )
            k_head = head // GROUP
            if CASTERS > 0:
                await_cast(kept_pointer(addresses, COUNTS, gl.int32), k_head, total_k, HEAD_DIM)
            for block in range(blocks):
                key = k_start + low + block * BLOCK_N
                readers = gl.where(loaded - STAGES < shared, EMPTY, 160)
                if loaded >= STAGES:
                    if ENDS:
                        barrier_sync_among(K_EMPTY + stage, readers)
                    else:
                        barrier_sync(K_EMPTY + stage, EMPTY)
                bar = bars.index(K_FULL + stage)
                mbarrier.expect(bar, BLOCK_N * (MAIN + TAIL) * 2)
                for part in gl.static_range(PARTS):
                    load_tile(k_descs[part], key, k_head, part * MAIN, k_batch, bar, k_tiles[part].index(stage))
                if loaded >= STAGES:
                    if ENDS:
                        barrier_sync_among(V_EMPTY + stage, readers)
                    else:
                        barrier_sync(V_EMPTY + stage, EMPTY)
                bar = bars.index(V_FULL + stage)
                mbarrier.expect(bar, BLOCK_N * V_TILES * WIDTH * 2)
                for part in gl.static_range(V_TILES):
                    load_tile(v_desc, key, k_head, part * WIDTH, v_batch, bar, v_tiles.index(stage * V_TILES + part))
                loaded += 1
                stage, _ = turn_around(stage, STAGES)
            count += 1
        if CASTERS > 0:
            work = draw_and_clear(
                kept_pointer(addresses, TICKET, gl.int32), kept_pointer(addresses, COUNTS, gl.int32), num_work,
                num_segments * (HEADS // GROUP),
            )  # fmt: skip
        else:
            work = draw(kept_pointer(addresses, TICKET, gl.int32), num_work)
    for group in gl.static_range(GROUPS):
        if count > 0:
            barrier_sync(Q_EMPTY + group, 160)
    for group in gl.static_range(GROUPS):
        write_note(notes, count % 2 * GROUPS + group if ENDS else count % NOTES, BLOCKS, 0)
        mbarrier.arrive(bars.index(Q_FULL + group), count=1)
        tell(bars_at + (Q_FULL + group) * 8)
    # What consumers arrived at must be left as it was found.
    for index in gl.static_range(STAGES):
        if index < loaded:
            if ENDS:
                # The last block that was in this stage.
                readers = gl.where(loaded - 1 - (loaded - 1 - index) % STAGES < shared, EMPTY, 160)
                barrier_sync_among(K_EMPTY + index, readers)
                barrier_sync_among(V_EMPTY + index, readers)
            else:
                barrier_sync(K_EMPTY + index, EMPTY)
                barrier_sync(V_EMPTY + index, EMPTY)
