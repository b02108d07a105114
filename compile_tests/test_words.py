"""The mechanical rules of our prose: how sentences open, how long they are, and that links lead somewhere.

`words.json` counts the sentences of each file that break a rule. A count may only fall: a test fails where a file has
more, and where it has fewer than `words.json` says. `python -m compile_tests.test_words` writes the lower counts.
"""

import ast
import contextlib
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COUNTS = Path(__file__).parent / "words.json"
FOLDERS = ("csrc_free_ops", "torch_ops", "compile_tests", "tests", "examples", "docs")
SOURCES = sorted([ROOT / "conftest.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

OPENERS = ("Of", "By", "Beside", "What", "Who")
LONGEST = 25
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<=[.!?])\s+")
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*] |\d+\. )")
LABEL = re.compile(r"(?:\*{0,2}\w+(?:, \*{0,2}\w+)*|[A-Z]\w+(?:Error|Warning)): ")
SECTION = re.compile(r"(?:Args|Returns|Raises|Yields|Attributes):$")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- vk bench table .*?<!-- vk bench table end -->|<!--.*?-->", re.DOTALL)


def _sentences(block: str) -> Iterator[str]:
    yield from (sentence for sentence in END.split(" ".join(block.split())) if sentence)


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Text between blank lines, tables and headings; an item of a list is a paragraph."""
    block: list[str] = []
    for line in [*lines, ""]:
        is_apart = not line.strip() or line.lstrip().startswith(("|", "#", "<"))
        if (is_apart or ITEM.match(line)) and block:
            yield " ".join(block)
            block = []
        if line.lstrip().startswith("#"):
            yield line.lstrip("# ")
        elif not is_apart:
            block.append(ITEM.sub("", line))


@cache
def page_sentences(path: Path) -> tuple[str, ...]:
    text = GENERATED.sub("", FENCE.sub("", path.read_text()))
    return tuple(sentence for block in _paragraphs(text.splitlines()) for sentence in _sentences(block))


def _docstring_blocks(text: str) -> Iterator[str]:
    """Paragraphs, and each entry of Args and its like without its name; indented code is left out."""
    block: list[str] = []
    in_section = False
    for line in [*text.splitlines(), ""]:
        indented = line.startswith("    ")
        if line.strip() and not indented:
            in_section = bool(SECTION.match(line.strip()))
        is_apart = not line.strip() or SECTION.match(line.strip()) or (indented and not in_section)
        begins = ITEM.match(line) or (in_section and re.match(r"    \S", line) and LABEL.match(line.strip()))
        if (is_apart or begins) and block:
            yield " ".join(block)
            block = []
        if not is_apart:
            shown = ITEM.sub("", line).strip()
            block.append(LABEL.sub("", shown, count=1) if in_section and begins else shown)


@cache
def docstring_sentences(path: Path) -> tuple[str, ...]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, nodes)]
    blocks = (block for text in texts if text for block in _docstring_blocks(text))
    return tuple(sentence for block in blocks for sentence in _sentences(block))


@cache
def comment_sentences(path: Path) -> tuple[str, ...]:
    """Comments on lines of their own that follow each other are one text."""
    blocks: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#! ")
        is_alone = not token.line[: token.start[1]].strip()
        if is_alone and token.start[0] == last + 1:
            blocks[-1] += f" {text}"
        else:
            blocks.append(text)
        last = token.start[0] if is_alone else -1
    return tuple(sentence for block in blocks for sentence in _sentences(block))


def opens_badly(sentence: str) -> bool:
    return sentence.lstrip("*_\"'([").split(" ", 1)[0].rstrip(",") in OPENERS


def is_long(sentence: str) -> bool:
    words = LINK.sub(r"\1", CODE.sub("code", sentence)).split()
    return sum(any(letter.isalnum() for letter in word) for word in words) > LONGEST


def _texts(path: Path) -> tuple[str, ...]:
    return page_sentences(path) if path.suffix == ".md" else docstring_sentences(path) + comment_sentences(path)


def _told(path: Path) -> tuple[str, ...]:
    """All but comments, and lists of figures."""
    if path.parent.name == "experiments":
        return ()
    return page_sentences(path) if path.suffix == ".md" else docstring_sentences(path)


# The sentences of a file to which a rule applies, and what breaks it.
RULES: dict[str, tuple[Callable[[Path], tuple[str, ...]], Callable[[str], bool]]] = {
    "opener": (_texts, opens_badly),
    "length": (_told, is_long),
}


def offences(rule: str) -> dict[str, list[str]]:
    sentences, breaks = RULES[rule]
    found = {str(path.relative_to(ROOT)): [*filter(breaks, sentences(path))] for path in (*PAGES, *SOURCES)}
    return {name: bad for name, bad in found.items() if bad}


@pytest.mark.parametrize("rule", RULES)
def test_sentences_that_break_a_rule_only_get_fewer(rule: str) -> None:
    allowed = json.loads(COUNTS.read_text())[rule]
    found = offences(rule)
    more = {name: bad for name, bad in found.items() if len(bad) > allowed.get(name, 0)}
    told = "\n".join(f"{name}, {allowed.get(name, 0)} allowed:\n  " + "\n  ".join(bad) for name, bad in more.items())
    assert not more, f"{rule} of sentences:\n{told}"
    stale = {name: count for name, count in allowed.items() if len(found.get(name, ())) < count}
    assert not stale, f"lower these counts by python -m compile_tests.test_words: {stale}"


def test_rules_find_what_breaks_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Of a heading\n\nOf a sink, one. By `x` it\nis. Fine, of course.\n\n- What it is\n- **Who** is\n\n"
        "```\nOf code.\n```\n| Of a table |\n"
        "<!-- vk bench table x.json -->\nOf figures.\n<!-- vk bench table end -->\n"
    )
    found = [sentence for sentence in page_sentences(page) if opens_badly(sentence)]
    assert found == ["Of a heading", "Of a sink, one.", "By `x` it is.", "What it is"]
    source = tmp_path / "source.py"
    long = " ".join(["word"] * 26)
    source.write_text(
        f'"""Of a module.\n\n    Of indented code.\n\nArgs:\n    q, k: By rows. {long}.\n    v: {long[5:]}.\n"""\n'
        "# Beside this,\n# and that. Of it.\nx = 1  # What is x\n"
    )
    bad = [sentence for sentence in _texts(source) if opens_badly(sentence)]
    assert bad == ["Of a module.", "By rows.", "Beside this, and that.", "Of it.", "What is x"]
    assert [sentence for sentence in docstring_sentences(source) if is_long(sentence)] == [f"{long}."]


# --- links ---


def _slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).strip().replace(" ", "-")


@cache
def sections(path: Path) -> dict[str, str]:
    """The text under each heading, by the heading's anchor."""
    _, *parts = re.split(r"^#+ (.*)$", FENCE.sub("", path.read_text()), flags=re.MULTILINE)
    seen: dict[str, int] = {}
    found = {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        slug = _slug(heading)
        found[f"{slug}-{seen[slug]}" if slug in seen else slug] = text
        seen[slug] = seen.get(slug, 0) + 1
    return found


def broken_links(page: Path) -> list[str]:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", FENCE.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in sections(file)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not broken_links(page)


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `x`, two\n[a](#one-x-two) [b](#three) [c](none.md) [d](page.md#one) [e](https://x.org)\n")
    assert broken_links(page) == ["#three", "none.md", "page.md#one"]


# --- README ---

README = ROOT / "README.md"


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 190


def test_every_ratio_of_the_readme_stands_under_the_heading_that_it_links_to() -> None:
    cells = re.findall(r"\[([\d.]+), least ([\d.]+)\]\(docs/benchmarks\.md#([^)]+)\)", README.read_text())
    assert len(cells) >= 6
    told = sections(ROOT / "docs" / "benchmarks.md")
    for mean, least, anchor in cells:
        assert re.search(rf"geometric mean of \d+ ratios: {mean}, least {least}\n", told[anchor]), anchor


def test_every_promise_of_the_readme_names_a_test_that_exists() -> None:
    promised = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", README.read_text())
    assert len(promised) >= 8
    missing = [name for name, file in promised if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing


def test_readme_prints_what_it_says() -> None:
    pytest.importorskip("transformers")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("the README shows what a CPU prints")
    names: dict[str, object] = {}
    shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(shown) == 2
    for code, expected in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected


@pytest.mark.parametrize(
    "message, taken",
    (
        ("Add an op", True),
        ("x" * 72 + "\n\nA body of any length. " + "x" * 80, True),
        ("Use a.b in c\n", True),
        ("x" * 73, False),
        ("Add an op.\n\nA body", False),
        ("Add an op. \n", False),
    ),
)
def test_hook_of_commit_messages_takes_short_subjects_without_full_stop(message: str, taken: bool) -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    (entry,) = re.findall(r"id: commit-subject\n.*?entry: '(.*?)'\n", hooks, re.DOTALL)
    # As pre-commit's pygrep searches with --multiline.
    assert (re.search(entry.encode(), message.encode(), re.MULTILINE | re.DOTALL) is None) == taken


if __name__ == "__main__":
    # Without the file all that is found is taken down; else a count only falls.
    before = json.loads(COUNTS.read_text()) if COUNTS.exists() else None
    after = {}
    for rule in RULES:
        counts = {name: len(bad) for name, bad in offences(rule).items()}
        if before is not None:
            kept = {name: min(count, before[rule].get(name, 0)) for name, count in counts.items()}
            counts = {name: count for name, count in kept.items() if count}
        after[rule] = dict(sorted(counts.items()))
    COUNTS.write_text(json.dumps(after, indent=1) + "\n")
