"""JSON documents as the dataclasses that they were written from. Anything else is a ValueError that names the key."""

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any


def parse(text: str) -> Any:
    """The values of a JSON text; ValueError for other text, for NaN and for infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def read_as(kind: Any, value: Any, key: str) -> Any:
    """``value`` as ``kind``: a dataclass, a tuple of one type, a dict with strings as keys, an option or a plain type.

    Lists become tuples. ``key`` is the path of the value in its document, for messages.
    """
    if kind is Any:
        return value
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (each for each in arguments if each is not types.NoneType)
        return read_as(kind, value, key)
    if origin is tuple and isinstance(value, list):
        return tuple(read_as(arguments[0], each, f"{key}[{place}]") for place, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: read_as(arguments[1], each, f"{key}.{name}") for name, each in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, value, key)
    if type(value) is kind or (kind is float and type(value) is int and abs(value) < 2**53):
        if kind is not float or math.isfinite(value):
            return value
    shown = json.dumps(value) if isinstance(value, str | float | bool | None) else f"a {type(value).__name__}"
    wanted = (origin or kind).__name__ if not dataclasses.is_dataclass(kind) else "dict"
    raise ValueError(f"{key} is {shown[:60]}, expected a {wanted}")


# Documents hold thousands of records of a few types.
_types_of = functools.cache(typing.get_type_hints)


def _read_fields(kind: Any, value: dict[str, Any], key: str) -> Any:
    hints = _types_of(kind)
    for name in value:
        if name not in hints:
            raise ValueError(f"{key}.{name} is not known, expected some of {', '.join(hints)}")
    for field in dataclasses.fields(kind):
        if field.name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{key}.{field.name} is missing")
    return kind(**{name: read_as(hints[name], each, f"{key}.{name}") for name, each in value.items()})
