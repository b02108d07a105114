"""The benchmark of vk::rope_window_attn: baselines turn first and attend then, and are judged like any other."""

import pytest
import torch

from tests.bench.verify import CPU, SETUP, anywhere, by_case
from torch_ops.bench.measure.results import OK, WRONG
from torch_ops.bench.measure.run import run_case
from torch_ops.bench.peers import packed as attention_peers
from torch_ops.bench.peers.packed import turned_first
from torch_ops.bench.rooms import packed
from torch_ops.bench.rooms.rope_window_attn import BASELINES, BENCH, SHAPES
from torch_ops.testing import check, references
from torch_ops.testing.cases import cumulative, make_projected_rope_inputs, rope_window_attn_cases

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]


def test_default_cases_are_those_of_the_models() -> None:
    cases = BENCH.cases((), torch.device("cuda"))
    assert tuple(case.name for case in cases) == SHAPES
    assert {case.name for case in cases} <= {case.name for case in rope_window_attn_cases("bench")}
    inputs = BENCH.inputs(cases[0], torch.bfloat16, CPU, 0)
    views = inputs.q, inputs.k, inputs.v
    assert [view.stride() for view in views] == [(3 * 16 * 72, 72, 1)] * 3
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1


def test_a_case_with_boundaries_of_its_own_for_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="'own_boundaries' has boundaries of its own for keys"):
        BENCH.cases(["own_boundaries"], CPU)


@pytest.mark.parametrize("shape", ["2x40x2x16", "33+2*64x4/2x72c"])
def test_ours_and_peers_are_right(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention and cuDNN stood in for by the reference; the rotation before them is their own."""

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        return references.window_attn(q, k, v, cu_q, cu_k, causal=window_size == (-1, 0))[0]

    def sdpa(q, k, v, **options):
        batch, _, length, _ = q.shape
        packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        out, _ = references.window_attn(*packed, cumulative((length,) * batch, q.device), causal=options["is_causal"])
        return out.unflatten(0, (batch, length)).transpose(1, 2)

    monkeypatch.setattr(attention_peers, "_varlen_attn", lambda: varlen_attn)
    monkeypatch.setattr(attention_peers, "scaled_dot_product_attention", sdpa)
    wanted = ["eager_flash2", "compiled_flash2", "reference", *(["compiled_cudnn"] if "+" not in shape else [])]
    rivals = anywhere(*(baseline for baseline in BASELINES if baseline.name in wanted))
    (case,) = BENCH.cases([shape], CPU)
    for measured in by_case(run_case(BENCH, case, (BENCH.ours, *rivals), SETUP)):
        assert measured.ours.status == OK, measured.ours
        assert {baseline.name: baseline.status for baseline in measured.baselines} == dict.fromkeys(wanted, OK)


def test_a_peer_that_turns_wrongly_is_seen() -> None:
    def the_other_way(inputs):
        def turn(q, k, v):
            cos, sin = inputs.cos, inputs.sin
            return references.rotated(q, cos, -sin), references.rotated(k, cos, sin), v

        return turn

    baseline = turned_first(attention_peers.REFERENCE, "other", the_other_way, "turned the other way")
    (case,) = BENCH.cases(["1x40x2x16"], CPU)
    for measured in by_case(run_case(BENCH, case, (BENCH.ours, baseline), SETUP)):
        assert [each.status for each in measured.baselines] == [WRONG] and measured.ours.status == OK


def test_cuts_of_a_case_take_their_rows_of_the_tables() -> None:
    (case,) = BENCH.cases(["3*1200x2/1x16"], CPU)
    parts = BENCH.checks(case, torch.float32, CPU, True)
    assert len(parts) == 2, "the case is judged whole too"
    for part in parts:
        actual = BENCH.ours.bind(part.case, part.inputs).results(True)
        check({name: part.look(name, actual[name]) for name in part.reference}, part.eager, part.reference)


def test_tables_count_as_bytes_and_nothing_else_does() -> None:
    (case,) = BENCH.cases(["1x40x2x16"], CPU)
    inputs = make_projected_rope_inputs(case, torch.bfloat16)
    cost = BENCH.cost(inputs, False)
    assert cost.flops == 4 * 2 * 16 * 40 * 40
    assert cost.bytes_moved == 2 * 4 * 40 * 2 * 16 + 4 * 2 * 40 + inputs.cu_seqlens.nbytes + 2 * 4 * 40 * 16


def test_a_row_of_the_rotation_is_bound_to_rows_and_to_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"kernels": dict.fromkeys(("rope", "attention_fwd"))}
    monkeypatch.setattr(packed, "explained", lambda inputs: report)
    (case,) = BENCH.cases(["4x100x2x16c"], CPU)
    rotation, attention = BENCH.kernels(case, make_projected_rope_inputs(case, torch.bfloat16))
    assert (rotation.name, rotation.length, rotation.masked, rotation.backward) == ("rope", 400, False, False)
    assert (attention.length, attention.masked) == (100, True)
