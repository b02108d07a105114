"""The graph contract of `vk::_vision_attention`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject
from compile_tests.contract.trace import cloned_tensors, fake_gpu, symbolic_size
from compile_tests.kernels import VISION_ATTENTION, vision_attention_calls
from torch_ops._attention.packed_heads import default_options
from torch_ops.testing import references
from torch_ops.testing.cases import VisionAttentionCase, make_vision_attention_inputs
from torch_ops.vision_attention import vision_attention

# Rows of calls that share one graph.
SIZES = tuple(VisionAttentionCase(str(rows), "", rows, 40, 2, 24) for rows in (63, 200, 7, 320, 128))
LEAVES = ("x", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
ROWS = torch.export.Dim("rows", min=2, max=65536)


def draw(case: VisionAttentionCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_vision_attention_inputs(case, dtype, DEVICE, seed)
    args = {name: getattr(inputs, name) for name in LEAVES}
    args["cu_seqlens"] = torch.tensor([0, case.rows], dtype=torch.int32, device=DEVICE)
    return Call({**args, "num_heads": case.num_heads}, inputs.douts, LEAVES)


def reference(cu_seqlens: Tensor, **args: Any) -> Tensor:
    """All rows are one segment."""
    return references.vision_attention(**args, cos=None, sin=None)


def backward(call: Call) -> dict[str, Any]:
    _, packed, attended, lse = torch.ops.vk._vision_attention(**call.args)
    kept = {name: call.args[name] for name in ("x", "qkv_weight", "proj_weight", "cu_seqlens", "num_heads")}
    return {"dout": call.grads["out"], **kept, "packed": packed, "attended": attended, "lse": lse}


def partly(call: Call) -> list[dict[str, Any]]:
    """Some gradients, without what they do not need."""
    wanted = [("x",), ("qkv_weight", "proj_bias"), ("qkv_bias",), ("proj_weight",), ("proj_bias",)]
    absent = [("x",), (), ("x",), ("x", "packed", "lse"), ("x", "packed", "lse", "attended")]
    return [
        {**backward(call), **dict.fromkeys(without), **{f"needs_{name}": name in names for name in LEAVES}}
        for names, without in zip(wanted, absent, strict=True)
    ]


class TestGraphs(GraphContract):
    subjects = (
        Subject(
            "_vision_attention", vision_attention, reference, draw, SIZES,
            moving={"x": {0: ROWS}},
            kernels=VISION_ATTENTION,
            backward=backward,
            partial=partly,
            replayed=(replace(SIZES[0], rows=512),) * 2,
            autocast="follows",
            casts=LEAVES,
        ),
    )  # fmt: skip


def test_the_scale_of_a_symbolic_number_of_heads_is_a_number() -> None:
    """PyTorch 2.11 takes an expression for an integer argument of a kernel."""
    with fake_gpu() as mode:
        assert type(default_options(symbolic_size(mode, "heads", 2), 48).scale) is float


@pytest.mark.parametrize("path", ("portable", "hopper"))
@pytest.mark.parametrize("op", VISION_ATTENTION.ops)
def test_inductor_copies_nothing(op: str, path: str) -> None:
    """dq, dk and dv are views of one tensor, and kernels write each in place."""
    with fake_gpu(path=path) as mode:
        with mode:
            args, _ = vision_attention_calls()[op]
        cloned = cloned_tensors(lambda *args: getattr(torch.ops.vk, op)(*args), args)
    assert cloned and not any(cloned), cloned
