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


@contextmanager
def without_repetition() -> Iterator[None]:
    with mock.patch.object(interpreter, "_patch_lang", _patching_once(interpreter._patch_lang)):
        yield


@contextmanager
def without_checks_of_int32() -> Iterator[None]:
    """Sums and products of indices are not made a second time, in int64, to see whether they overflowed."""
    builder = interpreter.interpreter_builder
    with mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)):
        yield


def with_dtypes(cases: Sequence[Any], dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """Parametrizes `case` and `dtype`: each case at every dtype, in the interpreter at one, dtypes in turn."""
    pairs = list(itertools.product(cases, dtypes))
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pairs = [(case, dtypes[place % len(dtypes)]) for place, case in enumerate(cases)]
    points = [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case, dtype in pairs]
    return pytest.mark.parametrize(("case", "dtype"), points)
