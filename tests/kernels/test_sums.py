"""The kernels before and after the one-pass Hopper backward, by themselves: they are stock Triton."""

import pytest
import torch
import triton
import triton.language as tl

from csrc_free_ops.attention.hopper.bwd_dq_finalize import (
    RUN,
    _attention_bwd_delta_kernel,
    _attention_bwd_round_acc2_kernel,
    _attention_bwd_round_kernel,
    _clear,
    _runs,
    first_columns,
)
from csrc_free_ops.configs.attention import split_head_dim
from tests.verify import INTERPRET
from torch_ops.testing.cases import cumulative

BLOCK_M, BLOCK_N = 16, 32

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not (INTERPRET or torch.cuda.is_available()), reason="kernels need the interpreter or a GPU"),
]


def _split(head_dim: int) -> dict[str, int]:
    main, tail = split_head_dim(head_dim, 2)
    return {"HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail, "BLOCK_M": BLOCK_M}


@pytest.mark.parametrize(("ordered", "lanes"), [(False, 1), (True, 1), (True, 2), (False, 0)])
@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (9, None), (9, 5)])
@pytest.mark.parametrize("has_dlse", [False, True])
def test_delta_counters_and_sums(
    ordered: bool, lanes: int, bounds: tuple[int | None, int | None], has_dlse: bool, device: str
) -> None:
    """Sums are 0 where nobody will write them: rows outside of segments, rows without keys, rows that see none."""
    left, right = bounds
    q_lengths, k_lengths, skipped, padding = (40, 7, 0, 50), (40, 0, 5, 12), 5, 20
    heads, head_dim = 2, 72
    cu_q, cu_k = (skipped + cumulative(lengths, device) for lengths in (q_lengths, k_lengths))
    total_q, total_k = (skipped + sum(lengths) + padding for lengths in (q_lengths, k_lengths))
    tiles = total_q // BLOCK_M + len(q_lengths) + 2
    out, dout = (torch.randn(total_q, heads, head_dim, device=device, dtype=torch.float16) for _ in range(2))
    lse, dlse = (torch.randn(heads, total_q, device=device) for _ in range(2))
    lse[:, 8] = -torch.inf
    delta = torch.full_like(lse, torch.nan)
    sums = torch.full((heads * total_q * head_dim,), torch.nan, device=device)
    counts = torch.full((lanes * heads * tiles,), -1, dtype=torch.int32, device=device)
    _attention_bwd_delta_kernel[(tiles, heads)](
        out, lse, dout, dlse, cu_q, cu_k, delta, sums, counts, head_dim // 8, head_dim // 8, 0, 0,
        total_q, total_k, len(q_lengths), left or 0, right or 0,
        STRIDE_OT=heads * head_dim, STRIDE_DOT=heads * head_dim, STRIDE_UNIT=8, HAS_DLSE=has_dlse,
        HAS_LEFT=left is not None, HAS_RIGHT=right is not None, ORDERED=ordered, DQ_ACCS=lanes, ONE_SEGMENT=False,
        OVERLAPPED=False, BLOCK_N=BLOCK_N, **_split(head_dim),
    )  # fmt: skip
    products = out.double() * dout.double()
    expected = (products.sum(2).T - (dlse if has_dlse else 0)).where(lse.isfinite(), 0.0)
    # The error bound of so many additions in fp32 (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
    allowed = (head_dim + 1) * 2.0**-24 * (products.abs().sum(2).T + dlse.abs())
    assert ((delta.double() - expected).abs() <= allowed).all()
    if lanes == 0:
        assert (counts == -1).all() and sums.isnan().all()
        return
    assert not counts.any()

    # Blocks of rows that some block of keys reaches are left to those who add.
    left_alone = torch.zeros(total_q, dtype=torch.bool)
    for begin, q_length, k_length in zip(cu_q.tolist(), q_lengths, k_lengths, strict=False):
        shift = q_length - k_length
        for key in range(0, k_length, BLOCK_N):
            last_key = min(key + BLOCK_N, k_length) - 1
            low = 0 if right is None else max(key + shift - right, 0) // BLOCK_M * BLOCK_M
            high = q_length if left is None else min(last_key + shift + left + 1, q_length)
            for first in range(low, high, BLOCK_M):
                left_alone[begin + first : begin + min(first + BLOCK_M, q_length)] = True
    assert (sums.nan_to_num() == 0).all()
    first = first_columns(head_dim)
    for part, columns in (
        (sums[: heads * total_q * first], first),
        (sums[heads * total_q * first :], head_dim - first),
    ):
        written = part.view(heads, total_q, columns).isfinite().cpu()
        expected_rows = ~left_alone if ordered else torch.ones_like(left_alone)
        assert torch.equal(written, expected_rows[None, :, None].expand_as(written))


@pytest.mark.parametrize(("begin", "end"), [(0, 100), (0, 64), (5, 83), (16, 100), (40, 40), (60, 20), (-3, 170)])
@pytest.mark.parametrize("keys", [(0, 50), (7, 7), (9, 3)])
def test_one_segment_is_found_without_a_search(begin: int, end: int, keys: tuple[int, int], device: str) -> None:
    heads, total = 2, 100
    tiles = total // BLOCK_M + 3
    cu_q, cu_k = (torch.tensor(span, dtype=torch.int32, device=device) for span in ((begin, end), keys))
    out, dout = (torch.randn(total, heads, 64, device=device, dtype=torch.float16) for _ in range(2))
    lse = torch.randn(heads, total, device=device)
    found = []
    for one in (False, True):
        made = [torch.full_like(lse, torch.nan), torch.full((heads, total, 64), torch.nan, device=device)]
        counts = torch.full((heads * tiles,), -1, dtype=torch.int32, device=device)
        _attention_bwd_delta_kernel[(tiles, heads)](
            out, lse, dout, lse, cu_q, cu_k, *made, counts, 8, 8, 0, 0, total, 50, 1, 0, 0,
            STRIDE_OT=heads * 64, STRIDE_DOT=heads * 64, STRIDE_UNIT=8, HAS_DLSE=True, HAS_LEFT=False, HAS_RIGHT=True,
            ORDERED=True, DQ_ACCS=1, ONE_SEGMENT=one, OVERLAPPED=False, BLOCK_N=BLOCK_N, **_split(64),
        )  # fmt: skip
        found.append([*made, counts])
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("falling", ["queries", "keys"])
def test_falling_boundaries_are_their_prefix_maximum(falling: str, device: str) -> None:
    """More segments than are looked at in one step; boundaries fall before the last and at the end."""
    segments, heads, total = 300, 1, 300
    rising = torch.arange(segments + 1, dtype=torch.int32, device=device)
    fallen = rising.clone()
    fallen[torch.tensor([40, 280, 300])] = torch.tensor([200, 7, 0], dtype=torch.int32, device=device)
    tiles = total // BLOCK_M + segments + 2
    out = torch.zeros(total, heads, 64, device=device, dtype=torch.float16)
    lse, delta = (torch.zeros(heads, total, device=device) for _ in range(2))
    found = []
    for boundaries in (fallen, fallen.cummax(0).values.to(torch.int32)):
        cu_q, cu_k = (boundaries if falling == name else rising for name in ("queries", "keys"))
        sums = torch.full((heads, total, 64), torch.nan, device=device)
        counts = torch.full((heads * tiles,), -1, dtype=torch.int32, device=device)
        _attention_bwd_delta_kernel[(tiles, heads)](
            out, lse, out, lse, cu_q, cu_k, delta, sums, counts, 8, 8, 0, 0, total, total, segments, 0, 0,
            STRIDE_OT=64, STRIDE_DOT=64, STRIDE_UNIT=8, HAS_DLSE=False, HAS_LEFT=False, HAS_RIGHT=False, ORDERED=True,
            DQ_ACCS=1, ONE_SEGMENT=False, OVERLAPPED=False, BLOCK_N=BLOCK_N, **_split(64),
        )  # fmt: skip
        found.append(sums.nan_to_num(7.0))
    assert torch.equal(*found) and 0 < (found[0] == 0).sum() < found[0].numel()


@triton.jit
def _clear_kernel(base_ptr, rows, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    _clear(base_ptr, rows, BLOCK_M, COLUMNS)


@pytest.mark.parametrize("rows", [-5, 0, 3, 16, 2**25 + 1])
def test_of_any_number_of_rows_a_tile_is_cleared(rows: int, device: str) -> None:
    """The last has more numbers than int32 holds."""
    sums = torch.ones(17, 128, device=device)
    _clear_kernel[(1,)](sums, rows, BLOCK_M=16, COLUMNS=128)
    assert sums.any(1).tolist() == [row >= min(rows, 16) for row in range(17)]


@triton.jit
def _runs_kernel(out_ptr, first, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    row, run, within = _runs(first, BLOCK_M, WIDTH)
    place = tl.arange(0, BLOCK_M * WIDTH // RUN)[:, None] * RUN + within
    tl.store(out_ptr + place, row * WIDTH + run * RUN + within)


def test_runs_of_a_row_follow_each_other(device: str) -> None:
    """So that the threads of a warp, which lie along them, read rows and not columns."""
    out = torch.full((16 * 64,), -1, dtype=torch.int32, device=device)
    _runs_kernel[(1,)](out, 5, BLOCK_M=16, WIDTH=64)
    assert out.tolist() == list(range(5 * 64, 21 * 64))


def _as_sums(rows: torch.Tensor) -> torch.Tensor:
    """[H, T, D] as sums hold it: the first columns of all rows, in their order, and then the rest of all rows."""
    first = first_columns(rows.shape[2])
    order = torch.arange(first)[None, :] ^ (torch.arange(rows.shape[1])[:, None] % 4 * 8)
    ordered = rows[:, :, :first].gather(2, order.to(rows.device).expand(rows.shape[0], -1, -1))
    return torch.cat((ordered.flatten(), rows[:, :, first:].flatten()))


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_rounding_puts_columns_back(head_dim: int, device: str) -> None:
    heads, rows, scale = 2, 37, 0.25
    exact = torch.randn(heads, rows, head_dim, device=device)
    dq = torch.full((rows, heads, head_dim), torch.nan, device=device, dtype=torch.float16)
    grid = (-(-rows // BLOCK_M), heads)
    constants = {"STRIDE_DQT": heads * head_dim, "OVERLAPS": False, **_split(head_dim)}
    _attention_bwd_round_kernel[grid](_as_sums(exact), dq, rows, scale, **constants)
    assert torch.equal(dq, (exact * scale).half().transpose(0, 1))


def _start_offset(tile: int, blocks: int, distance: int, together: int) -> int:
    return max(min(tile % together, distance, blocks - 1 - distance), 0)


# Rows before the segment, its queries and keys, rows after it, and tiles that run side by side.
ONE_SEGMENT = {
    "whole": (0, 256, 256, 0, 8),
    "uneven": (0, 250, 235, 0, 3),
    "shifted": (23, 201, 190, 60, 5),
    "few_keys": (0, 256, 40, 0, 8),
    "one_block": (16, 9, 300, 7, 4),
    "no_keys": (0, 100, 0, 0, 4),
    "short_of_memory": (0, 60, 400, 200, 8),
}


@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("case", ONE_SEGMENT)
def test_rounding_adds_the_second_accumulator(case: str, head_dim: int, device: str) -> None:
    """The second accumulator lies in dq, where results then are; all else in dq is NaN and must not show."""
    begin, length, keys, after, together = ONE_SEGMENT[case]
    heads, scale, total, first = 2, 0.5, begin + length + after, first_columns(head_dim)
    exact = torch.randn(heads, total, head_dim, device=device)
    sums = _as_sums(exact)
    dq = torch.full((total, heads, head_dim), torch.nan, device=device, dtype=torch.float16)
    blocks, distance = -(-length // BLOCK_M), max(-(-total // BLOCK_M) - 1, 0) // 2
    offsets = [_start_offset(tile, blocks, distance, together) for tile in range(-(-keys // BLOCK_N))]
    begin_of_acc2 = begin + BLOCK_M * (blocks - max(offsets, default=0))
    added = torch.zeros_like(exact)
    added[:, begin_of_acc2 : begin + length].normal_()
    as_sums = _as_sums(added)
    of_first = as_sums[: heads * total * first].view(heads, total, first)
    of_rest = as_sums[heads * total * first :].view(heads, total, head_dim - first)
    second = dq.view(torch.float32)
    for row in range(begin_of_acc2, begin + length):
        for half, at in enumerate((row - distance * BLOCK_M, row)):
            parts = [part[:, row].chunk(2, 1)[half] for part in (of_first, of_rest) if part.numel()]
            second[at] = torch.cat(parts, 1)
    cu_q, cu_k = (torch.tensor([begin, begin + rows], dtype=torch.int32, device=device) for rows in (length, keys))
    _attention_bwd_round_acc2_kernel[(-(-(total - distance * BLOCK_M) // 8), heads)](
        sums, second, dq, cu_q, cu_k, total, begin + keys, scale, STRIDE_DQT=heads * head_dim, HEAD_DIM=head_dim,
        WAVE=together, BLOCK_M=8, ACC_BLOCK=BLOCK_M, BLOCK_N=BLOCK_N, OVERLAPS=False,
    )  # fmt: skip
    assert torch.equal(dq, ((exact + added) * scale).half().transpose(0, 1))
