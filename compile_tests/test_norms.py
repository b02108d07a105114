"""The norms under torch.compile, torch.export, CUDA graphs, autocast; and their kernels built for every target."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ops
from compile_tests.contract import (
    ALIKE,
    APART,
    Build,
    assert_expected_inline,
    assert_kernels,
    assert_plain_launch,
    build,
    capture,
    capture_graphs,
    fake_gpu,
    opcheck_fully,
    recompiling_fails,
    registers,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.norms import KERNELS, KERNELS_OF, NORMS, VARIANTS, norm_calls, norm_launches
from compile_tests.test_aot import TARGETS
from torch_ops._core.device import gpu
from torch_ops._core.registry import OPS
from torch_ops.testing import assert_close_to_reference, check, references
from torch_ops.testing.cases import NORM_LAYOUTS, NormCase, NormInputs, make_norm_inputs

PUBLIC: dict[str, Callable[..., Any]] = {name: getattr(torch_ops, name) for name in NORMS}
BACKENDS = ("aot_eager", "inductor")
CASE = NormCase("small", "", (13,), 136)
# Shapes of calls that share one graph: none repeats.
ROWS = (5, 40, 7, 300, 64)
FLAGS = {
    "both": (True, True, True),
    "dx": (True, False, False),
    "dweight": (False, True, False),
    "dbias": (False, False, True),
}


def _inputs(op: str, device: str, dtype: torch.dtype = torch.float32, **changes: Any) -> NormInputs:
    return make_norm_inputs(op, replace(CASE, **changes), dtype, device)


def _results(function: Any, inputs: NormInputs, dynamic: bool = False) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.tensors.items()}
    if dynamic:
        for name in ("x", "residual"):
            if name in leaves:
                torch._dynamo.mark_dynamic(leaves[name], 0)
    results = inputs.call(function, **leaves)
    torch.autograd.backward(results, (inputs.dout, inputs.dsum)[: len(results)])
    named = dict(zip(("normed", "sum"), (result.detach() for result in results), strict=False))
    return named | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def _assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"{', '.join(different)} differ from the eager call's"


def _assert_right(op: str, actual: dict[str, Tensor], inputs: NormInputs) -> None:
    reference = getattr(references, op)
    check(actual, _results(reference, inputs), _results(reference, inputs.exact))


def _backward_args(op: str, inputs: NormInputs, flags: tuple[bool, ...]) -> tuple[Any, ...]:
    parameters = [tensor for name, tensor in inputs.tensors.items() if name in ("weight", "bias")]
    grads = (inputs.dout, inputs.dsum) if "add" in op else (inputs.dout,)
    return *grads, inputs.x, *parameters, inputs.eps, *flags[: 1 + len(parameters)]


@pytest.mark.parametrize("layout", NORM_LAYOUTS)
@pytest.mark.parametrize("op", NORMS)
def test_opcheck_passes_forward(op: str, layout: str, device: str) -> None:
    inputs = _inputs(op, device, rows=(4, 5), layout=layout)
    args = [tensor.requires_grad_() for tensor in inputs.tensors.values()]
    opcheck_fully(getattr(torch.ops.vk, op).default, (*args, inputs.eps))


@pytest.mark.parametrize("changes", [{"rows": ()}, {"parameters": "none"}, {"width": 17000}], ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_opcheck_passes_forward_of_other_shapes(op: str, changes: dict[str, Any], device: str) -> None:
    inputs = _inputs(op, device, **{"rows": (3,), **changes})
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.tensors.items()}
    opcheck_fully(getattr(torch.ops.vk, op).default, tuple(leaves.values()))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("op", NORMS)
def test_opcheck_passes_backward(op: str, flags: tuple[bool, ...], device: str) -> None:
    inputs = _inputs(op, device)
    opcheck_fully(getattr(torch.ops.vk, f"{op}_backward").default, _backward_args(op, inputs, flags))


@pytest.mark.parametrize("absent", [0, 1], ids=["dnormed", "dsum"])
@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
def test_opcheck_passes_backward_of_one_result(op: str, absent: int, device: str) -> None:
    args = list(_backward_args(op, _inputs(op, device), FLAGS["both"]))
    args[absent] = None
    opcheck_fully(getattr(torch.ops.vk, f"{op}_backward").default, tuple(args))


@pytest.mark.parametrize("op", NORMS)
def test_opcheck_passes_backward_of_zero_stride_gradients(op: str, device: str) -> None:
    inputs = _inputs(op, device)
    inputs = replace(inputs, dout=inputs.dout.new_ones(()).expand_as(inputs.dout))
    opcheck_fully(getattr(torch.ops.vk, f"{op}_backward").default, _backward_args(op, inputs, FLAGS["both"]))


@pytest.mark.parametrize("op", NORMS)
def test_graphs_hold_only_vk_ops(op: str, device: str) -> None:
    function, graphs = capture_graphs(PUBLIC[op])
    _results(function, _inputs(op, device))
    assert graphs.dynamo == f"vk.{op}.default\n"
    if device == "cpu":
        assert (graphs.forward, graphs.backward) == (f"vk.{op}.default\n", f"vk.{op}_backward.default\n")


def test_graphs_for_cuda_hold_only_allocations_and_kernels() -> None:
    with fake_gpu() as mode:
        with mode:
            calls = norm_calls("add_layer_norm")
        forward, backward = (trace_kernels(OPS[op].overload, args).targets for op, args in calls.items())
    assert_expected_inline(
        forward,
        """\
aten.empty_like.default
aten.empty_like.default
triton_kernel_wrapper_functional
""",
    )
    assert_expected_inline(
        backward,
        """\
aten.empty_like.default
aten.empty_like.default
aten.empty_like.default
aten.empty.memory_format
aten.empty.memory_format
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
""",
    )


def _expected_writes(op: str, variant: str) -> dict[str, set[str]]:
    """What torch must take each kernel to write: a tensor too few loses the kernel, one too many clones it."""
    width = "_wide" * (variant == "wide")
    if not op.endswith("backward"):
        return {f"_norm_fwd{width}_kernel": {"out_ptr"} | ({"sum_ptr"} if "add" in op else set())}
    sums = {"dweight_ptr"} | ({"dbias_ptr"} if "layer" in op else set())
    if variant in ("bare", "frozen"):
        return {f"_norm_bwd{width}_kernel": {"dx_ptr"}}
    dx = set() if variant == "parameters_alone" else {"dx_ptr"}
    return {f"_norm_bwd{width}_kernel": dx | sums, "_norm_bwd_sums_kernel": sums}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", NORMS)
def test_traced_kernels_are_all_there_and_write_only_outputs(op: str, variant: str) -> None:
    with fake_gpu() as mode:
        with mode:
            calls = norm_calls(op, **VARIANTS[variant])
        for name, args in calls.items():
            assert_kernels(trace_kernels(OPS[name].overload, args), _expected_writes(name, variant))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("op", NORMS)
def test_traces_of_symbolic_sizes_hold_for_all_sizes(op: str, batched: bool) -> None:
    with fake_gpu(name="h200") as mode:
        with mode:
            rows = symbolic_size(mode, "rows", 100)
            calls = norm_calls(op, rows, batch=(symbolic_size(mode, "batch", 3), rows) if batched else ())
        for name, args in calls.items():
            assert_kernels(trace_kernels(OPS[name].overload, args), _expected_writes(name, "plain"))
    assert not mode.shape_env.guards and not mode.shape_env.replacements


@pytest.mark.parametrize("op", KERNELS_OF)
def test_kernels_enter_the_key_of_compiled_artefacts(op: str) -> None:
    assert {kernel.fn.__name__ for kernel in get_triton_kernels_for_op(f"vk::{op}")} == KERNELS_OF[op]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", NORMS)
def test_launches_carry_nothing_that_compilation_drops(op: str, variant: str) -> None:
    launches = norm_launches(op, **VARIANTS[variant])
    with fake_gpu() as mode:
        with mode:
            calls = norm_calls(op, **VARIANTS[variant])
        traced = [kernel for name, args in calls.items() for kernel in trace_kernels(OPS[name].overload, args).kernels]
    assert list(launches) == [kernel.name for kernel in traced]
    for kernel in traced:
        assert_plain_launch(launches[kernel.name])
        options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
        assert options == launches[kernel.name].options


def test_frozen_parameters_have_no_sums() -> None:
    """And up to three times as many programs."""
    sums, frozen = (
        norm_launches("layer_norm", rows=25088, needs_parameters=needed)["_norm_bwd_kernel"] for needed in (True, False)
    )
    with fake_gpu():
        most = 8 * gpu().multiprocessors
    assert sums.grid[0] <= most < frozen.grid[0] <= 3 * most
    assert not frozen.arguments["NEEDS_DWEIGHT"] and not frozen.arguments["NEEDS_DBIAS"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ("contiguous", "swapped"))
@pytest.mark.parametrize("op", NORMS)
def test_compiled_equals_eager(op: str, layout: str, backend: str, device: str) -> None:
    inputs = _inputs(op, device, rows=(4, 5), layout=layout)
    compiled = torch.compile(PUBLIC[op], fullgraph=True, dynamic=False, backend=backend)
    _assert_same_bits(_results(compiled, inputs), _results(PUBLIC[op], inputs))


@pytest.mark.parametrize(("dtype", "parameters"), ((torch.float16, "same"), (torch.bfloat16, "fp32")), ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_compiled_equals_eager_in_half_types(op: str, dtype: torch.dtype, parameters: str, device: str) -> None:
    inputs = _inputs(op, device, dtype, width=1152, parameters=parameters)
    compiled = torch.compile(PUBLIC[op], fullgraph=True, dynamic=False)
    _assert_same_bits(_results(compiled, inputs), _results(PUBLIC[op], inputs))


@pytest.mark.parametrize("rows", [(0,), (1,), (3, 0)], ids=str)
@pytest.mark.parametrize("op", ("layer_norm", "add_rms_norm"))
def test_compiled_equals_eager_of_few_rows(op: str, rows: tuple[int, ...], device: str) -> None:
    inputs = _inputs(op, device, rows=rows)
    _assert_same_bits(_results(torch.compile(PUBLIC[op], fullgraph=True), inputs), _results(PUBLIC[op], inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMS)
def test_compiled_block_agrees_with_ops_around(op: str, backend: str, device: str) -> None:
    def block_of(norm: Any, **given: Any) -> tuple[Tensor, ...]:
        results = norm(**{**given, "x": given["x"].sin()})
        return tuple(result.cos() for result in (results if isinstance(results, tuple) else (results,)))

    inputs = _inputs(op, device)
    block = partial(block_of, PUBLIC[op])
    actual = _results(torch.compile(block, fullgraph=True, backend=backend), inputs)
    truth = _results(partial(block_of, getattr(references, op)), inputs.exact)
    check(actual, _results(block, inputs), truth)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMS)
def test_dynamic_shapes_never_recompile(op: str, backend: str, device: str) -> None:
    compiled = torch.compile(PUBLIC[op], fullgraph=True, dynamic=None, backend=backend)
    with recompiling_fails():
        for rows in ROWS:
            inputs = _inputs(op, device, rows=(rows,), width=520)
            _assert_right(op, _results(compiled, inputs, dynamic=True), inputs)


@pytest.mark.parametrize("op", NORMS)
def test_static_calls_become_dynamic_after_one_recompilation(op: str, device: str) -> None:
    function, graphs = capture_graphs(PUBLIC[op], dynamic=None)
    for rows in ROWS:
        _results(function, _inputs(op, device, rows=(rows,)))
    assert graphs.compiled == 2


class _Norm(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, *tensors: Tensor) -> Any:
        return PUBLIC[self.op](*tensors, eps=1e-5)


def _export(op: str, inputs: NormInputs) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=65536)
    shapes = tuple({0: rows} if name in ("x", "residual") else None for name in inputs.tensors)
    return torch.export.export(_Norm(op), tuple(inputs.tensors.values()), dynamic_shapes=(shapes,))


@pytest.mark.parametrize("op", NORMS)
def test_exported_program_keeps_the_op_survives_saving_and_has_gradients(op: str, device: str) -> None:
    with torch.no_grad():
        program = _export(op, _inputs(op, device))
    for graph in (program.graph, program.run_decompositions().graph):
        called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert [name for name in called if "getitem" not in name] == [f"vk.{op}.default"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in ROWS:
        inputs = _inputs(op, device, rows=(rows,), eps=1e-5)
        names = list(inputs.tensors)

        def call(names: list[str] = names, eps: float = 0.0, **given: Tensor) -> Any:
            return loaded(*(given[name] for name in names))

        _assert_same_bits(_results(call, inputs), _results(PUBLIC[op], inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("op", NORMS)
def test_cuda_graph_replays_other_values(op: str) -> None:
    inputs, fresh = (
        make_norm_inputs(op, replace(CASE, width=1152, rows=(300,)), torch.bfloat16, "cuda", seed) for seed in (0, 1)
    )

    def step() -> dict[str, Tensor]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.tensors.items()}
        results = inputs.call(PUBLIC[op], **leaves)
        grads = torch.autograd.grad(results, tuple(leaves.values()), (inputs.dout, inputs.dsum)[: len(results)])
        named = dict(zip(("normed", "sum"), (result.detach() for result in results), strict=False))
        return named | dict(zip((f"d{name}" for name in leaves), grads, strict=True))

    graph, captured = capture(step)
    for name in (*inputs.tensors, "dout", "dsum"):
        getattr(inputs, name).copy_(getattr(fresh, name))
    for tensor in captured.values():
        tensor.fill_(torch.nan)
    graph.replay()
    _assert_same_bits(captured, step())


def _layout(tensors: Any) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize("layout", NORM_LAYOUTS)
@pytest.mark.parametrize("op", NORMS)
def test_fake_and_meta_outputs_have_the_strides_of_real_ones(op: str, layout: str, device: str) -> None:
    inputs = _inputs(op, device, rows=(4, 5), layout=layout)

    def both(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        moved = replace(inputs, **{name: move(t) for name, t in vars(inputs).items() if isinstance(t, Tensor)})
        results = getattr(torch.ops.vk, op)(*moved.tensors.values(), moved.eps)
        backward = getattr(torch.ops.vk, f"{op}_backward")
        grads = [backward(*_backward_args(op, moved, flags)) for flags in FLAGS.values()]
        return [*(results if isinstance(results, tuple) else (results,)), *(each for group in grads for each in group)]

    real = both(lambda tensor: tensor)
    with FakeTensorMode() as mode:
        fake = both(mode.from_tensor)
    meta = both(lambda tensor: tensor.to("meta"))
    assert _layout(fake) == _layout(real) == _layout(meta)
    assert {tensor.device.type for tensor in meta} == {"meta"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMS)
def test_autocast_changes_nothing_in_compiled_calls(op: str, backend: str, device: str) -> None:
    def in_region(**given: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return PUBLIC[op](**given)

    for dtype in (torch.float32, torch.bfloat16):
        inputs = _inputs(op, device, dtype, parameters="fp32")
        compiled = torch.compile(in_region, fullgraph=True, backend=backend, dynamic=False)
        _assert_same_bits(_results(compiled, inputs), _results(PUBLIC[op], inputs))


@pytest.mark.parametrize("op", NORMS)
def test_frozen_parameters_cost_nothing_in_compiled_calls(op: str, device: str) -> None:
    function, graphs = capture_graphs(PUBLIC[op])
    inputs = _inputs(op, device)
    x = inputs.x.requires_grad_()
    results = inputs.call(function, x=x)
    (dx,) = torch.autograd.grad(results, x, (inputs.dout, inputs.dsum)[: len(results)])
    truth = _results(getattr(references, op), inputs.exact)["dx"]
    assert_close_to_reference(dx, _results(PUBLIC[op], inputs)["dx"], truth)
    if device == "cpu":
        assert graphs.backward == f"vk.{op}_backward.default\n"


@pytest.mark.parametrize("op", NORMS)
def test_vmap_equals_a_loop_and_functionalized_calls_eager_ones(op: str, device: str) -> None:
    inputs = _inputs(op, device)
    xs = torch.stack([inputs.x, inputs.x * 2])

    def call(x: Tensor) -> Tensor:
        return inputs.call(PUBLIC[op], x=x)[0]

    expected = torch.stack([call(x) for x in xs])
    assert torch.equal(torch.func.vmap(call)(xs), expected)
    assert torch.equal(torch.func.functionalize(call)(inputs.x), expected[0])


@dataclass(frozen=True)
class Point:
    """A norm on one target."""

    target: str
    width: int
    dtype: torch.dtype = torch.bfloat16
    op: str = "add_layer_norm"
    parameters: torch.dtype = torch.float32
    rows: int = 25088

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.target}-{self.op}-{self.rows}x{self.width}-{dtype}"


WIDTHS = (768, 1024, 1152, 1280, 4608)
# Of all four `add_layer_norm` beside fp32 parameters holds most.
POINTS = [
    *(Point(target, width) for target in APART for width in (72, 1152, 4608, 8192, 20000)),
    *(Point(target, width) for target in ALIKE for width in (1152, 20000)),
    *(Point("sm_90", width) for width in (7, 331, 768, 1024, 1280, 2048, 3456, 4096, 5120, 16384)),
    *(Point("sm_90", width, op="rms_norm", parameters=torch.bfloat16) for width in (1152, 4608)),
    *(Point("sm_90", width, torch.float32) for width in (331, 1152, 5120, 6144, 16384)),
    *(Point(target, 1152, torch.float32) for target in ("sm_80", "gfx942")),
    *(Point("sm_90", 1152, torch.float16, op=op, rows=784) for op in NORMS),
]  # fmt: skip


PLACES = ("forward", "backward", "sums")


@lru_cache
def _build(point: Point, place: str) -> Build:
    target = TARGETS[point.target]
    launches = norm_launches(
        point.op, target, rows=point.rows, width=point.width, dtype=point.dtype, parameters=point.parameters
    )
    assert len(launches) == len(PLACES) and set(launches) <= set(KERNELS)
    with fake_gpu(target):
        return build(list(launches.values())[PLACES.index(place)], target)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_nothing_spills_and_shared_memory_is_within_the_target(point: Point) -> None:
    limit = shared_memory(TARGETS[point.target])
    builds = [_build(point, place) for place in PLACES]
    bad = [str(built) for built in builds if built.spilled or built.shared > limit]
    assert not bad, "\n".join((f"limit {limit}", *bad))


def _accesses(built: Build, what: str) -> set[str]:
    """How loads and stores (`what`) of global memory are made: v4.b32 is 16 bytes."""
    found: list[str] = re.findall(rf"\b(?:{what})\.global(?:\.\w+)*?\.((?:v\d\.)?[bfsu]\d+)\b", built.asm["ptx"])
    assert found
    return set(found)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_of_few_rows_reads_and_writes_by_16_bytes_and_keeps_rows_in_registers(
    width: int, op: str, dtype: torch.dtype
) -> None:
    """Layouts of parts agree, so nothing goes through shared memory but sums of rows that several warps share."""
    built = _build(Point("sm_90", width, dtype, op, torch.bfloat16, rows=128), "forward")
    assert _accesses(built, "ld|st") == {"v4.b32"}
    assert "ttg.convert_layout" not in built.asm["ttgir"]
    assert built.shared <= (0 if width <= 1280 else 64)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_of_many_rows_has_two_rows_in_the_place_of_one(width: int, dtype: torch.dtype) -> None:
    """Weight and bias come late: 32 warps to each multiprocessor have 64 registers a thread."""
    many, few = (
        _build(Point("sm_90", width, dtype, "layer_norm", torch.bfloat16, rows=rows), "forward")
        for rows in (25088, 128)
    )
    assert registers(many) <= 72 and (width < 1152 or registers(many) < 0.6 * registers(few))
    assert _accesses(many, "ld|st") == {"v4.b32"}
    assert "ttg.convert_layout" not in many.asm["ttgir"] and many.shared <= (0 if width <= 1280 else 64)


@pytest.mark.parametrize("width", WIDTHS)
def test_backward_exchanges_no_rows(width: int) -> None:
    """What is rearranged are the sums of columns, once, after the last row."""
    built = _build(Point("sm_90", width), "backward")
    ttgir = built.asm["ttgir"]
    assert "ttg.convert_layout" not in ttgir[ttgir.index("scf.for") : ttgir.index("scf.yield")]
    assert _accesses(built, "ld") == {"v4.b32"}


def test_few_rows_have_a_program_each_and_their_parameters_early() -> None:
    many, few = (norm_launches("layer_norm", rows=rows)["_norm_fwd_kernel"] for rows in (25088, 784))
    assert few.grid == (784,) and few.arguments["BLOCK_M"] == 1 and few.arguments["EARLY"] is True
    assert many.grid == (25088 // 4,) and many.arguments["BLOCK_M"] == 4 and many.arguments["EARLY"] is False
