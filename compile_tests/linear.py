"""The graph contract of `qkv_rope`, `mlp` and `patch_merger`: what each of their test modules applies to its op."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_tests.contract import (
    assert_expected_inline,
    capture,
    capture_graphs,
    opcheck_fully,
    recompiling_fails,
    run_forked,
)
from torch_ops.testing import assert_close_to_reference, check
from torch_ops.testing.cases import outcome

BACKENDS = ("aot_eager", "inductor")
# Rows of calls that share one graph.
ROWS = (63, 200, 7, 320, 128)
GPU = torch.cuda.is_available()
# fp16 on a GPU, whose kernels for exact fp32 products take long to build.
DTYPE = torch.float16 if GPU else torch.float32
DEVICE = "cuda" if GPU else "cpu"
# What stands between the parts of an op that is taken apart.
VIEWS = ("getitem", "view", "sym_size", "floordiv", "mul")


@dataclass(frozen=True)
class Subject:
    """An op under the contract.

    `of_rows(rows, dtype, device)` draws inputs; `backward(inputs)` makes the arguments of its backward op. `moving` are
    the arguments that have a row for each of x's; `source` draws them in a process of its own, as `args`.

    An op made of ops has no backward op; it has `parts`, which stand for it in graphs as `forward_graph` and
    `backward_graph` say, and `step` rows in x for each that is asked for.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    of_rows: Callable[..., Any]
    backward: Callable[..., tuple[Any, ...]] | None
    moving: tuple[str, ...]
    source: str
    parts: tuple[str, ...] = ()
    forward_graph: str = ""
    backward_graph: str = ""
    step: int = 1

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the op in graphs where ops made of ops are taken apart."""
        return self.parts or (self.name,)

    @property
    def op(self) -> Any:
        return getattr(torch.ops.vk, self.name)

    @property
    def backward_op(self) -> Any:
        return getattr(torch.ops.vk, f"{self.name}_backward")

    def inputs(self, rows: int = 63, dtype: torch.dtype = DTYPE) -> Any:
        return self.of_rows(rows, dtype, DEVICE)


def _args(inputs: Any) -> tuple[Any, ...]:
    return inputs.call(lambda *args: args)


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class _Module(torch.nn.Module):
    """The op on tensors alone: what else it takes is fixed."""

    def __init__(self, function: Callable[..., Any], inputs: Any) -> None:
        super().__init__()
        self.function = function
        self.args = tuple(None if isinstance(arg, Tensor) else arg for arg in _args(inputs))
        self.places = [place for place, arg in enumerate(_args(inputs)) if isinstance(arg, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        args = list(self.args)
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        return self.function(*args)


def _tensors(inputs: Any) -> tuple[Tensor, ...]:
    return tuple(arg for arg in _args(inputs) if isinstance(arg, Tensor))


def _layout(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


FIRST_CALL = """
import torch, torch_ops
function = torch_ops.{name}
draw = lambda *shape: torch.randn(*shape, device={device!r}).to({dtype})
{source}
{call}
expected = function(*args)
for one, wanted in zip(out if isinstance(out, tuple) else (out,), expected if isinstance(out, tuple) else (expected,)):
    assert torch.equal(one, wanted)
print("equal")
"""


class GraphContract:
    """Subclassed by each op's tests."""

    subject: Subject

    def _results(self, function: Callable[..., Any], inputs: Any) -> dict[str, Tensor]:
        return outcome(function, inputs)

    def _assert_right(self, actual: dict[str, Tensor], inputs: Any) -> None:
        """The tolerance rule, with eager PyTorch at the same dtype as the yardstick."""
        reference = self.subject.reference
        check(actual, outcome(reference, inputs), outcome(reference, inputs, torch.float64))

    def _assert_same_bits(self, compiled: Callable[..., Any], inputs: Any) -> None:
        actual, expected = (outcome(function, inputs) for function in (compiled, self.subject.function))
        different = [name for name in expected if not torch.equal(actual[name], expected[name])]
        assert not different, f"{', '.join(different)} differ from the eager call's"

    def test_opcheck_passes_forward(self) -> None:
        inputs = self.subject.inputs(dtype=torch.float32)
        for leaf in inputs.leaves.values():
            leaf.requires_grad_()
        opcheck_fully(self.subject.op.default, _args(inputs))

    def test_opcheck_passes_backward(self) -> None:
        if self.subject.backward is None:
            pytest.skip("its parts have one each")
        inputs = self.subject.inputs(dtype=torch.float32)
        opcheck_fully(self.subject.backward_op.default, self.subject.backward(inputs))

    def test_graphs_hold_only_vk_ops(self) -> None:
        function, graphs = capture_graphs(self.subject.function)
        outcome(function, self.subject.inputs())
        assert_expected_inline(graphs.dynamo, f"vk.{self.subject.name}.default\n")
        if not GPU:
            forward, backward = f"vk.{self.subject.name}.default\n", f"vk.{self.subject.name}_backward.default\n"
            assert_expected_inline(graphs.forward, self.subject.forward_graph or forward)
            assert_expected_inline(graphs.backward, self.subject.backward_graph or backward)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_compiled_equals_eager(self, backend: str) -> None:
        compiled = torch.compile(self.subject.function, fullgraph=True, dynamic=False, backend=backend)
        self._assert_same_bits(compiled, self.subject.inputs())

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    def test_compiled_equals_eager_in_half_types(self, dtype: torch.dtype) -> None:
        compiled = torch.compile(self.subject.function, fullgraph=True, dynamic=False)
        self._assert_same_bits(compiled, self.subject.inputs(dtype=dtype))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_dynamic_shapes_never_recompile(self, backend: str) -> None:
        compiled = torch.compile(self.subject.function, fullgraph=True, dynamic=True, backend=backend)
        with recompiling_fails():
            for rows in ROWS:
                inputs = self.subject.inputs(rows)
                self._assert_right(outcome(compiled, inputs), inputs)

    def test_static_calls_become_dynamic_after_one_recompilation(self) -> None:
        function, graphs = capture_graphs(self.subject.function, dynamic=None)
        with torch.no_grad():
            for rows in ROWS:
                self.subject.inputs(rows).call(function)
        assert graphs.compiled == 2

    def _export(self) -> torch.export.ExportedProgram:
        inputs = self.subject.inputs()
        dim = self.subject.step * torch.export.Dim("rows", min=2, max=65536)
        moving = {id(getattr(inputs, name)) for name in self.subject.moving}
        shapes = tuple({0: dim} if id(tensor) in moving else None for tensor in _tensors(inputs))
        module = _Module(self.subject.function, inputs)
        with torch.no_grad():
            return torch.export.export(module, _tensors(inputs), dynamic_shapes=(shapes,))

    def test_exported_program_survives_saving_and_runs_at_other_sizes(self) -> None:
        file = io.BytesIO()
        torch.export.save(self._export(), file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for rows in ROWS:
            inputs = self.subject.inputs(rows)
            actual, expected = _tuple(loaded(*_tensors(inputs))), _tuple(inputs.call(self.subject.function))
            assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))

    def test_program_exported_without_gradients_has_them(self) -> None:
        inputs = self.subject.inputs()
        grads = []
        for function in (self._export().module(), _Module(self.subject.function, inputs)):
            tensors = [tensor.clone().requires_grad_() for tensor in _tensors(inputs)]
            results = _tuple(function(*tensors))
            grads.append(torch.autograd.grad(results, tensors, tuple(inputs.douts.values()), allow_unused=True))
        assert sum(gradient is not None for gradient in grads[1]) == len(inputs.leaves)
        for one, other in zip(*grads, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)

    @pytest.mark.parametrize("decomposed", (False, True), ids=("as_exported", "decomposed"))
    def test_exported_graph_keeps_the_op_whole(self, decomposed: bool) -> None:
        program = self._export()
        graph = (program.run_decompositions() if decomposed else program).graph
        called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        names = self.subject.nodes if decomposed else (self.subject.name,)
        free = VIEWS if decomposed and self.subject.parts else ("getitem",)
        left = [name for name in called if not any(word in name for word in free)]
        assert left == [f"vk.{name}.default" for name in names]

    @pytest.mark.gpu
    def test_cuda_graph_replays_on_other_values(self) -> None:
        static, fresh = (self.subject.of_rows(512, torch.bfloat16, "cuda", seed=seed) for seed in range(2))
        graph, captured = capture(lambda: outcome(self.subject.function, static))
        for name, value in vars(fresh).items():
            if isinstance(value, Tensor):
                getattr(static, name).copy_(value)
        for tensor in captured.values():
            tensor.fill_(torch.nan)
        graph.replay()
        for name, expected in outcome(self.subject.function, fresh).items():
            assert torch.equal(captured[name], expected), name

    @pytest.mark.parametrize(
        "call",
        (
            "out = torch.compile(function, fullgraph=True)(*args)",
            "args[0].requires_grad_(); out = torch.compile(function, fullgraph=True)(*args); "
            "(out[0] if isinstance(out, tuple) else out).sum().backward(); assert args[0].grad.abs().sum() > 0",
            "out = function(*args)",
        ),
        ids=("compiled", "compiled_with_backward", "eager"),
    )
    def test_first_call_of_a_process_works(self, call: str) -> None:
        code = FIRST_CALL.format(
            name=self.subject.name, source=self.subject.source, call=call, device=DEVICE, dtype=DTYPE
        )
        assert run_forked(code) == "equal\n"

    def test_fake_and_meta_outputs_have_the_strides_of_real_ones(self) -> None:
        inputs = self.subject.inputs()

        def both(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            filled = [next(given) if isinstance(arg, Tensor) else arg for arg in backward_args]
            own = [next(given) if isinstance(arg, Tensor) else arg for arg in _args(inputs)]
            forward = _tuple(self.subject.op(*own))
            return (*forward, *self.subject.backward_op(*filled)) if filled else forward

        backward_args = self.subject.backward(inputs) if self.subject.backward else ()
        tensors = (*(arg for arg in backward_args if isinstance(arg, Tensor)), *_tensors(inputs))
        real = both(*tensors)
        with FakeTensorMode() as mode:
            fake = both(*map(mode.from_tensor, tensors))
        meta = both(*(tensor.to("meta") for tensor in tensors))
        assert _layout(fake) == _layout(real) == _layout(meta)
        assert {tensor.device.type for tensor in meta} == {"meta"}
        for actual, expected in zip(torch.func.functionalize(both)(*tensors), real, strict=True):
            assert torch.equal(actual, expected)

    @pytest.mark.parametrize("backend", (None, *BACKENDS), ids=("eager", *BACKENDS))
    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    def test_autocast_follows_the_dtype_of_its_region(self, dtype: torch.dtype, backend: str | None) -> None:
        def in_region(*args: Any) -> Any:
            with torch.autocast(DEVICE, dtype):
                return self.subject.function(*args)

        inputs = self.subject.inputs(dtype=torch.float32)
        function = torch.compile(in_region, fullgraph=True, backend=backend) if backend else in_region
        actual = outcome(function, inputs)
        cast = {name: leaf.to(dtype) for name, leaf in inputs.leaves.items()}
        expected = dict(zip(inputs.douts, _tuple(inputs.call(self.subject.function, **cast)), strict=True))
        for name, tensor in expected.items():
            assert actual[name].dtype is dtype and torch.equal(actual[name], tensor), name
        assert all(actual[f"d{name}"].dtype is torch.float32 for name in inputs.leaves)

    @pytest.mark.parametrize("backend", (None, *BACKENDS), ids=("eager", *BACKENDS))
    def test_checkpoint_policy_sees_and_saves_the_named_op(self, backend: str | None) -> None:
        seen: list[Any] = []
        named = getattr(torch.ops.vk, self.subject.nodes[-1]).default

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            seen.append(op)
            return CheckpointPolicy.MUST_SAVE if op is named else CheckpointPolicy.PREFER_RECOMPUTE

        def layer(x: Tensor, *rest: Any) -> Tensor:
            return _tuple(self.subject.function(x.sin(), *rest))[0].cos()

        def exact_layer(x: Tensor, *rest: Any) -> Tensor:
            return _tuple(self.subject.reference(x.sin(), *rest))[0].cos()

        def checkpointed(*args: Any) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)

        args = _args(self.subject.inputs(dtype=torch.float32))
        x = args[0].requires_grad_()
        (expected,) = torch.autograd.grad(layer(*args).sum(), x)
        function = torch.compile(checkpointed, fullgraph=True, backend=backend) if backend else checkpointed
        (actual,) = torch.autograd.grad(function(*args).sum(), x)
        assert named in seen
        exact = [arg.detach().double() if isinstance(arg, Tensor) else arg for arg in args]
        (truth,) = torch.autograd.grad(exact_layer(exact[0].requires_grad_(), *exact[1:]).sum(), exact[0])
        assert_close_to_reference(actual, expected, truth)

    def test_vmap_equals_a_loop(self) -> None:
        inputs = self.subject.inputs()
        xs = torch.stack([inputs.x, inputs.x.flip(0), inputs.x * 2])
        batched = _tuple(torch.func.vmap(lambda x: inputs.call(self.subject.function, x=x))(xs))
        looped = [_tuple(inputs.call(self.subject.function, x=x)) for x in xs]
        for actual, expected in zip(batched, zip(*looped, strict=True), strict=True):
            assert torch.equal(actual, torch.stack(expected))

    @pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
    def test_forward_mode_differentiation_is_refused(self, compiled: bool) -> None:
        inputs = self.subject.inputs()

        def derivative(x: Tensor) -> Any:
            def call(x: Tensor) -> Any:
                return inputs.call(self.subject.function, x=x)

            return torch.func.jvp(call, (x,), (torch.ones_like(x),))

        function = torch.compile(derivative, fullgraph=True, backend="aot_eager") if compiled else derivative
        with pytest.raises(Exception, match=f"vk::{self.subject.nodes[0]} has no forward-mode derivative"):
            function(inputs.x)
