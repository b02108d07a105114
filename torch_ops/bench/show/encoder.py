"""Tables of the whole encoder: the fastest of each group batch by batch, and every implementation of a batch."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from torch_ops.bench.measure.results import (
    ASSEMBLED,
    OK,
    OURS,
    UNAVAILABLE,
    UNCAPTURED,
    VK_DEFAULT,
    Group,
    Record,
    Report,
    grouped,
)
from torch_ops.bench.show.pivot import NOTHING, OF_CASE, Key, Row, digits, mib, share


def _fastest(group: Group, name: str) -> tuple[Record, ...]:
    """The fastest correct one in each half of the rounds: where one wavers another may be ahead in a half."""
    right = [one for one in group.records if one.group == name and one.status == OK and one.rounds_ms]
    halves = range(min((len(one.halves_ms) for one in right), default=0))
    return tuple(min(right, key=lambda one: one.halves_ms[half]) for half in halves)


def _over(ones: tuple[Record, ...] | Record | None, other: Record | None) -> str:
    """Time over the other's, in both halves."""
    if ones is None or other is None:
        return NOTHING
    if isinstance(ones, Record):
        ones = (ones,) * len(ones.halves_ms)
    times = [one.halves_ms[half] for half, one in enumerate(ones)]
    return ", ".join(f"{ms / own:.2f}" for ms, own in zip(times, other.halves_ms, strict=False)) or NOTHING


def _halves(ones: Sequence[Record]) -> str:
    """Both halves of each one's time, named once where it is the same."""
    figures = [(digits(one.halves_ms[half]), one.name) for half, one in enumerate(ones)]
    if len({name for _, name in figures}) == 1:
        return f"{', '.join(ms for ms, _ in figures)} {figures[0][1]}"
    return ", ".join(f"{ms} {name}" for ms, name in figures) or NOTHING


def _rates(one: Record | None, report: Report) -> Row:
    rate, ceilings = None if one is None else one.tflops, report.ceilings
    if ceilings is None or one is None or ceilings.matmul_dtype != one.dtype:
        return {"TFLOP/s": digits(rate), "of matmul": NOTHING}
    return {"TFLOP/s": digits(rate), "of matmul": share(rate, ceilings.matmul_tflops)}


def _encoder(group: Group, report: Report) -> Iterator[Row]:
    first, best = group.records[0], [group.best(name) for name in (OURS, UNCAPTURED, ASSEMBLED)]
    ours = best[0]
    named = {one.name: one for one in group.records if one.status == OK and one.rounds_ms}
    compiled = Group(tuple(named[name] for name in ("vk_compiled", "vk_reduced") if name in named)).best(OURS)
    plain, assembled = _fastest(group, UNCAPTURED), _fastest(group, ASSEMBLED)
    default, hf = named.get(VK_DEFAULT), named.get("hf")
    yield {
        "batch": first.case if first.direction == "forward" else f"{first.case}, {first.direction}",
        "patches of each frame": first.shape,
        "best of ours, ms": NOTHING if ours is None else _halves((ours,) * len(ours.halves_ms)),
        **_rates(ours, report),
        f"{VK_DEFAULT}, ms": NOTHING if default is None else ", ".join(map(digits, default.halves_ms)),
        f"best (a) / {VK_DEFAULT}": _over(plain, default),
        f"{VK_DEFAULT} / vk_graph": _over(default, named.get("vk_graph")),
        "compiled / best of ours": NOTHING if compiled is None else f"{_over(compiled, ours)} {compiled.name}",
        "frozen / best of ours": _over(named.get("vk_reduced_frozen"), ours),
        "best (a), ms": _halves(plain), "(a) / ours": _over(plain, ours),
        "best (b), ms": _halves(assembled), "(b) / ours": _over(assembled, ours),
        "peak MiB, ours / (a) / (b)": " / ".join(mib(one, 0) for one in best),
        f"peak MiB, {VK_DEFAULT} / hf": f"{mib(default, 0)} / {mib(hf, 0)}",
    }  # fmt: skip


def _encoder_notes(records: Sequence[Record]) -> Iterator[str]:
    yield (
        "wall times of a call, warm, `torch.cuda.synchronize` around it: medians of the first and of the second half "
        "of all rounds, in turns with all others"
    )
    yield (
        "(a): Transformers' tower, also with other attention and compiled blocks. (b): put together by hand under one "
        "CUDA graph. Each half has the fastest that the tolerance rule passes. Baseline / ours: above 1 ours is faster"
    )
    if any(one.name == VK_DEFAULT for one in records):
        yield f"{VK_DEFAULT}: the call of the model's encoder after accelerate(model), grid on the device"
    yield from _first_calls(records)
    yield "compiled: the faster of vk_compiled and vk_reduced. frozen: vk_reduced_frozen, whose weights must not change"
    yield (
        "peak MiB: weights, input, what was made before the call, and what one call asks for at its peak; of a CUDA "
        "graph the whole of its memory pool"
    )
    groups = grouped(records, attrgetter("case", "direction")).values()
    best = (group.best(name) for group in groups for name in (OURS, UNCAPTURED, ASSEMBLED))
    yield from _ready(one for one in best if one is not None)
    if any(one.direction != "forward" for one in records):
        yield (
            "a training step: forward, a scalar loss that is linear in pooler_output and the deepstack features, "
            "gradients of all parameters; no optimizer, no activation checkpointing"
        )


def _first_calls(records: Iterable[Record]) -> Iterator[str]:
    """One note on what the first two calls of a size take."""
    told = []
    for one in records:
        if (calls := one.first_calls) is not None:
            first, second = calls.first_ms / calls.eager_new_ms, calls.second_ms / calls.eager_ms
            ms = f"{digits(calls.first_ms)} and {digits(calls.second_ms)} ms"
            told.append(f"{one.case} {first:.2f}, {second:.2f} ({ms})")
    if told:
        yield f"first and second call of a size, {VK_DEFAULT}, over an eager call: {'; '.join(told)}"


def _ready(records: Iterable[Record]) -> Iterator[str]:
    """One note on the tables that each implementation was given."""
    named = grouped((one for one in records if one.ms and one.ready), attrgetter("ready"))
    told = "; ".join(
        f"{what} for {', '.join(dict.fromkeys(one.name for one in each.records))}" for what, each in named.items()
    )
    if told:
        yield f"of a batch's grid is made before the call, or remembered from the one before: {told}"


def _encoder_row(group: Group, report: Report) -> Iterator[Row]:
    marks = {OURS: "ours", UNCAPTURED: "(a)", ASSEMBLED: "(b)"}
    for one in sorted(group.records, key=lambda one: list(marks).index(one.group)):
        if one.status != UNAVAILABLE:
            first, second, *_ = (*(digits(ms, 4) for ms in one.halves_ms), NOTHING, NOTHING)
            yield {
                "implementation": one.name if one.status == OK else f"{one.name} {one.status}",
                "group": marks[one.group], "ms, first half": first, "second": second,
                "best (a) / it": _over(group.best(UNCAPTURED), one), "best (b) / it": _over(group.best(ASSEMBLED), one),
                **_rates(one, report), "peak MiB": mib(one, 0),
            }  # fmt: skip


def _encoder_row_notes(records: Sequence[Record]) -> Iterator[str]:
    yield from _ready(records)
    for (status, note), group in grouped(records, attrgetter("status", "note")).items():
        if note:
            yield f"{', '.join(one.name for one in group.records)}: {status}, {note}"


ENCODER = Key(
    attrgetter("dtype", "path"), attrgetter("case", "direction"), _encoder,
    lambda one: f"vision encoder, {one.dtype}, {one.path} path", _encoder_notes,
)  # fmt: skip
ENCODER_ROW = Key(
    OF_CASE, OF_CASE, _encoder_row, lambda one: f"{one.case}, {one.direction}, {one.shape}", _encoder_row_notes
)
