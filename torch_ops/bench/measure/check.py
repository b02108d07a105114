"""The correctness check: no speed is reported of an implementation that is wrong.

Before anything is timed, every implementation's output and gradients are held against the fp64 reference by the
tolerance rule of `torch_ops.testing`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torch_ops.bench.measure.opbench import Check, Impl, one_line
from torch_ops.bench.measure.results import FAILED, OK, OURS, REFERENCE_POINT, UNAVAILABLE, WRONG
from torch_ops.testing import Report, compare_draws
from torch_ops.testing.tolerance import Draw

# Checked together where a maximum alone is outside the rule.
MORE_DRAWS = 3
# A training step has hundreds of gradients; a record keeps the worst of so many.
MANY, SHOWN = 12, 6


@dataclass(frozen=True)
class Checked:
    """Whether an implementation is correct, in words why not, and what it computed for each check."""

    status: str
    note: str = ""
    reports: tuple[Report, ...] = ()
    results: tuple[dict[str, Tensor], ...] = field(default=(), repr=False)

    @property
    def can_run(self) -> bool:
        return self.status in (OK, WRONG, REFERENCE_POINT)

    def of(self, direction: str) -> "Checked":
        """The part of the forward (all results), of the backward (every gradient, d<input>), or all of it."""
        if not self.can_run or self.status == REFERENCE_POINT:
            return self
        reports = [report for report in self.reports if belongs(report.name, direction)]
        broken = sorted((report for report in reports if not report.passed), key=_excess, reverse=True)
        note = "; ".join(str(report) for report in reports if report in broken[:SHOWN])
        if len(broken) > SHOWN:
            note = f"{len(broken)} of {len(reports)} tensors, the worst: {note}"
        if len(reports) > MANY:
            reports = (broken or sorted(reports, key=_excess, reverse=True))[:SHOWN]
        return Checked(WRONG if broken else OK, note, tuple(reports))

    def difference(self, ours: "Checked", direction: str) -> float | None:
        """The largest difference to ours on what both computed; None where there is nothing, or it is not finite."""
        pairs = [
            (actual[name], expected[name])
            for actual, expected in zip(self.results, ours.results, strict=False)
            for name in expected
            if belongs(name, direction) and name in actual and actual[name].shape == expected[name].shape
        ]
        apart = [(one.float() - other.float()).abs().max() for one, other in pairs if one.numel()]
        # The maximum of a stack is NaN where one of them is; Python's max passes a NaN by.
        largest = torch.stack(apart).max().item() if apart else math.nan
        return largest if math.isfinite(largest) else None


def belongs(name: str, direction: str) -> bool:
    """Whether a direction computes the tensor of this name; gradients begin with a d."""
    return direction not in ("forward", "backward") or name.startswith("d") == (direction == "backward")


def _excess(report: Report) -> float:
    return report.rms_error / max(report.rms_allowed, 1e-30)


def check_impl(
    impl: Impl, case: object, checks: Sequence[Check], dtype: torch.dtype, device: torch.device, backward: bool
) -> Checked:
    """Runs an implementation on every check of a case; the results of the first numbers are kept."""
    if reason := impl.refuses(case, dtype, device):
        return Checked(UNAVAILABLE, reason)
    # One without a backward is checked by its results alone.
    backward = backward and impl.directions != ("forward",)
    reports: list[Report] = []
    results: list[dict[str, Tensor]] = []
    for check in checks:
        try:
            if not impl.reference_point:
                reports += _check(impl, check, backward, results)
            elif impl.group == OURS:
                results.append(_run(impl, check, backward))
        except Exception as error:
            if device.type == "cuda":
                # Raises where the device is lost, and with it whatever would come next.
                torch.cuda.synchronize(device)
            return Checked(FAILED, f"{check.label}: {one_line(error)}")
    if impl.reference_point:
        return Checked(REFERENCE_POINT, impl.reference_point, results=tuple(results))
    return Checked(OK if all(r.passed for r in reports) else WRONG, "", tuple(reports), tuple(results))


def _run(impl: Impl, check: Check, backward: bool) -> dict[str, Tensor]:
    _soil_memory(check)
    results = impl.bind(check.case, check.inputs).results(backward)
    names = (name for name in check.reference if backward or not name.startswith("d"))
    return {name: check.look(name, results[name]) for name in names}


def _check(impl: Impl, check: Check, backward: bool, kept: list[dict[str, Tensor]]) -> list[Report]:
    again = check.again

    def draw(seed: int) -> Draw:
        drawn = again(seed) if again is not None and seed else check
        actual = _run(impl, drawn, backward)
        if not seed:
            kept.append(actual)
        return actual, {name: drawn.eager[name] for name in actual}, {name: drawn.reference[name] for name in actual}

    reports = compare_draws(draw, 0 if again is None else MORE_DRAWS)
    return [replace(report, name=f"{name} ({check.label})") for name, report in reports.items()]


def _soil_memory(check: Check) -> None:
    """Fills the memory that outputs will be cut from with NaN.

    Without this an output that is never written may show the right values, which an implementation before left in the
    same block.
    """
    shaped = [tensor for tensor in vars(check.inputs).values() if isinstance(tensor, torch.Tensor)]
    floating = [tensor for tensor in shaped if tensor.is_floating_point()]
    soil = [torch.full_like(tensor, torch.nan) for tensor in floating for _ in range(3)]
    del soil
