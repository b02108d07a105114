"""The shared refusals: `<op>: <argument> is <got>, expected <wanted>`."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def refuse(op: str, argument: str, wanted: str, got: object) -> NoReturn:
    """Raise "<op>: <argument> is <got>, expected <wanted>".

    The verb is "has" where `wanted` begins with "of", whose list is a shape, and for shapes and strides.
    """
    if isinstance(got, list) and wanted.startswith("of "):
        got = f"shape {got}"
    elif isinstance(got, torch.device):
        got = f"on {got}"
    has = wanted.startswith("of ") or str(got).startswith(("shape ", "strides "))
    raise ValueError(f"{op}: {argument} {'has' if has else 'is'} {got}, expected {wanted.removeprefix('of ')}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_float(op: str, argument: str, tensor: Tensor) -> None:
    """fp16, bf16 or fp32; fp64 on the CPU, where the reference computes."""
    if tensor.dtype in FLOATS or (tensor.dtype is torch.float64 and tensor.device.type in ("cpu", "meta")):
        return
    refuse(op, argument, "float16, bfloat16 or float32 (float64 on the CPU)", dtype_name(tensor.dtype))


def check_like(op: str, argument: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        refuse(op, argument, f"{dtype_name(like.dtype)} as {like_name} is", dtype_name(tensor.dtype))
    check_device(op, argument, tensor, like_name, like)


def check_device(op: str, argument: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        refuse(op, argument, f"on {like.device} as {like_name} is", tensor.device)


def check_int(op: str, argument: str, value: Any) -> int:
    """Return an integer as Python's, or as a trace's symbol. NumPy's are taken; bools, floats and tensors are not."""
    # Dynamo answers these questions where the value is a symbol.
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _of_numpy(_integer_of_numpy, op, argument, value)
    if not isinstance(value, bool | Tensor) and hasattr(value, "__index__"):
        return operator.index(value)
    refuse(op, argument, "an integer", repr(value))


def check_number(op: str, argument: str, value: Any) -> float:
    """Return a real number as Python's, or as a trace's symbol. NumPy's are taken; bools and tensors are not.

    PyTorch would take a tensor's value for a number and give it no gradient.
    """
    # np.float64 is a float too.
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return _of_numpy(_number_of_numpy, op, argument, value)
    if isinstance(value, int | torch.SymInt | torch.SymFloat) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        refuse(op, argument, "a number; a tensor would get no gradient", "a tensor")
    refuse(op, argument, "a number", repr(value))


def check_bool(op: str, argument: str, value: Any) -> bool:
    """Return a bool as Python's, or as a trace's symbol. NumPy's are taken; numbers, tensors and None are not."""
    if isinstance(value, bool | torch.SymBool):
        return value  # type: ignore[return-value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _of_numpy(_bool_of_numpy, op, argument, value)
    refuse(op, argument, "True or False", "a tensor" if isinstance(value, Tensor) else repr(value))


def _of_numpy(convert: Callable[..., Any], op: str, argument: str, value: Any) -> Any:
    if torch.compiler.is_compiling():
        # Dynamo takes NumPy's numbers for arrays in the graph, whose values no host has.
        from torch_ops._core.outside_graphs import call_outside

        return call_outside(convert, op, argument, value)
    return convert(op, argument, value)


def _integer_of_numpy(op: str, argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        refuse(op, argument, "an integer", repr(value))


def _number_of_numpy(op: str, argument: str, value: Any) -> float:
    if value.ndim or value.dtype.kind not in "iuf":
        refuse(op, argument, "a number", repr(value))
    return float(value)


def _bool_of_numpy(op: str, argument: str, value: Any) -> bool:
    if value.ndim or value.dtype.kind != "b":
        refuse(op, argument, "True or False", repr(value))
    return bool(value)


def integers(op: str, **values: Any) -> list[int]:
    """Return arguments, given by name, as integers."""
    return [check_int(op, argument, value) for argument, value in values.items()]


def check_dense(op: str, argument: str, tensor: Any) -> None:
    if tensor is not None and not isinstance(tensor, Tensor):
        refuse(op, argument, "a dense tensor", f"of type {type(tensor).__name__}")
    if tensor is None or tensor.layout is not torch.strided or tensor.is_nested:
        got = "None" if tensor is None else "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        refuse(op, argument, "a dense tensor", got)


def check_all_dense(op: str, arguments: Iterable[tuple[str, object]]) -> None:
    """Refuse tensors of another layout, and nested ones, by the names of the arguments."""
    for argument, value in arguments:
        if isinstance(value, Tensor):
            check_dense(op, argument, value)


def check_packed(op: str, argument: str, tensor: Tensor) -> None:
    check_dense(op, argument, tensor)
    if tensor.dim() != 3:
        refuse(op, argument, "of shape [T, H, D] (packed)", list(tensor.shape))


def check_matrix(op: str, argument: str, tensor: Tensor, shape: str, sizes: tuple[int | None, int | None]) -> None:
    """Two-dimensional, of these sizes where they are given; `shape` names them, as in "[T, C]"."""
    check_dense(op, argument, tensor)
    if tensor.dim() != 2 or any(size not in (None, own) for size, own in zip(sizes, tensor.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        named = f" = [{wanted}]" if any(size is not None for size in sizes) else ""
        refuse(op, argument, f"of shape {shape}{named}", list(tensor.shape))


def check_vector(op: str, argument: str, vector: Tensor, size: int) -> None:
    check_dense(op, argument, vector)
    if vector.dim() != 1 or vector.shape[0] != size:
        refuse(op, argument, f"of shape [{size}]", list(vector.shape))


def check_bias(op: str, argument: str, bias: Tensor | None, size: int, like_name: str, like: Tensor) -> None:
    if bias is None:
        return
    check_vector(op, argument, bias, size)
    check_like(op, argument, bias, like_name, like)


def check_float32_or(op: str, argument: str, tensor: Tensor, dtype: torch.dtype, said_by: str) -> None:
    """In fp32 or in another dtype, which the argument `said_by` has or is."""
    if tensor.dtype not in (torch.float32, dtype):
        own = f"{dtype_name(dtype)} as {said_by} is"
        refuse(op, argument, own if dtype is torch.float32 else f"float32 or {own}", dtype_name(tensor.dtype))


def check_tables(op: str, cos: Tensor, sin: Tensor, total: int, head_dim: int, like_name: str, like: Tensor) -> None:
    """[T, D] or [T, D / 2], in fp32 or the dtype of `like`."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_matrix(op, name, table, "[T, D] or [T, D / 2]", (total, None))
        if table.shape[1] not in (head_dim, head_dim // 2):
            refuse(op, name, f"of {head_dim} or {head_dim // 2} columns", table.shape[1])
        check_float32_or(op, name, table, like.dtype, like_name)
        check_device(op, name, table, like_name, like)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        got = f"{list(sin.shape)} in {dtype_name(sin.dtype)}"
        refuse(op, "sin", f"{list(cos.shape)} in {dtype_name(cos.dtype)} as cos is", got)


def check_num_heads(op: str, argument: str, num_heads: int) -> None:
    name = f"the number of heads of {argument}"
    if not 1 <= check_int(op, name, num_heads) <= 65535:
        refuse(op, name, "from 1 to 65535", num_heads)


def check_head_dim(op: str, argument: str, head_dim: int) -> None:
    name = f"the head dimension of {argument}"
    if not (8 <= check_int(op, name, head_dim) <= 256 and head_dim % 8 == 0):
        refuse(op, name, "a multiple of 8 from 8 to 256", head_dim)


def check_cu_seqlens(op: str, argument: str, cu_seqlens: Tensor, like_name: str, like: Tensor) -> None:
    check_dense(op, argument, cu_seqlens)
    if cu_seqlens.dtype != torch.int32:
        refuse(op, argument, "int32", dtype_name(cu_seqlens.dtype))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        wanted = "of one dimension with one entry more than there are segments"
        refuse(op, argument, wanted, list(cu_seqlens.shape))
    check_device(op, argument, cu_seqlens, like_name, like)


def check_cu_seqlens_values(op: str, argument: str, cu_seqlens: Tensor, total: int) -> None:
    """Check values that only the device knows; this costs a synchronisation."""
    values = cu_seqlens.tolist()
    if values[0] < 0:
        refuse(op, f"{argument}[0]", "at least 0", values[0])
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            wanted = f"at least {argument}[{index - 1}] = {values[index - 1]}"
            refuse(op, f"{argument}[{index}]", wanted, values[index])
    if values[-1] > total:
        refuse(op, f"{argument}[{len(values) - 1}]", f"at most the {total} rows there are", values[-1])


def is_positive_fp32(value: float) -> bool:
    """Neither 0 nor infinite once a kernel takes it as fp32."""
    return torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max


def check_scale(op: str, scale: float | None) -> None:
    if scale is not None and not is_positive_fp32(scale):
        refuse(op, "scale", "a positive number that fp32 holds", scale)


def check_softcap(op: str, softcap: float) -> None:
    if softcap != 0 and not is_positive_fp32(softcap):
        refuse(op, "softcap", "0 (off) or a positive number that fp32 holds", softcap)


def check_eps(op: str, eps: float) -> None:
    if not 0 <= eps <= torch.finfo(torch.float32).max:
        refuse(op, "eps", "0 or a positive number that fp32 holds", eps)


def check_window(op: str, argument: str, width: int) -> None:
    if width < -1:
        refuse(op, argument, "-1 (unbounded) or a number of keys", width)


def capacity_of(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Keys of a sequence that a cache has room for."""
    return k_cache.shape[2] if block_table is None else k_cache.shape[2] * block_table.shape[1]
