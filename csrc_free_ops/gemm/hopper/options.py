"""Compile-time options of the Hopper GEMM, shared by its partitions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.limits import REGISTERS, SHARED_BYTES
from csrc_free_ops.tiles.hopper.versions import aggregate

GRADIENT_SUFFIX = "_gradient"
# Shared memory holds sub-tiles of 64 rows and 64 columns, each in a half type.
SUBTILE_BYTES = gl.constexpr(64 * 64 * 2)
# Triton uses the named barriers below this one when a kernel has five partitions; the hardware has 16.
FIRST_BARRIER, NAMED_BARRIERS = 6, 16


@gluon.constexpr_function
def is_gradient(epilogue):
    return epilogue.endswith(GRADIENT_SUFFIX)


@aggregate
class GemmOptions:
    """Arguments of `_gemm_hopper_kernel`, and where its stages, finished tiles and barriers lie."""

    EPILOGUE: gl.constexpr  # "none", an activation, "swiglu", "rotary" or "<activation>_gradient"
    ACTIVATION: gl.constexpr  # EPILOGUE without "_gradient"
    GRADIENT: gl.constexpr  # whether EPILOGUE is a gradient: weight is [K, N] then, and pre is loaded
    HAS_BIAS: gl.constexpr
    KEEPS_PRE: gl.constexpr
    COLUMN_SUMS: gl.constexpr  # whether a gradient's epilogue stores sums over rows
    WIDTH: gl.constexpr  # columns of out without padding
    PARTNER: gl.constexpr  # rows of weight from a gate to the value that it gates
    HALVES: gl.constexpr  # parts of weight that one tile reads: 2 for "swiglu", else 1
    STRIDE_OUT: gl.constexpr
    HEAD_DIM: gl.constexpr
    NUM_HEADS: gl.constexpr
    NUM_K_HEADS: gl.constexpr
    STRIDE_COS: gl.constexpr
    STRIDE_SIN: gl.constexpr
    SHARED_ANGLES: gl.constexpr
    GROUPS: gl.constexpr  # consumer warpgroups, each with 64 rows
    EPILOGUE_WARPS: gl.constexpr
    COLUMNS: gl.constexpr  # columns of a tile
    SUBTILES: gl.constexpr  # sub-tiles that these columns need
    STAGES: gl.constexpr  # pipeline stages
    STEPS: gl.constexpr  # steps of 64 over K
    TILE_SUBTILES: gl.constexpr  # index of the first sub-tile behind the pipeline: a finished tile, then pre
    BARRIER_SUBTILE: gl.constexpr  # index of the sub-tile that holds the mbarriers
    STAGE_EMPTY: gl.constexpr  # named barrier of stage 0: consumers have read the stage
    STAGE_THREADS: gl.constexpr
    TILE_FULL: gl.constexpr  # named barrier of group 0: its part of a finished tile is in shared memory
    TILE_EMPTY: gl.constexpr  # named barrier of group 0: the epilogue warps have read that part
    TILE_THREADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, N, K, PARTNER, GROUPS, COLUMNS, STAGES, EPILOGUE, HAS_BIAS, KEEPS_PRE, COLUMN_SUMS, STRIDE_OUT,
        HEAD_DIM, NUM_HEADS, NUM_K_HEADS, STRIDE_COS, STRIDE_SIN, SHARED_ANGLES, EPILOGUE_WARPS,
    ):  # fmt: skip
        gradient = is_gradient(EPILOGUE)
        halves = 2 if EPILOGUE == "swiglu" else 1
        subtiles = (COLUMNS + 63) // 64
        pipeline = STAGES * (GROUPS + subtiles)
        self.EPILOGUE = gl.constexpr(EPILOGUE)
        self.ACTIVATION = gl.constexpr(EPILOGUE.removesuffix(GRADIENT_SUFFIX))
        self.GRADIENT = gl.constexpr(gradient)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.KEEPS_PRE = gl.constexpr(KEEPS_PRE)
        self.COLUMN_SUMS = gl.constexpr(COLUMN_SUMS)
        self.WIDTH = gl.constexpr(N // halves)
        self.PARTNER = gl.constexpr(PARTNER)
        self.HALVES = gl.constexpr(halves)
        self.STRIDE_OUT = gl.constexpr(STRIDE_OUT)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.NUM_HEADS = gl.constexpr(NUM_HEADS)
        self.NUM_K_HEADS = gl.constexpr(NUM_K_HEADS)
        self.STRIDE_COS = gl.constexpr(STRIDE_COS)
        self.STRIDE_SIN = gl.constexpr(STRIDE_SIN)
        self.SHARED_ANGLES = gl.constexpr(SHARED_ANGLES)
        self.GROUPS = gl.constexpr(GROUPS)
        self.EPILOGUE_WARPS = gl.constexpr(EPILOGUE_WARPS)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.SUBTILES = gl.constexpr(subtiles)
        self.STAGES = gl.constexpr(STAGES)
        self.STEPS = gl.constexpr((K + 63) // 64)
        self.TILE_SUBTILES = gl.constexpr(pipeline)
        self.BARRIER_SUBTILE = gl.constexpr(pipeline + GROUPS * subtiles * (2 if gradient else 1))
        self.STAGE_EMPTY = gl.constexpr(FIRST_BARRIER)
        self.STAGE_THREADS = gl.constexpr(32 + 128 * GROUPS)
        self.TILE_FULL = gl.constexpr(FIRST_BARRIER + STAGES)
        self.TILE_EMPTY = gl.constexpr(FIRST_BARRIER + STAGES + GROUPS)
        self.TILE_THREADS = gl.constexpr(128 + 32 * EPILOGUE_WARPS)

    @gluon.constexpr_function
    def has_barriers(self):
        """Whether the hardware has as many named barriers as stages and groups need."""
        return FIRST_BARRIER + self.STAGES.value + 2 * self.GROUPS.value <= NAMED_BARRIERS

    @gluon.constexpr_function
    def has_memory(self):
        """Whether the sub-tiles and the one for mbarriers fit the shared memory of a program."""
        return (self.BARRIER_SUBTILE.value + 1) * SUBTILE_BYTES.value <= SHARED_BYTES.value

    @gluon.constexpr_function
    def has_registers(self, consumer, epilogue, producer):
        """Whether all warpgroups get these registers a thread; two epilogue warps share one with the producer warp."""
        last = epilogue + producer if self.EPILOGUE_WARPS.value == 4 else max(epilogue, producer)
        return 128 * (self.GROUPS.value * consumer + last) <= REGISTERS.value
