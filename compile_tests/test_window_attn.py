"""The graph contract of `vk::window_attn`."""

import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests import kernels
from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject, export
from torch_ops import window_attn
from torch_ops.testing import references
from torch_ops.testing.cases import LAYOUTS, WINDOW_ATTN, WindowAttnCase, make_inputs

CASES = {case.name: case for case in WINDOW_ATTN}
LAYOUT_CASES = tuple(WindowAttnCase(layout, "strides", (40, 23), 2, 72, layout=layout) for layout in LAYOUTS)
# Rows and segments of calls that share one graph: none repeats, lengths are uneven, some segments are empty.
SIZES = tuple(
    WindowAttnCase(str(len(lengths)), "", lengths, 2, 72)
    for lengths in ((40, 23), (100, 0, 7, 31), (5,) * 11, (300, 2), (0, 64, 64))
)
ROWS, BOUNDARIES = torch.export.Dim("rows", min=2, max=65536), torch.export.Dim("boundaries", min=2, max=4097)
with_lse = partial(window_attn, return_lse=True)


def draw(case: WindowAttnCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_inputs(case, dtype, DEVICE, seed)
    grads = {"out": inputs.dout, "lse": inputs.dlse}
    return Call.of(with_lse, inputs, ("q", "k", "v"), grads=grads)


def backward(call: Call) -> dict[str, Any]:
    out, lse = call(torch.ops.vk.window_attn)
    kept = {name: value for name, value in call.args.items() if name != "sinks"}
    return {"dout": call.grads["out"], "dlse": call.grads["lse"], "out": out, "lse": lse, **kept}


SUBJECT = Subject(
    "window_attn", with_lse, references.window_attn, draw, SIZES,
    moving={**dict.fromkeys("qkv", {0: ROWS}), "cu_seqlens": {0: BOUNDARIES}},
    kernels=kernels.WINDOW_ATTN,
    backward=backward,
    partial=lambda call: ({**backward(call), "dlse": None},),
    # Small heads, because opcheck compares calls of static and symbolic size, which may launch different tiles.
    checked=tuple(
        replace(case, head_dim=16)
        for case in (
            *LAYOUT_CASES,
            *(CASES[name] for name in ("ragged", "padding", "cross", "gqa", "window_left", "softcap", "all_steps")),
        )
    ),
    compiled=tuple(
        CASES[name] for name in ("ragged", "cross", "gqa", "padding", "qkv_view", "odd_strides", "column_strided")
    ),
    layouts=LAYOUT_CASES,
    replayed=tuple(
        WindowAttnCase(str(lengths[0]), "", lengths, 4, 72) for lengths in ((64,) * 8, (200, 0, 1, 99, 12, 0, 150, 50))
    ),
    autocast="follows",
    batched="q",
)  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (SUBJECT,)


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("lengths", ((40, 0, 23), (300, 150)), ids=str)
def test_compiled_equals_eager_without_lse(lengths: tuple[int, ...], dynamic: bool) -> None:
    inputs = make_inputs(replace(SIZES[0], lengths=lengths), torch.float16, DEVICE)
    compiled = torch.compile(window_attn, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(inputs.call(compiled), inputs.call(with_lse)[0])


@pytest.mark.gpu
def test_aoti_package_for_cuda_holds_the_kernel_and_not_the_op(tmp_path: Path) -> None:
    program = export(SUBJECT, SUBJECT.call())
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    with zipfile.ZipFile(package) as archive:
        contents = b"".join(map(archive.read, archive.namelist()))
    assert b"_attention_fwd_kernel" in contents
    assert b"vk::window_attn" not in contents
