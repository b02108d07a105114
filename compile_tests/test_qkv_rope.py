"""The graph contract of `vk::qkv_rope`."""

from typing import Any

import torch

from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject
from compile_tests.kernels import QKV_ROPE
from torch_ops import qkv_rope
from torch_ops.testing import references
from torch_ops.testing.cases import LINEAR_LAYOUTS, QkvRopeCase, make_qkv_rope_inputs

# Rows of calls that share one graph.
SIZES = tuple(QkvRopeCase(str(rows), "", rows, 40, 2, 24, num_k_heads=1) for rows in (63, 200, 7, 320, 128))
NEEDS = ("x", "weight", "bias")
ROWS = torch.export.Dim("rows", min=2, max=65536)


def draw(case: QkvRopeCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_qkv_rope_inputs(case, dtype, DEVICE, seed)
    return Call.of(qkv_rope, inputs, (*NEEDS, "cos", "sin"), grads=inputs.douts)


def backward(call: Call) -> dict[str, Any]:
    kept = {name: call.args[name] for name in ("x", "weight", "cos", "sin")}
    return {**{f"d{name}": grad for name, grad in call.grads.items()}, **kept}


def partly(call: Call) -> list[dict[str, Any]]:
    """Some gradients; only those of the weight and of tables need x."""
    needs = [(False, True, False), (True, False, True), (False, False, True)]
    whole = backward(call)
    return [
        {**whole, "needs_tables": True, "bias": call.args.get("bias")},
        {**whole, **{f"needs_{name}": False for name in NEEDS}, "needs_tables": True},
        *({
            **whole,
            "x": whole["x"] if each[1] else None,
            **{f"needs_{name}": needed for name, needed in zip(NEEDS, each, strict=True)},
        } for each in needs),
    ]  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (
        Subject(
            "qkv_rope", qkv_rope, references.qkv_rope, draw, SIZES,
            moving=dict.fromkeys(("x", "cos", "sin"), {0: ROWS}),
            kernels=QKV_ROPE,
            backward=backward,
            partial=partly,
            checked=(
                SIZES[0],
                *(QkvRopeCase(layout, "", 40, 40, 2, 24, layout=layout, half_table=True) for layout in LINEAR_LAYOUTS),
            ),
            replayed=(QkvRopeCase("graph", "", 512, 40, 2, 24, num_k_heads=1),) * 2,
            autocast="follows",
            casts=NEEDS,
            batched="x",
        ),
    )  # fmt: skip
