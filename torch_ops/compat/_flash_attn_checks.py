"""Checks that the functions with flash-attn's signatures share."""

from torch import Tensor

from torch_ops._core.checks import check_dense, check_int, check_number, refuse


def check_layout(op: str, argument: str, tensor: Tensor, layout: str, packed: int | None = None) -> None:
    """`layout` is as in "[B, S, H, D]"; `packed` is the size of the third dimension from the end, where it is fixed."""
    check_dense(op, argument, tensor)
    if tensor.dim() != layout.count(",") + 1 or packed not in (None, tensor.shape[-3]):
        refuse(op, argument, f"of shape {layout}", list(tensor.shape))


def check_softmax_scale(op: str, softmax_scale: float | None) -> None:
    if softmax_scale is not None and not check_number(op, "softmax_scale", softmax_scale) > 0:
        refuse(op, "softmax_scale", "a positive number or None", softmax_scale)


def bounds_of(op: str, window_size: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        refuse(op, "window_size", "a pair (left, right)", window_size)
    left, right = [check_int(op, "window_size", width) for width in window_size]
    # In flash-attn every negative width is unbounded.
    return max(left, -1), max(right, -1)


def refuse_given(op: str, **arguments: object) -> None:
    for argument, value in arguments.items():
        if value is not None:
            refuse(op, argument, "None, since the ops have no equivalent", "a tensor")
