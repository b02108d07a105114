"""PyTorch's scaled_dot_product_attention over vk::attention: its meaning, and what is passed on to PyTorch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from tests.verify import DTYPES
from torch_ops.compat import scaled_dot_product_attention, sdpa
from torch_ops.testing import check_draws, poisoned
from torch_ops.testing.tolerance import Draw

pytestmark = pytest.mark.interpret


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The op that computed, call by call. On a CPU without the interpreter the op's reference stands in for kernels."""
    made: list[str] = []

    def noting(who: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(who)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(sdpa, "attention", noting("vk", sdpa.attention))
    monkeypatch.setattr(sdpa, "torch_attention", noting("torch", torch_attention))
    monkeypatch.setattr(sdpa, "runs_kernels", lambda tensor: True)
    return made


def scores_of(
    q: Tensor, k: Tensor, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    scores = q @ shared(k, q, enable_gqa).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def shared(tensor: Tensor, q: Tensor, enable_gqa: bool) -> Tensor:
    """The keys or values of each head of q."""
    return tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) if enable_gqa else tensor


def eager(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, truth: Tensor, **options: Any) -> dict[str, Tensor]:
    """The maths in steps, at the inputs' dtype. Its gradients start, as the op's do, from a rounded out and lse: where
    few keys are seen, gradients that know all weights are exact."""
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = scores_of(q.double(), k.double(), **options).logsumexp(-1, keepdim=True).to(wide)
    q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    scores = scores_of(q, k, **options)
    values = shared(v, q, options.get("enable_gqa", False))
    with torch.no_grad():
        out = scores.softmax(-1) @ values
        weights = torch.exp(scores - lse).to(q.dtype)
        delta = (dout * truth.to(q.dtype)).sum(-1, keepdim=True)
        dscores = weights * (dout @ values.transpose(-1, -2) - delta)
    gradients = torch.autograd.grad((scores, weights @ values), leaves, (dscores, dout))
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def differentiate(function: Callable[..., Tensor], dout: Tensor, *tensors: Tensor, **options: Any) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def make(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for shape in (q_shape, k_shape, k_shape)]


CAUSAL = {"is_causal": True}
GROUPED = {"enable_gqa": True}
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "full": ((2, 2, 9, 16), (2, 2, 12, 16), {}),
    "causal_equal": ((2, 2, 11, 16), (2, 2, 11, 16), CAUSAL),
    "causal_fewer_queries": ((1, 2, 5, 16), (1, 2, 12, 16), CAUSAL),
    "causal_more_queries": ((1, 2, 19, 16), (1, 2, 6, 16), CAUSAL),
    "scale": ((1, 2, 9, 8), (1, 2, 9, 8), {"scale": 0.7, **CAUSAL}),
    "groups": ((2, 4, 9, 8), (2, 2, 5, 8), {**GROUPED, **CAUSAL}),
    "groups_of_one": ((1, 2, 9, 8), (1, 2, 5, 8), GROUPED),
    "two_dimensions": ((9, 24), (5, 24), CAUSAL),
    "three_dimensions": ((3, 9, 16), (3, 5, 16), CAUSAL),
    "three_dimensions_groups": ((4, 9, 16), (2, 12, 16), {**GROUPED, **CAUSAL}),
    "five_dimensions": ((2, 1, 2, 9, 16), (2, 1, 2, 9, 16), CAUSAL),
    "five_dimensions_groups": ((1, 2, 4, 5, 8), (1, 2, 2, 9, 8), GROUPED),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_pytorch(name: str, dtype: torch.dtype, device: str, calls: list[str]) -> None:
    q_shape, k_shape, options = CASES[name]

    def draw(seed: int) -> Draw:
        torch.manual_seed(seed)
        tensors = make(q_shape, k_shape, dtype, device)
        dout = torch.randn(q_shape, device=device).to(dtype)
        with poisoned():
            actual = differentiate(scaled_dot_product_attention, dout, *tensors, **options)
        wide = [tensor.double() for tensor in tensors]
        truth = differentiate(torch_attention, dout, *wide, **options)
        return actual, eager(dout, *tensors, truth["out"], **options), truth

    check_draws(draw)
    assert set(calls) == {"vk"}


@pytest.mark.parametrize(("rows", "keys"), [(1, 7), (7, 1)])
def test_a_single_query_or_key(rows: int, keys: int, device: str, calls: list[str]) -> None:
    """Every query then sees the first key alone."""
    q, k, v = make((1, 2, rows, 16), (1, 2, keys, 16), torch.float32, device)
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, v[:, :, :1].expand_as(out))
    assert calls == ["vk"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (0, 3, 2, 1, 4)], ids=str)
def test_many_dimensions_in_any_strides(order: tuple[int, ...], device: str, calls: list[str]) -> None:
    """Also such as no view makes four of."""
    shape = (2, 3, 2, 5, 8)
    q, k, v = (torch.randn([shape[dim] for dim in order], device=device).permute(order) for _ in range(3))
    expected = scaled_dot_product_attention(*(tensor.contiguous() for tensor in (q, k, v)), is_causal=True)
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    assert calls == ["vk", "vk"]


@pytest.mark.parametrize("dims", [3, 4])
def test_out_lies_as_query_does(dims: int, device: str, calls: list[str]) -> None:
    q, k, v = (torch.randn(2, 5, 2, 8, device=device)[: dims * 2 - 4].squeeze(0).transpose(-3, -2) for _ in range(3))
    assert scaled_dot_product_attention(q, k, v).stride() == q.stride()
    assert calls == ["vk"]


def test_keys_that_no_query_sees_are_neither_read_nor_copied(
    device: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make((1, 2, 5, 16), (1, 2, 12, 16), torch.float32, device)
    k[:, :, 5:] = v[:, :, 5:] = torch.nan
    given: list[Tensor] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given.extend((k, v))
        return q

    assert scaled_dot_product_attention(q, k, v, is_causal=True).isfinite().all()
    monkeypatch.setattr(sdpa, "attention", noting)
    scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [tensor.data_ptr() for tensor in given] == [k.data_ptr(), v.data_ptr()]


def test_signature_is_that_of_pytorch(device: str, calls: list[str]) -> None:
    q, k, v = make((1, 1, 3, 8), (1, 1, 3, 8), torch.float32, device)
    for function in (torch_attention, scaled_dot_product_attention):
        function(query=q, key=k, value=v, attn_mask=None, dropout_p=0, is_causal=True, scale=1, enable_gqa=False)
        function(q, k, v, None, 0.0, True)
        with pytest.raises(TypeError, match="positional arguments"):
            function(q, k, v, None, 0.0, True, 0.5)
    assert calls == ["vk", "vk"]


def test_dropout_keeps_as_many_as_it_says_and_follows_the_generator(device: str, calls: list[str]) -> None:
    q = torch.zeros(2, 2, 20, 32, device=device)
    v = torch.eye(32, device=device).expand(2, 2, 32, 32)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(scaled_dot_product_attention(q, v, v, dropout_p=0.3))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert not torch.equal(scaled_dot_product_attention(q, v, v, dropout_p=0.3), outs[2])
    # With equal scores and such values out is the mask, over 32 (1 - p).
    kept = outs[0] > 0
    torch.testing.assert_close(outs[0][kept], torch.full_like(outs[0][kept], 1 / (32 * 0.7)))
    deviation = math.sqrt(0.3 * 0.7 / kept.numel())
    assert abs(kept.float().mean().item() - 0.7) < 5 * deviation
    assert set(calls) == {"vk"}


def test_autocast_decides_the_dtype(device: str, calls: list[str]) -> None:
    q, k, v = make((1, 2, 5, 8), (1, 2, 5, 8), torch.float32, device)
    with torch.autocast(device, torch.float16):
        out = scaled_dot_product_attention(q, k.half(), v)
    assert torch.equal(out, scaled_dot_product_attention(q.half(), k.half(), v.half())) and out.dtype is torch.float16
    assert calls == ["vk", "vk"]


def _passed_on() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    def same(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        return (torch.randn(shape).to(dtype),) * 3

    x = torch.randn
    usual = same(2, 2, 5, 8)
    return {
        "mask": ((*usual, torch.ones(5, 5, dtype=torch.bool)), {}),
        "mask_and_causal": ((*usual, torch.zeros(5, 5), 0.0, True), {}),
        "value_of_other_head_dim": ((x(2, 2, 5, 8), x(2, 2, 5, 8), x(2, 2, 5, 16)), {}),
        "odd_head_dim": (same(2, 2, 5, 12), {}),
        "large_head_dim": (same(1, 1, 3, 264), {}),
        "fp64": (same(2, 2, 5, 8, dtype=torch.float64), {}),
        "no_queries": ((x(2, 2, 0, 8), x(2, 2, 5, 8), x(2, 2, 5, 8)), {}),
        "no_keys": ((x(2, 2, 5, 8), x(2, 2, 0, 8), x(2, 2, 0, 8)), {}),
        "no_batch": (same(0, 2, 5, 8), {}),
        "batch_broadcasts": ((x(2, 2, 5, 8), x(1, 2, 5, 8), x(1, 2, 5, 8)), {}),
        "heads_broadcast": ((x(2, 2, 5, 8), x(2, 1, 5, 8), x(2, 1, 5, 8)), {}),
        "dimensions_broadcast": ((x(2, 2, 5, 8), x(2, 5, 8), x(2, 5, 8)), {}),
        "groups_of_values": ((x(1, 4, 5, 8), x(1, 2, 5, 8), x(1, 1, 5, 8)), {"enable_gqa": True}),
        "scale_of_zero": (usual, {"scale": 0.0}),
        "negative_scale": (usual, {"scale": -0.5}),
        "tensor_scale": (usual, {"scale": torch.tensor(0.5)}),
        "all_dropped": ((*usual, None, 1.0), {}),
    }


@pytest.mark.parametrize("name", _passed_on())
def test_the_rest_is_pytorchs(name: str, device: str, calls: list[str]) -> None:
    args, options = _passed_on()[name]
    args = tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)

    def result(function: Callable[..., Tensor]) -> Any:
        try:
            return function(*args, **options)
        except RuntimeError as error:
            # PyTorch's own refusals differ between its versions and backends.
            return str(error)

    actual, expected = result(scaled_dot_product_attention), result(torch_attention)
    assert calls == ["torch"]
    if isinstance(expected, str):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_arguments_are_passed_on_as_they_came(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(sdpa, "torch_attention", lambda *args, **kwargs: given.extend((args, kwargs)))
    q, k, v, mask = torch.ones(4).to(device).expand(4, 1, 1, 2, 4)
    scaled_dot_product_attention(q, k, v, mask, 0.25, True, scale=3.0, enable_gqa=True)
    assert given[1] == {"scale": 3.0, "enable_gqa": True}
    assert all(one is other for one, other in zip(given[0], (q, k, v, mask, 0.25, True), strict=True))


def _refused() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    x = torch.randn(1, 2, 5, 8)
    return {
        "dtypes": ((x, x.double(), x), {}),
        "heads": ((torch.randn(1, 4, 5, 8), x, x), {}),
        "groups": ((torch.randn(1, 3, 5, 8), x, x), {"enable_gqa": True}),
        "head_dims": ((x, torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)), {}),
        "one_dimension": ((x[0, 0, 0],) * 3, {}),
        "no_tensor": ((x, None, x), {}),
        "causal": ((x, x, x, None, 0.0, 1), {}),
        "dropout": ((x, x, x, None, None), {}),
        "scale": ((x, x, x), {"scale": "half"}),
        "enable_gqa": ((x, x, x), {"enable_gqa": 1}),
    }


@pytest.mark.parametrize("name", _refused())
def test_refuses_as_pytorch_does(name: str, device: str, calls: list[str]) -> None:
    args, options = _refused()[name]
    args = tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
    errors = []
    for function in (torch_attention, scaled_dot_product_attention):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            function(*args, **options)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1] and calls == ["torch"]


@pytest.mark.no_interpret
def test_cpu_tensors_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "attention", None)
    q, k, v = make((1, 2, 5, 8), (1, 2, 5, 8), torch.float32, "cpu")
    torch.manual_seed(3)
    actual = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(actual, torch_attention(q, k, v, dropout_p=0.5))


@pytest.mark.no_interpret
def test_nested_tensors_are_pytorchs(device: str, calls: list[str]) -> None:
    parts = [torch.randn(length, 2, 8, device=device) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = scaled_dot_product_attention(nested, nested, nested)
    for one, part in zip(out.unbind(), parts, strict=True):
        q = part.transpose(0, 1)
        torch.testing.assert_close(one, torch_attention(q, q, q))
    assert calls == ["torch"]


@pytest.mark.no_interpret
def test_transforms_are_pytorchs(device: str, calls: list[str]) -> None:
    q, k, v = make((2, 2, 5, 8), (2, 2, 5, 8), torch.float32, device)
    causal = partial(scaled_dot_product_attention, is_causal=True)
    torch.testing.assert_close(torch.func.vmap(causal)(q, k, v), torch_attention(q, k, v, is_causal=True))
    assert calls == ["torch"]
    math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_only, forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        tangents = [
            forward_ad.unpack_dual(f(dual, k, v)).tangent for f in (scaled_dot_product_attention, torch_attention)
        ]
    assert torch.equal(*tangents)
    assert calls == ["torch", "torch"]
