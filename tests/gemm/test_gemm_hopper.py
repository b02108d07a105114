"""The GEMM core's Hopper kernel alone: every epilogue and tile, what it plans for, streams, graphs, launches in a row.

Where there is a Hopper GPU, tests/gemm/test_mlp.py and tests/gemm/test_qkv_rope.py run on it too, wherever it can.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton import cdiv

import torch_ops
from csrc_free_ops.configs.gemm_hopper import MOST_WITHIN, WAVE, tile_config
from tests.gemm.verify import Layer, verify_projection
from tests.verify import misaligned
from torch_ops import mlp, qkv_rope, settings
from torch_ops._core.device import gpu
from torch_ops._core.hopper import programs
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._gemm.tensors import Linear
from torch_ops.testing import check, references
from torch_ops.testing.cases import (
    MlpCase,
    MlpInputs,
    QkvRopeCase,
    QkvRopeInputs,
    make_mlp_inputs,
    make_qkv_rope_inputs,
    outcome,
)

pytestmark = [pytest.mark.gpu, pytest.mark.no_interpret]

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu", "swiglu")
ROWS = (1, 77, 784, 3136)
# Columns of h and of x: tails of both, and rows of h that are padded.
SIZES = {"tower": (4304, 1152), "gated": (3420, 1280), "deep": (1152, 4304), "odd": (1365, 512), "narrow": (40, 72)}


@pytest.fixture(autouse=True)
def hopper(device: str) -> Iterator[None]:
    if device != "cuda" or gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    # Few rows count too, which "auto" leaves to PyTorch.
    with settings(path="hopper"):
        yield


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", ["tower", "odd"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_epilogue(activation: str, size: str, rows: int, launches: list[dict[str, Any]]) -> None:
    Layer(activation, *SIZES[size], rows).verify()
    assert len(launches) == 1 and launches[0]["launch_pdl"]


def test_in_a_thread_that_has_not_called_cuda() -> None:
    """As one of autograd's may: of a launch that is known by then, descriptors are filled first of all."""
    layer = Layer("silu", *SIZES["tower"], 784, keeps_pre=False)
    plan = layer.plan()
    expected = layer.run(plan)["out"]
    out = torch.full_like(expected, torch.nan)
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(plan, Linear(layer.x, layer.weight, layer.bias, out)).result()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_epilogue_in_fp16(activation: str, launches: list[dict[str, Any]]) -> None:
    for size in ("gated", "narrow"):
        Layer(activation, *SIZES[size], 333, torch.float16).verify()
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pytorchs_product_makes_gelu_of_few_rows(dtype: torch.dtype, launches: list[dict[str, Any]]) -> None:
    """Unless the kernel is asked for, what GELU is of is kept, or there is no bias."""
    most = int(MOST_WITHIN * 192 * 128 * programs(0)) // 4304
    with settings(path="auto"):
        for rows in (1, 77, 784, most):
            Layer("gelu_tanh", 4304, 1152, rows, dtype, keeps_pre=False).verify()
        scattered = Layer("gelu_tanh", 4304, 1152, 784, dtype, keeps_pre=False)
        scattered.bias = scattered.bias[:, None].repeat(1, 2)[:, 0]
        scattered.verify()
        assert not launches
        for options in ({"keeps_pre": True}, {"keeps_pre": False, "bias": False}):
            Layer("gelu_tanh", 4304, 1152, 784, dtype, **options).verify()
        Layer("gelu_tanh", 4304, 1152, most + 1, dtype, keeps_pre=False).verify()
    assert len(launches) == 3
    Layer("gelu_tanh", 4304, 1152, 784, dtype, keeps_pre=False).verify()
    assert len(launches) == 4


def test_graphs_give_the_bits_of_gelu_in_pytorchs_product(device: str) -> None:
    inputs = make_mlp_inputs(MlpCase("tower", "", (784,), 1152, 4304, "gelu_tanh"), torch.bfloat16, device)
    with settings(path="auto"), torch.no_grad():
        expected = inputs.call(mlp)
        assert torch.equal(inputs.call(torch.compile(mlp, fullgraph=True, dynamic=True)), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = inputs.call(mlp)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", ["gated", "deep", "narrow"])
def test_tails_of_rows_and_columns(size: str, rows: int, launches: list[dict[str, Any]]) -> None:
    for activation in ("gelu_tanh", "swiglu"):
        Layer(activation, *SIZES[size], rows).verify()
    assert len(launches) == 2


@pytest.mark.parametrize("keeps_pre", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", WAVE)
def test_every_tile(tile: tuple[int, int], bias: bool, keeps_pre: bool) -> None:
    """Covers a program's last tile, which consumers finish, and earlier tiles, which they hand over."""
    for activation in ("gelu_tanh", "swiglu"):
        # Short tiles alone, all kinds, and for two warpgroups a short one after whole ones.
        for rows in (63, 1000, 1050):
            layer = Layer(activation, 1365, 200, rows, bias=bias, keeps_pre=keeps_pre)
            layer.verify(tile_config(*tile))
            with mock.patch.object(gemm_hopper, "programs", lambda index: 4):
                assert cdiv(rows, tile[0]) * cdiv(1365, tile[1]) > 4
                layer.verify(tile_config(*tile))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_two_weights_give_the_bits_of_one_of_both(bias: bool, rows: int) -> None:
    two = Layer("swiglu", *SIZES["gated"], rows, bias=bias, apart=True)
    actual = two.verify()
    two.weight = torch.cat([two.weight, two.up])
    if bias:
        two.bias = torch.cat([two.bias, two.up_bias])
    two.up = two.up_bias = None
    packed = two.run(two.plan())
    for name in packed:
        assert torch.equal(actual[name], packed[name]), name


def test_two_weights_of_different_strides() -> None:
    layer = Layer("swiglu", *SIZES["gated"], 500, apart=True)
    straight = layer.run(layer.plan())
    wide = layer.up.new_zeros((layer.up.shape[0], layer.up.shape[1] + 64))
    wide[:, 8 : 8 + layer.up.shape[1]] = layer.up
    layer.up = wide[:, 8 : 8 + layer.up.shape[1]]
    for name, tensor in layer.run(layer.plan()).items():
        assert torch.equal(tensor, straight[name]), name


def _strided(x: Tensor, before: int, behind: int) -> Tensor:
    """The same in rows further apart, whose columns before and behind are NaN."""
    wide = x.new_full((x.shape[0], before + x.shape[1] + behind), torch.nan)
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("size", ["tower", "narrow"])
def test_rows_of_x_further_apart(size: str, activation: str, launches: list[dict[str, Any]]) -> None:
    layer = Layer(activation, *SIZES[size], 784)
    straight = layer.verify()
    layer.x = _strided(layer.x, 8, 24)
    for name, tensor in layer.verify().items():
        assert torch.equal(tensor, straight[name]), name
    assert len(launches) == 2


@pytest.mark.parametrize("which", ["x", "weight", "up"])
def test_addresses_that_tma_cannot_reach_are_computed_too(which: str, launches: list[dict[str, Any]]) -> None:
    """Found out when it runs, by the same plan; strides that it cannot have are known before."""
    layer = Layer("swiglu", *SIZES["gated"], 784, apart=True)
    plan = layer.plan()
    layer.run(plan)
    assert len(launches) == 1
    aligned = getattr(layer, which)
    shifted = misaligned(aligned)
    setattr(layer, which, shifted)
    actual = layer.run(plan)
    check(actual, layer.reference(torch.bfloat16), layer.reference(torch.float64))
    setattr(layer, which, _strided(aligned, 3, 2))
    layer.verify()
    assert len(launches) == 1


def test_every_call_sees_its_own_tensors() -> None:
    """Launches after the first are kept ones."""
    plan = None
    for seed in range(3):
        layer = Layer("swiglu", *SIZES["tower"], 700, apart=True, seed=seed)
        plan = plan or layer.plan()
        check(layer.run(plan), layer.reference(torch.bfloat16), layer.reference(torch.float64))


def test_nan_stays_in_its_row() -> None:
    layer = Layer("gelu_tanh", *SIZES["tower"], 300)
    clean = layer.run(layer.plan())
    layer.x[130] = torch.nan
    dirty = layer.run(layer.plan())
    others = torch.arange(300, device="cuda") != 130
    for name in clean:
        assert dirty[name][130].isnan().all() and torch.equal(dirty[name][others], clean[name][others]), name


ROTATED = {
    "d64": (12, 64, None), "d72": (16, 72, None), "d80": (16, 80, None), "d96": (8, 96, 2), "d128": (8, 128, 2),
    "d8": (5, 8, 1), "d72_gqa": (16, 72, 4),
}  # fmt: skip


def _projected(
    case: str, rows: int, dtype: torch.dtype = torch.bfloat16, half: bool = False, own: bool = False, bias: bool = True
) -> QkvRopeInputs:
    heads, head_dim, k_heads = ROTATED[case]
    made = QkvRopeCase(
        case, "", rows, 1152, heads, head_dim, num_k_heads=k_heads, half_table=half, own_table=own, bias=bias
    )  # fmt: skip
    return make_qkv_rope_inputs(made, dtype, "cuda")


@pytest.mark.parametrize("half", [False, True], ids=["full_table", "half_table"])
@pytest.mark.parametrize("case", ROTATED)
def test_heads_are_rotated(case: str, half: bool, launches: list[dict[str, Any]]) -> None:
    for rows in ROWS:
        verify_projection(_projected(case, rows, half=half))
    assert len(launches) == len(ROWS)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float16}, {"own": True}, {"own": True, "half": True}, {"bias": False}], ids=str
)
def test_projections_in_general(options: dict[str, Any], launches: list[dict[str, Any]]) -> None:
    verify_projection(_projected("d72_gqa", 777, **options))
    assert len(launches) == 1


def test_tables_in_rows_further_apart() -> None:
    inputs = _projected("d72", 500)
    straight = inputs.call(qkv_rope)
    moved = inputs.call(qkv_rope, cos=_strided(inputs.cos, 5, 3), sin=_strided(inputs.sin, 1, 2))
    assert all(torch.equal(one, other) for one, other in zip(straight, moved, strict=True))


def _calls() -> dict[str, MlpInputs | QkvRopeInputs]:
    gated = MlpCase("gated", "", (784,), 1280, 3424, "swiglu", apart=True)
    tower = MlpCase("tower", "", (784,), 1152, 4304)
    return {
        "mlp": make_mlp_inputs(tower, torch.bfloat16, "cuda"),
        "gated": make_mlp_inputs(gated, torch.bfloat16, "cuda"),
        "qkv_rope": _projected("d72", 784),
    }


def _results(name: str, inputs: MlpInputs | QkvRopeInputs) -> dict[str, Tensor]:
    return outcome(qkv_rope if name == "qkv_rope" else mlp, inputs, backward=False)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("call", ["mlp", "gated", "qkv_rope"])
def test_same_bits_every_time(call: str) -> None:
    """Two inputs take turns, so that memory which a call reads too early holds the other's numbers."""
    inputs = _calls()[call]
    both = [inputs, replace(inputs, x=inputs.x.flip(0).contiguous())]
    expected = []
    for each in both:
        expected.append(_results(call, each))
        torch.cuda.synchronize()
    assert not _equal(*expected)
    for _ in range(10):
        found = [_results(call, each) for each in both]
        assert all(_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("call", ["mlp", "gated", "qkv_rope"])
def test_graphs_replay_on_other_values(call: str) -> None:
    inputs = _calls()[call]
    _results(call, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _results(call, inputs)
    inputs.x.copy_(torch.randn_like(inputs.x))
    for _ in range(3):
        for tensor in captured.values():
            tensor.fill_(torch.nan)
        graph.replay()
        assert _equal(captured, _results(call, inputs))


def test_streams_do_not_disturb_each_other() -> None:
    calls = _calls()
    expected = {name: _results(name, inputs) for name, inputs in calls.items()}
    torch.cuda.synchronize()
    streams = {name: torch.cuda.Stream() for name in calls}
    for stream in streams.values():
        stream.wait_stream(torch.cuda.current_stream())
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in calls}
    for _ in range(20):
        for name, inputs in calls.items():
            with torch.cuda.stream(streams[name]):
                found[name].append(_results(name, inputs))
    torch.cuda.synchronize()
    for name, results in found.items():
        assert all(_equal(one, expected[name]) for one in results), name


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("call", ["mlp", "gated", "qkv_rope"])
def test_another_stream_is_waited_for(call: str, captured: bool) -> None:
    """An event, not a kernel, precedes the launch in its stream."""
    inputs = _calls()[call]
    expected, x = _results(call, inputs), inputs.x.clone()
    torch.cuda.synchronize()
    other, event = torch.cuda.Stream(), torch.cuda.Event()

    def step() -> dict[str, Tensor]:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(2_000_000)
            inputs.x.copy_(x)
            event.record()
        torch.cuda.current_stream().wait_event(event)
        return _results(call, inputs)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
    for _ in range(3):
        inputs.x.fill_(torch.nan)
        torch.cuda.synchronize()
        if captured:
            graph.replay()
        else:
            found = step()
        assert _equal(found, expected)


@pytest.mark.parametrize("rows", [64, 784, 3136])
def test_launches_in_a_row_on_the_same_buffers(rows: int) -> None:
    """Each kernel begins while the one before is at its end, and reads what that writes, or writes what that reads."""
    first = Layer("gelu_tanh", 1280, 1152, rows, keeps_pre=False)
    second = Layer("silu", 1152, 1280, rows, keeps_pre=False, seed=1)
    plans = first.plan(), second.plan()

    def chain(synchronized: bool) -> tuple[Tensor, Tensor]:
        x, h = first.x.clone(), second.x.clone()
        for _ in range(100):
            plans[0](Linear(x, first.weight, first.bias, h))
            if synchronized:
                torch.cuda.synchronize()
            plans[1](Linear(h, second.weight, second.bias, x))
            if synchronized:
                torch.cuda.synchronize()
        return x, h

    expected = chain(True)
    assert all(tensor.isfinite().all() and tensor.abs().max() > 0 for tensor in expected)
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(chain(False), expected, strict=True))


def test_ops_in_a_row_give_the_bits_of_synchronized_ones() -> None:
    """x -> mlp -> mlp, whose memory the allocator hands on from one to the next."""
    inputs = make_mlp_inputs(MlpCase("row", "", (784,), 1152, 4304), torch.bfloat16, "cuda")

    def chain(synchronized: bool) -> Tensor:
        x = inputs.x
        for _ in range(20):
            x = inputs.call(mlp, x=x)
            if synchronized:
                torch.cuda.synchronize()
        return x

    expected = chain(True)
    assert expected.isfinite().all()
    assert all(torch.equal(chain(False), expected) for _ in range(5))


@pytest.mark.parametrize("call", ["mlp", "gated", "qkv_rope"])
def test_compiled_graphs_launch_the_same_kernel(call: str, launches: list[dict[str, Any]]) -> None:
    inputs = _calls()[call]
    op, reference = (qkv_rope, references.qkv_rope) if call == "qkv_rope" else (mlp, references.mlp)
    actual = outcome(torch.compile(op, fullgraph=True), inputs, backward=False)
    assert len(launches) == 1
    check(actual, *(outcome(reference, inputs, dtype, backward=False) for dtype in (None, torch.float64)))


def test_explain_says_each_path() -> None:
    calls = _calls()
    for path in ("auto", "hopper", "portable"):
        with settings(path=path):
            for name, inputs in calls.items():
                op = qkv_rope if name == "qkv_rope" else mlp
                report = inputs.call(lambda *args, op=op, **up: torch_ops.explain(op, *args, **up))
                expected = path if path != "auto" else "aten" if name == "mlp" else "hopper"
                assert report["path"] == expected, (name, report)
