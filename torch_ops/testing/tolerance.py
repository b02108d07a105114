"""The error rule: a result is right relative to what eager PyTorch achieves at its dtype, never to a literal.

With ref in fp64 and eager the maths in the tested dtype:

    error(actual) <= 2 error(eager) + 2 |(ref + 0.3 - 0.3) - ref|  in that dtype

on the maximum and on the root mean square. The second term is the rounding of the dtype itself. Without it, an eager
result that happens to be exact would demand the impossible. The rule is FlashAttention's (`tests/cute`), with RMS
added.

With few numbers, eager's largest error can be small by luck. `check_draws` then tests more random inputs before it
fails; it does not allow more error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """Result of `compare`; `passed` is the rule."""

    name: str
    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.passed_but_for_maximum and self.max_error <= self.max_allowed

    @property
    def passed_but_for_maximum(self) -> bool:
        return not self.problem and self.rms_error <= self.rms_allowed

    def __str__(self) -> str:
        result = self.problem or ("within the rule" if self.passed else "outside the rule")
        return (
            f"{self.name}: {result}; max {self.max_error:.3g} of {self.max_allowed:.3g} allowed, "
            f"rms {self.rms_error:.3g} of {self.rms_allowed:.3g} allowed"
        )


@dataclass(frozen=True)
class _Size:
    """How large numbers are, and together with others."""

    most: float
    squares: float
    count: int

    @classmethod
    def of(cls, values: Tensor) -> "_Size":
        most = values.abs().max().item() if values.numel() else 0.0
        return cls(most, values.square().sum().item(), values.numel())

    def __add__(self, other: "_Size") -> "_Size":
        return _Size(max(self.most, other.most), self.squares + other.squares, self.count + other.count)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


# Sizes of the error, of eager's error and of the dtype's rounding; or why there is nothing to measure.
_Measured = tuple[_Size, _Size, _Size] | str


def _measure(actual: Tensor, eager: Tensor, reference: Tensor) -> _Measured:
    if actual.shape != reference.shape:
        return f"shape {list(actual.shape)} where the reference has {list(reference.shape)}"
    actual64, eager64, reference = (
        actual.detach().double(),
        eager.detach().double(),
        reference.detach().double(),
    )
    if reference.isnan().any() or not torch.isfinite(eager64[torch.isfinite(reference)]).all():
        return "not to be judged: the reference holds NaN, or eager is not finite"
    finite = torch.isfinite(reference)
    if not torch.equal(actual64[~finite], reference[~finite]):
        return "not infinite where the reference is"
    actual64, eager64, reference = actual64[finite], eager64[finite], reference[finite]
    if not torch.isfinite(actual64).all():
        bad = int((~torch.isfinite(actual64)).sum())
        return f"{bad} of {actual64.numel()} entries are not finite"
    rounded = reference.to(actual.dtype)
    band = 2 * ((rounded + 0.3 - 0.3).double() - rounded.double())
    return _Size.of(actual64 - reference), _Size.of(eager64 - reference), _Size.of(band)


def _report(name: str, measured: _Measured) -> Report:
    if isinstance(measured, str):
        return Report(name, 0.0, 0.0, 0.0, 0.0, measured)
    error, eager, band = measured
    return Report(name, error.most, 2 * eager.most + band.most, error.rms, 2 * eager.rms + band.rms)


def _together(one: _Measured, other: _Measured) -> _Measured:
    """Both measurements as one, or the problem of either."""
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else other
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def compare(actual: Tensor, eager: Tensor, reference: Tensor, name: str = "result") -> Report:
    """Measure `actual` against fp64 `reference` by the error of `eager`.

    Entries where the reference is infinite must be the same infinity, all others finite.
    """
    return _report(name, _measure(actual, eager, reference))


def assert_close_to_reference(actual: Tensor, eager: Tensor, reference: Tensor, name: str = "result") -> Report:
    """Raise AssertionError with the measured errors if `actual` breaks the rule."""
    report = compare(actual, eager, reference, name)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def check(actual: dict[str, Tensor], eager: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Report]:
    """`assert_close_to_reference` for every named tensor; all are measured before the first is refused."""
    return _refused_unless_passed(
        {name: compare(actual[name], eager[name], reference[name], name) for name in reference}
    )


FEW = 64
# actual, eager and reference, by name.
Draw = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def compare_draws(draw: Callable[[int], Draw], more: int = 3) -> dict[str, Report]:
    """Measure draw(0) or, if tensors break the rule by their maximum alone, draw(0) with `more` draws together.

    `redrawn` inputs hold the numbers of the first draw in another order. An elementwise op, and a tensor of one number,
    needs other numbers: make its inputs from each seed.

    With fewer than FEW numbers the root mean square is luck as well. All numbers of a name are judged as one tensor.
    Those of the first draw stay among them, so a real error there is still seen. Each draw is freed after it was
    measured, because several draws of a large model's gradients would fit no memory.
    """
    few: set[str] = set()

    def measure(seed: int) -> dict[str, _Measured]:
        actual, eager, reference = draw(seed)
        few.update(name for name, tensor in reference.items() if tensor.numel() < FEW)
        return {name: _measure(actual[name], eager[name], reference[name]) for name in reference}

    measured = measure(0)
    reports = {name: _report(name, each) for name, each in measured.items()}
    lucky = all(
        report.passed_but_for_maximum or (not report.problem and name in few) for name, report in reports.items()
    )
    if not lucky or all(report.passed for report in reports.values()):
        return reports
    for seed in range(1, more + 1):
        measured = {name: _together(measured[name], each) for name, each in measure(seed).items()}
    return {name: _report(name, each) for name, each in measured.items()}


def check_draws(draw: Callable[[int], Draw], more: int = 3) -> dict[str, Report]:
    """`check` of what `compare_draws` measures."""
    return _refused_unless_passed(compare_draws(draw, more))


def _refused_unless_passed(reports: dict[str, Report]) -> dict[str, Report]:
    if not all(report.passed for report in reports.values()):
        raise AssertionError("\n".join(map(str, reports.values())))
    return reports
