"""The tile scheduler of the Hopper GEMM: which tiles a persistent program computes, and in which order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.versions import aggregate


@aggregate
class TileScheduler:
    """The tiles of a program: those at positions program_id, program_id + num_programs and so on, below `end`.

    Tiles are ordered by rows. The first `tall` tiles of rows have 64 GROUPS rows, the others 64 fewer. Short tiles come
    last, so that all programs end at about the same time.
    """

    tall: gl.tensor
    end: gl.tensor
    GROUPS: gl.constexpr
    TILES_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tall, end, GROUPS, TILES_N):
        self.tall = tall
        self.end = end
        self.GROUPS = gl.constexpr(GROUPS)
        self.TILES_N = gl.constexpr(TILES_N)

    @gluon.jit
    def locate(self, position):
        """(first row, index along N, whether every consumer has rows) of the tile at `position`."""
        tile = _tile_at(position, self.tall, self.TILES_N)
        tile_m = tile // self.TILES_N
        row = gl.minimum(tile_m, self.tall) * (64 * self.GROUPS)
        row += gl.maximum(tile_m - self.tall, 0) * (64 * self.GROUPS - 64)
        return row, tile % self.TILES_N, tile_m < self.tall


@gluon.jit
def _tile_at(position, tall, TILES_N: gl.constexpr):
    """The tile at a program's `position`.

    Programs take waves of short tiles alone in reverse order, because those with a short tile in the mixed wave are
    ready first.
    """
    reverses = position - gl.program_id(0) >= tall * TILES_N
    return gl.where(reverses, position + gl.num_programs(0) - 1 - 2 * gl.program_id(0), position)


@gluon.jit
def schedule_tiles(total, tall, GROUPS: gl.constexpr, TILES_N: gl.constexpr):
    """The scheduler of this program for `total` rows; in a last wave that is not full some programs have no tile."""
    SHORT_ROWS: gl.constexpr = GROUPS * 64 - 64
    short = (gl.maximum(total - tall * (GROUPS * 64), 0) + SHORT_ROWS - 1) // SHORT_ROWS
    num_tiles = (tall + short) * TILES_N
    full = num_tiles // gl.num_programs(0) * gl.num_programs(0)
    has_last = _tile_at(full + gl.program_id(0), tall, TILES_N) < num_tiles
    return TileScheduler(tall, full + gl.where(has_last, gl.num_programs(0), 0), GROUPS, TILES_N)
