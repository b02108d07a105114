"""Triton's interpreter without work that it does over and over: half of its time, and none of its results."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def _patching_once(patch_lang: Any) -> Any:
    """`patch_lang`, which every call of a helper repeats, done once a launch for each module that it changes."""
    done: set[int] = set()

    @lru_cache
    def changed_by(fn: Any) -> frozenset[int]:
        seen = fn.__globals__.values()
        return frozenset(id(module) for module in (tl, tl.core) if any(value is module for value in seen))

    class Scope(interpreter._LangPatchScope):
        def __init__(self, scope: Any) -> None:
            super().__init__()
            self._changes = scope._changes

        def restore(self) -> None:
            super().restore()
            done.clear()

    def patch_once(fn: Any) -> Any:
        if changed_by(fn) and changed_by(fn) <= done:
            return interpreter._LangPatchScope()
        scope = patch_lang(fn)
        done.update(changed_by(fn))
        return Scope(scope)

    return patch_once


def _making_types_once(make: Any) -> Any:
    """`block_type.__init__`, which checks and names what it has checked and named before."""
    made: dict[Any, dict[str, Any]] = {}

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        known = made.get(key)
        if known is None:
            make(self, element_ty, shape)
            made[key] = {**vars(self), "sizes": tuple(self.shape)}
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    return make_once


def _measuring_once(make: Any) -> Any:
    """`tensor.__init__`, which wraps the sizes of every tensor anew."""
    measured: dict[Any, tuple[Any, Any]] = {}

    def make_once(self: Any, handle: Any, type: Any) -> None:
        key = vars(type).get("sizes") if type.is_block() else ()
        if key in measured:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = measured[key]
        else:
            make(self, handle, type)
            if key is not None:
                measured[key] = self.numel, self.shape

    return make_once


def _converting_once(convert: Any) -> Any:
    """`_get_np_dtype`, which makes a table of all types for each question."""
    converted: dict[str, Any] = {}

    def convert_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in converted:
            converted[name] = convert(dtype)
        return converted[name]

    return convert_once


def _broadcasting_once(broadcast: Any) -> Any:
    """`broadcast_impl_value`, but of shapes that are alike."""

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        sizes = vars(lhs.type).get("sizes")
        if sizes is not None and sizes == vars(rhs.type).get("sizes"):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_once


def _patch_plainly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """`_patch_attr` without a copy of the arguments of every call."""
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


@contextmanager
def without_repetition() -> Iterator[None]:
    semantics = type(interpreter.interpreter_semantic)
    with (
        mock.patch.object(interpreter, "_patch_lang", _patching_once(interpreter._patch_lang)),
        mock.patch.object(interpreter, "_patch_attr", _patch_plainly),
        mock.patch.object(interpreter, "_get_np_dtype", _converting_once(interpreter._get_np_dtype)),
        mock.patch.object(semantics, "broadcast_impl_value", _broadcasting_once(semantics.broadcast_impl_value)),
        mock.patch.object(tl.block_type, "__init__", _making_types_once(tl.block_type.__init__)),
        mock.patch.object(tl.tensor, "__init__", _measuring_once(tl.tensor.__init__)),
    ):
        yield


@contextmanager
def without_checks_of_int32() -> Iterator[None]:
    """Sums and products of indices are not made a second time, in int64, to see whether they overflowed."""
    builder = interpreter.interpreter_builder
    with mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)):
        yield


INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def with_dtypes(cases: Sequence[Any], dtypes: Sequence[torch.dtype], in_turn: bool = INTERPRET) -> pytest.MarkDecorator:
    """Parametrize `case` and `dtype`: each case with every dtype, or with one where they go `in_turn`."""
    pairs = list(itertools.product(cases, dtypes))
    if in_turn:
        pairs = [(case, dtypes[place % len(dtypes)]) for place, case in enumerate(cases)]
    points = [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case, dtype in pairs]
    return pytest.mark.parametrize(("case", "dtype"), points)
