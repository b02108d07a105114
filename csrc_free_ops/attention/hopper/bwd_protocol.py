"""Sizes, barriers and slots of a tile's info on which the partitions of the Hopper backward agree.

    barrier             arrives                  waits                    says
    KV_FULL             producer, TMA            consumers, dq writers    keys, values and info of a tile are there
    KV_EMPTY            consumers, dq writers    producer                 keys, values and info have been read
    V_EMPTY             consumers                producer                 the values have been read
    Q_FULL, DOUT_FULL   producer, TMA            consumers                a block of queries is there
    Q_EMPTY,            consumers                producer                 the block has been read
      DOUT_EMPTY
    DS_FULL             a consumer               consumers that make dq   its ds is in shared memory
    DQ_FULL             consumers that make dq   a dq writer              a block of dq is in shared memory
    DQ_EMPTY            a dq writer              consumers that make dq   the block of dq has been read
    DQ_FETCHED          TMA                      a dq writer              the finished sum is where the block was

KV_EMPTY, V_EMPTY, Q_EMPTY, DOUT_EMPTY, DS_FULL and DQ_FULL are named barriers, which count threads. The others lie in
shared memory. All 32 threads of the producer arrive at KV_FULL and Q_FULL, because each has stored a part of the info,
or of lse and delta.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.attention.hopper.dq_order import block_of_step
from csrc_free_ops.attention.hopper.scheduler import is_dense
from csrc_free_ops.attention.hopper.tile_info import SLOTS, TILE_INFOS, LaunchInfo
from csrc_free_ops.configs import attention_hopper_backward
from csrc_free_ops.tiles.hopper.limits import REGISTERS, SHARED_BYTES
from csrc_free_ops.tiles.hopper.versions import aggregate
from csrc_free_ops.tiles.hopper.warpgroup import PUBLISHED
from csrc_free_ops.tiles.scores import LOG2E

BLOCK_M, BLOCK_N = gl.constexpr(attention_hopper_backward.BLOCK_M), gl.constexpr(attention_hopper_backward.BLOCK_N)
# Rows of every tile in shared memory: queries of a block, or keys of one warpgroup.
ROWS = gl.constexpr(64)
# Bytes of 16 columns of a tile; bytes per column of a row of q, of dout and of dq's accumulator.
STRIP_PAIR_BYTES, ROW_BYTES = gl.constexpr(ROWS.value * 16 * 2), gl.constexpr(8)
# Stages of dout, of ds and of dq; the warps that write dq take turns by stage.
DOUT_STAGES, DQ_WRITERS = gl.constexpr(2), gl.constexpr(2)
# The row of lse in shared memory that belongs to the first stage; barriers lie in front of it.
LSE_ROW = gl.constexpr(1)
# Threads of both consumers; with the producer; with the producer and the dq writers.
CONSUMER_THREADS, STAGE_THREADS, KV_THREADS = (gl.constexpr(threads) for threads in (256, 288, 352))


@aggregate
class NamedBarriers:
    """Numbers of named barriers, the first of each kind. Triton takes 0 to 2; partitions of one warp need none.

    The pipeline's stages begin at Q_EMPTY and may take what is left of the 16 barriers that there are. With two stages
    of keys KV_EMPTY has two barriers. With one stage, V_EMPTY releases the values before the keys.
    """

    KV_EMPTY: gl.constexpr
    V_EMPTY: gl.constexpr
    DS_FULL: gl.constexpr
    DQ_FULL: gl.constexpr
    DOUT_EMPTY: gl.constexpr
    Q_EMPTY: gl.constexpr

    @gluon.constexpr_function
    def __init__(self):
        self.KV_EMPTY, self.V_EMPTY = gl.constexpr(3), gl.constexpr(4)
        self.DS_FULL = gl.constexpr(5)
        self.DQ_FULL = gl.constexpr(9)
        self.DOUT_EMPTY = gl.constexpr(11)
        self.Q_EMPTY = gl.constexpr(13)


@aggregate
class MemoryBarriers:
    """Numbers of barriers in shared memory, the first of each kind."""

    KV_FULL: gl.constexpr
    Q_FULL: gl.constexpr
    DOUT_FULL: gl.constexpr
    DQ_EMPTY: gl.constexpr
    DQ_FETCHED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self):
        self.KV_FULL = gl.constexpr(0)
        self.Q_FULL = gl.constexpr(2)
        self.DOUT_FULL = gl.constexpr(5)
        self.DQ_EMPTY = gl.constexpr(7)
        self.DQ_FETCHED = gl.constexpr(9)


# A producer keeps in slots what it has no registers for, so slots are few. Three unions hold what only one kind of call
# needs: BOUND_OR_START, and the LAYOUT of tensors in addresses and in numbers.


@aggregate
class TileSlots:
    """Numbers that the producer publishes of a tile."""

    # Blocks of queries to go over: at least 1, or 0 after the last tile.
    NUM_BLOCKS: gl.constexpr
    # Queries from the first block on.
    NUM_QUERIES: gl.constexpr
    # BOUND_OR_START. With bounds: blocks at most so far from the end need no mask. Without: where the tile begins.
    UNMASKED_HEAD: gl.constexpr
    START_BLOCK: gl.constexpr
    # Blocks at the end that need a mask. Key 0 is seen by queries SEEN_LOW to SEEN_HIGH, counted from M_START.
    MASKED_TAIL: gl.constexpr
    SEEN_LOW: gl.constexpr
    SEEN_HIGH: gl.constexpr
    NUM_KEYS: gl.constexpr
    HEAD: gl.constexpr
    # Blocks that see any of the tile's keys; there may be none.
    NUM_SEEN_BLOCKS: gl.constexpr
    # The tile's number in its segment, and that of the segment's last tile.
    N_BLOCK: gl.constexpr
    LAST_N_BLOCK: gl.constexpr
    # The first query of the first block, counted in the segment; where the segment's queries begin; how many they are,
    # and how many more than keys.
    M_START: gl.constexpr
    Q_START: gl.constexpr
    Q_LENGTH: gl.constexpr
    SHIFT: gl.constexpr
    # The segment's first semaphore, counted from the first of the head.
    SEMAPHORE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self):
        slots = [gl.constexpr(slot) for slot in range(16)]
        BOUND_OR_START = slots[2]
        self.NUM_BLOCKS, self.NUM_QUERIES = slots[:2]
        self.UNMASKED_HEAD, self.START_BLOCK = BOUND_OR_START, BOUND_OR_START
        self.MASKED_TAIL, self.SEEN_LOW, self.SEEN_HIGH, self.NUM_KEYS, self.HEAD, self.NUM_SEEN_BLOCKS = slots[3:9]
        self.N_BLOCK, self.LAST_N_BLOCK, self.M_START, self.Q_START, self.Q_LENGTH = slots[9:14]
        self.SHIFT, self.SEMAPHORE = slots[14:]


@aggregate
class LaunchAddresses:
    """Pointers and strides of a launch; a tile has DK and DV of its own."""

    DK: gl.constexpr
    DV: gl.constexpr
    LSE: gl.constexpr
    DELTA: gl.constexpr
    DQ_ACC: gl.constexpr
    SEMAPHORES: gl.constexpr
    TILE_COUNTER: gl.constexpr
    # LAYOUT. Packed tensors: boundaries.
    CU_K: gl.constexpr
    CU_Q: gl.constexpr
    # Dense tensors: dq, and strides of dk, dv and dq, three of a batch and then three of a head.
    DQ: gl.constexpr
    BATCH_STRIDES: gl.constexpr
    HEAD_STRIDES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self):
        slots = [gl.constexpr(slot) for slot in range(16)]
        LAYOUT = slots[7:]
        self.DK, self.DV, self.LSE, self.DELTA, self.DQ_ACC, self.SEMAPHORES, self.TILE_COUNTER = slots[:7]
        self.CU_K, self.CU_Q = LAYOUT[:2]
        self.DQ, self.BATCH_STRIDES, self.HEAD_STRIDES = LAYOUT[0], LAYOUT[1], LAYOUT[4]


@aggregate
class LaunchNumbers:
    """Numbers of a launch."""

    TOTAL_K: gl.constexpr
    TOTAL_Q: gl.constexpr
    NUM_SEGMENTS: gl.constexpr
    WINDOW_RIGHT: gl.constexpr
    WINDOW_LEFT: gl.constexpr
    # LAYOUT. One segment: start and end, of keys and of queries.
    K_SPAN: gl.constexpr
    Q_SPAN: gl.constexpr
    # Dense tensors: the bits of the scale, and row strides of dk, dv and dq that are no constants.
    SCALE: gl.constexpr
    ROW_STRIDES: gl.constexpr
    # Tiles of all heads, and what `survey_segments` returns. The producer writes both, because it lacks registers.
    NUM_TILES: gl.constexpr
    SEGMENTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self):
        slots = [gl.constexpr(slot) for slot in range(16)]
        LAYOUT = slots[5:9]
        self.TOTAL_K, self.TOTAL_Q, self.NUM_SEGMENTS, self.WINDOW_RIGHT, self.WINDOW_LEFT = slots[:5]
        self.K_SPAN, self.Q_SPAN = LAYOUT[0], LAYOUT[2]
        self.SCALE, self.ROW_STRIDES = LAYOUT[:2]
        self.NUM_TILES, self.SEGMENTS = slots[9:11]


NAMED, MBAR = NamedBarriers(), MemoryBarriers()
TILE, ADDRESS, NUMBER = TileSlots(), LaunchAddresses(), LaunchNumbers()


@gluon.constexpr_function
def tile_columns(head_dim):
    """Columns of a tile in shared memory. Wide tiles take fewer requests; a product must end where a tile does."""
    return 64 if head_dim % 64 == 0 else 16


@gluon.constexpr_function
def tile_count(head_dim):
    return -(-head_dim // tile_columns(head_dim))


@gluon.constexpr_function
def dq_acc_count(wave):
    """Accumulators of dq: two if a wave's tiles begin at blocks of their own (`dq_order`)."""
    return 2 if wave > 1 else 1


@aggregate
class BackwardConfig:
    """Constants of a launch, and what follows from them for all partitions."""

    HEAD_DIM: gl.constexpr
    HEADS: gl.constexpr
    GROUP: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    ORDER: gl.constexpr
    DTYPE: gl.constexpr
    KV_STAGES: gl.constexpr
    STAGES: gl.constexpr
    ORDERED: gl.constexpr
    WAVE: gl.constexpr
    # Between rows of dk, dv and dq; 0 where strides follow from a batch and are in ROW_STRIDES.
    STRIDE_DKT: gl.constexpr
    STRIDE_DVT: gl.constexpr
    STRIDE_DQT: gl.constexpr
    FOLDED: gl.constexpr
    DKDV_SPLITS: gl.constexpr
    # Whether the dq writers round dq, which nobody does after a dense launch.
    ROUNDS_DQ: gl.constexpr
    # Whether each consumer makes dq of every other block, or some columns of every block: wide accumulators leave no
    # registers for all columns.
    ALTERNATES: gl.constexpr
    # Threads that make the dq of one block, and those of the warp that writes it.
    DQ_THREADS: gl.constexpr
    # Shared memory: tiles of one block, their columns and bytes, and where in bytes the parts of it begin.
    TILES: gl.constexpr
    COLUMNS: gl.constexpr
    STAGE_BYTES: gl.constexpr
    Q_AT: gl.constexpr
    DOUT_AT: gl.constexpr
    DS_AT: gl.constexpr
    DQ_AT: gl.constexpr
    BARRIERS_AT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, ORDER, DTYPE, KV_STAGES, STAGES, ORDERED, WAVE,
        STRIDE_DKT, STRIDE_DVT, STRIDE_DQT, FOLDED, DKDV_SPLITS,
    ):  # fmt: skip
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.ORDER = gl.constexpr(ORDER)
        self.DTYPE = gl.constexpr(DTYPE)
        self.KV_STAGES = gl.constexpr(KV_STAGES)
        self.STAGES = gl.constexpr(STAGES)
        self.ORDERED = gl.constexpr(ORDERED)
        self.WAVE = gl.constexpr(WAVE)
        self.STRIDE_DKT = gl.constexpr(STRIDE_DKT)
        self.STRIDE_DVT = gl.constexpr(STRIDE_DVT)
        self.STRIDE_DQT = gl.constexpr(STRIDE_DQT)
        self.FOLDED = gl.constexpr(FOLDED)
        self.DKDV_SPLITS = gl.constexpr(DKDV_SPLITS)
        self.ROUNDS_DQ = gl.constexpr(is_dense(ORDER) and ORDERED)
        alternates = HEAD_DIM <= 80
        self.ALTERNATES = gl.constexpr(alternates)
        self.DQ_THREADS = gl.constexpr((128 if alternates else 256) + 32)
        tiles, columns = tile_count(HEAD_DIM), tile_columns(HEAD_DIM)
        tile_bytes = ROWS.value * columns * 2
        stage_bytes = tiles * tile_bytes
        self.TILES = gl.constexpr(tiles)
        self.COLUMNS = gl.constexpr(columns)
        self.STAGE_BYTES = gl.constexpr(stage_bytes)
        q_at = KV_STAGES * 4 * stage_bytes
        dout_at = q_at + STAGES * stage_bytes
        ds_at = dout_at + DOUT_STAGES.value * stage_bytes
        # TMA adds to the second accumulator in blocks of 8 KiB, so BARRIERS_AT is a multiple of that.
        alignment = 8192 if alternates else tile_bytes
        dq_at = -(-(ds_at + 16 * STRIP_PAIR_BYTES.value) // alignment) * alignment
        self.Q_AT = gl.constexpr(q_at)
        self.DOUT_AT = gl.constexpr(dout_at)
        self.DS_AT = gl.constexpr(ds_at)
        self.DQ_AT = gl.constexpr(dq_at)
        end = dq_at + DQ_WRITERS.value * ROWS.value * HEAD_DIM * 4
        self.BARRIERS_AT = gl.constexpr(-(-end // alignment) * alignment)


@aggregate
class Shared:
    """Shared memory: tiles, barriers, lse and delta of each stage of q, and the info of tiles and launch.

    Barriers lie in the first row of lse.
    """

    tiles: gl.shared_memory_descriptor
    bars: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    info: LaunchInfo

    @gluon.constexpr_function
    def __init__(self, tiles, bars, lse, delta, info):
        self.tiles = tiles
        self.bars = bars
        self.lse = lse
        self.delta = delta
        self.info = info


@gluon.constexpr_function
def barrier_arrivals(kv_stages):
    """Arrivals at each barrier in shared memory. With one stage of keys, the values bring no info."""
    kv = (PUBLISHED.value, PUBLISHED.value if kv_stages == 2 else 1)
    return (*kv, *(PUBLISHED.value,) * 3, 1, 1, 1, 1, 1, 1)


@gluon.jit
def check_sizes(config, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    """Refuse at build time sizes that the kernel has no room for."""
    gl.static_assert(
        BLOCK_M == ROWS and BLOCK_N == 2 * ROWS,
        "BLOCK_M must be 64 and BLOCK_N 128: a wgmma has 64 rows, and two consumers have 64 keys each",
    )
    gl.static_assert(
        NAMED.Q_EMPTY + config.STAGES <= 16,
        "STAGES is too large: with one named barrier for each stage of q there would be more than 16",
    )
    gl.static_assert(
        config.STAGES >= 2 and config.STAGES <= MBAR.DOUT_FULL - MBAR.Q_FULL,
        "STAGES must be 2 or 3: that many barriers in shared memory are there for q",
    )
    gl.static_assert(config.KV_STAGES == 1 or config.KV_STAGES == 2, "KV_STAGES must be 1 or 2")
    VECTORS: gl.constexpr = (2 * config.STAGES + 1) * BLOCK_M * 4
    INFOS: gl.constexpr = (TILE_INFOS + 1) * SLOTS * (4 + 8)
    gl.static_assert(
        config.BARRIERS_AT + 256 + VECTORS + INFOS <= SHARED_BYTES,
        "tiles need more than the 227 KiB of shared memory of a Hopper GPU: use fewer STAGES or KV_STAGES",
    )
    gl.static_assert(
        256 * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= REGISTERS,
        "two consumers and four other warps need more than the 65536 registers of a multiprocessor",
    )


@gluon.jit
def lse_to_subtract(lse):
    """lse times log2(e), or infinity for rows without keys, whose weights are 0."""
    return gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@gluon.jit
def m_block_of_step(step, start_block, num_blocks, HAS_RIGHT: gl.constexpr):
    """The block of queries that a tile comes to at a step. Only a tile without bounds has a start block."""
    if HAS_RIGHT:
        return num_blocks - 1 - step
    else:
        return block_of_step(step, start_block, num_blocks)


@gluon.jit
def semaphores_per_head(total_q, num_segments, ORDER: gl.constexpr):
    """One semaphore for every block of queries that there may be."""
    if is_dense(ORDER):
        return (total_q + BLOCK_M - 1) // BLOCK_M
    else:
        return total_q // BLOCK_M + num_segments + 2


@gluon.jit
def gradient_stride(info, STRIDE: gl.constexpr, INDEX: gl.constexpr):
    """Elements from a row of dk, dv or dq (INDEX 0, 1, 2) to the next: a constant, or read anew at each use."""
    if STRIDE > 0:
        return STRIDE
    else:
        return info.number(NUMBER.ROW_STRIDES + INDEX)
