"""PyTorch's flash attention ops on ours: numerics, dropout, layouts, refusals, and that they never call themselves."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from compile_tests.flash_registry import activated
from tests.verify import DTYPES, assert_same_bits, assert_waits_for_nothing
from torch_ops import attention, window_attn
from torch_ops.compat import scaled_dot_product_attention
from torch_ops.integrations import torch_flash
from torch_ops.testing import check_draws, poisoned, references
from torch_ops.testing.cases import cumulative
from torch_ops.testing.tolerance import Draw

pytestmark = pytest.mark.interpret

aten = torch.ops.aten
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 16
LENGTHS, KEY_LENGTHS = (9, 0, 14), (12, 3, 21)
# Without the flag torch 2.11 takes heads that share keys.
PARAMETERS = inspect.signature(varlen_attn).parameters
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in PARAMETERS else {}
# Arguments of varlen_attn, and what the references call them. Its window (-1, 0) is causal order.
PACKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"window_size": (-1, 0)}, {"causal": True}),
    "window": ({"window_size": (3, 1)}, {"window_left": 3, "window_right": 1}),
    "half_a_window": ({"window_size": (-1, 2)}, {"window_right": 2}),
    "causal_window": ({"window_size": (4, 0), "scale": 0.5}, {"window_left": 4, "window_right": 0, "scale": 0.5}),
    "one_split": ({"num_splits": 1}, {}),
}
DENSE: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.5}}
# Arguments of _flash_attention_backward behind its tensors.
BACKWARD_REST = (
    "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused"
)  # fmt: skip
FLASH_DTYPES = [dtype for dtype in DTYPES if dtype != torch.float32]
SDPA_CALLS = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}


@pytest.fixture
def active(device: str) -> Iterator[None]:
    with activated(device):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The aten ops that came to our kernels. A kernel that is called within another fails."""
    made: list[str] = []
    running: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert not running, f"{name} is called by the kernel of {running[0]}"
            made.append(name)
            running.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()

        return call

    for name, function in torch_flash.KERNELS.items():
        monkeypatch.setitem(torch_flash.KERNELS, name, noting(name, function))
    return made


def differentiate(function: Callable[..., Any], dout: Tensor, tensors: list[Tensor]) -> dict[str, Tensor]:
    """out, lse and the gradients of out alone, since PyTorch's ops have none of lse."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = function(*leaves)[:2]
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def verify(function: Callable[..., Any], reference: Callable[..., Any], make: Callable[[], list[Tensor]]) -> None:
    """Checks out, lse and gradients by the tolerance rule; the last tensor that `make` draws is dout."""

    def draw(seed: int) -> Draw:
        torch.manual_seed(seed)
        *tensors, dout = make()
        with poisoned():
            actual = differentiate(function, dout, tensors)
        wide = [tensor.double() for tensor in tensors]
        return actual, differentiate(reference, dout, tensors), differentiate(reference, dout, wide)

    check_draws(draw)


def packed(device: str, dtype: torch.dtype, key_lengths: tuple[int, ...] = KEY_LENGTHS) -> list[Tensor]:
    """q, k, v and dout."""
    rows, keys = sum(LENGTHS), sum(key_lengths)
    shapes = (rows, HEADS), (keys, KEY_HEADS), (keys, KEY_HEADS), (rows, HEADS)
    return [torch.randn(*shape, HEAD_DIM, device=device).to(dtype) for shape in shapes]


def dense(device: str, dtype: torch.dtype, rows: int = 9, keys: int = 21, key_heads: int = KEY_HEADS) -> list[Tensor]:
    """q, k, v and dout [B, H, S, D], in memory [B, S, H, D]."""
    shapes = (rows, HEADS), (keys, key_heads), (keys, key_heads), (rows, HEADS)
    drawn = [torch.randn(2, *shape, HEAD_DIM, device=device).to(dtype) for shape in shapes]
    return [tensor.transpose(1, 2) for tensor in drawn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own_keys"])
@pytest.mark.parametrize("name", PACKED)
def test_varlen_attn(name: str, shared: bool, dtype: torch.dtype, device: str, calls: list[str]) -> None:
    options, named = PACKED[name]
    if lacking := options.keys() - PARAMETERS.keys():
        pytest.skip(f"varlen_attn of torch {torch.__version__} has no {', '.join(lacking)}")
    key_lengths = LENGTHS if shared else KEY_LENGTHS
    cu = cumulative(LENGTHS, device)
    cu_k = cu if shared else cumulative(key_lengths, device)
    aux = AuxRequest(lse=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, cu, cu_k, 14, 21, return_aux=aux, **GROUPED, **options)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return references.window_attn(q, k, v, cu, cu_k, **named)

    with activated(device):
        verify(ours, reference, partial(packed, device, dtype, key_lengths))
    assert set(calls) == {"_flash_attention_forward", "_flash_attention_backward"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense_ops(name: str, dtype: torch.dtype, device: str, calls: list[str]) -> None:
    """Both, by autograd: the op of scaled_dot_product_attention, and the flash op of tensors [B, S, H, D]."""
    options = DENSE[name]
    causal, scale = options.get("is_causal", False), options.get("scale")

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
        transposed = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(*transposed, None, None, 9, 21, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse

    with activated(device):
        for ours in (partial(aten._scaled_dot_product_flash_attention, **options), flash):
            reference = partial(references.attention, causal=causal, scale=scale)
            verify(ours, reference, partial(dense, device, dtype))
    assert set(calls) == set(torch_flash.KERNELS) - {"_flash_attention_forward_no_dropout_inplace"}


def test_functions_alone_agree_with_pytorchs_attention() -> None:
    """Without the dispatcher, in fp64 on the CPU, at the error of fp64."""
    q, k, v, dout = dense("cpu", torch.float64, keys=9, key_heads=HEADS)
    out, lse, _, _, rows, keys, rng_state, unused, _ = torch_flash.scaled_dot_product_flash_attention(
        q, k, v, is_causal=True
    )
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = functional.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch_flash.scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, rows, keys, 0.0, True, rng_state, unused
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, dout))


@pytest.mark.usefixtures("active")
def test_alibi_slopes(device: str) -> None:
    cu, slopes = cumulative(LENGTHS, device), torch.rand(len(LENGTHS), HEADS, device=device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    with torch.inference_mode():
        out, lse, *_ = aten._flash_attention_forward(q, k, v, cu, cu, 9, 9, 0.0, False, False, alibi_slopes=slopes)
    torch.testing.assert_close((out, lse), window_attn(q, k, v, cu, alibi_slopes=slopes, return_lse=True))
    assert not torch.allclose(out, window_attn(q, k, v, cu), atol=1e-2)


@pytest.mark.usefixtures("active")
def test_slopes_are_refused_where_a_gradient_may_be_asked_for(device: str) -> None:
    """PyTorch's backward op takes none, and its gradients would be wrong. Compiled forwards see no gradients."""
    cu, slopes = cumulative(LENGTHS, device), torch.rand(HEADS, device=device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)

    def call(q: Tensor) -> Tensor:
        made = aten._flash_attention_forward(q, k, v, cu, cu, 9, 9, 0.0, False, False, alibi_slopes=slopes)
        return made[0]

    for function in (call, torch.compile(call, backend="aot_eager")):
        for leaf in (q, q.detach().requires_grad_()):
            with pytest.raises(NotImplementedError, match="_flash_attention_forward: alibi_slopes is a tensor"):
                function(leaf)


@pytest.mark.usefixtures("active")
def test_dropout_has_the_mask_of_its_seed(device: str) -> None:
    """Forward and backward, and PyTorch's generator draws the seed."""
    *tensors, dout = dense(device, torch.float32)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, *_, rng_state, _, _ = aten._scaled_dot_product_flash_attention(*leaves, 0.5)
    gradients = torch.autograd.grad(out, leaves, dout)
    seed = rng_state.view(torch.int64)[:1]
    expected = attention(*leaves, dropout_p=0.5, dropout_seed=seed)
    assert isinstance(expected, Tensor) and torch.equal(out, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, dout), rtol=0, atol=0)
    outs = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        outs.append(aten._scaled_dot_product_flash_attention(*tensors, 0.5)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.usefixtures("active")
def test_dropout_of_packed_tensors_has_the_mask_of_its_seed(device: str) -> None:
    cu = cumulative(LENGTHS, device)
    *tensors, dout = packed(device, torch.float32, LENGTHS)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, _, rng_state, _, _ = aten._flash_attention_forward(*leaves, cu, cu, 9, 9, 0.5, True, False)
    gradients = torch.autograd.grad(out, leaves, dout)
    seed = rng_state.view(torch.int64)[:1]
    expected = window_attn(*leaves, cu, causal=True, dropout_p=0.5, dropout_seed=seed, deterministic=False)
    assert isinstance(expected, Tensor) and torch.equal(out, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, dout))


@pytest.mark.skipif(not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="this torch lacks the op")
@pytest.mark.usefixtures("active")
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch 2.11 has no varlen_attn_out")
def test_varlen_attn_out_fills_what_it_is_given(device: str) -> None:
    cu = cumulative(LENGTHS, device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    given = torch.full_like(q, torch.nan).transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = varlen.varlen_attn_out(given, q, k, v, cu, cu, 9, 9, return_aux=AuxRequest(lse=True), **GROUPED)
    expected = varlen_attn(q, k, v, cu, cu, 9, 9, return_aux=AuxRequest(lse=True), **GROUPED)
    assert out.data_ptr() == given.data_ptr()
    torch.testing.assert_close((given, lse), expected, rtol=0, atol=0)


def test_an_output_of_another_shape_or_with_dropout_is_refused(device: str) -> None:
    op = torch_flash.flash_attention_forward_no_dropout_inplace
    cu = cumulative(LENGTHS, device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    rest = (k, v, cu, cu, 9, 9)
    with pytest.raises(ValueError, match=r"inplace: out has shape \[1, 4, 16\], expected shape \[23, 4, 16\]"):
        op(q[:1], q, *rest, 0.0, False, False)
    with pytest.raises(NotImplementedError, match="inplace: dropout_p is 0.5, expected 0"):
        op(torch.empty_like(q), q, *rest, 0.5, False, False)


# Arguments that the flash op refuses, and the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seqused_k": ({"seqused_k": torch.ones(3, dtype=torch.int32)}, "seqused_k is a tensor, expected None"),
    "block_table": ({"block_table": torch.ones(3, 1, dtype=torch.int32)}, "block_table is a tensor, expected None"),
    "num_splits": ({"num_splits": 2}, "num_splits is 2, expected None or 1"),
    "no_splits": ({"num_splits": 0}, "num_splits is 0, expected None or 1"),
    "debug_mask": ({"return_debug_mask": True}, "return_debug_mask is True, expected False"),
    "of_a_later_torch": ({"softcap": 3.0}, "softcap is 3.0, expected None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ops_lack_is_refused_by_name(name: str, device: str) -> None:
    changed, message = REFUSED[name]
    cu = cumulative(LENGTHS, device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    options = {"return_debug_mask": False, **changed}
    with pytest.raises(NotImplementedError, match=f"^_flash_attention_forward: {re.escape(message)}; "):
        torch_flash.flash_attention_forward(q, k, v, cu, cu, 9, 9, 0.0, False, **options)


def test_a_debug_mask_of_dense_tensors_is_refused(device: str) -> None:
    q, k, v, _ = dense(device, torch.float16)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention: return_debug_mask is True"):
        torch_flash.scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)


@pytest.mark.usefixtures("active")
@pytest.mark.skipif("seqused_k" not in PARAMETERS, reason="varlen_attn of torch 2.11 has no seqused_k")
def test_refusals_pass_the_dispatcher(device: str) -> None:
    cu = cumulative(LENGTHS, device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    used = torch.ones(3, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="seqused_k is a tensor, expected None"):
        varlen_attn(q, k, v, cu, cu, 9, 9, seqused_k=used, **GROUPED)


@pytest.mark.parametrize("missing", ["cum_seq_q", "cum_seq_k"])
def test_half_of_the_boundaries_is_refused(missing: str, device: str) -> None:
    given: dict[str, Any] = dict.fromkeys(("cum_seq_q", "cum_seq_k"), cumulative(LENGTHS, device))
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    rest = {"max_q": 9, "max_k": 9, "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
    with pytest.raises(ValueError, match=f"^_flash_attention_forward: {missing} is None, expected an int32 tensor"):
        torch_flash.flash_attention_forward(q, k, v, **{**given, missing: None}, **rest)


def test_packed_tensors_without_boundaries_are_refused(device: str) -> None:
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    with pytest.raises(ValueError, match=r"_flash_attention_forward: query has .*expected shape \[B, S, H, D\]"):
        torch_flash.flash_attention_forward(q, k, v, None, None, 9, 9, 0.0, False, False)


@pytest.mark.parametrize("argument", ["grad_out", "query", "key", "value", "out"])
def test_tensors_of_other_dimensions_are_refused_by_name(argument: str, device: str) -> None:
    given = dict.fromkeys(("grad_out", "query", "key", "value", "out"), torch.zeros(1, 5, 4, 16, device=device))
    given[argument] = torch.zeros(5, device=device)
    rest = torch.zeros(1, 4, 5, device=device), None, None, 5, 5, 0.0, False, None, None
    with pytest.raises(ValueError, match=rf"{argument} has shape \[5\], expected shape \[B, S, H, D\]"):
        torch_flash.flash_attention_backward(**given, **dict(zip(BACKWARD_REST, rest, strict=True)))


@pytest.mark.parametrize(
    "state",
    [torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.uint64), torch.tensor(1)],
    ids=["fp32", "int64", "short", "0-d"],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_random_states_of_another_kind_are_refused(state: Tensor, dropout_p: float, device: str) -> None:
    """Without dropout nobody reads it."""
    same = torch.ones(1, 4, 5, 16, device=device)
    shapes = None, None, 5, 5, dropout_p, False
    state = state.to(device)
    refused = contextlib.nullcontext() if dropout_p == 0 else pytest.raises(ValueError, match="expected uint64 \\[2\\]")
    lse = torch.zeros(1, 4, 5, device=device)
    with refused:
        torch_flash.scaled_dot_product_flash_attention_backward(
            same, same, same, same, same, lse, *shapes, state, state
        )
    turned = same.transpose(1, 2)
    with refused:
        torch_flash.flash_attention_backward(turned, turned, turned, turned, turned, lse, *shapes, state, state)


@pytest.mark.usefixtures("active")
def test_autocast_of_another_type_casts_nothing(device: str) -> None:
    """The ops say query's dtype, as PyTorch's fakes of them do. On CUDA, PyTorch casts what one of them is given."""
    cu = cumulative(LENGTHS, device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    expected = varlen_attn(q, k, v, cu, cu, 9, 9, **GROUPED)
    with torch.autocast(device, torch.bfloat16):
        actual = varlen_attn(q, k, v, cu, cu, 9, 9, **GROUPED)
        made = aten._scaled_dot_product_flash_attention(*dense(device, torch.float16)[:3])[0]
    assert actual.dtype == torch.float16 and torch.equal(actual, expected)
    assert made.dtype == (torch.bfloat16 if device == "cuda" else torch.float16)


@pytest.mark.usefixtures("active")
def test_gradients_get_the_boundaries_as_shared(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for small segments need it. Autograd gives a backward one object for a tensor that is saved twice."""
    given: list[Any] = []
    backward = torch_flash.window_attn_backward_op

    def noting(*args: Any) -> Any:
        given.append(torch_flash.WindowAttnBackward(*args))
        return backward(*args)

    monkeypatch.setattr(torch_flash, "window_attn_backward_op", noting)
    cu = cumulative(LENGTHS, device)
    q, k, v, dout = packed(device, torch.float16, LENGTHS)
    for cu_k in (cu, cu.clone()):
        leaf = q.detach().requires_grad_()
        varlen_attn(leaf, k, v, cu, cu_k, 9, 9, **GROUPED).backward(dout)
    assert [call.cu_seqlens_k is None for call in given] == [True, False]


@pytest.mark.usefixtures("active")
def test_deterministic_algorithms_reach_the_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    backward = torch_flash.window_attn_backward_op

    def noting(*args: Any) -> Any:
        given.append(torch_flash.WindowAttnBackward(*args).deterministic)
        return backward(*args)

    monkeypatch.setattr(torch_flash, "window_attn_backward_op", noting)
    cu = cumulative(LENGTHS, device)
    q, k, v, dout = packed(device, torch.float16, LENGTHS)
    for wanted in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda wanted=wanted: wanted)
        leaf = q.detach().requires_grad_()
        varlen_attn(leaf, k, v, cu, cu, 9, 9, **GROUPED).backward(dout)
    assert given == [False, True]


def test_nothing_that_the_ops_call_comes_back(device: str, calls: list[str]) -> None:
    """Nor do the ops themselves and the signatures over them come here, on a CPU with ATen's own fused kernel."""
    cu = cumulative(LENGTHS, device)
    with activated(device):
        for key_heads in (HEADS, KEY_HEADS):
            for dtype in DTYPES:
                q, k, v, dout = dense(device, dtype, keys=32, key_heads=key_heads)
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                torch.autograd.grad(attention(*leaves), leaves, dout)
        q, k, v, dout = packed(device, torch.float16, LENGTHS)
        window_attn(q.requires_grad_(), k, v, cu).backward(dout)
        assert not calls
        leaf = q.detach().requires_grad_()
        varlen_attn(leaf, k, v, cu, cu, 9, 9, **GROUPED).backward(dout)
    assert calls == ["_flash_attention_forward", "_flash_attention_backward"]


def test_the_kernels_go_when_they_are_removed(device: str, calls: list[str]) -> None:
    q, k, v, _ = dense(device, torch.float16, keys=9)
    with activated(device):
        aten._scaled_dot_product_flash_attention(q, k, v)
    assert len(calls) == 1
    if device == "cpu":
        with pytest.raises(NotImplementedError, match="Could not run 'aten::_scaled_dot_product_flash_attention'"):
            aten._scaled_dot_product_flash_attention(q, k, v)
    else:
        aten._scaled_dot_product_flash_attention(q, k, v)
    assert len(calls) == 1


@pytest.mark.usefixtures("active")
def test_same_bits_every_time(device: str) -> None:
    cu = cumulative(LENGTHS, device)
    q, k, v, _ = packed(device, torch.float16, LENGTHS)
    assert_same_bits(lambda: varlen_attn(q, k, v, cu, cu, 9, 9, return_aux=AuxRequest(lse=True), **GROUPED))


# --- with a GPU ---


def verify_on_a_gpu(function: Callable[..., Tensor], make: Callable[[], list[Tensor]], **options: bool) -> None:
    """Checks a scaled_dot_product_attention whose flash op is ours beside PyTorch's, out and gradients."""

    def draw(seed: int) -> Draw:
        torch.manual_seed(seed)
        *tensors, dout = make()

        def call(function: Callable[..., Tensor], backend: SDPBackend, *given: Tensor) -> dict[str, Tensor]:
            leaves = [tensor.detach().requires_grad_() for tensor in given]
            with sdpa_kernel(backend):
                out = function(*leaves, **options)
            gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
            return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))

        with activated("cuda"):
            actual = call(function, SDPBackend.FLASH_ATTENTION, *tensors)
        pytorchs = functional.scaled_dot_product_attention
        wide = [tensor.double() for tensor in tensors]
        return actual, call(pytorchs, SDPBackend.FLASH_ATTENTION, *tensors), call(pytorchs, SDPBackend.MATH, *wide)

    check_draws(draw)


@pytest.mark.gpu
@pytest.mark.no_interpret
@pytest.mark.parametrize("dtype", FLASH_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 100])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_attention(is_causal: bool, head_dim: int, dtype: torch.dtype, calls: list[str]) -> None:
    """PyTorch pads a head dimension that is no multiple of 8 before it comes to the flash op."""

    def make() -> list[Tensor]:
        return [torch.randn(2, 300, 4, head_dim, device="cuda").to(dtype).transpose(1, 2) for _ in range(4)]

    verify_on_a_gpu(functional.scaled_dot_product_attention, make, is_causal=is_causal)
    assert set(calls) == SDPA_CALLS


@pytest.mark.gpu
@pytest.mark.no_interpret
def test_grouped_heads_of_scaled_dot_product_attention(calls: list[str]) -> None:
    make = partial(dense, "cuda", torch.bfloat16, keys=9)
    verify_on_a_gpu(functional.scaled_dot_product_attention, make, enable_gqa=True)
    assert set(calls) == SDPA_CALLS


@pytest.mark.gpu
@pytest.mark.no_interpret
def test_what_compat_passes_on_comes_here_and_ends_here(calls: list[str]) -> None:
    """A head dimension of 20, which PyTorch pads for its flash op. The op never goes back to PyTorch's function."""

    def make() -> list[Tensor]:
        return [torch.randn(2, 4, 32, 20, device="cuda", dtype=torch.float16) for _ in range(4)]

    verify_on_a_gpu(scaled_dot_product_attention, make)
    assert set(calls) == SDPA_CALLS


@pytest.mark.gpu
@pytest.mark.no_interpret
def test_no_call_waits_for_the_device() -> None:
    cu = cumulative((64, 0, 200), "cuda")
    leaves = [torch.randn(264, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dense_leaves = [leaf.detach()[None].transpose(1, 2).requires_grad_() for leaf in leaves]

    def call() -> None:
        varlen_attn(*leaves, cu, cu, 200, 200).sum().backward()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            functional.scaled_dot_product_attention(*dense_leaves, is_causal=True).sum().backward()

    with activated("cuda"):
        assert_waits_for_nothing(call)


@pytest.mark.gpu
@pytest.mark.no_interpret
def test_after_restore_results_are_pytorchs_own(calls: list[str]) -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v)

    before = call()
    with activated("cuda"):
        call()
    assert len(calls) == 1
    assert torch.equal(call(), before) and len(calls) == 1
