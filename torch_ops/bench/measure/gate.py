"""The gate: no speed is reported of a contender that is wrong.

Before anything is timed, every contender's output and gradients are held against the fp64 reference
by the tolerance rule of `torch_ops.testing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torch_ops.bench.measure.results import FAILED, OK, UNAVAILABLE, WRONG, YARDSTICK
from torch_ops.bench.measure.room import Case, Contender, Trial, one_line
from torch_ops.testing import Report, compare_draws
from torch_ops.testing.tolerance import Draw

# Where a maximum alone is outside the rule.
MORE_DRAWS = 3


@dataclass(frozen=True)
class Verdict:
    """Whether a contender may be called right, and in words why not."""

    status: str
    note: str = ""
    reports: tuple[Report, ...] = ()

    @property
    def can_run(self) -> bool:
        return self.status in (OK, WRONG, YARDSTICK)

    def of(self, direction: str) -> "Verdict":
        """The verdict on the forward (all results) or the backward (every gradient, d<input>) alone."""
        if not self.can_run or self.status == YARDSTICK:
            return self
        backward = direction == "backward"
        reports = tuple(report for report in self.reports if report.name.startswith("d") == backward)
        broken = [str(report) for report in reports if not report.passed]
        return Verdict(WRONG if broken else OK, "; ".join(broken), reports)


def judge(
    contender: Contender, case: Case, trials: Sequence[Trial], dtype: torch.dtype,
    device: torch.device, backward: bool,
) -> Verdict:  # fmt: skip
    """Runs a contender on every trial of a case."""
    reason = contender.refuses(case, dtype, device)
    if reason:
        return Verdict(UNAVAILABLE, reason)
    if contender.yardstick:
        return Verdict(YARDSTICK, contender.yardstick)
    # One that has no backward is judged by its results alone.
    backward = backward and "backward" in contender.directions
    reports: list[Report] = []
    for trial in trials:
        try:
            reports += _judge_trial(contender, trial, backward)
        except Exception as error:
            if device.type == "cuda":
                # Raises where the device is lost, and with it whatever would come next.
                torch.cuda.synchronize(device)
            return Verdict(FAILED, f"{trial.label}: {one_line(error)}")
    return Verdict(OK if all(r.passed for r in reports) else WRONG, "", tuple(reports))


def _judge_trial(contender: Contender, trial: Trial, backward: bool) -> list[Report]:
    again = trial.again

    def draw(seed: int) -> Draw:
        drawn = again(seed) if again is not None and seed else trial
        _soil_memory(drawn)
        results = contender.bind(drawn.case, drawn.inputs).results(backward)
        reference = {name: tensor for name, tensor in drawn.reference.items() if backward or not name.startswith("d")}
        actual = {name: drawn.look(name, results[name]) for name in reference}
        return actual, {name: drawn.eager[name] for name in reference}, reference

    reports = compare_draws(draw, 0 if again is None else MORE_DRAWS)
    return [replace(report, name=f"{name} ({trial.label})") for name, report in reports.items()]


def _soil_memory(trial: Trial) -> None:
    """Fills the memory that outputs will be cut from with NaN.

    Without this an output that is never written may show the right values, which a contender
    before left in the same block.
    """
    shaped = [tensor for tensor in vars(trial.inputs).values() if isinstance(tensor, torch.Tensor)]
    floating = [tensor for tensor in shaped if tensor.is_floating_point()]
    soil = [torch.full_like(tensor, torch.nan) for tensor in floating for _ in range(3)]
    del soil
