"""The interpreter without repetition prepares operands exactly as Triton's own does."""

import itertools
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

from tests.verify import INTERPRET

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRET, reason="what it tests works in the interpreter alone"),
]

_Patched = type(interpreter.interpreter_semantic)


class _Plain(_Patched):
    """Triton's own methods, as they are before a session patches them."""

    binary_op_type_checking_impl = _Patched.binary_op_type_checking_impl
    broadcast_impl_value = _Patched.broadcast_impl_value


NUMBERS = (0, 1, -3, 2**31, 2**40, 2**70, True, 0.0, -0.0, 1.5, 1e-40, float("nan"), float("inf"))
POINTER = tl.pointer_type(tl.float32)
DTYPES = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64, POINTER)
SHAPES = ((), (4,), (4, 1), (1, 4), (2, 4), (8,))


def _tensor(dtype: Any, shape: tuple[int, ...]) -> Any:
    element = np.uint64 if dtype is POINTER else np.uint16 if dtype is tl.bfloat16 else interpreter._get_np_dtype(dtype)
    data = np.arange(np.prod(shape, dtype=int)).reshape(shape or 1).astype(element)
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def _prepared(semantic: Any, *args: Any) -> Any:
    try:
        made = semantic.binary_op_type_checking_impl(*args)
    except (IncompatibleTypeErrorImpl, AttributeError, OverflowError, TypeError, ValueError) as error:
        return type(error), str(error)
    arrays = [each.handle.data for each in made]
    return [(str(each.type), str(each.handle.dtype)) for each in made], [
        (array.dtype, array.shape, array.tobytes()) for array in arrays
    ]


# Sums of pointers and offsets, products, quotients, bits.
@pytest.mark.parametrize("flags", [(True, True), (), (False, False, True, True), (False, False, False)])
def test_operands_are_those_of_the_plain_interpreter(flags: tuple[bool, ...]) -> None:
    plain, patched = _Plain(interpreter.interpreter_builder), interpreter.interpreter_semantic
    assert type(patched).binary_op_type_checking_impl is not _Plain.binary_op_type_checking_impl
    tensors = [_tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    pairs = [*itertools.product(tensors, tensors), *itertools.product(tensors, NUMBERS)]
    pairs += [(number, tensor) for tensor, number in itertools.product(tensors, NUMBERS)]
    with np.errstate(all="ignore"):
        for lhs, rhs in pairs:
            expected = _prepared(plain, lhs, rhs, *flags)
            # The second time, constants are remembered.
            for _ in range(2):
                assert _prepared(patched, lhs, rhs, *flags) == expected, (lhs, rhs)
