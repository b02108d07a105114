"""How far contenders are from ours on the very inputs that are timed, whatever the truth is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops.bench.measure.gate import Verdict
from torch_ops.bench.measure.results import Difference
from torch_ops.bench.measure.room import Case, Contender

# What reports of attention kernels hold bf16 and fp16 to, whatever the size of a result.
ATOL = 2e-2


def differences(
    case: Case, inputs: object, contenders: Sequence[Contender], verdicts: dict[str, Verdict], backward: bool
) -> dict[tuple[str, str], Difference]:
    """By name and direction, those of all but the first contender, which is ours; of what fails there are none."""
    ours, *others = (contender for contender in contenders if verdicts[contender.name].can_run)
    if ours is not contenders[0]:
        return {}
    expected = _results(ours, case, inputs, backward)
    found = {}
    for contender in others:
        actual = _results(contender, case, inputs, backward)
        for direction in contender.directions:
            names = [name for name in expected if name.startswith("d") == (direction == "backward") and name in actual]
            if names:
                found[contender.name, direction] = _difference([(actual[name], expected[name]) for name in names])
    return found


def _results(contender: Contender, case: Case, inputs: object, backward: bool) -> dict[str, Tensor]:
    try:
        return contender.bind(case, inputs).results(backward and "backward" in contender.directions)
    except Exception:
        # It fails again where it is timed, and is reported there.
        return {}


def _difference(pairs: list[tuple[Tensor, Tensor]]) -> Difference:
    apart = [(actual.float() - expected.float()).abs().max() for actual, expected in pairs if actual.numel()]
    # Of a stack, and not by Python's max, which passes a NaN by.
    largest = torch.stack(apart).max().item() if apart else 0.0
    finite = math.isfinite(largest)
    return Difference(largest if finite else None, finite and largest <= ATOL, ATOL)
