"""The table of `vk bench generate`."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import attrgetter

from torch_ops.bench.measure.results import OK, VK_DEFAULT, Group, Record, Report
from torch_ops.bench.show.pivot import NOTHING, Key, Row, digits, marked

EAGER, HF = "vk_default_eager", "hf"


def _over(one: Record | None, other: Record | None) -> str:
    if one is None or other is None or not one.ms or not other.ms or (one.status, other.status) != (OK, OK):
        return NOTHING
    return f"{one.ms / other.ms:.2f}"


def _generate(group: Group, report: Report) -> Iterator[Row]:
    named = {one.name: one for one in group.records}
    yield {
        "image": group.ours.case, "patches, prompt + new tokens": group.ours.shape, "up to": group.ours.direction,
        **{f"{one.name} ms": marked(digits(one.ms, 4), one) for one in group.records},
        f"{HF} / {VK_DEFAULT}": _over(named.get(HF), named.get(VK_DEFAULT)),
        f"{EAGER} / {VK_DEFAULT}": _over(named.get(EAGER), named.get(VK_DEFAULT)),
    }  # fmt: skip


def _notes(records: Sequence[Record]) -> Iterator[str]:
    yield (
        "wall times of `model.generate()`, greedy, warm, `torch.cuda.synchronize` around it: medians of interleaved "
        "rounds. First token: `max_new_tokens=1`"
    )
    yield from _equal_tokens(records)
    counted = dict.fromkeys(f"{one.syncs} for {one.name} on {one.case}" for one in records if one.syncs is not None)
    if counted:
        yield f"synchronisations of a call of the encoder alone, grid on the device: {', '.join(counted)}"
    for one in records:
        if one.status != OK:
            yield f"{one.name} is {one.status} on {one.case}, {one.direction}: {one.note}"


def _equal_tokens(records: Sequence[Record]) -> Iterator[str]:
    """How many token ids ours has in common with Transformers' before they part."""
    theirs = {one.case: one.tokens for one in records if one.name == HF and one.tokens}
    told = {}
    for one in records:
        if one.name != HF and one.tokens and one.case in theirs:
            pairs = zip(one.tokens, theirs[one.case], strict=False)
            equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            told[one.name, one.case] = f"{equal} of {len(one.tokens)} for {one.name} on {one.case}"
    if told:
        yield f"leading token ids equal to {HF}'s: {', '.join(told.values())}"


GENERATE = Key(
    attrgetter("op", "dtype", "path"), attrgetter("case", "direction"), _generate,
    lambda one: f"generate() of a whole model, {one.dtype}, {one.path} path", _notes,
)  # fmt: skip
