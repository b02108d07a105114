"""Launch configurations: one `pick` chooses, nothing is timed at run time.

The order is: the user's measured rows, the shipped rows of this GPU (`configs/<gpu>.json`), a rule that launches
anywhere. A row belongs to a kernel, a dtype and a head dimension, and may be bound to flags ("causal"; "masked", causal
or by a window) and to a range of mean segment lengths; lengths are known to eager calls and to graphs of fixed shape,
and are None elsewhere, where the row of the longest segments counts. Of a norm's kernel the head dimension is the width
of its rows and the length their number; of the rotary embedding's ("rope") the length is the number of rows too. That
of "kv_cache_append" is unknown: its rows and columns are heads of tokens and pairs.

Rows of the GEMM core have no head dimension; they belong to the sizes of a weight, n x k, or to any, and their lengths
are rows of x. Their launch has a third block, and may be another path's: {"path": "aten"}.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from triton import cdiv, next_power_of_2

ROWS_DIR = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class Launch:
    """One launch: rows and columns of a tile, warps, pipeline stages; of products also what a step takes of K.

    Of a norm's kernel columns are those of the main parts of its rows, of the rotary embedding's rows are heads and
    columns are pairs. With a `path` it is not of these kernels: "aten" leaves the product to PyTorch and the rest to
    elementwise kernels.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_k: int = 0
    path: str = ""

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    def entry(self) -> dict[str, Any]:
        """What a file holds of it."""
        if self.path:
            return {"path": self.path}
        return {name: value for name, value in asdict(self).items() if name not in ("block_k", "path") or value}

    @staticmethod
    def of(entry: dict[str, Any]) -> "Launch":
        """From what a file holds; ValueError for a path that there is not."""
        if "path" not in entry:
            return Launch(**entry)
        if entry != ATEN.entry():
            raise ValueError(f"{entry} is no launch: the path that needs none is {ATEN.path!r}")
        return ATEN


ATEN = Launch(0, 0, 0, 0, path="aten")


# Kernels of the GEMM core that PyTorch can stand in for.
PRODUCTS = ("gemm", "gemm_pair")
# Of kernels that work row by row on image grids: elements of a tile, its most columns, and warps. The head dimension of
# their rows is the width of what they write, of merges that of x. Tiles that spill somewhere were left out.
GRID_TILES = {
    "rotary_table": (2048, 128, 4),
    "pos_embed_fwd": (4096, 256, 8),
    "pos_embed_bwd": (1024, 64, 2),
    "spatial_merge_fwd": (2048, 128, 4),
    "spatial_merge_bwd": (4096, 256, 4),
}

# All that the Hopper kernels are written for: 64 rows to a warpgroup, and of the backward one tile.
HOPPER_LAUNCHES = {
    "attention_fwd_hopper": tuple(
        Launch(rows, cols, rows // 16, stages) for rows in (128, 192) for cols in (64, 128) for stages in (2, 3)
    ),
    "attention_bwd_hopper": tuple(Launch(64, 128, 8, stages) for stages in (2, 3)),
}

# Columns of a norm's row that registers hold without a spill on any target; the backward has sums of columns beside it.
WIDEST_NORM = {"norm_fwd": 16384, "norm_bwd": 6144}


@dataclass(frozen=True)
class Gpu:
    """What the choice may depend on: `name` as in the rows' file ("h200"), backend and arch as Triton says them."""

    name: str
    backend: str
    arch: int | str
    shared_memory: int
    multiprocessors: int = 128


@dataclass(frozen=True)
class Row:
    """A measured launch and what it was measured on: `gpu` as `Gpu.name` says it, or nothing, which is any."""

    kernel: str
    dtype: str
    head_dim: int
    launch: Launch
    causal: bool | None = None
    masked: bool | None = None
    min_length: int = 0
    max_length: int | None = None
    source: str = ""
    gpu: str = ""
    n: int | None = None
    k: int | None = None

    def _reaches(self, length: int | None) -> bool:
        if length is None:
            return self.max_length is None
        return self.min_length <= length and (self.max_length is None or length < self.max_length)

    def fits_product(self, kernel: str, dtype: str, n: int, k: int, rows: int | None) -> bool:
        own = (self.kernel, self.dtype) == (kernel, dtype) and self.n in (None, n) and self.k in (None, k)
        return own and self._reaches(rows)

    def fits(self, kernel: str, dtype: str, head_dim: int, causal: bool, masked: bool, length: int | None) -> bool:
        if (self.kernel, self.dtype, self.head_dim) != (kernel, dtype, head_dim):
            return False
        if self.causal not in (None, causal) or self.masked not in (None, masked):
            return False
        return self._reaches(length)


def split_head_dim(head_dim: int, itemsize: int, products: str = "ieee") -> tuple[int, int]:
    """(main, tail), powers of two: head_dim is read as all whole mains that it holds and one tail (tiles/rows.py).

    72 and 80 are (64, 16), 96 is (64, 32), 128 is (128, 0). In fp32 no part is wider than 32, so that no sum is longer:
    72 is (32, 16), and 128 four parts, (32, 0). "bf16x6" takes parts of 64 where they divide it, for speed.
    """
    widest = 256 if itemsize < 4 else 64 if products == "bf16x6" and head_dim % 64 == 0 else 32
    main = min(widest, max(16, next_power_of_2(head_dim + 1) // 2))
    rest = head_dim % main if head_dim > main else 0
    # Beside 128 columns a tail of 16 or 32 leaves a gradient kernel with thousands of spilled bytes; one of 64 none.
    tail = max(64 if main == 128 else 16, next_power_of_2(rest)) if rest else 0
    return (2 * main, 0) if tail == main < widest else (main, tail)


def covered_width(head_dim: int, itemsize: int) -> int:
    """Columns of a tile: head_dim and what the parts of `split_head_dim` pad."""
    main, tail = split_head_dim(head_dim, itemsize)
    return max(1, head_dim // main) * main + tail


def norm_tail(width: int, main: int) -> int:
    """The last part of a norm's row, which is as wide as those before it or not there (tiles/rows.py)."""
    return main if width > main and width % main else 0


def norm_kernel(kernel: str, width: int) -> str:
    """`kernel` ("norm_fwd", "norm_bwd"), or the one that passes over rows that are too wide for registers."""
    return kernel if width <= WIDEST_NORM[kernel] else f"{kernel}_wide"


def norm_programs(gpu: Gpu, launch: Launch, rows: int | None, sums: bool) -> int:
    """Programs of a norm's backward, which take tiles of rows in turn: equally many, where the number of rows is known.

    Where each sums columns of its own, as many warps for each multiprocessor as its registers hold; else three times
    as many, which evens out their ends.
    """
    programs = gpu.multiprocessors * max(1, (_backward_warps(gpu) if sums else 24) // launch.num_warps)
    if rows is None:
        return programs
    tiles = max(1, cdiv(rows, launch.block_m))
    return cdiv(tiles, cdiv(tiles, programs))


def _backward_warps(gpu: Gpu) -> int:
    """That a multiprocessor's registers hold of a norm's backward."""
    return 8 if gpu.backend == "cuda" else 12


# Keys of a split that does not depend on the call: a multiple of every block of keys.
INVARIANT_KEYS = 512
# Fewer keys are not worth a split of their own.
LEAST_SPLIT = 256
MOST_SPLITS = 128


def decode_splits(gpu: Gpu, launch: Launch, programs: int | None, capacity: int | None, row_bytes: int) -> int:
    """Among how many programs each of `programs` shares of a cache is split, which hold up to `capacity` keys.

    As many as there are multiprocessors for: one program, with what it has under way, reads as fast as several beside
    each other do. Where that leaves a quarter of them idle, or there are more shares than multiprocessors, the fewest
    that leave them as little idle as any number does, within a twentieth: programs come in waves of as many as shared
    memory has room for, and the last one is full or is not. A row of K and of V has `row_bytes`.

    128 shares on the 132 multiprocessors of an H200: one split of 16 x 8 x 8192 keys takes 124 us, three 128; 16 splits
    of 8 x 8192 keys 12.9 us, 48 of them 17.6. Where a trace does not know the sizes, as many as keep half of the
    multiprocessors busy with 8 shares.
    """
    if programs is None:
        return 8
    most = MOST_SPLITS if capacity is None else cdiv(capacity, max(LEAST_SPLIT, launch.block_n))
    most = max(1, min(most, MOST_SPLITS))
    # Of an empty batch as of one.
    programs = max(1, programs)
    in_one_wave = gpu.multiprocessors // programs
    if in_one_wave * programs >= 0.75 * gpu.multiprocessors:
        return min(most, in_one_wave)
    # Products of 64 rows are read from shared memory while the next stage comes in.
    stages = launch.num_stages if launch.block_m >= 64 else launch.num_stages - 1
    resident = max(1, min(8, gpu.shared_memory // (max(1, stages) * launch.block_n * row_bytes)))
    slots = gpu.multiprocessors * resident
    options = range(1, most + 1)
    used = {splits: splits * programs / (slots * cdiv(splits * programs, slots)) for splits in options}
    return next(splits for splits in options if used[splits] >= 0.95 * max(used.values()))


def parameters_early(gpu: Gpu, launch: Launch, rows: int | None) -> bool:
    """Whether weight and bias of a norm without a residual come while x does: where there are not more rows than
    multiprocessors hold at once, registers do, and one row's time is what counts.

    layer_norm of 784 x 1152 takes 2.0 us so on an H200, 3.5 otherwise; of 4096 x 1152 5.6, and 4.3 otherwise.
    """
    return rows is not None and cdiv(rows, launch.block_m) * launch.num_warps <= 24 * gpu.multiprocessors


def gpu_name(name: str) -> str:
    """The GPU's name as rows and their files have it: "NVIDIA H200" is "h200"."""
    return name.lower().removeprefix("nvidia ").replace(" ", "-")


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of one JSON file, as `as_document` makes it. A GPU called "any" is any.

    Raises ValueError, which names the file, where it holds something else.
    """
    try:
        document = json.loads(path.read_text())
        origin = "{gpu}, triton {triton}, {date}".format(**document["provenance"])
        gpu = gpu_name(document["provenance"]["gpu"]).removeprefix("any")
        rows = tuple(_read_row(entry, f"{path.name}: {origin}", gpu) for entry in document["rows"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} holds no launch rows: {type(error).__name__}: {error}") from error
    return rows


_ROW_TYPES: dict[str, tuple[type, ...]] = {
    "kernel": (str,), "dtype": (str,), "head_dim": (int,), "launch": (dict,), "causal": (bool, type(None)),
    "masked": (bool, type(None)), "min_length": (int,), "max_length": (int, type(None)), "path": (str,),
    "n": (int, type(None)), "k": (int, type(None)),
}  # fmt: skip


def _read_row(entry: dict[str, Any], source: str, gpu: str) -> Row:
    for name, value in (*entry.items(), *entry["launch"].items()):
        if type(value) not in _ROW_TYPES.get(name, (int,)):
            raise TypeError(f"{name} cannot be {value!r}")
    launch = Launch.of(entry["launch"])
    if entry["kernel"] in PRODUCTS:
        entry = {"head_dim": 0, **entry}
    if launch == ATEN:
        if entry["kernel"] not in PRODUCTS:
            raise ValueError(f"{entry['kernel']}: only {' and '.join(PRODUCTS)} can be left to ATen")
        return Row(**{**entry, "launch": launch, "source": source, "gpu": gpu})
    if (entry["kernel"] in PRODUCTS) != (launch.block_k >= 16 and launch.block_k & (launch.block_k - 1) == 0):
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: products alone have a block_k, a power of two")
    if launch.num_stages < 1 or launch.num_warps > 32:
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: it has 1 or more stages and up to 32 warps")
    if entry["kernel"] in HOPPER_LAUNCHES:
        if launch not in HOPPER_LAUNCHES[entry["kernel"]]:
            raise ValueError(f"{entry['kernel']}: {launch} is no launch that it is written for")
    elif any(size < 1 or size & (size - 1) for size in (launch.num_warps, *launch.tile)) or (
        min(launch.tile[1:] if entry["kernel"].startswith(("norm_", "rope", "kv_cache")) else launch.tile) < 16
    ):
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: rows, columns and warps are powers of two")
    if entry["kernel"] == "rope" and launch.block_m * launch.block_n < 32 * launch.num_warps:
        # What two threads hold, one would read after the other has turned it in its place.
        raise ValueError(f"rope: {launch} is no launch: its tile has less than an element for each thread")
    if entry["kernel"].endswith("_short") and launch.block_m != launch.block_n:
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: it has as many columns as rows")
    return Row(**{**entry, "launch": launch, "source": source, "gpu": gpu})


@lru_cache
def shipped_rows(gpu_name: str) -> tuple[Row, ...]:
    path = ROWS_DIR / f"{gpu_name}.json"
    return read_rows(path) if path.exists() else ()


def _shared_bytes(kernel: str, launch: Launch, head_dim: int, itemsize: int) -> int:
    """An upper estimate of the pipeline's shared memory, by the tensors a kernel streams and holds."""
    width = covered_width(head_dim, itemsize)
    held, streamed, rows, cols = {
        "attention_fwd": (1, 2, launch.block_m, launch.block_n),
        "attention_bwd_dq": (2, 2, launch.block_m, launch.block_n),
        "attention_bwd_dkdv": (2, 2, launch.block_n, launch.block_m),
    }[kernel]
    square = 0 if kernel == "attention_fwd" else launch.block_m * launch.block_n
    return itemsize * (width * (held * rows + streamed * max(launch.num_stages, 1) * cols) + square)


def _rule_of_grids(kernel: str, gpu: Gpu, width: int) -> Launch:
    """The most columns, or half of 256 where those pad by much less."""
    if gpu.backend == "interpreter":
        return Launch(16, 64, 4, 1)
    elements, most, warps = GRID_TILES[kernel]
    cols = min(most, max(16, next_power_of_2(width)))
    if cols == 256 and 8 * -(-width // 256) * 256 > 9 * -(-width // 128) * 128:
        cols = 128
    return Launch(elements // cols, cols, warps, 1)


def rule(
    kernel: str, gpu: Gpu, itemsize: int, head_dim: int, masked: bool = False, busy: bool = False,
    precision: str = "ieee",
) -> Launch:  # fmt: skip
    """Not measured. Of general kernels the largest of a ladder of tiles that fits the shared memory, or the smallest.

    The ladders hold tiles that spill no registers on any target that compile_tests/test_aot.py builds for.
    """
    if kernel in GRID_TILES:
        return _rule_of_grids(kernel, gpu, head_dim)
    if kernel == "kv_cache_append":
        # A thread has eight of each half of a head's columns, 16 bytes of a half type; the interpreter few rows. Twice
        # as large, programs that take neighbours for pairs have a stack on sm_90.
        pairs = min(64, max(16, next_power_of_2(head_dim // 2)))
        return Launch(4 if gpu.backend == "interpreter" else 512 // pairs, pairs, 2, 1)
    if gpu.backend == "interpreter":
        # Small, so that short segments in tests still take several blocks.
        if kernel.endswith("_short"):
            return Launch(16, 16, 4, 1)
        return Launch(16, 32, 4, 1) if "dkdv" in kernel else Launch(32, 16, 4, 1)
    width = covered_width(head_dim, itemsize)
    wide = width > 128
    if kernel.startswith("attention_decode"):
        return _decode_rule(kernel, gpu, itemsize, width)
    if kernel.endswith("_short"):
        # Without wgmma, which only Hopper has, operands lie in registers too; 4 warps spill on the oldest.
        warps = 8 if width > 80 and gpu.backend == "cuda" and int(gpu.arch) < 90 else 4
        return Launch(32, 32, 4, 1) if gpu.backend == "hip" else Launch(64, 64, warps, 1)
    if kernel.endswith("_rest"):
        # They also hold what tells them their tile, and are not there to be fast.
        if gpu.backend == "hip":
            return Launch(16, 16, 4, 1)
        arch = int(gpu.arch)
        if width > 96 or arch < 90:
            return Launch(32, 32, 8, 1) if "dkdv" in kernel else Launch(32 if arch >= 120 else 64, 16, 8, 1)
        return Launch(32, 64, 8, 1) if "dkdv" in kernel else Launch(64, 32, 8, 1)
    if kernel == "attention_bwd_hopper":
        return Launch(64, 128, 8, 2 if width > 96 else 3)
    if kernel == "attention_fwd_hopper":
        # Warpgroups share K and V, so the tallest is best; a third one leaves no registers for masks or wider heads.
        stages = 2 if width > 80 else 3
        return Launch(128, 128, 8, stages) if masked or width > 96 else Launch(192, 128, 12, stages)
    if itemsize == 4 and (launch := _tensor_core_launch(kernel, gpu, width, precision, busy)):
        ladder = [launch]
    elif itemsize == 4:
        # fp32 products hold whole operands in registers.
        if gpu.backend == "hip":
            return Launch(16, 16, 4, 1)
        if kernel == "attention_bwd_dkdv" and width > 96:
            ladder = [Launch(16, 32, 8, 1), Launch(32, 16, 8, 1)]
        elif kernel == "attention_bwd_dq":
            ladder = [Launch(32, 16, 8, 1)]
        else:
            ladder = [Launch(32, 32, 8, 1), Launch(32, 16, 8, 1)]
    elif gpu.backend == "hip":
        ladder = [Launch(16, 32, 4, 1)] if busy and "dkdv" in kernel else [Launch(32, 32, 4, 1), Launch(16, 16, 4, 1)]
    elif busy and kernel == "attention_fwd":
        # Sums in tensor memory leave registers for more keys, of which narrower heads spill.
        cols = 64 if width > 96 and 100 <= int(gpu.arch) < 120 else 32
        ladder = [Launch(64, 16, 8, 1)] if wide else [Launch(64, cols, 8, 2)]
    elif busy and kernel == "attention_bwd_dq" and wide:
        ladder = [Launch(32, 16, 8, 1)]
    elif busy and "dkdv" in kernel:
        has_tail = split_head_dim(head_dim, itemsize)[1] > 0
        ladder = [Launch(16, 32, 8, 1)] if wide or has_tail else [Launch(32, 32, 8, 1)]
    elif kernel == "attention_fwd":
        narrow = [Launch(64, 64, 4, 3 if int(gpu.arch) >= 120 else 2)]
        ladder = [Launch(64, 32, 8, 2), Launch(32, 16, 8, 1)] if wide else narrow
    elif kernel == "attention_bwd_dq":
        ladder = [Launch(64, 16, 8, 2), Launch(32, 16, 8, 1)] if wide else [Launch(64, 32, 8, 2)]
    else:
        ladder = [Launch(32, 32, 8, 1)] if wide else [Launch(32, 64, 8, 2)]
    for launch in ladder:
        if _shared_bytes(kernel, launch, head_dim, itemsize) <= gpu.shared_memory:
            return launch
    return ladder[-1]


def attention_products(gpu: Gpu, head_dim: int, setting: str) -> str:
    """How attention multiplies fp32 numbers where PyTorch's setting is "ieee" or "tf32".

    "ieee" asks for errors no larger than those of fp32's own products. On Hopper "bf16x6" has them, on tensor cores: a
    number is the sum of three bfloat16 ones, and of their nine products the six largest are summed. Against fp64, RMS
    errors of out and its gradients were 0.3 to 0.7 of those of PyTorch's maths in fp32 (H200).
    """
    width = covered_width(head_dim, 4)
    # Of 48 columns results did not keep the rule; of 96 and a narrow tail gradients of keys spill with any tile.
    fits = gpu.backend == "cuda" and int(gpu.arch) == 90 and (width <= 96 or width == 128) and width != 48
    return "bf16x6" if setting == "ieee" and fits else setting


def _tensor_core_launch(kernel: str, gpu: Gpu, width: int, products: str, busy: bool) -> Launch | None:
    """That of attention's fp32 products on tensor cores, by figures of an H200 or an H100, or None.

    Where something spills, tiles that do not took longer: of 8 x 32 x 2048 causal rows and 128 columns the forward took
    5.2 ms with 88 bytes and 6.3 without any, gradients of keys 13.4 with 608 and 16.7 with 264, which was the least.
    """
    if products == "bf16x6":
        if "dkdv" in kernel:
            narrow = busy or 64 < width < 128
            return Launch(16, 128 if 64 < width <= 80 else 64, 8, 1) if narrow else Launch(32, 64, 4, 1)
        if width <= 64:
            return Launch(64, 32 if busy else 64, 4, 1)
        if busy or width < 128:
            return Launch(128, 16 if busy else 32, 8, 1)
        return Launch(128, 64, 8, 1) if kernel == "attention_fwd" else Launch(64, 32, 4, 1)
    # wgmma leaves more registers.
    hopper = gpu.backend == "cuda" and int(gpu.arch) == 90
    if products != "tf32" or gpu.backend == "hip" or busy or width > 128 or (width > 64 and not hopper):
        return None
    if "dkdv" in kernel:
        return Launch(32, 64, 4, 1) if hopper and width <= 64 else Launch(32, 128 if hopper else 64, 8, 1)
    # On an H100, of 8 x 32 x 2048 causal rows and 128 columns, dq took 4.0 ms, and 5.9 of 128 rows by 16 keys.
    return Launch(64, 64 if width <= 64 or "dq" not in kernel else 32, 4, 1) if hopper else Launch(64, 32, 4, 2)


def _decode_rule(kernel: str, gpu: Gpu, itemsize: int, width: int) -> Launch:
    """Rows are the most that a tile has: of samples with a prefix ("attention_decode_shared") there are many.

    Of keys so many that 128 KiB of K and V are under way: one program on each multiprocessor of an H200 then reads
    16 x 8 x 8192 keys of 128 columns at 4.3 TB/s, three with a third of that each at 4.2. With half as many at once
    8 x 65536 keys took an H100 92.8 to 98.9 us, not 92.0, and 16 x 8 x 8192 of 64 columns 103.8, not 90.4.
    """
    shared = kernel.endswith("_shared")
    rows = 64 if shared else 32 if width <= 128 else 16
    if itemsize == 4:
        # Products of fp32 hold whole operands in registers.
        return Launch(16, 16 if gpu.backend == "hip" or width > 128 else 32, 4, 1)
    if gpu.backend == "hip":
        return Launch(rows, 32, 4, 1)
    # Where operands lie in registers, or rows are wide, four warps spill of that many rows.
    warps = 8 if shared and (width > 128 or not 90 <= int(gpu.arch) < 120) else 4
    cols = 32 if width > 128 else 64 if shared else 128 if width > 64 else 256
    # Beside them lie q, weights and what changes its layout.
    if 2 * cols * 2 * width * itemsize + 2**14 > gpu.shared_memory:
        cols //= 2
    return Launch(rows, cols, warps, 3)


# Below, one pass over q and k is too little for all lanes of a GPU.
FEW_ROWS = 4096


def _norm_rule(kernel: str, gpu: Gpu, itemsize: int, width: int, rows: int | None) -> Launch:
    """As few warps share a row as have registers for it: up to 1280 columns that is one, and no warp waits for another.
    Threads load 16 bytes of each part. Forward, a program has four warps and one tile, of a single row and the warps
    that share it where rows are few: 25088 x 1152 take 29.9 us on an H200, where a copy of the same bytes takes 28.5,
    and programs of one warp 33. Backward, a program has one row at a time, and the next two are on their way."""
    if kernel.endswith("_wide"):
        return Launch(1, 4096, 8, 1)
    if kernel == "norm_bwd_sums":
        return Launch(512, 16, 8, 1)
    if gpu.backend == "interpreter":
        return Launch(4 if width < 1024 else 1, 256 if width < 1024 else 1024, 8, 1)
    lanes = 64 if gpu.backend == "hip" else 32
    vector = 16 // itemsize
    # Of each row a thread's registers hold so many columns; in the backward sums of them as well.
    columns = 40 if kernel == "norm_fwd" or itemsize == 2 else 24
    share = 1
    while share < 16 and width > columns * lanes * share:
        share *= 2
    main = min(share * lanes * vector, max(16, next_power_of_2(width)))
    tile = share * lanes * vector // main
    if kernel == "norm_fwd":
        together = 1 if rows is not None and rows <= 16 * gpu.multiprocessors else max(1, 4 // share)
        return Launch(together * tile, main, together * share, 1)
    launch = Launch(tile, main, share, 1)
    tiles = math.inf if rows is None else rows / tile
    if gpu.backend == "hip" or tiles <= norm_programs(gpu, launch, None, True):
        return launch
    # What comes in: dout, x and dsum.
    in_flight = 3 * (cdiv(width, main) * main) * tile * itemsize
    stages = max(1, min(3, gpu.shared_memory // max(1, _backward_warps(gpu) // share) // in_flight))
    return replace(launch, num_stages=stages)


def pick(
    kernel: str,
    gpu: Gpu,
    dtype: str,
    itemsize: int,
    head_dim: int,
    causal: bool,
    length: int | None,
    user_rows: tuple[Row, ...] = (),
    masked: bool | None = None,
    busy: bool = False,
    precision: str = "ieee",
) -> tuple[Launch, str]:
    """The launch of `kernel`, and where it comes from.

    `length` is the mean segment length, of a norm the number of rows, None if unknown; `masked` whether there are
    bounds on keys, causal or not. `busy`: attention does more between its products than what shipped rows were measured
    with, which takes registers. `precision` is that of fp32 products.
    """
    masked = causal if masked is None else masked
    for row in user_rows if busy else (*user_rows, *shipped_rows(gpu.name)):
        if row.gpu in ("", gpu.name) and row.fits(kernel, dtype, head_dim, causal, masked, length):
            return row.launch, row.source
    basis = "unmeasured"
    if kernel.startswith("norm_"):
        launch, basis = _norm_rule(kernel, gpu, itemsize, head_dim, length), "by figures of an H200"
    elif kernel == "rope":
        # Of each half of the heads a thread has 16 elements, so that many loads are under way at once; of few rows 8,
        # so that all multiprocessors have some. By 784, 1024 and 16384 rows on an H200.
        launch = Launch(4, 256, 4, 1) if length is not None and length < FEW_ROWS else Launch(16, 256, 8, 1)
        launch, basis = Launch(2, 64, 4, 1) if gpu.backend == "interpreter" else launch, "by figures of an H200"
    else:
        launch = rule(kernel, gpu, itemsize, head_dim, masked, busy, precision)
    return launch, f"rule for {gpu.backend} {gpu.arch}, {basis}"


def product_row(
    of: Iterable[Row], kernel: str, gpu: Gpu, dtype: str, n: int, k: int, rows: int | None
) -> Row | None:  # fmt: skip
    """The first that fits a product, as `pick_product` says it."""
    fitting = (row for row in of if row.gpu in ("", gpu.name) and row.fits_product(kernel, dtype, n, k, rows))
    return next(fitting, None)


def pick_product(
    kernel: str,
    gpu: Gpu,
    dtype: str,
    itemsize: int,
    n: int,
    k: int,
    rows: int | None,
    user_rows: tuple[Row, ...] = (),
    aten: bool = True,
    copies: bool = False,
) -> tuple[Launch, str]:
    """The launch of a kernel of the GEMM core, and where it comes from; only with `aten` may it be ATEN.

    n x k is the weight, `rows` how many rows x has, None if unknown. `copies`: whether kernels read a padded copy of
    the weight.
    """
    usable = (row for row in (*user_rows, *shipped_rows(gpu.name)) if aten or row.launch != ATEN)
    if row := product_row(usable, kernel, gpu, dtype, n, k, rows):
        return row.launch, row.source
    launch = product_rule(kernel, gpu, itemsize, aten, copies)
    return launch, f"rule for {gpu.backend} {gpu.arch}, unmeasured"


# Tiles of the kernels around products, which only read and write, and their warps.
_ELEMENTWISE = {
    "rotate": (32, 64, 4),
    # As wide as all heads of q, which share their angles: with short runs of rows 18 to 37 % less time than narrow
    # tiles took on an H200, of 784 and 25088 rows of 16 heads of 64 and 72.
    "qkv_rope_bwd": (1, 1024, 4),
    "activate": (16, 256, 4),
    "mlp_bwd": (8, 64, 2),
}


def product_rule(kernel: str, gpu: Gpu, itemsize: int, aten: bool = True, copies: bool = False) -> Launch:
    """Not measured. Tiles that spill no registers, and fit, on any target that compile_tests builds for."""
    if gpu.backend == "interpreter":
        return Launch(32, 16, 4, 1, 16 if kernel in PRODUCTS else 0)
    if kernel in _ELEMENTWISE:
        return Launch(*_ELEMENTWISE[kernel], 1)
    if copies and aten:
        # Made anew on each call, and PyTorch's products need none.
        return ATEN
    cols = 128 // (2 if kernel == "gemm_pair" else 1)
    if itemsize == 4:
        # Exact fp32 products take no tensor cores, and hold whole operands in registers: PyTorch's are faster.
        return ATEN if aten else Launch(cols // 2, cols // 2, 8, 1, 16)
    if gpu.backend == "hip":
        return Launch(128, cols, 8, 2, 64)
    if int(gpu.arch) == 90:
        # Three stages leave room for a second block on each SM; two accumulators leave no registers for one.
        return Launch(128, cols, 8, 3 if kernel == "gemm" else 4, 64)
    return Launch(128, cols, 8, 3 if gpu.shared_memory > 2**17 else 2, 64)


def as_document(rows: list[Row], provenance: dict[str, str]) -> dict:
    """What `read_rows` reads back."""
    entries = []
    for row in rows:
        entry = {key: value for key, value in asdict(row).items() if key not in ("source", "gpu")}
        entry["launch"] = row.launch.entry()
        entries.append({key: value for key, value in entry.items() if value is not None})
    return {"provenance": provenance, "rows": entries}
