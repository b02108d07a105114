"""Our modules by the names of Transformers' classes.

FSDP's policies and device maps look for classes by their names. `_no_split_modules` of a model, options of trainers and
files of settings hold these names, and they are Transformers'.
"""

import sys
from collections.abc import Iterable
from typing import TypeVar, cast

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def name_classes(kind: type[ModuleT], names: Iterable[str]) -> dict[str, type[ModuleT]]:
    """Subclasses of `kind` with these names, as attributes of its Python module, where pickles look for them."""
    made = {}
    for name in names:
        made[name] = cast(type[ModuleT], type(name, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__}))
        setattr(sys.modules[kind.__module__], name, made[name])
    return made


__all__ = ["name_classes"]
