"""Ops whose arguments are one NamedTuple: its fields are the schema, and a call is a value.

`planned_op` derives the rest from a few functions of the call: fake, body, plan cache, refusals, FLOPs. `gradient`
adds autograd, by name. `opaque_plan` wraps a plan of Gluon kernels, which traces cannot look into.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from torch_ops._core.checks import check_all_dense
from torch_ops._core.device import run_where_tensors_are
from torch_ops._core.direct import Direct, allocator, is_watched
from torch_ops._core.plan import Plan
from torch_ops._core.registry import NAMESPACE, KernelOp, Mode, Op, composed_op, current_mode, is_eager, record, vk_op
from torch_ops._core.torch_private import count_dispatch_modes, schema_of
from torch_ops.settings import settings

Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]

# Signatures that a plan cache holds before it is emptied.
MOST_PLANS = 4096


class Run:
    """A function that runs the calls of a signature, and whether the signature came a second time."""

    __slots__ = ("again", "launch")

    def __init__(self, launch: Callable[[Any], Any]) -> None:
        self.launch, self.again = launch, False


class Planned(NamedTuple):
    """What `explain` records of one call of an op; `op` is None where the library has no gradient to plan."""

    op: KernelOp | None
    args: tuple[Any, ...]
    results: Any
    plan: Plan


def tensor_places(annotations: Iterable[Any]) -> tuple[int, ...]:
    """Return the places of arguments that are tensors, absent ones included."""
    return tuple(place for place, each in enumerate(annotations) if each is Tensor or Tensor in get_args(each))


def signatures(annotations: Iterable[Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Return the function that gives, for a call of arguments so annotated, all that its plan may depend on.

    In a trace, whose sizes may be symbols, it gives None.
    """
    annotations = tuple(annotations)
    tensors = tensor_places(annotations)
    pick_tensors = picker(tensors)
    pick_values = picker([place for place in range(len(annotations)) if place not in tensors])

    def signature_of(call: tuple[Any, ...]) -> Any:
        if count_dispatch_modes():
            return None
        try:
            return (
                settings.generation,
                pick_values(call),
                *[
                    None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout)
                    for x in pick_tensors(call)
                ],
            )
        except RuntimeError:
            # A tensor without strides, which no op takes: the check refuses it.
            return None

    return signature_of


def picker(places: Sequence[int]) -> Pick:
    """Return the function that picks these places of a tuple, as a tuple however many they are."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def remember(plans: dict[Any, Any], signature: Any, planned: Any) -> None:
    if signature is not None:
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plans[signature] = planned


def _prepared(
    plans: dict[Any, Run], signature_of: Callable[[tuple[Any, ...]], Any], value_of: Callable[..., Any]
) -> Callable[..., Callable[..., Any] | None]:
    """Return the function that finds, for a call whose signature came again, what runs others on their `value_of`."""

    def prepared(*args: Any) -> Callable[..., Any] | None:
        run = plans.get(signature_of(args))
        if run is None or not run.again:
            return None
        launch = run.launch
        return lambda *args: launch(value_of(*args))

    return prepared


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
    check(call)         refuses bad arguments, by metadata alone; tensors that are not dense are refused before
    outputs(call)       allocates what the op returns; the fake is the check and this
    tensors(call, made) value that is launched on; None where the launch takes the call and makes the outputs itself
    plan(tensors, call) chooses kernels, by metadata alone; once per signature in eager calls
    check_values(call)  refuses what only the device knows, in checked mode
    flops(call)         counts
    options             those of `vk_op`
    """
    plans: dict[Any, Run] = {}
    signature_of = signatures(get_type_hints(arguments).values())
    seen = Direct()

    def check_call(call: Any) -> None:
        check_all_dense(name, zip(arguments._fields, call, strict=True))
        check(call)

    def fake(*args: Any, **kwargs: Any) -> Any:
        call = arguments(*args, **kwargs)
        check_call(call)
        made = outputs(call)
        if current_mode() is Mode.EXPLAINED:
            record(Planned(op, tuple(call), made, plan(tensors(call, made) if tensors else call, call)))
        return made

    def body(*args: Any, **kwargs: Any) -> Any:
        watched = bool(kwargs) or is_watched()
        if not watched and (found := seen.find(args)) is not None:
            return found.run(*args)
        call = arguments(*args, **kwargs)
        signature = signature_of(call)
        run = plans.get(signature)
        if run is None:
            check_call(call)
        if check_values is not None and settings.checked and is_eager():
            check_values(call)
        if run is None:
            launch, made = _first_run(call)
            remember(plans, signature, Run(launch))
            return made
        made, run.again = run.launch(call), True
        if not watched:
            seen.remember(args, prepared)
        return made

    def _first_run(call: Any) -> tuple[Callable[[Any], Any], Any]:
        """Plan a call; return what runs others of its signature, and its results."""
        if tensors is None:
            launch = plan(call, call).launch
            return launch, launch(call)
        made = outputs(call)
        on = tensors(call, made)
        launch = plan(on, call).launch
        launch(on)
        allocate = allocator(made) if is_eager() else None

        def run(call: Any) -> Any:
            # PyTorch's deterministic mode fills new memory.
            if allocate is None or torch.are_deterministic_algorithms_enabled():
                made = outputs(call)
            else:
                made = allocate()
            launch(tensors(call, made))
            return made

        return run, made

    prepared = _prepared(plans, lambda args: signature_of(arguments(*args)), arguments)
    body.prepared = prepared  # type: ignore[attr-defined]
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
    of: tuple[str, ...],
    saves: tuple[str, ...] | Callable[[Any, frozenset[str]], tuple[str, ...]],
    saves_results: tuple[int, ...] = (),
    shapes: tuple[str, ...] = (),
    constant: Callable[[Any, frozenset[str]], tuple[int, ...]] | None = None,
) -> None:
    """Register the gradient of a planned op, by the names of its arguments.

    differentiate(call, results, grads, needed) returns gradients by name. Of the call's tensors only those named in
    `saves` are there, of the results only those at the places in `saves_results`; the others are None. A gradient that
    does not arrive is None, and where none does, nothing is called. `needed` names arguments that want a gradient.

    of names the tensors that get a gradient. No other tensor may want one: a call with such a tensor is refused.
    saves(call, needed) may name the tensors call by call. A tensor in `shapes` that is not saved is there as its shape.
    constant(call, needed) says which results are not differentiable, by place.
    """
    fields = arguments._fields
    place_of = {field: place for place, field in enumerate(fields)}
    tensors = [fields[place] for place in tensor_places(get_type_hints(arguments).values())]
    values = [field for field in fields if field not in tensors]
    refused = [(name, place_of[name]) for name in tensors if name not in of]
    pick_values, pick_shaped = (picker([place_of[name] for name in names]) for names in (values, shapes))
    pick_results, count = picker(saves_results), len(schema_of(op.overload).returns)

    @functools.cache
    def named(needs: tuple[bool, ...]) -> frozenset[str]:
        # Arguments that were left to their defaults need none.
        return frozenset(name for name, each in zip(fields, needs, strict=False) if each)

    @functools.cache
    def layout(saved: tuple[str, ...]) -> tuple[Pick, Pick, Pick]:
        """Return what picks the saved tensors of a call, and from all that was kept the call and its results."""
        kept = (*saved, *saves_results, *values, *shapes)
        # What was not kept is the None behind it.
        index_of = {name: place for place, name in reversed([*enumerate(kept)])}
        of_call, of_results = ([index_of.get(name, len(kept)) for name in names] for names in (fields, range(count)))
        return picker([place_of[name] for name in saved]), picker(of_call), picker(of_results)

    fixed = None if callable(saves) else layout(saves)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call = arguments._make(inputs)
        for name, place in refused:
            if call[place] is not None and call[place].requires_grad:
                raise ValueError(
                    f"{op.name}: {name} has requires_grad=True, but it gets no gradient; pass {name}.detach()"
                )
        made = output if isinstance(output, tuple) else (output,)
        ctx.layout = layout(saves(call, named(ctx.needs_input_grad))) if callable(saves) else fixed
        ctx.save_for_backward(*ctx.layout[0](call), *pick_results(made))
        ctx.values = pick_values(call)
        if shapes:
            ctx.values += tuple([None if tensor is None else tensor.shape for tensor in pick_shaped(call)])
        if constant is not None:
            ctx.mark_non_differentiable(*[made[place] for place in constant(call, named(ctx.needs_input_grad))])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * len(fields)
        if all([grad is None for grad in grads]):
            return tuple(found)
        kept = (*ctx.saved_tensors, *ctx.values, None)
        _, pick_call, pick_made = ctx.layout
        needed = named(ctx.needs_input_grad)
        made = differentiate(arguments._make(pick_call(kept)), pick_made(kept), grads, needed)
        for name in needed:
            found[place_of[name]] = made.get(name)
        return tuple(found)

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
    plans: dict[Any, Run] = {}
    fields = {**get_type_hints(tensors), **get_type_hints(options)}
    signature_of = signatures(fields.values())
    count = len(tensors._fields)
    seen = Direct()

    def launch(*args: Any) -> None:
        watched = is_watched()
        if not watched and (found := seen.find(args)) is not None:
            found.run(*args)
            return
        signature = signature_of(args)
        run = plans.get(signature)
        on = tensors(*args[:count])
        if run is None:
            planned = plan(on, options(*args[count:])).launch
            remember(plans, signature, Run(planned))
            planned(on)
            return
        run.launch(on)
        run.again = True
        if not watched:
            seen.remember(args, prepared)

    prepared = _prepared(plans, signature_of, lambda *args: tensors(*args[:count]))

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
