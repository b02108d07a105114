"""The graph contract of `vk::segment_attention`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests import kernels
from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject
from compile_tests.contract.trace import capture
from torch_ops import segment_attention
from torch_ops.testing import references
from torch_ops.testing.cases import (
    LAYOUTS,
    SegmentCase,
    make_segment_inputs,
    scattered_keys,
    segment_cases,
    zigzag_keys,
    zigzag_segments,
)

CASES = {case.name: case for case in segment_cases("edge")}
LAYOUT_CASES = tuple(
    SegmentCase(
        layout, "strides", zigzag_keys(2, 60, 25), zigzag_segments(1, 2, 60, 25), 2, 72, layout=layout
    )
    for layout in LAYOUTS
)  # fmt: skip
# Rows, keys, segments, sequences and pieces of calls that share one graph: none repeats, and none is a number of heads.
SIZES = tuple(
    SegmentCase(name, "", keys, segments, 2, 72)
    for name, keys, segments in (
        ("zigzag", zigzag_keys(2, 64, 47, 30), zigzag_segments(1, 2, 64, 47, 30)),
        (
            "dual",
            scattered_keys((50,), 0, 70, 9, 100, 8),
            ((20, 0, 60), (9, 1, 9), (30, 2, 77), (1, 3, 8), (50, 0, 70)),
        ),
        ("scattered", scattered_keys((7, 30), 3, 90, 41), ((40, 1, 41), (0, 0, 8), (60, 0, 90))),
    )
)
SEQUENCES, PIECES = torch.export.Dim("sequences", min=2, max=4096), torch.export.Dim("pieces", min=2, max=512)
ROWS, KEYS = (torch.export.Dim(name, min=2, max=65536) for name in ("rows", "keys"))
SEGMENTS = torch.export.Dim("segments", min=2, max=4096)
with_lse = partial(segment_attention, return_lse=True)


def draw(case: SegmentCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_segment_inputs(case, dtype, DEVICE, seed)
    grads = {"out": inputs.dout, "lse": inputs.dlse}
    return Call.of(with_lse, inputs, ("q", "k", "v"), grads=grads)


def backward(call: Call) -> dict[str, Any]:
    out, lse = call(torch.ops.vk.segment_attention)
    kept = {name: value for name, value in call.args.items() if name != "sinks"}
    return {"dout": call.grads["out"], "dlse": call.grads["lse"], "out": out, "lse": lse, **kept}


SUBJECT = Subject(
    "segment_attention", with_lse, references.segment_attention, draw, SIZES,
    moving={
        "q": {0: ROWS}, "k": {0: KEYS}, "v": {0: KEYS},
        "cu_seqlens_q": {0: SEGMENTS + 1}, "key_sequence": {0: SEGMENTS}, "key_limit": {0: SEGMENTS},
        "key_bounds": {0: SEQUENCES, 1: PIECES + 1}, "key_rows": {0: SEQUENCES, 1: PIECES},
    },
    kernels=kernels.SEGMENT_ATTENTION,
    backward=backward,
    partial=lambda call: ({**backward(call), "dlse": None}, {**backward(call), "float32_kv": True}),
    # Small heads, because opcheck compares calls of static and symbolic size, which may launch different tiles.
    checked=tuple(
        replace(case, head_dim=16)
        for case in (
            *LAYOUT_CASES[-2:],
            *(
                CASES[name]
                for name in ("prefix", "outside", "gqa3", "window_left", "softcap", "all_steps", "starts_steps")
            ),
        )
    ),
    compiled=(*LAYOUT_CASES[-2:], *(CASES[name] for name in ("gqa3", "outside", "all_steps", "starts_steps"))),
    layouts=LAYOUT_CASES,
    # Other limits, pieces and boundaries than at capture.
    replayed=(
        SegmentCase("one", "", zigzag_keys(2, 200, 100), zigzag_segments(0, 2, 200, 100), 4, 72),
        SegmentCase(
            "other", "", scattered_keys((70, 20, 80, 30), 0, 200, 100),
            ((60, 1, 90), (0, 0, 3), (20, 0, 200), (70, 0, 111)), 4, 72,
        ),
    ),
    autocast="follows",
    batched="q",
)  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (SUBJECT,)


@pytest.mark.gpu
def test_backward_of_fp32_keys_is_captured() -> None:
    """Context parallel calls the backward op itself, and replays it on other limits and pieces."""
    calls = [draw(case, torch.float16) for case in SUBJECT.replayed]
    held = {name: tensor.clone() for name, tensor in calls[0].tensors.items()}
    dout = calls[0].grads["out"].clone()

    def step(**changed: Tensor) -> tuple[Tensor, ...]:
        args = {**calls[0].args, **held, **changed}
        out, lse = torch.ops.vk.segment_attention(**args)
        given = {"dout": dout, "dlse": None, "out": out, "lse": lse, **args}
        return torch.ops.vk.segment_attention_backward(**given, float32_kv=True)

    graph, results = capture(step)
    for call in reversed(calls):
        for name, tensor in held.items():
            tensor.copy_(call.args[name])
        dout.copy_(call.grads["out"])
        graph.replay()
        assert results[1].dtype is torch.float32
        for replayed, expected in zip(results, step(), strict=True):
            assert torch.equal(replayed, expected)
