"""Files that nobody vouches for, as data: each error of reading one is a ValueError that names the file and the key."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch_ops._core.files import check_stored

# No encoder is larger. A larger number would only keep the host busy until it runs out of memory.
MOST = 2**20


@contextmanager
def parsing(file: str | Path, fault: str = "is not usable") -> Iterator[None]:
    """Turn whatever a parser raises into a ValueError "<file> <fault>: <reason>", on one line."""
    try:
        yield
    except Exception as error:  # a parser of foreign bytes may raise anything
        raise ValueError(f"{file} {fault}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The text of an error on one line; an OSError's without the path, and the kind of an error without text."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def is_there(file: str | os.PathLike[str]) -> bool:
    """Whether the folder has this name. A link that leads nowhere is a file that lacks, not one to do without."""
    return os.path.lexists(file)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``. Raises ValueError for other content and for a file that cannot be read."""
    try:
        check_stored(file)
        text = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {reason(error)}") from error
    with parsing(file, "is not valid JSON"):
        values = json.loads(text.decode("utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds {_shown(values)}, expected a JSON object")
    return values


@dataclass(frozen=True)
class Rule:
    """A condition on a value of a JSON object, in words and as a test."""

    wanted: str
    holds: Callable[[Any], bool]


def whole(low: int, high: int = MOST) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _number(value: Any) -> bool:
    # A whole number may be too large for a float.
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


NUMBER = Rule("a finite number", _number)
POSITIVE = Rule("a number above 0", lambda value: _number(value) and value > 1e-30)
SWITCH = Rule("true or false", lambda value: type(value) is bool)


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def listed(each: Rule, count: int | None = None) -> Rule:
    """A list of so many values, or of any number."""

    def holds(value: Any) -> bool:
        return isinstance(value, list) and count in (None, len(value)) and all(map(each.holds, value))

    return Rule(f"a list of {'values' if count is None else count}, each {each.wanted}", holds)


def optional(rule: Rule) -> Rule:
    return Rule(f"{rule.wanted}, or null", lambda value: value is None or rule.holds(value))


def fields(rules: Mapping[str, Rule]) -> Rule:
    """An object of these keys, all optional, and no other."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(key in rules and rules[key].holds(each) for key, each in value.items())

    return Rule(f"an object of {', '.join(f'{key} ({rule.wanted})' for key, rule in rules.items())}", holds)


def check_values(file: Path, values: Mapping[str, Any], rules: Mapping[str, Rule], within: str = "") -> None:
    """Refuse the first value of ``values`` that breaks its rule; keys without a rule pass."""
    for key, rule in rules.items():
        if key in values and not rule.holds(values[key]):
            refuse_value(file, f"{within}{key}", values[key], rule.wanted)


def refuse_value(file: Path, key: str, value: Any, wanted: str) -> NoReturn:
    raise ValueError(f"{file}: {key} is {_shown(value)}, expected {wanted}")


def _shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:56]} ..."
