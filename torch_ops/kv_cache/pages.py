"""The pages of a pool that each sequence has, as the host knows it.

Sequences may share pages, which are counted. A page with more than one user is never written to; a sequence that would
write to it gets a copy first. Each change returns new `Pages`, because a cache keeps the old ones until nothing can
fail.
"""

import copy
from collections.abc import Sequence

from torch_ops._core.checks import refuse

# Pages to be copied: from one to another.
Copies = Sequence[tuple[int, int]]


class Pages:
    """`tables`: the pages of each sequence in order; `users`: of each page; `free`: those without, the next last."""

    def __init__(self, op: str, num_pages: int, batch: int) -> None:
        self.op = op
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        self.users = [0] * num_pages
        self.free = list(reversed(range(num_pages)))

    @property
    def shared(self) -> bool:
        return any(users > 1 for users in self.users)

    def _copied(self) -> "Pages":
        pages = copy.copy(self)
        pages.tables = [list(table) for table in self.tables]
        pages.users, pages.free = list(self.users), list(self.free)
        return pages

    def grown(self, num_pages: int) -> "Pages":
        pages = self._copied()
        pages.free[:0] = reversed(range(len(self.users), num_pages))
        pages.users += [0] * (num_pages - len(self.users))
        return pages

    def reserved(self, counts: Sequence[int]) -> "Pages":
        """Give each sequence so many pages or more; if all have them, return self."""
        missing = [max(0, count - len(table)) for count, table in zip(counts, self.tables, strict=True)]
        if not any(missing):
            return self
        self._require(sum(missing), len(self.free))
        pages = self._copied()
        for table, count in zip(pages.tables, missing, strict=True):
            table += [pages._take() for _ in range(count)]
        return pages

    def cut(self, counts: Sequence[int], partly: Sequence[bool]) -> tuple["Pages", Copies]:
        """Leave each sequence so many pages at most; `partly`: whether its last will be written to again."""
        pages = self._copied()
        return pages, pages._cut(counts, partly)

    def _cut(self, counts: Sequence[int], partly: Sequence[bool]) -> Copies:
        copied = [
            of
            for of, table in enumerate(self.tables)
            if partly[of] and 0 < counts[of] <= len(table) and self.users[table[counts[of] - 1]] > 1
        ]
        dropped = [page for table, count in zip(self.tables, counts, strict=True) for page in table[count:]]
        self._require(len(copied), len(self.free) + self._freed_by(dropped))
        for table, count in zip(self.tables, counts, strict=True):
            self._drop(table[count:])
            del table[count:]
        copies = []
        for of in copied:
            source, target = self.tables[of][-1], self._take()
            # If two sequences are cut within one page, the last keeps it.
            if self.users[source] == 1:
                self._drop([target])
                continue
            self._drop([source])
            self.tables[of][-1] = target
            copies.append((source, target))
        return copies

    def reordered(self, indices: Sequence[int], full: Sequence[int], held: Sequence[int]) -> tuple["Pages", Copies]:
        """Make sequence i a continuation of the former indices[i].

        The first `full` pages of a former sequence are never written to again, and the first `held` hold something. Its
        first continuation keeps its pages. Others share the full ones and have copies of the rest.
        """
        pages = self._copied()
        return pages, pages._reorder(indices, full, held)

    def _reorder(self, indices: Sequence[int], full: Sequence[int], held: Sequence[int]) -> Copies:
        later = [of for place, of in enumerate(indices) if of in indices[:place]]
        dropped = [page for of, table in enumerate(self.tables) if of not in indices for page in table]
        needed = sum(max(0, min(held[of], len(self.tables[of])) - full[of]) for of in later)
        self._require(needed, len(self.free) + self._freed_by(dropped))
        before, copies, seen = self.tables, [], set()
        self._drop(dropped)
        self.tables = []
        for of in indices:
            table = list(before[of])
            if of in seen:
                shared, rest = table[: full[of]], table[full[of] : held[of]]
                for page in shared:
                    self.users[page] += 1
                own = [self._take() for _ in rest]
                copies += list(zip(rest, own, strict=True))
                table = shared + own
            seen.add(of)
            self.tables.append(table)
        return copies

    def _require(self, needed: int, there: int) -> None:
        if needed > there:
            refuse(self.op, "the number of free pages", f"{needed} or more for this", f"{there} of {len(self.users)}")

    def _take(self) -> int:
        page = self.free.pop()
        self.users[page] = 1
        return page

    def _freed_by(self, dropped: Sequence[int]) -> int:
        counts = {page: dropped.count(page) for page in set(dropped)}
        return sum(self.users[page] == count for page, count in counts.items())

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
