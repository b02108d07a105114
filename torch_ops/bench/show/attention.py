"""Tables of what `vk bench attention` measured: one for each pass of a case, and one of all cases."""

from collections.abc import Sequence

from torch_ops.bench.measure.results import (
    FAILED,
    OK,
    OURS,
    UNAVAILABLE,
    WRONG,
    YARDSTICK,
    Ceilings,
    Measurement,
    Report,
    Timed,
)
from torch_ops.bench.show.cells import NOTHING, Table, digits
from torch_ops.bench.show.tables import timers_in_words

# What PyTorch itself has, the first that is right: FlashAttention-2 takes no fp32.
TORCH = "flash2", "efficient", "math", "reference"
VERDICTS = {OK: "within", WRONG: "outside", FAILED: "failed", YARDSTICK: "not judged"}


def attention_tables(report: Report) -> list[Table]:
    """Every pass of every case, and, of several cases, all of them together."""
    made = [_pass_table(one, report.ceilings) for one in report.measurements]
    return made + (overview(report) if len({(one.case, one.dtype) for one in report.measurements}) > 1 else [])


def overview(report: Report) -> list[Table]:
    """A row for each case, and type, of each op and direction."""
    kinds: dict[tuple[str, str], list[Measurement]] = {}
    for one in report.measurements:
        kinds.setdefault((one.op, one.direction), []).append(one)
    return [_overview_table(measurements) for measurements in kinds.values()]


def torch_peer(one: Measurement) -> Timed | None:
    """PyTorch's own attention, where it is right."""
    right = {peer.name: peer for peer in one.peers if peer.status == OK and peer.ms}
    return next((right[name] for name in TORCH if name in right), None)


def faster_by(ours: Timed, peer: Timed | None) -> str:
    """A peer's median over ours; nothing where ours is not right, or the peer is ours."""
    if peer is None or not peer.ms or not ours.ms or ours.status not in (OK, YARDSTICK):
        return NOTHING
    return f"{peer.ms / ours.ms:.2f}x"


def _pass_table(one: Measurement, ceilings: Ceilings | None) -> Table:
    decoding = one.op == "attention_decode"
    headers = ["contender", "mean ms", "median ms", "TFLOP/s", *(("TB/s", "of a copy") if decoding else ())]
    headers += ["its time / ours", "max abs difference to ours", _close(one), "tolerance rule"]
    rows = []
    for timed in (one.ours, *one.peers):
        if timed.status == UNAVAILABLE:
            continue
        row = [timed.name, digits(timed.mean_ms, 4), digits(timed.ms, 4), digits(_rate(one.flops, timed))]
        if decoding:
            row += _traffic(one, timed, ceilings)
        row.append(NOTHING if timed is one.ours else faster_by(one.ours, timed))
        rows.append((*row, *_difference(timed), VERDICTS[timed.status]))
    title = f"{one.op}, {one.direction}, {one.shape}, {one.dtype}, {one.path} path"
    return Table(title, tuple(headers), tuple(rows), tuple(_notes(one)))


def _rate(amount: int, timed: Timed) -> float | None:
    """In units of 1e12 a second."""
    return amount / timed.ms / 1e9 if timed.ms else None


def _traffic(one: Measurement, timed: Timed, ceilings: Ceilings | None) -> list[str]:
    rate = _rate(one.bytes_moved, timed)
    share = NOTHING if rate is None or ceilings is None else f"{rate * 1e3 / ceilings.copy_gb_s:.0%}"
    return [digits(rate), share]


def _close(one: Measurement) -> str:
    tolerances = {peer.to_ours.atol for peer in one.peers if peer.to_ours is not None}
    return f"allclose, atol {min(tolerances):g}" if tolerances else "allclose"


def _difference(timed: Timed | None) -> tuple[str, str]:
    """The largest one to ours, and whether it counts as none."""
    if timed is None or timed.to_ours is None:
        return NOTHING, NOTHING
    far = timed.to_ours
    return "not finite" if far.max_abs is None else digits(far.max_abs, 2), str(far.close)


def _notes(one: Measurement) -> list[str]:
    best, own = one.best_peer, torch_peer(one)
    notes = []
    if one.ours.status == OK and best is not None:
        notes.append(f"ours is {faster_by(one.ours, best)} as fast as the fastest correct peer, {best.name}")
    if one.ours.status == OK and own is not None and own is not best:
        notes.append(f"ours is {faster_by(one.ours, own)} as fast as PyTorch's {own.name}")
    notes += (*_judged_on(one), *_how_timed([one]))
    verbs = {UNAVAILABLE: "cannot run this", FAILED: "failed", WRONG: "is wrong", YARDSTICK: "is no peer"}
    notes += (
        f"{timed.name} {verbs[timed.status]}: {timed.note}" for timed in (one.ours, *one.peers) if timed.status != OK
    )
    return notes


def _judged_on(one: Measurement) -> list[str]:
    """What was held against fp64, in the labels of trials."""
    labels = dict.fromkeys(report.name.partition(" (")[2].removesuffix(")") for report in one.ours.gate)
    return [f"tolerance rule: against fp64, on {' and '.join(labels)}"] if labels else []


def _how_timed(measurements: Sequence[Measurement]) -> list[str]:
    counts = sorted({len(one.ours.rounds_ms) for one in measurements if one.ours.rounds_ms})
    if not counts:
        return []
    how = timers_in_words(measurements)
    time = "wall time of a call" if how == "wall time" else f"device time of a call, {how}"
    warm = sorted({one.warm_up for one in measurements if one.warm_up is not None})
    before = f" after {warm[0]} untimed of each" if warm else ""
    spread = "..".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return [f"times: {time}; {spread} iterations, in turns with all others{before}; ratios are those of medians"]


def _overview_table(measurements: Sequence[Measurement]) -> Table:
    first = measurements[0]
    headers = (
        "shape", "type", "ours ms, mean / median", "PyTorch ms, mean / median", "PyTorch / ours",
        "best correct peer ms", "best / ours", "max abs difference", _close(first), "tolerance rule",
    )  # fmt: skip
    rows = []
    for one in measurements:
        rows.append(_overview_row(one, one.ours, one.dtype, torch_peer(one)))
        rows += (
            _overview_row(one, peer, f"{one.dtype}, {peer.name}", peer)
            for peer in one.peers
            if peer.status == YARDSTICK and peer.name.startswith(f"{OURS}_")
        )
    notes = [
        "PyTorch is the first that can run of its FlashAttention-2, memory-efficient and plain attention; the "
        "difference is between ours and that",
        *_how_timed(measurements),
    ]
    computes = {peer.name: peer.note for one in measurements for peer in one.peers if peer.status == YARDSTICK}
    notes += (f"{name} {what}; its difference is that to ours in fp32" for name, what in computes.items())
    wrong = (
        f"{timed.name} is {timed.status} on {one.case}, {one.dtype}: {timed.note}"
        for one in measurements
        for timed in (one.ours, *one.peers)
        if timed.status in (WRONG, FAILED)
    )
    return Table(f"{first.op}, {first.direction}", headers, tuple(rows), (*notes, *wrong))


def _overview_row(one: Measurement, ours: Timed, kind: str, differs: Timed | None) -> tuple[str, ...]:
    own, best = torch_peer(one), one.best_peer
    return (
        one.shape, kind, _both(ours), _named(own), faster_by(ours, own), _named(best),
        faster_by(ours, best), *_difference(differs), VERDICTS[ours.status],
    )  # fmt: skip


def _both(timed: Timed) -> str:
    return NOTHING if timed.ms is None else f"{digits(timed.mean_ms)} / {digits(timed.ms)}"


def _named(timed: Timed | None) -> str:
    return NOTHING if timed is None else f"{_both(timed)} {timed.name}"
