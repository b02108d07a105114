"""Gradients of tables of angles, in both ops that rotate: `rope_window_attn` and `qkv_rope`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.verify import DTYPES, GPU, INTERPRET, assert_same_bits
from torch_ops import qkv_rope, rope_window_attn
from torch_ops.testing import check_draws, poisoned, redrawn, references
from torch_ops.testing.cases import (
    LAYOUTS,
    LINEAR_LAYOUTS,
    TABLES,
    QkvRopeCase,
    WindowAttnCase,
    make_projected_rope_inputs,
    make_qkv_rope_inputs,
    make_rope_inputs,
)
from torch_ops.testing.tolerance import Draw

# Rows in no segment, heads that fill no tile, columns that no power of two divides.
PACKED = WindowAttnCase("packed", "", (9, 0, 8) if INTERPRET else (17, 0, 20), 3, 24, skipped=4, padding=5)
PROJECTED = QkvRopeCase("projected", "", 41, 40, 6, 24, num_k_heads=2)
HALVES = (torch.float16,) if INTERPRET else (torch.bfloat16, torch.float16)

pytestmark = pytest.mark.interpret


def of_attention(function: Any, inputs: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    names = ("q", "k", "v", "cos", "sin")
    leaves = [getattr(inputs, name).detach().to(dtype or getattr(inputs, name).dtype) for name in names]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    result = function(*leaves, *inputs.places[2:], **inputs.options)
    out = result[0] if isinstance(result, tuple) else result
    gradients = torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(names, gradients, strict=True)}}


def of_projection(function: Any, inputs: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    given = {**inputs.leaves, "cos": inputs.cos, "sin": inputs.sin}
    leaves = {name: leaf.detach().to(dtype or leaf.dtype).requires_grad_() for name, leaf in given.items()}
    results = inputs.call(function, **leaves)
    upstream = [dout.to(result.dtype) for dout, result in zip(inputs.douts.values(), results, strict=True)]
    gradients = torch.autograd.grad(results, tuple(leaves.values()), upstream)
    return {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def verify(op: str, inputs: Any) -> None:
    run, function = (of_attention, rope_window_attn) if op == "rope_window_attn" else (of_projection, qkv_rope)
    reference = getattr(references, op)

    def draw(seed: int) -> Draw:
        drawn = redrawn(inputs, seed)
        with poisoned():
            actual = run(function, drawn)
        return actual, run(reference, drawn), run(reference, drawn, torch.float64)

    check_draws(draw)


@pytest.mark.parametrize("dtype", HALVES if INTERPRET else DTYPES, ids=str)
@pytest.mark.parametrize("tables", ("half", "column_strided") if INTERPRET else TABLES)
def test_tables_of_attention(tables: str, dtype: torch.dtype, device: str) -> None:
    verify("rope_window_attn", make_rope_inputs(PACKED, dtype, device, tables=tables))


@pytest.mark.parametrize("layout", ("odd_strides",) if INTERPRET else LAYOUTS)
def test_tables_of_attention_in_any_layout(layout: str, device: str) -> None:
    heads: dict[str, Any] = {"num_heads": 4, "num_k_heads": 2, "options": {"causal": True}}
    case = replace(PACKED, layout=layout, k_lengths=PACKED.lengths[::-1], **heads)
    verify("rope_window_attn", make_rope_inputs(case, HALVES[0], device))
    verify("rope_window_attn", make_projected_rope_inputs(case, HALVES[0], device))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32) if INTERPRET else DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("layout", LINEAR_LAYOUTS[:2] if INTERPRET else LINEAR_LAYOUTS)
def test_tables_of_a_projection(layout: str, bias: bool, dtype: torch.dtype, device: str) -> None:
    case = replace(PROJECTED, layout=layout, bias=bias, half_table=not bias, own_table=bias)
    verify("qkv_rope", make_qkv_rope_inputs(case, dtype, device))


@given(
    st.sampled_from(["rope_window_attn", "qkv_rope"]), st.integers(20, 60), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 5 if INTERPRET else 16), st.booleans(), st.sampled_from(HALVES), st.integers(0, 2**16),
)  # fmt: skip
@hypothesis_settings(max_examples=3 if INTERPRET else 25)
def test_tables_of_anything(
    op: str, rows: int, group: int, num_k_heads: int, eighths: int, half: bool, dtype: torch.dtype, seed: int
) -> None:
    heads, device = {"num_heads": group * num_k_heads, "num_k_heads": num_k_heads}, "cuda" if GPU else "cpu"
    if op == "qkv_rope":
        case = replace(PROJECTED, rows=rows, head_dim=8 * eighths, half_table=half, **heads)
        verify(op, make_qkv_rope_inputs(case, dtype, device, seed))
    else:
        packed = replace(PACKED, lengths=(rows, seed % 9), head_dim=8 * eighths, **heads)
        verify(op, make_rope_inputs(packed, dtype, device, seed, "half" if half else "full"))


def test_learned_frequencies_get_their_gradient(device: str) -> None:
    """A user learns the frequencies that tables are made of."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 8, device=device) for _ in range(3))
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)
    found = []
    for function in (rope_window_attn, lambda *args: references.rope_window_attn(*args)[0]):
        frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], device=device, requires_grad=True)
        angles = torch.arange(2, device=device)[:, None] * frequencies
        function(q, k, v, angles.cos(), angles.sin(), cu).sum().backward()
        assert frequencies.grad is not None and frequencies.grad.abs().sum() > 0
        found.append(frequencies.grad)
    torch.testing.assert_close(*found)


@pytest.mark.no_interpret
@pytest.mark.parametrize("op", ["rope_window_attn", "qkv_rope"])
def test_one_table_alone_costs_what_both_do_and_gets_equal_bits(op: str, device: str) -> None:
    """Frozen tensors do not keep it from its gradient."""
    if op == "qkv_rope":
        inputs = make_qkv_rope_inputs(PROJECTED, HALVES[0], device)
        whole = of_projection(qkv_rope, inputs)
        sin = inputs.sin.detach().requires_grad_()
        (alone,) = torch.autograd.grad(inputs.call(qkv_rope, sin=sin)[:2], sin, (inputs.dq, inputs.dk))
        assert_same_bits(lambda: of_projection(qkv_rope, inputs))
    else:
        packed = make_rope_inputs(PACKED, HALVES[0], device)
        whole = of_attention(rope_window_attn, packed)
        sin = packed.sin.detach().requires_grad_()
        out = rope_window_attn(packed.q, packed.k, packed.v, packed.cos, sin, *packed.places[2:])
        (alone,) = torch.autograd.grad(out, sin, packed.dout)
        assert_same_bits(lambda: of_attention(rope_window_attn, packed))
    assert torch.equal(alone, whole["dsin"])
