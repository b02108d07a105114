"""An op in the graphs of Dynamo and AOTAutograd, and traced for a GPU that is not there.

- `opcheck_fully`, `capture_graphs`, `capture`: the op in PyTorch's own checks, in graphs and in CUDA graphs.
- `fake_gpu`, `trace_kernels`, `record_launches`: the kernels of a call on fake CUDA tensors.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module, make_boxed_func
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import torch_ops
from compile_tests.triton_alone import FakeDriver
from csrc_free_ops.configs.rows import Gpu
from torch_ops._core import device, registry

try:
    from expecttest import assert_expected_inline
except ImportError:

    def assert_expected_inline(actual: str, expect: str) -> None:
        """Compare alone: GPU machines may lack expecttest, which would also accept a changed text."""
        assert actual == expect


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
    "test_aot_dispatch_static",
)
SM90 = GPUTarget("cuda", 90, 32)


def opcheck_fully(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """All of opcheck's utilities on real inputs.

    Its tolerances stay at their defaults: a zero for either would be taken as "not given". They are for compiled
    against eager calls of the same op; whether the op is right is not asked here.
    """
    kwargs = kwargs or {}
    outputs = op(*args, **kwargs)
    for index, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        if output.isnan().any():
            raise AssertionError(f"output {index} of {op} holds NaN, which opcheck would report as a wrong gradient")
    torch.library.opcheck(op, args, kwargs, test_utils=OPCHECKS)


@dataclass
class Graphs:
    """Call targets in order: of Dynamo's graph, and of AOTAutograd's forward and backward graphs."""

    dynamo: str = ""
    forward: str = ""
    backward: str = ""
    compiled: int = 0


def call_targets(graph: torch.fx.Graph) -> str:
    """One target per line, without the unpacking of tuples, the detaching of saved tensors, what traces assert."""
    skipped = ("getitem", "aten.detach.default", "aten._assert_tensor_metadata.default")
    names = [str(getattr(node.target, "__name__", "")) for node in graph.nodes]
    return "".join(
        f"{node.target}\n"
        for node, name in zip(graph.nodes, names, strict=True)
        if node.op.startswith("call_") and not {name, str(node.target)} & set(skipped)
    )


def capture_graphs(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Graphs]:
    """function compiled with fullgraph and run as captured, and the graphs it was captured in."""
    graphs = Graphs()

    def note(which: str) -> Callable[..., Any]:
        def compiler(module: GraphModule, example_inputs: Any) -> Callable[..., Any]:
            setattr(graphs, which, call_targets(module.graph))
            return make_boxed_func(module)

        return compiler

    aot = aot_autograd(fw_compiler=note("forward"), bw_compiler=note("backward"))

    def backend(module: GraphModule, example_inputs: Any) -> Any:
        graphs.dynamo = call_targets(module.graph)
        graphs.compiled += 1
        return aot(module, example_inputs)

    return torch.compile(function, backend=backend, fullgraph=True, **options), graphs


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of step(), after one call beside the current stream; and the results that replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@contextlib.contextmanager
def recompiling_fails() -> Iterator[None]:
    """A second compilation of any function raises RecompileError, which names the guard."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class _FakeDriver(FakeDriver):
    """The driver that tracing asks for too: PyTorch wants its device."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def shared_memory(target: GPUTarget) -> int:
    """The target's limit per block, as the launcher knows it."""
    return device._describe.__wrapped__(_FakeDriver(target), None).shared_memory


@contextlib.contextmanager
def fake_gpu(target: GPUTarget = SM90, name: str = "no-such-gpu", path: str = "portable") -> Iterator[FakeTensorMode]:
    """Within, torch and Triton believe in a GPU of this target: fake CUDA tensors trace, kernels build, none runs.

    `name` chooses shipped launch rows, as in "h200"; the default has none, so the rule chooses. `path` is the setting:
    kernels of other paths are opaque in traces.
    """
    described = Gpu(name, target.backend, target.arch, shared_memory(target))
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_FakeDriver(target))
    try:
        with mock.patch.object(device, "_describe", lambda driver, index: described), torch_ops.settings(path=path):
            yield FakeTensorMode(shape_env=ShapeEnv())
    finally:
        triton.runtime.driver.set_active(before)


def symbolic_size(mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """A size that traces must not specialize on."""
    shapes = mode.shape_env
    symbol = shapes.create_symbol(hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=hint, source=ConstantSource(name))


@dataclass(frozen=True)
class KernelNode:
    """One kernel in a functional graph, what it is taken to write, and the launch options that reached it."""

    name: str
    writes: frozenset[str]
    num_warps: int | None
    num_stages: int | None


@dataclass(frozen=True)
class Trace:
    """The graph that AOTAutograd makes of a call on CUDA tensors."""

    kernels: tuple[KernelNode, ...]
    mutated_inputs: frozenset[str]
    targets: str


def _kernel_node(node: Node) -> KernelNode:
    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    num_warps = num_stages = None
    while not isinstance(kernel, JITFunction):
        # Launch options travel as the only configuration of an autotuner.
        (config,) = kernel.configs
        num_warps, num_stages, kernel = config.num_warps, config.num_stages, kernel.fn
    writes: Any = node.kwargs["tensors_to_clone"]
    return KernelNode(kernel.fn.__name__, frozenset(writes), num_warps, num_stages)


def trace_kernels(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Trace:
    """Functionalizes a call on fake CUDA tensors, as torch.compile does, into a graph of its kernels.

    Needs `fake_gpu`. A kernel whose writes torch does not see is missing from the trace: its node was dead code.
    """

    module, signature = _functionalized(function, args, kwargs or {})
    return Trace(
        tuple(map(_kernel_node, _kernel_nodes(module.graph))),
        frozenset(signature.user_inputs_to_mutate.values()),
        call_targets(module.graph),
    )


def _functionalized(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    class Call(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            given = iter(tensors)
            outputs = function(*(next(given) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
            return outputs if isinstance(outputs, tuple) else (outputs,)

    tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
    find = triton_kernel_wrap.get_mutated_tensors
    with mock.patch.object(triton_kernel_wrap, "get_mutated_tensors", partial(_written_once, find)):
        return aot_export_module(Call(), tensors, trace_joint=False)


_WRITTEN: dict[Any, list[str]] = {}


def _written_once(
    find: Callable[..., list[str]], kernel_idx: int, constants_idx: int, kwargs: dict[str, Any], *rest: Any
) -> list[str]:
    """`get_mutated_tensors`, which builds a kernel's Triton IR anew in both passes of a trace, and in every trace.

    The IR follows from the target, dtypes of tensors, values of ints and constants; all symbols count as one value.
    """
    kernel: Any = kernel_side_table.get_kernel(kernel_idx)
    configs = []
    while not isinstance(kernel, JITFunction):
        configs += [config.kwargs for config in kernel.configs]
        kernel = kernel.fn

    def known(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype
        return type(value), "" if isinstance(value, torch.SymInt) else repr(value)

    given = {**kwargs, **kernel_side_table.get_constant_args(constants_idx)}
    target = triton.runtime.driver.active.get_current_target()
    key = kernel, target, repr((configs, rest)), tuple((name, known(value)) for name, value in given.items())
    if key not in _WRITTEN:
        _WRITTEN[key] = find(kernel_idx, constants_idx, kwargs, *rest)
    return list(_WRITTEN[key])


def _kernel_nodes(graph: torch.fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target is triton_kernel_wrapper_functional]


def cloned_tensors(function: Callable[..., Any], args: tuple[Any, ...]) -> list[set[str]]:
    """The tensors that Inductor clones before each kernel that `trace_kernels` finds.

    For an opaque op that writes to tensors, these are the tensors of the graph that it writes a clone of.

    A graph for Inductor ends with copies of what became of its inputs into them. Its pass over the graph then lets
    kernels write in place, and drops the copies, where nobody could tell.
    """
    module, signature = _functionalized(function, args, {})
    graph = module.graph
    nodes = {node.name: node for node in graph.nodes}
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        for result, argument in signature.user_inputs_to_mutate.items():
            copied = graph.call_function(torch.ops.aten.copy_.default, (nodes[argument], nodes[result]))
            copied.meta.update(nodes[argument].meta)
    output.args = (tuple(node for node in output.args[0] if node.name not in signature.user_inputs_to_mutate),)
    reinplace_inplaceable_ops_core(graph)
    cloned: list[set[str]] = []
    for node in graph.nodes:
        if node.target is triton_kernel_wrapper_functional:
            cloned.append(set(node.kwargs["tensors_to_clone"]))
        elif node.target is auto_functionalized_v2:
            bases = node.kwargs["_all_bases"]
            cloned.append({str(bases[index]) for index in node.meta["only_clone_these_tensors"]})
    return cloned


def assert_kernels(trace: Trace, wanted: list[tuple[str, set[str]]], mutated: frozenset[str] = frozenset()) -> None:
    """The trace holds exactly these kernels in this order, and torch sees exactly these tensors written.

    A missing kernel computes nothing. An input among the written tensors is cloned, or counts as mutated, and a graph
    that mutates its inputs loses CUDA graphs. `mutated` names the inputs that the op says it writes to.
    """
    found = [(kernel.name, set(kernel.writes)) for kernel in trace.kernels]
    names, wanted_names = ([name for name, _ in pairs] for pairs in (found, wanted))
    assert names == wanted_names, f"kernels in the graph: {names}, expected {wanted_names}"
    assert found == wanted, f"tensors taken to be written: {found}, expected {wanted}"
    assert trace.mutated_inputs == mutated, f"inputs of the graph taken to be mutated: {set(trace.mutated_inputs)}"


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: kernel[grid](*args, **kwargs)."""

    kernel: JITFunction
    grid: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by the kernel's own names."""
        named = {name: value for name, value in self.kwargs.items() if name in self.kernel.arg_names}
        return {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **named}

    @property
    def options(self) -> dict[str, Any]:
        """Options for the compiler, which the kernel does not take."""
        return {name: value for name, value in self.kwargs.items() if name not in self.kernel.arg_names}


def assert_plain_launch(launch: KernelLaunch) -> None:
    """Only these options reach the kernel under torch.compile; others, and defaults of arguments, are lost silently."""
    wanted = {"num_warps", "num_stages"}
    assert set(launch.options) == wanted, (
        f"{launch.name} is launched with {launch.options}, expected options num_warps and num_stages; "
        "give both in the constants of its Bound, and no other"
    )
    missing = set(launch.kernel.arg_names) - set(launch.arguments)
    assert not missing, f"{launch.name} is launched without {missing}; give every argument in its Bound"


@dataclass(frozen=True)
class Recorder:
    """Stands in for a kernel: its launches are noted and not run."""

    launches: list[KernelLaunch]
    kernel: JITFunction

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            launch = KernelLaunch(self.kernel, grid, args, kwargs)
            # A launch of too few or too many arguments fails here as it would on a GPU.
            inspect.signature(self.kernel.fn).bind(
                *args, **{name: value for name, value in kwargs.items() if name not in launch.options}
            )
            self.launches.append(launch)

        return record


@contextlib.contextmanager
def record_launches() -> Iterator[list[KernelLaunch]]:
    """Kernels that op bodies launch within are noted and not run."""
    launches: list[KernelLaunch] = []

    launchers = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch_ops.") and getattr(module, "wrap_triton", None) is registry.wrap_triton
    ]
    with contextlib.ExitStack() as stack:
        for module in launchers:
            stack.enter_context(mock.patch.object(module, "wrap_triton", partial(Recorder, launches)))
        yield launches
