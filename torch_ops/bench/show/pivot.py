"""One pivot of records into tables, and the cells that several kinds of tables share."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from torch_ops.bench.measure.results import OK, Group, Record, Report, grouped

NOTHING = "-"
# A row by header; headers that occur twice carry what tells them apart before them.
Row = dict[str | tuple[str, str], str]
OF_CASE = attrgetter("op", "case", "shape", "direction", "dtype", "path")


@dataclass(frozen=True)
class Table:
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Key:
    """How records become tables.

    Attributes:
        tables, rows: what parts tables, and in a table the groups that `cells` makes rows of.
        title: of a table, by its first record.
    """

    tables: Callable[[Record], Any]
    rows: Callable[[Record], Any]
    cells: Callable[[Group, Report], Iterable[Row]]
    title: Callable[[Record], str]
    notes: Callable[[Sequence[Record]], Iterable[str]] = lambda records: ()


def pivot(records: Iterable[Record], key: Key, report: Report) -> list[Table]:
    """A table for each value of `key.tables`; a column is there where any of its rows has it."""
    made = []
    for members in grouped(records, key.tables).values():
        rows = [row for group in grouped(members.records, key.rows).values() for row in key.cells(group, report)]
        headers = tuple(dict.fromkeys(chain.from_iterable(rows)))
        cells = tuple(tuple(row.get(header, NOTHING) for header in headers) for row in rows)
        names = tuple(header if isinstance(header, str) else header[1] for header in headers)
        made.append(Table(key.title(members.ours), names, cells, tuple(key.notes(members.records))))
    return made


# Cells.


def digits(value: float | None, significant: int = 3) -> str:
    """Plain decimals with so many significant digits, none of a large number cut."""
    if value is None:
        return NOTHING
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, significant - 1 - magnitude)}f}"


def mib(one: Record | None, decimals: int = 1) -> str:
    return NOTHING if one is None or one.peak_bytes is None else f"{one.peak_bytes / 2**20:.{decimals}f}"


def marked(text: str, one: Record) -> str:
    return text if one.status == OK else f"{text} *{one.status}*"


def share(rate: float | None, ceiling: float | None, decimals: int = 0) -> str:
    return NOTHING if rate is None or ceiling is None else f"{rate / ceiling:.{decimals}%}"
