"""Makes the tables inside Markdown documents anew, from stored results: python docs/refresh.py docs/*.md

A document marks a table's place by a pair of comments, the first of which names the results, relative to the document:

    <!-- vk bench table --summary results/h200_window_attn.json -->
    ...
    <!-- vk bench table end -->

The options are those of `vk bench table`. `--if-measured` before the file's name leaves the place empty as long as
there is no such file.
"""

import re
import sys
from pathlib import Path

from torch_ops.bench.measure.results import read_report, replace_text
from torch_ops.bench.show.tables import markdown

_OPTIONS = r"(?:--(?P<kind>summary|suite|images) )?(?P<pending>--if-measured )?"
_BEGIN = rf"(?P<begin><!-- vk bench table {_OPTIONS}(?P<file>(?!end |--)\S+) -->\n)"
_MARK = re.compile(_BEGIN)
# Up to its own end: another table's would take what lies between.
_PLACE = re.compile(
    _BEGIN + r"(?P<table>(?:(?!<!-- vk bench table ).)*)(?P<end><!-- vk bench table end -->)", re.DOTALL
)


def refresh(document: Path) -> bool:
    """Returns whether the document marks tables; an equal one stays untouched.

    Raises ValueError naming the results that are missing or are none, and the mark that has no end.
    """
    before = document.read_text()
    ended = {place.start() for place in _PLACE.finditer(before)}
    for mark in _MARK.finditer(before):
        if mark.start() not in ended:
            raise ValueError(
                f"{document}: the table of {mark['file']} has no end mark; add <!-- vk bench table end -->"
            )
    after, places = _PLACE.subn(lambda place: place["begin"] + _make(document.parent, place) + place["end"], before)
    if after != before:
        replace_text(document, after)
    return bool(places)


def _make(folder: Path, place: re.Match[str]) -> str:
    path = folder / place["file"]
    if not path.is_file():
        if place["pending"]:
            return ""
        raise ValueError(f"there are no results at {path}; measure them, or mark the table --if-measured")
    return markdown(read_report(path), place["kind"] or "")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name))
