"""`explain` and `info`: the library's decisions and their reasons."""

import functools
import inspect
import platform
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import triton
from torch import Tensor

from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.rows import TunedConfig, shipped_rows
from torch_ops._core.checks import check_dense
from torch_ops._core.device import gpu
from torch_ops._core.hopper import what_holds
from torch_ops._core.plan import Plan, merged
from torch_ops._core.planned_op import Planned
from torch_ops._core.registry import INTERPRET, OPS, explaining
from torch_ops._core.torch_private import FakeTensor, FakeTensorMode, backward_of, pytree, schema_of, setup_context_of
from torch_ops._core.versions import __version__, not_run_on_a_gpu
from torch_ops.settings import settings

# Functions of `torch_ops.compat` that `explain` takes, and the op that each is made on.
_FUNCTIONS: dict[Callable[..., Any], str] = {}


def explained_as(op: str) -> Callable[[Any], Any]:
    """Let `explain` take the decorated function, which is made on `vk::<op>`."""

    def register(function: Any) -> Any:
        _FUNCTIONS[function] = op
        return function

    return register


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Say how `op(*args, **kwargs)` would run: which path, which launch of each kernel, and where that comes from.

    `op` is a public function or the operator, such as `torch_ops.window_attn` or `torch.ops.vk.window_attn`. It may
    also be a function of `torch_ops.compat` without a cache. "hand_over" then says which kernel of PyTorch computes, or
    why none does. Kernels are those of the call and of its gradient. Nothing is launched, and no value of a tensor is
    looked at, but other bad arguments are refused as by the op itself. The device is the one that it runs on.

    Raises:
        ValueError: `op` is none of the library's; or an argument that the op itself refuses.
        TypeError: the arguments do not fit the function's signature.
    """
    # A compiled function runs as the one that it was made of.
    op = getattr(op, "_torchdynamo_orig_callable", op)
    name = _name_of(op)
    try:
        bound = inspect.signature(op if isinstance(op, FunctionType) else OPS[name].body).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    # Fake tensors are all dense.
    for argument, value in bound.arguments.items():
        if isinstance(value, Tensor):
            check_dense(name, argument, value)
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    # Arguments may be fake already.
    modes = [value.fake_mode for value in given if isinstance(value, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    real: dict[int, Tensor] = {}

    @functools.cache
    def faked(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
        if not torch.is_grad_enabled():
            fake = fake.detach()
        real[id(fake)] = tensor
        return fake

    args, kwargs = pytree.tree_map_only(Tensor, faked, (args, kwargs))
    with mode, explaining(real) as record:
        op(*args, **kwargs)
        calls = list(record)
        for call in calls:
            _plan_gradient(call)
        plans = [call.plan for call in calls], [call.plan for call in record[len(calls) :]]
    made = [each for call in calls for each in _as_tuple(call.results) if isinstance(each, Tensor)]
    return _report(name, (made or given)[0].device, *plans)


def _name_of(op: Any) -> str:
    """The op's name in `torch.ops.vk`. Other functions of the same name are refused."""
    if isinstance(op, FunctionType) and op in _FUNCTIONS:
        return _FUNCTIONS[op]
    name = getattr(op, "__name__", str(op)).removeprefix("vk.").split(".")[0]
    names = sorted(each for each in OPS if not each.endswith("_backward"))
    operator = getattr(torch.ops.vk, name) if name in names else None
    public = getattr(sys.modules["torch_ops"], name, None)
    if operator is None or all(each is not inspect.unwrap(op) for each in (public, operator, operator.default)):
        got = ".".join(filter(None, (getattr(op, "__module__", None), name)))
        public_names = (each for each in names if not each.startswith("_"))
        raise ValueError(f"explain: op is {got!r}, expected one of {', '.join(public_names)}")
    return name


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


class _Context:
    """Stands in for autograd's own: a gradient's formula runs on it, so that it plans what it calls."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass


def _plan_gradient(call: Planned) -> None:
    if call.op is None:
        return
    setup, backward = setup_context_of(call.op.definition), backward_of(call.op.definition)
    if setup is None or backward is None:
        return
    context = _Context(call.args)
    setup(context, call.args, call.results)
    backward(context, *[torch.empty_like(each) if each.numel() else None for each in _as_tuple(call.results)])


def _report(name: str, device: torch.device, plans: list[Plan], gradients: list[Plan]) -> dict[str, Any]:
    kernels = merged(*(plan.kernels for plan in (*plans, *gradients)))
    paths = [plan.path for plan in plans]
    # A call of several ops or products takes the Hopper path where one of them does.
    path = next((each for each in ("hopper", "portable", "aten", "reference") if each in paths), "aten")
    reasons = dict.fromkeys(plan.why for plan in plans if plan.why and plan.path in (path, "aten"))
    extra = {key: value for plan in plans for key, value in plan.extra.items()}
    return {
        "op": f"vk::{name}",
        "device": str(device),
        "path": path,
        "why": "; ".join(reasons) if plans else "PyTorch's own function takes the call",
        "kernels": {key: {"launch": launch.entry(), "source": source} for key, (launch, source) in kernels.items()},
        **extra,
    }


def info() -> dict[str, Any]:
    """Return versions, devices, registered ops, settings, and the paths and launch rows of this machine."""
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {"name": properties.name, "capability": f"{properties.major}.{properties.minor}",
             "memory_gib": round(properties.total_memory / 2**30, 1)}
        )  # fmt: skip
    rows: dict[str, Any] = {"user": len(settings.rows)}
    paths = {}
    if torch.cuda.is_available():
        device = gpu()
        shipped = shipped_rows(device.name)
        rows |= {
            "gpu": device.name,
            "shipped": len(shipped),
            "source": shipped[0].source if shipped else "rule, unmeasured",
            "kernels": {kernel: _rows_of(kernel, (*settings.rows, *shipped)) for kernel in CANDIDATES},
        }
        paths = {"portable": "yes", "hopper": what_holds(device)}
    else:
        rows |= {"gpu": None, "shipped": 0, "source": "no GPU: the CPU reference computes", "kernels": {}}
    return {
        "versions": {
            "vk": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "not_run_on_a_gpu": not_run_on_a_gpu(torch.__version__),
        "devices": devices,
        "interpreter": INTERPRET,
        "settings": {"path": settings.path, "checked": settings.checked, "hand_over": settings.hand_over},
        "ops": {name: str(schema_of(op.overload)) for name, op in sorted(OPS.items())},
        "paths": paths,
        "rows": rows,
    }


def _rows_of(kernel: str, rows: tuple[TunedConfig, ...]) -> str:
    count = sum(row.kernel == kernel for row in rows)
    return f"{count} rows" if count else "rule, unmeasured"
