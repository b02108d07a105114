"""The tolerance rule: right relative to what eager PyTorch achieves at the same dtype, never to a literal.

With ref in fp64 and eager the same maths at the tested dtype:

    error(actual) <= 2 error(eager) + 2 |(ref + 0.3 - 0.3) - ref|  in that dtype

on the maximum and on the root mean square. The second term is the rounding of the dtype itself, so that an eager result
that happens to be exact does not demand the impossible. The rule is FlashAttention's (`tests/cute`), with RMS added.

Of few numbers eager's largest error may be small by luck. `check_draws` then asks for more numbers, not for more room.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """What `compare` measured; `passed` is the rule."""

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
        verdict = self.problem or ("within the rule" if self.passed else "outside the rule")
        return (
            f"{self.name}: {verdict}; max {self.max_error:.3g} of {self.max_allowed:.3g} allowed, "
            f"rms {self.rms_error:.3g} of {self.rms_allowed:.3g} allowed"
        )


def _max(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def compare(actual: Tensor, eager: Tensor, reference: Tensor, name: str = "result") -> Report:
    """Measures `actual` against fp64 `reference` by the error of `eager`; entries where the reference is infinite must
    be the same infinity, all others finite."""
    if actual.shape != reference.shape:
        problem = f"shape {list(actual.shape)} where the reference has {list(reference.shape)}"
        return Report(name, 0.0, 0.0, 0.0, 0.0, problem)
    actual64, eager64, reference = (
        actual.detach().double(),
        eager.detach().double(),
        reference.detach().double(),
    )
    if reference.isnan().any() or not torch.isfinite(eager64[torch.isfinite(reference)]).all():
        return Report(name, 0.0, 0.0, 0.0, 0.0, "not to be judged: the reference holds NaN, or eager is not finite")
    finite = torch.isfinite(reference)
    if not torch.equal(actual64[~finite], reference[~finite]):
        return Report(name, 0.0, 0.0, 0.0, 0.0, "not infinite where the reference is")
    actual64, eager64, reference = actual64[finite], eager64[finite], reference[finite]
    if not torch.isfinite(actual64).all():
        bad = int((~torch.isfinite(actual64)).sum())
        return Report(name, 0.0, 0.0, 0.0, 0.0, f"{bad} of {actual64.numel()} entries are not finite")
    rounded = reference.to(actual.dtype)
    band = 2 * ((rounded + 0.3 - 0.3).double() - rounded.double())
    error, eager_error = actual64 - reference, eager64 - reference
    return Report(
        name,
        _max(error),
        2 * _max(eager_error) + _max(band),
        _rms(error),
        2 * _rms(eager_error) + _rms(band),
    )


def assert_close_to_reference(actual: Tensor, eager: Tensor, reference: Tensor, name: str = "result") -> Report:
    """Raises AssertionError with the measured errors where `actual` breaks the rule."""
    report = compare(actual, eager, reference, name)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def check(actual: dict[str, Tensor], eager: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Report]:
    """`assert_close_to_reference` for every named tensor; all are measured before the first is refused."""
    return _refused_unless_passed(_compared(actual, eager, reference))


FEW = 64
# actual, eager and reference, by name.
Draw = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def compare_draws(draw: Callable[[int], Draw], more: int = 3) -> dict[str, Report]:
    """Measures draw(0) or, where tensors break the rule by their maximum alone, it with `more` draws together.
    Of fewer than FEW numbers the root mean square is luck as well.

    All numbers of such a tensor are judged as one. Those of the first draw stay among them: what is really wrong there
    is so still. What passed is kept no longer: four draws of a large model's gradients would fit no memory.
    """
    first = draw(0)
    reports = _compared(*first)
    outside = [name for name, report in reports.items() if not report.passed]
    lucky = all(
        reports[name].passed_but_for_maximum or (not reports[name].problem and first[2][name].numel() < FEW)
        for name in outside
    )
    if not (outside and lucky):
        return reports

    def kept(drawn: Draw) -> list[list[Tensor]]:
        return [[tensors[name].flatten() for tensors in drawn] for name in outside]

    draws = [kept(first)]
    del first
    for seed in range(1, more + 1):
        another = draw(seed)
        later = _compared(*another)
        if any(report.problem for report in later.values()):
            return later
        draws.append(kept(another))
        del another
    for name, *drawn in zip(outside, *draws, strict=True):
        actual, eager, reference = map(torch.cat, zip(*drawn, strict=True))
        reports[name] = compare(actual, eager, reference, name)
    return reports


def check_draws(draw: Callable[[int], Draw], more: int = 3) -> dict[str, Report]:
    """`check` of what `compare_draws` measures."""
    return _refused_unless_passed(compare_draws(draw, more))


def _compared(actual: dict[str, Tensor], eager: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Report]:
    return {name: compare(actual[name], eager[name], reference[name], name) for name in reference}


def _refused_unless_passed(reports: dict[str, Report]) -> dict[str, Report]:
    if not all(report.passed for report in reports.values()):
        raise AssertionError("\n".join(map(str, reports.values())))
    return reports
