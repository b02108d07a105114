"""The benchmark of vk::segment_attention: ranks of context parallel, and two calls of packed attention as peers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench.verify import CPU, ROOT, anywhere, bench, bench_lines, by_case
from torch_ops import segments
from torch_ops.bench.commands import run as run_command
from torch_ops.bench.measure.opbench import BOTH
from torch_ops.bench.measure.results import OK, REFERENCE_POINT, WRONG, Ceilings, Group, read_report
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.peers import zigzag as zigzag_peers
from torch_ops.bench.peers.zigzag import FLASH2_ALONE, FLASH2_TWICE, WINDOW_ALONE, WINDOW_TWICE, Layout
from torch_ops.bench.rooms.segment_attention import BENCH, OURS
from torch_ops.bench.rooms.zigzag_cases import (
    ZIGZAG,
    find_zigzag_cases,
    longest_zigzag_within,
    make_zigzag_inputs,
    shorten_zigzag,
    zigzag_notation,
)
from torch_ops.testing import check, references
from torch_ops.testing.cases import SegmentInputs

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

CUDA = torch.device("cuda")
SETUP = Setup(torch.float32, CPU, ("forward", BOTH), rounds=2)
SHAPES = "0of2:1x80x2x16", "3of4:75+40+3x4/2x16"


def _inputs(shape: str, dtype: torch.dtype = torch.float32) -> SegmentInputs:
    (case,) = find_zigzag_cases([shape], CPU)
    return make_zigzag_inputs(case, dtype)


def _measured(*impls: Any, shape: str = SHAPES[0]) -> list[Group]:
    (case,) = find_zigzag_cases([shape], CPU)
    return by_case(run_case(BENCH, case, impls, SETUP))


@pytest.fixture
def flash2(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The reference in the place of FlashAttention-2; what it was asked for besides tensors."""
    asked: list[tuple[Any, ...]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        asked.append(rest)
        return (*references.window_attn(q, k, v, cu_q, cu_k, causal=True), q, q, q)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        asked.append(rest[:-2])
        return references.window_attn_backward(dout, None, q, k, v, out, lse, cu_q, cu_k, causal=True)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return asked


@pytest.mark.parametrize("shape", SHAPES)
def test_ours_and_peers_are_right(shape: str, flash2: list[tuple[Any, ...]]) -> None:
    twice = WINDOW_TWICE, *anywhere(FLASH2_TWICE, FLASH2_ALONE), WINDOW_ALONE
    groups = _measured(OURS, *twice, shape=shape)
    assert [one.ours.direction for one in groups] == ["forward", BOTH]
    wanted = {impl.name: OK if impl.name.endswith("twice") else REFERENCE_POINT for impl in twice}
    for one, flops in zip(groups, (1, 3.5), strict=True):
        assert one.ours.status == OK, one.ours
        assert {each.name: each.status for each in one.baselines} == wanted, one.baselines
        assert all(each.ms for each in one.baselines)
        assert one.ours.flops == flops * groups[0].ours.flops
        names = [report.name.split()[0] for report in one.ours.reports]
        assert names == ["out", "dq", "dk", "dv"][: None if one.ours.direction == BOTH else 1]
    # The longest queries and keys of a group, no dropout, causal order; the forward returns no mask.
    inputs = _inputs(shape)
    longest = {(group.most_queries, group.most_keys) for group in Layout.of(inputs).groups}
    assert {rest[:2] for rest in flash2} == longest
    assert {rest[2:] for rest in flash2} == {(0.0, True, False), (0.0, True)}


def test_peers_need_a_gpu_and_half_types() -> None:
    (case,) = find_zigzag_cases([SHAPES[0]], CPU)
    for impl in (FLASH2_TWICE, FLASH2_ALONE):
        assert impl.refuses(case, torch.bfloat16, CPU) == "needs a GPU"
        assert impl.refuses(case, torch.float32, CUDA) == "takes fp16 and bf16 only"
        assert impl.refuses(case, torch.float16, CUDA) == ""


@pytest.mark.parametrize("name", ["dk", "out"])
def test_a_peer_that_forgets_a_group_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the second group must be added, and its rows of out be written."""

    def forgetful(function: Any, spoiled: int, first_group: int) -> Any:
        def call(*args: Any) -> tuple[Tensor, ...]:
            results = [*function(*args)]
            if args[-1].most_keys > first_group:
                results[spoiled] = torch.zeros_like(results[spoiled])
            return tuple(results)

        return call

    first, _ = Layout.of(_inputs(SHAPES[0])).groups
    field, place = ("backward", 1) if name == "dk" else ("forward", 0)
    attention = zigzag_peers.WINDOW
    attention = attention._replace(**{field: forgetful(getattr(attention, field), place, first.most_keys)})
    liar = replace(WINDOW_TWICE, bind=lambda *args: zigzag_peers._bind_two_calls(attention, *args))
    forward, both = _measured(OURS, liar)
    assert forward.baselines[0].status == (WRONG if name == "out" else OK)
    assert both.baselines[0].status == WRONG and f"{name} (" in both.baselines[0].note
    assert both.best() is None


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_are_laid_out_as_an_all_gather_leaves_them(shape: str) -> None:
    (case,) = find_zigzag_cases([shape], CPU)
    inputs, layout = make_zigzag_inputs(case, torch.float32), Layout.of(make_zigzag_inputs(case, torch.float32))
    for actual, expected in zip(inputs.places, segments.zigzag(case.lengths, case.rank, case.world_size), strict=True):
        # The row of a piece without keys may be anything.
        has_keys = inputs.key_bounds.diff() > 0 if actual is inputs.key_rows else torch.ones_like(actual).bool()
        assert torch.equal(actual[has_keys], expected[has_keys])
    tokens = [segments.zigzag_indices(case.lengths, rank, case.world_size) for rank in range(case.world_size)]
    gathered = torch.cat(tokens).expand(2, -1)
    in_order = torch.arange(sum(case.lengths)).expand(2, -1)
    assert torch.equal(layout.in_order(gathered), in_order) and torch.equal(layout.as_gathered(in_order), gathered)
    rows = torch.cat([group.rows for group in layout.groups])
    assert torch.equal(rows.sort().values, torch.arange(inputs.q.shape[0]))


def test_default_cases_are_those_of_a_report_and_long_contexts() -> None:
    shapes = [zigzag_notation(case) for case in find_zigzag_cases((), CUDA)]
    documents = "2052+2547+4960+2239+10137+532+3233+738+2338+1845+1840+307"
    assert shapes == [
        "0of4:1x1024x8x64", "0of4:1x2048x16x64", "0of4:1x2048x32x128",
        *(f"{rank}of4:1x{tokens}x32/8x128" for tokens in (8192, 32768) for rank in (0, 3)),
        f"0of4:{documents}x32/8x128", f"3of4:{documents}x32/8x128",
    ]  # fmt: skip
    again = find_zigzag_cases(shapes, CUDA)
    parts = [(case.lengths, case.rank, case.num_heads, case.group) for case in find_zigzag_cases((), CUDA)]
    assert [(case.lengths, case.rank, case.num_heads, case.group) for case in again] == parts


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("4of4:1x64x2x16", "has rank 4 of 4; give a rank from 0 to 3"),
        ("0of4:1x64x6/4x16", "give a divisor"),
        ("1x64x2x16", "no case is called '1x64x2x16'"),
        ("0of4:64", "no case is called '0of4:64'"),
    ],
)
def test_other_shapes_are_refused(shape: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_zigzag_cases([shape], CPU)


def test_shorter_cases_keep_what_matters() -> None:
    def entries(case: Any) -> int:
        inputs = make_zigzag_inputs(replace(case, num_heads=1, num_k_heads=1, head_dim=8), torch.float16)
        return case.num_heads * int((inputs.cu_seqlens_q.diff() * inputs.key_limit).sum())

    for case in ZIGZAG:
        short = shorten_zigzag(case, 2**22)
        assert entries(short) <= 1.1 * 2**22 and replace(short, lengths=case.lengths) == case
        assert shorten_zigzag(case, 2**40) == longest_zigzag_within(case, 2**40) == case
        assert all((n - m) % 128 == 0 for n, m in zip(case.lengths, short.lengths, strict=False))


def test_the_check_looks_at_the_case_itself() -> None:
    (case,) = find_zigzag_cases(["1of2:3000+100x4/2x16"], CPU)
    shortened, whole = BENCH.checks(case, torch.float32, CPU, True)
    assert shortened.case != case and whole.case == case
    assert whole.label.endswith("x4/2x16, the last of 2 key heads")
    for part in (shortened, whole):
        actual = OURS.bind(part.case, part.inputs).results(True)
        check({name: part.look(name, actual[name]) for name in part.reference}, part.eager, part.reference)
    assert whole.reference["dk"].shape[1:] == (1, 16) and whole.reference["dq"].shape[1:] == (2, 16)


def test_costs_count_seen_pairs_and_keys() -> None:
    inputs = _inputs("1of2:1x80x4/2x16", torch.bfloat16)
    # Chunks of 20: the second one sees 40 keys, the third one 60.
    pairs = sum(range(21, 41)) + sum(range(41, 61))
    forward, backward = BENCH.cost_of(inputs, "forward"), BENCH.cost_of(inputs, "backward")
    assert forward.flops == 4 * 4 * 16 * pairs and backward.flops == 5 * forward.flops // 2
    queries, seen, keys, rest = 40 * 4 * 16, 2 * 60 * 2 * 16, 2 * 80 * 2 * 16, 4 * 4 * 40
    rest += sum(place.nbytes for place in inputs.places)
    assert forward.bytes_moved == 2 * (2 * queries + seen) + rest
    assert backward.bytes_moved == 2 * (4 * queries + seen + keys) + rest
    both = BENCH.cost_of(inputs, BOTH)
    assert (both.flops, both.bytes_moved) == tuple(
        getattr(forward, name) + getattr(backward, name) for name in ("flops", "bytes_moved")
    )  # fmt: skip


def test_command_times_both_passes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_command, "measure_ceilings", lambda device, dtype: Ceilings(40.0, 0.1, "float32"))
    out = tmp_path / "run.json"
    options = "--shapes", "small", "--rounds", 2, "--peers", "window_attn_twice", "--out", out
    result = bench("segment_attention", *options, "--backward", "--path", "portable")
    assert result.exit_code == 0, result.output
    records = read_report(out).records
    assert [(one.direction, one.name, one.status) for one in records] == [
        (direction, name, OK) for direction in ("forward", BOTH) for name in ("vk", "window_attn_twice")
    ]
    head = "| case | shape | forward ms | window_attn_twice | forward + backward ms | window_attn_twice |"
    assert head in bench("table", "--summary", out).stdout
    assert bench("segment_attention", *options).exit_code == 0
    assert {one.direction for one in read_report(out).records} == {"forward"}


def test_what_the_makefile_measures_has_a_place() -> None:
    runs = bench_lines("figures-segment-attention")
    pages = [(ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "segment_attention.md")]
    measured = []
    for arguments in runs:
        file = Path(arguments[arguments.index("--out") + 1]).name
        assert "<!-- vk bench table --if-measured results/" + file + " -->" in pages[0]
        assert "<!-- vk bench table --summary --if-measured results/" + file + " -->" in pages[1]
        assert {"--backward", "portable"} <= {*arguments}
        measured += BENCH.cases([arguments[arguments.index("--shapes") + 1]], CUDA)
    assert len(runs) == 2 and set(measured) == set(BENCH.cases((), CUDA))
