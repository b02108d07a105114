"""Attention backward on Hopper, in Gluon: the maths and the two kernels of `portable_bwd`, by warp specialization.

Each kernel keeps its sums in registers and every score there too, so nothing is added up by atomics, and no program
waits for another: the bits are the same every time, and no order can deadlock. That costs seven products where one
kernel for all three gradients needs five; products of exact width (`tiles.hopper`) win more than that back.

All tiles in shared memory are 16 columns wide. So the same tile serves both ways: read by rows for q k^T and
dout v^T, and by columns for p^T dout, ds^T q and ds k. A consumer's step on one block of the other side:

    issue  dp = dout v^T
    p = 2^(s - lse)                              under it
    issue  dv += p^T dout                        keys' kernel alone
    issue  s of the next block
    wait dp;  ds = p (dp - delta)
    issue  dk += ds^T q, or dq += ds k
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from csrc_free_ops.attention.hopper_work import (
    FIRST_BARRIER,
    NOTE,
    NOTES,
    POINTERS,
    deal,
    draw,
    is_inside,
    keep_number,
    keep_pointer,
    kept_number,
    kept_pointer,
    pass_over,
    place,
    read_note,
    rows_of,
    turn_around,
    write_note,
)
from csrc_free_ops.tiles.hopper import (
    accumulate,
    barrier_arrive,
    barrier_sync,
    check_base,
    clear_rows,
    exp2,
    flat,
    keep_strips,
    meet,
    multiply,
    narrow_strips,
    scale_strips,
    shared_base,
    store_rows,
    wait_strips,
    wgmma_layout,
    widen,
    zero_strips,
)
from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.scores import LOG2E

# Rows of every tile, and of a block of the other side.
BLOCK = gl.constexpr(64)
TILE_BYTES = gl.constexpr(64 * 16 * 2)

# Notes of a tile: BLOCKS of the other side are counted from the last, and 0 after the last tile.
BLOCKS, OTHERS, HEAD_MASKED, TAIL_MASKED, SEEN_LOW, SEEN_HIGH, ROWS = (gl.constexpr(field) for field in range(7))
# Addresses, in notes and of whole tensors.
LSE, DELTA, DLSE, FIRST_GRADIENT, SECOND_GRADIENT, TICKET, CU_OWN, CU_OTHER = (
    gl.constexpr(field) for field in range(8)
)
# Sizes behind the notes.
TOTAL_OWN, TOTAL_OTHER, SEGMENTS, BEFORE, AFTER = (gl.constexpr(field) for field in range(5))


@gluon.jit
def load_tiles(desc, row, head, bar, tiles, first, TILES: gl.constexpr):
    for tile in gl.static_range(TILES):
        tma.async_copy_global_to_shared(desc, [row, head, tile * 16], bar, tiles.index(first + tile))


@gluon.jit
def mask_weights(p, notes, slot, left, row, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr):
    """p [64, BLOCK], 0 where row and column do not see each other or the column is none of the segment."""
    LAYOUT: gl.constexpr = p[0].type.layout
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    begin = (read_note(notes, slot, BLOCKS) - left) * BLOCK
    seen_parts = ()
    for index in gl.static_range(len(p)):
        cols = begin + index * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
        part = gl.where((cols < read_note(notes, slot, OTHERS)) & (rows >= 0), p[index], 0.0)
        if HAS_HIGH:
            part = gl.where(cols <= rows + read_note(notes, slot, SEEN_HIGH), part, 0.0)
        if HAS_LOW:
            part = gl.where(cols >= rows + read_note(notes, slot, SEEN_LOW), part, 0.0)
        seen_parts = seen_parts + (part,)
    return seen_parts


@gluon.jit
def clear_tail(address, rows, TILES: gl.constexpr):
    """Rows past a segment's end may hold anything; what they are multiplied by 0 with must be numbers."""
    clear_rows(address, rows, BLOCK, 16, TILES)
    fence_async_shared()
    meet()


@gluon.jit
def _produce(descs, memory, full, vectors, OF_KEYS: gl.constexpr, OPTIONS: gl.constexpr):
    """For either kernel: `own` rows are those that it owns, queries or keys (OF_KEYS); the others pass by in blocks."""
    HEAD_DIM: gl.constexpr = OPTIONS[0]
    GROUP: gl.constexpr = OPTIONS[1]
    HAS_LEFT: gl.constexpr = OPTIONS[2]
    HAS_RIGHT: gl.constexpr = OPTIONS[3]
    GROUPS: gl.constexpr = OPTIONS[4]
    STAGES: gl.constexpr = OPTIONS[5]
    HEADS: gl.constexpr = OPTIONS[6]
    ORDER: gl.constexpr = OPTIONS[7]
    own_descs, first_desc, second_desc = descs
    tiles, notes, addresses = memory
    own_full, first_full, second_full = full
    TILES: gl.constexpr = (HEAD_DIM + 15) // 16
    OWNED: gl.constexpr = len(own_descs)
    FIRST_STAGE: gl.constexpr = OWNED * GROUPS * TILES
    EMPTY: gl.constexpr = 32 + 128 * GROUPS
    FIRST_EMPTY: gl.constexpr = FIRST_BARRIER
    SECOND_EMPTY: gl.constexpr = FIRST_EMPTY + STAGES
    OWN_EMPTY: gl.constexpr = SECOND_EMPTY + STAGES
    OWN_HEADS: gl.constexpr = HEADS // GROUP if OF_KEYS else HEADS
    HAS_BEFORE: gl.constexpr = HAS_RIGHT if OF_KEYS else HAS_LEFT
    HAS_AFTER: gl.constexpr = HAS_LEFT if OF_KEYS else HAS_RIGHT
    MEMBERS: gl.constexpr = GROUP if OF_KEYS else 1

    num_tiles, dealt = deal(
        kept_pointer(addresses, CU_OWN, gl.int32), kept_number(notes, SEGMENTS), kept_number(notes, TOTAL_OWN),
        OWN_HEADS, GROUPS, ORDER,
    )  # fmt: skip
    num_work = num_tiles * OWN_HEADS
    stage = 0
    loaded = 0
    count = 0
    work = gl.program_id(0)
    while work < num_work:
        num_segments = kept_number(notes, SEGMENTS)
        total_own = kept_number(notes, TOTAL_OWN)
        total_other = kept_number(notes, TOTAL_OTHER)
        head, segment, start, length, unit, taken = place(
            work, num_tiles, dealt, kept_pointer(addresses, CU_OWN, gl.int32), num_segments, total_own,
            OWN_HEADS, GROUPS, ORDER,
        )  # fmt: skip
        cu_other_ptr = kept_pointer(addresses, CU_OTHER, gl.int32)
        other_start, other_length = rows_of(cu_other_ptr, segment, num_segments, total_other)
        other_length = gl.where(is_inside(segment, num_segments), other_length, 0)
        if unit * BLOCK < length:
            first = unit * BLOCK
            rows = gl.minimum(taken * BLOCK, length - first)
            shift = other_length - length
            before = kept_number(notes, BEFORE)
            after = kept_number(notes, AFTER)
            low, full_low, full_high, high = block_span(
                first, first + rows - 1, shift, before, after, other_length, HAS_BEFORE, HAS_AFTER, BLOCK
            )  # fmt: skip
            blocks = gl.maximum((high - low + BLOCK - 1) // BLOCK, 1)
            slot = count % NOTES
            if count > 0:
                barrier_sync(OWN_EMPTY, EMPTY)
            row = start + first
            write_note(notes, slot, BLOCKS, blocks)
            write_note(notes, slot, OTHERS, gl.minimum(high, other_length) - low)
            write_note(notes, slot, HEAD_MASKED, blocks - (full_low - low) // BLOCK)
            write_note(notes, slot, TAIL_MASKED, blocks - (full_high - low) // BLOCK)
            write_note(notes, slot, SEEN_LOW, first + shift - low - before)
            write_note(notes, slot, SEEN_HIGH, first + shift - low + after)
            write_note(notes, slot, ROWS, rows)
            offset = (row.to(gl.int64) * OWN_HEADS + head) * HEAD_DIM
            gradient = kept_pointer(addresses, FIRST_GRADIENT, tiles.dtype) + offset
            write_note(addresses, slot, FIRST_GRADIENT, gradient.to(gl.int64))
            if OF_KEYS:
                gradient = kept_pointer(addresses, SECOND_GRADIENT, tiles.dtype) + offset
                write_note(addresses, slot, SECOND_GRADIENT, gradient.to(gl.int64))
            else:
                place_of_row = head.to(gl.int64) * total_own + row
                for field in gl.static_range(3):
                    pointer = kept_pointer(addresses, field, gl.float32) + place_of_row
                    write_note(addresses, slot, field, pointer.to(gl.int64))
            bar = own_full.index(0)
            mbarrier.expect(bar, OWNED * GROUPS * TILES * TILE_BYTES)
            for owned in gl.static_range(OWNED):
                for group in gl.static_range(GROUPS):
                    load_tiles(
                        own_descs[owned], row + group * BLOCK, head, bar, tiles, (owned * GROUPS + group) * TILES, TILES
                    )
            for member in range(MEMBERS):
                other_head = head * GROUP + member if OF_KEYS else head // GROUP
                for block in range(blocks):
                    other = low + block * BLOCK
                    if loaded >= STAGES:
                        barrier_sync(FIRST_EMPTY + stage, EMPTY)
                    bar = first_full.index(stage)
                    mbarrier.expect(bar, TILES * TILE_BYTES)
                    load_tiles(
                        first_desc, other_start + other, other_head, bar, tiles, FIRST_STAGE + stage * TILES, TILES
                    )
                    if loaded >= STAGES:
                        barrier_sync(SECOND_EMPTY + stage, EMPTY)
                    bar = second_full.index(stage)
                    mbarrier.expect(bar, TILES * TILE_BYTES)
                    load_tiles(
                        second_desc, other_start + other, other_head, bar, tiles,
                        FIRST_STAGE + (STAGES + stage) * TILES, TILES,
                    )  # fmt: skip
                    if OF_KEYS:
                        lses, deltas = vectors
                        local = gl.arange(0, BLOCK, gl.BlockedLayout([2], [32], [1], [0]))
                        inside = other + local < other_length
                        place_of_row = other_head.to(gl.int64) * kept_number(notes, TOTAL_OTHER) + other_start + other
                        lse_ptr = kept_pointer(addresses, LSE, gl.float32) + place_of_row
                        lse = gl.load(lse_ptr + local, mask=inside, other=float("inf"))
                        delta_ptr = kept_pointer(addresses, DELTA, gl.float32) + place_of_row
                        delta = gl.load(delta_ptr + local, mask=inside, other=0.0)
                        # A row that saw no key has no weights.
                        lses.index(stage).store(gl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
                        deltas.index(stage).store(delta)
                        mbarrier.arrive(bar, count=1)
                    loaded += 1
                    stage, _ = turn_around(stage, STAGES)
            count += 1
        work = draw(kept_pointer(addresses, TICKET, gl.int32), num_work)
    if count > 0:
        barrier_sync(OWN_EMPTY, EMPTY)
    write_note(notes, count % NOTES, BLOCKS, 0)
    mbarrier.arrive(own_full.index(0), count=1)
    for index in gl.static_range(STAGES):
        if index < loaded:
            barrier_sync(FIRST_EMPTY + index, EMPTY)
            barrier_sync(SECOND_EMPTY + index, EMPTY)


@gluon.jit
def _consume_keys(INDEX: gl.constexpr, memory, full, vectors, scale, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = OPTIONS[0]
    GROUP: gl.constexpr = OPTIONS[1]
    HAS_LEFT: gl.constexpr = OPTIONS[2]
    HAS_RIGHT: gl.constexpr = OPTIONS[3]
    GROUPS: gl.constexpr = OPTIONS[4]
    STAGES: gl.constexpr = OPTIONS[5]
    HEADS: gl.constexpr = OPTIONS[6]
    DTYPE: gl.constexpr = OPTIONS[8]
    notes, addresses = memory
    own_full, q_full, dout_full = full
    lses, deltas = vectors
    TILES: gl.constexpr = (HEAD_DIM + 15) // 16
    STRIPS: gl.constexpr = HEAD_DIM // 8
    STAGE_BYTES: gl.constexpr = TILES * TILE_BYTES
    EMPTY: gl.constexpr = 32 + 128 * GROUPS
    Q_EMPTY: gl.constexpr = FIRST_BARRIER
    DOUT_EMPTY: gl.constexpr = Q_EMPTY + STAGES
    OWN_EMPTY: gl.constexpr = DOUT_EMPTY + STAGES
    COLUMN: gl.constexpr = gl.SliceLayout(0, wgmma_layout(8))
    # Beside two sums of 128 columns there are registers for the rounded weights alone.
    ROUNDED: gl.constexpr = HEAD_DIM > 96
    OWN: gl.constexpr = INDEX * BLOCK
    base = shared_base()
    k = base + INDEX * STAGE_BYTES
    v = base + (GROUPS + INDEX) * STAGE_BYTES
    q = base + 2 * GROUPS * STAGE_BYTES
    dout = q + STAGES * STAGE_BYTES
    factor = scale * LOG2E
    stage = 0
    phase = 0
    turn = 0
    mbarrier.wait(own_full.index(0), 0)
    blocks = read_note(notes, 0, BLOCKS)
    while blocks > 0:
        slot = turn % NOTES
        rows = read_note(notes, slot, ROWS) - OWN
        if rows <= 0:
            stage, phase = pass_over(
                GROUP * blocks, stage, phase, q_full, dout_full, Q_EMPTY, DOUT_EMPTY, EMPTY, STAGES
            )
            barrier_arrive(OWN_EMPTY, EMPTY)
        else:
            dk = zero_strips(STRIPS)
            dv = zero_strips(STRIPS)
            tail = read_note(notes, slot, OTHERS) - (blocks - 1) * BLOCK
            mbarrier.wait(q_full.index(stage), phase)
            if (blocks == 1) & (tail < BLOCK):
                clear_tail(q + stage * STAGE_BYTES, tail, TILES)
            s = wait_strips(multiply(k, q + stage * STAGE_BYTES, BLOCK // 8, TILES, 64, 64, DTYPE), 0)
            left = blocks
            remaining = GROUP * blocks
            while remaining > 0:
                mbarrier.wait(dout_full.index(stage), phase)
                if (left == 1) & (tail < BLOCK):
                    clear_tail(dout + stage * STAGE_BYTES, tail, TILES)
                dp = multiply(v, dout + stage * STAGE_BYTES, BLOCK // 8, TILES, 64, 64, DTYPE)
                p = ()
                for index in gl.static_range(BLOCK // 8):
                    lse = lses.index(stage).slice(8 * index, 8).load(COLUMN)
                    p = p + (exp2(s[index] * factor - lse[None, :]),)
                if HAS_LEFT or HAS_RIGHT:
                    masked = left <= read_note(notes, slot, TAIL_MASKED)
                    if HAS_RIGHT:
                        masked = masked | (left > read_note(notes, slot, HEAD_MASKED))
                    if masked:
                        p = mask_weights(p, notes, slot, left, OWN, HAS_RIGHT, HAS_LEFT)
                weights = narrow_strips(p, DTYPE)
                dv = accumulate(dv, weights, dout + stage * STAGE_BYTES, BLOCK, 16)
                following, wrapped = turn_around(stage, STAGES)
                following_phase = phase ^ wrapped
                left = gl.where(left == 1, blocks, left - 1)
                if remaining > 1:
                    mbarrier.wait(q_full.index(following), following_phase)
                    if (left == 1) & (tail < BLOCK):
                        clear_tail(q + following * STAGE_BYTES, tail, TILES)
                # After the last block of what lies there, unused.
                s = multiply(k, q + following * STAGE_BYTES, BLOCK // 8, TILES, 64, 64, DTYPE)
                dp = wait_strips(dp, 2)
                ds = ()
                for index in gl.static_range(BLOCK // 8):
                    delta = deltas.index(stage).slice(8 * index, 8).load(COLUMN)
                    weight = widen(weights[index]) if ROUNDED else p[index]
                    ds = ds + (weight * (dp[index] - delta[None, :]),)
                dk = accumulate(dk, narrow_strips(ds, DTYPE), q + stage * STAGE_BYTES, BLOCK, 16)
                s = wait_strips(s, 1)
                dv = wait_strips(dv, 1)
                barrier_arrive(DOUT_EMPTY + stage, EMPTY)
                dk = wait_strips(dk, 0)
                barrier_arrive(Q_EMPTY + stage, EMPTY)
                stage = following
                phase = following_phase
                remaining -= 1
            dk_address = read_note(addresses, slot, FIRST_GRADIENT) + OWN * (HEADS // GROUP) * HEAD_DIM * 2
            dv_address = read_note(addresses, slot, SECOND_GRADIENT) + OWN * (HEADS // GROUP) * HEAD_DIM * 2
            # Keys that no query sees may be NaN, and have no gradient all the same.
            seen = read_note(notes, slot, OTHERS) > 0
            barrier_arrive(OWN_EMPTY, EMPTY)
            store_rows(dk_address, keep_strips(scale_strips(dk, scale), seen), rows, DTYPE, HEADS // GROUP * HEAD_DIM)
            store_rows(dv_address, keep_strips(dv, seen), rows, DTYPE, HEADS // GROUP * HEAD_DIM)
        turn += 1
        mbarrier.wait(own_full.index(0), turn & 1)
        blocks = read_note(notes, turn % NOTES, BLOCKS)


@gluon.jit
def _consume_queries(INDEX: gl.constexpr, tiles, memory, full, scale, OPTIONS: gl.constexpr):
    HEAD_DIM: gl.constexpr = OPTIONS[0]
    HAS_LEFT: gl.constexpr = OPTIONS[2]
    HAS_RIGHT: gl.constexpr = OPTIONS[3]
    GROUPS: gl.constexpr = OPTIONS[4]
    STAGES: gl.constexpr = OPTIONS[5]
    HEADS: gl.constexpr = OPTIONS[6]
    DTYPE: gl.constexpr = OPTIONS[8]
    HAS_DLSE: gl.constexpr = OPTIONS[9]
    notes, addresses = memory
    own_full, k_full, v_full = full
    TILES: gl.constexpr = (HEAD_DIM + 15) // 16
    STRIPS: gl.constexpr = HEAD_DIM // 8
    STAGE_BYTES: gl.constexpr = TILES * TILE_BYTES
    EMPTY: gl.constexpr = 32 + 128 * GROUPS
    K_EMPTY: gl.constexpr = FIRST_BARRIER
    V_EMPTY: gl.constexpr = K_EMPTY + STAGES
    OWN_EMPTY: gl.constexpr = V_EMPTY + STAGES
    WIDE: gl.constexpr = wgmma_layout(16)
    ROW: gl.constexpr = gl.SliceLayout(1, wgmma_layout(8))
    OWN: gl.constexpr = INDEX * BLOCK
    base = shared_base()
    q = base + INDEX * STAGE_BYTES
    dout = base + (GROUPS + INDEX) * STAGE_BYTES
    k = base + 3 * GROUPS * STAGE_BYTES
    v = k + STAGES * STAGE_BYTES
    factor = scale * LOG2E
    stage = 0
    phase = 0
    turn = 0
    mbarrier.wait(own_full.index(0), 0)
    blocks = read_note(notes, 0, BLOCKS)
    while blocks > 0:
        slot = turn % NOTES
        rows = read_note(notes, slot, ROWS) - OWN
        if rows <= 0:
            stage, phase = pass_over(blocks, stage, phase, k_full, v_full, K_EMPTY, V_EMPTY, EMPTY, STAGES)
            barrier_arrive(OWN_EMPTY, EMPTY)
        else:
            local = gl.arange(0, 64, ROW)
            inside = local < rows
            lse_ptr = (read_note(addresses, slot, LSE) + OWN * 4).to(gl.pointer_type(gl.float32), bitcast=True)
            lse = gl.load(lse_ptr + local, mask=inside, other=0.0)
            delta = gl.zeros([64], gl.float32, ROW)
            for tile in gl.static_range(TILES):
                d = flat(tiles.index((GROUPS + INDEX) * TILES + tile)).load(WIDE).to(gl.float32)
                o = flat(tiles.index((2 * GROUPS + INDEX) * TILES + tile)).load(WIDE).to(gl.float32)
                delta += gl.convert_layout(gl.sum(d * o, 1), ROW, assert_trivial=True)
            if HAS_DLSE:
                dlse_ptr = (read_note(addresses, slot, DLSE) + OWN * 4).to(gl.pointer_type(gl.float32), bitcast=True)
                delta -= gl.load(dlse_ptr + local, mask=inside, other=0.0)
            # A row that saw no key has no gradient, whatever came in for its lse.
            delta = gl.where(lse == float("-inf"), 0.0, delta)
            delta_ptr = (read_note(addresses, slot, DELTA) + OWN * 4).to(gl.pointer_type(gl.float32), bitcast=True)
            gl.store(delta_ptr + local, delta, mask=inside)
            lse = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)[:, None]
            delta = delta[:, None]

            dq = zero_strips(STRIPS)
            tail = read_note(notes, slot, OTHERS) - (blocks - 1) * BLOCK
            mbarrier.wait(k_full.index(stage), phase)
            if (blocks == 1) & (tail < BLOCK):
                clear_tail(k + stage * STAGE_BYTES, tail, TILES)
            s = wait_strips(multiply(q, k + stage * STAGE_BYTES, BLOCK // 8, TILES, 64, 64, DTYPE), 0)
            left = blocks
            while left > 0:
                mbarrier.wait(v_full.index(stage), phase)
                if (left == 1) & (tail < BLOCK):
                    clear_tail(v + stage * STAGE_BYTES, tail, TILES)
                dp = multiply(dout, v + stage * STAGE_BYTES, BLOCK // 8, TILES, 64, 64, DTYPE)
                p = ()
                for index in gl.static_range(BLOCK // 8):
                    p = p + (exp2(s[index] * factor - lse),)
                masked = left <= read_note(notes, slot, TAIL_MASKED)
                if HAS_LEFT:
                    masked = masked | (left > read_note(notes, slot, HEAD_MASKED))
                if masked:
                    p = mask_weights(p, notes, slot, left, OWN, HAS_LEFT, HAS_RIGHT)
                following, wrapped = turn_around(stage, STAGES)
                following_phase = phase ^ wrapped
                if left > 1:
                    mbarrier.wait(k_full.index(following), following_phase)
                    if (left == 2) & (tail < BLOCK):
                        clear_tail(k + following * STAGE_BYTES, tail, TILES)
                # After the last block of what lies there, unused.
                s = multiply(q, k + following * STAGE_BYTES, BLOCK // 8, TILES, 64, 64, DTYPE)
                dp = wait_strips(dp, 1)
                barrier_arrive(V_EMPTY + stage, EMPTY)
                ds = ()
                for index in gl.static_range(BLOCK // 8):
                    ds = ds + (p[index] * (dp[index] - delta),)
                dq = accumulate(dq, narrow_strips(ds, DTYPE), k + stage * STAGE_BYTES, BLOCK, 16)
                s = wait_strips(s, 1)
                dq = wait_strips(dq, 0)
                barrier_arrive(K_EMPTY + stage, EMPTY)
                stage = following
                phase = following_phase
                left -= 1
            address = read_note(addresses, slot, FIRST_GRADIENT) + OWN * HEADS * HEAD_DIM * 2
            barrier_arrive(OWN_EMPTY, EMPTY)
            store_rows(address, scale_strips(dq, scale), rows, DTYPE, HEADS * HEAD_DIM)
        turn += 1
        mbarrier.wait(own_full.index(0), turn & 1)
        blocks = read_note(notes, turn % NOTES, BLOCKS)


@gluon.jit
def keep_sizes(notes, addresses, cu_own_ptr, cu_other_ptr, total_own, total_other, num_segments, before, after):
    keep_pointer(addresses, CU_OWN, cu_own_ptr)
    keep_pointer(addresses, CU_OTHER, cu_other_ptr)
    keep_number(notes, TOTAL_OWN, total_own)
    keep_number(notes, TOTAL_OTHER, total_other)
    keep_number(notes, SEGMENTS, num_segments)
    keep_number(notes, BEFORE, before)
    keep_number(notes, AFTER, after)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, SECOND_ARRIVALS: gl.constexpr):
    own_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    first_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    second_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full.index(0), count=1)
    for index in gl.static_range(STAGES):
        mbarrier.init(first_full.index(index), count=1)
        mbarrier.init(second_full.index(index), count=SECOND_ARRIVALS)
    fence_async_shared()
    return own_full, first_full, second_full


@gluon.jit
def _attention_bwd_dq_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, dout_desc, lse_ptr, dlse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dq_ptr, ticket_ptr,
    total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_DLSE: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDER: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs): delta and dq. dlse_ptr is read only with HAS_DLSE; for ticket_ptr see `hopper_work.draw`."""
    TILES: gl.constexpr = (HEAD_DIM + 15) // 16
    DTYPE: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(DTYPE, [(3 * GROUPS + 2 * STAGES) * TILES, 64, 1, 16], q_desc.layout)
    check_base(flat(tiles.index(0)))
    notes = gl.allocate_shared_memory(gl.int32, [POINTERS + NOTE, 1], VECTOR)
    addresses = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    keep_pointer(addresses, LSE, lse_ptr)
    keep_pointer(addresses, DELTA, delta_ptr)
    keep_pointer(addresses, DLSE, dlse_ptr)
    keep_pointer(addresses, FIRST_GRADIENT, dq_ptr)
    keep_pointer(addresses, TICKET, ticket_ptr)
    full = make_barriers(STAGES, 1)
    OPTIONS: gl.constexpr = (
        HEAD_DIM, GROUP, HAS_LEFT, HAS_RIGHT, GROUPS, STAGES, HEADS, ORDER, DTYPE, HAS_DLSE,
    )  # fmt: skip
    descs = ((q_desc, dout_desc, out_desc), k_desc, v_desc)
    keep_sizes(notes, addresses, cu_q_ptr, cu_k_ptr, total_q, total_k, num_segments, window_left, window_right)
    memory = (tiles, notes, addresses)
    told = (notes, addresses)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume_queries, (0, tiles, told, full, scale, OPTIONS)),
                (_consume_queries, (1, tiles, told, full, scale, OPTIONS)),
                (_produce, (descs, memory, full, (), False, OPTIONS)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume_queries, (0, tiles, told, full, scale, OPTIONS)),
                (_consume_queries, (1, tiles, told, full, scale, OPTIONS)),
                (_consume_queries, (2, tiles, told, full, scale, OPTIONS)),
                (_produce, (descs, memory, full, (), False, OPTIONS)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _attention_bwd_dkdv_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr, ticket_ptr,
    total_q, total_k, num_segments, scale, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDER: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs): dk and dv, over the GROUP query heads in order. Runs after the dq kernel, which leaves delta."""
    TILES: gl.constexpr = (HEAD_DIM + 15) // 16
    DTYPE: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(DTYPE, [(2 * GROUPS + 2 * STAGES) * TILES, 64, 1, 16], q_desc.layout)
    check_base(flat(tiles.index(0)))
    notes = gl.allocate_shared_memory(gl.int32, [POINTERS + NOTE, 1], VECTOR)
    addresses = gl.allocate_shared_memory(gl.int64, [POINTERS + NOTE, 1], VECTOR)
    keep_pointer(addresses, LSE, lse_ptr)
    keep_pointer(addresses, DELTA, delta_ptr)
    keep_pointer(addresses, FIRST_GRADIENT, dk_ptr)
    keep_pointer(addresses, SECOND_GRADIENT, dv_ptr)
    keep_pointer(addresses, TICKET, ticket_ptr)
    vectors = (
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], VECTOR),
    )
    full = make_barriers(STAGES, 2)
    OPTIONS: gl.constexpr = (HEAD_DIM, GROUP, HAS_LEFT, HAS_RIGHT, GROUPS, STAGES, HEADS, ORDER, DTYPE)
    descs = ((k_desc, v_desc), q_desc, dout_desc)
    keep_sizes(notes, addresses, cu_k_ptr, cu_q_ptr, total_k, total_q, num_segments, window_right, window_left)
    memory = (tiles, notes, addresses)
    told = (notes, addresses)
    gl.warp_specialize(
        [
            (_consume_keys, (0, told, full, vectors, scale, OPTIONS)),
            (_consume_keys, (1, told, full, vectors, scale, OPTIONS)),
            (_produce, (descs, memory, full, vectors, True, OPTIONS)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
