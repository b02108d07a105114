"""Other libraries' signatures under torch.compile: the ops alone in one graph, and nothing copied."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.contract.trace import (
    assert_expected_inline,
    capture_graphs,
    cloned_tensors,
    fake_gpu,
    recompiling_fails,
    symbolic_size,
    trace_kernels,
)
from csrc_free_ops.configs.handover import HandOver
from csrc_free_ops.configs.rows import Gpu
from torch_ops import kv_cache_append, settings
from torch_ops._core import device as _device
from torch_ops.compat import (
    _handover,
    _handover_rule,
    flash_attn_func,
    flash_attn_kvcache,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fused_zigzag_llama3_flash_attn_varlen_forward,
    replace_execute_grouped_attention_with_fused_varlen,
    scaled_dot_product_attention,
    sdpa,
)
from torch_ops.testing import check
from torch_ops.testing.cases import cumulative

causal_attention = partial(scaled_dot_product_attention, is_causal=True)
LENGTHS = {
    "equal": ((9, 9), (12, 12)),
    "fewer_queries": ((5, 9), (7, 21)),
    "more_queries": ((9, 5), (21, 7)),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the op's reference stands in for kernels."""
    monkeypatch.setattr(sdpa, "runs_kernels", lambda tensor: True)


def _dense(queries: int, keys: int, device: str, batch: tuple[int, ...] = (2, 4)) -> list[Tensor]:
    return [torch.randn(*batch, rows, 8, device=device, requires_grad=True) for rows in (queries, keys, keys)]


def _results(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out = function(*tensors)
    return out, *torch.autograd.grad(out.square().sum(), tensors)


def _assert_same(function: Callable[..., Tensor], eager: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """But for the order of sums, which may differ where a graph of dynamic shape has launches of its own."""
    torch.testing.assert_close(_results(function, tensors), _results(eager, tensors))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_graphs_of_pytorchs_signature_hold_the_op_and_views(device: str) -> None:
    function, graphs = capture_graphs(causal_attention)
    _assert_same(function, causal_attention, _dense(9, 9, device))
    assert_expected_inline(graphs.dynamo, """vk.attention.default\n""")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", LENGTHS)
def test_one_graph_for_all_lengths_of_an_order(name: str, device: str) -> None:
    function, graphs = capture_graphs(causal_attention, dynamic=True)
    with recompiling_fails():
        for lengths in LENGTHS[name]:
            _assert_same(function, causal_attention, _dense(*lengths, device))
    assert graphs.dynamo.count("vk.attention.default") == 1


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)], ids=str)
def test_other_numbers_of_dimensions_are_captured(batch: tuple[int, ...], device: str) -> None:
    function, graphs = capture_graphs(causal_attention)
    _assert_same(function, causal_attention, _dense(9, 5, device, batch))
    assert "vk.attention.default" in graphs.dynamo


@pytest.mark.usefixtures("as_on_a_gpu")
def test_dropout_in_a_graph_follows_the_generator(device: str) -> None:
    function, _ = capture_graphs(partial(scaled_dot_product_attention, dropout_p=0.5))
    tensors = _dense(9, 9, device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(function(*tensors))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_passed_on_is_captured_too(device: str) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, q.new_zeros(9, 5))

    function, graphs = capture_graphs(masked)
    q, k, v = _dense(9, 5, device)
    torch.testing.assert_close(function(q, k, v), masked(q, k, v))
    assert "vk" not in graphs.dynamo and "scaled_dot_product_attention" in graphs.dynamo


def test_a_bound_that_follows_lengths_stays_a_symbol_for_kernels() -> None:
    """More queries than keys: the only order that the op has no flag for."""
    with fake_gpu() as mode:
        with mode:
            queries, keys = symbolic_size(mode, "queries", 300), symbolic_size(mode, "keys", 200)
            q, k = (torch.empty(2, 4, rows, 64, device="cuda", dtype=torch.float16) for rows in (queries, keys))
        trace = trace_kernels(causal_attention, (q, k, k))
    assert [kernel.name for kernel in trace.kernels] == ["_attention_fwd_dense_kernel"]
    assert not mode.shape_env.replacements


FLASH = {"causal": True, "window_size": (5, 0), "softcap": 3.0}


def test_graphs_of_flash_attn_hold_the_op_and_views(device: str) -> None:
    function, graphs = capture_graphs(partial(flash_attn_func, **FLASH), dynamic=True)
    with recompiling_fails():
        for rows, keys in ((9, 7), (12, 31)):
            tensors = [tensor.transpose(1, 2) for tensor in _dense(rows, keys, device)]
            _assert_same(function, partial(flash_attn_func, **FLASH), tensors)
    assert graphs.forward.count("vk.") == 1 or device != "cpu"
    assert graphs.dynamo.count("vk.attention.default") == 1


@pytest.mark.parametrize("shared", [True, False])
def test_graphs_of_packed_sequences_know_shared_boundaries(shared: bool, device: str) -> None:
    cu = cumulative((4, 0, 5), device)
    cu_k = cu if shared else cu.clone()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, cu, cu_k, 5, 5, **FLASH)

    function, graphs = capture_graphs(ours)
    _assert_same(function, ours, [torch.randn(9, 2, 8, device=device, requires_grad=True) for _ in range(3)])
    assert_expected_inline(graphs.dynamo, """vk.window_attn.default\n""")


def test_graphs_of_one_packed_tensor_copy_nothing(device: str) -> None:
    function, graphs = capture_graphs(flash_attn_qkvpacked_func)
    _assert_same(function, flash_attn_qkvpacked_func, [torch.randn(2, 9, 3, 2, 8, device=device, requires_grad=True)])
    assert "clone" not in graphs.forward and "copy" not in graphs.forward


def _cache_call(device: str, batch: int = 2, page_size: int = 0) -> dict[str, Any]:
    rows = (batch * 3, page_size) if page_size else (batch, 48)
    call = {
        "q": torch.randn(batch, 1, 4, 16, device=device),
        **{name: torch.randn(*rows, 2, 16, device=device) for name in ("k_cache", "v_cache")},
        **{name: torch.randn(batch, 1, 2, 16, device=device) for name in ("k", "v")},
        **{name: torch.randn(48, 8, device=device) for name in ("rotary_cos", "rotary_sin")},
        "cache_seqlens": torch.arange(batch, dtype=torch.int32, device=device),
    }
    if page_size:
        call["block_table"] = torch.arange(batch * 3, dtype=torch.int32, device=device).view(batch, 3)
    return call


@pytest.mark.parametrize("page_size", [0, 16])
def test_graphs_write_to_the_callers_caches(page_size: int, device: str) -> None:
    function, _ = capture_graphs(partial(flash_attn_with_kvcache, causal=True), dynamic=True)
    with recompiling_fails():
        for batch in (5, 7):
            call = _cache_call(device, batch, page_size)
            eager = {**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()}
            torch.testing.assert_close(function(**call), flash_attn_with_kvcache(**eager, causal=True))
            torch.testing.assert_close(call, eager)


@pytest.mark.parametrize("rotary", [True, False])
def test_opaque_append_is_the_append(rotary: bool, device: str) -> None:
    call = _cache_call(device)
    call["q"] = call["q"] if rotary else None
    turned = torch.empty_like(call["q"].transpose(1, 2)) if rotary else None
    tables = (call["rotary_cos"], call["rotary_sin"]) if rotary else (None, None)
    new, queries = (call["k"], call["v"], call["k_cache"], call["v_cache"]), (None, call["q"], *tables)
    caches = [call[name].clone() for name in ("k_cache", "v_cache")]
    tensors = flash_attn_kvcache.NewKeys(*new, call["cache_seqlens"], *queries, turned)
    # An op for GPUs alone; its plan runs anywhere.
    if device == "cpu":
        flash_attn_kvcache._plan_append(tensors, flash_attn_kvcache.AppendOptions(True)).launch(tensors)
    else:
        torch.ops.vk._flash_attn_append(*tensors, True)
    views = [None if tensor is None else tensor.transpose(1, 2) for tensor in (*new[:2], *caches, call["q"])]
    expected = kv_cache_append(*views[:4], call["cache_seqlens"], None, views[4], *tables, True)
    assert all(torch.equal(one, other) for one, other in zip(new[2:], caches, strict=True))
    assert turned is None or torch.equal(turned, expected)
    if device == "cuda":
        torch.library.opcheck(torch.ops.vk._flash_attn_append.default, (*tensors, True))


@pytest.mark.parametrize(("page_size", "rotary"), [(0, True), (16, False)])
def test_no_cache_is_cloned(page_size: int, rotary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of transposed caches, which the op takes, it would be."""

    def left_by(call: dict[str, Any]) -> list[set[str]]:
        def ours(*args: Tensor) -> Any:
            return flash_attn_with_kvcache(**dict(zip(call, args, strict=True)))

        return cloned_tensors(ours, tuple(call.values()))

    with fake_gpu() as mode:
        with mode:
            call = _cache_call("cuda", page_size=page_size)
        if not rotary:
            call = {name: tensor for name, tensor in call.items() if not name.startswith("rotary")}
        assert left_by(call) == [{"k_cache_ptr", "v_cache_ptr"}, set()]
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert left_by(call) == [set(), set()]


# --- ring-flash-attention's groups of queries ---


def _results_of(function: Callable[..., Sequence[Tensor]], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """All results and the gradients of those that are finite."""
    results = function(*tensors)
    total = sum(result[torch.isfinite(result)].square().sum() for result in results)
    assert isinstance(total, Tensor)
    return *results, *torch.autograd.grad(total, tensors)


def test_graphs_of_two_groups_hold_one_op(device: str) -> None:
    """Lengths and limits are values on the device, and the number of sequences is a symbol."""

    def call(index: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        *boundaries, limit = index
        return fused_zigzag_llama3_flash_attn_varlen_forward(*tensors, *boundaries, 16, 16, 40, limit, 40)

    function, graphs = capture_graphs(call, dynamic=True)
    with recompiling_fails():
        for lengths in (((9, 3, 0, 1), (5, 8, 2, 0), (20, 31, 1, 6)), ((4, 0, 5), (2, 8, 1), (16, 3, 40))):
            index = [cumulative(own, device) for own in lengths]
            index.append(torch.tensor([10, 4, 7, 1][: len(lengths[0])], dtype=torch.int32, device=device))
            rows = [sum(own) for own in (*lengths, lengths[2])]
            tensors = [torch.randn(size, 6, 8, device=device, requires_grad=True) for size in rows]
            made, expected = (_results_of(partial(each, index), tensors) for each in (function, call))
            torch.testing.assert_close(made, expected)
    assert graphs.dynamo.count("vk.segment_attention.default") == 1


@pytest.mark.parametrize("options", [(True, (-1, -1)), (False, (5, 3))], ids=["causal", "window"])
def test_graphs_of_grouped_attention_hold_one_op(options: tuple[bool, tuple[int, int]], device: str) -> None:
    """Rank 1 of 2, with sequences of 16 and 8 tokens."""
    ranges = [[(0, 8), (16, 20)], [(0, 12), (16, 22)]]
    slices = [(ranges[0], cumulative((8, 4), device)), (ranges[1], cumulative((12, 6), device))]
    rows = torch.arange(12, device=device)
    indices = [rows[[0, 1, 2, 3, 8, 9]], rows[[4, 5, 6, 7, 10, 11]]]

    def call(q0: Tensor, q1: Tensor, kv_buffer: Tensor) -> Sequence[Tensor]:
        return replace_execute_grouped_attention_with_fused_varlen(
            [q0, q1], [cumulative((4, 2), device)] * 2, indices, kv_buffer, slices, 2, 8, None, 0.0, options[0],
            options[1], None, True, 2, cumulative((8, 4), device), 1, 2,
        )[:2]  # fmt: skip

    function, graphs = capture_graphs(call)
    shapes = ((6, 2, 8), (6, 2, 8), (2, 24, 1, 8))
    tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    torch.testing.assert_close(_results_of(function, tensors), _results_of(call, tensors))
    assert graphs.dynamo.count("vk.segment_attention.default") == 1


# --- calls that PyTorch's own kernels take; tests/compat/test_handover.py has the rule ---

GPU = torch.cuda.is_available()
ROWS = tuple(HandOver("flash", "forward", "bfloat16", 16, causal, 4, True) for causal in (False, True))
EAGER_ONLY = tuple(dataclasses.replace(row, every_length=False) for row in ROWS)
TRAINING = tuple(dataclasses.replace(row, direction="training") for row in ROWS)
OURS, THEIRS = "vk.attention.default", "_scaled_dot_product_flash_attention"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the rows in force. On a CPU PyTorch's kernel for CPUs stands in for its flash kernel."""

    def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, keeps_lse: bool) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def set_rows(*rows: HandOver) -> None:
        monkeypatch.setattr(_handover_rule, "shipped_hand_over", lambda name: rows)
        _handover_rule.choices.clear()

    if not GPU:
        kernel = _handover_rule.Kernel(cpu_kernel, lambda: True, lambda params: True)
        monkeypatch.setitem(_handover_rule.KERNELS, "flash", kernel)
        monkeypatch.setattr(_handover, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(sdpa, "runs_kernels", lambda tensor: True)
        monkeypatch.setattr(_handover_rule, "gpu", lambda: Gpu("any", "cuda", 90, 2**17))
        # PyTorch's builds for CUDA ask a driver.
        monkeypatch.setattr(_device, "current_cuda_device", lambda: -1)
    return set_rows


def _half(rows: int, device: str) -> list[Tensor]:
    return [torch.randn(2, 4, rows, 16, device=device).bfloat16().requires_grad_() for _ in range(3)]


def _assert_close(function: Callable[..., Tensor], eager: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """`eager` takes doubles too, which PyTorch itself computes."""
    _check_results(_results(function, tensors), _results(eager, tensors), _results(eager, _doubles(tensors)))


def _doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach().double().requires_grad_() for each in tensors]


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`flash_attn_func` of tensors [B, H, S, D]."""
    made = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=True)
    assert isinstance(made, Tensor)
    return made.transpose(1, 2)


def _check_results(actual: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """The tolerance rule on an output and its gradients."""
    check(*({str(place): each for place, each in enumerate(results)} for results in (actual, eager, truth)))


def test_graphs_hold_their_forward_and_our_backward(device: str, measured: Callable[..., None]) -> None:
    measured(*ROWS)
    function, graphs = capture_graphs(causal_attention)
    _assert_close(function, causal_attention, _half(9, device))
    assert_expected_inline(graphs.dynamo, """vk._attention_or_aten.default\n""")
    assert THEIRS in graphs.forward and "vk.attention" not in graphs.forward
    assert THEIRS not in graphs.backward and (GPU or "vk.attention_backward.default" in graphs.backward)


def test_graphs_hold_their_backward_where_any_order_is_allowed(device: str, measured: Callable[..., None]) -> None:
    measured(*TRAINING)
    function, graphs = capture_graphs(_flash_attn)
    tensors = _half(9, device)
    truth = _results(causal_attention, _doubles(tensors))
    _check_results(_results(function, tensors), _results(_flash_attn, tensors), truth)
    assert THEIRS in graphs.forward and THEIRS in graphs.backward and "vk" not in graphs.forward + graphs.backward


@pytest.mark.parametrize("rows", [ROWS, EAGER_ONLY], ids=["every_length", "some_lengths"])
def test_graphs_of_dynamic_lengths_hand_over_by_rows_of_every_length(
    rows: tuple[HandOver, ...], device: str, measured: Callable[..., None]
) -> None:
    measured(*rows)
    function, graphs = capture_graphs(causal_attention, dynamic=True)
    with recompiling_fails():
        for length in (9, 3, 21):
            _assert_close(function, causal_attention, _half(length, device))
    assert (THEIRS in graphs.forward) == (rows is ROWS)


def test_graphs_of_calls_that_stay_hold_the_op(device: str, measured: Callable[..., None]) -> None:
    measured()
    function, graphs = capture_graphs(causal_attention)
    _assert_close(function, causal_attention, _half(9, device))
    assert THEIRS not in graphs.forward and (GPU or OURS in graphs.forward)


def test_graphs_within_autocast_hand_over(device: str, measured: Callable[..., None]) -> None:
    measured(*ROWS)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return scaled_dot_product_attention(q, k, v)

    function, graphs = capture_graphs(call)
    tensors = [tensor.detach().float().requires_grad_() for tensor in _half(9, device)]
    _assert_close(function, call, tensors)
    assert THEIRS in graphs.forward


def test_the_setting_compiles_graphs_anew(device: str, measured: Callable[..., None]) -> None:
    measured(*ROWS)
    function, graphs = capture_graphs(causal_attention)
    tensors = _half(9, device)
    function(*tensors)
    assert THEIRS in graphs.forward
    with settings(hand_over=False):
        function(*tensors)
        assert THEIRS not in graphs.forward and graphs.compiled == 2


def test_exported_programs_hold_the_op(device: str, measured: Callable[..., None]) -> None:
    measured(*ROWS)

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(q, k, v)

    tensors = tuple(tensor.detach() for tensor in _half(9, device))
    for strict in (True, False):
        program = torch.export.export(Module(), tensors, strict=strict)
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert OURS in targets and not [target for target in targets if "aten" in target and "attention" in target]


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_graphs_of_gpu_tensors_hold_the_kernels_op(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a length that stays a symbol, and results as PyTorch's fake kernels describe them."""
    rows = [dataclasses.replace(row, kernel=kernel, head_dim=64) for row in ROWS]
    monkeypatch.setattr(_handover_rule, "shipped_hand_over", lambda gpu: tuple(rows) if gpu == "measured" else ())
    for gpu, taken in (("measured", True), ("other", False)):
        with fake_gpu(name=gpu, path="auto") as mode:
            with mode:
                rows_of_q = symbolic_size(mode, "rows", 300)
                q = torch.empty(2, rows_of_q, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            trace = trace_kernels(torch.ops.vk._attention_or_aten.default, (q, q, q, None, True, True))
        assert (f"_scaled_dot_product_{kernel}_attention" in trace.targets) == taken
        assert not mode.shape_env.replacements
        assert not trace.kernels or not taken


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_inductor_and_cuda_graphs_run_their_kernels(kernel: str, direction: str, measured: Callable[..., None]) -> None:
    rows = [dataclasses.replace(row, kernel=kernel, head_dim=64, direction=direction) for row in ROWS]
    measured(*rows)
    compiled = torch.compile(_flash_attn, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        tensors = [torch.randn(2, 4, 128, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
        torch.compiler.cudagraph_mark_step_begin()
        results = [result.clone() for result in _results(compiled, tensors)]
        _check_results(results, _results(_flash_attn, tensors), _results(causal_attention, _doubles(tensors)))
