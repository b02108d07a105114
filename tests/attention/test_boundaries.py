"""Boundaries that only the device knows and that are not what they should be.

A boundary that falls counts as the largest before it, and all are clamped to the tensors. So a segment may be empty,
but every row has one segment or none, on every path, in both directions.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.attention.verify import differentiate, settled, verify
from tests.verify import GPU, INTERPRET
from torch_ops import attention_decode, rope_window_attn, settings, window_attn
from torch_ops.testing import poisoned
from torch_ops.testing.cases import WindowAttnCase, WindowAttnInputs, make_inputs

pytestmark = pytest.mark.interpret

ROWS = 64 if INTERPRET else 320
# Boundaries of 64 rows; longer tensors scale them.
FALLING = {
    "zeros at the end": (0, 16, 40, 40, 0, 0),
    "one falls": (0, 40, 40, 20, 60),
    "overlapping": (0, 40, 10, 30, 20, 64),
    "late and overlong": (20, 10, 50, 100),
    "only falling": (64, 40, 20),
    "outside": (-5, 30, 2**27, 10, -(2**25), 48),
    "again and again": (0, 2**20, -3, 16) * 12,
    "many": (0, 16, *(40, 0) * 20, 50),
}
PATHS = ["hopper", "portable"] if GPU else ["auto"]
WIDE = [40, 72, 80, 128, 256] if GPU else [40]


def _inputs(
    boundaries: tuple[int, ...], k_boundaries: tuple[int, ...] | None = None, head_dim: int = 40,
    dtype: torch.dtype = torch.float16, **options: object,
) -> WindowAttnInputs:  # fmt: skip
    case = WindowAttnCase("falling", "boundaries", (ROWS,), 2, head_dim, k_lengths=(ROWS + 8,), options=options)
    inputs = make_inputs(case, dtype, "cuda" if GPU else "cpu")
    if k_boundaries is None:
        inputs = replace(inputs, k=inputs.k[:ROWS], v=inputs.v[:ROWS])
    unit = ROWS // 64
    cu_seqlens, cu_seqlens_k = (
        each if each is None else torch.tensor(each, dtype=torch.int32, device=inputs.q.device) * unit
        for each in (boundaries, k_boundaries)
    )
    return replace(inputs, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest):
    with settings(path=request.param):
        yield


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("head_dim", WIDE)
@pytest.mark.parametrize("boundaries", FALLING.values(), ids=FALLING)
def test_every_row_has_its_prefix_maximum(boundaries: tuple[int, ...], head_dim: int) -> None:
    verify(_inputs(boundaries, head_dim=head_dim))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_left": 9, "window_right": 3}], ids=str)
@pytest.mark.parametrize("boundaries", list(FALLING)[:4])
def test_keys_have_falling_boundaries_of_their_own(boundaries: str, options: dict[str, object]) -> None:
    own = FALLING[boundaries]
    keys = (*own[1:], 60)
    verify(_inputs(own, keys, **options))
    verify(_inputs((0, *sorted(abs(bound) for bound in own)[1:]), keys, head_dim=WIDE[-1], **options))


@pytest.mark.no_interpret
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("segments", [3, 39])
def test_boundaries_rise_again_behind_their_largest(segments: int) -> None:
    """Keys have such boundaries beside queries whose boundaries never fall, and the other way round."""
    rising = tuple(64 * index // segments for index in range(segments + 1))
    again = (0, 64, *(0, 50) * (segments // 2))
    for boundaries in (rising, again), (again, rising):
        verify(_inputs(*boundaries, head_dim=72 if GPU else 40))


@pytest.mark.usefixtures("path")
def test_rows_in_no_segment() -> None:
    """Right to the bit: out 0, lse -inf, and no gradient, whatever the rows hold."""
    inputs = _inputs((0, 16, 40, 40, 0, 0))
    end = ROWS // 64 * 40
    spoiled = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    for tensor in spoiled.values():
        tensor[end:] = float("nan")
    with poisoned():
        clean, dirty = (differentiate(torch.ops.vk.window_attn, each) for each in (inputs, replace(inputs, **spoiled)))
    for name, tensor in clean.items():
        assert torch.equal(tensor, dirty[name]), name
        rows = tensor.T[end:] if name == "lse" else tensor[end:]
        assert (rows == (-torch.inf if name == "lse" else 0)).all(), name


@st.composite
def malformed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    bound = st.one_of(st.integers(0, 64), st.integers(-9, 80), st.sampled_from([0, 0, 64, -(2**24), 2**24]))
    count = draw(st.one_of(st.integers(2, 6), st.integers(30, 45)))
    boundaries = draw(st.lists(bound, min_size=count, max_size=count))
    if draw(st.booleans()):
        boundaries = sorted(boundaries)[: draw(st.integers(1, count))]
        boundaries += [0] * (count - len(boundaries))
    keys = draw(st.one_of(st.none(), st.lists(bound, min_size=count, max_size=count)))
    return tuple(boundaries), None if keys is None else tuple(keys)


@given(malformed(), st.sampled_from(WIDE), st.booleans())
@hypothesis_settings(max_examples=60 if GPU else 4 if INTERPRET else 12)
def test_any_boundaries(call: tuple[tuple[int, ...], tuple[int, ...] | None], head_dim: int, causal: bool) -> None:
    for path in PATHS:
        with settings(path=path):
            verify(_inputs(*call, head_dim=head_dim, causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 128])
def test_long_segments_hidden_among_many(head_dim: int) -> None:
    """Segments without rows make them look short on average; on Hopper each kind has a kernel of its own."""
    lengths = (*(5,) * 260, 400, 64, 0, 65, *(0,) * 40)
    case = WindowAttnCase("hidden", "long", lengths, 2, head_dim, skipped=7, padding=30)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    verify(inputs)
    for index, bound in ((-1, 0), (-41, 3), (100, 1500)):
        inputs.cu_seqlens[index] = bound
        verify(inputs)


@pytest.mark.parametrize("boundaries", ["one falls", "zeros at the end", "only falling"])
def test_rotation_has_them_too(boundaries: str) -> None:
    """Results and gradients, those of the tables too; rows in no segment may hold anything."""
    inputs = _inputs(FALLING[boundaries])
    end = int(settled(inputs).cu_seqlens[-1])
    angles = torch.rand(ROWS, 20, device=inputs.q.device)
    angles[end:] = float("nan")
    results = []
    for cu_seqlens in (inputs.cu_seqlens, settled(inputs).cu_seqlens):
        tensors = inputs.q, inputs.k, inputs.v, angles.cos(), angles.sin()
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with poisoned():
            out = rope_window_attn(*leaves, cu_seqlens)
            gradients = torch.autograd.grad(out, leaves, inputs.dout)
        results.append((out.detach(), *gradients))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
        assert (actual[end:] == 0).all()


@pytest.mark.no_interpret
@pytest.mark.parametrize("boundaries", [(0, 16, 40, 40, 0, 0), (0, 40, 20), (-1, 64)], ids=str)
def test_checked_mode_names_the_entry(boundaries: tuple[int, ...]) -> None:
    inputs = _inputs(boundaries)
    index = next(i for i, bound in enumerate(boundaries) if bound < max((0, *boundaries[:i])))
    with settings(checked=True), pytest.raises(ValueError, match=rf"cu_seqlens\[{index}\]"):
        window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)


@pytest.mark.parametrize("lengths", [(-3, 2**30), (9, -(2**31))])
def test_decode_clamps_what_the_cache_does_not_hold(lengths: tuple[int, int], device: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 1, 64, dtype=torch.float16, device=device)
    cache = torch.randn(2, 2, 2, 8, 64, dtype=torch.float16, device=device).unbind(0)
    given_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    with poisoned():
        out, lse = attention_decode(q, *cache, given_lengths, return_lse=True)
    expected, expected_lse = attention_decode(q, *cache, given_lengths.clamp(0, 8), return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    empty = given_lengths <= 0
    assert (out[empty] == 0).all() and (lse[empty] == -torch.inf).all()
