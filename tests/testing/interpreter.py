"""Triton's interpreter without work that it does over and over: two thirds of its time, and none of its results."""

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
            self.sizes = tuple(self.shape)
            made[key] = dict(vars(self))
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


def _sizes(type: Any) -> Any:
    """The sizes of a block, which only an older type does not have at hand; () for a scalar."""
    if not type.is_block():
        return ()
    sizes = vars(type).get("sizes")
    return tuple(type.shape) if sizes is None else sizes


def _broadcasting_once(broadcast: Any) -> Any:
    """`broadcast_impl_value`, which compares sizes one by one, and makes a type of every result twice."""
    shapes: dict[Any, tuple[int, ...] | None] = {}

    def shape_of(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        """The sizes of both, or None where the original adds dimensions or refuses."""
        if not left or not right:
            return left or right
        fits = len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True))
        return tuple(map(max, left, right)) if fits else None

    def stretched(self: Any, value: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        if sizes == shape:
            return value
        type = tl.block_type(value.type.scalar, list(shape))
        if not sizes:
            return self.tensor(self.builder.create_splat(type, value.handle), type)
        return self.tensor(self.builder.create_broadcast(value.handle, shape), type)

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = _sizes(lhs.type), _sizes(rhs.type)
        if left == right:
            return lhs, rhs
        if (left, right) not in shapes:
            shapes[left, right] = shape_of(left, right)
        shape = shapes[left, right]
        if shape is None:
            return broadcast(self, lhs, rhs)
        return stretched(self, lhs, left, shape), stretched(self, rhs, right, shape)

    return broadcast_once


# Two operands of one of these types are computed in it, even when they are divided.
ALIKE = ("int1", "int32", "int64", "fp32", "fp64")
# The numbers that take part in a type's own arithmetic.
INTS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
FLOATS = ("fp32", "fp64")


def _checking_once(check: Any) -> Any:
    """`binary_op_type_checking_impl` without its questions where operands are alike, and with each constant made once.

    A constant cannot be written to and leaves no operation, so all operations may share it.
    """
    constants: dict[Any, Any] = {}

    def constant(self: Any, number: Any, like: Any) -> Any:
        key = type(number), number, like.scalar.name, _sizes(like)
        if key not in constants:
            made = self.scalar_constant(number, dtype=like.scalar)
            made = self.splat(made, like.shape) if like.is_block() else made
            made.handle.data.setflags(write=False)
            constants[key] = made
        return constants[key]

    def takes(number: Any, name: str) -> bool:
        if type(number) is float:
            return name in FLOATS
        least, most = INTS.get(name, INTS["int32"] if name in FLOATS else (1, 0))
        return type(number) is int and least <= number <= most

    def check_once(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if isinstance(lhs, tl.tensor):
            left = lhs.type.scalar
            if isinstance(rhs, tl.tensor):
                right = rhs.type.scalar
                if (
                    left.name == right.name
                    and left.name in ALIKE
                    or allow_lhs_ptr
                    and left.is_ptr()
                    and right.name in INTS
                ):
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic_check and takes(rhs, left.name):
                return lhs, constant(self, rhs, lhs.type)
        elif isinstance(rhs, tl.tensor) and arithmetic_check and takes(lhs, rhs.type.scalar.name):
            return constant(self, lhs, rhs.type), rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check_once


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
        mock.patch.object(
            semantics, "binary_op_type_checking_impl", _checking_once(semantics.binary_op_type_checking_impl)
        ),
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
