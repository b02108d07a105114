"""Which sizes of batches an encoder captures by itself: those that come again, as long as captures pay."""

from collections import OrderedDict
from collections.abc import Collection

from torch_ops.models.vision_metadata import Padding

# Sizes that are remembered though they have no graph.
MOST_SIZES = 256
# Calls of a size until it is captured: the first number, and the largest where graphs are dropped before they pay.
MEETINGS, MOST_MEETINGS = 2, 64
# Replays after which the capture of a graph has paid, and after which sizes may be captured earlier again.
PAID, WELL_PAID = 4, 16


class Admission:
    """Counts the calls of each bucket of sizes, and keeps account of captures in vain."""

    def __init__(self) -> None:
        # For each bucket, the number of calls so far and the sizes of the last one.
        self._met: OrderedDict[Padding, tuple[int, Padding]] = OrderedDict()
        self.meetings = MEETINGS
        # Rows of the smallest batch whose graph did not fit into memory.
        self.too_large: int | None = None
        # Reason of a failed capture, by bucket; `why_eager` repeats it.
        self._failed: dict[Padding, str] = {}
        # Number of graphs that may be tried, once memory did not suffice for more.
        self._most: int | None = None

    def meet(self, filled: Padding, bucket: Padding) -> tuple[bool, str]:
        """Count a call of these sizes. Return whether the bucket's last call had them too, and why none is captured."""
        count, before = self._met.pop(bucket, (0, filled))
        self._met[bucket] = count + 1, filled
        while len(self._met) > MOST_SIZES:
            self._met.popitem(last=False)
        why = ""
        if bucket in self._failed:
            why = self._failed[bucket]
        elif self.too_large is not None and (filled.rows or 0) >= self.too_large:
            why = f"memory does not suffice for a graph of {self.too_large} patches"
        elif count + 1 < self.meetings:
            why = f"the size was met {count + 1} of {self.meetings} times"
        return before == filled, why

    def most_graphs(self, wanted: int) -> int:
        return min(wanted, self._most or wanted)

    def replayed(self, times: int) -> None:
        """A graph was replayed so many times."""
        if times == WELL_PAID:
            self.meetings = max(MEETINGS, self.meetings // 2)

    def made_way(self, bucket: Padding, replays: int) -> None:
        """A graph makes way for another. Its bucket is to be met anew."""
        self._met.pop(bucket, None)
        if replays < PAID:
            self._double()

    def dropped(self, replays: Collection[int]) -> None:
        """All graphs were dropped, after so many replays of each; none if a capture was in vain."""
        self._met.clear()
        if sum(replays) >= PAID * max(1, len(replays)):
            self.meetings = MEETINGS
        else:
            self._double()

    def refuse_larger(self, rows: int) -> None:
        """Memory does not suffice for a graph of so many rows, however few there are beside it."""
        self.too_large = min(rows, self.too_large or rows)

    def refuse_so_many(self, graphs: int) -> None:
        """Memory does not suffice for a graph beside so many others."""
        self._most = max(1, graphs // 2)

    def refuse_bucket(self, bucket: Padding, why: str) -> None:
        """A capture failed. Others may still succeed, but are not all tried at once."""
        self.dropped(())
        if len(self._failed) >= MOST_SIZES:
            self._failed.clear()
        self._failed[bucket] = why

    def _double(self) -> None:
        self.meetings = min(2 * self.meetings, MOST_MEETINGS)


__all__ = ["MOST_SIZES", "Admission"]
