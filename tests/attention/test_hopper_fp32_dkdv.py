"""The Hopper kernel for gradients of keys and values of fp32: bounds, lengths, layouts, and what is not a number."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from csrc_free_ops.configs.rows import Config, TunedConfig, as_document
from tests.attention.verify import differentiate, plans_made_anew, verify
from torch_ops import attention, explain, settings
from torch_ops._attention import split as attention_split
from torch_ops._attention.hopper_dkdv import _splits
from torch_ops._attention.options import AttentionOptions
from torch_ops._core.device import gpu
from torch_ops.testing.cases import DENSE_LAYOUTS, DenseCase, DenseInputs, make_dense_inputs

HEAD_DIMS = (64, 128)
BOUNDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_left": 100, "window_right": 30},
    "ahead": {"window_right": 40},
    "behind": {"window_left": 150},
    "sinks": {"sinks": True, "causal": True},
}


@pytest.fixture(autouse=True)
def takes_it(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of few programs too, where one kernel of stock Triton's would make all gradients."""
    if device != "cuda" or gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(attention_split, "MOST_PROGRAMS", 0)
    with plans_made_anew():
        yield


def _kernels(inputs: DenseInputs) -> list[str]:
    return list(inputs.call(partial(explain, attention))["kernels"])


def _assert_right(case: DenseCase) -> None:
    """Checks the tolerance rule, and the same bits each time."""
    inputs = make_dense_inputs(case, torch.float32, "cuda")
    assert "attention_bwd_fp32_dkdv_hopper" in _kernels(inputs)
    verify(inputs)
    first, again = (differentiate(torch.ops.vk.attention, inputs) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize(("length", "k_length"), [(300, 300), (130, 517), (517, 130), (1, 1), (40, 5), (1, 200)])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients(head_dim: int, bounds: str, length: int, k_length: int) -> None:
    # With a single key, each head has a single weight. The errors of six weights would be luck.
    batch, heads = (64, 8) if k_length == 1 else (2, 3)
    _assert_right(DenseCase("keys", "", batch, heads, length, head_dim, k_length=k_length, options=BOUNDS[bounds]))


@pytest.mark.parametrize("layout", [*DENSE_LAYOUTS, "rows_first heads_first qkv_view odd_strides"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layouts(head_dim: int, layout: str) -> None:
    _assert_right(DenseCase(layout, "", 2, 2, 150, head_dim, layout=layout, options={"causal": True}))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_keys(head_dim: int) -> None:
    _assert_right(DenseCase("many", "", 1, 2, 1500, head_dim, k_length=1700, options={"causal": True}))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_heads(head_dim: int) -> None:
    """So many that no rows are split, and so few that they are."""
    for heads in (40, 2):
        case = DenseCase("heads", "", 2, heads, 300, head_dim, layout="rows_first", options={"window_right": 40})
        inputs = make_dense_inputs(case, torch.float32, "cuda")
        assert (_splits(inputs.q, inputs.k) > 1) == (heads == 2)
        _assert_right(case)


@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_small_and_large_numbers(size: float) -> None:
    """dout times a power of 2 gives gradients that are as much larger, to the bit."""
    inputs = make_dense_inputs(DenseCase("size", "", 2, 2, 200, 128), torch.float32, "cuda")
    plain = differentiate(torch.ops.vk.attention, inputs)
    inputs.dout.mul_(size)
    inputs.dlse.mul_(size)
    for name, tensor in differentiate(torch.ops.vk.attention, inputs).items():
        scale = size if name.startswith("d") else 1.0
        assert torch.equal(tensor / scale, plain[name]), name


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_infinities_and_nans_stay_where_they_belong(head_dim: int) -> None:
    """Whose smaller parts are NaN: dv, of dout and weights alone."""
    inputs = make_dense_inputs(DenseCase("infinite", "", 1, 3, 200, head_dim), torch.float32, "cuda")
    inputs.dout[0, 0, 120, 7] = float("inf")
    inputs.dout[0, 0, 121, 8] = float("-inf")
    inputs.dout[0, 1, 60, 9] = float("nan")
    inputs.v[0, 2, 199, 9] = float("inf")
    gradients = differentiate(torch.ops.vk.attention, inputs)
    dv = gradients["dv"][0]
    assert dv[0, :, 7].isposinf().all() and dv[0, :, 8].isneginf().all() and dv[1, :, 9].isnan().all()
    assert dv.isfinite().sum() == dv.numel() - 3 * 200
    with settings(path="portable"):
        stock = differentiate(torch.ops.vk.attention, inputs)
    assert torch.equal(gradients["dk"].isnan(), stock["dk"].isnan())


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"alibi": 1}, {"dropout_p": 0.2}, {}], ids=str)
def test_stock_triton_keeps_what_else_there_is(options: dict[str, Any]) -> None:
    """Several query heads to a key head too."""
    case = DenseCase("rest", "", 2, 4, 60, 64, num_k_heads=4 if options else 2, options=options)
    inputs = make_dense_inputs(case, torch.float32, "cuda")
    assert "attention_bwd_dkdv" in _kernels(inputs)
    verify(inputs)


@pytest.mark.parametrize(("head_dim", "programs"), [(64, 100), (128, 0), (128, 100)])
def test_few_programs_of_128_columns_are_stock_tritons(
    head_dim: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_split, "MOST_PROGRAMS", programs)
    inputs = make_dense_inputs(DenseCase("few", "", 1, 1, 60, head_dim), torch.float32, "cuda")
    kernels = inputs.call(partial(explain, attention))["kernels"]
    few = head_dim == 128 and programs > 0
    assert ("attention_bwd_fp32_dkdv_hopper" in kernels) == (not few)
    assert ("one kernel for both" in kernels["attention_bwd_dq"]["source"]) == few


def test_rows_for_stock_tritons_kernel_choose_it(tmp_path: Path) -> None:
    rows = tmp_path / "rules.json"
    row = TunedConfig("attention_bwd_dkdv", "float32", 64, Config(32, 64, 4, 1))
    rows.write_text(json.dumps(as_document([row], {"gpu": "any", "triton": "-", "date": "-"})))
    inputs = make_dense_inputs(DenseCase("own", "", 1, 1, 60, 64), torch.float32, "cuda")
    with settings(rows=str(rows)):
        assert "attention_bwd_dkdv" in _kernels(inputs)


@pytest.mark.parametrize("layout", ["heads_first", "rows_first", "batch_inside"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_has_the_same_bits(backend: str, layout: str) -> None:
    case = DenseCase("graph", "", 2, 2, 150, 128, layout=layout, options={"causal": True})
    inputs = make_dense_inputs(case, torch.float32, "cuda")
    compiled = torch.compile(torch.ops.vk.attention, backend=backend, fullgraph=True)
    eager = differentiate(torch.ops.vk.attention, inputs)
    for name, tensor in differentiate(compiled, inputs).items():
        assert torch.equal(tensor, eager[name]), name


def test_captured_has_the_same_bits() -> None:
    """With rows that are split, whose parts lie in the graph's memory."""
    q, k, v = (torch.randn(1, 4, 200, 64, device="cuda", requires_grad=True) for _ in range(3))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        out = attention(q, k, v, causal=True)
        dout = torch.randn_like(out)
        expected = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for gradient in gradients:
            gradient.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(gradient, right) for gradient, right in zip(gradients, expected, strict=True))


def test_opaque_launch_is_a_sound_op() -> None:
    q, k, v, dout = (torch.randn(2, 3, 100, 64, device="cuda") for _ in range(4))
    out, lse = attention(q, k, v, return_lse=True)
    delta = (out * dout).sum(3)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    args = (q, k, v, lse, dout, delta, dk, dv, *AttentionOptions(0.125))
    torch.library.opcheck(torch.ops.vk._attention_bwd_fp32_dkdv.default, args)
    torch.ops.vk._attention_bwd_fp32_dkdv(*args)
    assert dk.any() and dv.any()
