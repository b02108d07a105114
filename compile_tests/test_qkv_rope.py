"""`vk::qkv_rope` under torch.compile, torch.export, CUDA graphs, autocast and checkpointing."""

from typing import Any

import pytest
import torch

from compile_tests.contract import assert_expected_inline, fake_gpu, opcheck_fully, trace_kernels
from compile_tests.gemm import gemm_calls
from compile_tests.linear import DEVICE, GraphContract, Subject
from torch_ops import qkv_rope
from torch_ops.testing import references
from torch_ops.testing.cases import LINEAR_LAYOUTS, QkvRopeCase, QkvRopeInputs, make_qkv_rope_inputs


def _of_rows(rows: int, dtype: torch.dtype, device: str, seed: int = 0) -> QkvRopeInputs:
    case = QkvRopeCase("contract", "", rows, 40, 2, 24, num_k_heads=1)
    return make_qkv_rope_inputs(case, dtype, device, seed)


def _backward(inputs: QkvRopeInputs) -> tuple[Any, ...]:
    return inputs.dq, inputs.dk, inputs.dv, inputs.x, inputs.weight, inputs.cos, inputs.sin


class TestQkvRope(GraphContract):
    subject = Subject(
        "qkv_rope", qkv_rope, references.qkv_rope, of_rows=_of_rows, backward=_backward, moving=("x", "cos", "sin"),
        source="args = (draw(63, 40), draw(96, 40), draw(96), draw(63, 24), draw(63, 24), 2, 1)",
    )  # fmt: skip


@pytest.mark.parametrize("layout", LINEAR_LAYOUTS)
def test_opcheck_passes_in_every_layout(layout: str) -> None:
    case = QkvRopeCase(layout, "", 40, 40, 2, 24, layout=layout, half_table=True)
    inputs = make_qkv_rope_inputs(case, torch.float32, DEVICE)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    opcheck_fully(torch.ops.vk.qkv_rope.default, inputs.call(lambda *args: args))


@pytest.mark.parametrize("needs", [(False, True, False), (True, False, True), (False, False, True)], ids=str)
def test_opcheck_passes_backward_of_some_gradients(needs: tuple[bool, bool, bool]) -> None:
    inputs = _of_rows(63, torch.float32, DEVICE)
    dq, dk, dv, x, *rest = _backward(inputs)
    # Of a sum's backward, without strides.
    dq = dq[:1, :1, :1].expand(dq.shape)
    opcheck_fully(torch.ops.vk.qkv_rope_backward.default, (dq, dk, dv, x if needs[1] else None, *rest, *needs))


def test_graphs_for_cuda_hold_only_allocations_products_and_kernels() -> None:
    with fake_gpu() as mode:
        with mode:
            calls = gemm_calls()
        forward, backward = (
            trace_kernels(getattr(torch.ops.vk, op), *calls[op]).targets for op in ("qkv_rope", "qkv_rope_backward")
        )
    assert_expected_inline(
        forward,
        """\
aten.new_empty.default
aten.new_empty.default
aten.new_empty.default
triton_kernel_wrapper_functional
""",
    )
    assert_expected_inline(
        backward,
        """\
aten.new_empty.default
aten.new_empty.default
triton_kernel_wrapper_functional
aten.mm.default
aten.t.default
aten.mm.default
aten.sum.dim_IntList
aten._to_copy.default
""",
    )
