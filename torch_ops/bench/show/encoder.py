"""Tables of the encoder's bench: the best of each group row by row, and every contender of a row."""

import itertools
import statistics
from collections.abc import Sequence

from torch_ops.bench.measure.results import OK, UNAVAILABLE, EncoderRow, Report, Timed
from torch_ops.bench.show.cells import NOTHING, Table, digits

COMPILED = ("vk_compiled", "vk_reduced")
FROZEN = ("vk_reduced_frozen",)
_NOTES = (
    "wall times of a call, warm, `torch.cuda.synchronize` around it: medians of two passes, one after the other, over "
    "all contenders in turns",
    "(a): Transformers' tower, also with other attention and compiled blocks. (b): put together by hand under one CUDA "
    "graph. Each pass has the fastest that the tolerance rule passes. Peer / ours: above 1 ours is faster",
    "compiled: the faster of vk_compiled and vk_reduced. frozen: vk_reduced_frozen, whose weights must not change",
    "peak MiB: weights, input, what was made before the call, and what one call asks for at its peak; of a CUDA graph "
    "the whole of its memory pool",
    "a peer that is wrong, or at first takes over 1.3 times the best of its group, is timed once in each pass",
)
_STEP = (
    "a training step: forward, a scalar loss that is linear in pooler_output and the deepstack features, gradients of "
    "all parameters; no optimizer, no activation checkpointing"
)


def passes(timed: Timed) -> tuple[float, ...]:
    """The medians of both passes."""
    half = len(timed.rounds_ms) // 2
    return tuple(statistics.median(part) for part in (timed.rounds_ms[:half], timed.rounds_ms[half:]) if part)


def best(group: Sequence[Timed]) -> Timed | None:
    """The fastest that is right."""
    right = [timed for timed in group if timed.status == OK and timed.ms is not None]
    return min(right, key=lambda timed: timed.ms or 0.0, default=None)


def _best_by_pass(group: Sequence[Timed]) -> tuple[Timed, ...]:
    """Of each pass the fastest that is right: of one that wavers another may be ahead in one of them."""
    right = [timed for timed in group if timed.status == OK and timed.ms is not None]
    count = max((len(passes(timed)) for timed in right), default=0)
    entered = ([timed for timed in right if len(passes(timed)) > index] for index in range(count))
    return tuple(min(ones, key=lambda timed: passes(timed)[index]) for index, ones in enumerate(entered))


def encoder_tables(report: Report) -> list[Table]:
    if not report.encoders:
        return []
    return [encoder_summary(report), *(_row_table(row, report) for row in report.encoders)]


def encoder_summary(report: Report) -> Table:
    """A row for each batch; what of ours is compiled stands next to the best of ours."""
    headers = (
        "batch", "patches of each frame", "best of ours, ms", "TFLOP/s", "of matmul", "compiled / best of ours",
        "frozen / best of ours", "best (a), ms", "(a) / ours", "best (b), ms", "(b) / ours",
        "peak MiB, ours / (a) / (b)",
    )  # fmt: skip
    rows = []
    ready: dict[str, str] = {}
    mixed = len({_kind(row) for row in report.encoders}) > 1
    for row in report.encoders:
        ours, plain, assembled = map(best, (row.ours, row.uncaptured, row.assembled))
        compiled, frozen = (best([timed for timed in row.ours if timed.name in names]) for names in (COMPILED, FROZEN))
        name = f"{row.row}, {row.direction}" if row.direction != "forward" else row.row
        name += _kind(row) if mixed else ""
        rivals = [_best_by_pass(group) for group in (row.uncaptured, row.assembled)]
        shown = [each.name for each in (ours, compiled, frozen, *itertools.chain(*rivals)) if each is not None]
        ready |= {each: row.ready[each] for each in shown if each in row.ready}
        rows.append(
            (
                name, row.shape, _best(ours), *_rate(row, ours, report), _named(_over(compiled, ours), compiled),
                _over(frozen, ours),
                *itertools.chain(*((_each_best(rival), _each_over(rival, ours)) for rival in rivals)),
                " / ".join(map(_mib, (ours, plain, assembled))),
            )
        )  # fmt: skip
    trained = any(row.direction != "forward" for row in report.encoders)
    title = f"vision encoder{'' if mixed else _kind(report.encoders[0])}"
    return Table(title, headers, tuple(rows), (*_NOTES, *_ready(ready), *((_STEP,) if trained else ())))


def _kind(row: EncoderRow) -> str:
    return f", {row.dtype}, {row.path} path"


def _ready(words: dict[str, str]) -> tuple[str, ...]:
    """What each was given ready-made, in one note."""
    named: dict[str, list[str]] = {}
    for name, what in words.items():
        named.setdefault(what, []).append(name)
    told = "; ".join(f"{what} for {', '.join(names)}" for what, names in named.items())
    return (f"of a batch's grid is made before the call, or remembered from the one before: {told}",) if told else ()


def _row_table(row: EncoderRow, report: Report) -> Table:
    references = [best(group) for group in (row.uncaptured, row.assembled)]
    rows: list[tuple[str, ...]] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for mark, group in (("ours", row.ours), ("(a)", row.uncaptured), ("(b)", row.assembled)):
        for timed in group:
            if timed.note:
                reasons.setdefault((timed.status, timed.note), []).append(timed.name)
            if timed.status == UNAVAILABLE:
                continue
            status = "" if timed.status == OK else f" {timed.status}"
            ratios = (_over(reference, timed) for reference in references)
            both = (digits(ms, 4) for ms in passes(timed))
            cells = (*both, *([NOTHING] * (2 - len(passes(timed)))))
            rows.append((f"{timed.name}{status}", mark, *cells, *ratios, *_rate(row, timed, report), _mib(timed)))
    headers = (
        "contender", "group", "ms, first pass", "second", "best (a) / it", "best (b) / it", "TFLOP/s", "of matmul",
        "peak MiB",
    )  # fmt: skip
    notes = tuple(f"{', '.join(names)}: {status}, {note}" for (status, note), names in reasons.items())
    ready = {timed.name: row.ready[timed.name] for timed in row.everyone if timed.ms and timed.name in row.ready}
    return Table(f"{row.row}, {row.direction}, {row.shape}", headers, tuple(rows), (*_ready(ready), *notes))


def _best(timed: Timed | None) -> str:
    return NOTHING if timed is None else _named(", ".join(digits(ms) for ms in passes(timed)), timed)


def _named(figures: str, timed: Timed | None) -> str:
    return figures if timed is None or figures == NOTHING else f"{figures} {timed.name}"


def _each_best(fastest: Sequence[Timed]) -> str:
    """Of each pass its fastest, named once where it is the same."""
    if len({timed.name for timed in fastest}) < 2:
        return _best(fastest[0] if fastest else None)
    return ", ".join(_named(digits(passes(timed)[index]), timed) for index, timed in enumerate(fastest))


def _each_over(fastest: Sequence[Timed], reference: Timed | None) -> str:
    """The time of each pass's fastest over the reference's there."""
    theirs = () if reference is None else passes(reference)
    pairs = zip(fastest, theirs, strict=False)
    return ", ".join(f"{passes(timed)[index] / own:.2f}" for index, (timed, own) in enumerate(pairs)) or NOTHING


def _over(timed: Timed | None, reference: Timed | None) -> str:
    """Time over the reference's, in both passes."""
    if timed is None or reference is None:
        return NOTHING
    pairs = list(zip(passes(timed), passes(reference), strict=False))
    return ", ".join(f"{mine / theirs:.2f}" for mine, theirs in pairs) or NOTHING


def _rate(row: EncoderRow, timed: Timed | None, report: Report) -> tuple[str, str]:
    if timed is None or not timed.ms:
        return NOTHING, NOTHING
    rate = row.flops / timed.ms / 1e9
    ceilings = report.ceilings
    comparable = ceilings is not None and ceilings.matmul_dtype == row.dtype
    share = f"{rate / ceilings.matmul_tflops:.0%}" if ceilings is not None and comparable else NOTHING
    return digits(rate), share


def _mib(timed: Timed | None) -> str:
    return NOTHING if timed is None or timed.peak_bytes is None else f"{timed.peak_bytes / 2**20:.0f}"
