"""The graph contract: what every op promises under torch.compile, torch.export, CUDA graphs, autocast and torch.func,
and what torch makes of its kernels."""

import inspect
import io
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_tests.contract.build import TARGETS, sampled
from compile_tests.contract.kernels import Kernels, Point, positional, shortened
from compile_tests.contract.process import RUN_PACKAGE, run_forked
from compile_tests.contract.trace import (
    assert_kernels,
    assert_plain_launch,
    capture,
    capture_graphs,
    opcheck_fully,
    recompiling_fails,
    shared_memory,
)
from compile_tests.triton_alone import VERSION, allowed_spills
from torch_ops._core.registry import OPS
from torch_ops.testing import check, check_draws
from torch_ops.testing.tolerance import Draw

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# On a GPU, kernels for exact fp32 products take ten times as long to build.
DTYPE = torch.float16 if GPU else torch.float32
HALF_TYPES = (torch.float16, torch.bfloat16)
# On a CPU an op is opaque to Inductor, so these stand for all: the last writes to arguments.
REPRESENTATIVE = ("window_attn", "mlp", "add_layer_norm", "kv_cache_append")
# Packages of other ops are part of an encoder's (test_models.py).
PACKAGED = ("kv_cache_append",)
# Views between the parts of an op that is taken apart.
VIEWS = ("getitem", "view", "sym_size", "floordiv", "mul")
NOT_LOADED = pytest.mark.skipif(GPU, reason="loading any AOTInductor package fails on the GPU machines")


def backends_of(name: str) -> tuple[str, ...]:
    return ("aot_eager", "inductor") if GPU or name in REPRESENTATIVE else ("aot_eager",)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@dataclass(frozen=True)
class Call:
    """Arguments of one call by name, in the order of the public function.

    grads: the upstream gradient of each result, by the result's name; None for a result without a gradient.
    leaves: the arguments that have a gradient. written: the arguments that the op writes to.
    """

    args: dict[str, Any]
    grads: dict[str, Tensor | None]
    leaves: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Any, leaves: Iterable[str], **fields: Any) -> "Call":
        """From inputs of the testing kit, which have call(function, **tensors). Absent leaves are left out."""
        signature = inspect.signature(function)
        args: dict[str, Any] = {}
        inputs.call(lambda *given, **options: args.update(signature.bind(*given, **options).arguments))
        return cls(args, leaves=tuple(name for name in leaves if args.get(name) is not None), **fields)

    def __call__(self, function: Callable[..., Any], **changed: Any) -> Any:
        return function(**{**self.args, **changed})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: arg for name, arg in self.args.items() if isinstance(arg, Tensor)}

    def with_tensors(self, move: Callable[[Tensor], Tensor]) -> "Call":
        moved = {name: move(tensor) for name, tensor in self.tensors.items()}
        grads = {name: None if grad is None else move(grad) for name, grad in self.grads.items()}
        return replace(self, args={**self.args, **moved}, grads=grads)

    def to(self, dtype: torch.dtype, names: Iterable[str] | None = None) -> "Call":
        """With all floating tensors, or those arguments, in that dtype."""
        if names is not None:
            return replace(self, args={**self.args, **{name: self.args[name].to(dtype) for name in names}})
        return self.with_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def requiring(self) -> "Call":
        """With leaves that require a gradient."""
        return replace(self, args={**self.args, **{n: self.args[n].detach().requires_grad_() for n in self.leaves}})

    def outcome(self, function: Callable[..., Any], gradients: bool = True) -> dict[str, Tensor]:
        """Results by name, what was written to, and the gradient d<name> of every leaf."""
        written = {name: self.args[name].clone() for name in self.written}
        leaves = {name: self.args[name].detach().requires_grad_(gradients) for name in self.leaves}
        results = as_tuple(self(function, **written, **leaves))
        # References return what they would have written to.
        named = dict(zip((*self.grads, *written), (*results, *written.values()), strict=False))
        if not leaves or not gradients:
            return named
        wanted = {name: grad for name, grad in self.grads.items() if grad is not None}
        upstream = [grad.to(named[name].dtype) for name, grad in wanted.items()]
        found = torch.autograd.grad([named[name] for name in wanted], tuple(leaves.values()), upstream)
        return {name: result.detach() for name, result in named.items()} | {
            f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)
        }


class Fixed(torch.nn.Module):
    """A function of the tensors of a call alone; everything else keeps its value."""

    def __init__(self, function: Callable[..., Any], call: Call) -> None:
        super().__init__()
        self.function, self.names = function, tuple(call.tensors)
        self.rest = {name: arg for name, arg in call.args.items() if not isinstance(arg, Tensor)}

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(**dict(zip(self.names, tensors, strict=True)), **self.rest)


@dataclass(frozen=True, eq=False)
class Subject:
    """An op under the contract.

    draw: makes the Call of a case of the testing kit, in a dtype, from a seed.
    sizes: cases that share one graph; the first stands for the op where one case is enough.
    moving: by argument, the dimensions that differ among `sizes`, as torch.export has them.
    operator: the arguments of torch.ops.vk.<name> by name, from a call; by default the call's own.
    backward: the arguments of the backward op, from a call; None without one.
    partial: further argument lists of the backward op, for gradients that are wanted or given in part.
    checked, compiled, layouts: cases for opcheck, for compiled against eager calls, for the strides of outputs.
    replayed: two cases of one shape: a CUDA graph of the first is replayed on values of the second.
    autocast: "follows" the region's dtype or "keeps" that of its arguments; `casts` are the arguments that are cast.
    batched: the argument that vmap has a batch of.
    parts: ops that stand for an op made of ops in all but Dynamo's and torch.export's graphs.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    draw: Callable[..., Call]
    sizes: tuple[Any, ...]
    moving: dict[str, dict[int, Any]]
    kernels: Kernels | None = None
    operator: Callable[[Call], dict[str, Any]] = lambda call: call.args
    backward: Callable[[Call], dict[str, Any]] | None = None
    partial: Callable[[Call], Iterable[dict[str, Any]]] = lambda call: ()
    checked: tuple[Any, ...] = ()
    compiled: tuple[Any, ...] = ()
    layouts: tuple[Any, ...] = ()
    replayed: tuple[Any, ...] = ()
    autocast: str = "keeps"
    casts: tuple[str, ...] = ()
    batched: str = ""
    parts: tuple[str, ...] = ()
    forward_graph: str = ""
    backward_graph: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def first(self) -> Any:
        return self.sizes[0]

    @property
    def differentiable(self) -> bool:
        return self.backward is not None or bool(self.parts)

    def call(self, case: Any = None, dtype: torch.dtype = DTYPE, seed: int = 0) -> Call:
        return self.draw(self.first if case is None else case, dtype, seed)

    def arguments(self, call: Call) -> tuple[Any, ...]:
        return positional(OPS[self.name].overload, (), self.operator(call))

    def gradient_arguments(self, call: Call) -> tuple[Any, ...]:
        assert self.backward is not None
        return positional(self.gradient.overload, (), self.backward(call))

    @property
    def gradient(self) -> Any:
        return OPS[f"{self.name}_backward"]


WAYS = ("portable", "hopper", "packaged")
# Values of a test's arguments, from its subject.
CHOICES: dict[str, Callable[[Subject], Iterable[Any]]] = {
    "case": lambda subject: subject.checked or subject.sizes[:1],
    "layout": lambda subject: subject.layouts or subject.sizes[:1],
    "compiled": lambda subject: subject.compiled or subject.sizes[:1],
    "backend": lambda subject: backends_of(subject.name),
    "region": lambda subject: ("eager", *backends_of(subject.name)),
    "op": lambda subject: subject.kernels.ops,
    "variant": lambda subject: subject.kernels.variants,
    "symbolic": lambda subject: range(len(subject.kernels.symbolic)),
    "way": lambda subject: WAYS if subject.kernels.opaque is not None else WAYS[:1],
    "point": lambda subject: sampled(subject.kernels.points),
}


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))


def only(wanted: Callable[[Subject], Any]) -> Callable[[Any], Any]:
    """Runs a test of the contract for these subjects alone."""

    def mark(test: Any) -> Any:
        test.wanted = wanted
        return test

    return mark


differentiable = only(lambda subject: subject.differentiable)


def compiled_by(region: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return function if region == "eager" else torch.compile(function, fullgraph=True, backend=region, **options)


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"{', '.join(different)} differ from the eager call's"


def assert_right(subject: Subject, function: Callable[..., Any], case: Any) -> None:
    """Apply the tolerance rule, with eager PyTorch at the same dtype as the yardstick."""

    def draw(seed: int) -> Draw:
        call = subject.call(case, seed=seed)
        reference = subject.reference
        return call.outcome(function), call.outcome(reference), call.to(torch.float64).outcome(reference)

    check_draws(draw)


def layout_of(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


def export(subject: Subject, call: Call) -> torch.export.ExportedProgram:
    shapes = tuple(subject.moving.get(name) for name in call.tensors)
    with torch.no_grad():
        return torch.export.export(
            Fixed(subject.function, call), tuple(call.tensors.values()), dynamic_shapes=(shapes,)
        )


class GraphContract:
    """Subclassed by the tests of each op, which give the subjects."""

    subjects: tuple[Subject, ...]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "subject" not in metafunc.fixturenames:
            return
        names = [name for name in CHOICES if name in metafunc.fixturenames]
        wanted = getattr(metafunc.function, "wanted", lambda subject: True)
        of_kernels = not {"op", "point"}.isdisjoint(names)
        rows = [
            (subject, *values)
            for subject in self.subjects
            if wanted(subject) and (subject.kernels or not of_kernels)
            for values in itertools.product(*(CHOICES[name](subject) for name in names))
            if GPU or "inductor" not in values or "compiled" not in names or subject.compiled[:1] in (values[:1], ())
        ]
        metafunc.parametrize(("subject", *names), rows, ids=["-".join(map(_name, row)) for row in rows])

    def test_opcheck_passes_forward(self, subject: Subject, case: Any) -> None:
        opcheck_fully(OPS[subject.name].overload, subject.arguments(subject.call(case, torch.float32).requiring()))

    @only(lambda subject: subject.backward)
    def test_opcheck_passes_backward(self, subject: Subject, case: Any) -> None:
        call = subject.call(case, torch.float32)
        opcheck_fully(subject.gradient.overload, subject.gradient_arguments(call))

    @only(lambda subject: subject.backward)
    def test_opcheck_passes_backward_of_some_gradients_and_of_those_without_strides(self, subject: Subject) -> None:
        call = subject.call((subject.checked or subject.sizes)[0], torch.float32)
        expanded = {name: torch.ones((), device=DEVICE).expand(grad.shape) for name, grad in call.grads.items()}
        overload = subject.gradient.overload
        for given in (*subject.partial(call), subject.backward(replace(call, grads=expanded))):
            opcheck_fully(overload, positional(overload, (), given))

    def test_graphs_hold_only_vk_ops(self, subject: Subject) -> None:
        function, graphs = capture_graphs(subject.function)
        subject.call().outcome(function)
        op = f"vk.{subject.name}.default\n"
        assert graphs.dynamo == op
        if not GPU and not subject.call().written:
            assert graphs.forward == (subject.forward_graph or op)
        if not GPU and subject.differentiable:
            assert graphs.backward == (subject.backward_graph or f"vk.{subject.name}_backward.default\n")

    def test_compiled_equals_eager(self, subject: Subject, compiled: Any, backend: str) -> None:
        call = subject.call(compiled)
        function = compiled_by(backend, subject.function, dynamic=False)
        assert_same_bits(call.outcome(function), call.outcome(subject.function))

    @pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
    def test_compiled_equals_eager_in_half_types(self, subject: Subject, dtype: torch.dtype) -> None:
        call = subject.call(dtype=dtype)
        function = compiled_by(backends_of(subject.name)[-1] if GPU else "aot_eager", subject.function, dynamic=False)
        assert_same_bits(call.outcome(function), call.outcome(subject.function))

    def test_compiled_block_agrees_with_ops_around(self, subject: Subject, backend: str) -> None:
        call = subject.call()
        around = next(name for name, tensor in call.tensors.items() if tensor.is_floating_point())

        def block(function: Callable[..., Any], **args: Any) -> tuple[Tensor, ...]:
            results = as_tuple(function(**{**args, around: args[around].sin()}))
            count = len(call.grads)
            return *(result.cos() for result in results[:count]), *results[count:]

        blocks = replace(
            subject, function=partial(block, subject.function), reference=partial(block, subject.reference)
        )
        assert_right(blocks, compiled_by(backend, blocks.function), subject.first)

    def test_dynamic_shapes_never_recompile(self, subject: Subject, backend: str) -> None:
        compiled = compiled_by(backend, subject.function, dynamic=True)
        with recompiling_fails():
            for case in subject.sizes:
                assert_right(subject, compiled, case)

    def test_marked_dimensions_never_recompile(self, subject: Subject) -> None:
        function, graphs = capture_graphs(subject.function, dynamic=None)

        def marked(**args: Any) -> Any:
            for name, dims in subject.moving.items():
                torch._dynamo.mark_dynamic(args[name], list(dims))
            return function(**args)

        with recompiling_fails():
            for case in subject.sizes:
                assert_right(subject, marked, case)
        assert graphs.compiled == 1 and graphs.dynamo.count("vk.") == 1

    def test_static_calls_become_dynamic_after_one_recompilation(self, subject: Subject) -> None:
        function, graphs = capture_graphs(subject.function, dynamic=None)
        for case in subject.sizes:
            subject.call(case).outcome(function, gradients=False)
        assert graphs.compiled == 2

    def test_exported_program_survives_saving_and_runs_at_other_sizes_and_has_gradients(self, subject: Subject) -> None:
        file = io.BytesIO()
        torch.export.save(export(subject, subject.call()), file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for case in subject.sizes:
            call = subject.call(case)

            def run(names: tuple[str, ...] = tuple(call.tensors), **args: Any) -> Any:
                return loaded(*(args[name] for name in names))

            assert_same_bits(call.outcome(run), call.outcome(subject.function))

    @pytest.mark.parametrize("decomposed", (False, True), ids=("as_exported", "decomposed"))
    def test_exported_graph_keeps_the_op_whole(self, subject: Subject, decomposed: bool) -> None:
        call = subject.call()
        program = export(subject, call)
        graph = (program.run_decompositions() if decomposed else program).graph
        called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        if decomposed and call.written:
            assert sum("auto_functionalized" in name for name in called) == 1
            return
        expected = subject.parts if decomposed and subject.parts else (subject.name,)
        left = [name for name in called if not any(view in name for view in VIEWS)]
        assert left == [f"vk.{name}.default" for name in expected]

    @NOT_LOADED
    @only(lambda subject: subject.name in PACKAGED)
    def test_aoti_package_runs_in_a_process_that_only_imports_the_library(
        self, subject: Subject, tmp_path: Any
    ) -> None:
        program = export(subject, subject.call())
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "op.pt2"))
        calls = []
        for case in subject.sizes:
            call = subject.call(case)
            given = tuple(tensor.clone() for tensor in call.tensors.values())
            calls.append((given, tuple(call.outcome(subject.function, gradients=False).values())[: len(call.grads)]))
        torch.save(calls, tmp_path / "calls.pt")
        assert run_forked(RUN_PACKAGE.format(paths=(package, str(tmp_path / "calls.pt")))) == "equal\n"

    @pytest.mark.gpu
    @only(lambda subject: subject.replayed)
    def test_cuda_graph_replays_on_other_values(self, subject: Subject) -> None:
        static, fresh = (subject.call(case, torch.bfloat16, seed) for seed, case in enumerate(subject.replayed))
        graph, captured = capture(lambda: static.outcome(subject.function))
        for name, tensor in static.tensors.items():
            tensor.copy_(fresh.args[name])
        for name, grad in static.grads.items():
            if grad is not None:
                grad.copy_(fresh.grads[name])
        for tensor in captured.values():
            tensor.fill_(torch.nan)
        graph.replay()
        assert_same_bits(captured, fresh.outcome(subject.function))

    @pytest.mark.gpu
    @only(lambda subject: subject.replayed and subject.differentiable)
    def test_reduce_overhead_replays_cuda_graphs(self, subject: Subject) -> None:
        compiled = torch.compile(subject.function, fullgraph=True, mode="reduce-overhead", dynamic=False)
        counters.clear()
        for seed, case in enumerate((*subject.replayed, *subject.replayed)):
            call = subject.call(case, torch.bfloat16, seed)
            for _ in range(2):
                torch.compiler.cudagraph_mark_step_begin()
                actual = {name: tensor.clone() for name, tensor in call.outcome(compiled).items()}
            assert_same_bits(actual, call.outcome(subject.function))
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0

    def test_fake_and_meta_outputs_have_the_strides_of_real_ones_and_functional_ones_their_values(
        self, subject: Subject, layout: Any
    ) -> None:
        call = subject.call(layout)
        ops = [(OPS[subject.name].overload, subject.arguments(call))]
        if subject.backward is not None:
            ops.append((subject.gradient.overload, subject.gradient_arguments(call)))
        tensors = [arg for _, args in ops for arg in args if isinstance(arg, Tensor)]

        def every_op(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            return tuple(
                result
                for op, args in ops
                for result in as_tuple(op(*(next(given) if isinstance(arg, Tensor) else arg for arg in args)))
            )

        def as_meta(tensor: Tensor) -> Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        with FakeTensorMode() as mode:
            fake = every_op(*map(mode.from_tensor, tensors))
        meta = every_op(*map(as_meta, tensors))
        # PyTorch does not functionalize custom ops that write to arguments and return tensors.
        functional = None if call.written else torch.func.functionalize(every_op)(*tensors)
        real = every_op(*tensors)
        assert layout_of(fake) == layout_of(real) == layout_of(meta)
        assert {tensor.device.type for tensor in fake} == {DEVICE}
        assert {tensor.device.type for tensor in meta} == {"meta"}
        assert functional is None or all(map(torch.equal, functional, real))

    @only(lambda subject: subject.autocast == "follows")
    @pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
    def test_autocast_follows_the_dtype_of_its_region(self, subject: Subject, dtype: torch.dtype, region: str) -> None:
        def in_region(**args: Any) -> Any:
            with torch.autocast(DEVICE, dtype):
                return subject.function(**args)

        call = subject.call(dtype=torch.float32)
        actual = call.outcome(compiled_by(region, in_region))
        expected = call.to(dtype, subject.casts or call.leaves).outcome(subject.function, gradients=False)
        for name, tensor in expected.items():
            assert actual[name].dtype is tensor.dtype and torch.equal(actual[name], tensor), name
        assert expected[next(iter(call.grads))].dtype is dtype
        for name in call.leaves:
            assert actual[f"d{name}"].dtype is torch.float32 and actual[f"d{name}"].abs().sum() > 0, name

    @only(lambda subject: subject.autocast == "keeps")
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    def test_autocast_changes_nothing(self, subject: Subject, dtype: torch.dtype, region: str) -> None:
        def in_region(**args: Any) -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                return subject.function(**args)

        call = subject.call(dtype=dtype)
        assert_same_bits(call.outcome(compiled_by(region, in_region, dynamic=False)), call.outcome(subject.function))

    @differentiable
    def test_checkpoint_policy_sees_and_saves_the_named_op(self, subject: Subject, region: str) -> None:
        """With the op saved, the backward recomputes the ops around it and not the op itself."""
        seen: list[Any] = []
        named = OPS[(subject.parts or (subject.name,))[-1]].overload
        call = subject.call(dtype=torch.float32)
        leaf = call.leaves[0]

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            seen.append(op)
            return CheckpointPolicy.MUST_SAVE if op is named else CheckpointPolicy.PREFER_RECOMPUTE

        def layer(function: Callable[..., Any], **args: Any) -> Tensor:
            return as_tuple(function(**{**args, leaf: args[leaf].sin()}))[0].cos()

        def checkpointed(**args: Any) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(partial(layer, subject.function), use_reentrant=False, context_fn=contexts, **args)

        call = replace(call, grads=dict(list(call.grads.items())[:1]), leaves=(leaf,))
        actual = call.outcome(compiled_by(region, checkpointed))
        assert named in seen
        eager = call.outcome(partial(layer, subject.function))
        check(actual, eager, call.to(torch.float64).outcome(partial(layer, subject.reference)))

    @only(lambda subject: subject.batched)
    def test_vmap_equals_a_loop(self, subject: Subject) -> None:
        call, name = subject.call(), subject.batched
        given = call.args[name]
        batch = torch.stack([given, given.flip(0), given * 2])
        found = as_tuple(torch.func.vmap(lambda each: call(subject.function, **{name: each}))(batch))
        looped = [as_tuple(call(subject.function, **{name: each})) for each in batch]
        for actual, expected in zip(found, zip(*looped, strict=True), strict=True):
            assert torch.equal(actual, torch.stack(expected))

    @differentiable
    @pytest.mark.parametrize("how", ("eager", "aot_eager"))
    def test_forward_mode_differentiation_is_refused(self, subject: Subject, how: str) -> None:
        call = subject.call()
        leaf = call.leaves[0]

        def derivative(given: Tensor) -> Any:
            return torch.func.jvp(
                lambda each: call(subject.function, **{leaf: each}), (given,), (torch.ones_like(given),)
            )

        named = (subject.parts or (subject.name,))[0]
        with pytest.raises(Exception, match=f"vk::{named} has no forward-mode derivative"):
            compiled_by(how, derivative)(call.args[leaf])

    @differentiable
    def test_functional_gradient_is_right_or_refused(self, subject: Subject) -> None:
        """PyTorch decides whether torch.func.grad works over ops with registered autograd; it must not be wrong."""
        call = subject.call()
        leaf = call.leaves[0]

        def total(given: Tensor) -> Tensor:
            return as_tuple(call(subject.function, **{leaf: given}))[0].sum()

        try:
            gradient = torch.func.grad(total)(call.args[leaf])
        except NotImplementedError as error:
            assert re.search(r"vk::\w+ has no gradient within torch.func", str(error))
        else:
            given = call.args[leaf].detach().requires_grad_()
            assert torch.equal(gradient, torch.autograd.grad(total(given), given)[0])

    @differentiable
    @pytest.mark.parametrize(
        ("how", "error", "message"),
        (
            ("eager", NotImplementedError, r"vk::\w+_backward has no derivative"),
            ("aot_eager", RuntimeError, "does not currently support double backward"),
        ),
        ids=("eager", "compiled"),
    )
    def test_double_backward_is_refused(self, subject: Subject, how: str, error: type[Exception], message: str) -> None:
        call = subject.call().requiring()
        leaf = call.args[call.leaves[0]]
        out = as_tuple(call(compiled_by(how, subject.function)))[0]
        (gradient,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        with pytest.raises(error, match=message):
            gradient.sum().backward()

    def test_traced_kernels_are_those_launched_and_write_only_outputs(
        self, subject: Subject, op: str, variant: str
    ) -> None:
        """A launch carries nothing else that compilation would drop."""
        kernels, changes = subject.kernels, subject.kernels.variants[variant]
        trace, written, _ = kernels.trace(op, **changes)
        assert_kernels(trace, kernels.writes(op, variant), written)
        launches = kernels.launches(**changes)[op]
        assert [launch.name for launch in launches] == [kernel.name for kernel in trace.kernels]
        for launch, kernel in zip(launches, trace.kernels, strict=True):
            assert_plain_launch(launch)
            assert launch.options == {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}

    def test_traces_of_symbolic_sizes_hold_for_all_sizes(
        self, subject: Subject, op: str, symbolic: int, way: str
    ) -> None:
        """On a GPU with launch rows for ranges of lengths, where a choice by length would guard on it.

        On the Hopper path a graph holds one opaque launch, except in a package, which has no Python to call it with.
        """
        kernels = subject.kernels
        variant, sizes = kernels.symbolic[symbolic]
        path = "portable" if way == "portable" else "hopper"
        trace, written, shapes = kernels.trace(op, sizes, "h200", path, way == "packaged", **kernels.variants[variant])
        assert ("auto_functionalized" in trace.targets) == (way == "hopper")
        assert_kernels(trace, kernels.opaque[op] if way == "hopper" else kernels.writes(op, variant), written)
        guards = [guard.expr for guard in shapes.guards]
        assert not shapes.replacements and (kernels.multiple or not guards), guards
        for size, holds in ((8, True), (400, True), (12544, True), (42, not kernels.multiple)):
            assert all(guard.subs(dict.fromkeys(guard.free_symbols, size)) for guard in guards) == holds, guards

    def test_symbols_where_kernels_have_constants_are_settled(self, subject: Subject, op: str) -> None:
        """Everything is a symbol under `dynamic=True`, also the sizes of a model."""
        kernels = subject.kernels
        if not kernels.settled:
            pytest.skip("its calls have no such sizes")
        plain = next(iter(kernels.variants))
        trace, written, _ = kernels.trace(op, kernels.settled, **kernels.variants[plain])
        assert_kernels(trace, kernels.writes(op, plain), written)

    def test_graphs_for_cuda_hold_only_allocations_products_and_kernels(self, subject: Subject, op: str) -> None:
        kernels = subject.kernels
        found = {
            (of, variant): shortened(kernels.trace(op, **kernels.variants[variant])[0].targets)
            for of, variant in kernels.graphs
            if of == op
        }
        assert found and found == {key: graph for key, graph in kernels.graphs.items() if key[0] == op}

    def test_kernels_enter_the_key_of_compiled_artefacts(self, subject: Subject, op: str) -> None:
        """A kernel that torch does not find in an op's source could be served from a stale cache after an edit."""
        found = {kernel.fn.__name__ for kernel in get_triton_kernels_for_op(f"vk::{op}")}
        assert found >= subject.kernels.used(op)

    @pytest.mark.builds
    def test_builds_spill_nothing_and_fit(self, subject: Subject, point: Point) -> None:
        limit = shared_memory(TARGETS[point.target])
        builds = subject.kernels.builds(point.target, point.variant, **dict(point.changes))
        most = subject.kernels.may_spill.get(str(point), 0)
        bad = [
            str(built)
            for built in builds
            if built.shared > limit
            or built.spilled > allowed_spills({"most_spilled": most, "kernel": built.launch.name, "name": ""}, VERSION)
        ]
        assert builds and not bad, "\n".join((f"limit {limit}", *bad))
