"""The one way an op is registered.

`vk_op` registers a `torch.library.custom_op` that behaves as a `triton_op`, and adds what every op promises:

- The fake is the check and the allocation of outputs that the body itself begins with.
- CUDA tensors decompose under `torch.compile` to the kernels that the body launches through `wrap_triton`. CPU tensors
  and interpreted kernels stay one opaque node, so that fake tensors reach neither the reference nor the interpreter.
- Eager CUDA calls take a thin path: kernels registered for the CUDA and AutogradCUDA keys call the body directly.
  Modes, subclasses and fake tensors, which watch dispatch, take the generic path. Calls by our functions that were
  seen before do without the dispatcher (`_core/direct.py`).
- An op that writes to arguments (`mutates`) says so in its schema. Eager calls bump their version counters, so that
  autograd finds out where a tensor that it saved was written to. It has no gradient, and refuses what requires one.
- Autocast follows the region's dtype. Forward-mode differentiation raises, where PyTorch would return zeros. So do
  gradients within `torch.func`, by name; PyTorch has none for Triton ops.
- FLOPs are registered for `torch.utils.flop_counter`.

`composed_op` is for an op made of ops: a schema and one implementation for every key (CompositeImplicitAutograd), the
composition itself. The dispatcher takes it apart above autograd, so that gradient, fake, autocast and launches come
from its parts. Dynamo and torch.export keep it whole; AOTAutograd, Inductor, AOTInductor and `run_decompositions()` see
the parts.

Bodies launch by `wrap_triton(_kernel)` on a bare name, directly or in functions called by bare name. PyTorch reads the
source, and only such kernels enter the key of compiled artefacts (`torch_private.name_kernels`).
"""

import contextlib
import enum
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, custom_op
from torch.library import wrap_triton as _torch_wrap_triton
from torch.utils.flop_counter import register_flop_formula

from torch_ops._core.arguments import (
    Numbers,
    keep_numbers,
    numbers_of,
    refuse_negated_tensors,
    refuse_nested_tensors,
    with_numbers,
)
from torch_ops._core.autocast import install_autocast
from torch_ops._core.device import run_where_tensors_are
from torch_ops._core.direct import Direct, is_watched
from torch_ops._core.torch_private import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    any_requires_grad,
    autograd_impl,
    backward_of,
    count_dispatch_modes,
    decomposes_triton_ops,
    has_functorch_transforms,
    has_tangents,
    is_aot_compiling,
    launch_triton_directly,
    name_kernels,
    nothing_watches,
    overload_of,
    setup_context_of,
)

INTERPRET = triton.knobs.runtime.interpret
NAMESPACE = "vk"

_library = Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Op:
    """A registered op: `op(...)` is `torch.ops.vk.<name>(...)`, and refuses by name what is no number."""

    name: str
    overload: Any
    body: Callable[..., Any]
    numbers: Numbers

    def __call__(self, *args: Any) -> Any:
        return self.overload(*with_numbers(self.name, numbers_of(self.name), args))


@dataclass(frozen=True)
class KernelOp(Op):
    """One whose body launches kernels, with a gradient of its own.

    A call that was seen before runs without the dispatcher (`_core/direct.py`), if the body has a `prepared` that
    finds what runs it.
    """

    definition: Any
    recorded: Callable[[Callable[..., Any]], Callable[..., Any]]
    direct: Direct | None

    def __call__(self, *args: Any) -> Any:
        direct = self.direct
        if torch.compiler.is_compiling():
            return self.overload(*with_numbers(self.name, numbers_of(self.name), args))
        if direct is None or is_watched():
            return self.overload(*with_numbers(self.name, self.numbers, args))
        found = direct.find(args)
        if found is None:
            args = with_numbers(self.name, self.numbers, args)
            results = self.overload(*args)
            direct.remember(args, self.body.prepared, self._recorded)  # type: ignore[attr-defined]
            return results
        record = found.record
        if record is not None and torch.is_grad_enabled():
            return record(*args)
        return found.run(*args)

    def _recorded(self, run: Callable[..., Any]) -> Callable[..., Any]:
        # PyTorch refuses the gradient of an op that has none.
        return self.overload if backward_of(self.definition) is None else self.recorded(run)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None) -> None:
        self.definition.register_autograd(backward, setup_context=setup_context)

    def refuse_autograd(self, why: str = "there are no second derivatives") -> None:
        """For the gradient of another op, or one that is for inference: a derivative is refused by name."""

        def refuse(ctx: Any, *grads: Any) -> None:
            raise NotImplementedError(f"{NAMESPACE}::{self.name} has no derivative: {why}")

        self.register_autograd(refuse)


OPS: dict[str, Op] = {}


class Mode(enum.Enum):
    """The world that a plan is made for. Each plan asks once."""

    EAGER = "real tensors"
    TRACED = "fake tensors: a compiler follows"
    PACKAGED = "fake tensors: AOTInductor makes a package, which runs without Python"
    EXPLAINED = "fake tensors: `explain` asks for the plan of an eager call"


class _Explained(threading.local):
    """State of `explain` in this thread; other threads plan and trace meanwhile."""

    real: dict[int, Tensor] | None = None
    record: list[Any]


_explained = _Explained()


def current_mode() -> Mode:
    if _explained.real is not None:
        return Mode.EXPLAINED
    if not count_dispatch_modes():
        return Mode.EAGER
    return Mode.PACKAGED if is_aot_compiling() else Mode.TRACED


@contextlib.contextmanager
def explaining(real: dict[int, Tensor]) -> Iterator[list[Any]]:
    """Plan as eager calls do, although tensors are fake, and yield the list that `record` adds to.

    `real` holds an argument by the id of its fake.
    """
    _explained.real, _explained.record = real, []
    try:
        yield _explained.record
    finally:
        _explained.real = None


def record(entry: Any) -> None:
    """Add to what `explain` is asked for."""
    _explained.record.append(entry)


def recorded_tensor(tensor: Tensor) -> Tensor | None:
    """Return a tensor with an address: itself, or where `explain` asks the argument behind a fake one, if any."""
    return tensor if _explained.real is None else _explained.real.get(id(tensor))


def is_eager() -> bool:
    """Whether a call may look at its tensors, or is planned as if it may."""
    return current_mode() in (Mode.EAGER, Mode.EXPLAINED)


def wrap_triton(kernel: Any) -> Any:
    """`torch.library.wrap_triton` in a trace; the kernel itself in eager calls and the interpreter."""
    return kernel if INTERPRET or is_eager() else _torch_wrap_triton(kernel)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether this tensor's op launches kernels: on a GPU, or under the interpreter, which computes in numpy."""
    return tensor.is_cuda or (INTERPRET and tensor.dtype in (torch.float16, torch.float32))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; never waits, which a copy of what is not pinned may do."""
    # A trace leaves it to what runs it.
    if device.type == "cuda" and tensor.device.type == "cpu" and is_eager():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


def vk_op(
    name: str,
    *,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
    autocast: bool = False,
    keeps_dtype: tuple[str, ...] = (),
    reads_any: tuple[str, ...] = (),
    dtype_argument: str = "",
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], KernelOp]:
    """Register the decorated body as `vk::<name>`; its annotations are the schema.

    `fake` takes the body's arguments, refuses bad ones and returns the empty outputs, by the functions that the body
    itself uses. `mutates` names the arguments that the body writes to. `flops(*args)` counts a call.
    With `autocast` the floating tensors are cast to the autocast region's dtype. Three kinds are not. One is fp32
    tensors named in `keeps_dtype`, which are tables. Another is tensors named in `reads_any`, which kernels read in any
    dtype. The third is all tensors of a call whose `dtype_argument` says the type.
    """

    def register(body: Callable[..., Any]) -> KernelOp:
        @functools.wraps(body)
        def run_beside_modes(*args: Any, **kwargs: Any) -> Any:
            with launch_triton_directly():
                return body(*args, **kwargs)

        definition: Any = custom_op(f"{NAMESPACE}::{name}", run_beside_modes, mutates_args=mutates)
        definition.register_fake(fake)
        overload = overload_of(definition)
        name_kernels(f"{NAMESPACE}::{name}", body)

        def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Show AOTAutograd the kernels in place of the op. Exports and CPU tensors keep the op."""
            on_gpu = any(isinstance(arg, Tensor) and arg.is_cuda for arg in args)
            if INTERPRET or not on_gpu or not decomposes_triton_ops():
                return mode.__torch_dispatch__(op, types, args, kwargs)
            if not all(issubclass(each, FakeTensor) or each in (Tensor, FunctionalTensor) for each in types):
                return NotImplemented
            with mode:
                return body(*args, **kwargs)

        definition.register_torch_dispatch(FunctionalTensorMode, functionalize)
        refuse_nested_tensors(_library, name, body, overload)
        if mutates:
            refuse_negated_tensors(_library, name, mutates, overload)
        recorded = _install_eager_path(name, body, definition, mutates)
        if autocast:
            install_autocast(_library, name, overload, body, keeps_dtype, reads_any, dtype_argument)
        if flops is not None:
            register_flop_formula(overload.overloadpacket, get_raw=True)(
                lambda *args, out_val=None, **kwargs: flops(*args, **kwargs)
            )
        direct = Direct() if hasattr(body, "prepared") and not mutates else None
        op = OPS[name] = KernelOp(name, overload, body, keep_numbers(name, body), definition, recorded, direct)
        return op

    return register


def composed_op(name: str, private: bool = False) -> Callable[[Callable[..., Any]], Op]:
    """Register the decorated function of other ops as `vk::<name>`. Its annotations are the schema.

    A private op is a detail of one function, and `OPS` does not list it.
    """

    def register(body: Callable[..., Any]) -> Op:
        schema = torch.library.infer_schema(body, mutates_args=())
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, body, "CompositeImplicitAutograd")
        op = Op(name, getattr(torch.ops.vk, name).default, body, keep_numbers(name, body))
        refuse_nested_tensors(_library, name, body, op.overload)
        if not private:
            OPS[name] = op
        return op

    return register


def _install_eager_path(
    name: str, body: Callable[..., Any], definition: Any, mutates: tuple[str, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: it turns a function that runs a call into one that also records the gradient."""
    parameters = inspect.signature(body).parameters
    defaults = [parameter.default for parameter in parameters.values()]
    written = [list(parameters).index(argument) for argument in mutates]
    generic = autograd_impl(definition)
    run = functools.partial(run_where_tensors_are, body)

    class Differentiable(torch.autograd.Function):
        """Its last argument runs the call, so that the others have the places that they have in the schema."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *given, run = args
            outputs = run(*given)
            setup_context = setup_context_of(definition)
            if setup_context is not None:
                setup_context(ctx, tuple(given), outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            backward = backward_of(definition)
            assert backward is not None
            found = backward(ctx, *grads)
            return (*found, None) if isinstance(found, tuple) else (found, None)

    # Without the checks of Function.apply for torch.func, whose calls take the generic path.
    record = super(torch.autograd.Function, Differentiable).apply

    def recorded(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: record(*args, *defaults[len(args) :], run)

    apply = recorded(run)

    def autograd(keyset: Any, *args: Any) -> Any:
        if has_tangents():
            _refuse_tangents(name, args)
        if written:
            _refuse_gradients(name, parameters, args)
        if has_functorch_transforms():
            with _naming_transforms(name):
                return generic(keyset, *args)
        if not nothing_watches(keyset.raw_repr()):
            return generic(keyset, *args)
        if written:
            torch.autograd.graph.increment_version([args[place] for place in written])
        if not (torch.is_grad_enabled() and any_requires_grad(*args)):
            return run(*args)
        if backward_of(definition) is None:
            return generic(keyset, *args)
        return apply(*args)

    _library.impl(name, run, "CUDA")
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
        _library.impl(name, autograd, key, with_keyset=True)
    return recorded


@contextlib.contextmanager
def _naming_transforms(name: str) -> Iterator[None]:
    """PyTorch's own refusal of a gradient within torch.func, in which its custom ops take no part, names no op."""
    try:
        yield
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
        raise NotImplementedError(
            f"{NAMESPACE}::{name} has no gradient within torch.func; torch.autograd takes what it has"
        ) from error


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"{NAMESPACE}::{name} has no forward-mode derivative")


def _refuse_gradients(name: str, parameters: Iterable[str], args: tuple[Any, ...]) -> None:
    """PyTorch itself would return results whose gradient is refused only when it is asked for."""
    if not (torch.is_grad_enabled() and any_requires_grad(*args)):
        return
    for parameter, arg in zip(parameters, args, strict=False):
        if isinstance(arg, Tensor) and arg.requires_grad:
            raise NotImplementedError(
                f"{NAMESPACE}::{name} has no gradient, and {parameter} requires one: "
                f"call it within torch.no_grad() or torch.inference_mode(), or on {parameter}.detach()"
            )
