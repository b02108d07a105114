"""`VisionAttention` without rotation: the boundaries that it remembers, and layers that it may not look into."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compile_tests.contract.trace import capture_graphs, recompiling_fails
from torch_ops.models import VisionAttention, _boundaries
from torch_ops.models._boundaries import one_segment
from torch_ops.testing import check, check_draws
from torch_ops.testing.tolerance import Draw

pytestmark = pytest.mark.no_interpret

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_known", "_of_graphs"):
        monkeypatch.setattr(_boundaries, name, type(getattr(_boundaries, name))())
    yield


def attention(dtype: torch.dtype = torch.float32) -> VisionAttention:
    torch.manual_seed(0)
    return VisionAttention(48, 2, 16).to(dtype)


def plain(module: VisionAttention, x: Tensor) -> Tensor:
    q, k, v = module.qkv(x).unflatten(1, (3, module.num_heads, -1)).permute(1, 2, 0, 3)
    return module.proj(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


def gradients(function: Callable[[Any, Tensor], Tensor], module: VisionAttention, x: Tensor) -> dict[str, Tensor]:
    """The result and the gradients of all that requires one."""
    leaf = x.detach().clone().requires_grad_()
    wanted = {"x": leaf, **{name: each for name, each in module.named_parameters() if each.requires_grad}}
    out = function(module, leaf)
    dout = torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape).to(out.dtype)
    found = torch.autograd.grad(out, tuple(wanted.values()), dout)
    return {"out": out.detach(), **dict(zip(wanted, found, strict=True))}


def check_gradients(module: VisionAttention, rows: int) -> None:
    def draw(seed: int) -> Draw:
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))
        truth = gradients(plain, copy.deepcopy(module).double(), x.double())
        return gradients(VisionAttention.__call__, module, x), gradients(plain, module, x), truth

    check_draws(draw)


def test_boundaries_are_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = one_segment(5, CPU)
    assert first.dtype is torch.int32 and first.tolist() == [0, 5]
    assert one_segment(5, CPU) is first and one_segment(6, CPU).tolist() == [0, 6]
    assert one_segment(0, CPU).tolist() == [0, 0]
    assert one_segment(5, torch.device("meta")).is_meta
    _boundaries._known.clear()
    monkeypatch.setattr(_boundaries, "CACHE_SIZE", 2)
    for rows in (5, 6, 5, 7):
        one_segment(rows, CPU)
    assert [rows for rows, _ in _boundaries._known] == [5, 7]


def test_boundaries_of_inference_serve_training() -> None:
    module, x = attention(), torch.randn(9, 48)
    with torch.inference_mode():
        module(x)
        assert not one_segment(9, CPU).is_inference()
    (known,) = _boundaries._known.values()
    check_gradients(module, 9)
    assert [each.tensor for each in _boundaries._known.values()][0] is known.tensor


@pytest.mark.parametrize("rows", (0, 1, 2, 37))
def test_two_calls_and_any_number_of_rows(rows: int) -> None:
    module = attention(torch.float64)
    for seed in range(2):
        x = torch.randn(rows, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(gradients(VisionAttention.__call__, module, x), gradients(plain, module, x))


def test_graphs_of_any_length_make_their_own_boundaries() -> None:
    module = attention()
    function, graphs = capture_graphs(module, dynamic=True)
    with recompiling_fails():
        for rows in (7, 40, 13):
            x = torch.randn(rows, 48)
            actual = gradients(lambda _, x: function(x), module, x)
            torch.testing.assert_close(actual, gradients(VisionAttention.__call__, module, x))
    assert "vk._vision_attention.default" in graphs.dynamo and "vk._vision_attention_backward" in graphs.backward
    assert len(_boundaries._known) == 3
    _boundaries._known.clear()
    dynamic = ({0: torch.export.Dim("rows", min=2)},)
    program = torch.export.export(module, (torch.randn(12, 48),), dynamic_shapes=dynamic)
    x = torch.randn(31, 48)
    torch.testing.assert_close(program.module()(x), plain(module, x))
    assert not _boundaries._known


def test_functional_transforms_leave_nothing_behind() -> None:
    module, x = attention(), torch.randn(3, 9, 48)
    with torch.no_grad():
        found = torch.func.vmap(module)(x)
        assert not _boundaries._known
        torch.testing.assert_close(found, torch.stack([module(each) for each in x]))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    def in_region(function: Any) -> Any:
        def run(module: VisionAttention, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return function(module, x)

        return run

    module, x = attention(), torch.randn(50, 48)
    actual, eager = (gradients(in_region(function), module, x) for function in (VisionAttention.__call__, plain))
    assert actual["out"].dtype is dtype and actual["qkv.bias"].dtype is torch.float32
    check(actual, eager, gradients(plain, copy.deepcopy(module).double(), x.double()))


@pytest.mark.parametrize("frozen", ("qkv", "proj", "qkv.bias", "qkv.weight", ""))
def test_frozen_parameters(frozen: str) -> None:
    module = attention()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else False)
    check_gradients(module, 20)


def test_layers_without_bias() -> None:
    module = attention()
    module.qkv, module.proj = nn.Linear(48, 96, bias=False), nn.Linear(32, 48, bias=False)
    check_gradients(module, 20)


@pytest.mark.parametrize("name", ("qkv", "proj"))
def test_replaced_and_hooked_layers_are_called(name: str) -> None:
    module, called = attention(), []
    layer = getattr(module, name)
    handle = layer.register_forward_hook(lambda *_: called.append("hook"))
    check_gradients(module, 20)
    assert called
    handle.remove()
    setattr(module, name, nn.Sequential(layer, nn.Linear(layer.out_features, layer.out_features)))
    check_gradients(module, 20)


def test_a_module_may_be_used_twice() -> None:
    def twice(call: Any) -> Any:
        return lambda module, x: call(module, call(module, x))

    module, x = attention(), torch.randn(20, 48)
    truth = gradients(twice(plain), copy.deepcopy(module).double(), x.double())
    check(gradients(twice(VisionAttention.__call__), module, x), gradients(twice(plain), module, x), truth)


@pytest.mark.gpu
def test_boundaries_cost_one_copy_and_no_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    one_segment(1, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = one_segment(300, device)
        assert one_segment(300, device) is first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.tolist() == [0, 300]


@pytest.mark.gpu
def test_streams_share_boundaries_once_they_arrived() -> None:
    device, other = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    for rows in range(2, 200):
        torch.cuda._sleep(100_000)
        first = one_segment(rows, device)
        with torch.cuda.stream(other):
            second = one_segment(rows, device)
            read = second.clone()
        assert second is first
        other.synchronize()
        assert read.tolist() == [0, rows]
    known = _boundaries._known[199, device]
    one_segment(199, device)
    assert known.arrival is None and len(known.streams) == 2


def _captured(rows: int, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = one_segment(rows, device) * 1
    return graph, read


@pytest.mark.gpu
@pytest.mark.parametrize("calls", (0, 2))
def test_graphs_keep_the_boundaries_that_they_read(calls: int) -> None:
    """Without calls before, a graph makes boundaries of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(calls):
        one_segment(77, device)
        torch.cuda.synchronize()
    graph, read = _captured(77, device)
    assert len(_boundaries._of_graphs) == (calls > 0)
    _boundaries._known.clear()
    gc.collect()
    scratch = [torch.full((2,), -1, dtype=torch.int32, device=device) for _ in range(64)]
    graph.replay()
    assert read.tolist() == [0, 77] and len(scratch) == 64


@pytest.mark.gpu
def test_a_step_in_a_cuda_graph_launches_no_kernel_for_boundaries() -> None:
    module = VisionAttention(1024, 16).to("cuda", torch.bfloat16)
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> Tensor:
        module(x).sum().backward()
        return x

    for _ in range(3):
        step()
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profile.events())
    assert "arange" not in names and "CatArray" not in names and "_column_sums_kernel" in names
