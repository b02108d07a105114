"""The graph contract of the ops on image grids: what each of their test modules applies to its op, their calls on fake
CUDA tensors, and what their bodies launch."""

import io
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import (
    ALIKE,
    APART,
    RUN_PACKAGE,
    SM90,
    TARGETS,
    Build,
    KernelLaunch,
    assert_expected_inline,
    assert_kernels,
    assert_plain_launch,
    build,
    capture,
    capture_graphs,
    fake_gpu,
    recompiling_fails,
    record_launches,
    run_forked,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from torch_ops._core.registry import OPS
from torch_ops.testing.cases import ROW_LAYOUTS, GridCase, grid_cases, make_grid_inputs

# What torch must take each op's kernel to write.
WRITES = {
    "rotary_table": {"_rotary_table_kernel": {"cos_ptr", "sin_ptr"}},
    "pos_embed_interpolate": {"_pos_embed_fwd_kernel": {"out_ptr"}},
    "pos_embed_interpolate_backward": {"_pos_embed_bwd_kernel": {"dtable_ptr"}},
    "spatial_merge": {"_spatial_merge_fwd_kernel": {"out_ptr"}},
    "spatial_merge_backward": {"_spatial_merge_bwd_kernel": {"dx_ptr"}},
}
KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel for name in WRITES for kernel in get_triton_kernels_for_op(f"vk::{name}")
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half_pixel": {"align_corners": False},
    "raster": {"order": "raster"},
    "mean": {"mode": "mean"},
    "mean_of_raster": {"mode": "mean", "order": "raster"},
    "row_major": {"merge_size": 1},
    "fp32": {"dtype": torch.float32},
    "far_rows": {"gap": 8},
}
BACKENDS = ("aot_eager", "inductor")
CASES = [case for case in grid_cases("edge") if case.name in ("mixed", "padding", "raster", "empty", *ROW_LAYOUTS)]
# Batches of calls that share one graph: none has as many patches or images as another.
BATCHES = (((1, 4, 6), (2, 2, 2)), ((1, 10, 8),), ((1, 2, 2),) * 11, ((3, 4, 4), (0, 2, 2), (1, 6, 10)))
POINTS = [
    *((target, variant, 1152) for target in APART for variant in ("plain", "half_pixel", "mean_of_raster", "fp32")),
    *((target, "mean_of_raster", 1152) for target in ALIKE),
    *(("sm_90", "raster", width) for width in (40, 300, 768, 1024, 1280)),
    ("sm_90", "row_major", 1152),
]
FIRST_CALL = """
import torch, torch_ops
grid = torch.tensor([[1, 4, 6], [2, 2, 2]], device={device!r})
draw = lambda *shape: torch.randn(*shape, device=grid.device, requires_grad=True)
{call}
print("right")
"""


def grid_calls(
    rows: Any = 200, images: Any = 3, width: int = 1152, side: int = 48, head_dim: int = 72, mode: str = "concat",
    order: str = "merge_block", merge_size: int = 2, align_corners: bool = True, dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """Arguments of all ops on image grids, on CUDA tensors of the fake mode in force; all rows are merged."""

    def packed(rows: Any, width: Any) -> Tensor:
        return torch.empty(rows, width + gap, device="cuda", dtype=dtype).narrow(1, 0, width)

    unit = merge_size * merge_size
    grid = torch.empty(images, 3, device="cuda", dtype=torch.int64)
    merged = packed(rows // unit, width * unit if mode == "concat" else width)
    way = (mode, order, merge_size)
    return {
        "rotary_table": (grid, rows, head_dim, 10000.0, merge_size),
        "pos_embed_interpolate": (packed(side * side, width), grid, rows, merge_size, align_corners),
        "pos_embed_interpolate_backward": (packed(rows, width), grid, side * side, merge_size, align_corners),
        "spatial_merge": (packed(rows, width), grid, rows, *way),
        "spatial_merge_backward": (merged, grid, rows, rows, *way),
    }


def grid_launches(target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any) -> dict[str, KernelLaunch]:
    """By kernel name, what the bodies of all ops on image grids launch on such a GPU."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        for name, args in grid_calls(**variant).items():
            OPS[name].body(*args)
    return {launch.name: launch for launch in launches}


def ops_of(name: str) -> list[str]:
    """An op and, if it has one, its backward."""
    return [op for op in WRITES if op.removesuffix("_backward") == name]


def kernels_of(name: str) -> list[str]:
    return [kernel for op in ops_of(name) for kernel in WRITES[op]]


def ids(value: Any) -> str | None:
    return value.name if isinstance(value, GridCase) else None


def make_grid(grids: Any, device: str) -> tuple[Tensor, int]:
    return torch.tensor(grids, device=device), sum(t * h * w for t, h, w in grids)


def assert_no_second_derivative(call: Callable[[Tensor, Tensor, int], Tensor], device: str) -> None:
    grid, total = make_grid(((1, 4, 4),), device)
    leaf = torch.randn(16, 8, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(call(leaf, grid, total).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="_backward has no derivative"):
        gradient.sum().backward()


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _layout(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


@lru_cache
def builds_of(name: str, target: str, variant: str, width: int) -> tuple[Build, ...]:
    launches = grid_launches(TARGETS[target], rows=12544, width=width, **VARIANTS[variant])
    with fake_gpu(TARGETS[target]):
        return tuple(build(launches[kernel], TARGETS[target]) for kernel in kernels_of(name))


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


class GraphContract:
    """Subclassed by each op's tests.

    `encode` calls the public function for as many patches as x has, on what `tensors` gives: x, tensors of the model,
    and the grid. `graph` is what Dynamo makes of it. In `every_op` the operators are called themselves.
    """

    name: str
    graph: str
    first_calls: dict[str, str]
    has_backward = True

    def tensors(self, total: int, device: str) -> tuple[Tensor, ...]:
        return (torch.randn(total, 24, device=device),)

    def encode(self, *arguments: Tensor) -> Any:
        raise NotImplementedError

    def every_op(self, x: Tensor, table: Tensor, dout: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def arguments(self, grids: Any, device: str) -> tuple[Tensor, ...]:
        grid, total = make_grid(grids, device)
        return *self.tensors(total, device), grid

    def results(self, function: Callable[..., Any], *arguments: Tensor) -> tuple[Tensor, ...]:
        """What it makes and, if it can be differentiated, the gradients of a weighted sum."""
        *drawn, grid = arguments
        leaves = [tensor.detach().requires_grad_(self.has_backward) for tensor in drawn]
        outs = _tuple(function(*leaves, grid))
        if not self.has_backward:
            return outs
        weights = torch.linspace(-1, 1, outs[0].numel(), device=grid.device).view_as(outs[0])
        return *outs, *torch.autograd.grad((outs[0] * weights).sum(), leaves)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """`op`: the operator and its backward; `call`: each kind of first call."""
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", ops_of(self.name))
        if "call" in metafunc.fixturenames:
            metafunc.parametrize("call", self.first_calls.values(), ids=list(self.first_calls))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_traced_kernels_are_all_there_and_write_only_outputs(self, op: str, variant: str) -> None:
        with fake_gpu() as mode:
            with mode:
                args = grid_calls(**VARIANTS[variant])[op]
            trace = trace_kernels(OPS[op].overload, args)
        assert_kernels(trace, WRITES[op])
        assert not trace.mutated_inputs
        launched = grid_launches(**VARIANTS[variant])
        for kernel in trace.kernels:
            traced = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
            assert traced == launched[kernel.name].options

    def test_traces_of_symbolic_sizes_hold_for_all_sizes(self, op: str) -> None:
        """But that rows to merge must be whole blocks."""
        with fake_gpu(name="h200") as mode:
            with mode:
                rows, images = symbolic_size(mode, "rows", 200), symbolic_size(mode, "images", 3)
                # A number of rows that no tensor has would be unknown to the trace.
                args = (torch.empty(rows, device="cuda"), *grid_calls(rows=rows, images=images)[op])
            assert_kernels(trace_kernels(lambda _, *args: OPS[op](*args), args), WRITES[op])
        assert not mode.shape_env.replacements
        guards = [guard.expr for guard in mode.shape_env.guards]
        for size, holds in ((8, True), (400, True), (12544, True), (42, "merge" not in op)):
            assert all(guard.subs(dict.fromkeys(guard.free_symbols, size)) for guard in guards) == holds, guards

    def test_symbols_where_kernels_have_constants_are_settled(self, op: str) -> None:
        """Everything is a symbol under `dynamic=True`, also what is a number of the model."""
        with fake_gpu() as mode:
            with mode:
                rows, width = symbolic_size(mode, "rows", 200), symbolic_size(mode, "width", 1152)
                head_dim, merge_size = symbolic_size(mode, "head_dim", 72), symbolic_size(mode, "merge_size", 2)
                sizes = [torch.empty(size, device="cuda") for size in (rows, width, head_dim, merge_size)]
                args = (*sizes, *grid_calls(rows=rows, width=width, head_dim=head_dim, merge_size=merge_size)[op])
            assert_kernels(trace_kernels(lambda a, b, c, d, *args: OPS[op](*args), args), WRITES[op])

    def test_graphs_for_cuda_hold_only_allocations_and_kernels(self, op: str) -> None:
        with fake_gpu() as mode:
            with mode:
                args = grid_calls()[op]
            targets = trace_kernels(OPS[op].overload, args).targets.splitlines()
        assert set(targets) == {"aten.new_empty.default", "triton_kernel_wrapper_functional"}
        assert targets.count("triton_kernel_wrapper_functional") == 1, "one launch serves all images"

    def test_kernels_enter_the_key_of_compiled_artefacts(self, op: str) -> None:
        assert [kernel.fn.__name__ for kernel in get_triton_kernels_for_op(f"vk::{op}")] == list(WRITES[op])

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_launches_carry_nothing_that_compilation_drops(self, variant: str) -> None:
        launches = grid_launches(**VARIANTS[variant])
        for kernel in kernels_of(self.name):
            assert_plain_launch(launches[kernel])

    def test_graphs_hold_only_vk_ops(self, device: str) -> None:
        function, graphs = capture_graphs(self.encode)
        self.results(function, *self.arguments(BATCHES[0], device))
        assert_expected_inline(graphs.dynamo, self.graph)
        if device == "cpu" and self.has_backward:
            assert_expected_inline(graphs.backward, f"vk.{self.name}_backward.default\n")

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("grids", BATCHES, ids=len)
    def test_compiled_equals_eager(self, grids: Any, backend: str, device: str) -> None:
        arguments = self.arguments(grids, device)
        compiled = torch.compile(self.encode, fullgraph=True, dynamic=False, backend=backend)
        for actual, expected in zip(
            self.results(compiled, *arguments), self.results(self.encode, *arguments), strict=True
        ):
            assert torch.equal(actual, expected)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_dynamic_shapes_never_recompile(self, backend: str, device: str) -> None:
        """With patches and images of any number; the width of rows and the table are the model's."""
        compiled = torch.compile(self.encode, fullgraph=True, backend=backend)
        with recompiling_fails():
            # PyTorch makes graphs of their own for sizes of 1.
            for grids in (grids for grids in BATCHES if len(grids) > 1):
                arguments = self.arguments(grids, device)
                for tensor in (arguments[0], arguments[-1]):
                    torch._dynamo.mark_dynamic(tensor, 0)
                if self.has_backward:
                    arguments[0].requires_grad_()
                outs, expected = _tuple(compiled(*arguments)), _tuple(self.encode(*arguments))
                assert all(torch.equal(one, other) for one, other in zip(outs, expected, strict=True))
                if self.has_backward:
                    gradient, wanted = (
                        torch.autograd.grad(out.square().sum(), arguments[0])[0] for out in (outs[0], expected[0])
                    )
                    assert torch.equal(gradient, wanted)

    def _export(self, device: str) -> torch.export.ExportedProgram:
        arguments = self.arguments(BATCHES[0], device)
        blocks = torch.export.Dim("blocks", min=2, max=65536)
        images = torch.export.Dim("images", min=1, max=4096)
        shapes = ({0: 4 * blocks}, *(None for _ in arguments[2:]), {0: images})
        return torch.export.export(_Module(self.encode), arguments, dynamic_shapes=(shapes,))

    def test_exported_program_survives_saving_and_runs_at_other_sizes(self, device: str) -> None:
        file = io.BytesIO()
        torch.export.save(self._export(device), file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for grids in BATCHES:
            arguments = self.arguments(grids, device)
            for actual, expected in zip(_tuple(loaded(*arguments)), _tuple(self.encode(*arguments)), strict=True):
                assert torch.equal(actual, expected)

    @pytest.mark.parametrize("decomposed", (False, True), ids=("as_exported", "decomposed"))
    def test_exported_graph_keeps_the_op_whole(self, decomposed: bool, device: str) -> None:
        program = self._export(device)
        graph = (program.run_decompositions() if decomposed else program).graph
        called = [str(node.target) for node in graph.nodes if "vk." in str(node.target)]
        assert called == [f"vk.{self.name}.default"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="loading any AOTInductor package fails on the GPU machines")
    def test_aoti_package_runs_in_a_process_that_only_imports_the_library(self, tmp_path: Path) -> None:
        package = torch._inductor.aoti_compile_and_package(self._export("cpu"), package_path=str(tmp_path / "op.pt2"))
        calls = [
            (arguments, _tuple(self.encode(*arguments)))
            for arguments in (self.arguments(grids, "cpu") for grids in BATCHES)
        ]
        torch.save(calls, tmp_path / "calls.pt")
        paths = (package, str(tmp_path / "calls.pt"))
        assert run_forked(RUN_PACKAGE.format(paths=paths)) == "equal\n"

    @pytest.mark.gpu
    def test_cuda_graph_replays_other_images(self) -> None:
        """Fewer patches than were captured are padded."""
        arguments = self.arguments(((1, 8, 8), (1, 4, 4), (2, 2, 2)), "cuda")
        *drawn, grid = arguments

        def step() -> tuple[Tensor, ...]:
            return tuple(tensor.detach() for tensor in self.results(self.encode, *arguments))

        graph, captured = capture(step)
        for grids in (((1, 4, 6), (2, 2, 2), (0, 2, 2)), ((1, 2, 2), (1, 2, 2), (1, 20, 4))):
            grid.copy_(torch.tensor(grids))
            for tensor in drawn:
                tensor.normal_()
            for tensor in captured:
                tensor.fill_(torch.nan)
            graph.replay()
            for actual, expected in zip(captured, step(), strict=True):
                assert torch.equal(actual, expected)

    @pytest.mark.parametrize("layout", ROW_LAYOUTS)
    def test_fake_and_meta_outputs_have_the_strides_of_real_ones(self, layout: str, device: str) -> None:
        inputs = make_grid_inputs(GridCase(layout, "", BATCHES[0], layout=layout), torch.float32, device)
        args = (inputs.x, inputs.table, inputs.dout, inputs.grid)
        real = self.every_op(*args)
        with FakeTensorMode() as mode:
            fake = self.every_op(*map(mode.from_tensor, args))
        meta = self.every_op(*(tensor.to("meta") for tensor in args))
        assert _layout(fake) == _layout(real) == _layout(meta)
        assert {tensor.device.type for tensor in fake} == {device}
        assert {tensor.device.type for tensor in meta} == {"meta"}

    def test_functionalized_call_equals_eager(self, device: str) -> None:
        inputs = make_grid_inputs(GridCase("call", "", BATCHES[0]), torch.float32, device)
        args = (inputs.x, inputs.table, inputs.dout, inputs.grid)
        for actual, expected in zip(torch.func.functionalize(self.every_op)(*args), self.every_op(*args), strict=True):
            assert torch.equal(actual, expected)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_autocast_changes_no_dtype(self, backend: str, device: str) -> None:
        def in_region(*arguments: Tensor) -> Any:
            with torch.autocast(device, torch.bfloat16):
                return self.encode(*arguments)

        arguments = self.arguments(BATCHES[0], device)
        compiled = torch.compile(in_region, fullgraph=True, backend=backend)
        for actual, expected in zip(_tuple(compiled(*arguments)), _tuple(self.encode(*arguments)), strict=True):
            assert actual.dtype is torch.float32 and torch.equal(actual, expected)

    def test_first_call_of_a_process_works(self, call: str, device: str) -> None:
        assert run_forked(FIRST_CALL.format(call=call, device=device)) == "right\n"

    @pytest.mark.parametrize(("target", "variant", "width"), POINTS)
    def test_builds_spill_nothing_and_fit(self, target: str, variant: str, width: int) -> None:
        limit = shared_memory(TARGETS[target])
        builds = builds_of(self.name, target, variant, width)
        bad = [str(built) for built in builds if built.spilled or built.shared > limit]
        assert builds and not bad, "\n".join(bad)

    @pytest.mark.parametrize("variant", ("plain", "mean_of_raster", "fp32"))
    def test_rows_move_by_16_bytes(self, variant: str) -> None:
        """Loads and stores of rows alike; what is left are grids, of which a program reads a few numbers."""
        for built in builds_of(self.name, "sm_90", variant, 1152):
            ptx = built.asm["ptx"]
            stores = [line for line in ptx.splitlines() if "st.global" in line]
            if built.launch.name == "_pos_embed_bwd_kernel":
                # It writes one row, of a sum.
                assert len(stores) == 1
            else:
                assert stores and all(".v4." in line for line in stores), built
            loads = [line for line in ptx.splitlines() if "ld.global" in line and ".b64" not in line]
            assert all(".v4." in line for line in loads), built
            assert bool(loads) == (built.launch.name != "_rotary_table_kernel")
