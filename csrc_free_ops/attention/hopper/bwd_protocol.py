"""What the partitions of the Hopper backward agree on: sizes, barriers, and what the notes of a tile say.

Who tells whom what, of each place or stage:

    barrier            who arrives                     who waits             what it says
    OWN_FULL           producer, TMA                   consumers, senders    keys and notes of a tile are there
    OWN_EMPTY          consumers, senders              producer              they have read them
    V_EMPTY            consumers                       producer              the same of v alone
    Q_FULL, DOUT_FULL  producer, TMA                   consumers             a block of queries is there
    Q_EMPTY,           consumers                       producer              they have read it
      DOUT_EMPTY
    SCORED             a warpgroup                     one that makes dq     its ds is in shared memory
    STAGED             who makes dq                    a sender              a part of dq is in shared memory
    FREE               a sender                        who makes dq          it has been read
    FETCHED            TMA                             a sender              the sum is where its part was

OWN_EMPTY, V_EMPTY, Q_EMPTY, DOUT_EMPTY, SCORED and STAGED are named barriers, which count threads; the others lie in
shared memory. At OWN_FULL and Q_FULL every lane of the producer arrives, which has written notes, or lse and delta.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.attention.hopper.lanes import block_of_step
from csrc_free_ops.attention.hopper.scheduler import is_dense
from csrc_free_ops.tiles.hopper.warpgroup import TOLD
from csrc_free_ops.tiles.scores import LOG2E

# Rows of every tile, and of a block of queries; bytes of 16 columns of them; keys of a program.
BLOCK = gl.constexpr(64)
WORD_BYTES = gl.constexpr(64 * 16 * 2)
OWNED = gl.constexpr(2 * BLOCK.value)
# Of a row's q, dout and sum of dq, per column.
ROW_BYTES = gl.constexpr(8)
# Threads of the consumers, and with them those of one more warp, the producer or a sender; warps that send; blocks of
# dout in shared memory.
CONSUMERS, MEETING, SENDERS, DOUT_STAGES = (gl.constexpr(number) for number in (256, 288, 2, 2))
# Named barriers. Triton takes three: partitions of one warp need none. STAGES of them begin at Q_EMPTY. With one place
# for keys, v's is let go by itself, before k's.
OWN_EMPTY, SCORED, STAGED, DOUT_EMPTY, Q_EMPTY = (gl.constexpr(at) for at in (3, 5, 9, 11, 13))
V_EMPTY = gl.constexpr(OWN_EMPTY.value + 1)
# Barriers in shared memory, the first of each kind.
OWN_FULL, Q_FULL, DOUT_FULL, FREE, FETCHED = (gl.constexpr(at) for at in (0, 2, 5, 7, 9))

# Notes of a tile: BLOCKS of queries are counted from the last, and 0 after the last tile; SENT of them are sent, which
# is none where BLOCKS is 1 for want of any; PLACE is the tile's among those of its segment, LAST that of the last;
# where the segment's queries begin and how many they are; SLOT is where their counters begin.
(
    BLOCKS, OTHERS, HEAD_MASKED, TAIL_MASKED, SEEN_LOW, SEEN_HIGH, ROWS, HEAD, SENT, PLACE, LAST,
    FIRST_OTHER, ROW_OTHER, LENGTH, SHIFT, SLOT,
) = (gl.constexpr(field) for field in range(16))  # fmt: skip
# Without bounds, whose note then has room, how many blocks before the end a tile begins (`tiles.lanes`).
LEAD = HEAD_MASKED
# Addresses, in notes and of whole tensors.
FIRST_GRADIENT, SECOND_GRADIENT, LSE, DELTA, SUMS, COUNTS, TICKET, CU_OWN, CU_OTHER = (
    gl.constexpr(field) for field in range(9)
)
# Of a batch there are no boundaries, but dq, and strides of dk, dv and dq, of each kind all three.
DQ, BATCH_STRIDES, HEAD_STRIDES = CU_OWN, CU_OTHER, gl.constexpr(CU_OTHER.value + 3)
# Sizes behind the notes.
TOTAL_OWN, TOTAL_OTHER, SEGMENTS, BEFORE, AFTER = (gl.constexpr(field) for field in range(5))
# Of one segment, where keys and queries begin; where they end comes next.
FIRST_OWN, FIRST_OTHERS = gl.constexpr(5), gl.constexpr(7)
# Of a batch, the bits of scale.
SCALE = FIRST_OWN
# How many pieces of work there are: the producer's own, which lacks a register for it.
WORK = gl.constexpr(9)


@gluon.jit
def lse_to_subtract(lse):
    """Times log2(e), and infinite for rows without keys, whose weights are 0."""
    return gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@gluon.constexpr_function
def tile_columns(head_dim):
    """Of the tiles in shared memory. Wide ones are loaded in fewer requests; a product must end where a tile does."""
    return 64 if head_dim % 64 == 0 else 16


@gluon.constexpr_function
def tile_count(head_dim):
    return -(-head_dim // tile_columns(head_dim))


@gluon.constexpr_function
def sums_at(tiles, head_dim):
    """How many tiles come before the sums, of which there must be `tiles`: a second lane is sent from whole 8 KiB."""
    whole = 8192 // (BLOCK.value * tile_columns(head_dim) * 2) if in_turns(head_dim) else 1
    return -(-tiles // whole) * whole


@gluon.constexpr_function
def sum_bytes(head_dim):
    """Of all parts of dq that wait in shared memory; the barriers lie behind them."""
    return SENDERS.value * BLOCK.value * head_dim * 4


@gluon.constexpr_function
def in_turns(head_dim):
    return head_dim <= 80


@gluon.constexpr_function
def makers(head_dim):
    """Threads that make the dq of one block, and those of the warp that sends it."""
    return (128 if in_turns(head_dim) else 256) + 32


@gluon.constexpr_function
def lane_count(round_):
    """Of sums, where so many tiles begin at blocks of their own (`tiles.lanes`)."""
    return 2 if round_ > 1 else 1


@gluon.constexpr_function
def arrivals(own_stages):
    """At each barrier in shared memory. With one place for keys, nothing is told with v."""
    own = (TOLD.value, TOLD.value if own_stages == 2 else 1)
    return (*own, *(TOLD.value,) * 3, 1, 1, 1, 1, 1, 1)


@gluon.jit
def block_at(step, lead, blocks, HAS_RIGHT: gl.constexpr):
    """Which of its blocks a tile comes to at a step. Only a tile without bounds has a lead."""
    if HAS_RIGHT:
        return blocks - 1 - step
    else:
        return block_of_step(step, lead, blocks)


@gluon.jit
def slot_count(total, num_segments, ORDER: gl.constexpr):
    """Counters of one head: one for every tile of query rows that there may be."""
    if is_dense(ORDER):
        return (total + BLOCK - 1) // BLOCK
    else:
        return total // BLOCK + num_segments + 2
