"""The graph contract of the norms, and the code of their kernels."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import torch_ops
from compile_tests.contract.build import Build, registers, sampled
from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject, assert_same_bits, compiled_by
from compile_tests.contract.trace import capture_graphs, fake_gpu
from compile_tests.kernels import MANY, NORMS
from torch_ops._core.device import gpu
from torch_ops.testing import references
from torch_ops.testing.cases import NORM_LAYOUTS, NormCase, make_norm_inputs

# Shapes of calls that share one graph: none repeats.
SIZES = tuple(NormCase(str(rows), "", (rows,), 136) for rows in (13, 5, 40, 7, 300))
ROWS = torch.export.Dim("rows", min=2, max=65536)
FLAGS = ("needs_dx", "needs_dweight", "needs_dbias")


def _subject(op: str) -> Subject:
    added, biased = "add" in op, "layer" in op
    grads = ("dnormed", "dsum") if added else ("dout",)
    flags = FLAGS if biased else FLAGS[:2]

    def draw(case: NormCase, dtype: torch.dtype, seed: int = 0) -> Call:
        inputs = make_norm_inputs(op, case, dtype, DEVICE, seed)
        upstream = {"normed": inputs.dout, **({"sum": inputs.dsum} if added else {})}
        return Call.of(getattr(torch_ops, op), inputs, ("x", "residual", "weight", "bias"), grads=upstream)

    def backward(call: Call) -> dict[str, Any]:
        given = dict(zip(grads, call.grads.values(), strict=True))
        parameters = {name: call.args[name] for name in ("weight", "bias", "eps") if name in call.args}
        present = [True, *(name in call.args for name in ("weight", "bias"))]
        wanted = dict(zip(flags, present, strict=False))
        return {**given, "sum" if added else "x": call.args["x"], **parameters, **wanted}

    def partial(call: Call) -> list[dict[str, Any]]:
        whole = backward(call)
        alone = [{**whole, **{flag: flag == wanted for flag in flags}} for wanted in flags]
        return [*alone, *({**whole, absent: None} for absent in (grads if added else ()))]

    return Subject(
        op, getattr(torch_ops, op), getattr(references, op), draw, SIZES,
        moving={name: {0: ROWS} for name in (("x", "residual") if added else ("x",))},
        kernels=NORMS[op],
        backward=backward,
        partial=partial,
        checked=(
            *(NormCase(layout, "", (4, 5), 136, layout) for layout in NORM_LAYOUTS),
            NormCase("vector", "", (), 136), NormCase("bare", "", (3,), 136, parameters="none"),
            NormCase("wide", "", (3,), 17000),
        ),
        compiled=(
            NormCase("contiguous", "", (4, 5), 136), NormCase("swapped", "", (4, 5), 136, "swapped"),
            NormCase("no_rows", "", (0,), 136), NormCase("one_row", "", (1,), 136), NormCase("batch", "", (3, 0), 136),
            NormCase("fp32_parameters", "", (13,), 1152, parameters="fp32"),
        ),
        layouts=tuple(NormCase(layout, "", (4, 5), 136, layout) for layout in NORM_LAYOUTS),
        replayed=(NormCase("graph", "", (300,), 1152),) * 2,
        batched="x",
    )  # fmt: skip


SUBJECTS = {op: _subject(op) for op in NORMS}


class TestGraphs(GraphContract):
    subjects = tuple(SUBJECTS.values())


@pytest.mark.parametrize("op", NORMS)
def test_autocast_changes_nothing_beside_fp32_parameters(op: str) -> None:
    def in_region(**args: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16):
            return SUBJECTS[op].function(**args)

    call = SUBJECTS[op].call(NormCase("mixed", "", (13,), 136, parameters="fp32"), torch.bfloat16)
    assert_same_bits(call.outcome(compiled_by("aot_eager", in_region)), call.outcome(SUBJECTS[op].function))


@pytest.mark.parametrize("op", NORMS)
def test_frozen_parameters_cost_nothing_in_compiled_calls(op: str) -> None:
    function, graphs = capture_graphs(SUBJECTS[op].function)
    call = replace(SUBJECTS[op].call(), leaves=("x",))
    assert_same_bits(call.outcome(function), call.outcome(SUBJECTS[op].function))
    if DEVICE == "cpu":
        assert graphs.backward == f"vk.{op}_backward.default\n"


def test_frozen_parameters_have_no_sums() -> None:
    """The backward then has up to three times as many programs."""
    sums, frozen = (
        NORMS["layer_norm"].launch("_norm_bwd_kernel", rows=MANY, needs_parameters=needed) for needed in (True, False)
    )
    with fake_gpu():
        most = 8 * gpu().multiprocessors
    assert sums.grid[0] <= most < frozen.grid[0] <= 3 * most
    assert not frozen.arguments["NEEDS_DWEIGHT"] and not frozen.arguments["NEEDS_DBIAS"]


WIDTHS = (768, 1024, 1152, 1280, 4608)
VARIANTS = {torch.bfloat16: "plain", torch.float32: "fp32"}


def _accesses(built: Build, what: str) -> set[str]:
    """How loads and stores (`what`) of global memory are made: v4.b32 is 16 bytes."""
    found: list[str] = re.findall(rf"\b(?:{what})\.global(?:\.\w+)*?\.((?:v\d\.)?[bfsu]\d+)\b", built.asm["ptx"])
    assert found
    return set(found)


@pytest.mark.parametrize(("width", "op", "dtype"), sampled(product(WIDTHS, NORMS, VARIANTS)))
def test_forward_of_few_rows_reads_and_writes_by_16_bytes_and_keeps_rows_in_registers(
    width: int, op: str, dtype: torch.dtype
) -> None:
    """Layouts of parts agree, so nothing goes through shared memory but sums of rows that several warps share."""
    built = NORMS[op].builds("sm_90", VARIANTS[dtype], rows=128, width=width)[0]
    assert _accesses(built, "ld|st") == {"v4.b32"}
    assert "ttg.convert_layout" not in built.asm["ttgir"]
    assert built.shared <= (0 if width <= 1280 else 64)


@pytest.mark.parametrize(("width", "dtype"), sampled(product(WIDTHS, VARIANTS)))
def test_layer_norm_of_many_rows_has_two_rows_in_the_place_of_one(width: int, dtype: torch.dtype) -> None:
    """Weight and bias come late: 32 warps to each multiprocessor have 64 registers a thread."""
    many, few = (
        NORMS["layer_norm"].builds("sm_90", VARIANTS[dtype], rows=rows, width=width)[0] for rows in (MANY, 128)
    )
    assert registers(many) <= 72 and (width < 1152 or registers(many) < 0.6 * registers(few))
    assert _accesses(many, "ld|st") == {"v4.b32"}
    # Besides sums, a flag of each warp: whether a row of the tile must be scaled.
    assert "ttg.convert_layout" not in many.asm["ttgir"] and many.shared <= (16 if width <= 1280 else 64)


@pytest.mark.parametrize("width", sampled(WIDTHS))
def test_backward_exchanges_no_rows(width: int) -> None:
    """Only the sums of columns are rearranged, once, after the last row."""
    built = NORMS["add_layer_norm"].builds("sm_90", "mixed", rows=MANY, width=width)[1]
    ttgir = built.asm["ttgir"]
    assert "ttg.convert_layout" not in ttgir[ttgir.index("scf.for") : ttgir.index("scf.yield")]
    assert _accesses(built, "ld") == {"v4.b32"}


def test_few_rows_have_a_program_each_and_their_parameters_early() -> None:
    many, few = (NORMS["layer_norm"].launch("_norm_fwd_kernel", rows=rows) for rows in (MANY, 784))
    assert few.grid == (784,) and few.arguments["BLOCK_M"] == 1 and few.arguments["EARLY"] is True
    assert many.grid == (MANY // 4,) and many.arguments["BLOCK_M"] == 4 and many.arguments["EARLY"] is False
