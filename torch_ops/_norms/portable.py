"""The plans of the norms' kernels, one for each direction."""

import math

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.configs.norms import norm_kernel, norm_programs, norm_tail, parameters_early
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.norms import (
    _norm_bwd_kernel,
    _norm_bwd_sums_kernel,
    _norm_bwd_wide_kernel,
    _norm_fwd_kernel,
    _norm_fwd_wide_kernel,
)
from torch_ops._core.checks import dtype_name
from torch_ops._core.launch import can_overlap, current_gpu
from torch_ops._core.plan import Bound, Plan
from torch_ops._core.registry import wrap_triton
from torch_ops._norms.tensors import Backward, Forward
from torch_ops.settings import settings


def norm_config(kernel: str, x: Tensor) -> tuple[Config, str]:
    """The launch of `kernel` for this dtype, width and, where it is known, number of rows, and where it comes from."""
    rows = _known(_num_rows(x))
    return pick(kernel, current_gpu(), dtype_name(x.dtype), x.dtype.itemsize, x.shape[-1], False, rows, settings.rows)


def _num_rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _known(size: int) -> int | None:
    """Graphs of dynamic shape may not branch on their sizes."""
    return None if isinstance(size, torch.SymInt) else size


def _row_stride(tensor: Tensor) -> int | None:
    """From each row to the next, where the leading dimensions fold into one and columns are contiguous.

    None where they do not, and where the stride is a symbol, which a constant of a kernel cannot be: such are copied.
    """
    width = tensor.shape[-1]
    if tensor.stride(-1) != 1 and width != 1:
        return None
    stride = following = None
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != following:
            return None
        following = step * size
    if stride is None:
        return width
    return None if isinstance(stride, torch.SymInt) else stride


def _strides(tensors: dict[str, Tensor]) -> tuple[dict[str, int], tuple[int, ...], bool]:
    """Constants and run-time arguments of the kernels, and whether nothing is to be copied.

    The strides are those that rows have once `_foldable` has copied what has none. Rows without gaps have a constant
    for theirs. Any other stride follows from a length, as that of x[:, -1] does, and as a constant it would cost a
    build for each length. A number of 64 bits costs nothing beside a whole row.
    """
    width = next(iter(tensors.values())).shape[-1]
    strides = [_row_stride(tensor) for tensor in tensors.values()]
    folded = tuple([width if stride is None else stride for stride in strides])
    ready = None not in strides
    if all(stride == width for stride in folded):
        return {**dict.fromkeys(tensors, width), "STRIDE_UNIT": 1}, (0,) * len(folded), ready
    unit = 8 if all(stride % 8 == 0 for stride in folded) else 1
    return {**dict.fromkeys(tensors, -1), "STRIDE_UNIT": unit}, tuple([stride // unit for stride in folded]), ready


def _foldable(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if _row_stride(tensor) is None else tensor


def _compact(vector: Tensor | None) -> bool:
    return vector is None or vector.is_contiguous()


def _parts(launch: Config, width: int) -> dict[str, int]:
    return {"WIDTH": width, "MAIN": launch.block_n, "TAIL": norm_tail(width, launch.block_n), "BLOCK_M": launch.block_m}


def _options(launch: Config) -> dict[str, int]:
    return {"num_warps": launch.num_warps, "num_stages": launch.num_stages}


def plan_forward_portable(has_mean: bool, t: Forward, eps: float) -> Plan:
    x, residual, weight, bias, *_ = t
    width, num_rows = x.shape[-1], _num_rows(x)
    kernel = norm_kernel("norm_fwd", width)
    wide = kernel != "norm_fwd"
    launch, source = norm_config(kernel, x)
    strides, steps, folded = _strides({"STRIDE_X": x, "STRIDE_R": x if residual is None else residual})
    ready = folded and _compact(weight) and _compact(bias)
    overlaps = can_overlap()
    # One parameter's registers are few enough, and beside a residual what is under way is enough.
    early = residual is not None or weight is None or bias is None
    constants = {
        **strides, "HAS_MEAN": has_mean, "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "OVERLAPS": overlaps,
        **({"WIDTH": width, "BLOCK_N": launch.block_n} if wide else _parts(launch, width)), **_options(launch),
        **({"launch_pdl": True} if overlaps else {}),
        **({} if wide else {"EARLY": early or parameters_early(current_gpu(), launch, _known(num_rows))}),
    }  # fmt: skip
    function = wrap_triton(_norm_fwd_wide_kernel) if wide else wrap_triton(_norm_fwd_kernel)
    bound = Bound(function, (cdiv(num_rows, launch.block_m),), (num_rows, eps, *steps), constants)

    def launch_forward(t: Forward) -> None:
        if num_rows == 0:
            return
        x, residual, weight, bias, out, total = t if ready else _compacted(t)
        # For what is absent any tensor stands in.
        bound(
            x, x if residual is None else residual, x if weight is None else weight, x if bias is None else bias,
            out, x if total is None else total,
        )  # fmt: skip

    return Plan(launch_forward, {kernel: (launch, source)})


def _compacted(t: Forward) -> Forward:
    residual = None if t.residual is None else _foldable(t.residual)
    weight, bias = (None if vector is None else vector.contiguous() for vector in (t.weight, t.bias))
    return Forward(_foldable(t.x), residual, weight, bias, t.out, t.total)


def plan_backward_portable(has_mean: bool, t: Backward, eps: float, needs: tuple[bool, bool, bool]) -> Plan:
    dout, dsum, x, weight, *_ = t
    assert dout is not None
    needs_dx, needs_dweight, needs_dbias = needs
    width, num_rows = x.shape[-1], _num_rows(x)
    kernel = norm_kernel("norm_bwd", width)
    wide = kernel != "norm_bwd"
    launch, source = norm_config(kernel, x)
    sums = needs_dweight or needs_dbias
    strides, steps, folded = _strides({"STRIDE_DO": dout, "STRIDE_DS": x if dsum is None else dsum, "STRIDE_X": x})
    ready = folded and _compact(weight)
    wanted = {"NEEDS_DWEIGHT": needs_dweight, "NEEDS_DBIAS": needs_dbias}
    overlaps = can_overlap()
    launched_early = {"launch_pdl": True} if overlaps else {}
    constants = {
        **strides, "HAS_MEAN": has_mean, "HAS_DSUM": dsum is not None, "HAS_WEIGHT": weight is not None,
        "NEEDS_DX": needs_dx, **wanted, **_options(launch),
        **({"WIDTH": width, "BLOCK_N": launch.block_n} if wide else _parts(launch, width)),
        **({} if wide else {"OVERLAPS": overlaps, "STAGES": launch.num_stages, **launched_early}),
    }  # fmt: skip
    programs = norm_programs(current_gpu(), launch, _known(num_rows), sums)
    function = wrap_triton(_norm_bwd_wide_kernel) if wide else wrap_triton(_norm_bwd_kernel)
    bound = Bound(function, (programs,), (num_rows, eps, *steps), constants)

    sums_config, sums_source = norm_config("norm_bwd_sums", x)
    sums_constants = {
        "WIDTH": width, **wanted, "OVERLAPS": overlaps,
        "BLOCK_M": sums_config.block_m, "BLOCK_N": sums_config.block_n, **_options(sums_config), **launched_early,
    }  # fmt: skip
    sums_grid = (cdiv(width, sums_config.block_n), needs_dweight + needs_dbias)
    bound_sums = Bound(wrap_triton(_norm_bwd_sums_kernel), sums_grid, (programs,), sums_constants)

    def launch_backward(t: Backward) -> None:
        if not (sums or (needs_dx and num_rows != 0)):
            return
        dout, dsum, x, weight, dx, dweight, dbias = t
        assert dout is not None
        if not ready:
            dout, x, dsum = _foldable(dout), _foldable(x), None if dsum is None else _foldable(dsum)
            weight = None if weight is None else weight.contiguous()
        dweights, dbiases = (
            torch.empty((programs, width), dtype=torch.float32, device=x.device) if needed else x
            for needed in (needs_dweight, needs_dbias)
        )
        bound(
            dout, x if dsum is None else dsum, x, x if weight is None else weight, dx if needs_dx else x,
            dweights, dbiases,
        )  # fmt: skip
        if sums:
            bound_sums(dweights, dbiases, dweight if needs_dweight else x, dbias if needs_dbias else x)

    kernels = {kernel: (launch, source), **({"norm_bwd_sums": (sums_config, sums_source)} if sums else {})}
    return Plan(launch_backward, kernels)
