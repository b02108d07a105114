"""Calls of dense attention that PyTorch's own kernels compute faster: measured rows, one file for each GPU.

`vk bench handover` writes `handover_<gpu>.json`. A GPU without a file keeps all calls.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from csrc_free_ops.configs.rows import ROWS_DIR, gpu_name

KERNELS = ("cudnn", "flash")
# "training" is forward and backward together, both by PyTorch.
DIRECTIONS = ("forward", "training")


@dataclass(frozen=True)
class HandOver:
    """One kernel of PyTorch, and the calls that it computes faster.

    Attributes:
        kernel: "cudnn" or "flash".
        direction: "forward", or "training" for forward and backward together.
        causal: whether calls are causal.
        min_length: the least number of query and key rows.
        every_length: whether the kernel was faster at all lengths measured. Calls of unknown length need that.
        date, cudnn: the day of the measurement, and the version of cuDNN then.
    """

    kernel: str
    direction: str
    dtype: str
    head_dim: int
    causal: bool
    min_length: int
    every_length: bool = False
    date: str = ""
    cudnn: int = 0

    def fits(self, direction: str, dtype: str, head_dim: int, causal: bool, length: int | None) -> bool:
        """`length` is the smaller number of query and key rows, None for a symbol."""
        if (self.direction, self.dtype, self.head_dim, self.causal) != (direction, dtype, head_dim, causal):
            return False
        return self.every_length if length is None else self.min_length <= length


_ORIGIN = ("date", "cudnn")
_TYPES = {"kernel": str, "direction": str, "dtype": str, "head_dim": int, "causal": bool, "min_length": int,
          "every_length": bool}  # fmt: skip


def read_hand_over(path: Path) -> tuple[HandOver, ...]:
    """Return the rows of a JSON file that `hand_over_document` made, the fastest kernel of a call first.

    Raises ValueError, which names the file, if the file holds something else.
    """
    try:
        document = json.loads(path.read_text())
        origin = document["provenance"]
        made = {"date": str(origin["date"])[:10], "cudnn": int(origin["cudnn"])}
        return tuple(_read(entry, made) for entry in document["rows"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} holds no hand-over rows: {type(error).__name__}: {error}") from error


def _read(entry: dict[str, Any], origin: dict[str, Any]) -> HandOver:
    for name, value in entry.items():
        if type(value) is not _TYPES.get(name):
            raise TypeError(f"{name} cannot be {value!r}")
    row = HandOver(**entry, **origin)
    if row.kernel not in KERNELS or row.direction not in DIRECTIONS:
        raise ValueError(f"there is no kernel {row.kernel!r} of direction {row.direction!r}")
    return row


@lru_cache
def shipped_hand_over(gpu: str) -> tuple[HandOver, ...]:
    """Return the rows of a GPU, by its name in rows' files."""
    path = ROWS_DIR / hand_over_file(gpu)
    return read_hand_over(path) if path.exists() else ()


def hand_over_file(gpu: str) -> str:
    """Return the name of a GPU's file; `gpu` is its name in rows' files or the driver's."""
    return f"handover_{gpu_name(gpu)}.json"


def hand_over_document(rows: list[HandOver], provenance: dict[str, str]) -> str:
    """Return the JSON that `read_hand_over` reads, one line for each row."""
    names = [field.name for field in fields(HandOver) if field.name not in _ORIGIN]
    entries = [json.dumps({name: asdict(row)[name] for name in names}) for row in rows]
    listed = ",\n".join(f"  {entry}" for entry in entries)
    origin = json.dumps(provenance, indent=2).replace("\n", "\n ")
    return f'{{\n "provenance": {origin},\n "rows": [\n{listed}\n ]\n}}\n'


def fitting(
    rows: tuple[HandOver, ...], direction: str, dtype: str, head_dim: int, causal: bool, length: int | None
) -> Iterator[HandOver]:
    """Yield the rows that fit a call, the fastest kernel first."""
    return (row for row in rows if row.fits(direction, dtype, head_dim, causal, length))
