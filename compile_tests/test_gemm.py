"""The kernels of the GEMM core as torch and GPUs that are not here take them: traces, launches, builds."""

import gc
import re
import weakref
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch

from compile_tests.contract.build import APART, TARGETS, Build, build, build_all, sampled, sass
from compile_tests.contract.kernels import Writes
from compile_tests.contract.trace import (
    SM90,
    KernelLaunch,
    Trace,
    assert_kernels,
    assert_plain_launch,
    fake_gpu,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.contract.variants import Demands
from compile_tests.gemm import hopper_gradient, hopper_linear, hopper_rotary
from compile_tests.kernels import GEMM_VARIANTS, GRADIENT, MLP, QKV_ROPE, TABLES, gemm_calls, gemm_writes
from csrc_free_ops.configs.gemm_hopper import WAVE, linear_config, tile_config
from torch_ops._core.plan import Plan
from torch_ops._core.registry import OPS
from torch_ops._gemm import plan as gemm
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, LinearOptions, Rotary, RotaryOptions

GEMM = {op: kernels for kernels in (MLP, QKV_ROPE) for op in kernels.ops}
# Where PyTorch makes the products, what is left to kernels.
BESIDE_ATEN: dict[str, Writes] = {
    "mlp": [("_activate_kernel", {"out_ptr"})],
    "mlp_backward": [GRADIENT],
    "qkv_rope": [("_rotate_kernel", {"q_ptr", "k_ptr", "v_ptr"})],
    "qkv_rope_backward": [("_qkv_rope_bwd_kernel", {"packed_ptr", "column_sums_ptr"})],
}


def _trace(op: str, path: str = "portable", **variant: Any) -> Trace:
    return GEMM[op].trace(op, path=path, **variant)[0]


def test_products_of_two_weights_may_be_left_to_pytorch() -> None:
    """Each into its half of the columns, and dx is of both."""
    for op, products in (("mlp", 3), ("mlp_backward", 8)):
        trace = _trace(op, "auto", **{**GEMM_VARIANTS["apart_again"], "dtype": torch.float32})
        assert_kernels(trace, [("_activate_kernel", {"out_ptr"}), *([GRADIENT] if "backward" in op else [])])
        assert trace.targets.count("mm.default") == products


@pytest.mark.parametrize("op", GEMM)
def test_products_may_be_left_to_pytorch(op: str) -> None:
    """As the rule has it in fp32, unless the portable path is asked for."""
    trace = _trace(op, "auto", **GEMM_VARIANTS["fp32"])
    assert_kernels(trace, BESIDE_ATEN[op])
    products = {"mlp": 2, "mlp_backward": 4, "qkv_rope": 1, "qkv_rope_backward": 2}
    assert trace.targets.count("mm.default") == products[op]
    assert "copy_" not in trace.targets


@pytest.mark.parametrize("op", ["mlp", "mlp_backward"])
def test_traces_of_symbolic_leading_dimensions_hold_for_all(op: str) -> None:
    with fake_gpu() as mode:
        with mode:
            batch, length = symbolic_size(mode, "batch", 3), symbolic_size(mode, "length", 40)
            (*args,), options = gemm_calls(rows=batch * length)[op]
            for place in (0, 1) if op == "mlp_backward" else (0,):
                args[place] = args[place].new_empty((batch, length, args[place].shape[1]))
        assert_kernels(trace_kernels(OPS[op].overload, tuple(args), options), gemm_writes(op, "plain"))
    assert not mode.shape_env.guards and not mode.shape_env.replacements


@pytest.mark.parametrize("variant", GEMM_VARIANTS)
def test_launches_carry_nothing_that_compilation_drops(variant: str) -> None:
    """On a Hopper GPU the products of half types are opaque launches."""
    for kernels in (MLP, QKV_ROPE):
        for launches in kernels.launches(TARGETS["sm_80"], path="auto", **GEMM_VARIANTS[variant]).values():
            assert launches
            for launch in launches:
                assert_plain_launch(launch)


# Rows that begin at 16 bytes, those of a weight that is copied for it among them.
BY_WGMMA = ("plain", "gelu", "silu", "swiglu", "apart", "bare")


def _wgmma(target: str, variant: str, launch: KernelLaunch) -> Literal["", "some"]:
    is_product = launch.name.startswith("_gemm")
    return "some" if target == "sm_90" and variant in BY_WGMMA and is_product else ""


@lru_cache
def _builds(target: str, variant: str) -> tuple[Build, ...]:
    launches: dict[str, Any] = {}
    for path in ("portable", "auto"):
        for kernels in (MLP, QKV_ROPE):
            for each in kernels.launches(TARGETS[target], path=path, rows=4096, **GEMM_VARIANTS[variant]).values():
                launches |= {f"{launch.name} {sorted(map(str, launch.kwargs.items()))}": launch for launch in each}
    with fake_gpu(TARGETS[target]):
        return build_all(
            ((launch, Demands(wgmma=_wgmma(target, variant, launch))) for launch in launches.values()), TARGETS[target]
        )


POINTS = [
    *((target, variant) for target in APART for variant in ("plain", "swiglu", "fp32")),
    *(("sm_86", "swiglu"), ("sm_86", "fp32"), ("sm_89", "plain"), ("sm_120", "swiglu")),
    *(("sm_90", variant) for variant in ("gelu", "silu", "bare", "forward_alone", "apart")),
    *((target, "silu") for target in ("sm_86", "gfx942")),
]


@pytest.mark.builds
@pytest.mark.parametrize(("target", "variant"), sampled(POINTS))
def test_nothing_spills_and_shared_memory_is_within_the_target(target: str, variant: str) -> None:
    builds = _builds(target, variant)
    assert {built.launch.name for built in builds} > {"_mlp_bwd_kernel", "_gemm_pair_kernel", "_qkv_rope_bwd_kernel"}
    limit = shared_memory(TARGETS[target])
    bad = [str(built) for built in builds if built.spilled or built.shared > limit]
    assert not bad, "\n".join((f"limit {limit}", *bad))


@pytest.mark.builds
@pytest.mark.parametrize("variant", BY_WGMMA)
def test_hopper_multiplies_half_types_by_wgmma_and_loads_16_bytes(variant: str) -> None:
    """Rows that begin at 16 bytes, those of a weight that is copied for it among them."""
    products = [built for built in _builds("sm_90", variant) if built.launch.name.startswith("_gemm")]
    assert len(products) >= 3
    for built in products:
        ptx = built.asm["ptx"]
        assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx, str(built)
        assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx, str(built)


def test_every_kernel_of_the_core_is_built_here() -> None:
    found = {built.launch.name for variant in ("plain", "fp32") for built in _builds("sm_90", variant)}
    # The gradients of tables belong to `rope_window_attn`, where they are built.
    assert found == {*MLP.functions, *QKV_ROPE.functions} - {TABLES[0]}


# Variants with 1365 and 3420 columns, so that rows of w2 do not begin at 16 bytes.
ODD = ("silu", "swiglu", "apart", "apart_again")


@pytest.mark.parametrize("way", ["h200", "other", "packaged", "portable"])
@pytest.mark.parametrize("variant", ODD)
def test_odd_weights_are_copied_once_for_whoever_makes_the_product(variant: str, way: str) -> None:
    """Kernels take the layer in front, as of any weight. The existing columns of the gradient of w2 are copied."""
    target = SM90 if way in ("h200", "packaged") else TARGETS["sm_80"]
    path = "portable" if way == "portable" else "auto"
    *first, second = gemm_writes("mlp", variant)
    expected = {"h200": [], "portable": [*first, second]}.get(way, first)
    for op in ("mlp", "mlp_backward"):
        gpu = "h200" if target is SM90 else "no-such-gpu"
        trace, *_ = MLP.trace(
            op, gpu=gpu, path=path, packaged=way == "packaged", target=target, **GEMM_VARIANTS[variant]
        )
        copies = sum(trace.targets.count(name) for name in ("constant_pad_nd", "clone", "aten.copy"))
        # w2 and its gradient; of the first layer each weight that has odd rows.
        of_first = {"swiglu": 0, "apart": 2, "apart_again": 2}.get(variant, 1)
        assert copies == (1 if op == "mlp" else 2 + of_first)
        if op == "mlp":
            assert_kernels(trace, expected)


def test_gradients_of_two_weights_begin_at_16_bytes_each() -> None:
    """So do the operands of their products; 3420 columns and what follows them do not."""
    for variant, expected in (("apart", [3420, 6840, 3424, 6848]), ("swiglu", [3420, 6840, 3420, 6840])):
        launch = MLP.launch(GRADIENT[0], **GEMM_VARIANTS[variant])
        assert [launch.arguments[name] for name in ("N", "STRIDE_PM", "UP_BEGINS", "STRIDE_DM")] == expected


def test_an_odd_weight_is_copied_only_where_x_is_not_odd() -> None:
    """Rows of 1365 half types begin nowhere in particular; between the layers they are 1368 apart."""
    _, second = MLP.launches(**GEMM_VARIANTS["silu"])["mlp"]
    assert [second.arguments[name] for name in ("K", "STRIDE_XM", "STRIDE_WN")] == [1365, 1368, 1368]
    first, _ = MLP.launches(width=1365)["mlp"]
    assert [first.arguments[name] for name in ("K", "STRIDE_XM", "STRIDE_WN")] == [1365, 1365, 1365]
    with fake_gpu(SM90):
        assert build(first, SM90).spilled == 0


ROTATED = (64, 72, 80, 96, 128)
HOPPER_POINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"{activation}-{rows}x{columns}": (hopper_linear, {"launch": (rows, columns), "activation": activation})
        for activation in ("gelu_tanh", "gelu", "quick_gelu", "silu")
        for rows, columns in WAVE
    },
    **{
        f"gelu_tanh-{rows}x{columns}-without-{'-'.join(left_out)}": (
            hopper_linear,
            {"launch": (rows, columns), "activation": "gelu_tanh", **dict.fromkeys(left_out, False)},
        )
        for rows, columns in WAVE
        for left_out in (("keeps_pre",), ("bias",), ("keeps_pre", "bias"))
    },
    **{
        f"{activation}-192x128-without-keeps_pre-bias": (
            hopper_linear, {"launch": (192, 128), "activation": activation, "keeps_pre": False, "bias": False}
        )
        for activation in ("gelu", "quick_gelu", "silu")
    },
    **{
        f"swiglu-{rows}x{columns}-{'apart' if apart else 'packed'}": (
            hopper_linear,
            {"launch": (rows, columns), "activation": "swiglu", "n": 6840, "k": 1280, "apart": apart},
        )
        for rows, columns in WAVE
        for apart in (False, True)
    },
    "swiglu-192x128-without-keeps_pre-bias": (
        hopper_linear,
        {"launch": (192, 128), "activation": "swiglu", "n": 6840, "k": 1280, "keeps_pre": False, "bias": False},
    ),
    "gelu_tanh-192x128-fp16": (
        hopper_linear, {"launch": (192, 128), "activation": "gelu_tanh", "dtype": torch.float16}
    ),
    **{
        f"rotary-d{head_dim}-{'half' if half else 'full'}": (
            hopper_rotary, {"head_dim": head_dim, "half_table": half, "num_k_heads": 4}
        )
        for head_dim in ROTATED
        for half in (False, True)
    },
    **{
        f"gradient-{activation}": (hopper_gradient, {"activation": activation})
        for activation in ("gelu_tanh", "gelu", "quick_gelu", "silu")
    },
    "gradient-gelu_tanh-without-bias": (hopper_gradient, {"activation": "gelu_tanh", "bias": False}),
    "gradient-gelu_tanh-fp16": (hopper_gradient, {"activation": "gelu_tanh", "dtype": torch.float16}),
    "rotary-d72-equal_heads": (hopper_rotary, {"head_dim": 72}),
    "rotary-d72-without-bias": (hopper_rotary, {"head_dim": 72, "bias": False}),
    "rotary-d80-own_table": (hopper_rotary, {"head_dim": 80, "table_dtype": torch.bfloat16, "half_table": True}),
    "rotary-d72-fp16": (hopper_rotary, {"head_dim": 72, "dtype": torch.float16}),
}  # fmt: skip


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")


def _loops_of_products(code: str) -> dict[tuple[int, int], list[str]]:
    """The instructions of each innermost loop that multiplies, found by its addresses."""
    instructions = [(int(at, 16), text) for at, text in INSTRUCTION.findall(code)]
    loops = []
    for at, text in instructions:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) <= at:
            loops.append((int(target[1], 16), at))
    found = {}
    for at, text in instructions:
        around = [(begin, end) for begin, end in loops if begin <= at <= end]
        if "HGMMA" in text and around:
            begin, end = min(around, key=lambda loop: loop[1] - loop[0])
            found[begin, end] = [text for at, text in instructions if begin <= at <= end]
    return found


@pytest.mark.builds
@pytest.mark.parametrize("point", sampled(HOPPER_POINTS))
def test_hopper_products_fit_and_overlap(point: str) -> None:
    """Nothing spills, and no product waits for others but where the kernel says so.

    Each consumer has four products to a step, of which it waits for those of the step before, and for all at the end.
    The producer lets the next kernel begin, and waits for the one before, as does who brings what a slope is of.
    """
    make, options = HOPPER_POINTS[point]
    if "launch" in options:
        options = {**options, "launch": tile_config(*options["launch"])}
    launch = make(**options)
    assert launch.kwargs["launch_pdl"]
    with fake_gpu(SM90):
        built = build(launch, SM90, wgmma="overlapping")
    ptx, consumers = built.asm["ptx"], launch.arguments["GROUPS"]
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 4 * consumers
    code = sass(built)
    assert code.count("WARPGROUP.DEPBAR") == 2 * consumers
    loops = _loops_of_products(code)
    assert len(loops) == consumers
    for instructions in loops.values():
        assert sum("HGMMA" in text for text in instructions) == 4
    assert code.count("PREEXIT") == 1
    assert code.count("ACQBULK") == (2 if make is hopper_gradient else 1)
    assert code.index("ACQBULK") < code.index("UTMALDG")
    assert built.shared <= shared_memory(SM90), str(built)
    assert built.spilled == 0, str(built)


def test_every_tile_that_may_be_chosen_is_built_here() -> None:
    chosen = {linear_config(rows, n, 132) for rows in range(1, 8192, 61) for n in (1365, 3420, 4096, 4304, 6840, 8608)}
    for activation in ("gelu_tanh", "swiglu"):
        built = {
            tile_config(*options["launch"])
            for make, options in HOPPER_POINTS.values()
            if make is hopper_linear and options["activation"] == activation
        }
        assert chosen == built


# The opaque launches of a graph for a Hopper GPU, and the kernels beside them, by op and variant.
OPAQUE: dict[tuple[str, str], tuple[int, Writes]] = {
    ("mlp", "plain"): (1, []),
    ("mlp", "apart"): (1, []),
    ("mlp", "forward_alone"): (1, []),
    ("mlp_backward", "plain"): (1, []),
    ("mlp_backward", "apart_again"): (1, [GRADIENT]),
    ("qkv_rope", "plain"): (1, []),
    ("qkv_rope", "swiglu"): (1, []),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("way", ["auto", "portable", "packaged"])
@pytest.mark.parametrize(("op", "variant"), OPAQUE)
def test_hopper_path_is_one_opaque_launch_but_in_packages(op: str, variant: str, way: str, symbolic: bool) -> None:
    """An AOTInductor package has no Python to call the launch with: it gets the portable kernels."""
    path = "portable" if way == "portable" else "auto"
    sizes, rows = ({"rows": 100}, {}) if symbolic else ({}, {"rows": 100})
    options = {**GEMM_VARIANTS[variant], **rows}
    trace, _, shapes = GEMM[op].trace(op, sizes, "h200", path, way == "packaged", **options)
    launches, kernels = OPAQUE[op, variant] if way == "auto" else (0, gemm_writes(op, variant))
    if way == "packaged" and op == "mlp" and variant in ODD:
        kernels = kernels[:-1]
    assert trace.targets.count("auto_functionalized") == launches
    assert_kernels(trace, kernels)
    assert not shapes.guards and not shapes.replacements


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("variant", GEMM_VARIANTS)
def test_gradient_and_its_product_are_one_opaque_launch(variant: str, symbolic: bool) -> None:
    """With "swiglu", rows of no whole 16 bytes and fp32, the product and the kernel behind it are separate."""
    sizes, rows = ({"rows": 100}, {}) if symbolic else ({}, {"rows": 100})
    options = {**GEMM_VARIANTS[variant], **rows}
    trace, _, shapes = MLP.trace("mlp_backward", sizes, "h200", "auto", **options)
    whole = variant in ("plain", "gelu", "bare", "forward_alone")
    kernels = [each.name for each in trace.kernels]
    assert ("_mlp_bwd_kernel" not in kernels) == whole
    # With two weights, a launch also recomputes what was not kept.
    assert trace.targets.count("auto_functionalized") == (whole or variant == "apart_again")
    if whole:
        assert trace.targets.splitlines().count("aten.mm.default") == 3, "dx, dw1 and dw2"
    assert not shapes.guards and not shapes.replacements


@pytest.mark.parametrize("apart", [False, True])
def test_plans_of_the_hopper_path_keep_no_tensor(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are remembered; the launch itself is left out here."""
    for name in ("plan_linear_hopper", "plan_rotary_hopper", "plan_gradient_hopper"):
        monkeypatch.setattr(gemm, name, lambda *args: Plan(lambda tensors: None))
    monkeypatch.setattr(gemm, "why_not_hopper", lambda *args, **options: "")
    monkeypatch.setattr(gemm, "hopper_config", lambda *args, **options: (None, ""))
    x, weight, up, cos, sin = (torch.zeros(48, 64, dtype=torch.bfloat16) for _ in range(5))
    out, heads = torch.zeros(48, 24), torch.zeros(48, 4, 8)
    plans = [
        gemm.plan_gradient(Gradient(x, weight, x, x, x, x), GradientOptions("gelu", True)),
        gemm.plan_linear(Linear(x, weight, None, out, None, up if apart else None), LinearOptions("swiglu")),
        gemm.plan_rotary(Rotary(x, weight, None, cos, sin, heads, heads[:, :1], heads[:, :1]), RotaryOptions()),
    ]
    kept = [weakref.ref(tensor) for tensor in (x, weight, up, cos, sin, out, heads)]
    del x, weight, up, cos, sin, out, heads
    gc.collect()
    assert len(plans) == 3 and not [each for each in kept if each() is not None]
