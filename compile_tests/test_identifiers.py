"""Identifiers of kernels and of the library use the field's words, which `docs/glossary.md` explains."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from compile_tests.contract.process import ROOT

SOURCES = sorted(path for package in ("csrc_free_ops", "torch_ops") for path in (ROOT / package).rglob("*.py"))

EVERYWHERE = r""
KERNELS = r"csrc_free_ops/"
ATTENTION = r"csrc_free_ops/attention/|torch_ops/_attention/"
HOPPER_ATTENTION = r"csrc_free_ops/attention/hopper/|torch_ops/_attention/hopper"
LAUNCHERS = r"csrc_free_ops/|torch_ops/_|torch_ops/\w+\.py"
CONFIGS = r"csrc_free_ops/configs/"
SCORES = r"csrc_free_ops/attention/|csrc_free_ops/tiles/\w+\.py|torch_ops/_attention/"
BENCH = r"torch_ops/bench/"


class Word(NamedTuple):
    """Words that are out, as a regex, where, and the field's word.

    `parts` are out as a part of a name, between underscores. `wholes` are out as a whole name.
    """

    parts: str
    wholes: str
    where: str
    say: str


# `keep` is dropout's word, `mode` names the enum Mode, `step` is one of a loop and a `lane` a thread of a warp: those
# are out only where they meant something else. `is_eager`, `runs_kernels` and INTERPRET stay: they ask Mode, a device
# and the build. `check_draws`, `compare_draws` and `redrawn` are public names. `rooms` and `peers` are paths and flags.
WORDS = (
    Word("remembered|remembering", "_prepare_.*", EVERYWHERE, "the plan cache, or cached"),
    Word("", "relaunch", EVERYWHERE, "Bound"),
    Word("", "is_packaged", EVERYWHERE, "Mode.PACKAGED"),
    Word("", "(?-i:Launch)", CONFIGS, "Config"),
    Word("", "(?-i:Row)", CONFIGS, "TunedConfig"),
    Word("", "(?-i:Scores)", EVERYWHERE, "AttentionOptions"),
    Word("", "steptensors", EVERYWHERE, "the tensors of score modifications"),
    Word("", "steps|backward_steps", SCORES, "score_mods"),
    Word("", "calls|attention_calls", r"torch_ops/_attention", "checks"),
    Word("stock|general", "", EVERYWHERE, "portable"),
    Word("refusal|addressable", "why_portable|has_tiles", EVERYWHERE, "why_unsupported, has_tma_strides"),
    Word("tickets?|lending", "give_back", EVERYWHERE, "WorkCounters, acquire and release"),
    Word("draw|drawn|deal|dealt|place", "places?|work|unit", KERNELS, "tile scheduler, locate, tile, STRIDE_UNIT"),
    Word("notes?|told|tell|keep|kept", "", KERNELS, "TileInfo, publish and read"),
    Word("owned|others", "own|other", KERNELS, "resident and streamed"),
    Word("lanes|members|lead", "turn|turned|rounds?|sums", KERNELS + "attention/", "dq_acc, start_block, semaphore"),
    Word("lanes?|members|lead", "turn|rounds?|sums", r"torch_ops/_attention/", "dq_acc, start_block, semaphore"),
    Word("turned", "turn|round", KERNELS, "rotated, ROTARY_DIM, wave"),
    Word("senders?|makers?|casters?|finishers?", "", EVERYWHERE, "dq writer, cast warp or epilogue warp"),
    Word("contenders?|contest|yardstick|verdict", "", EVERYWHERE, "implementation, run, reference point"),
    Word("gate|trials?|terms", "room|peer", BENCH, "check, run, OpBench, baseline"),
)
# How variants of a kernel are told apart: in names of kernels, files and plans.
VARIANTS = {
    "short": "small_segments", "rest": "long_segments_fallback", "few": "small", "apart": "small_hopper",
    "keys": "fp32_dkdv", "parts": "split_sum or splits", "cast": "fp32 or downcast",
}  # fmt: skip


def _names(tree: ast.AST) -> Iterator[str]:
    """Names of functions, classes, arguments and of what is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def _is_variant(name: str, path: str) -> bool:
    in_attention = re.match(ATTENTION, path) is not None
    return in_attention and (name == Path(path).stem or re.fullmatch(r"_.*_kernel|_?plan_\w+", name) is not None)


def private_words(name: str, path: str) -> Iterator[str]:
    """Yield the field's word for each private word of a name."""
    parts = name.strip("_").split("_")
    for word in WORDS:
        if re.match(word.where, path) is None:
            continue
        if re.fullmatch(word.wholes, name.strip("_"), re.I) or re.fullmatch(word.wholes, name, re.I):
            yield word.say
        elif any(re.fullmatch(word.parts, part, re.I) for part in parts if part):
            yield word.say
    if _is_variant(name, path):
        yield from (said for variant, said in VARIANTS.items() if variant in parts)


def test_identifiers_are_the_fields_words() -> None:
    wrong = []
    for source in SOURCES:
        path = str(source.relative_to(ROOT))
        for name in filter(
            re.compile("[A-Za-z]").search, sorted({source.stem, *_names(ast.parse(source.read_text()))})
        ):
            wrong += [f"{path}: {name}; say {said}" for said in private_words(name, path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tickets", "torch_ops/_core/counters.py"),
        ("TICKET_PTR", "csrc_free_ops/gemm/portable.py"),
        ("caster", "csrc_free_ops/attention/hopper/fwd_fp32.py"),
        ("place_rows", "csrc_free_ops/tiles/segments.py"),
        ("Launch", "csrc_free_ops/configs/rows.py"),
        ("STEPS", "csrc_free_ops/attention/portable/fwd.py"),
        ("steps", "csrc_free_ops/tiles/steps.py"),
        ("_attention_bwd_short_kernel", "csrc_free_ops/attention/portable/bwd.py"),
        ("plan_few", "torch_ops/_attention/split.py"),
        ("parts", "torch_ops/_attention/parts.py"),
        ("why_portable", "torch_ops/_gemm/plan.py"),
    ],
)
def test_a_private_word_is_found(name: str, path: str) -> None:
    assert [*private_words(name, path)]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("STRIDE_UNIT", "csrc_free_ops/tiles/rows.py"),
        ("STEPS", "csrc_free_ops/gemm/hopper/options.py"),
        ("lane_of_warp", "csrc_free_ops/tiles/hopper/memory.py"),
        ("num_keys", "csrc_free_ops/attention/hopper/fwd.py"),
        ("launch", "csrc_free_ops/configs/rows.py"),
        ("cast_kv", "csrc_free_ops/attention/hopper/fwd_fp32_producer.py"),
        ("keep_weights", "torch_ops/_core/philox.py"),
        ("rooms", "torch_ops/bench/rooms/norms.py"),
        ("gate", "csrc_free_ops/tiles/activations.py"),
    ],
)
def test_a_word_of_the_field_is_none(name: str, path: str) -> None:
    assert not [*private_words(name, path)]
