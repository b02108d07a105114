"""Attention by PyTorch's own kernels next to ours: what is timed, and the rows that the times make.

A row says that a kernel of PyTorch is 3 % faster than ours or more. It holds at its least length and at all longer ones
that were measured. Kernels that break the tolerance rule get no row.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from csrc_free_ops.configs.handover import KERNELS, HandOver
from torch_ops.attention import attention
from torch_ops.bench.measure.opbench import Call, Check, Impl, OpBench
from torch_ops.bench.measure.results import OK, OURS, VK, Provenance, Record
from torch_ops.bench.peers.dense import dense_call
from torch_ops.bench.rooms.attention import BENCH
from torch_ops.bench.rooms.dense_cases import parse_dense
from torch_ops.compat._handover_rule import KERNELS as PYTORCHS
from torch_ops.testing.cases import DenseCase, DenseInputs

# How many times as long ours takes, at least, where a call goes over.
LEAST_GAIN = 1.03
ANY_ORDER = "vk_any_order"
CHECKED_LENGTH, CHECKED_HEADS = 256, 2


def handover_cases(head_dims: Sequence[int], lengths: Sequence[int], heads: int, tokens: int) -> list[DenseCase]:
    """Return causal and other cases of about so many tokens, length by length."""
    return [
        DenseCase(
            f"d{head_dim}_s{length}{'_causal' * causal}", "a row", max(1, tokens // length), heads, length, head_dim,
            options={"causal": True} if causal else {},
        )
        for head_dim, causal, length in itertools.product(head_dims, (False, True), lengths)
    ]  # fmt: skip


def _inputs(case: DenseCase, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DenseInputs:
    """Draw on the device, because a sweep of large inputs would take minutes on the host."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = case.batch, case.num_heads, case.length, case.head_dim
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4))
    return DenseInputs(q, k, v, dout, torch.zeros(shape[:3], device=device), dict(case.options))


def _bind(function: Callable[..., Tensor], case: DenseCase, inputs: DenseInputs) -> Call:
    return dense_call(inputs, partial(function, bool(case.options.get("causal"))))


def _in_any_order(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v, causal=causal, deterministic=False)
    assert isinstance(out, Tensor)
    return out


def _by_pytorch(kernel: str, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return PYTORCHS[kernel].call(q, k, v, causal, None, torch.is_grad_enabled())[0]


def _refuses(case: DenseCase, dtype: torch.dtype, device: torch.device) -> str:
    return "" if device.type == "cuda" else "needs a GPU"


IMPLS = (
    BENCH.ours,
    Impl(
        ANY_ORDER, partial(_bind, _in_any_order), "vk::attention with deterministic=False", directions=("backward",),
        group=OURS,
    ),
    *(
        Impl(kernel, partial(_bind, partial(_by_pytorch, kernel)), f"PyTorch's {kernel} kernel, an aten op", _refuses)
        for kernel in KERNELS
    ),
)  # fmt: skip


@functools.lru_cache(maxsize=2)
def _checks(head_dim: int, causal: bool, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    """Check small calls, once for all lengths of a head dimension."""
    options = {"causal": True} if causal else {}
    case = DenseCase("checked", "the tolerance rule", 1, CHECKED_HEADS, CHECKED_LENGTH, head_dim, options=options)
    return BENCH.checks(case, dtype, device, backward)


def handover_bench() -> OpBench:
    def checks(case: DenseCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
        return _checks(case.head_dim, bool(case.options.get("causal")), dtype, device, backward)

    return dataclasses.replace(BENCH, inputs=_inputs, checks=checks, baselines=IMPLS[1:])


def _build(case: DenseCase, dtype: torch.dtype) -> None:
    inputs = _inputs(case, dtype, torch.device("cuda"))
    for impl in IMPLS[:2]:
        impl.bind(case, inputs).results(backward=True)
    torch.cuda.synchronize()


def build_kernels(cases: Sequence[DenseCase], dtypes: Sequence[torch.dtype], jobs: int) -> None:
    """Run our kernels once in several processes, so that Triton's cache holds them before anything is timed."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        for future in [pool.submit(_build, case, dtype) for dtype in dtypes for case in cases]:
            # A failure comes again where the case is timed, and is recorded there.
            future.exception()


Times = dict[tuple[str, str], float]


def times_of(records: Iterable[Record]) -> dict[tuple[str, int, bool], dict[int, Times]]:
    """Return milliseconds by (direction, name) of right implementations, by length, by (dtype, head dim, causal)."""
    found: dict[tuple[str, int, bool], dict[int, Times]] = {}
    for one in records:
        shape = parse_dense(one.shape.removesuffix("c"))
        assert shape is not None, one.shape
        key = one.dtype, shape["dim"], one.shape.endswith("c")
        times = found.setdefault(key, {}).setdefault(shape["length"], {})
        if one.status == OK and one.ms:
            times[one.direction, one.name] = one.ms
    return found


def rows_of(records: Iterable[Record], lengths: Sequence[int]) -> list[HandOver]:
    """Return the rows of every head dimension that was measured at all lengths, the fastest kernel first."""
    rows: list[HandOver] = []
    for (dtype, head_dim, causal), by_length in times_of(records).items():
        if set(lengths) <= by_length.keys():
            make = partial(HandOver, dtype=dtype, head_dim=head_dim, causal=causal)
            forward = _rows_of_direction(make, "forward", by_length, _forward_gain)
            rows += forward
            rows += _rows_of_direction(make, "training", by_length, partial(_training_gain, forward))
    return rows


def _rows_of_direction(
    make: Callable[..., HandOver], direction: str, by_length: dict[int, Times],
    gain: Callable[[str, int, Times], float | None],
) -> list[HandOver]:  # fmt: skip
    found: list[tuple[float, HandOver]] = []
    longest_first = sorted(by_length, reverse=True)
    for kernel in KERNELS:
        gains = [gain(kernel, length, by_length[length]) or 0.0 for length in longest_first]
        won = list(itertools.takewhile(lambda each: each >= LEAST_GAIN, gains))
        if won:
            row = make(
                kernel=kernel, direction=direction, min_length=longest_first[len(won) - 1],
                every_length=len(won) == len(gains),
            )  # fmt: skip
            found.append((won[0], row))
    return [row for _, row in sorted(found, key=lambda each: -each[0])]


def _forward_gain(kernel: str, length: int, times: Times) -> float | None:
    return _over(times.get(("forward", VK)), times.get(("forward", kernel)))


def _training_gain(forward: Sequence[HandOver], kernel: str, length: int, times: Times) -> float | None:
    """Forward and backward of a kernel against the best forward that may go over, and our backward in any order."""
    names = [VK, *(row.kernel for row in forward if row.min_length <= length)]
    forwards = [ms for name in names if (ms := times.get(("forward", name))) is not None]
    backwards = [ms for name in (VK, ANY_ORDER) if (ms := times.get(("backward", name))) is not None]
    theirs = [times.get((direction, kernel)) for direction in ("forward", "backward")]
    if not forwards or not backwards:
        return None
    return _over(min(forwards) + min(backwards), None if None in theirs else sum(filter(None, theirs)))


def _over(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def in_words(records: Sequence[Record]) -> str:
    """Say for one case how long each implementation takes, ours taken as 1."""

    def ratio(one: Record, ours: Record) -> str:
        return f"{one.name} {one.ms / ours.ms:.2f}" if one.status == OK and one.ms and ours.ms else one.name + " -"

    parts: list[str] = []
    for direction in dict.fromkeys(one.direction for one in records):
        ours, *others = [one for one in records if one.direction == direction]
        figures = ", ".join(ratio(one, ours) for one in others)
        parts.append(f"{direction} {f'{ours.ms:.3f} ms' if ours.ms else ours.status}, {figures}")
    return "; ".join(parts)


def provenance_of(origin: Provenance) -> dict[str, str]:
    """Return the part of a run's origin that rows carry."""
    # A CPU has no cuDNN, and gets no rows.
    versions = {name: origin.versions.get(name, "0") for name in ("torch", "triton", "cudnn")}
    return {"gpu": origin.device, **versions, "date": origin.date, "command": origin.command, "commit": origin.commit}
