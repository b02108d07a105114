"""Info of a tile, which the producer of a Hopper kernel publishes, and of the launch, which all its warps read.

Both lie in shared memory: 32-bit numbers in one buffer, 64-bit addresses and strides in another. A producer has too few
registers to hold them. Slots of a tile take turns: there is one info more than there are stages for tiles, so what is
read of the last tile after its stage was released has not been written over.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_free_ops.tiles.hopper.versions import aggregate, reinterpret

# Slots of an info, and infos of tiles. That of the launch comes behind them.
SLOTS, TILE_INFOS = gl.constexpr(16), gl.constexpr(4)


# Arguments of the kernels that follow from lengths and batches. They are not specialized: Triton would build the same
# code again for sizes of another divisibility. A number of sequences is specialized to 1 alone.
SIZES = (
    "total_q", "total_k", "window_left", "window_right",
    *[f"stride_{name}{axis}" for name in ("k", "v", "o", "dk", "dv", "dq") for axis in "bht"],
)  # fmt: skip
COUNTS = ("num_segments", "batch")


@gluon.constexpr_function
def _one_value(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _read(buffer, index):
    return gl.max(buffer.index(index).load(_one_value(gl.num_warps())), 0)


@gluon.jit
def _write(buffer, index, value):
    buffer.index(index).store(gl.full([1], value, buffer.dtype, _one_value(gl.num_warps())))


@gluon.jit
def _fill(buffer, values):
    """Write the launch's info by one store: between several Triton would make all threads meet."""
    slot = gl.arange(0, SLOTS, _one_value(gl.num_warps()))
    info = gl.zeros_like(slot).to(buffer.dtype)
    for index in gl.static_range(len(values)):
        info = gl.where(slot == index, values[index].to(buffer.dtype), info)
    reinterpret(buffer, buffer.dtype, [TILE_INFOS + 1, SLOTS], buffer.layout).index(TILE_INFOS).store(info)


@aggregate
class TileInfo:
    """The info of one tile: the producer publishes its slots, the other warps read them."""

    numbers: gl.shared_memory_descriptor
    addresses: gl.shared_memory_descriptor
    index: gl.tensor

    @gluon.constexpr_function
    def __init__(self, numbers, addresses, index):
        self.numbers = numbers
        self.addresses = addresses
        self.index = index

    @gluon.jit
    def publish(self, SLOT: gl.constexpr, value):
        _write(self.numbers, self.index * SLOTS + SLOT, value)

    @gluon.jit
    def publish_address(self, SLOT: gl.constexpr, address):
        _write(self.addresses, self.index * SLOTS + SLOT, address)

    @gluon.jit
    def read(self, SLOT: gl.constexpr):
        return _read(self.numbers, self.index * SLOTS + SLOT)

    @gluon.jit
    def read_address(self, SLOT: gl.constexpr):
        return _read(self.addresses, self.index * SLOTS + SLOT)


@aggregate
class LaunchInfo:
    """Numbers, pointers and strides of the launch, and the infos of its tiles."""

    numbers: gl.shared_memory_descriptor
    addresses: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, addresses):
        self.numbers = numbers
        self.addresses = addresses

    @gluon.jit
    def fill(self, numbers, addresses):
        """Called once, before the partitions begin; values are in the order of their slots."""
        _fill(self.addresses, addresses)
        if len(numbers) > 0:
            _fill(self.numbers, numbers)

    @gluon.jit
    def tile(self, count):
        """The info of a program's tile, counted from 0."""
        return self.at(gl.to_tensor(count) % TILE_INFOS)

    @gluon.jit
    def at(self, index):
        """The tile info at an index below TILE_INFOS."""
        return TileInfo(self.numbers, self.addresses, gl.to_tensor(index))

    @gluon.jit
    def number(self, SLOT: gl.constexpr):
        return _read(self.numbers, TILE_INFOS * SLOTS + SLOT)

    @gluon.jit
    def write_number(self, SLOT: gl.constexpr, value):
        _write(self.numbers, TILE_INFOS * SLOTS + SLOT, value)

    @gluon.jit
    def stride(self, SLOT: gl.constexpr):
        return _read(self.addresses, TILE_INFOS * SLOTS + SLOT)

    @gluon.jit
    def pointer(self, SLOT: gl.constexpr, DTYPE: gl.constexpr):
        return self.stride(SLOT).to(gl.pointer_type(DTYPE), bitcast=True)


@gluon.jit
def make_info(HAS_NUMBERS: gl.constexpr = True):
    """Allocate both buffers. Without HAS_NUMBERS the launch has addresses and strides alone."""
    BUFFER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [(TILE_INFOS + HAS_NUMBERS) * SLOTS, 1], BUFFER)
    addresses = gl.allocate_shared_memory(gl.int64, [(TILE_INFOS + 1) * SLOTS, 1], BUFFER)
    return LaunchInfo(numbers, addresses)
