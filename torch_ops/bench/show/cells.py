"""What tables are made of."""

import math
from dataclasses import dataclass

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def digits(value: float | None, significant: int = 3) -> str:
    """Plain decimals with so many significant digits, none of a large number cut."""
    if value is None:
        return NOTHING
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, significant - 1 - magnitude)}f}"
