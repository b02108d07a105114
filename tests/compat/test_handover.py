"""Calls that PyTorch's own kernels take: which, that results and gradients are right, and that none comes back."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from csrc_free_ops.configs.handover import (
    ROWS_DIR,
    HandOver,
    fitting,
    hand_over_document,
    hand_over_file,
    read_hand_over,
    shipped_hand_over,
)
from csrc_free_ops.configs.rows import Gpu
from torch_ops import explain, settings
from torch_ops._core.registry import KernelOp, Op
from torch_ops.compat import (
    _handover,
    _handover_rule,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
    sdpa,
)
from torch_ops.integrations import torch_flash
from torch_ops.testing import check, check_draws, poisoned, references
from torch_ops.testing.tolerance import Draw

aten = torch.ops.aten
GPU = torch.cuda.is_available()
HEAD_DIM = 16
NAME = "test-gpu"
ROW = HandOver("flash", "forward", "bfloat16", HEAD_DIM, False, 4, True, "2026-11-28")
BOTH = tuple(dataclasses.replace(ROW, causal=causal) for causal in (False, True))
TRAINING = tuple(dataclasses.replace(row, direction="training") for row in BOTH)
CUDNN = tuple(dataclasses.replace(row, kernel="cudnn") for row in BOTH)


def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, keeps_lse: bool) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of PyTorch that are called. On a CPU its flash kernel for CPUs stands in for all of them."""
    made: list[str] = []

    def noting(name: str, kernel: _handover_rule.Kernel) -> _handover_rule.Kernel:
        function = kernel.call if GPU else cpu_kernel

        def call(*args: Any) -> Any:
            made.append(name)
            return function(*args)

        return _handover_rule.Kernel(call, kernel.is_on, kernel.can_take if GPU else lambda params: True)

    for name, kernel in _handover_rule.KERNELS.items():
        monkeypatch.setitem(_handover_rule.KERNELS, name, noting(name, kernel))
    if not GPU:
        monkeypatch.setattr(_handover, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(sdpa, "runs_kernels", lambda tensor: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(_handover_rule, "gpu", lambda: Gpu(NAME, "cuda", 90, 2**17))
    monkeypatch.setattr(_handover_rule, "choices", {})
    measured(monkeypatch, *BOTH)
    return made


def measured(monkeypatch: pytest.MonkeyPatch, *rows: HandOver) -> None:
    monkeypatch.setattr(_handover_rule, "shipped_hand_over", lambda name: rows if name == NAME else ())
    _handover_rule.choices.clear()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(
    device: str, rows: int = 9, keys: int | None = None, dtype: torch.dtype = torch.bfloat16, heads: int = 2
) -> list[Tensor]:
    lengths = rows, keys or rows, keys or rows
    return [torch.randn(2, heads, length, HEAD_DIM, device=device).to(dtype) for length in lengths]


def as_flash(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of [B, S, H, D] on [B, H, S, D]."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = function(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


flash_attention = as_flash(flash_attn_func)
any_order = partial(flash_attention, deterministic=False)
in_order = partial(flash_attention, deterministic=True)


def differentiate(function: Callable[..., Any], tensors: list[Tensor], dout: Tensor) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


# --- the rule ---


def test_a_row_knows_lengths_and_graphs_without_them() -> None:
    some = dataclasses.replace(ROW, min_length=512, every_length=False)
    every = dataclasses.replace(some, kernel="cudnn", every_length=True)

    def found(length: int | None, head_dim: int = HEAD_DIM, causal: bool = False) -> list[str]:
        fits = fitting((some, every), "forward", "bfloat16", head_dim, causal, length)
        return [row.kernel for row in fits]

    assert found(511) == [] and found(512) == ["flash", "cudnn"] and found(None) == ["cudnn"]
    assert found(512, head_dim=24) == found(512, causal=True) == []


def test_a_document_is_read_back_and_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / hand_over_file("NVIDIA H100 80GB HBM3")
    assert path.name == "handover_h100-80gb-hbm3.json"
    rows = [dataclasses.replace(row, date="2026-11-28", cudnn=91900) for row in (*BOTH, *TRAINING, *CUDNN)]
    text = hand_over_document(rows, {"gpu": "NVIDIA H100", "date": "2026-11-28T10:00:00", "cudnn": "91900"})
    path.write_text(text)
    assert read_hand_over(path) == tuple(rows)
    for change, said in (('"flash"', '"fast"'), ('"forward"', '"back"'), ("16", '"16"'), ("false", "0")):
        path.write_text(text.replace(change, said))
        with pytest.raises(ValueError, match=re.escape(f"{path} holds no hand-over rows: ")):
            read_hand_over(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_hand_over(tmp_path / "nothing.json")


def test_shipped_rows_are_read() -> None:
    for path in ROWS_DIR.glob("handover_*.json"):
        rows = read_hand_over(path)
        assert rows and json.loads(path.read_text())["provenance"]["commit"]
        assert shipped_hand_over(path.stem.removeprefix("handover_")) == rows
    assert shipped_hand_over("no-such-gpu") == ()


# --- which calls ---


def in_reference(*tensors: Tensor) -> Tensor:
    return references.attention(*tensors)[0]


def check_attended(out: Tensor, *tensors: Tensor, causal: bool = False) -> None:
    """The tolerance rule on an output of attention."""
    exact, _ = references.attention(*(each.double() for each in tensors), causal=causal)
    check({"out": out}, {"out": references.attention(*tensors, causal=causal)[0]}, {"out": exact})


def test_both_functions_hand_over(device: str, calls: list[str]) -> None:
    tensors = draw(device)
    for function, causal in itertools.product((scaled_dot_product_attention, flash_attention), (False, True)):
        options = {"is_causal" if function is scaled_dot_product_attention else "causal": causal}
        out = function(*tensors, **options)
        assert out.stride() == tensors[0].stride() or function is flash_attention
        check_attended(out, *tensors, causal=causal)
    assert calls == ["flash"] * 4


def _kept(device: str) -> dict[str, Callable[[], Any]]:
    q, k, v = draw(device)
    long = draw(device, 12)
    expanded = q[:, :1].expand(2, 2, 9, HEAD_DIM)
    offset = torch.randn(q.numel() + 1, device=device).bfloat16()[1:].view(q.shape)
    odd = torch.randn(2, 2, 9, HEAD_DIM + 1, device=device).bfloat16()[..., :HEAD_DIM]
    apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    wide = [torch.randn(1, 1, 9, 24, device=device).bfloat16() for _ in range(3)]
    ours = scaled_dot_product_attention
    return {
        "fp32": lambda: ours(q.float(), k.float(), v.float()),
        "fp16_was_not_measured": lambda: ours(q.half(), k.half(), v.half()),
        "head_dim_was_not_measured": lambda: ours(*wide),
        "causal_fewer_queries": lambda: flash_attention(q, long[1], long[2], causal=True),
        "causal_more_queries": lambda: ours(long[0], k, v, is_causal=True),
        "short": lambda: ours(q[:, :, :3], k, v),
        "few_keys": lambda: ours(q, k[:, :, :3], v[:, :, :3]),
        "zero_strides": lambda: ours(expanded, k, v),
        "offset": lambda: ours(offset, k, v),
        "odd_rows": lambda: ours(odd, k, v),
        "columns_apart": lambda: ours(apart, k, v),
        "dropout": lambda: ours(q, k, v, dropout_p=0.5),
        "window": lambda: flash_attention(q, k, v, window_size=(3, 0)),
        "softcap": lambda: flash_attention(q, k, v, softcap=2.0),
        "slopes": lambda: flash_attention(q, k, v, alibi_slopes=torch.ones(2, device=device)),
        "lse": lambda: flash_attention(q, k, v, return_attn_probs=True),
        "dropout_of_flash": lambda: flash_attention(q, k, v, dropout_p=0.5),
    }


@pytest.mark.parametrize("name", _kept("cpu"))
def test_the_rest_stays_ours(name: str, device: str, calls: list[str]) -> None:
    _kept(device)[name]()
    assert calls == []


def test_causal_queries_before_more_keys_are_cut_to_equal_lengths(device: str, calls: list[str]) -> None:
    q, _, _ = draw(device)
    _, k, v = draw(device, 12)
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    check_attended(out, q, k[:, :, :9], v[:, :, :9], causal=True)
    assert calls == ["flash"]


def test_unknown_gpus_and_settings_keep_calls(device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(device)
    with settings(hand_over=False):
        scaled_dot_product_attention(*tensors)
    with settings(path="portable"):
        scaled_dot_product_attention(*tensors)
    monkeypatch.setattr(_handover_rule, "gpu", lambda: Gpu("other-gpu", "cuda", 90, 2**17))
    monkeypatch.setattr(_handover_rule, "choices", {})
    scaled_dot_product_attention(*tensors)
    assert calls == []


def test_the_setting_enters_the_key_and_makes_choices_anew() -> None:
    before, generation = torch.compiler.config.cache_key_tag, settings.generation
    with settings(hand_over=False) as inside:
        assert torch.compiler.config.cache_key_tag != before and settings.generation > generation
        assert not inside.hand_over and "hand_over=False" in repr(settings)
    assert torch.compiler.config.cache_key_tag == before and settings.hand_over
    with pytest.raises(ValueError, match="hand_over is 1, expected True or False"):
        settings.update(hand_over=1)


@pytest.mark.usefixtures("calls")
def test_a_kernel_that_is_switched_off_is_not_taken(device: str, calls: list[str]) -> None:
    tensors = draw(device)
    with sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(*tensors)
    assert calls == []
    scaled_dot_product_attention(*tensors)
    assert calls == ["flash"]


def test_an_older_cudnn_is_not_taken(device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(device)
    for version, taken in ((99999, 0), (1, 1)):
        measured(monkeypatch, *(dataclasses.replace(row, cudnn=version) for row in CUDNN))
        scaled_dot_product_attention(*tensors)
        assert calls == ["cudnn"] * taken


def test_autocast_decides_the_dtype(device: str, calls: list[str]) -> None:
    q, k, v = draw(device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        out = scaled_dot_product_attention(q, k.bfloat16(), v)
    assert out.dtype is torch.bfloat16 and calls == ["flash"]


def test_inference_mode_and_transforms(device: str, calls: list[str]) -> None:
    q, k, v = draw(device)
    with torch.inference_mode():
        scaled_dot_product_attention(q, k, v)
    assert calls == ["flash"]
    with pytest.raises(NotImplementedError, match=r"within torch\.func"):
        torch.func.grad(lambda q: flash_attention(q, k, v).float().sum())(q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        flash_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    assert calls == ["flash"]


def test_bad_arguments_are_refused_as_ever(device: str, calls: list[str]) -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in draw(device))
    for args, options, message in (
        ((q, k[:, :5], v), {}, "v has 9, expected 5 rows"),
        ((q, k.half(), v), {}, "k is float16, expected bfloat16"),
        ((q, k, v), {"softmax_scale": -1.0}, "softmax_scale is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_func(*args, **options)
    assert calls == []


# --- gradients ---


@pytest.mark.parametrize("grouped", [False, True], ids=["heads", "groups"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_our_backward_takes_their_forward(
    kernel: str, causal: bool, grouped: bool, device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """out, and an lse whose base and shape the backward relies on."""
    if grouped and not GPU:
        pytest.skip("PyTorch's kernel for CPUs has no heads that share keys")
    rows, head_dim = (200, 64) if GPU else (19, HEAD_DIM)
    measured(monkeypatch, *(dataclasses.replace(row, kernel=kernel, head_dim=head_dim) for row in BOTH))

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = references.attention(q, k, v, causal=causal)[0]
        return out

    def drawn(seed: int) -> Draw:
        torch.manual_seed(seed)
        shapes = [(2, heads, rows, head_dim) for heads in (4, 2 if grouped else 4)]
        q, k, v, dout = (torch.randn(shapes[part], device=device).bfloat16() for part in (0, 1, 1, 0))
        # Memory is poisoned under torch.use_deterministic_algorithms(True), where cuDNN is not taken.
        with poisoned() if kernel == "flash" else nullcontext():
            actual = differentiate(partial(in_order, causal=causal), [q, k, v], dout)
        wide = [tensor.double() for tensor in (q, k, v)]
        return actual, differentiate(reference, [q, k, v], dout), differentiate(reference, wide, dout)

    check_draws(drawn)
    assert set(calls) == {kernel}


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of our backward behind a forward of PyTorch's."""
    made: list[str] = []
    op = _handover.attention_backward_op

    def call(*args: Any) -> Any:
        made.append("vk")
        return op(*args)

    monkeypatch.setattr(_handover, "attention_backward_op", call)
    return made


def test_pytorch_differentiates_only_where_any_order_is_allowed(
    device: str, calls: list[str], backwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, *TRAINING, *BOTH)
    tensors = draw(device)
    dout = torch.randn_like(tensors[0])
    for function in (scaled_dot_product_attention, in_order):
        differentiate(function, tensors, dout)
    assert len(backwards) == 2
    backwards.clear()
    actual = differentiate(any_order, tensors, dout)
    doubles = [each.detach().double().requires_grad_() for each in tensors]
    exact = differentiate(in_reference, doubles, dout.double())
    check(actual, differentiate(in_reference, tensors, dout), exact)
    assert backwards == [] and set(calls) == {"flash"}
    monkeypatch.setattr(_handover_rule, "REPEATABLE", frozenset({"flash"}))
    _handover_rule.choices.clear()
    differentiate(in_order, tensors, dout)
    assert backwards == []


@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms_count_as_deterministic(
    device: str, calls: list[str], backwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, *TRAINING, *BOTH)
    tensors = draw(device)
    differentiate(any_order, tensors, torch.randn_like(tensors[0]))
    assert backwards == ["vk"] and calls == ["flash"]
    measured(monkeypatch, *CUDNN)
    scaled_dot_product_attention(*tensors)
    assert calls == ["flash"]


def test_a_training_row_alone_keeps_calls_in_order(
    device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, *TRAINING)
    tensors = draw(device)
    differentiate(in_order, tensors, torch.randn_like(tensors[0]))
    any_order(*tensors)
    assert calls == []
    differentiate(any_order, tensors, torch.randn_like(tensors[0]))
    assert calls == ["flash"]


def test_second_derivatives_are_refused_by_name(device: str, calls: list[str]) -> None:
    leaves = [tensor.requires_grad_() for tensor in draw(device)]
    out = scaled_dot_product_attention(*leaves)
    (dq,) = torch.autograd.grad(out.float().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="vk::attention_backward has no derivative"):
        torch.autograd.grad(dq.float().sum(), leaves[1])
    assert calls == ["flash"]


def test_one_packed_tensor_and_gradients_of_some(device: str, calls: list[str]) -> None:
    qkv = torch.randn(2, 9, 3, 2, HEAD_DIM, device=device).bfloat16().requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, deterministic=True)
    (packed,) = torch.autograd.grad(out.float().sum(), qkv)
    q, k, v = (tensor.detach() for tensor in qkv.unbind(2))
    k.requires_grad_()
    (dk,) = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True).float().sum(), k)
    assert torch.equal(packed[:, :, 1], dk) and calls == ["flash"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_the_forward_repeats_its_bits_and_is_captured(
    kernel: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise of equal bits for equal inputs holds for their forward and our backward."""
    measured(monkeypatch, *(dataclasses.replace(row, kernel=kernel, head_dim=128) for row in BOTH))
    q, k, v = (torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    dout = torch.randn_like(q)
    first = differentiate(partial(scaled_dot_product_attention, is_causal=True), [q, k, v], dout)
    for _ in range(5):
        again = differentiate(partial(scaled_dot_product_attention, is_causal=True), [q, k, v], dout)
        assert all(torch.equal(again[name], first[name]) for name in first)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scaled_dot_product_attention(q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = scaled_dot_product_attention(q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, scaled_dot_product_attention(q, k, v)) and set(calls) == {kernel}


# --- VK is PyTorch's flash implementation ---


@pytest.fixture
def came_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels of VK that are called while it is active. PyTorch has no flash ops for a CPU; there they are ours."""
    made: list[str] = []
    for name in torch_flash.KERNELS:
        monkeypatch.setitem(torch_flash.KERNELS, name, lambda *args, name=name, **kwargs: made.append(name))
    activate_flash_attention_impl("VK")
    handle = None if GPU else torch_flash.override_kernels("CPU")
    yield made
    restore_flash_attention_impl()
    if handle is not None:
        handle.remove()


def test_an_active_implementation_gets_no_call_back(
    device: str, calls: list[str], came_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    for kind in (Op, KernelOp):
        monkeypatch.setattr(
            kind, "__call__", lambda op, *args, call=kind.__call__: computed.append(op.name) or call(op, *args)
        )
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    tensors = draw(device)
    torch.nn.functional.scaled_dot_product_attention(*tensors)
    any_order(*tensors)
    assert computed == ["attention"] * 2 and calls == came_back == []
    measured(monkeypatch, *BOTH, *CUDNN)
    torch.nn.functional.scaled_dot_product_attention(*tensors)
    assert calls == ["cudnn"] and computed == ["attention"] * 2 and came_back == []


def test_a_graph_from_before_calls_the_active_implementation_once(
    device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """aten's op runs our kernel, which calls the op `attention` and never the function that hands over."""
    flash = _handover_rule.KERNELS["flash"]._replace(call=_handover_rule._flash)
    monkeypatch.setitem(_handover_rule.KERNELS, "flash", flash)
    came: list[str] = []
    name = "_scaled_dot_product_flash_attention"
    ours = torch_flash.KERNELS[name]
    monkeypatch.setitem(torch_flash.KERNELS, name, lambda *args, **kwargs: came.append(name) or ours(*args, **kwargs))
    tensors = draw(device)
    if GPU:
        activate_flash_attention_impl("VK")
    handle = None if GPU else torch_flash.override_kernels("CPU")
    monkeypatch.setattr(_handover_rule, "_active_flash", lambda: None)
    try:
        out = scaled_dot_product_attention(*tensors)
    finally:
        if handle is None:
            restore_flash_attention_impl()
        else:
            handle.remove()
    check_attended(out, *tensors)
    assert came == [name]


def test_choices_follow_activation_and_restore(device: str, calls: list[str]) -> None:
    tensors = draw(device)
    for _ in range(2):
        scaled_dot_product_attention(*tensors)
        activate_flash_attention_impl("VK")
        try:
            scaled_dot_product_attention(*tensors)
        finally:
            restore_flash_attention_impl()
    assert calls == ["flash"] * 2


# --- explain ---


@pytest.mark.usefixtures("calls")
def test_explain_says_who_computes(device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(device)
    report = explain(scaled_dot_product_attention, q, k, v)
    assert report["op"] == "vk::attention" and report["path"] == "aten" and report["device"].startswith(device)
    assert report["why"] == f"PyTorch's flash kernel is faster for head dim {HEAD_DIM} (measured 2026-11-28)"
    assert report["hand_over"] == "flash, its gradients by vk::attention_backward"
    assert bool(report["kernels"]) == GPU and all("bwd" in kernel for kernel in report["kernels"])
    measured(monkeypatch, *TRAINING, *BOTH)
    rows = [tensor.transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    assert explain(flash_attn_func, *rows)["hand_over"] == "flash, its gradients by PyTorch's flash kernel"
    assert explain(flash_attn_func, *rows)["kernels"] == {}
    report = explain(flash_attn_func, *rows, deterministic=True)
    assert report["hand_over"] == "flash, its gradients by vk::attention_backward"
    assert calls == []


@pytest.mark.usefixtures("calls")
def test_explain_says_why_a_call_stays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(device)
    q.requires_grad_()
    ours = explain(torch.ops.vk.attention, q, k, v)

    def said(q: Tensor = q) -> str:
        report = explain(scaled_dot_product_attention, q, k, v)
        why = report.pop("hand_over")
        assert report == ours
        return str(why)

    activate_flash_attention_impl("VK")
    try:
        assert said() == "none: 'VK' is PyTorch's active flash implementation"
    finally:
        restore_flash_attention_impl()
    measured(monkeypatch, dataclasses.replace(ROW, head_dim=24))
    assert said() == f"none: no kernel of PyTorch was measured to be faster for head dim {HEAD_DIM}"
    measured(monkeypatch)
    assert said() == f"none: PyTorch's kernels were not measured on {NAME}"
    assert "strides" in explain(scaled_dot_product_attention, q[:, :, :1].expand_as(q), k, v)["hand_over"]


def test_explain_names_calls_that_are_passed_on() -> None:
    q = torch.randn(1, 1, 3, 8)
    report = explain(scaled_dot_product_attention, q, q, q)
    assert report["path"] == "aten" and report["why"] == "PyTorch's own function takes the call"
    assert explain(flash_attn_func, q, q, q)["path"] == "reference"
