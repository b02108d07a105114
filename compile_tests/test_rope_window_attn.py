"""`vk::rope_window_attn` under torch.compile, torch.export, CUDA graphs, autocast; and its pass built for every target.

What the attention core does in graphs is tested by compile_tests/test_window_attn.py.
"""

import io
import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.attention import assert_right, assert_same_bits, is_short, results
from compile_tests.contract import (
    APART,
    RUN_PACKAGE,
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
    run_forked,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.rope import ROPE, VARIANTS, rope_calls, rope_launches
from compile_tests.test_aot import TARGETS
from compile_tests.test_registry import SHORT_WRITES, WRITES
from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.rows import Launch
from torch_ops import rope_window_attn
from torch_ops._core.registry import OPS
from torch_ops.testing import check, references
from torch_ops.testing.cases import (
    LAYOUTS,
    TABLES,
    RopeWindowAttnInputs,
    WindowAttnCase,
    cumulative,
    make_projected_rope_inputs,
    make_rope_inputs,
)

BACKENDS = ("aot_eager", "inductor")
CASE = WindowAttnCase("small", "", (40, 23), 4, 16, num_k_heads=2, padding=3, options={"causal": True})
TURNED = {"q_out_ptr", "k_out_ptr"}
# Rows and segments of calls that share one graph: none repeats, lengths are uneven, some segments are empty.
LENGTHS = ((40, 23), (100, 0, 7, 31), (5,) * 11, (300, 2), (0, 64, 64))
with_lse = partial(rope_window_attn, return_lse=True)


def _inputs(
    device: str, tables: str = "full", dtype: torch.dtype | None = None, **changes: Any
) -> RopeWindowAttnInputs:
    """In fp32 on a CPU; in fp16 on a GPU, whose kernels for exact fp32 products take ten times as long to build."""
    dtype = dtype or (torch.float16 if device == "cuda" else torch.float32)
    return make_rope_inputs(replace(CASE, **changes), dtype, device, tables=tables)


def _args(inputs: RopeWindowAttnInputs) -> tuple[Any, ...]:
    return inputs.q, inputs.k, inputs.v, *inputs.places


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tables", ("full", "half"))
def test_opcheck_passes_forward(tables: str, layout: str, device: str) -> None:
    inputs = _inputs(device, tables, torch.float32, layout=layout)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.requires_grad_()
    opcheck_fully(torch.ops.vk.rope_window_attn.default, _args(inputs), inputs.options)


@pytest.mark.parametrize("dlse", (True, False), ids=("dlse", "no_dlse"))
@pytest.mark.parametrize("zero_strides", (True, False), ids=("expanded", "dense"))
@pytest.mark.parametrize("tables", ("apart", "column_strided"))
def test_opcheck_passes_backward(tables: str, zero_strides: bool, dlse: bool, device: str) -> None:
    inputs = _inputs(device, tables, torch.float32, k_lengths=(23, 40))
    out, lse = inputs.call(torch.ops.vk.rope_window_attn)
    dout = out.new_ones(()).expand_as(out) if zero_strides else inputs.dout
    args = (dout, inputs.dlse if dlse else None, inputs.q, inputs.k, inputs.v, out, lse, *inputs.places)
    opcheck_fully(torch.ops.vk.rope_window_attn_backward.default, args, inputs.options)


def test_graphs_hold_only_vk_ops(device: str) -> None:
    function, graphs = capture_graphs(rope_window_attn)
    inputs = _inputs(device)
    leaves = {name: getattr(inputs, name).requires_grad_() for name in ("q", "k", "v")}
    inputs.call(function, **leaves).backward(inputs.dout)
    assert_expected_inline(graphs.dynamo, """vk.rope_window_attn.default\n""")
    if device == "cpu":
        assert_expected_inline(graphs.forward, """vk.rope_window_attn.default\n""")
        assert_expected_inline(graphs.backward, """vk.rope_window_attn_backward.default\n""")


def test_graphs_for_cuda_hold_only_allocations_and_kernels() -> None:
    with fake_gpu() as mode:
        with mode:
            calls = rope_calls()
        forward, backward = (trace_kernels(OPS[op].overload, *call).targets for op, call in calls.items())
    assert_expected_inline(
        forward,
        """\
aten.empty_like.default
aten.new_empty.default
aten.empty_like.default
aten.empty_like.default
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
""",
    )
    assert_expected_inline(
        backward,
        """\
aten.empty_like.default
aten.empty_like.default
aten.empty_like.default
aten.empty_like.default
aten.empty_like.default
triton_kernel_wrapper_functional
aten.empty_like.default
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
""",
    )


def _expected_writes(op: str, short: bool) -> dict[str, set[str]]:
    """Of the rotation, of the core; the backward's rotation back is a second launch of the same kernel."""
    core = (SHORT_WRITES if short else WRITES)[op.removeprefix("rope_")]
    return {"_rope_kernel": TURNED, **core}


def _trace(op: str, **variant: Any) -> Any:
    with fake_gpu() as mode:
        with mode:
            args, options = rope_calls(**variant)[op]
        return trace_kernels(OPS[op].overload, args, options)


def _assert_traced(trace: Any, op: str, short: bool) -> None:
    kernels = trace.kernels
    if op.endswith("_backward"):
        back, kernels = kernels[-1], kernels[:-1]
        assert back.name == "_rope_kernel" and set(back.writes) == TURNED
    assert_kernels(replace(trace, kernels=kernels), _expected_writes(op, short))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", ROPE)
def test_traced_kernels_are_all_there_and_write_only_outputs(op: str, variant: str) -> None:
    short = is_short(variant) or VARIANTS[variant].get("rows") == 100
    _assert_traced(_trace(op, **VARIANTS[variant]), op, short)


@pytest.mark.parametrize("op", ROPE)
def test_traces_of_symbolic_sizes_hold_for_all_sizes(op: str) -> None:
    with fake_gpu(name="h200") as mode:
        with mode:
            rows, segments = symbolic_size(mode, "rows", 100), symbolic_size(mode, "segments", 3)
            args, options = rope_calls(rows=rows, segments=segments)[op]
        _assert_traced(trace_kernels(OPS[op].overload, args, options), op, False)
    guards = [str(guard.expr) for guard in mode.shape_env.guards]
    assert not guards and not mode.shape_env.replacements


@pytest.mark.parametrize("ahead_of_time", [False, True])
@pytest.mark.parametrize("op", ROPE)
def test_on_the_hopper_path_the_core_is_one_opaque_launch_but_in_packages(op: str, ahead_of_time: bool) -> None:
    with fake_gpu(name="h200", path="hopper") as mode, V.set_aot_compilation(ahead_of_time):
        with mode:
            rows, segments = symbolic_size(mode, "rows", 100), symbolic_size(mode, "segments", 3)
            args, options = rope_calls(rows=rows, segments=segments)[op]
        trace = trace_kernels(OPS[op].overload, args, options)
    assert ("auto_functionalized" in trace.targets) == (not ahead_of_time)
    if ahead_of_time:
        _assert_traced(trace, op, False)
    else:
        count = 2 if op.endswith("_backward") else 1
        assert [(kernel.name, set(kernel.writes)) for kernel in trace.kernels] == [("_rope_kernel", TURNED)] * count
    assert not mode.shape_env.guards and not mode.shape_env.replacements


@pytest.mark.parametrize("op", ROPE)
def test_kernels_enter_the_key_of_compiled_artefacts(op: str) -> None:
    found = {kernel.fn.__name__ for kernel in get_triton_kernels_for_op(f"vk::{op}")}
    # Packed and dense calls share their plans, so kernels of both are found.
    assert found >= {*_expected_writes(op, False), *_expected_writes(op, True)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", ROPE)
def test_launches_carry_nothing_that_compilation_drops(op: str, variant: str) -> None:
    launches = rope_launches(op, **VARIANTS[variant])
    turns = [launch for launch in launches if launch.name == "_rope_kernel"]
    assert [launch.arguments["BACK"] for launch in turns] == ([False, True] if op.endswith("_backward") else [False])
    assert launches[0] is turns[0] and launches[-1 if op.endswith("_backward") else 0] is turns[-1]
    for launch in launches:
        assert_plain_launch(launch)


def test_gradients_are_turned_where_they_lie() -> None:
    arguments = rope_launches("rope_window_attn_backward")[-1].arguments
    assert arguments["q_ptr"] is arguments["q_out_ptr"] and arguments["k_ptr"] is arguments["k_out_ptr"]


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager(backend: str, tables: str, device: str) -> None:
    inputs = _inputs(device, tables)
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=False, backend=backend)
    assert_same_bits(results(compiled, inputs), results(with_lse, inputs))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_compiled_equals_eager_in_half_types_and_without_lse(dtype: torch.dtype, device: str) -> None:
    inputs = make_projected_rope_inputs(replace(CASE, head_dim=72), dtype, device)
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=False)
    assert_same_bits(results(compiled, inputs), results(with_lse, inputs))
    without = torch.compile(rope_window_attn, fullgraph=True, dynamic=False)
    assert torch.equal(inputs.call(without), inputs.call(with_lse)[0])


def _block_of(attend: Any, x: Tensor, weight: Tensor, *places: Tensor) -> Tensor:
    q, k, v = (x @ weight).unflatten(1, (3, 2, -1)).unbind(1)
    out, lse = attend(q, k, v, *places)
    return x + torch.nn.functional.gelu(out.flatten(1)) * lse.mean(0)[:, None].sigmoid()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_block_agrees_with_ops_around(backend: str, device: str) -> None:
    tensors = torch.randn(63, 32, device=device), torch.randn(32, 96, device=device) * 32**-0.5
    angles = torch.randn(63, 8, device=device)
    places = angles.cos(), angles.sin(), cumulative((40, 23), device)

    def run(block: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        out = block(*leaves, *places)
        dx, dweight = torch.autograd.grad(out.square().sum(), leaves)
        return {"out": out, "dx": dx, "dweight": dweight}

    block = partial(_block_of, with_lse)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    check(run(compiled), run(block), run(partial(_block_of, references.rope_window_attn), torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_never_recompile(backend: str, device: str) -> None:
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for lengths in LENGTHS:
            inputs = _inputs(device, lengths=lengths)
            assert_right(results(compiled, inputs), inputs)


def test_marked_dimensions_never_recompile(device: str) -> None:
    function, graphs = capture_graphs(with_lse, dynamic=None)
    with recompiling_fails():
        for lengths in LENGTHS:
            inputs = _inputs(device, lengths=lengths)
            assert_right(results(function, inputs, marked=True), inputs)
    assert graphs.compiled == 1


class _Attention(torch.nn.Module):
    def forward(self, *args: Any) -> Any:
        return rope_window_attn(*args, window_left=30)


@pytest.mark.parametrize("tables", ("full", "half"))
def test_exported_program_keeps_the_op_survives_saving_and_has_gradients(tables: str, device: str) -> None:
    rows, boundaries = torch.export.Dim("rows", min=2, max=65536), torch.export.Dim("boundaries", min=2, max=4097)
    args = _args(_inputs(device, tables))[:-1]
    with torch.no_grad():
        shapes = ((*({0: rows},) * 5, {0: boundaries}),)
        program = torch.export.export(_Attention(), args, dynamic_shapes=shapes)
    called = [str(node.target) for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert called[0] == "vk.rope_window_attn.default" and all("getitem" in name for name in called[1:])
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for lengths in LENGTHS:
        args = _args(_inputs(device, tables, lengths=lengths))[:-1]
        grads = []
        for function in (loaded, _Attention()):
            leaves = [tensor.detach().clone().requires_grad_() for tensor in args[:3]]
            out = function(*leaves, *args[3:])
            grads.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        assert all(torch.equal(exported, eager) for exported, eager in zip(*grads, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="loading any AOTInductor package fails on the GPU machines")
def test_aoti_package_runs_in_a_process_that_only_imports_the_library(tmp_path: Any) -> None:
    args = _args(_inputs("cpu"))[:-1]
    with torch.no_grad():
        program = torch.export.export(_Attention(), args)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    torch.save([(args, (_Attention()(*args),))], tmp_path / "calls.pt")
    assert run_forked(RUN_PACKAGE.format(paths=(package, str(tmp_path / "calls.pt")))) == "equal\n"


@pytest.mark.gpu
def test_cuda_graph_replays_other_values_and_lengths() -> None:
    case = WindowAttnCase("static", "", (64,) * 8, 4, 72)
    inputs, fresh = (make_projected_rope_inputs(case, torch.bfloat16, "cuda", seed) for seed in (0, 1))

    def step() -> tuple[Tensor, ...]:
        leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
        out = inputs.call(rope_window_attn, **leaves)
        return out.detach(), *torch.autograd.grad(out, tuple(leaves.values()), inputs.dout)

    graph, captured = capture(step)
    for name in ("q", "k", "v", "cos", "sin", "dout"):
        getattr(inputs, name).copy_(getattr(fresh, name))
    inputs.cu_seqlens.copy_(cumulative((200, 0, 1, 99, 12, 0, 150, 50), "cuda"))
    for tensor in captured:
        tensor.fill_(torch.nan)
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        assert torch.equal(actual, expected)


def _layout(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


def _both_ops(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *places: Any) -> tuple[Tensor, ...]:
    out, lse = torch.ops.vk.rope_window_attn(q, k, v, *places)
    return out, lse, *torch.ops.vk.rope_window_attn_backward(dout, None, q, k, v, out, lse, *places)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_meta_and_functionalized_outputs_are_as_real_ones(layout: str, device: str) -> None:
    inputs = _inputs(device, layout=layout)
    args = (inputs.dout, *_args(inputs)[:-1])
    real = _both_ops(*args)
    with FakeTensorMode() as mode:
        fake = _both_ops(*map(mode.from_tensor, args))
    meta = _both_ops(*(tensor.to("meta") for tensor in args))
    assert _layout(fake) == _layout(real) == _layout(meta)
    functional = torch.func.functionalize(_both_ops)(*args)
    assert all(torch.equal(one, other) for one, other in zip(functional, real, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_in_a_compiled_region_leaves_the_tables(backend: str, device: str) -> None:
    def in_region(*args: Any, **options: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return with_lse(*args, **options)

    inputs = _inputs(device, dtype=torch.float32)
    out, lse = inputs.call(torch.compile(in_region, fullgraph=True, backend=backend))
    cast = {name: getattr(inputs, name).bfloat16() for name in ("q", "k", "v")}
    expected, expected_lse = inputs.call(with_lse, **cast)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_vmap_equals_a_loop(device: str) -> None:
    inputs = _inputs(device)
    qs = torch.stack([inputs.q, inputs.q.flip(0)])
    batched = torch.func.vmap(lambda q: inputs.call(rope_window_attn, q=q))(qs)
    assert torch.equal(batched, torch.stack([inputs.call(rope_window_attn, q=q) for q in qs]))


@dataclass(frozen=True)
class Point:
    """The rotation and the rotation back on one target."""

    target: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    half: bool = False
    head_major: bool = False
    num_k_heads: int = 16

    def __str__(self) -> str:
        words = [self.target, f"d{self.head_dim}", str(self.dtype).removeprefix("torch.")]
        words += ["half"] * self.half + ["head_major"] * self.head_major + [f"k{self.num_k_heads}"]
        return "-".join(words)


POINTS = [
    *(Point(target, 72) for target in TARGETS),
    *(Point(target, 128) for target in APART),
    *(Point("sm_90", head_dim, half=True) for head_dim in (8, 64, 72, 80, 256)),
    *(Point(target, 72, torch.float32) for target in ("sm_80", "sm_90", "gfx942")),
    Point("sm_90", 80, torch.float16, head_major=True),
    Point("sm_90", 128, num_k_heads=2),
]


@lru_cache
def _builds(point: Point) -> tuple[Build, ...]:
    target = TARGETS[point.target]
    launches = rope_launches(
        "rope_window_attn_backward", target, num_heads=16, num_k_heads=point.num_k_heads, head_dim=point.head_dim,
        dtype=point.dtype, half=point.half, head_major=point.head_major,
    )  # fmt: skip
    with fake_gpu(target):
        return tuple(build(launch, target) for launch in launches if launch.name == "_rope_kernel")


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_nothing_spills_and_shared_memory_is_within_the_target(point: Point) -> None:
    limit = shared_memory(TARGETS[point.target])
    builds = _builds(point)
    assert len(builds) == 2 and all(built.spilled == 0 and built.shared <= limit for built in builds), list(
        map(str, builds)
    )


# Of a pair's columns a thread has as many side by side as divide D / 2: bytes of its loads and stores.
@pytest.mark.parametrize(
    ("head_dim", "dtype", "bits"),
    [(64, torch.bfloat16, 128), (80, torch.bfloat16, 128), (128, torch.float16, 128), (72, torch.bfloat16, 64),
     (8, torch.bfloat16, 64), (72, torch.float32, 128), (80, torch.float32, 128)],
)  # fmt: skip
def test_loads_and_stores_are_as_wide_as_half_a_head_allows(head_dim: int, dtype: torch.dtype, bits: int) -> None:
    for built in _builds(Point("sm_90", head_dim, dtype)):
        accesses = re.findall(r"(ld|st)\.global(\.v\d)?\.b(\d+)", built.asm["ptx"])
        widths = {(what, int(lanes[2:] or 1) * int(width)) for what, lanes, width in accesses}
        assert {width for what, width in widths if what == "st"} == {bits}
        # 32 bits at once are boundaries alone; tables of fp32, that several heads share, come 8 or 16 bytes at once.
        assert {32, bits} <= {width for what, width in widths if what == "ld"} <= {32, 64, 128}


def test_no_candidate_has_less_than_an_element_for_each_thread() -> None:
    """Turned where it lies, an element must belong to one thread."""
    assert CANDIDATES["rope"] and all(one.block_m * one.block_n >= 32 * one.num_warps for one in CANDIDATES["rope"])
    assert {Launch(4, 256, 4, 1), Launch(16, 256, 8, 1)} <= set(CANDIDATES["rope"])
