"""Cases of packed attention, by name and by shape."""

import pytest

from tests.bench.verify import CPU
from torch_ops.bench.peers import packed as attention_peers
from torch_ops.bench.rooms.packed_cases import find_cases, longest_within, notation, shorten
from torch_ops.testing.cases import WINDOW_ATTN

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]


def test_find_cases() -> None:
    names = [case.name for case in find_cases(["qwen25vl_*", "1x64x2x16c,image"], CPU)]
    assert names == [
        "qwen25vl_4096", "qwen25vl_9216", "qwen25vl_16x1024", "qwen25vl_4x4096",
        "qwen25vl_windows", "qwen25vl_ragged", "1x64x2x16c", "image",
    ]  # fmt: skip
    (case,) = find_cases(["8x2048x32/8x128c"], CPU)
    assert case.lengths == (2048,) * 8 and (case.num_heads, case.num_k_heads) == (32, 8)
    assert case.head_dim == 128 and case.options == {"causal": True}
    assert find_cases(["3*64+12x2x16"], CPU)[0].lengths == (64, 64, 64, 12)
    assert find_cases(["4096x16x72"], CPU)[0].lengths == (4096,)


def test_notation_reads_back() -> None:
    for case in WINDOW_ATTN:
        text = notation(case)
        if case.k_lengths is None and case.lengths and min(case.lengths) and "of" not in text:
            (again,) = find_cases([text], CPU)
            assert (again.lengths, again.num_heads, again.head_dim) == (
                case.lengths, case.num_heads, case.head_dim,
            )  # fmt: skip


def test_shorter_cases_keep_what_matters() -> None:
    for case in WINDOW_ATTN:
        if not case.lengths:
            continue
        short = shorten(case, 2**18, case.num_heads)
        entries = attention_peers.score_entries(short)
        assert entries <= 2**19
        assert (short.num_heads, short.head_dim, short.options) == (
            case.num_heads, case.head_dim, case.options,
        )  # fmt: skip
        assert short.uniform or not case.uniform
        if len(short.lengths) == len(case.lengths):
            assert all((n - m) % 128 == 0 for n, m in zip(case.lengths, short.lengths, strict=True))
    (mixed,) = find_cases(["qwen3vl_l_mixed"], CPU)
    assert shorten(mixed, 2**40, 16) == mixed
    assert max(longest_within(mixed, 2**22).lengths) <= 2**11
    assert longest_within(mixed, 2**30) == mixed
