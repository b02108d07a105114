"""The kernels of small segments: every place where they hand over to the others.

tests/attention/test_window_attn.py runs them too, wherever a case's segments are short on average.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_ops
from tests.attention.verify import differentiate, verify
from tests.verify import INTERPRET, assert_same_bits
from torch_ops import settings, window_attn
from torch_ops._attention import small_segments
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.plan import MANY_SEGMENTS, plan_backward, plan_forward
from torch_ops._attention.tensors import Backward, Forward, mean_length
from torch_ops.testing.cases import WindowAttnCase, WindowAttnInputs, make_inputs, window_attn_cases

KERNELS = {"attention_fwd_small_segments", "attention_bwd_small_segments"}
# Lengths in the unit of a block, then in rows; the mean stays below a block.
WHOLE, SHORT, LONG = (1, 0), (0, 5), (2, 3)

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not (INTERPRET or torch.cuda.is_available()), reason="a CPU has no kernels"),
]


def _block() -> int:
    """The largest: rows may have smaller ones for shorter segments."""
    q = torch.empty(64, 1, 64, dtype=torch.float16)
    return choose("attention_fwd_small_segments", q, AttentionOptions(1.0), 64)[0].block_m


def _inputs(*lengths: tuple[int, int], device: str, **rest: Any) -> WindowAttnInputs:
    block = _block()
    rows = tuple(blocks * block + more for blocks, more in lengths)
    options = {"num_heads": 2, "head_dim": 72, **rest}
    return make_inputs(WindowAttnCase("short", "segments", rows, **options), torch.float16, device)


def _kernels(inputs: WindowAttnInputs) -> set[str]:
    return set(inputs.call(lambda *args, **options: torch_ops.explain(window_attn, *args, **options))["kernels"])


@pytest.fixture(autouse=True)
def stock() -> Any:
    with settings(path="portable"):
        yield


BOUNDS = {
    "all": {}, "causal": {"causal": True}, "window": {"window_left": 3, "window_right": 2, "softcap": 4.0}
}  # fmt: skip


@pytest.mark.parametrize("options", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("lengths", [(WHOLE,) * 3, (SHORT, WHOLE, (0, 0), (0, 1)), (SHORT,) * 9 + (LONG, SHORT)])
def test_agrees(lengths: tuple[tuple[int, int], ...], options: dict[str, Any], device: str) -> None:
    """Whole blocks; shorter ones; one that is longer than a block after all."""
    inputs = _inputs(*lengths, device=device, options=options)
    assert _kernels(inputs) == KERNELS
    verify(inputs)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_agrees_at_head_dimensions(head_dim: int, device: str) -> None:
    inputs = _inputs(SHORT, WHOLE, LONG, SHORT, SHORT, SHORT, SHORT, device=device, head_dim=head_dim, num_heads=3)
    assert _kernels(inputs) == KERNELS
    verify(inputs)


@pytest.mark.parametrize("outside", [1, 40] if INTERPRET else [1, 40, 200])
def test_rows_outside_of_all_segments(outside: int, device: str) -> None:
    """Before and after; they may hold anything, and their own gradients are 0."""
    segments = (SHORT, SHORT, (0, 0), (0, 0)) * (1 + outside // 8)
    inputs = _inputs(*segments, LONG, device=device, num_heads=1, skipped=outside, padding=outside // 2)
    assert _kernels(inputs) == KERNELS
    verify(inputs)
    spoiled = [getattr(inputs, name).clone() for name in ("q", "k", "v")]
    for tensor in spoiled:
        tensor[:outside] = float("nan")
        tensor[-(outside // 2) or len(tensor) :] = float("inf")
    clean, dirty = (
        differentiate(torch.ops.vk.window_attn, each)
        for each in (inputs, replace(inputs, **dict(zip("qkv", spoiled, strict=True))))
    )
    for name, tensor in clean.items():
        assert torch.equal(tensor, dirty[name]), name


def test_more_segments_than_one_look(device: str) -> None:
    """The long one is found behind those that one step looks at."""
    inputs = _inputs(*((0, 0),) * 1030, SHORT, LONG, (0, 0), device=device, num_heads=1, head_dim=16)
    assert _kernels(inputs) == KERNELS
    verify(inputs)


@pytest.mark.skipif(not INTERPRET, reason="only the interpreter plans kernels without a GPU")
def test_the_interpreter_takes_many_segments_without_a_gpu(device: str) -> None:
    inputs = _inputs(*[(0, 1)] * (MANY_SEGMENTS + 1), device=device)
    with settings(path="auto"):
        assert _kernels(inputs) >= {"attention_fwd_small_segments"}


def test_gradients_of_scores_far_below_zero(device: str) -> None:
    """Where exp(0 - lse) overflows, what stands for the rows past a segment's end must not count."""
    inputs = _inputs(SHORT, WHOLE, device=device, options={"scale": 10.0})
    inputs = replace(inputs, q=inputs.q.abs(), k=-inputs.k.abs())
    _, lse = inputs.call(torch.ops.vk.window_attn)
    assert lse.max() < -100
    verify(inputs)


def test_a_segment_does_not_see_what_is_wrong_in_another(device: str) -> None:
    inputs = _inputs(SHORT, WHOLE, SHORT, LONG, SHORT, SHORT, SHORT, device=device)
    clean = differentiate(torch.ops.vk.window_attn, inputs)
    spoiled = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    begin, end = inputs.cu_seqlens[1:3].tolist()
    for tensor in spoiled.values():
        tensor[begin:end] = float("nan")
    dirty = differentiate(torch.ops.vk.window_attn, replace(inputs, **spoiled))
    for name, tensor in clean.items():
        kept = [part.T if name == "lse" else part for part in (tensor, dirty[name])]
        assert all(torch.equal(kept[0][rows], kept[1][rows]) for rows in (slice(begin), slice(end, None))), name
        assert kept[1][begin:end].isnan().any(), name


def test_gradients_of_lse_alone_and_of_strides_zero(device: str) -> None:
    inputs = _inputs(SHORT, WHOLE, LONG, SHORT, SHORT, SHORT, SHORT, device=device)
    verify(replace(inputs, dout=torch.zeros_like(inputs.dout)))
    one = torch.ones((), dtype=inputs.dout.dtype, device=device)
    verify(replace(inputs, dout=one.expand_as(inputs.dout)))


def test_boundaries_of_any_stride(device: str) -> None:
    inputs = _inputs(SHORT, WHOLE, SHORT, device=device)
    apart = inputs.cu_seqlens.repeat_interleave(2)[::2]
    assert not apart.is_contiguous()
    expected, actual = (
        differentiate(torch.ops.vk.window_attn, each) for each in (inputs, replace(inputs, cu_seqlens=apart))
    )
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


@pytest.mark.parametrize("values", [(0, 50, 200), (-7, 20, 40), (0, 30, 10), (0, 2**31 - 1, 5), (40, 40, 40)], ids=str)
def test_wild_boundaries_stay_inside(values: tuple[int, ...], device: str) -> None:
    """Nothing outside of the outputs is written, whatever the boundaries say."""
    cu = torch.tensor(values, dtype=torch.int32, device=device).repeat_interleave(3)
    inputs = replace(_inputs((0, 40), device=device, num_heads=1), cu_seqlens=cu)
    assert _kernels(inputs) == KERNELS
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    options = AttentionOptions(72**-0.5)
    room = torch.full((9, 40, 1, 72), 7.0, dtype=q.dtype, device=device)
    rows = torch.full((3, 1, 40), 7.0, device=device)
    forward = Forward(q, k, v, cu, None, room[1], rows[1])
    plan_forward(forward, options).launch(forward)
    backward = Backward(dout, None, q, k, v, room[1], rows[1], cu, None, room[3], room[5], room[7])
    plan_backward(backward, options).launch(backward)
    assert (room[::2] == 7).all() and (rows[::2] == 7).all()


@pytest.mark.no_interpret
def test_same_bits_every_time(device: str) -> None:
    inputs = _inputs(*(SHORT, WHOLE) * 3, LONG, device=device)
    assert_same_bits(lambda: differentiate(torch.ops.vk.window_attn, inputs))


UNSUITED = {
    "longer": {"lengths": ((1, 1),)},
    "group": {"num_heads": 4, "num_k_heads": 2},
    "wide": {"head_dim": 136},
}


@pytest.mark.parametrize("change", UNSUITED.values(), ids=UNSUITED)
def test_other_calls_take_the_general_kernels(change: dict[str, Any], device: str) -> None:
    lengths = change.get("lengths", (SHORT,))
    rest = {name: value for name, value in change.items() if name != "lengths"}
    assert not _kernels(_inputs(*lengths, device=device, **rest)) & KERNELS


def test_key_boundaries_of_their_own_take_the_general_kernels(device: str) -> None:
    inputs = _inputs(SHORT, SHORT, device=device)
    assert not _kernels(replace(inputs, cu_seqlens_k=inputs.cu_seqlens.clone())) & KERNELS


SMALL_CASES = [
    case
    for case in window_attn_cases("edge")
    if case.head_dim <= small_segments.WIDEST and case.k_lengths is None and case.num_k_heads is None
    and mean_length(case.total_q, len(case.lengths)) <= 64
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_general_kernels_are_right_there_too(case: WindowAttnCase, device: str, monkeypatch: Any) -> None:
    """They take such calls in graphs of dynamic shape."""
    monkeypatch.setattr(small_segments, "WIDEST", 0)
    # A change makes a new generation of settings, in which no plan is remembered.
    settings.update(path="auto")
    settings.update(path="portable")
    inputs = make_inputs(case, torch.bfloat16, device)
    assert not _kernels(inputs) & KERNELS
    verify(inputs)


def test_what_comes_next_finds_all_results(device: str) -> None:
    """The kernel that looks for longer segments begins while the one before it ends, but must not end before it."""
    windows, calls = (3, 2) if INTERPRET else (200, 20)
    inputs = _inputs(*(WHOLE,) * windows, SHORT, device=device, num_heads=2 if INTERPRET else 16)
    leaves = [getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")]
    copies = []
    for _ in range(calls):
        # Results are then cut from this memory.
        soil = [torch.full_like(inputs.q, torch.nan) for _ in range(5)]
        del soil
        out = window_attn(*leaves, inputs.cu_seqlens)
        copies.append([out.detach().clone()])
        copies[-1] += [grad.clone() for grad in torch.autograd.grad(out, leaves, inputs.dout)]
    for copied in copies[1:]:
        assert all(torch.equal(one, first) for one, first in zip(copied, copies[0], strict=True))
    assert torch.equal(copies[0][0], out)
