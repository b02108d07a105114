"""Ops whose arguments are one NamedTuple: its fields are the schema, and a call is a value.

`planned_op` derives the rest from a few functions of the call: fake, body, plan cache, refusals, FLOPs. `gradient`
adds autograd, by name. `opaque_plan` wraps a plan of Gluon kernels, which traces cannot look into.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from torch_ops._core.device import run_where_tensors_are
from torch_ops._core.plan import Plan
from torch_ops._core.registry import NAMESPACE, KernelOp, Mode, Op, composed_op, current_mode, is_eager, vk_op
from torch_ops.settings import settings

# Signatures that a plan cache holds before it is emptied.
MOST_PLANS = 4096


class Planned(NamedTuple):
    """What `explain` records of one call of an op."""

    op: KernelOp
    args: tuple[Any, ...]
    results: Any
    plan: Plan


# Where `explain` asks, each call on fake tensors is planned and recorded here.
RECORD: list[Planned] = []


def signature_of(call: tuple[Any, ...]) -> Any:
    """Return all that a plan may depend on, or None in a trace, whose sizes may be symbols."""
    if torch._C._len_torch_dispatch_stack():
        return None
    try:
        return (
            settings.generation,
            *[
                (arg.shape, arg.stride(), arg.dtype, arg.device, arg.layout) if isinstance(arg, Tensor) else arg
                for arg in call
            ],
        )
    except RuntimeError:
        # A tensor without strides, which no op takes: the check refuses it.
        return None


def remember(plans: dict[Any, Any], signature: Any, launch: Any) -> None:
    if signature is not None:
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plans[signature] = launch


def without_tensors(call: Any) -> Any:
    """Return the call with None for its tensors: what a plan or autograd may keep of it."""
    return type(call)(*(None if isinstance(value, Tensor) else value for value in call))


def planned_op(
    name: str,
    arguments: Any,
    results: Any,
    *,
    check: Callable[[Any], None],
    outputs: Callable[[Any], Any],
    tensors: Callable[[Any, Any], Any] | None,
    plan: Callable[[Any, Any], Plan],
    check_values: Callable[[Any], None] | None = None,
    flops: Callable[[Any], int] | None = None,
    **options: Any,
) -> KernelOp:
    """Register `vk::<name>` from its parts.

    arguments           NamedTuple: its fields, with types and defaults, are the schema
    results             type of what the op returns
    check(call)         refuses bad arguments, by metadata alone
    outputs(call)       allocates what the op returns; the fake is the check and this
    tensors(call, made) value that is launched on; None where the launch takes the call and makes the outputs itself
    plan(tensors, call) chooses kernels, by metadata alone; once per signature in eager calls
    check_values(call)  refuses what only the device knows, in checked mode
    flops(call)         counts
    options             those of `vk_op`
    """
    plans: dict[Any, Callable[[Any], Any]] = {}

    def fake(*args: Any, **kwargs: Any) -> Any:
        call = arguments(*args, **kwargs)
        check(call)
        made = outputs(call)
        if current_mode() is Mode.EXPLAINED:
            RECORD.append(Planned(op, tuple(call), made, plan(tensors(call, made) if tensors else call, call)))
        return made

    def body(*args: Any, **kwargs: Any) -> Any:
        call = arguments(*args, **kwargs)
        signature = signature_of(call)
        launch = plans.get(signature)
        if launch is None:
            check(call)
        if check_values is not None and settings.checked and is_eager():
            check_values(call)
        if tensors is None:
            if launch is None:
                launch = plan(call, call).launch
                remember(plans, signature, launch)
            return launch(call)
        made = outputs(call)
        on = tensors(call, made)
        if launch is None:
            launch = plan(on, call).launch
            remember(plans, signature, launch)
        launch(on)
        return made

    body.__signature__ = _signature(arguments, results)  # type: ignore[attr-defined]
    # Where torch looks for the kernels that enter the key of compiled artefacts.
    body.__wrapped__ = plan  # type: ignore[attr-defined]
    body.__module__, body.__name__ = arguments.__module__, name
    count = None if flops is None else (lambda *args, **kwargs: flops(arguments(*args, **kwargs)))
    op = vk_op(name, fake=fake, flops=count, **options)(body)
    return op


def gradient(
    op: KernelOp,
    arguments: Any,
    differentiate: Callable[[Any, Any, tuple[Any, ...], frozenset[str]], dict[str, Tensor | None]],
    *,
    saves: tuple[str, ...] | Callable[[Any, frozenset[str]], tuple[str, ...]],
    saves_results: tuple[int, ...] = (),
    refuses: tuple[str, ...] = (),
    shapes: tuple[str, ...] = (),
    constant: Callable[[Any, frozenset[str]], tuple[int, ...]] | None = None,
) -> None:
    """Register the gradient of a planned op, by the names of its arguments.

    differentiate(call, results, grads, needed) returns gradients by name. Of the call's tensors only those named in
    `saves` are there, of the results only those at the places in `saves_results`; the others are None. A gradient that
    does not arrive is None, and where none does, nothing is called. `needed` names arguments that want a gradient. A
    tensor named in `refuses` may not want one.

    saves(call, needed) may name the tensors call by call. A tensor in `shapes` that is not saved is there as its shape.
    constant(call, needed) says which results are not differentiable, by place.
    """
    fields = arguments._fields
    places_of_shapes = frozenset(fields.index(name) for name in shapes)

    @functools.cache
    def places_of(names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(fields.index(name) for name in names)

    @functools.cache
    def named(needs: tuple[bool, ...]) -> frozenset[str]:
        # Arguments that were left to their defaults need none.
        return frozenset(name for name, each in zip(fields, needs, strict=False) if each)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call = arguments(*inputs)
        for name in refuses:
            tensor = getattr(call, name)
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"{op.name}: {name} has requires_grad=True, but it gets no gradient; pass {name}.detach()"
                )
        made = output if isinstance(output, tuple) else (output,)
        ctx.places = places_of(saves(call, named(tuple(ctx.needs_input_grad))) if callable(saves) else saves)
        ctx.save_for_backward(*[call[place] for place in ctx.places], *[made[place] for place in saves_results])
        ctx.call = [None if isinstance(value, Tensor) else value for value in call]
        for place in places_of_shapes:
            if isinstance(call[place], Tensor):
                ctx.call[place] = call[place].shape
        if constant is not None:
            ctx.mark_non_differentiable(*[made[place] for place in constant(call, named(tuple(ctx.needs_input_grad)))])
        ctx.count = len(made)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all([grad is None for grad in grads]):
            return (None,) * len(fields)
        saved, values = ctx.saved_tensors, list(ctx.call)
        for place, tensor in zip(ctx.places, saved, strict=False):
            values[place] = tensor
        results: list[Tensor | None] = [None] * ctx.count
        for place, tensor in zip(saves_results, saved[len(ctx.places) :], strict=True):
            results[place] = tensor
        needed = named(tuple(ctx.needs_input_grad))
        made = differentiate(arguments._make(values), tuple(results), grads, needed)
        return tuple([made.get(field) if field in needed else None for field in fields])

    op.register_autograd(backward, setup_context=setup_context)


def composed_call(name: str, arguments: Any, results: Any) -> Callable[[Callable[[Any], Any]], Op]:
    """Register the decorated function of a call, made of other ops, as `vk::<name>`; see `composed_op`."""

    def register(compose: Callable[[Any], Any]) -> Op:
        def body(*args: Any, **kwargs: Any) -> Any:
            return compose(arguments(*args, **kwargs))

        body.__signature__ = _signature(arguments, results)  # type: ignore[attr-defined]
        body.__module__, body.__name__ = arguments.__module__, name
        return composed_op(name)(body)

    return register


def _signature(arguments: Any, results: Any) -> inspect.Signature:
    parameter, kind = inspect.Parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = arguments._field_defaults
    parameters = [
        parameter(field, kind, default=defaults.get(field, parameter.empty), annotation=annotation)
        for field, annotation in get_type_hints(arguments).items()
    ]
    return inspect.Signature(parameters, return_annotation=results)


def opaque_plan(
    name: str, tensors: Any, options: Any, *, writes: tuple[str, ...], plan: Callable[[Any, Any], Plan]
) -> Callable[[Any], Plan]:
    """Register `vk::<name>`, a private op that fills the tensors in `writes`, and return what plans a call of it.

    Gluon kernels cannot pass through `wrap_triton`, so no compiler looks into the op. Its schema is the fields of two
    NamedTuples: the tensors of a launch and its options. It plans again when it runs, since the call is eager then.
    """
    plans: dict[Any, Callable[[Any], Any]] = {}
    fields = {**get_type_hints(tensors), **get_type_hints(options)}
    count = len(tensors._fields)

    def launch(*args: Any) -> None:
        signature = signature_of(args)
        planned = plans.get(signature)
        on = tensors(*args[:count])
        if planned is None:
            planned = plan(on, options(*args[count:])).launch
            remember(plans, signature, planned)
        planned(on)

    def body(*args: Any) -> None:
        run_where_tensors_are(launch, *args)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter(field, kind, annotation=annotation) for field, annotation in fields.items()]
    body.__signature__ = inspect.Signature(signature, return_annotation=None)  # type: ignore[attr-defined]
    definition = torch.library.custom_op(f"{NAMESPACE}::{name}", body, mutates_args=writes, device_types="cuda")
    definition.register_fake(lambda *args, **kwargs: None)

    def planned_opaquely(chosen: Any) -> Plan:
        return Plan(lambda on: definition(*on, *chosen), {}, "hopper")

    return functools.wraps(plan)(planned_opaquely)
