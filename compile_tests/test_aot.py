"""Kernels built ahead of time for GPUs that are not here, exactly as the launcher would launch them there."""

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from compile_tests.attention import hopper_launches
from compile_tests.contract.build import APART, TARGETS, Build, build, build_all, build_now, sampled, sass
from compile_tests.contract.trace import SM90, KernelLaunch, fake_gpu, shared_memory
from compile_tests.contract.variants import Demands
from compile_tests.kernels import NORMS, ROPE_WINDOW_ATTN, WINDOW_ATTN, has_small_segments
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import ROWS_DIR, Config, Gpu, TunedConfig, as_document, shipped_rows
from torch_ops import settings
from torch_ops._attention import hopper as attention_hopper
from torch_ops._attention import hopper_backward as attention_hopper_backward
from torch_ops._attention.hopper import Descriptors, describe
from torch_ops._attention.options import AttentionOptions

# The target of every GPU that has rows in csrc_free_ops/configs.
SHIPPED_GPUS = {"h200": "sm_90"}
# The mean length up to which the rule takes the kernels of small segments.
LONGEST_SHORT = {"cuda": 64, "hip": 32}


@dataclass(frozen=True)
class Point:
    """Attention on one target: the launches of all its kernels. `gpu` has shipped rows; the default has the rule."""

    target: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    length: int = 1024
    gpu: str = "no-such-gpu"
    variant: tuple[tuple[str, Any], ...] = ()

    @property
    def short(self) -> bool:
        return self.length <= LONGEST_SHORT[TARGETS[self.target].backend]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        words = [self.target, f"d{self.head_dim}", dtype, *(name for name, _ in self.variant)]
        words += ["causal"] * self.causal
        words += ["short"] * self.short
        return "-".join([*words, self.gpu, str(self.length)] if self.gpu in SHIPPED_GPUS else words)


# For each target one head dimension of long and one of small segments.
SAMPLED = {"sm_86": (128, 72), "sm_89": (256, 72), "sm_120": (72, 128)}


def _rule_points() -> list[Point]:
    return [
        *(Point(target, head_dim) for target in APART for head_dim in (72, 128)),
        *(Point(target, long) for target, (long, _) in SAMPLED.items()),
        *(Point("sm_90", head_dim) for head_dim in (16, 64, 80, 96, 160, 192, 256)),
        *(Point(target, 72, causal=True) for target in ("sm_80", "sm_90", "gfx942")),
        Point("sm_90", 128, causal=True),
        # For 208 columns a tile has 256, and masks besides.
        *(Point("sm_90", head_dim, torch.float32) for head_dim in (72, 104, 208)),
        *(Point(target, 256, torch.float32) for target in ("sm_86", "gfx942")),
        Point("sm_90", 72, torch.float16),
        *(
            Point(target, head_dim, length=LONGEST_SHORT[TARGETS[target].backend])
            for target in APART
            for head_dim in (72, 128)
        ),
        *(Point(target, short, length=LONGEST_SHORT["cuda"]) for target, (_, short) in SAMPLED.items()),
        *(Point("sm_90", head_dim, length=64) for head_dim in (16, 64, 80, 96)),
        Point("sm_90", 80, torch.float16, causal=True, length=64),
    ]


def _shipped_points() -> list[Point]:
    """One per dtype, head dimension and range of lengths that has rows of its own.

    A row for calls that are causal or not is built with the mask, which needs more registers. For each dtype and head
    dimension one is built without.
    """
    points: dict[Point, None] = {}
    bare: set[tuple[str, str, int, bool]] = set()
    for gpu in SHIPPED_GPUS:
        rows = set(shipped_rows(gpu))
        for row in shipped_rows(gpu):
            # fp16 builds to the code of bf16 but for its conversions; where rows are the same, bf16 stands for both.
            if row.dtype == "float16" and replace(row, dtype="bfloat16") in rows:
                continue
            length = 64 if row.kernel.endswith("_small_segments") else max(row.min_length, 65)
            point = Point(
                SHIPPED_GPUS[gpu], row.head_dim, getattr(torch, row.dtype), row.causal is not False, length, gpu
            )
            points[point] = None
            kind = (gpu, row.dtype, row.head_dim, point.short)
            if row.causal is None and kind not in bare:
                bare.add(kind)
                points[replace(point, causal=False)] = None
    return list(points)


POINTS = [*_rule_points(), *_shipped_points()]
BUILT = sampled(POINTS)


def _wgmma(point: Point, kernel: str) -> Literal["", "some"]:
    """Whether the kernel must multiply by wgmma alone."""
    if point.target != "sm_90" or point.dtype.itemsize != 2:
        return ""
    # dk and dv of the 64 keys that wgmma needs fill the register file there.
    if point.head_dim > 128 and kernel == "_attention_bwd_dkdv_kernel":
        return ""
    if point.head_dim == 128 and kernel == "_attention_bwd_dkdv_long_segments_fallback_kernel":
        return ""
    return "some"


# Bytes that a launch may spill, by target, head dimension and kernel. 8 bytes are two registers. With 256 columns none
# is in the loop over whole blocks of keys.
SPILLED = {
    ("sm_90", 256, "_attention_bwd_dq_kernel"): 184,
    ("sm_100", 72, "_attention_fwd_kernel"): 8,
    ("sm_120", 72, "_attention_fwd_kernel"): 8,
    ("sm_120", 128, "_attention_fwd_long_segments_fallback_kernel"): 8,
}


def _may_spill(point: Point, kernel: str) -> int:
    return ANY if point.variant else SPILLED.get((point.target, point.head_dim, kernel), 0)


@lru_cache
def _builds(point: Point) -> tuple[Build, ...]:
    target = TARGETS[point.target]
    found = WINDOW_ATTN.launches(
        target, point.gpu, rows=2 * point.length, segments=2, num_heads=16, head_dim=point.head_dim,
        dtype=point.dtype, causal=point.causal, **dict(point.variant),
    )  # fmt: skip
    launches = [launch for each in found.values() for launch in each]
    assert {launch.name for launch in launches} == {
        name for name in WINDOW_ATTN.functions if has_small_segments(name) == point.short
    }
    with fake_gpu(target):
        return build_all(
            ((launch, Demands(_may_spill(point, launch.name), _wgmma(point, launch.name))) for launch in launches),
            target,
        )


ANY = 2**31
# Rows and the rule are chosen without these in mind, so they may spill; they must still fit.
FLAGS = (("window_left", 64), ("softcap", 30.0), ("dlse", True))
FLAGGED = [
    *(Point(target, 128, variant=(*FLAGS, ("num_k_heads", 4))) for target in ("sm_86", "sm_90", "gfx942")),
    Point("sm_86", 128, length=64, variant=FLAGS),
]


@pytest.mark.builds
@pytest.mark.parametrize("point", BUILT, ids=str)
def test_nothing_else_spills(point: Point) -> None:
    spilling = [str(built) for built in _builds(point) if built.spilled > _may_spill(point, built.launch.name)]
    assert not spilling, "\n".join(spilling)


@pytest.mark.builds
@pytest.mark.parametrize("point", [*BUILT, *sampled(FLAGGED)], ids=str)
def test_shared_memory_is_within_the_target(point: Point) -> None:
    limit = shared_memory(TARGETS[point.target])
    too_much = [str(built) for built in _builds(point) if built.shared > limit]
    assert not too_much, "\n".join((f"limit {limit}", *too_much))


HALF_ON_HOPPER = [point for point in BUILT if point.target == "sm_90" and point.dtype.itemsize == 2]


@pytest.mark.parametrize("point", HALF_ON_HOPPER, ids=str)
def test_hopper_multiplies_half_types_by_wgmma_alone(point: Point) -> None:
    for built in _builds(point):
        ptx = built.asm["ptx"]
        if _wgmma(point, built.launch.name):
            assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx, str(built)


HOPPER_VARIANTS: dict[str, dict[str, Any]] = {
    "one": {"segments": 1},
    "few": {"segments": 4, "dlse": True, "deterministic": False},
    "many": {"segments": 100},
    "hidden": {"segments": 300, "skipped_rows": 64},
    "causal": {"right": 0},
    "window": {"left": 64, "right": 64, "num_k_heads": 4},
    "fp16": {"dtype": torch.float16},
    "apart": {"segments": 1, "rows": 512, "num_k_heads": 8},
}


@lru_cache
def _hopper_launches(head_dim: int, variant: str) -> list[KernelLaunch]:
    options = HOPPER_VARIANTS[variant]
    dtype = "float16" if "dtype" in options else "bfloat16"
    device = Gpu("h200", "cuda", 90, shared_memory(SM90))
    rows = ("attention_fwd_hopper", "attention_bwd_hopper")
    chosen = {
        row: pick(row, device, dtype, 2, head_dim, variant == "causal", 1024, masked="right" in options)[0]
        for row in rows
    }
    return list(hopper_launches(chosen, head_dim, **options).values())


@lru_cache
def _hopper_build(head_dim: int, variant: str, place: str) -> Build:
    launch = _hopper_launches(head_dim, variant)[PLACES.index(place)]
    with fake_gpu(SM90):
        return build(launch, SM90, wgmma="overlapping" if place in ("forward", "backward") else "")


# At one head dimension all; at the others what the consumers differ by, and the producer that needs most registers.
HOPPER_POINTS = [(72, variant) for variant in HOPPER_VARIANTS] + [
    (head_dim, variant)
    for head_dim in HEAD_DIMS
    for variant in ("one", "many", "hidden", "window", "apart")
    if head_dim != 72
]
PLACES = ("forward", "delta", "backward", "round")


@pytest.mark.builds
@pytest.mark.parametrize(
    ("head_dim", "variant", "place"),
    [
        (head_dim, variant, place)
        for head_dim, variant in sampled(HOPPER_POINTS)
        # Apart there is nothing to round, and the forward is not what it is there for. Only the forward skips rows.
        for place in {"apart": PLACES[1:3], "hidden": PLACES[:1]}.get(variant, PLACES)
    ],
)
def test_hopper_path_fits_and_overlaps(head_dim: int, variant: str, place: str) -> None:
    """Nothing spills, and ptxas does not make wgmma wait for each other, as it does where accumulators must move."""
    assert len(_hopper_launches(head_dim, variant)) == (3 if variant == "apart" else 4)
    built = _hopper_build(head_dim, variant, place)
    assert built.shared <= shared_memory(SM90), str(built)
    products = len(re.findall(r"wgmma\.mma_async", built.asm["ptx"]))
    assert bool(products) == (place in ("forward", "backward"))
    if products:
        waits = sass(built).count("WARPGROUP.DEPBAR")
        assert waits < products / 2, f"{waits} waits for {products} products: {built}"
    assert built.spilled == 0, str(built)


@pytest.mark.parametrize(("variant", "ordered"), [("one", True), ("many", True), ("few", False)])
def test_hopper_backward_waits_where_it_must(variant: str, ordered: bool) -> None:
    """For the kernel that each overlaps, and for turns, which are released."""
    builds = [_hopper_build(72, variant, place) for place in PLACES]
    assert [bool(built.launch.kwargs.get("launch_pdl")) for built in builds] == [True, True, True, True]
    admits = ["griddepcontrol.launch_dependents" in built.asm["ptx"] for built in builds]
    assert admits == [False, True, True, False]
    waits = [len(re.findall(r"griddepcontrol\.wait", built.asm["ptx"])) for built in builds]
    # The producer in its loop and after it, and in a fixed order each of both dq writers.
    assert waits[:2] + waits[3:] == [1, 1, 1] and waits[2] >= (4 if ordered else 2)
    # The main kernel does not know which kernels run before delta.
    assert builds[1].asm["ptx"].index("griddepcontrol.wait") < builds[1].asm["ptx"].index("griddepcontrol.launch_dep")
    ptx = builds[2].asm["ptx"]
    assert ("red.release.gpu" in ptx) == ("ld.acquire.gpu" in ptx) == ordered


# Loads of 16 bytes by head dimension: for each row of sums, and with a second accumulator for three such tensors.
WIDE_LOADS = {"one": {64: 6, 72: 6, 80: 6, 96: 3, 128: 4}, "many": {64: 2, 72: 2, 80: 2, 96: 3, 128: 4}}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("variant", WIDE_LOADS)
def test_sums_are_read_by_threads_side_by_side(head_dim: int, variant: str) -> None:
    """Along the axis that holds the runs of all rows (tests/kernels/test_sums.py), whatever Triton prefers."""
    round_kernel = _hopper_build(head_dim, variant, "round")
    assert round_kernel.asm["ptx"].count("ld.global.v4.b32") == WIDE_LOADS[variant][head_dim]
    layouts = re.findall(r"= #ttg\.blocked<\{(.*)\}>", round_kernel.asm["ttgir"])
    assert layouts and all(re.search(r"threadsPerWarp = \[\d+, \d+\].*order = \[1, 0\]", each) for each in layouts)
    assert any("sizePerThread = [1, 4], threadsPerWarp = [32, 1]" in each for each in layouts), layouts


def test_gradients_apart_wait_for_delta_alone() -> None:
    delta, apart = (_hopper_build(72, "apart", place) for place in PLACES[1:3])
    assert apart.launch.kwargs["launch_pdl"] and "griddepcontrol.launch_dependents" in delta.asm["ptx"]
    # The producer of keys waits, both consumers of queries, and either producer at its end.
    assert len(re.findall(r"griddepcontrol\.wait", apart.asm["ptx"])) >= 5
    assert not re.search(r"ld\.acquire|\bred\.|cp\.reduce", apart.asm["ptx"])


# Whether it lets the next kernel begin, and how often it waits for the one before.
OVERLAPPING = {
    "fwd_small_segments": (True, 0), "fwd_long_segments_fallback": (False, 2), "bwd_small_segments": (True, 0),
    "bwd_dq_long_segments_fallback": (True, 2), "bwd_dkdv_long_segments_fallback": (False, 1),
}  # fmt: skip


def test_kernels_of_small_segments_wait_where_they_must() -> None:
    """Eager launches overlap; those of traces do not, and carry no word of it.

    A kernel that writes again what the one before it wrote waits for it first.
    """
    launches = {launch.name: launch for each in WINDOW_ATTN.launches(rows=100).values() for launch in each}
    assert launches.keys() == {f"_attention_{name}_kernel" for name in OVERLAPPING}
    for name, (admits, waits) in OVERLAPPING.items():
        launch = launches[f"_attention_{name}_kernel"]
        assert not launch.kwargs["OVERLAPS"] and "launch_pdl" not in launch.kwargs
        with fake_gpu(SM90):
            ptx = build(replace(launch, kwargs={**launch.kwargs, "OVERLAPS": True}), SM90).asm["ptx"]
        assert ("griddepcontrol.launch_dependents" in ptx) == admits, name
        assert len(re.findall(r"griddepcontrol\.wait", ptx)) == waits, name


def test_kernels_that_may_begin_early_wait_first_of_all() -> None:
    """Whatever came before them; and the attention kernel for Hopper GPUs, which admits none."""
    launches = [
        NORMS["add_layer_norm"].launch("_norm_fwd_kernel"),
        NORMS["add_layer_norm"].launch("_norm_fwd_wide_kernel", width=20000),
        ROPE_WINDOW_ATTN.launch("_rope_kernel"),
    ]
    for launch in launches:
        assert not launch.kwargs["OVERLAPS"] and "launch_pdl" not in launch.kwargs
        with fake_gpu(SM90):
            ptx = build(replace(launch, kwargs={**launch.kwargs, "OVERLAPS": True}), SM90).asm["ptx"]
        assert "griddepcontrol.launch_dependents" in ptx, launch.name
        assert 0 < ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), launch.name
    # In the order of the source, which partitions of machine code have not.
    forward = _hopper_build(72, "one", "forward").asm["ttgir"]
    assert 0 < forward.index("griddepcontrol.wait") < forward.index("tt.load")
    assert "launch_dependents" not in forward and forward.index("griddepcontrol.wait") < forward.index("partition0")


def test_descriptors_of_later_calls_equal_made_ones() -> None:
    """They are copies of the first call's, but for the address; the tensor itself is not kept alive."""
    tiles = ({"rows": 64, "columns": 64}, {"rows": 128, "columns": 16})
    descriptors_of = Descriptors(*[partial(describe, **tile) for tile in tiles])
    for _ in range(3):
        q, k = (torch.empty(300, 3, 4, 72, dtype=torch.bfloat16)[:, index] for index in range(2))
        for copied, made in zip(descriptors_of(q, k), (describe(q, **tiles[0]), describe(k, **tiles[1])), strict=True):
            assert (copied.base.data_ptr(), copied.base.dtype) == (made.base.data_ptr(), made.base.dtype)
            assert {**vars(copied), "base": None} == {**vars(made), "base": None}
        assert descriptors_of(q, k) is descriptors_of(q, k), "remembered by address"


# On 132 multiprocessors, with 16 heads; of all tiles an H200 was as fast or faster with these.
ONE_SEGMENT = {
    64: {1024: (128, 64), 2048: (192, 128), 4096: (192, 128)},
    72: {256: (128, 64), 1024: (128, 64), 2048: (128, 64), 2304: (192, 128), 4096: (192, 128)},
    80: {512: (128, 64), 2048: (128, 128)},
}


@pytest.mark.parametrize("gpu", ["no-such-gpu", "h200"])
@pytest.mark.parametrize("head_dim", ONE_SEGMENT)
def test_one_segment_takes_as_few_waves_as_it_can(head_dim: int, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows of that GPU say, which are of many segments."""
    monkeypatch.setattr(attention_hopper, "programs", lambda index: 132)
    with fake_gpu(SM90, gpu), settings(rows=""):
        for rows, tile in ONE_SEGMENT[head_dim].items():
            q = torch.empty(rows, 16, head_dim, device="meta", dtype=torch.bfloat16)
            launch, _ = attention_hopper.forward_config(q, AttentionOptions(0.1), 1)
            several, _ = attention_hopper.forward_config(q, AttentionOptions(0.1), 2)
            assert (launch.tile, launch.num_stages) == (tile, 3 if tile[0] == 128 else several.num_stages), rows
            small = gpu == "h200" and rows < 1024
            assert several.tile == ((128, 128 if head_dim != 72 else 64) if small else (192, 128)), rows


@pytest.mark.parametrize(
    ("rows", "segments", "head_dim", "right", "apart"),
    [(512, 1, 72, -1, True), (528, 1, 72, -1, False), (512, 2, 72, -1, False), (512, 1, 72, 0, True),
     (512, 1, 128, -1, True), (512, 1, 128, 0, False)],
)  # fmt: skip
def test_gradients_are_made_apart_where_there_is_room(
    rows: int, segments: int, head_dim: int, right: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One segment takes two kernels if dq has room beside dk and dv on 132 multiprocessors, and masks have
    registers."""
    monkeypatch.setattr(attention_hopper_backward, "programs", lambda index: 132)
    q = torch.empty(rows, 16, head_dim, device="meta", dtype=torch.bfloat16)
    assert attention_hopper_backward.fits_small(q, q, segments, AttentionOptions(0.1, -1, right)) == apart


@pytest.mark.parametrize(
    ("rows", "segments", "deterministic", "ordered"),
    [(16384, 16, True, True), (16384, 16, False, True), (16384, 1, False, False), (4096, 4, False, False),
     (1024, 1, True, True), (256, 1, True, False), (256, 4, True, False)],
)  # fmt: skip
def test_order_is_kept_where_it_is_asked_for_or_hardly_costs(
    rows: int, segments: int, deterministic: bool, ordered: bool
) -> None:
    q = torch.empty(rows, 16, 128, device="meta", dtype=torch.bfloat16)
    with mock.patch.object(attention_hopper_backward, "programs", lambda index: 132):
        assert attention_hopper_backward._keeps_order(q, q, segments, deterministic) == ordered


def test_own_rows_count_for_their_lengths_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    launch = Config(192, 64, 12, 3)
    row = TunedConfig("attention_fwd_hopper", "bfloat16", 64, launch, min_length=1024)
    file.write_text(json.dumps(as_document([row], {"gpu": "any", "triton": "any", "date": "now"})))
    with fake_gpu(SM90), settings(rows=str(file)), mock.patch.object(attention_hopper, "programs", lambda index: 132):
        long, short = (
            attention_hopper.forward_config(
                torch.empty(rows, 16, 64, device="meta", dtype=torch.bfloat16), AttentionOptions(0.1), 1
            )
            for rows in (1024, 1000)
        )
    assert long[0] == launch and "rows.json" in long[1]
    assert short[0] != launch and "rows.json" not in short[1]


def test_every_gpu_with_shipped_rows_is_built_here() -> None:
    stems = {path.stem for path in ROWS_DIR.glob("*.json")}
    assert {stem for stem in stems if not stem.startswith("handover_")} == set(SHIPPED_GPUS)


def test_spills_are_seen() -> None:
    """A tile far too large for its warps, so that a silent measure would show."""
    launch = WINDOW_ATTN.launch("_attention_fwd_kernel", head_dim=128)
    launch.kwargs.update(BLOCK_M=256, BLOCK_N=128, num_warps=4, num_stages=1)
    with fake_gpu(SM90):
        assert build_now(launch, SM90).spilled > 0
