"""`vk::attention` under torch.compile, torch.export, CUDA graphs, autocast, and built for every kind of GPU."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ops
from compile_tests.attention import (
    HOPPER_KERNELS,
    assert_right,
    assert_same_bits,
    attention_launches,
    hopper_launches,
)
from compile_tests.contract import (
    SM90,
    TARGETS,
    Build,
    Recorder,
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
    sampled,
    sass,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.dense import FEW, VARIANTS, WRITES, dense_calls, dense_launches, writes_of
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Gpu
from torch_ops import attention
from torch_ops._attention import hopper_dkdv as attention_dense_keys
from torch_ops._attention import parts as attention_parts
from torch_ops._attention.hopper import describe, folded
from torch_ops._attention.options import AttentionOptions
from torch_ops._core.registry import OPS
from torch_ops.testing.cases import DENSE, DENSE_LAYOUTS, DenseCase, DenseInputs, make_dense_inputs

CASES = {case.name: case for case in DENSE}
# Small heads and fp32, as of window_attn.
OPCHECKED = [
    *(replace(CASES[name], head_dim=16) for name in ("batch", "causal_wide", "gqa", "sliding", "softcap", "all_steps")),
    *(DenseCase(layout, "strides", 2, 2, 30, 16, layout=layout) for layout in DENSE_LAYOUTS),
]
# Of fp32 in a half type: on a Hopper GPU of the kernel that casts as it goes, and of copies.
DOWNCASTS = (
    DenseCase("downcast", "", 2, 4, 140, 64, num_k_heads=2, options={"causal": True, "sinks": True}),
    DenseCase("downcast_qkv_view", "", 2, 2, 140, 72, layout="qkv_view"),
    DenseCase("downcast_steps", "", 2, 2, 40, 16, layout="column_strided", options={"softcap": 5.0, "dropout_p": 0.1}),
)
BACKENDS = ("aot_eager", "inductor")
# Batch, rows and keys of calls that share one graph, none of them the number of heads.
SIZES = ((3, 40, 23), (4, 100, 150), (5, 17, 64), (7, 300, 31))
with_lse = partial(attention, return_lse=True)


def _ids(case: DenseCase) -> str:
    return case.name


def _inputs(case: DenseCase, device: str, dtype: torch.dtype | None = None) -> DenseInputs:
    return make_dense_inputs(case, dtype or (torch.float16 if device == "cuda" else torch.float32), device)


def _sized(batch: int, rows: int, keys: int, device: str, dtype: torch.dtype | None = None) -> DenseInputs:
    return _inputs(DenseCase("sized", "", batch, 2, rows, 72, k_length=keys), device, dtype)


def _results(function: Any, inputs: DenseInputs) -> dict[str, Tensor]:
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    out, lse = inputs.call(function, **leaves)
    torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
    return {"out": out, "lse": lse, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.parametrize("case", OPCHECKED, ids=_ids)
def test_opcheck_passes_forward(case: DenseCase, device: str) -> None:
    inputs = _inputs(case, device, torch.float32)
    tensors = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    opcheck_fully(torch.ops.vk.attention.default, tuple(tensors), inputs.options)


@pytest.mark.parametrize("case", DOWNCASTS, ids=_ids)
def test_opcheck_passes_with_a_compute_dtype(case: DenseCase, device: str) -> None:
    inputs = _inputs(case, device, torch.float32)
    options = {**inputs.options, "compute_dtype": torch.float16}
    tensors = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    opcheck_fully(torch.ops.vk.attention.default, tuple(tensors), options)
    out, lse = torch.ops.vk.attention(inputs.q, inputs.k, inputs.v, **options)
    args = (inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse)
    options.pop("sinks", None)
    opcheck_fully(torch.ops.vk.attention_backward.default, args, options)


@pytest.mark.parametrize("dlse", (True, False), ids=("dlse", "no_dlse"))
@pytest.mark.parametrize("case", OPCHECKED, ids=_ids)
def test_opcheck_passes_backward(case: DenseCase, dlse: bool, device: str) -> None:
    inputs = _inputs(case, device, torch.float32)
    out, lse = inputs.call(torch.ops.vk.attention)
    args = (inputs.dout, inputs.dlse if dlse else None, inputs.q, inputs.k, inputs.v, out, lse)
    options = {name: value for name, value in inputs.options.items() if name != "sinks"}
    opcheck_fully(torch.ops.vk.attention_backward.default, args, options)


def test_graphs_hold_only_vk_ops(device: str) -> None:
    function, graphs = capture_graphs(partial(attention, causal=True))
    inputs = _sized(2, 40, 23, device)
    q, k, v = (tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    function(q, k, v).backward(inputs.dout)
    assert_expected_inline(graphs.dynamo, """vk.attention.default\n""")
    if device == "cpu":
        assert_expected_inline(graphs.forward, """vk.attention.default\n""")
        assert_expected_inline(graphs.backward, """vk.attention_backward.default\n""")


def test_graphs_for_cuda_hold_only_allocations_and_kernels() -> None:
    with fake_gpu() as mode:
        with mode:
            calls = dense_calls()
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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", WRITES)
def test_traced_kernels_are_all_there_and_write_only_outputs(op: str, variant: str) -> None:
    with fake_gpu() as mode:
        with mode:
            args, options = dense_calls(**VARIANTS[variant])[op]
        assert_kernels(trace_kernels(OPS[op].overload, args, options), writes_of(op, variant))


@pytest.mark.parametrize("path", ("portable", "hopper", "packaged"))
@pytest.mark.parametrize("variant", ("plain", "downcast"))
@pytest.mark.parametrize("op", WRITES)
def test_traces_of_symbolic_sizes_hold_for_all_sizes(op: str, variant: str, path: str) -> None:
    """On the Hopper path a graph holds one opaque launch, but in a package, which has no Python to call it with."""
    with (
        fake_gpu(name="h200", path="portable" if path == "portable" else "hopper") as mode,
        V.set_aot_compilation(path == "packaged"),
    ):
        with mode:
            sizes = {
                name: symbolic_size(mode, name, hint) for name, hint in (("batch", 5), ("rows", 100), ("keys", 70))
            }
            args, options = dense_calls(**sizes, **VARIANTS[variant])[op]
        trace = trace_kernels(OPS[op].overload, args, options)
    assert ("auto_functionalized" in trace.targets) == (path == "hopper")
    assert_kernels(trace, {} if path == "hopper" else WRITES[op])
    assert not mode.shape_env.guards and not mode.shape_env.replacements


@pytest.mark.parametrize("op", WRITES)
def test_kernels_enter_the_key_of_compiled_artefacts(op: str) -> None:
    found = [kernel.fn.__name__ for kernel in get_triton_kernels_for_op(f"vk::{op}")]
    # Packed and dense calls share their plans, so kernels of both are found.
    assert set(found) >= set(WRITES[op] | (FEW if op == "attention_backward" else {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_launches_carry_nothing_that_compilation_drops(variant: str) -> None:
    launches = dense_launches(**VARIANTS[variant])
    assert launches.keys() == {kernel for op in WRITES for kernel in writes_of(op, variant)}
    for launch in launches.values():
        assert_plain_launch(launch)


COMPILED = ("batch", "gqa", "cross", "rows_first", "cut", "column_strided", "all_steps")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, None) for name in COMPILED), ("gqa", torch.float32), ("rows_first", torch.float32)]
)
def test_compiled_equals_eager(name: str, dtype: torch.dtype | None, backend: str, device: str) -> None:
    """fp32 too, whose gradients of few rows come in parts."""
    inputs = _inputs(CASES[name], device, dtype)
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=False, backend=backend)
    assert_same_bits(_results(compiled, inputs), _results(with_lse, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DOWNCASTS, ids=_ids)
def test_compiled_downcast_equals_eager(case: DenseCase, backend: str, device: str) -> None:
    """In a region of autocast too, whose type is another."""

    def in_region(*args: Any, **options: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return downcast(*args, **options)

    downcast = partial(with_lse, compute_dtype=torch.float16)
    inputs = _inputs(case, device, torch.float32)
    expected = _results(downcast, inputs)
    for function in (downcast, in_region):
        compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
        assert_same_bits(_results(compiled, inputs), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_draws_the_seed_of_dropout(backend: str, device: str) -> None:
    """By the region's own generator: the same results for the same torch.manual_seed, others for another."""
    q = torch.randn(1, 2, 40, 16, device=device)
    compiled = torch.compile(partial(attention, dropout_p=0.5), fullgraph=True, backend=backend)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(compiled(q, q, q))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_never_recompile(backend: str, device: str) -> None:
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for sizes in SIZES:
            inputs = _sized(*sizes, device)
            assert_right(_results(compiled, inputs), inputs)


class _Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, window_left=30, softcap=20.0, return_lse=True)


class _Downcast(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, window_left=30, return_lse=True, compute_dtype=torch.float16)


@pytest.mark.parametrize("module", (_Attention, _Downcast))
def test_exported_program_survives_saving_and_runs_at_other_sizes(module: type[torch.nn.Module], device: str) -> None:
    batch, rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("batch", "rows", "keys"))
    dtype = torch.float32 if module is _Downcast else None
    first = _sized(3, 40, 23, device, dtype)
    shapes = ({0: batch, 2: rows}, {0: batch, 2: keys}, {0: batch, 2: keys})
    program = torch.export.export(module(), (first.q, first.k, first.v), dynamic_shapes=shapes)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called[0] == "vk.attention.default" and len(called) == 3
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for sizes in SIZES:
        inputs = _sized(*sizes, device, dtype)
        args = (inputs.q, inputs.k, inputs.v)
        for actual, expected in zip(loaded(*args), module()(*args), strict=True):
            assert torch.equal(actual, expected)


FIRST_CALL = """
import torch, torch_ops
q, k, v = torch.randn(3, 2, 2, 40, 72, device={device!r}).to({dtype}).requires_grad_().unbind()
out = torch.compile(torch_ops.attention, fullgraph=True)(q, k, v)
out.sum().backward()
assert torch.equal(out, torch_ops.attention(q, k, v))
print("equal")
"""


def test_first_call_of_a_process_works(device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float32
    assert run_forked(FIRST_CALL.format(device=device, dtype=dtype)) == "equal\n"


def _both_ops(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    out, lse = torch.ops.vk.attention(q, k, v)
    return out, lse, *torch.ops.vk.attention_backward(dout, None, q, k, v, out, lse)


@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
def test_fake_and_meta_outputs_have_the_strides_of_real_ones(layout: str, device: str) -> None:
    inputs = _inputs(DenseCase(layout, "strides", 2, 2, 40, 72, k_length=23, layout=layout), device)
    args = (inputs.q, inputs.k, inputs.v, inputs.dout)
    real = _both_ops(*args)
    with FakeTensorMode() as mode:
        fake = _both_ops(*map(mode.from_tensor, args))
    meta = _both_ops(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in args))
    for other in (fake, meta):
        assert [(t.shape, t.stride(), t.dtype) for t in other] == [(t.shape, t.stride(), t.dtype) for t in real]


@pytest.mark.parametrize("backend", (None, *BACKENDS), ids=("eager", *BACKENDS))
def test_autocast_follows_the_dtype_of_its_region(backend: str | None, device: str) -> None:
    """Slopes and sinks in fp32 stay so."""

    def in_region(*args: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return attention(*args, alibi_slopes=slopes, sinks=sinks)

    slopes, sinks = torch.rand(2, device=device), torch.rand(2, device=device)
    inputs = _sized(2, 40, 23, device, torch.float32)
    q, k, v = (tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    function = torch.compile(in_region, fullgraph=True, backend=backend) if backend else in_region
    out = function(q, k, v)
    halves = (tensor.detach().bfloat16() for tensor in (q, k, v))
    assert torch.equal(out, attention(*halves, alibi_slopes=slopes, sinks=sinks))
    out.sum().backward()
    assert all(tensor.grad.dtype is torch.float32 and tensor.grad.abs().sum() > 0 for tensor in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "options"),
    (
        (torch.bfloat16, {"causal": True}), (torch.bfloat16, {"dropout_p": 0.2}), (torch.float32, {"causal": True}),
        (torch.float32, {"dropout_p": 0.2}), (torch.float32, {"causal": True, "compute_dtype": torch.bfloat16}),
    ),
    ids=str,
)  # fmt: skip
def test_cuda_graph_replays(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """With dropout, each replay draws its own mask, as PyTorch's own dropout does."""
    inputs = _inputs(DenseCase("graph", "", 2, 4, 300, 72), "cuda", dtype)

    def step() -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        out = attention(*leaves, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)

    graph, captured = capture(step)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([tensor.clone() for tensor in captured])
    same = [torch.equal(one, other) for one, other in zip(*replays, strict=True)]
    if "dropout_p" in options:
        assert not any(same)
    else:
        assert all(same) and all(torch.equal(one, other) for one, other in zip(replays[0], step(), strict=True))


@pytest.mark.gpu
def test_reduce_overhead_replays_cuda_graphs() -> None:
    compiled = torch.compile(with_lse, fullgraph=True, mode="reduce-overhead", dynamic=False)
    for seed in range(3):
        inputs = make_dense_inputs(DenseCase("graphed", "", 2, 4, 300, 64), torch.bfloat16, "cuda", seed)
        for _ in range(2):
            torch.compiler.cudagraph_mark_step_begin()
            actual = {name: tensor.clone() for name, tensor in _results(compiled, inputs).items()}
        assert_same_bits(actual, _results(with_lse, inputs))


BUILT = sampled(
    [
        (target, head_dim, variant)
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
        for head_dim in (64, 72, 128)
        for variant in ("causal_gqa", "window_and_softcap", "steps")
    ]
)


@pytest.mark.parametrize(("target", "head_dim", "variant"), BUILT)
def test_builds_fit_and_do_not_spill(target: str, head_dim: int, variant: str) -> None:
    launches = dense_launches(TARGETS[target], head_dim=head_dim, **VARIANTS[variant])
    limit = shared_memory(TARGETS[target])
    with fake_gpu(TARGETS[target]):
        for launch in launches.values():
            built = build(launch, TARGETS[target])
            assert built.shared <= limit and built.spilled == 0, str(built)


@pytest.fixture
def set_products() -> Iterator[Callable[[str], None]]:
    """Sets PyTorch's fp32 products to "ieee" or "tf32" until the test ends."""

    def choose(setting: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = setting == "tf32"

    yield choose
    choose("ieee")
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("launches_of", (attention_launches, dense_launches))
def test_products_of_fp32_are_made_of_bfloat16_on_hopper(
    launches_of: Callable[..., Any], set_products: Callable[[str], None]
) -> None:
    """Where PyTorch allows no tf32, and heads are not too wide for it."""

    def products(target: str, head_dim: int) -> set[str]:
        launches = launches_of(TARGETS[target], head_dim=head_dim, dtype=torch.float32)
        return {launch.kwargs["PRECISION"] for launch in launches.values() if "PRECISION" in launch.kwargs}

    assert products("sm_90", 64) == products("sm_90", 128) == {"bf16x6"}
    assert products("sm_90", 48) == products("sm_90", 136) == {"ieee"}
    assert all(products(target, 64) == {"ieee"} for target in TARGETS if target != "sm_90")
    set_products("tf32")
    assert all(products(target, 64) == {"tf32"} for target in TARGETS)


FP32_ON_HOPPER = sampled(
    [
        (batch, *point)
        for batch in (3, 300)
        for point in (
            ("ieee", 64, "plain"), ("ieee", 128, "plain"), ("ieee", 72, "steps"), ("ieee", 64, "window_and_softcap"),
            ("tf32", 64, "plain"), ("tf32", 128, "plain"),
        )
    ]
)  # fmt: skip
# Bytes that may spill: tiles that spill none took longer (`_tensor_core_launch`), and one kernel where there are few.
MOST_SPILLED = {
    ("ieee", 64, "plain"): {
        "_attention_bwd_dq_dense_kernel": 24, "_attention_bwd_dkdv_dense_kernel": 40, "_attention_bwd_few_kernel": 112,
    },
    ("ieee", 128, "plain"): {
        "_attention_fwd_dense_kernel": 88, "_attention_bwd_dkdv_dense_kernel": 608, "_attention_bwd_few_kernel": 600,
    },
    ("tf32", 128, "plain"): {
        "_attention_fwd_dense_kernel": 240, "_attention_bwd_dkdv_dense_kernel": 280, "_attention_bwd_few_kernel": 496,
    },
}  # fmt: skip


@pytest.mark.parametrize(("batch", "setting", "head_dim", "variant"), FP32_ON_HOPPER)
def test_products_of_fp32_are_on_tensor_cores_and_spill_little(
    batch: int, setting: str, head_dim: int, variant: str, set_products: Callable[[str], None]
) -> None:
    """Of a large batch two kernels make gradients, of a small one a single kernel does, if they have as many warps."""
    set_products(setting)
    options = {**VARIANTS[variant], "causal": variant != "window_and_softcap"}
    launches = dense_launches(batch=batch, dtype=torch.float32, head_dim=head_dim, **options)
    assert ("_attention_bwd_few_kernel" in launches) == (batch == 3 and variant != "window_and_softcap")
    limit, spills = shared_memory(SM90), MOST_SPILLED.get((setting, head_dim, variant), {})
    with fake_gpu(SM90):
        for launch in launches.values():
            built = build(launch, SM90)
            assert built.shared <= limit and built.spilled <= spills.get(launch.name, 0), str(built)
            kind = "bf16.bf16" if setting == "ieee" else "tf32.tf32"
            if "PRECISION" in launch.kwargs:
                assert re.search(rf"wgmma\.mma_async\S*\.{kind}", built.asm["ptx"]), str(built)


HOPPER_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal_gqa": {"right": 0, "num_k_heads": 4, "dlse": True},
    "sinks": {"sinks": True, "left": 64, "right": 0},
    "ends": {"batch": 2, "rows": 1024, "num_heads": 8, "num_k_heads": 4, "right": 0},
    "apart": {"batch": 1, "rows": 512, "num_heads": 8, "num_k_heads": 8, "left": 200, "right": 100},
    "k_cut": {"right": 0, "cut": "k"},
    "q_and_v_cut": {"cut": "qv"},
}


@lru_cache
def _hopper_builds(head_dim: int, variant: str) -> dict[str, Build]:
    options = HOPPER_VARIANTS[variant]
    device = Gpu("h200", "cuda", 90, shared_memory(SM90))
    masked = "right" in options or "sinks" in options
    rows = ("attention_fwd_hopper", "attention_bwd_hopper")
    chosen = {row: pick(row, device, "bfloat16", 2, head_dim, False, None, masked=masked)[0] for row in rows}
    launches = hopper_launches(chosen, head_dim, **{"batch": 3, **options})
    with fake_gpu(SM90):
        return {name: build(launch, SM90) for name, launch in launches.items()}


@pytest.mark.parametrize(
    ("head_dim", "variant"), sampled([(d, variant) for d in HEAD_DIMS for variant in HOPPER_VARIANTS])
)
def test_hopper_path_fits_and_overlaps(head_dim: int, variant: str) -> None:
    """As the packed kernels: nothing spills, and ptxas does not make wgmma wait for each other."""
    builds = _hopper_builds(head_dim, variant)
    assert builds.keys() <= HOPPER_KERNELS.keys()
    backward = "small_hopper" if variant == "apart" and head_dim <= 96 else "hopper"
    assert {"_attention_bwd_delta_dense_kernel", f"_attention_bwd_{backward}_kernel"} < builds.keys()
    for built in builds.values():
        assert built.shared <= shared_memory(SM90) and built.spilled == 0, str(built)
        products = len(re.findall(r"wgmma\.mma_async", built.asm["ptx"]))
        if products:
            assert sass(built).count("WARPGROUP.DEPBAR") < products / 2, str(built)


# Bytes that spill, by head dimension: of 128 columns sums of keys, and of a block's share in them, fill the registers.
KEYS_SPILL = {64: 0, 128: 448}


@pytest.mark.parametrize(
    ("head_dim", "bounds"), sampled([(d, b) for d in KEYS_SPILL for b in ((-1, -1), (-1, 0), (9, 3))])
)
def test_kernel_for_gradients_of_fp32_keys_fits_and_overlaps(head_dim: int, bounds: tuple[int, int]) -> None:
    tensor, lse = torch.empty(3, 64, 200, head_dim, device="meta"), torch.empty(3, 64, 200, device="meta")
    with fake_gpu(SM90):
        (launch,) = _launches_of_keys(tensor, lse, AttentionOptions(0.1, *bounds))
        assert launch.grid == (2 * 3, 64, 1)
        built = build(launch, SM90)
    assert built.shared <= shared_memory(SM90) and built.spilled <= KEYS_SPILL[head_dim], str(built)
    products = re.findall(r"wgmma\.mma_async\S*\.bf16\.bf16", built.asm["ptx"])
    assert sass(built).count("WARPGROUP.DEPBAR") < len(products) / 8, str(built)


def test_rows_are_split_where_tiles_of_keys_are_few() -> None:
    """Among programs, whose parts are added up."""
    tensor, lse = torch.empty(3, 4, 200, 64, device="meta"), torch.empty(3, 4, 200, device="meta")
    with fake_gpu(SM90):
        keys, parts = _launches_of_keys(tensor, lse, AttentionOptions(0.1, -1, 0))
    assert keys.grid == (2 * 3, 4, 4) and keys.kwargs["SPLITS"] == parts.kwargs["DKDV_PARTS"] == 4


def _launches_of_keys(tensor: Tensor, lse: Tensor, options: AttentionOptions) -> list[Any]:
    launched: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention_dense_keys, "programs", lambda index: 132))
        for module, name in (
            (attention_dense_keys, "_attention_bwd_fp32_dkdv_hopper_kernel"),
            (attention_parts, "_attention_bwd_parts_kernel"),
        ):
            recorder = Recorder(launched, vars(module)[name])
            stack.enter_context(mock.patch.object(module, name, recorder))
        tensors = attention_dense_keys.Keys(tensor, tensor, tensor, lse, tensor, lse, tensor, tensor)
        attention_dense_keys.plan_dense_keys(tensors, options).launch(tensors)
    return launched


@pytest.mark.parametrize("way", ("graph", "package", "portable"))
def test_gradients_of_fp32_keys_are_an_opaque_launch_but_in_packages(way: str) -> None:
    path = "portable" if way == "portable" else "auto"
    with fake_gpu(name="h200", path=path) as mode, V.set_aot_compilation(way == "package"):
        with mode:
            sizes = {
                name: symbolic_size(mode, name, hint) for name, hint in (("batch", 5), ("rows", 100), ("keys", 70))
            }
            args, options = dense_calls(**sizes, head_dim=128, dtype=torch.float32)["attention_backward"]
        trace = trace_kernels(OPS["attention_backward"].overload, args, options)
    kernels = dict(WRITES["attention_backward"])
    if way == "graph":
        del kernels["_attention_bwd_dkdv_dense_kernel"]
    assert ("auto_functionalized" in trace.targets) == (way == "graph")
    assert_kernels(trace, kernels)
    assert not mode.shape_env.guards and not mode.shape_env.replacements


@pytest.mark.parametrize("rest", ({"num_k_heads": 1}, {"softcap": 5.0}, {"head_dim": 72}), ids=str)
def test_other_gradients_of_fp32_keys_are_stock_tritons(rest: dict[str, Any]) -> None:
    with fake_gpu(name="h200", path="auto") as mode:
        with mode:
            args, options = dense_calls(**{"batch": 300, "head_dim": 128, "dtype": torch.float32, **rest})[
                "attention_backward"
            ]
        assert_kernels(trace_kernels(OPS["attention_backward"].overload, args, options), WRITES["attention_backward"])


CAST_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"has_lse": False},
    "causal_gqa": {"right": 0, "num_k_heads": 4},
    "sinks": {"sinks": True, "left": 64, "right": 0},
    **{name: HOPPER_VARIANTS[name] for name in ("ends", "k_cut", "q_and_v_cut")},
}


@pytest.mark.parametrize(
    ("head_dim", "variant"), sampled([(d, variant) for d in HEAD_DIMS for variant in CAST_VARIANTS])
)
def test_forward_that_casts_fits_and_overlaps(head_dim: int, variant: str) -> None:
    (launch,) = hopper_launches({}, head_dim, dtype=torch.float32, **{"batch": 3, **CAST_VARIANTS[variant]}).values()
    with fake_gpu(SM90):
        built = build(launch, SM90)
    assert built.launch.name == "_attention_fwd_cast_hopper_kernel"
    assert built.shared <= shared_memory(SM90) and built.spilled == 0, str(built)
    products = len(re.findall(r"wgmma\.mma_async", built.asm["ptx"]))
    code = sass(built)
    assert code.count("WARPGROUP.DEPBAR") < products / 2, str(built)
    # A GPU takes no such copy (`fetch_run`).
    assert "LDGSTS" in code and not re.search(r"LDGSTS\S* \[R\d+\+UR", code), str(built)


def test_explain_says_whether_the_forward_casts() -> None:
    def explained(rows: int = 200, **options: Any) -> Any:
        q = torch.empty(2, 8, rows, 64, device="cuda")
        return torch_ops.explain(attention, q, q, q, compute_dtype=torch.bfloat16, **options)

    programs = mock.patch("torch_ops._attention.hopper_backward.programs", lambda index: 132)
    with fake_gpu(name="h200", path="auto") as mode, mode, programs:
        report = explained()
        assert report["path"] == "hopper" and report["why"] == "h200 is a Hopper GPU"
        assert list(report["kernels"]) == ["attention_fwd_cast_hopper", "attention_bwd_apart"]
        assert report["kernels"]["attention_fwd_cast_hopper"]["launch"] == HEAD_DIMS[64].fp32.entry()
        assert explained(100)["path"] == explained(softcap=1.0)["path"] == "portable"


def test_batches_are_described_in_three_dimensions_where_strides_allow() -> None:
    """Where they do not, in four; sequences are found by their heads, or FOLDED by their rows."""
    shapes = {}
    for layout in ("heads_first", "rows_first", "qkv_view", "cut", "rows_cut", "batch_inside"):
        q = make_dense_inputs(DenseCase(layout, "", 3, 4, 40, 64, layout=layout), torch.bfloat16).q
        shapes[layout] = (list(describe(q, 64, 64).shape), folded(q))
    assert shapes == {
        "heads_first": ([40, 12, 64], 0), "rows_first": ([120, 4, 64], 1), "qkv_view": ([120, 4, 64], 1),
        "cut": ([40, 12, 64], 0), "rows_cut": ([3, 4, 40, 64], 0), "batch_inside": ([40, 12, 64], 0),
    }  # fmt: skip
