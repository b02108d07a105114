"""Small cases that reach the branches of the attention kernels, on each path, and of the Hopper path's products.

They are cheap enough for compute-sanitizer, which `make sanitize` runs them under. The Hopper kernels get few programs,
so that each takes several tiles and hands shared memory on from one to the next. Gradients in two kernels are an
exception: their programs have one tile each.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from csrc_free_ops.configs.gemm_hopper import WAVE, tile_config
from tests.attention.verify import verify, verify_decode
from tests.gemm.verify import Gradient, Layer, verify_projection
from torch_ops import explain, settings, window_attn
from torch_ops._attention import hopper as attention_hopper
from torch_ops._attention import hopper_backward as attention_hopper_backward
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops.testing.cases import (
    DecodeCase,
    QkvRopeCase,
    SegmentCase,
    WindowAttnCase,
    decode_cases,
    make_decode_inputs,
    make_inputs,
    make_qkv_rope_inputs,
    make_segment_inputs,
    segment_cases,
)

pytestmark = pytest.mark.gpu
PROGRAMS = 4


def _case(name: str, lengths: tuple[int, ...], head_dim: int, num_heads: int = 2, **rest: Any) -> WindowAttnCase:
    return WindowAttnCase(name, "sanitizer", lengths, num_heads, head_dim, **rest)


CAUSAL = {"causal": True}
CASES = [
    *(
        _case(f"{name}-{head_dim}", lengths, head_dim, **rest)
        for head_dim in attention_hopper.HEAD_DIMS
        for name, lengths, rest in (
            ("one", (300,), {}),
            ("few", (130, 17, 0, 200, 1), {}),
            ("many", (40, 7, 64, 0) * 9, {}),
            ("causal", (200, 70), {"options": CAUSAL}),
        )
    ),
    _case("groups", (350, 60), 72, 4, num_k_heads=2),
    _case("groups_causal", (350, 60), 128, 4, num_k_heads=1, options=CAUSAL),
    _case("cross", (140, 8, 3), 72, k_lengths=(11, 0, 277)),
    _case("cross_causal", (140, 8, 3), 64, k_lengths=(11, 0, 277), options=CAUSAL),
    _case("window", (300,), 64, options={"window_left": 40, "window_right": 25}),
    _case("window_of_several", (300, 50), 72, options={"window_left": 100, "window_right": 0}),
    _case("softcap", (160, 10), 64, options={"softcap": 5.0}),
    _case("outside", (337, 20), 72, padding=45, skipped=9),
    _case("one_of_waves", (700,), 64, 1),
    _case("one_of_few_waves", (520,), 72),
    _case("windows", (64,) * 12, 80),
    _case("ragged", (64,) * 7 + (48, 16, 12, 90), 80),
]


APART = [
    *(_case(f"apart-{head_dim}", (300,), head_dim) for head_dim in attention_hopper.HEAD_DIMS),
    _case("apart_groups", (130,), 72, 4, num_k_heads=2),
    _case("apart_other_keys", (140,), 64, k_lengths=(600,), padding=45, skipped=9),
]


@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_gradients_apart_are_right(case: WindowAttnCase, device: str) -> None:
    inputs = make_inputs(case, torch.bfloat16, device)
    with settings(path="hopper"):
        assert "attention_bwd_small_hopper" in inputs.call(partial(explain, window_attn))["kernels"]
        verify(inputs)


@pytest.mark.parametrize("path", ["hopper", "portable"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_modes_are_right(case: WindowAttnCase, path: str, device: str) -> None:
    dtype = torch.float16 if "cross" in case.name else torch.bfloat16
    inputs = make_inputs(case, dtype, device)
    # Plans are made anew where a setting changes.
    with ExitStack() as stack:
        for setting in ("auto", path):
            stack.enter_context(settings(path=setting))
        for module in (attention_hopper, attention_hopper_backward):
            stack.enter_context(mock.patch.object(module, "programs", lambda index: PROGRAMS))
        for deterministic in (True, False):
            verify(replace(inputs, options={**inputs.options, "deterministic": deterministic}))


@pytest.fixture
def few_programs() -> Iterator[None]:
    with settings(path="hopper"), mock.patch.object(gemm_hopper, "programs", lambda index: PROGRAMS):
        yield


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", WAVE, ids=str)
def test_products_are_right(tile: tuple[int, int], bias: bool) -> None:
    for activation in ("gelu_tanh", "swiglu"):
        Layer(activation, 900, 200, 500, bias=bias, keeps_pre=bias).verify(tile_config(*tile))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_products_are_right(bias: bool) -> None:
    Gradient("gelu_tanh", 200, 904, 500, bias=bias).verify()


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_projections_are_right(head_dim: int, half: bool) -> None:
    case = QkvRopeCase("turned", "sanitizer", 300, 200, 6, head_dim, num_k_heads=2, half_table=half)
    verify_projection(make_qkv_rope_inputs(case, torch.bfloat16, "cuda"))


# Pieces, rows and boundaries that lie outside of the tensors, and all score modifications.
SHARED_KEYS = [case for case in segment_cases("edge") if case.name.startswith(("wild", "zigzag2", "tiny", "all_steps"))]


@pytest.mark.parametrize("case", SHARED_KEYS, ids=lambda case: case.name)
def test_shared_keys(case: SegmentCase) -> None:
    verify(make_segment_inputs(case, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("case", decode_cases("edge"), ids=lambda case: case.name)
def test_caches(case: DecodeCase) -> None:
    verify_decode(make_decode_inputs(case, torch.bfloat16, "cuda"))
