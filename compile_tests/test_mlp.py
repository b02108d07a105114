"""The graph contract of `vk::mlp`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from compile_tests.contract.graph import (
    DEVICE,
    Call,
    GraphContract,
    Subject,
    assert_right,
    assert_same_bits,
    compiled_by,
)
from compile_tests.contract.trace import opcheck_fully, recompiling_fails
from compile_tests.kernels import MLP
from torch_ops import mlp
from torch_ops.testing import references
from torch_ops.testing.cases import LINEAR_LAYOUTS, MlpCase, make_mlp_inputs

# Rows of calls that share one graph.
SIZES = tuple(MlpCase(str(rows), "", (rows,), 24, 37, "swiglu", outer=16) for rows in (63, 200, 7, 320, 128))
NEEDS = ("x", "w1", "b1", "w2", "b2", "w_up", "b_up")
ROWS = torch.export.Dim("rows", min=2, max=65536)


def draw(case: MlpCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_mlp_inputs(case, dtype, DEVICE, seed)
    return Call.of(mlp, inputs, NEEDS, grads={"out": inputs.dout})


def backward(call: Call) -> dict[str, Any]:
    hidden = call(torch.ops.vk.mlp)[1].detach()
    kept = {name: value for name, value in call.args.items() if name != "b2"}
    needs = {f"needs_{name}": call.args.get(name) is not None for name in NEEDS}
    return {**kept, **needs, "dout": call.grads["out"], "hidden": hidden}


def partly(call: Call) -> list[dict[str, Any]]:
    """Some gradients, of a product that was kept and of one that is made again."""
    whole = backward(call)
    without = {f"needs_{name}": False for name in NEEDS}
    return [
        {**whole, **without, **{f"needs_{name}": True for name in wanted}, "hidden": hidden}
        for wanted in (("x",), ("w1", "w2"), ("b2",))
        for hidden in (whole["hidden"], whole["hidden"][:, :0])
    ]


SUBJECT = Subject(
    "mlp", mlp, references.mlp, draw, SIZES,
    moving={"x": {0: ROWS}},
    kernels=MLP,
    backward=backward,
    partial=partly,
    checked=(
        *(
            MlpCase(activation, "", (40,), 24, 37, activation, outer=16)
            for activation in ("swiglu", "gelu_tanh", "gelu", "quick_gelu", "silu")
        ),
        *(MlpCase(layout, "", (2, 20), 24, 40, layout=layout) for layout in LINEAR_LAYOUTS),
    ),
    replayed=(MlpCase("graph", "", (512,), 24, 37, "swiglu", outer=16),) * 2,
    autocast="follows",
    batched="x",
)  # fmt: skip
# A gated layer of two weights.
APART = replace(
    SUBJECT,
    sizes=tuple(replace(case, name=f"apart_{case.name}", apart=True) for case in SIZES[:3]),
    checked=(),
    replayed=(),
)


class TestGraphs(GraphContract):
    subjects = (SUBJECT,)


class TestTwoWeights:
    """They enter graphs as they are."""

    contract = TestGraphs()

    def test_opcheck_passes(self) -> None:
        self.contract.test_opcheck_passes_forward(APART, APART.first)
        self.contract.test_opcheck_passes_backward(APART, APART.first)
        self.contract.test_opcheck_passes_backward_of_some_gradients_and_of_those_without_strides(APART)

    def test_graphs_hold_only_vk_ops(self) -> None:
        self.contract.test_graphs_hold_only_vk_ops(APART)

    @pytest.mark.parametrize("backend", ("aot_eager", *(["inductor"] if DEVICE == "cuda" else [])))
    def test_dynamic_shapes_never_recompile(self, backend: str) -> None:
        self.contract.test_dynamic_shapes_never_recompile(APART, backend)

    def test_exported_program_survives_saving(self) -> None:
        self.contract.test_exported_program_survives_saving_and_runs_at_other_sizes_and_has_gradients(APART)


@pytest.mark.parametrize("case", (SUBJECT.checked[0], APART.first), ids=lambda case: case.name)
def test_opcheck_passes_where_the_first_product_is_not_kept(case: MlpCase) -> None:
    call = draw(case, torch.float32).requiring()
    args = SUBJECT.arguments(replace(call, args={**call.args, "return_hidden": False}))
    opcheck_fully(torch.ops.vk.mlp.default, args)


def test_compiled_equals_eager_where_the_first_product_is_made_again() -> None:
    again = partial(mlp, recompute=True)
    compiled = compiled_by("inductor" if DEVICE == "cuda" else "aot_eager", again)
    assert_same_bits(SUBJECT.call().outcome(compiled), SUBJECT.call().outcome(again))


def test_compiled_with_leading_dimensions_never_recompiles() -> None:
    compiled = compiled_by("inductor" if DEVICE == "cuda" else "aot_eager", mlp, dynamic=True)
    with recompiling_fails():
        for lead in ((3, 20), (5, 7), (2, 40)):
            assert_right(SUBJECT, compiled, MlpCase("lead", "", lead, 24, 40))
