"""The Hopper path of attention on batches [B, H, S, D]: its orders of tiles, and its two backwards."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from csrc_free_ops.attention.hopper.scheduler import DENSE_ENDS
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS
from tests.attention.verify import differentiate, verify, verify_downcast
from torch_ops import attention, explain, settings
from torch_ops._attention import hopper_backward as attention_hopper_backward
from torch_ops._attention.hopper import _forward_order, forward_config
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Forward
from torch_ops._core.counters import WorkCounters, block_size, work_counters
from torch_ops._core.device import gpu
from torch_ops._core.hopper import programs
from torch_ops.testing.cases import DenseCase, make_dense_inputs

CAUSAL: dict[str, Any] = {"causal": True}
BOUNDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": {"window_left": 100, "window_right": 30},
    "sliding": {"window_left": 90, **CAUSAL},
    "ahead": {"window_right": 40},
    "behind": {"window_left": 200},
    "sinks": {"sinks": True, **CAUSAL},
}


@pytest.fixture(autouse=True)
def hopper(device: str) -> Iterator[None]:
    if device != "cuda" or gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    with settings(path="hopper"):
        yield


def _assert_right(case: DenseCase, times: int = 5) -> None:
    """Checks the tolerance rule, and the same bits each time."""
    inputs = make_dense_inputs(case, torch.bfloat16, "cuda")
    verify(inputs)
    first = differentiate(torch.ops.vk.attention, inputs)
    for _ in range(times):
        for name, again in differentiate(torch.ops.vk.attention, inputs).items():
            assert torch.equal(again, first[name]), name


@pytest.mark.parametrize(("length", "k_length"), [(1024, 1024), (1010, 1100), (1010, 700), (120, 400), (120, 60)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_from_either_end(head_dim: int, length: int, k_length: int) -> None:
    units = -(-length // 64)
    k_heads = -(-3 * programs(0) // (4 * units))
    case = DenseCase("ends", "one round", 1, 2 * k_heads, length, head_dim, k_heads, k_length, options=CAUSAL)
    options = AttentionOptions(head_dim**-0.5, right=0)
    inputs = make_dense_inputs(case, torch.bfloat16, "cuda")
    launch = forward_config(inputs.q, options, 1)[0]
    tensors = Forward(inputs.q, inputs.k, inputs.v, None, None, inputs.q, inputs.q)
    assert (_forward_order(tensors, launch, options) == DENSE_ENDS.value) == (launch.block_m == 128)
    _assert_right(case, times=20)


@pytest.mark.parametrize("is_apart", [False, True], ids=["in_order", "apart"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients(head_dim: int, bounds: str, is_apart: bool) -> None:
    """Whichever backward there would have been for so few tiles."""
    case = DenseCase("grads", "a backward", 2, 6, 500, head_dim, 3, 610, "rows_first", BOUNDS[bounds])
    with mock.patch.object(attention_hopper_backward, "fits_small", lambda *_: is_apart):
        _assert_right(case)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles(head_dim: int, bounds: str) -> None:
    _assert_right(DenseCase("rounds", "several of tiles", 5, 16, 700, head_dim, 4, 450, options=BOUNDS[bounds]))


def _assert_downcast_right(case: DenseCase, dtype: torch.dtype = torch.bfloat16, times: int = 5) -> None:
    """Checks the tolerance rule for the kernel that casts as it goes, and the same bits each time."""
    inputs = make_dense_inputs(case, torch.float32, "cuda")
    report = inputs.call(partial(explain, attention), options={**inputs.options, "compute_dtype": dtype})
    assert next(iter(report["kernels"])) == "attention_fwd_fp32_hopper"
    verify_downcast(inputs, dtype)
    downcast = partial(torch.ops.vk.attention, compute_dtype=dtype)
    first = differentiate(downcast, inputs)
    for _ in range(times):
        for name, again in differentiate(downcast, inputs).items():
            assert torch.equal(again, first[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_downcast_of_many_tiles(head_dim: int, bounds: str, dtype: torch.dtype) -> None:
    case = DenseCase("rounds", "several of tiles", 5, 16, 700, head_dim, 4, 450, options=BOUNDS[bounds])
    _assert_downcast_right(case, dtype)


@pytest.mark.parametrize(
    ("length", "k_length"), [(1024, 1024), (1010, 1100), (1010, 700), (120, 400), (120, 60), (1, 1)]
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_downcast_of_few_tiles(head_dim: int, length: int, k_length: int) -> None:
    """Fewer than programs, with an odd end each, and those that have rows from either end."""
    case = DenseCase("few", "one round", 1, 6, length, head_dim, 3, k_length, options=CAUSAL)
    _assert_downcast_right(case, times=20)


LAYOUTS = (
    "rows_first", "batch_inside", "qkv_view", "cut", "rows_cut",
    "heads_first rows_cut rows_first rows_cut", "rows_cut heads_first rows_cut rows_first",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layouts(head_dim: int, layout: str) -> None:
    """In three dimensions and in four, and some in either."""
    _assert_right(DenseCase(layout, "strides", 3, 4, 300, head_dim, 2, 200, layout, CAUSAL))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_downcast_of_any_layout(head_dim: int, layout: str) -> None:
    """The same."""
    _assert_downcast_right(DenseCase(layout, "strides", 3, 4, 300, head_dim, 2, 200, layout, CAUSAL))


def test_downcast_does_not_round_out() -> None:
    q = torch.randn(2, 4, 300, 64, device="cuda")
    out = attention(q, q, q, compute_dtype=torch.bfloat16)
    assert not torch.equal(out, out.bfloat16().float())


def test_downcast_without_lse_has_the_same_bits() -> None:
    q = torch.randn(2, 4, 300, 96, device="cuda")
    out, _ = torch.ops.vk.attention(q, q, q, compute_dtype=torch.bfloat16)
    assert torch.equal(torch.ops.vk.attention(q, q, q, return_lse=False, compute_dtype=torch.bfloat16)[0], out)


def test_downcast_of_more_key_heads_than_a_block_has_counters() -> None:
    case = DenseCase("heads", "zeros of its own", 66, 64, 130, 64, options=CAUSAL)
    assert case.batch * case.num_heads > WorkCounters.LARGEST
    _assert_downcast_right(case, times=2)


def test_downcasts_on_several_streams() -> None:
    """Each counts for itself."""
    inputs = [torch.randn(2, 8, 1000, 128, device="cuda") for _ in range(4)]
    expected = [attention(q, q, q, compute_dtype=torch.bfloat16) for q in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        outs = []
        for q, stream in zip(inputs, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs.append(attention(q, q, q, compute_dtype=torch.bfloat16))
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


def test_more_captured_downcasts_than_blocks() -> None:
    q = torch.randn(2, 8, 500, 64, device="cuda")
    expected = attention(q, q, q, compute_dtype=torch.bfloat16)
    counters = work_counters(q.device)
    size = block_size(2 * 8 + 1)
    graphs = []
    with mock.patch.dict(counters._fresh, {size: counters._fresh[size][:1]}):
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attention(q, q, q, compute_dtype=torch.bfloat16)
            graphs.append((graph, out))
    for graph, out in reversed(graphs * 2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_opaque_launches_are_sound_ops_and_tell_types_of_sinks_apart() -> None:
    wide, half = (torch.randn(2, 4, 200, 64, device="cuda").to(dtype) for dtype in (torch.float32, torch.bfloat16))
    sinks = torch.randn(4, device="cuda").bfloat16()
    op = torch.ops.vk._attention_fwd.default
    for q, dtype in ((wide, torch.bfloat16), (half, None)):
        outs = []
        for sink in (sinks, sinks.float()):
            out, lse = torch.zeros_like(q), torch.zeros(2, 4, 200, device="cuda")
            tensors = Forward(q, q, q, None, None, out, lse, sinks=sink)
            args = (*tensors, *AttentionOptions(0.125, right=0, has_sinks=True, compute_dtype=dtype))
            op(*args)
            outs.append(out)
        assert torch.equal(*outs) and outs[0].any()
        torch.library.opcheck(op, args)
