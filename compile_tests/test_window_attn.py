"""`vk::window_attn` under torch.compile, torch.export, AOTInductor, CUDA graphs, autocast and checkpointing."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_tests.attention import assert_right, assert_same_bits, attention_calls, results
from compile_tests.contract import (
    RUN_PACKAGE,
    assert_expected_inline,
    capture,
    capture_graphs,
    fake_gpu,
    opcheck_fully,
    recompiling_fails,
    run_forked,
    trace_kernels,
)
from torch_ops import window_attn
from torch_ops.testing import check, references
from torch_ops.testing.cases import LAYOUTS, WINDOW_ATTN, WindowAttnCase, WindowAttnInputs, cumulative, make_inputs

CASES = {case.name: case for case in WINDOW_ATTN}
LAYOUT_CASES = {layout: WindowAttnCase(layout, "strides", (40, 23), 2, 72, layout=layout) for layout in LAYOUTS}
# Small heads and fp32: opcheck compares calls of static and of symbolic size, which may launch different tiles of
# half types on a GPU, by tolerances too tight for those.
OPCHECKED = [
    replace(case, head_dim=16)
    for case in (
        *LAYOUT_CASES.values(),
        *(CASES[name] for name in ("ragged", "padding", "cross", "gqa", "window_left", "softcap")),
    )
]
BACKENDS = ("aot_eager", "inductor")
ROWS = torch.export.Dim("rows", min=2, max=65536)
BOUNDARIES = torch.export.Dim("boundaries", min=2, max=4097)
DYNAMIC = ({0: ROWS}, {0: ROWS}, {0: ROWS}, {0: BOUNDARIES})
# Rows and segments of calls that share one graph: none repeats, lengths are uneven, some segments are empty.
LENGTHS = ((40, 23), (100, 0, 7, 31), (5,) * 11, (300, 2), (0, 64, 64))


def _ids(case: WindowAttnCase) -> str:
    return case.name


def _inputs(case: WindowAttnCase, device: str, dtype: torch.dtype | None = None) -> WindowAttnInputs:
    """In fp32 on a CPU; in fp16 on a GPU, whose kernels for exact fp32 products take ten times as long to build."""
    return make_inputs(case, dtype or (torch.float16 if device == "cuda" else torch.float32), device)


def _packed(
    lengths: tuple[int, ...], device: str, head_dim: int = 72, dtype: torch.dtype | None = None
) -> WindowAttnInputs:
    return _inputs(WindowAttnCase("packed", "", lengths, 2, head_dim), device, dtype)


with_lse = partial(window_attn, return_lse=True)


@pytest.mark.parametrize("case", OPCHECKED, ids=_ids)
def test_opcheck_passes_forward(case: WindowAttnCase, device: str) -> None:
    inputs = _inputs(case, device, torch.float32)
    tensors = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    args = (*tensors, inputs.cu_seqlens, inputs.cu_seqlens_k)
    opcheck_fully(torch.ops.vk.window_attn.default, args, inputs.options)


@pytest.mark.parametrize("dlse", (True, False), ids=("dlse", "no_dlse"))
@pytest.mark.parametrize("case", OPCHECKED, ids=_ids)
def test_opcheck_passes_backward(case: WindowAttnCase, dlse: bool, device: str) -> None:
    inputs = _inputs(case, device, torch.float32)
    out, lse = inputs.call(torch.ops.vk.window_attn)
    args = (
        inputs.dout, inputs.dlse if dlse else None, inputs.q, inputs.k, inputs.v, out, lse,
        inputs.cu_seqlens, inputs.cu_seqlens_k,
    )  # fmt: skip
    opcheck_fully(torch.ops.vk.window_attn_backward.default, args, inputs.options)


def test_opcheck_passes_backward_of_zero_stride_gradients(device: str) -> None:
    inputs = _packed((40, 23), device, head_dim=16, dtype=torch.float32)
    out, lse = inputs.call(torch.ops.vk.window_attn)
    dout = out.new_ones(()).expand_as(out)
    args = (dout, None, inputs.q, inputs.k, inputs.v, out, lse, inputs.cu_seqlens)
    opcheck_fully(torch.ops.vk.window_attn_backward.default, args)


def test_graphs_hold_only_vk_ops(device: str) -> None:
    function, graphs = capture_graphs(partial(window_attn, causal=True))
    inputs = _packed((40, 23), device)
    q, k, v = (tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    function(q, k, v, inputs.cu_seqlens).backward(inputs.dout)
    assert_expected_inline(graphs.dynamo, """vk.window_attn.default\n""")
    if device == "cpu":
        assert_expected_inline(graphs.forward, """vk.window_attn.default\n""")
        assert_expected_inline(graphs.backward, """vk.window_attn_backward.default\n""")


def test_graphs_for_cuda_hold_only_allocations_and_kernels() -> None:
    with fake_gpu() as mode:
        with mode:
            calls = attention_calls()
        forward, backward = (trace_kernels(getattr(torch.ops.vk, op), *call).targets for op, call in calls.items())
    assert_expected_inline(
        forward,
        """\
aten.empty_like.default
aten.new_empty.default
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
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
""",
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ("ragged", "cross", "gqa", "padding", "qkv_view", "odd_strides", "column_strided"))
def test_compiled_equals_eager(name: str, backend: str, device: str) -> None:
    inputs = _inputs(CASES[name], device)
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=False, backend=backend)
    assert_same_bits(results(compiled, inputs), results(with_lse, inputs))


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("lengths", ((40, 0, 23), (300, 150)), ids=str)
def test_compiled_equals_eager_without_lse(lengths: tuple[int, ...], dynamic: bool, device: str) -> None:
    inputs = _packed(lengths, device)
    compiled = torch.compile(window_attn, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        assert torch.equal(inputs.call(compiled), inputs.call(window_attn))
    assert torch.equal(inputs.call(compiled), inputs.call(with_lse)[0])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_compiled_equals_eager_in_half_types(dtype: torch.dtype, device: str) -> None:
    inputs = _inputs(CASES["image"], device, dtype)
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=False)
    assert_same_bits(results(compiled, inputs), results(with_lse, inputs))


def _block_of(attend: Callable[..., Any], x: Tensor, weight: Tensor, cu: Tensor) -> Tensor:
    q, k, v = (x @ weight).unflatten(1, (3, 2, -1)).unbind(1)
    out, lse = attend(q, k, v, cu, causal=True)
    return x + torch.nn.functional.gelu(out.flatten(1)) * lse.mean(0)[:, None].sigmoid()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_block_agrees_with_ops_around(backend: str, device: str) -> None:
    tensors = torch.randn(63, 32, device=device), torch.randn(32, 96, device=device) * 32**-0.5
    cu = cumulative((40, 23), device)

    def run(block: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        out = block(*leaves, cu)
        dx, dweight = torch.autograd.grad(out.square().sum(), leaves)
        return {"out": out, "dx": dx, "dweight": dweight}

    block = partial(_block_of, with_lse)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    check(run(compiled), run(block), run(partial(_block_of, references.window_attn), torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_never_recompile(backend: str, device: str) -> None:
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for lengths in LENGTHS:
            inputs = _packed(lengths, device)
            assert_right(results(compiled, inputs), inputs)


def test_marked_dimensions_never_recompile(device: str) -> None:
    function, graphs = capture_graphs(with_lse, dynamic=None)
    with recompiling_fails():
        for lengths in LENGTHS:
            inputs = _packed(lengths, device)
            assert_right(results(function, inputs, marked=True), inputs)
    assert graphs.compiled == 1
    assert_expected_inline(graphs.dynamo, """vk.window_attn.default\n""")


def test_static_calls_become_dynamic_after_one_recompilation(device: str) -> None:
    function, graphs = capture_graphs(with_lse, dynamic=None)
    for lengths in LENGTHS:
        inputs = _packed(lengths, device)
        inputs.call(function)
    assert graphs.compiled == 2


class _Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return window_attn(q, k, v, cu_seqlens, window_left=30, softcap=20.0, return_lse=True)


def _call_args(lengths: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    inputs = _packed(lengths, device)
    return inputs.q, inputs.k, inputs.v, inputs.cu_seqlens


def _export(device: str) -> torch.export.ExportedProgram:
    return torch.export.export(_Attention(), _call_args((40, 23), device), dynamic_shapes=DYNAMIC)


def test_exported_program_survives_saving_and_runs_at_other_sizes(device: str) -> None:
    file = io.BytesIO()
    torch.export.save(_export(device), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for lengths in LENGTHS:
        args = _call_args(lengths, device)
        for actual, expected in zip(loaded(*args), _Attention()(*args), strict=True):
            assert torch.equal(actual, expected)


class _WithoutLse(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return window_attn(q, k, v, cu_seqlens)


def test_program_exported_without_gradients_has_them(device: str) -> None:
    args = _call_args((40, 23), device)
    with torch.no_grad():
        program = torch.export.export(_WithoutLse(), args, dynamic_shapes=DYNAMIC)
    grads = []
    for function in (program.module(), _WithoutLse()):
        q, k, v = (tensor.clone().requires_grad_() for tensor in args[:3])
        out = function(q, k, v, args[3])
        grads.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    assert all(torch.equal(exported, eager) for exported, eager in zip(*grads, strict=True))


@pytest.mark.parametrize("decomposed", (False, True), ids=("as_exported", "decomposed"))
def test_exported_graph_keeps_the_op_whole(decomposed: bool, device: str) -> None:
    program = _export(device)
    graph = (program.run_decompositions() if decomposed else program).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["vk.window_attn.default", "<built-in function getitem>", "<built-in function getitem>"]


def _contents(package: str) -> bytes:
    with zipfile.ZipFile(package) as archive:
        return b"".join(map(archive.read, archive.namelist()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="loading any AOTInductor package fails on the GPU machines")
def test_aoti_package_runs_in_a_process_that_only_imports_the_library(tmp_path: Path) -> None:
    package = torch._inductor.aoti_compile_and_package(_export("cpu"), package_path=str(tmp_path / "attention.pt2"))
    assert b"vk::window_attn" in _contents(package)
    calls = [(args, _Attention()(*args)) for args in (_call_args(lengths, "cpu") for lengths in LENGTHS)]
    torch.save(calls, tmp_path / "calls.pt")
    paths = (package, str(tmp_path / "calls.pt"))
    assert run_forked(RUN_PACKAGE.format(paths=paths)) == "equal\n"


@pytest.mark.gpu
def test_aoti_package_for_cuda_holds_the_kernel_and_not_the_op(tmp_path: Path) -> None:
    package = torch._inductor.aoti_compile_and_package(_export("cuda"), package_path=str(tmp_path / "attention.pt2"))
    contents = _contents(package)
    assert b"_attention_fwd_kernel" in contents
    assert b"vk::window_attn" not in contents


@pytest.mark.gpu
@pytest.mark.parametrize("at_capture, at_replay", [((64,) * 8, (200, 0, 1, 99, 12, 0, 150, 50)), ((512,), (300,))])
def test_cuda_graph_replays_other_segment_lengths(at_capture: tuple[int, ...], at_replay: tuple[int, ...]) -> None:
    rows = sum(at_capture)
    inputs = _inputs(WindowAttnCase("static", "", at_capture, 4, 72), "cuda", torch.bfloat16)
    q, k, v, dout, cu = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.cu_seqlens)
    fresh = make_inputs(WindowAttnCase("fresh", "", (rows,), 4, 72), torch.bfloat16, "cuda", seed=1)

    def step() -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = window_attn(*leaves, cu)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    graph, captured = capture(step)

    for static, value in zip((q, k, v, dout), (fresh.q, fresh.k, fresh.v, fresh.dout), strict=True):
        static.copy_(value)
    cu.copy_(cumulative(at_replay, "cuda"))
    for tensor in captured:
        tensor.fill_(torch.nan)
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_reduce_overhead_replays_cuda_graphs_for_any_segments() -> None:
    compiled = torch.compile(with_lse, fullgraph=True, mode="reduce-overhead", dynamic=False)
    counters.clear()
    for lengths in ((64,) * 8, (200, 0, 1, 99, 12, 0, 150, 50), (512, *(0,) * 7), (64,) * 8):
        inputs = _inputs(WindowAttnCase("graphed", "", lengths, 4, 72), "cuda", torch.bfloat16)
        for _ in range(2):
            torch.compiler.cudagraph_mark_step_begin()
            actual = {name: tensor.clone() for name, tensor in results(compiled, inputs).items()}
        assert_same_bits(actual, results(with_lse, inputs))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0


FIRST_CALL = """
import torch, torch_ops
q, k, v = torch.randn(3, 63, 2, 72, device={device!r}).to({dtype}).unbind()
cu = torch.tensor([0, 40, 63], dtype=torch.int32, device={device!r})
{call}
assert torch.equal(out, torch_ops.window_attn(q, k, v, cu))
print("equal")
"""


@pytest.mark.parametrize(
    "call",
    (
        "out = torch.compile(torch_ops.window_attn, fullgraph=True)(q, k, v, cu)",
        "q.requires_grad_(); out = torch.compile(torch_ops.window_attn, fullgraph=True)(q, k, v, cu); "
        "out.sum().backward(); assert q.grad.abs().sum() > 0",
        "out, lse = torch.ops.vk.window_attn(q, k, v, cu)",
    ),
    ids=("compiled", "compiled_with_backward", "torch.ops"),
)
def test_first_call_of_a_process_works(call: str, device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float32
    assert run_forked(FIRST_CALL.format(call=call, device=device, dtype=dtype)) == "equal\n"


def _layout(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in tensors]


def _both_ops(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    out, lse = torch.ops.vk.window_attn(q, k, v, cu)
    return out, lse, *torch.ops.vk.window_attn_backward(dout, None, q, k, v, out, lse, cu)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_meta_outputs_have_the_strides_of_real_ones(layout: str, device: str) -> None:
    inputs = _inputs(LAYOUT_CASES[layout], device)
    args = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.dout)
    real = _both_ops(*args)
    with FakeTensorMode() as mode:
        fake = _both_ops(*map(mode.from_tensor, args))
    meta = _both_ops(*(tensor.to("meta") for tensor in args))
    assert _layout(fake) == _layout(real)
    assert _layout(meta) == _layout(real)
    assert {tensor.device.type for tensor in fake} == {device}
    assert {tensor.device.type for tensor in meta} == {"meta"}


def test_functionalized_call_equals_eager(device: str) -> None:
    inputs = _packed((40, 23), device)
    args = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.dout)
    for actual, expected in zip(torch.func.functionalize(_both_ops)(*args), _both_ops(*args), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", (None, *BACKENDS), ids=("eager", *BACKENDS))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_autocast_follows_the_dtype_of_its_region(dtype: torch.dtype, backend: str | None, device: str) -> None:
    def in_region(*args: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, dtype):
            return window_attn(*args, return_lse=True)

    inputs = _packed((40, 23), device, dtype=torch.float32)
    q, k, v = (tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    function = torch.compile(in_region, fullgraph=True, backend=backend) if backend else in_region
    out, lse = function(q, k, v, inputs.cu_seqlens)
    expected, expected_lse = with_lse(*(tensor.detach().to(dtype) for tensor in (q, k, v)), inputs.cu_seqlens)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    out.sum().backward()
    assert all(tensor.grad.dtype is torch.float32 and tensor.grad.abs().sum() > 0 for tensor in (q, k, v))


@pytest.mark.parametrize("backend", (None, *BACKENDS), ids=("eager", *BACKENDS))
def test_checkpoint_policy_sees_and_saves_the_named_op(backend: str | None, device: str) -> None:
    """With the op saved, the backward recomputes what is around it and not the op itself."""
    seen: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(op)
        saved = op is torch.ops.vk.window_attn.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return window_attn(q.sin(), k.sin(), v.sin(), cu).cos()

    def exact_layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return references.window_attn(q.sin(), k.sin(), v.sin(), cu)[0].cos()

    def checkpointed(*args: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)

    inputs = _packed((40, 23), device, head_dim=16, dtype=torch.float32)
    args = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)
    leaves = [tensor.requires_grad_() for tensor in args[:3]]
    expected = torch.autograd.grad(layer(*args), leaves, inputs.dout)
    function = torch.compile(checkpointed, fullgraph=True, backend=backend) if backend else checkpointed
    actual = torch.autograd.grad(function(*args), leaves, inputs.dout)
    assert torch.ops.vk.window_attn.default in seen
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(exact_layer(*exact, inputs.cu_seqlens), exact, inputs.dout.double())
    check(*(dict(zip(("dq", "dk", "dv"), grads, strict=True)) for grads in (actual, expected, truth)))


def test_vmap_equals_a_loop(device: str) -> None:
    inputs = _packed((40, 23), device)
    qs = torch.stack([inputs.q, inputs.q.flip(0), inputs.q * 2])
    call = partial(window_attn, k=inputs.k, v=inputs.v, cu_seqlens=inputs.cu_seqlens)
    batched = torch.func.vmap(lambda q: call(q))(qs)
    assert torch.equal(batched, torch.stack([call(q) for q in qs]))


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_forward_mode_differentiation_is_refused(compiled: bool, device: str) -> None:
    inputs = _packed((40, 23), device)

    def derivative(q: Tensor) -> Any:
        call = partial(window_attn, k=inputs.k, v=inputs.v, cu_seqlens=inputs.cu_seqlens)
        return torch.func.jvp(lambda q: call(q), (q,), (torch.ones_like(q),))

    function = torch.compile(derivative, fullgraph=True, backend="aot_eager") if compiled else derivative
    with pytest.raises(Exception, match="vk::window_attn has no forward-mode derivative"):
        function(inputs.q)


def test_functional_gradient_is_right_or_refused(device: str) -> None:
    """torch.func.grad over ops with registered autograd is PyTorch's to support; it must not be silently wrong."""
    inputs = _packed((40, 23), device)
    call = partial(window_attn, k=inputs.k, v=inputs.v, cu_seqlens=inputs.cu_seqlens)
    try:
        gradient = torch.func.grad(lambda q: call(q).sum())(inputs.q)
    except NotImplementedError as error:
        assert "vk::window_attn has no gradient within torch.func" in str(error)
    else:
        leaf = inputs.q.requires_grad_()
        call(leaf).sum().backward()
        assert torch.equal(gradient, leaf.grad)


@pytest.mark.parametrize(
    ("compiled", "error", "message"),
    [
        (False, NotImplementedError, "vk::window_attn_backward has no derivative"),
        (True, RuntimeError, "does not currently support double backward"),
    ],
)
def test_double_backward_is_refused(compiled: bool, error: type[Exception], message: str, device: str) -> None:
    call = torch.compile(window_attn, fullgraph=True) if compiled else window_attn
    inputs = _packed((40, 23), device)
    q = inputs.q.requires_grad_()
    (gradient,) = torch.autograd.grad(
        call(q, inputs.k, inputs.v, inputs.cu_seqlens).square().sum(), q, create_graph=True
    )
    with pytest.raises(error, match=message):
        gradient.sum().backward()
