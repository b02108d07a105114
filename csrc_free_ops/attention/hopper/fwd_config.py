"""What the warps of the Hopper forward agree on: constants of the launch, barriers, and slots of a tile's info.

    barrier           arrive                   wait        meaning
    Q_FULL + group    producer warp, TMA       consumer    rows of q and the tile's info are in shared memory
    K_FULL, V_FULL    TMA                      consumers   a block of keys, or of values, is in its stage
    q_empty + group   consumer                 producer    the consumer has read its rows of q
    k_empty, v_empty  consumers                producer    they have read the stage

The first two rows are mbarriers in shared memory, the others named barriers, which count threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.attention.hopper.scheduler import DENSE_ENDS
from csrc_free_ops.attention.hopper.tile_info import SLOTS, TILE_INFOS
from csrc_free_ops.tiles.hopper.limits import REGISTERS, SHARED_BYTES, buffer_bytes
from csrc_free_ops.tiles.hopper.versions import aggregate
from csrc_free_ops.tiles.hopper.warpgroup import PUBLISHED

# Triton uses the named barriers below this one in a kernel of four warpgroups; the hardware has 16.
FIRST_BARRIER, NAMED_BARRIERS = 5, 16
# The first mbarrier of each kind, one for each group or stage, and the arrivals at each.
Q_FULL, K_FULL, V_FULL = (gl.constexpr(at) for at in (0, 4, 8))
ARRIVALS = gl.constexpr((PUBLISHED.value,) * 4 + (1,) * 8)
BARRIER_BYTES = gl.constexpr(16 * 8)

# Slots of a tile's info. BLOCKS is the number of blocks of keys, 0 after the last tile. Blocks are counted down: those
# up to MASKED_UP_TO and those above MASKED_ABOVE need masks. In DENSE_ENDS each consumer has an info of its own, and
# both read the first SHARED blocks.
BLOCKS, NUM_KEYS, MASKED_ABOVE, MASKED_UP_TO, SEEN_LOW, SEEN_HIGH, ROW, ROWS, HEAD, INSIDE, SHARED = (
    gl.constexpr(slot) for slot in range(11)
)
# Slots of addresses: the first two of a tile and of the launch, the others of the launch alone.
OUT, LSE, TILE_COUNTER, OUT_BATCH_STRIDE, OUT_HEAD_STRIDE, OUT_ROW_STRIDE, CAST_COUNTERS = (
    gl.constexpr(slot) for slot in range(7)
)


@aggregate
class ForwardConfig:
    """Constants of a launch, and what follows from them."""

    HEAD_DIM: gl.constexpr
    HEADS: gl.constexpr  # query heads
    GROUP: gl.constexpr  # query heads of a key head
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    ORDER: gl.constexpr  # of tiles (`scheduler`)
    GROUPS: gl.constexpr  # consumer warpgroups, each with 64 rows of a tile
    BLOCK_N: gl.constexpr  # keys of a block
    STAGES: gl.constexpr  # pipeline stages, each with a block of keys and of values
    OVERLAP: gl.constexpr  # whether a block's q k^T runs beside the last block's p v
    HAS_LSE: gl.constexpr
    HAS_SINKS: gl.constexpr
    OUT_STRIDE: gl.constexpr  # between rows of out; 0 if it follows from a batch and is in OUT_ROW_STRIDE
    FOLDED: gl.constexpr  # a bit for each of q, k, v and out (`coordinates`)
    OUT_DTYPE: gl.constexpr
    V_WIDTH: gl.constexpr  # columns of a tile of v in shared memory
    CAST_WARPS: gl.constexpr  # warps that round fp32 keys and values, or 0
    SEPARATE_Q: gl.constexpr  # whether rounded q has memory of its own, so that the next rows can come early
    SKIPPED_ROWS: gl.constexpr  # segments of up to so many rows are left to the kernel before
    K_STRIDE: gl.constexpr  # between rows of fp32 keys; 0 where an argument at run time has it
    V_STRIDE: gl.constexpr  # between rows of fp32 values
    ENDS: gl.constexpr  # whether ORDER is DENSE_ENDS
    V_TILES: gl.constexpr  # tiles of v of one block
    BARRIERS_AT: gl.constexpr  # bytes from the start of shared memory to the mbarriers, behind all stages of v
    STAGE_THREADS: gl.constexpr  # all consumers and the producer
    Q_THREADS: gl.constexpr  # one consumer and the producer
    K_EMPTY: gl.constexpr
    V_EMPTY: gl.constexpr
    Q_EMPTY: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, HEAD_DIM, HEADS, GROUP, HAS_LEFT, HAS_RIGHT, ORDER, GROUPS, BLOCK_N, STAGES, OVERLAP, HAS_LSE, HAS_SINKS,
        OUT_STRIDE, FOLDED, OUT_DTYPE, V_WIDTH, CAST_WARPS=0, SEPARATE_Q=False, K_STRIDE=0, V_STRIDE=0, SKIPPED_ROWS=0,
    ):  # fmt: skip
        v_tiles = -(-HEAD_DIM // V_WIDTH)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.ORDER = gl.constexpr(ORDER)
        self.GROUPS = gl.constexpr(GROUPS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.OVERLAP = gl.constexpr(OVERLAP)
        self.HAS_LSE = gl.constexpr(HAS_LSE)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.OUT_STRIDE = gl.constexpr(OUT_STRIDE)
        self.FOLDED = gl.constexpr(FOLDED)
        self.SKIPPED_ROWS = gl.constexpr(SKIPPED_ROWS)
        self.OUT_DTYPE = gl.constexpr(OUT_DTYPE)
        self.V_WIDTH = gl.constexpr(V_WIDTH)
        self.CAST_WARPS = gl.constexpr(CAST_WARPS)
        self.SEPARATE_Q = gl.constexpr(SEPARATE_Q)
        self.K_STRIDE = gl.constexpr(K_STRIDE)
        self.V_STRIDE = gl.constexpr(V_STRIDE)
        self.ENDS = gl.constexpr(ORDER == DENSE_ENDS.value)
        self.V_TILES = gl.constexpr(v_tiles)
        self.BARRIERS_AT = gl.constexpr(STAGES * v_tiles * BLOCK_N * V_WIDTH * 2)
        self.STAGE_THREADS = gl.constexpr(32 + 128 * GROUPS)
        self.Q_THREADS = gl.constexpr(32 + 128)
        self.K_EMPTY = gl.constexpr(FIRST_BARRIER)
        self.V_EMPTY = gl.constexpr(FIRST_BARRIER + STAGES)
        self.Q_EMPTY = gl.constexpr(FIRST_BARRIER + 2 * STAGES)

    @gluon.constexpr_function
    def has_barriers(self):
        """Whether there are as many named barriers and mbarriers as stages and groups need."""
        named = FIRST_BARRIER + 2 * self.STAGES.value + self.GROUPS.value
        return named <= NAMED_BARRIERS and max(self.STAGES.value, self.GROUPS.value) <= K_FULL.value

    @gluon.constexpr_function
    def has_memory(self, buffers):
        """Whether the buffers and the infos fit the shared memory of a program."""
        total = TILE_INFOS.value * SLOTS.value * 4 + (TILE_INFOS.value + 1) * SLOTS.value * 8
        for buffer in buffers:
            total += buffer_bytes(buffer)
        return total <= SHARED_BYTES.value

    @gluon.constexpr_function
    def has_registers(self, consumer, producer):
        """Whether all warpgroups get these registers a thread; warps that do not compute share one."""
        return 128 * (self.GROUPS.value * consumer + producer) <= REGISTERS.value


@gluon.jit
def info_index(count, INDEX: gl.constexpr, config):
    """Which tile info consumer INDEX reads for a program's tile `count`."""
    if config.ENDS:
        return count % 2 * config.GROUPS + INDEX
    else:
        return count % TILE_INFOS


@gluon.jit
def out_row_stride(info, config):
    """Elements from a row of out to the next: a constant, or read anew at each use, since no register is free."""
    if config.OUT_STRIDE > 0:
        return config.OUT_STRIDE
    else:
        return info.stride(OUT_ROW_STRIDE)
