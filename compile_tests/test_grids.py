"""The ops on image grids under torch.compile, torch.export, AOTInductor, CUDA graphs, and built for every target."""

import io
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.contract import (
    ALIKE,
    APART,
    RUN_PACKAGE,
    TARGETS,
    Build,
    assert_expected_inline,
    assert_kernels,
    assert_plain_launch,
    build,
    capture_graphs,
    fake_gpu,
    opcheck_fully,
    recompiling_fails,
    run_forked,
    sass,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.grids import KERNELS, VARIANTS, WRITES, grid_calls, grid_launches
from torch_ops import pos_embed_interpolate, rotary_table, spatial_merge
from torch_ops._registry import OPS
from torch_ops.testing import references
from torch_ops.testing.cases import ROW_LAYOUTS, GridCase, grid_cases, lay_out, make_grid_inputs

BACKENDS = ("aot_eager", "inductor")
CASES = [case for case in grid_cases("edge") if case.name in ("mixed", "padding", "raster", "empty", *ROW_LAYOUTS)]
# Batches of calls that share one graph: none has as many patches or images as another.
BATCHES = (((1, 4, 6), (2, 2, 2)), ((1, 10, 8),), ((1, 2, 2),) * 11, ((3, 4, 4), (0, 2, 2), (1, 6, 10)))


def _ids(value: Any) -> str | None:
    return value.name if isinstance(value, GridCase) else None


def _grid(grids: tuple[tuple[int, int, int], ...], device: str) -> tuple[Tensor, int]:
    return torch.tensor(grids, device=device), sum(t * h * w for t, h, w in grids)


def _embed(table: Tensor, grid: Tensor, total: int) -> Tensor:
    return pos_embed_interpolate(table, grid, total)


def _merge(x: Tensor, grid: Tensor, total: int) -> Tensor:
    return spatial_merge(x, grid, total, "mean", "raster")


def _encode(x: Tensor, table: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three, of as many patches as x has."""
    total = x.shape[0]
    cos, sin = rotary_table(grid, total, 16)
    return spatial_merge(x + pos_embed_interpolate(table, grid, total), grid, total), cos, sin


def _results(function: Callable[..., Any], x: Tensor, table: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
    leaves = x.detach().requires_grad_(), table.detach().requires_grad_()
    merged, cos, sin = function(*leaves, grid)
    weights = torch.linspace(-1, 1, merged.numel(), device=x.device).view_as(merged)
    return merged, cos, sin, *torch.autograd.grad((merged * weights).sum(), leaves)


def _arguments(grids: tuple[tuple[int, int, int], ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    grid, total = _grid(grids, device)
    return torch.randn(total, 24, device=device), torch.randn(25, 24, device=device), grid


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_opcheck_passes(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.float32, device)
    grid, total, size = inputs.grid, inputs.total, inputs.merge_size
    opcheck_fully(torch.ops.vk.rotary_table.default, (grid, total, 16, 10000.0, size))
    table, x = inputs.table.requires_grad_(), inputs.x.requires_grad_()
    for align_corners in (True, False):
        opcheck_fully(torch.ops.vk.pos_embed_interpolate.default, (table, grid, total, size, align_corners))
    opcheck_fully(torch.ops.vk.pos_embed_interpolate_backward.default, (inputs.dout, grid, table.shape[0], size))
    merged = total // size**2 * size**2
    for mode, order in (("concat", "merge_block"), ("mean", "raster")):
        opcheck_fully(torch.ops.vk.spatial_merge.default, (x, grid, merged, mode, order, size))
        dout = torch.ops.vk.spatial_merge(x.detach(), grid, merged, mode, order, size)
        dout = lay_out(dout, case.layout)
        opcheck_fully(torch.ops.vk.spatial_merge_backward.default, (dout, grid, merged, total, mode, order, size))


def test_opcheck_passes_backward_of_zero_stride_gradients(device: str) -> None:
    grid, total = _grid(BATCHES[0], device)
    one = torch.ones((), device=device)
    opcheck_fully(torch.ops.vk.pos_embed_interpolate_backward.default, (one.expand(total, 8), grid, 9))
    opcheck_fully(torch.ops.vk.spatial_merge_backward.default, (one.expand(total // 4, 32), grid, total, total))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", WRITES)
def test_traced_kernels_are_all_there_and_write_only_outputs(op: str, variant: str) -> None:
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


@pytest.mark.parametrize("op", WRITES)
def test_traces_of_symbolic_sizes_hold_for_all_sizes(op: str) -> None:
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


@pytest.mark.parametrize("op", WRITES)
def test_symbols_where_kernels_have_constants_are_settled(op: str) -> None:
    """Everything is a symbol under `dynamic=True`, also what is a number of the model."""
    with fake_gpu() as mode:
        with mode:
            rows, width = symbolic_size(mode, "rows", 200), symbolic_size(mode, "width", 1152)
            head_dim, merge_size = symbolic_size(mode, "head_dim", 72), symbolic_size(mode, "merge_size", 2)
            sizes = [torch.empty(size, device="cuda") for size in (rows, width, head_dim, merge_size)]
            args = (*sizes, *grid_calls(rows=rows, width=width, head_dim=head_dim, merge_size=merge_size)[op])
        assert_kernels(trace_kernels(lambda a, b, c, d, *args: OPS[op](*args), args), WRITES[op])


@pytest.mark.parametrize("op", WRITES)
def test_graphs_for_cuda_hold_only_allocations_and_kernels(op: str) -> None:
    with fake_gpu() as mode:
        with mode:
            args = grid_calls()[op]
        targets = trace_kernels(OPS[op].overload, args).targets.splitlines()
    assert set(targets) == {"aten.new_empty.default", "triton_kernel_wrapper_functional"}
    assert targets.count("triton_kernel_wrapper_functional") == 1, "one launch serves all images"


@pytest.mark.parametrize("op", WRITES)
def test_kernels_enter_the_key_of_compiled_artefacts(op: str) -> None:
    assert [kernel.fn.__name__ for kernel in get_triton_kernels_for_op(f"vk::{op}")] == list(WRITES[op])


@pytest.mark.parametrize("variant", VARIANTS)
def test_launches_carry_nothing_that_compilation_drops(variant: str) -> None:
    launches = grid_launches(**VARIANTS[variant])
    assert set(launches) == set(KERNELS)
    for launch in launches.values():
        assert_plain_launch(launch)


def test_graphs_hold_only_vk_ops(device: str) -> None:
    function, graphs = capture_graphs(_encode)
    merged, _, _ = function(
        *(x.requires_grad_() if x.is_floating_point() else x for x in _arguments(BATCHES[0], device))
    )
    merged.sum().backward()
    assert_expected_inline(
        graphs.dynamo,
        """\
vk.rotary_table.default
vk.pos_embed_interpolate.default
<built-in function add>
vk.spatial_merge.default
""",
    )
    if device == "cpu":
        assert_expected_inline(
            graphs.backward,
            """\
vk.spatial_merge_backward.default
vk.pos_embed_interpolate_backward.default
""",
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grids", BATCHES, ids=len)
def test_compiled_equals_eager(grids: Any, backend: str, device: str) -> None:
    arguments = _arguments(grids, device)
    compiled = torch.compile(_encode, fullgraph=True, dynamic=False, backend=backend)
    for actual, expected in zip(_results(compiled, *arguments), _results(_encode, *arguments), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_never_recompile(backend: str, device: str) -> None:
    """With patches and images of any number; the width of rows and the table are the model's."""
    compiled = torch.compile(_encode, fullgraph=True, backend=backend)
    with recompiling_fails():
        # PyTorch makes graphs of their own for sizes of 1.
        for grids in (grids for grids in BATCHES if len(grids) > 1):
            x, table, grid = _arguments(grids, device)
            x.requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(grid, 0)
            merged, cos, sin = compiled(x, table, grid)
            expected = _encode(x, table, grid)
            assert all(torch.equal(one, other) for one, other in zip((merged, cos, sin), expected, strict=True))
            (gradient,) = torch.autograd.grad(merged.square().sum(), x)
            assert torch.equal(gradient, torch.autograd.grad(expected[0].square().sum(), x)[0])


def test_a_total_that_is_no_multiple_is_refused_in_a_graph(device: str) -> None:
    x, table, grid = _arguments(BATCHES[0], device)
    compiled = torch.compile(spatial_merge, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, grid, x.shape[0]), spatial_merge(x, grid, x.shape[0]))
    with pytest.raises(Exception, match="total must be a multiple of"):
        compiled(x, grid, x.shape[0] - 2)


class _Encoder(torch.nn.Module):
    def forward(self, x: Tensor, table: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _encode(x, table, grid)


def _export(device: str) -> torch.export.ExportedProgram:
    blocks = torch.export.Dim("blocks", min=2, max=65536)
    shapes = ({0: 4 * blocks}, None, {0: torch.export.Dim("images", min=1, max=4096)})
    return torch.export.export(_Encoder(), _arguments(BATCHES[0], device), dynamic_shapes=shapes)


def test_exported_program_survives_saving_and_runs_at_other_sizes(device: str) -> None:
    file = io.BytesIO()
    torch.export.save(_export(device), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for grids in BATCHES:
        arguments = _arguments(grids, device)
        for actual, expected in zip(loaded(*arguments), _encode(*arguments), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("decomposed", (False, True), ids=("as_exported", "decomposed"))
def test_exported_graph_keeps_the_ops_whole(decomposed: bool, device: str) -> None:
    program = _export(device)
    graph = (program.run_decompositions() if decomposed else program).graph
    called = {str(node.target) for node in graph.nodes if "vk." in str(node.target)}
    assert called == {"vk.rotary_table.default", "vk.pos_embed_interpolate.default", "vk.spatial_merge.default"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="loading any AOTInductor package fails on the GPU machines")
def test_aoti_package_runs_in_a_process_that_only_imports_the_library(tmp_path: Any) -> None:
    package = torch._inductor.aoti_compile_and_package(_export("cpu"), package_path=str(tmp_path / "grids.pt2"))
    calls = [(arguments, _encode(*arguments)) for arguments in (_arguments(grids, "cpu") for grids in BATCHES)]
    torch.save(calls, tmp_path / "calls.pt")
    paths = (package, str(tmp_path / "calls.pt"))
    assert run_forked(RUN_PACKAGE.format(paths=paths)) == "equal\n"


@pytest.mark.gpu
def test_cuda_graph_replays_other_images() -> None:
    """Fewer patches than were captured are padded."""
    x, table, grid = _arguments(((1, 8, 8), (1, 4, 4), (2, 2, 2)), "cuda")

    def step() -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in _results(_encode, x, table, grid))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for grids in (((1, 4, 6), (2, 2, 2), (0, 2, 2)), ((1, 2, 2), (1, 2, 2), (1, 20, 4))):
        grid.copy_(torch.tensor(grids))
        x.normal_()
        table.normal_()
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        for actual, expected in zip(captured, step(), strict=True):
            assert torch.equal(actual, expected)


def _layout(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


def _all_ops(x: Tensor, table: Tensor, dout: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
    total = x.shape[0]
    concat = torch.ops.vk.spatial_merge(x, grid, total)
    mean = torch.ops.vk.spatial_merge(x, grid, total, "mean", "raster")
    return (
        *torch.ops.vk.rotary_table(grid, total, 16), concat, mean,
        torch.ops.vk.pos_embed_interpolate(table, grid, total),
        torch.ops.vk.pos_embed_interpolate_backward(dout, grid, table.shape[0]),
        torch.ops.vk.spatial_merge_backward(concat, grid, total, total),
        torch.ops.vk.spatial_merge_backward(mean, grid, total, total, "mean", "raster"),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_fake_and_meta_outputs_have_the_strides_of_real_ones(layout: str, device: str) -> None:
    inputs = make_grid_inputs(GridCase(layout, "", BATCHES[0], layout=layout), torch.float32, device)
    args = (inputs.x, inputs.table, inputs.dout, inputs.grid)
    real = _all_ops(*args)
    with FakeTensorMode() as mode:
        fake = _all_ops(*map(mode.from_tensor, args))
    meta = _all_ops(*(tensor.to("meta") for tensor in args))
    assert _layout(fake) == _layout(real) == _layout(meta)
    assert {tensor.device.type for tensor in fake} == {device}
    assert {tensor.device.type for tensor in meta} == {"meta"}


def test_functionalized_call_equals_eager(device: str) -> None:
    inputs = make_grid_inputs(GridCase("call", "", BATCHES[0]), torch.float32, device)
    args = (inputs.x, inputs.table, inputs.dout, inputs.grid)
    for actual, expected in zip(torch.func.functionalize(_all_ops)(*args), _all_ops(*args), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_no_dtype(backend: str, device: str) -> None:
    def in_region(*arguments: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            return _encode(*arguments)

    arguments = _arguments(BATCHES[0], device)
    compiled = torch.compile(in_region, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(*arguments), _encode(*arguments), strict=True):
        assert actual.dtype is torch.float32 and torch.equal(actual, expected)


def test_vmap_equals_a_loop(device: str) -> None:
    x, table, grid = _arguments(BATCHES[0], device)
    call = partial(_merge, grid=grid, total=x.shape[0])
    xs = torch.stack([x, x.flip(0)])
    assert torch.equal(torch.func.vmap(lambda x: call(x))(xs), torch.stack([call(x) for x in xs]))


@pytest.mark.parametrize("call", (_embed, _merge))
def test_double_backward_is_refused(call: Callable[..., Tensor], device: str) -> None:
    grid, total = _grid(((1, 4, 4),), device)
    leaf = torch.randn(16, 8, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(call(leaf, grid, total).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="_backward has no derivative"):
        gradient.sum().backward()


FIRST_CALL = """
import torch, torch_ops
grid = torch.tensor([[1, 4, 6], [2, 2, 2]], device={device!r})
{call}
print("equal")
"""


@pytest.mark.parametrize(
    "call",
    (
        "one, other = (f(grid, 32, 16)[0] for f in (torch.compile(torch_ops.rotary_table), torch_ops.rotary_table)); "
        "assert torch.equal(one, other)",
        "x = torch.randn(32, 8, device=grid.device, requires_grad=True); "
        "torch.compile(torch_ops.spatial_merge)(x, grid, 32).sum().backward(); assert (x.grad == 1).all()",
        "cos, sin = torch.ops.vk.rotary_table(grid, 32, 16); assert cos.shape == (32, 8)",
    ),
    ids=("compiled", "compiled_with_backward", "torch.ops"),
)
def test_first_call_of_a_process_works(call: str, device: str) -> None:
    assert run_forked(FIRST_CALL.format(call=call, device=device)) == "equal\n"


@lru_cache
def _builds(target: str, variant: str, width: int) -> tuple[Build, ...]:
    launches = grid_launches(TARGETS[target], rows=12544, width=width, **VARIANTS[variant])
    with fake_gpu(TARGETS[target]):
        return tuple(build(launch, TARGETS[target]) for launch in launches.values())


POINTS = [
    *((target, variant, 1152) for target in APART for variant in ("plain", "half_pixel", "mean_of_raster", "fp32")),
    *((target, "mean_of_raster", 1152) for target in ALIKE),
    *(("sm_90", "raster", width) for width in (40, 300, 768, 1024, 1280)),
    ("sm_90", "row_major", 1152),
]


@pytest.mark.parametrize(("target", "variant", "width"), POINTS)
def test_builds_spill_nothing_and_fit(target: str, variant: str, width: int) -> None:
    limit = shared_memory(TARGETS[target])
    bad = [str(built) for built in _builds(target, variant, width) if built.spilled or built.shared > limit]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("variant", ("plain", "mean_of_raster", "fp32"))
def test_rows_move_by_16_bytes(variant: str) -> None:
    """Loads and stores of rows alike; what is left are grids, of which a program reads a few numbers."""
    for built in _builds("sm_90", variant, 1152):
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


def test_rotary_table_uses_no_approximate_functions() -> None:
    """Neither those of the special function unit nor local memory, which the device library's slow path takes."""
    (built,) = (built for built in _builds("sm_90", "plain", 1152) if built.launch.name == "_rotary_table_kernel")
    assert not {"sin.approx", "cos.approx", "ex2.approx"} & set(built.asm["ptx"].split())
    assert "MUFU.SIN" not in sass(built) and "MUFU.COS" not in sass(built) and "MUFU.EX2" not in sass(built)


def test_reference_reads_the_grid_back_and_the_op_does_not(device: str) -> None:
    """A guard on the point of it all: under fake tensors, whose values nobody knows, only the op can be called."""
    with FakeTensorMode():
        grid, table = torch.empty(2, 3, dtype=torch.int64), torch.empty(9, 8)
        assert pos_embed_interpolate(table, grid, 32).shape == (32, 8)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            references.pos_embed_interpolate(table, grid, 32)
