"""The graph contract of `vk::attention`, and its kernels built for every kind of GPU."""

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

import torch_ops
from compile_tests.attention import HOPPER_KERNELS, hopper_launches
from compile_tests.contract.build import TARGETS, Build, build, build_all, sampled, sass
from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject, assert_same_bits, compiled_by
from compile_tests.contract.kernels import Kernels
from compile_tests.contract.trace import SM90, Recorder, assert_kernels, capture, fake_gpu, shared_memory
from compile_tests.contract.variants import Demands
from compile_tests.kernels import ATTENTION, DENSE_BACKWARD, WINDOW_ATTN
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Gpu
from torch_ops import attention
from torch_ops._attention import hopper_dkdv
from torch_ops._attention import split as attention_split
from torch_ops._attention.hopper import describe, folded
from torch_ops._attention.options import AttentionOptions
from torch_ops.testing import references
from torch_ops.testing.cases import DENSE, DENSE_LAYOUTS, DenseCase, make_dense_inputs

CASES = {case.name: case for case in DENSE}
# fp32 in a half type: a Hopper GPU takes the kernel that casts as it goes, or copies.
DOWNCASTS = (
    DenseCase("downcast", "", 2, 4, 140, 64, num_k_heads=2, options={"causal": True, "sinks": True}),
    DenseCase("downcast_qkv_view", "", 2, 2, 140, 72, layout="qkv_view"),
    DenseCase("downcast_steps", "", 2, 2, 40, 16, layout="column_strided", options={"softcap": 5.0, "dropout_p": 0.1}),
)
# Batch, rows and keys of calls that share one graph, none of them the number of heads.
SIZES = tuple(
    DenseCase(f"{batch}x{rows}x{keys}", "", batch, 2, rows, 72, k_length=keys)
    for batch, rows, keys in ((3, 40, 23), (4, 100, 150), (5, 17, 64), (7, 300, 31))
)
BATCH, ROWS, KEYS = (torch.export.Dim(name, min=2, max=4096) for name in ("batch", "rows", "keys"))
with_lse = partial(attention, return_lse=True)
downcast = partial(with_lse, compute_dtype=torch.float16)


def draw(case: DenseCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_dense_inputs(case, dtype, DEVICE, seed)
    grads = {"out": inputs.dout, "lse": inputs.dlse}
    return Call.of(with_lse, inputs, ("q", "k", "v"), grads=grads)


def draw_downcast(case: DenseCase, dtype: torch.dtype, seed: int = 0) -> Call:
    call = draw(case, torch.float32, seed)
    return replace(call, args={**call.args, "compute_dtype": torch.float16})


def backward(call: Call) -> dict[str, Any]:
    out, lse = call(torch.ops.vk.attention)
    kept = {name: value for name, value in call.args.items() if name != "sinks"}
    return {"dout": call.grads["out"], "dlse": call.grads["lse"], "out": out, "lse": lse, **kept}


SUBJECT = Subject(
    "attention", with_lse, references.attention, draw, SIZES,
    moving={"q": {0: BATCH, 2: ROWS}, "k": {0: BATCH, 2: KEYS}, "v": {0: BATCH, 2: KEYS}},
    kernels=ATTENTION,
    backward=backward,
    partial=lambda call: ({**backward(call), "dlse": None},),
    # Small heads, because opcheck compares calls of static and symbolic size, which may launch different tiles.
    checked=(
        *(
            replace(CASES[name], head_dim=16)
            for name in ("batch", "causal_wide", "gqa", "sliding", "softcap", "all_steps")
        ),
        *(DenseCase(layout, "strides", 2, 2, 30, 16, layout=layout) for layout in DENSE_LAYOUTS),
    ),
    compiled=tuple(
        CASES[name] for name in ("batch", "gqa", "cross", "rows_first", "cut", "column_strided", "all_steps")
    ),
    layouts=tuple(DenseCase(layout, "strides", 2, 2, 40, 72, k_length=23, layout=layout) for layout in DENSE_LAYOUTS),
    replayed=(DenseCase("graph", "", 2, 4, 300, 72, options={"causal": True}),) * 2,
    autocast="follows",
    batched="q",
)  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (SUBJECT,)


@pytest.mark.parametrize("case", DOWNCASTS, ids=lambda case: case.name)
class TestDowncast:
    """A call with a compute_dtype."""

    subject = replace(SUBJECT, draw=draw_downcast)

    def test_opcheck_passes(self, case: DenseCase) -> None:
        contract = TestGraphs()
        contract.test_opcheck_passes_forward(self.subject, case)
        contract.test_opcheck_passes_backward(self.subject, case)

    def test_compiled_equals_eager_also_in_a_region_of_another_type(self, case: DenseCase) -> None:
        def in_region(**args: Any) -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                return with_lse(**args)

        call = self.subject.call(case)
        expected = call.outcome(with_lse)
        for function in (with_lse, in_region):
            assert_same_bits(call.outcome(compiled_by("aot_eager", function, dynamic=False)), expected)


def test_exported_program_keeps_its_compute_dtype() -> None:
    subject = replace(SUBJECT, draw=draw_downcast)
    TestGraphs().test_exported_program_survives_saving_and_runs_at_other_sizes_and_has_gradients(subject)


@pytest.mark.parametrize("name", ("gqa", "rows_first"))
def test_compiled_equals_eager_in_fp32_whose_gradients_come_in_parts(name: str) -> None:
    call = draw(CASES[name], torch.float32)
    compiled = compiled_by("inductor" if DEVICE == "cuda" else "aot_eager", with_lse, dynamic=False)
    assert_same_bits(call.outcome(compiled), call.outcome(with_lse))


def test_compiled_draws_the_seed_of_dropout() -> None:
    """Results follow torch.manual_seed."""
    q = torch.randn(1, 2, 40, 16, device=DEVICE)
    compiled = compiled_by("inductor" if DEVICE == "cuda" else "aot_eager", partial(attention, dropout_p=0.5))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(compiled(q, q, q))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("region", ("eager", "aot_eager", *(["inductor"] if DEVICE == "cuda" else [])))
def test_autocast_leaves_slopes_and_sinks_in_fp32(region: str) -> None:
    def in_region(*args: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return attention(*args, alibi_slopes=slopes, sinks=sinks)

    slopes, sinks = torch.rand(2, device=DEVICE), torch.rand(2, device=DEVICE)
    args = [SUBJECT.call(dtype=torch.float32).args[name] for name in "qkv"]
    halves = (tensor.bfloat16() for tensor in args)
    assert torch.equal(compiled_by(region, in_region)(*args), attention(*halves, alibi_slopes=slopes, sinks=sinks))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "options"),
    (
        (torch.bfloat16, {"dropout_p": 0.2}), (torch.float32, {"dropout_p": 0.2}), (torch.float32, {"causal": True}),
        (torch.float32, {"causal": True, "compute_dtype": torch.bfloat16}),
    ),
    ids=str,
)  # fmt: skip
def test_cuda_graph_replays(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """With dropout, each replay draws its own mask, as PyTorch's own dropout does."""
    inputs = make_dense_inputs(DenseCase("graph", "", 2, 4, 300, 72), dtype, "cuda")
    call = Call.of(attention, inputs, ("q", "k", "v"), grads={"out": inputs.dout})
    function = partial(attention, **options)
    graph, captured = capture(lambda: call.outcome(function))
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append({name: tensor.clone() for name, tensor in captured.items()})
    if "dropout_p" in options:
        assert not any(torch.equal(replays[0][name], replays[1][name]) for name in captured)
    else:
        assert_same_bits(replays[0], replays[1])
        assert_same_bits(replays[0], call.outcome(function))


@pytest.fixture
def set_products() -> Iterator[Callable[[str], None]]:
    """Sets PyTorch's fp32 products to "ieee" or "tf32" until the test ends."""

    def choose(setting: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = setting == "tf32"

    yield choose
    choose("ieee")
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("kernels", (WINDOW_ATTN, ATTENTION), ids=("window_attn", "attention"))
def test_products_of_fp32_are_made_of_bfloat16_on_hopper(kernels: Kernels, set_products: Callable[[str], None]) -> None:
    """Where PyTorch allows no tf32, and heads are not too wide for it."""

    def products(target: str, head_dim: int) -> set[str]:
        launches = kernels.launches(TARGETS[target], head_dim=head_dim, dtype=torch.float32).values()
        return {launch.kwargs["PRECISION"] for each in launches for launch in each if "PRECISION" in launch.kwargs}

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
# Bytes that may spill: tiles that spill none took longer (`_tensor_core_config`), and one kernel where there are few.
MOST_SPILLED = {
    ("ieee", 64, "plain"): {
        "_attention_bwd_dq_dense_kernel": 24, "_attention_bwd_dkdv_dense_kernel": 40,
        "_attention_bwd_small_kernel": 120,
    },
    ("ieee", 128, "plain"): {
        "_attention_fwd_dense_kernel": 88, "_attention_bwd_dkdv_dense_kernel": 608, "_attention_bwd_small_kernel": 600,
    },
    ("tf32", 128, "plain"): {
        "_attention_fwd_dense_kernel": 240, "_attention_bwd_dkdv_dense_kernel": 280, "_attention_bwd_small_kernel": 496,
    },
}  # fmt: skip


@pytest.mark.builds
@pytest.mark.parametrize(("batch", "setting", "head_dim", "variant"), FP32_ON_HOPPER)
def test_products_of_fp32_are_on_tensor_cores_and_spill_little(
    batch: int, setting: str, head_dim: int, variant: str, set_products: Callable[[str], None]
) -> None:
    """Two kernels make the gradients of a large batch; one does for a small batch, if both have as many warps."""
    set_products(setting)
    options = {**ATTENTION.variants[variant], "causal": variant != "window_and_softcap"}
    found = ATTENTION.launches(batch=batch, dtype=torch.float32, head_dim=head_dim, **options).values()
    launches = [launch for each in found for launch in each]
    assert ("_attention_bwd_small_kernel" in {launch.name for launch in launches}) == (
        batch == 3 and variant != "window_and_softcap"
    )
    limit, spills = shared_memory(SM90), MOST_SPILLED.get((setting, head_dim, variant), {})
    with fake_gpu(SM90):
        demands = [
            Demands(spills.get(launch.name, 0), "some" if "PRECISION" in launch.kwargs else "") for launch in launches
        ]
        for launch, built in zip(launches, build_all(zip(launches, demands, strict=True), SM90), strict=True):
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
        products = [name for name in launches if name.endswith("hopper_kernel")]
        demands = (Demands(wgmma="overlapping" if name in products else "") for name in launches)
        builds = build_all(zip(launches.values(), demands, strict=True), SM90)
    return dict(zip(launches, builds, strict=True))


@pytest.mark.builds
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


@pytest.mark.builds
@pytest.mark.parametrize(
    ("head_dim", "bounds"), sampled([(d, b) for d in KEYS_SPILL for b in ((-1, -1), (-1, 0), (9, 3))])
)
def test_kernel_for_gradients_of_fp32_keys_fits_and_overlaps(head_dim: int, bounds: tuple[int, int]) -> None:
    tensor, lse = torch.empty(3, 64, 200, head_dim, device="meta"), torch.empty(3, 64, 200, device="meta")
    with fake_gpu(SM90):
        (launch,) = _launches_of_keys(tensor, lse, AttentionOptions(0.1, *bounds))
        assert launch.grid == (2 * 3, 64, 1)
        built = build(launch, SM90, KEYS_SPILL[head_dim], "overlapping")
    assert built.shared <= shared_memory(SM90) and built.spilled <= KEYS_SPILL[head_dim], str(built)
    products = re.findall(r"wgmma\.mma_async\S*\.bf16\.bf16", built.asm["ptx"])
    assert sass(built).count("WARPGROUP.DEPBAR") < len(products) / 8, str(built)


def test_rows_are_split_where_tiles_of_keys_are_few() -> None:
    """Among programs, whose parts are added up."""
    tensor, lse = torch.empty(3, 4, 200, 64, device="meta"), torch.empty(3, 4, 200, device="meta")
    with fake_gpu(SM90):
        keys, parts = _launches_of_keys(tensor, lse, AttentionOptions(0.1, -1, 0))
    assert keys.grid == (2 * 3, 4, 4) and keys.arguments["splits"] == parts.arguments["dkdv_splits"] == 4


def _launches_of_keys(tensor: Tensor, lse: Tensor, options: AttentionOptions) -> list[Any]:
    launched: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(hopper_dkdv, "programs", lambda index: 132))
        for module, name in (
            (hopper_dkdv, "_attention_bwd_fp32_dkdv_hopper_kernel"),
            (attention_split, "_attention_bwd_split_sum_kernel"),
        ):
            recorder = Recorder(launched, vars(module)[name])
            stack.enter_context(mock.patch.object(module, name, recorder))
        tensors = hopper_dkdv.Dkdv(tensor, tensor, tensor, lse, tensor, lse, tensor, tensor)
        hopper_dkdv.plan_fp32_dkdv(tensors, options).launch(tensors)
    return launched


@pytest.mark.parametrize("way", ("graph", "package", "portable"))
def test_gradients_of_fp32_keys_are_an_opaque_launch_but_in_packages(way: str) -> None:
    trace, _, shapes = ATTENTION.trace(
        "attention_backward", {"batch": 5, "rows": 100, "keys": 70}, "h200",
        "portable" if way == "portable" else "auto", way == "package", head_dim=128, dtype=torch.float32,
    )  # fmt: skip
    assert ("auto_functionalized" in trace.targets) == (way == "graph")
    assert_kernels(trace, DENSE_BACKWARD[:1] if way == "graph" else DENSE_BACKWARD)
    assert not shapes.guards and not shapes.replacements


@pytest.mark.parametrize("rest", ({"num_k_heads": 1}, {"softcap": 5.0}, {"head_dim": 72}), ids=str)
def test_other_gradients_of_fp32_keys_are_stock_tritons(rest: dict[str, Any]) -> None:
    options = {"batch": 300, "head_dim": 128, "dtype": torch.float32, **rest}
    trace, _, _ = ATTENTION.trace("attention_backward", gpu="h200", path="auto", **options)
    assert_kernels(trace, DENSE_BACKWARD)


CAST_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"has_lse": False},
    "causal_gqa": {"right": 0, "num_k_heads": 4},
    "sinks": {"sinks": True, "left": 64, "right": 0},
    **{name: HOPPER_VARIANTS[name] for name in ("ends", "k_cut", "q_and_v_cut")},
}


@pytest.mark.builds
@pytest.mark.parametrize(
    ("head_dim", "variant"), sampled([(d, variant) for d in HEAD_DIMS for variant in CAST_VARIANTS])
)
def test_forward_that_casts_fits_and_overlaps(head_dim: int, variant: str) -> None:
    (launch,) = hopper_launches({}, head_dim, dtype=torch.float32, **{"batch": 3, **CAST_VARIANTS[variant]}).values()
    with fake_gpu(SM90):
        built = build(launch, SM90, wgmma="overlapping")
    assert built.launch.name == "_attention_fwd_fp32_hopper_kernel"
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
        assert list(report["kernels"]) == ["attention_fwd_fp32_hopper", "attention_bwd_small_hopper"]
        assert report["kernels"]["attention_fwd_fp32_hopper"]["launch"] == HEAD_DIMS[64].fp32.entry()
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
