"""Launches, GPUs, and the files of measured rows."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from csrc_free_ops.configs.attention_hopper_backward import BLOCK_M, BLOCK_N, NUM_WARPS, PIPELINE_STAGES

ROWS_DIR = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """A tile's rows and columns, warps and pipeline stages; block_k is a product's step over K.

    For norms, columns are those of a main chunk. For the rotary embedding, rows are heads and columns are pairs. A
    launch with a `path` uses none of these kernels: "aten" leaves the product to PyTorch and the epilogue to
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
        """The config as a rows' file stores it."""
        if self.path:
            return {"path": self.path}
        return {name: value for name, value in asdict(self).items() if name not in ("block_k", "path") or value}

    @staticmethod
    def of(entry: dict[str, Any]) -> "Config":
        """Read a config from a rows' file. Raises ValueError for an unknown path."""
        if "path" not in entry:
            return Config(**entry)
        if entry != ATEN.entry():
            raise ValueError(f"{entry} is no launch: the path that needs none is {ATEN.path!r}")
        return ATEN


ATEN = Config(0, 0, 0, 0, path="aten")


# GEMM kernels that PyTorch can replace.
PRODUCTS = ("gemm", "gemm_pair")


# All launches that the Hopper kernels support: a warpgroup has 64 rows, and the backward has one tile.
HOPPER_CONFIGS = {
    "attention_fwd_hopper": tuple(
        Config(rows, cols, rows // 16, stages) for rows in (128, 192) for cols in (64, 128) for stages in (2, 3)
    ),
    "attention_bwd_hopper": tuple(Config(BLOCK_M, BLOCK_N, NUM_WARPS, stages) for stages in PIPELINE_STAGES),
}


@dataclass(frozen=True)
class Gpu:
    """The GPU that a choice depends on. `name` is that of a rows' file ("h200"), backend and arch are Triton's."""

    name: str
    backend: str
    arch: int | str
    shared_memory: int
    multiprocessors: int = 128


@dataclass(frozen=True)
class TunedConfig:
    """A measured config and the calls that it is for. `gpu` is a `Gpu.name`, or empty for any GPU."""

    kernel: str
    dtype: str
    head_dim: int
    launch: Config
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
        matches = (self.kernel, self.dtype) == (kernel, dtype) and self.n in (None, n) and self.k in (None, k)
        return matches and self._reaches(rows)

    def fits(self, kernel: str, dtype: str, head_dim: int, causal: bool, masked: bool, length: int | None) -> bool:
        if (self.kernel, self.dtype, self.head_dim) != (kernel, dtype, head_dim):
            return False
        if self.causal not in (None, causal) or self.masked not in (None, masked):
            return False
        return self._reaches(length)


def gpu_name(name: str) -> str:
    """The GPU's name as rows and their files spell it: "NVIDIA H200" is "h200"."""
    return name.lower().removeprefix("nvidia ").replace(" ", "-")


def read_rows(path: Path) -> tuple[TunedConfig, ...]:
    """The rows of a JSON file that `as_document` made. The GPU "any" stands for all.

    Raises ValueError, which names the file, if the file holds something else.
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


# Files of users may have names from before 2026-11-28.
_RENAMED = {
    "attention_fwd_short": "attention_fwd_small_segments", "attention_bwd_short": "attention_bwd_small_segments",
}  # fmt: skip


def _read_row(entry: dict[str, Any], source: str, gpu: str) -> TunedConfig:
    for name, value in (*entry.items(), *entry["launch"].items()):
        if type(value) not in _ROW_TYPES.get(name, (int,)):
            raise TypeError(f"{name} cannot be {value!r}")
    entry = {**entry, "kernel": _RENAMED.get(entry["kernel"], entry["kernel"])}
    launch = Config.of(entry["launch"])
    if entry["kernel"] in PRODUCTS:
        entry = {"head_dim": 0, **entry}
    if launch == ATEN:
        if entry["kernel"] not in PRODUCTS:
            raise ValueError(f"{entry['kernel']}: only {' and '.join(PRODUCTS)} can be left to ATen")
        return TunedConfig(**{**entry, "launch": launch, "source": source, "gpu": gpu})
    if (entry["kernel"] in PRODUCTS) != (launch.block_k >= 16 and launch.block_k & (launch.block_k - 1) == 0):
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: products alone have a block_k, a power of two")
    if launch.num_stages < 1 or launch.num_warps > 32:
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: it has 1 or more stages and up to 32 warps")
    if entry["kernel"] in HOPPER_CONFIGS:
        if launch not in HOPPER_CONFIGS[entry["kernel"]]:
            raise ValueError(f"{entry['kernel']}: {launch} is no launch that it is written for")
    elif any(size < 1 or size & (size - 1) for size in (launch.num_warps, *launch.tile)) or (
        min(launch.tile[1:] if entry["kernel"].startswith(("norm_", "rope", "kv_cache")) else launch.tile) < 16
    ):
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: rows, columns and warps are powers of two")
    if entry["kernel"] == "rope" and launch.block_m * launch.block_n < 32 * launch.num_warps:
        # Two threads would hold one element, and q may be rotated in place: the second would read a rotated element.
        raise ValueError(f"rope: {launch} is no launch: its tile has less than an element for each thread")
    if entry["kernel"].endswith("_small_segments") and launch.block_m != launch.block_n:
        raise ValueError(f"{entry['kernel']}: {launch} is no launch: it has as many columns as rows")
    return TunedConfig(**{**entry, "launch": launch, "source": source, "gpu": gpu})


@lru_cache
def shipped_rows(gpu_name: str) -> tuple[TunedConfig, ...]:
    path = ROWS_DIR / f"{gpu_name}.json"
    return read_rows(path) if path.exists() else ()


def as_document(rows: list[TunedConfig], provenance: dict[str, str]) -> dict:
    """The document that `read_rows` reads."""
    entries = []
    for row in rows:
        entry = {key: value for key, value in asdict(row).items() if key not in ("source", "gpu")}
        entry["launch"] = row.launch.entry()
        entries.append({key: value for key, value in entry.items() if value is not None})
    return {"provenance": provenance, "rows": entries}
