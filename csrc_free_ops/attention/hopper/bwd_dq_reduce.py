"""The way of dq in the Hopper backward: from a consumer's registers to shared memory, and on to the accumulator."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_free_ops.attention.hopper.bwd_dq_finalize import first_columns
from csrc_free_ops.attention.hopper.bwd_protocol import (
    ADDRESS,
    BLOCK_M,
    BLOCK_N,
    DQ_WRITERS,
    KV_THREADS,
    MBAR,
    NAMED,
    NUMBER,
    TILE,
    gradient_stride,
    m_block_of_step,
    semaphores_per_head,
)
from csrc_free_ops.attention.hopper.dq_order import acc2_distance, semaphore_value
from csrc_free_ops.attention.hopper.scheduler import head_count, is_dense
from csrc_free_ops.tiles.hopper.limits import buffer_bytes
from csrc_free_ops.tiles.hopper.memory import (
    acquire_semaphore,
    add_tile,
    admit_kernel,
    await_bulk_reads,
    await_bulk_writes,
    await_kernel,
    load_bulk,
    meet_in_warp,
    put_float_pairs,
    reduce_bulk,
    release_semaphore,
    round_rows,
)
from csrc_free_ops.tiles.hopper.versions import async_store, reinterpret
from csrc_free_ops.tiles.hopper.warpgroup import await_phase, barrier_arrive, barrier_sync, shared_base
from csrc_free_ops.tiles.masks import tiles_seeing


@gluon.constexpr_function
def dq_stage_bytes(head_dim):
    """Bytes of a block of dq in shared memory: in the accumulator's first tensor, and in its second."""
    first = first_columns(head_dim)
    return BLOCK_M.value * first * 4, BLOCK_M.value * (head_dim - first) * 4


@gluon.jit
def stage_dq(dq, address, stage, q_start, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Strips of dq from strip FIRST on to shared memory, swizzled as `bwd_dq_finalize` says.

    The first tensor's columns of all stages lie at `address`, the second tensor's behind them.
    """
    BYTES: gl.constexpr = dq_stage_bytes(HEAD_DIM)
    STRIPS: gl.constexpr = first_columns(HEAD_DIM) // 8
    LAYOUT: gl.constexpr = dq[0].type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :] * 4
    first = address + stage * BYTES[0] + rows * (BYTES[0] // BLOCK_M) + cols
    second = address + DQ_WRITERS * BYTES[0] + stage * BYTES[1] + rows * (BYTES[1] // BLOCK_M) + cols
    for index in gl.static_range(len(dq)):
        if FIRST + index < STRIPS:
            put_float_pairs(first + (((FIRST + index) ^ ((rows + q_start) & 3)) * 32), dq[index])
        else:
            put_float_pairs(second + (FIRST + index - STRIPS) * 32, dq[index])


@gluon.jit
def _write_acc2(desc, tiles, AT: gl.constexpr, head, row, semaphore):
    """Add columns of a block of dq, at byte AT of `tiles`, to the second accumulator, or write them at semaphore 0."""
    HEIGHT: gl.constexpr = desc.block_shape[1]
    TILE_BYTES: gl.constexpr = desc.block_type.nbytes
    gl.static_assert(AT % TILE_BYTES == 0, "dq in shared memory must begin at a whole tile of the second accumulator")
    gl.static_assert(BLOCK_M % HEIGHT == 0, "tiles of the second accumulator must divide a block of queries")
    COUNT: gl.constexpr = buffer_bytes(tiles) // TILE_BYTES
    blocks = reinterpret(tiles, gl.float32, [COUNT] + desc.block_shape, desc.layout)
    for index in gl.static_range(BLOCK_M // HEIGHT):
        block = blocks.index(AT // TILE_BYTES + index)
        if semaphore == 0:
            async_store(desc, [head, row + index * HEIGHT, 0, 0], block)
        else:
            add_tile(desc, [head, row + index * HEIGHT, 0, 0], block)


@gluon.jit
def _round_block(INDEX: gl.constexpr, shared, head, m_row, num_rows, acc_row, config):
    """Write dq of the block at `m_row`, to whose sum this warp has just added the last contribution.

    The sum begins at row `acc_row` of the accumulator.
    """
    BYTES: gl.constexpr = dq_stage_bytes(config.HEAD_DIM)
    FIRST: gl.constexpr = first_columns(config.HEAD_DIM)
    SECOND: gl.constexpr = config.HEAD_DIM - FIRST
    bars, info = shared.bars, shared.info
    base = shared_base()
    first_at = base + config.DQ_AT + INDEX * BYTES[0]
    second_at = base + config.DQ_AT + DQ_WRITERS * BYTES[0] + INDEX * BYTES[1]
    bar = base + config.BARRIERS_AT + (MBAR.DQ_FETCHED + INDEX) * 8
    dq_acc = info.pointer(ADDRESS.DQ_ACC, gl.float32)
    load_bulk((dq_acc + acc_row * FIRST).to(gl.int64), first_at, num_rows * (FIRST * 4), bar)
    await_phase(bar, 0)
    if SECOND > 0:
        total_q = info.number(NUMBER.TOTAL_Q).to(gl.int64)
        second = (
            dq_acc + total_q * (info.number(NUMBER.NUM_SEGMENTS) * config.HEADS * FIRST) + acc_row * SECOND
        )  # fmt: skip
        load_bulk(second.to(gl.int64), second_at, num_rows * (SECOND * 4), bar)
        await_phase(bar, 1)
    dq = info.pointer(ADDRESS.DQ, shared.tiles.dtype)
    dq += m_row.to(gl.int64) * gradient_stride(info, config.STRIDE_DQT, 2)
    dq += head // config.HEADS * info.stride(ADDRESS.BATCH_STRIDES + 2)
    dq += head % config.HEADS * info.stride(ADDRESS.HEAD_STRIDES + 2)
    scale = info.number(NUMBER.SCALE).to(gl.float32, bitcast=True)
    round_rows(first_at, dq, num_rows, scale, BLOCK_M, FIRST, True, gradient_stride(info, config.STRIDE_DQT, 2))
    if SECOND > 0:
        stride = gradient_stride(info, config.STRIDE_DQT, 2)
        round_rows(second_at, dq + FIRST, num_rows, scale, BLOCK_M, SECOND, False, stride)
    meet_in_warp()
    if SECOND == 0:
        # The barrier goes through two phases each time, so that its phase need not be remembered.
        mbarrier.arrive(bars.index(MBAR.DQ_FETCHED + INDEX), count=1)


@gluon.jit
def _release(dq_empty, semaphore_ptr, ORDERED: gl.constexpr):
    """Release the stage once it has been read, and the block once the addition has arrived."""
    await_bulk_reads()
    mbarrier.arrive(dq_empty, count=1)
    if ORDERED:
        release_semaphore(semaphore_ptr.to(gl.int64))


@gluon.jit
def write_dq(INDEX: gl.constexpr, dq_acc2_descs, shared, config):
    """Add the consumers' dq to the accumulator, block by block. DQ_WRITERS warps take turns by stage.

    With ROUNDS_DQ the tile that adds last to a block also writes its dq: the sum comes back and is rounded.
    """
    GROUP: gl.constexpr = config.GROUP
    ORDER: gl.constexpr = config.ORDER
    ORDERED: gl.constexpr = config.ORDERED
    WAVE: gl.constexpr = config.WAVE
    KV_STAGES: gl.constexpr = config.KV_STAGES
    BYTES: gl.constexpr = dq_stage_bytes(config.HEAD_DIM)
    FIRST: gl.constexpr = first_columns(config.HEAD_DIM)
    SECOND: gl.constexpr = config.HEAD_DIM - FIRST
    FIRST_AT: gl.constexpr = config.DQ_AT + INDEX * BYTES[0]
    SECOND_AT: gl.constexpr = config.DQ_AT + DQ_WRITERS * BYTES[0] + INDEX * BYTES[1]
    bars, info = shared.bars, shared.info
    base = shared_base()
    count = 0
    first_block = INDEX
    total_q = info.number(NUMBER.TOTAL_Q)
    num_segments = info.number(NUMBER.NUM_SEGMENTS)
    semaphores = semaphores_per_head(total_q, num_segments, ORDER)
    heads = head_count(num_segments, config.HEADS, ORDER)
    mbarrier.wait(bars.index(MBAR.KV_FULL), 0)
    if ORDERED:
        await_kernel()
    num_blocks = info.tile(0).read(TILE.NUM_BLOCKS)
    while num_blocks > 0:
        tile = info.tile(count)
        seen_blocks = tile.read(TILE.NUM_SEEN_BLOCKS)
        m_start = tile.read(TILE.M_START)
        q_start = 0
        first_semaphore = 0
        if not is_dense(ORDER):
            q_start = tile.read(TILE.Q_START)
            first_semaphore = tile.read(TILE.SEMAPHORE)
        first_head = tile.read(TILE.HEAD) * GROUP
        start_block = tile.read(TILE.START_BLOCK) if WAVE > 1 else 0
        barrier_arrive(NAMED.KV_EMPTY + count % KV_STAGES, KV_THREADS)
        block = first_block
        while block < GROUP * num_blocks:
            step = block % num_blocks
            if step < seen_blocks:
                m_row = m_start + m_block_of_step(step, start_block, num_blocks, config.HAS_RIGHT) * BLOCK_M
                head = (first_head + block // num_blocks).to(gl.int64)
                # Without an order no tile is the first to add.
                semaphore = 1
                is_last = False
                semaphore_ptr = (
                    info.pointer(ADDRESS.SEMAPHORES, gl.int32) + head * semaphores + first_semaphore + m_row // BLOCK_M
                )  # fmt: skip
                if ORDERED:
                    # Read here, because a dq writer has few registers.
                    n_block = tile.read(TILE.N_BLOCK)
                    if WAVE > 1:
                        distance = acc2_distance(total_q, BLOCK_M)
                        semaphore = semaphore_value(n_block, step, start_block, num_blocks, distance, WAVE)
                        semaphore_ptr += gl.where(step < start_block, heads * semaphores, 0)
                    else:
                        shift = tile.read(TILE.SHIFT)
                        earliest, latest = tiles_seeing(
                            tile.read(TILE.LAST_N_BLOCK), m_row, shift, info.number(NUMBER.WINDOW_RIGHT),
                            info.number(NUMBER.WINDOW_LEFT), config.HAS_RIGHT, config.HAS_LEFT, BLOCK_N, BLOCK_M,
                        )  # fmt: skip
                        semaphore = n_block - earliest
                        is_last = n_block == latest
                    # Waits while the consumers still make dq.
                    acquire_semaphore(semaphore_ptr.to(gl.int64), semaphore)
                barrier_sync(NAMED.DQ_FULL + INDEX, config.DQ_THREADS)
                num_rows = gl.minimum(tile.read(TILE.Q_LENGTH) - m_row, BLOCK_M)
                acc_row = head * total_q + q_start + m_row
                if step < start_block:
                    if WAVE > 1:
                        acc2_row = q_start + m_row - acc2_distance(total_q, BLOCK_M) * BLOCK_M
                        _write_acc2(
                            dq_acc2_descs[0], shared.tiles, FIRST_AT, head.to(gl.int32), acc2_row, semaphore
                        )  # fmt: skip
                        if SECOND > 0:
                            _write_acc2(
                                dq_acc2_descs[1], shared.tiles, SECOND_AT, head.to(gl.int32), acc2_row, semaphore
                            )  # fmt: skip
                else:
                    dq_acc = info.pointer(ADDRESS.DQ_ACC, gl.float32)
                    first = dq_acc + acc_row * FIRST
                    reduce_bulk(first.to(gl.int64), base + FIRST_AT, num_rows * (FIRST * 4), semaphore)
                    if SECOND > 0:
                        second = dq_acc + total_q.to(gl.int64) * (heads * FIRST) + acc_row * SECOND
                        reduce_bulk(second.to(gl.int64), base + SECOND_AT, num_rows * (SECOND * 4), semaphore)
                if config.ROUNDS_DQ:
                    if is_last:
                        _round_block(INDEX, shared, head, m_row, num_rows, acc_row, config)
                        mbarrier.arrive(bars.index(MBAR.DQ_EMPTY + INDEX), count=1)
                    else:
                        _release(bars.index(MBAR.DQ_EMPTY + INDEX), semaphore_ptr, ORDERED)
                else:
                    _release(bars.index(MBAR.DQ_EMPTY + INDEX), semaphore_ptr, ORDERED)
            else:
                barrier_sync(NAMED.DQ_FULL + INDEX, config.DQ_THREADS)
                mbarrier.arrive(bars.index(MBAR.DQ_EMPTY + INDEX), count=1)
            block += DQ_WRITERS
        first_block = block - GROUP * num_blocks
        count += 1
        mbarrier.wait(bars.index(MBAR.KV_FULL + count % KV_STAGES), (count // KV_STAGES) & 1)
        num_blocks = info.tile(count).read(TILE.NUM_BLOCKS)
    admit_kernel()
    # Shared memory must not end before everything that is sent from it.
    await_bulk_writes()
