"""Alternatives to segment attention on a rank of zigzag context parallel: a call of packed attention for each group.

The copies are those of ring-flash-attention's `execute_grouped_attention` and `backward_grouped_attention`. The forward
puts the gathered keys into the order of their sequences, and cuts out what each group sees. The backward does both
again and adds up the groups' gradients in the dtype of the keys. Then it puts the sums into the order of the gathered
buffer. Indices and boundaries are made before a call.
"""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_ops.bench.measure.opbench import BOTH, Call, Impl
from torch_ops.bench.peers.packed import needs_half_on_gpu
from torch_ops.testing.cases import SegmentInputs, cumulative


class Group(NamedTuple):
    """Segments that one call computes, one for each sequence: where their rows and keys lie.

    Attributes:
        rows: int64 [Tg], rows of q.
        ranges: keys from the first to the limit, in the sequences laid one behind the other.
    """

    rows: Tensor
    ranges: tuple[tuple[int, int], ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    most_queries: int
    most_keys: int


class Attention(NamedTuple):
    """Packed attention in causal order: (out, lse) of q, k, v and a group, and (dq, dk, dv) of a gradient of out."""

    forward: Callable[[Tensor, Tensor, Tensor, Group], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Group], tuple[Tensor, Tensor, Tensor]]


class Layout(NamedTuple):
    """Where pieces lie in the gathered buffer, (first row, keys) in the order of sequences, and the groups."""

    pieces: tuple[tuple[int, int], ...]
    groups: tuple[Group, ...]

    @staticmethod
    def of(inputs: SegmentInputs) -> "Layout":
        """The layout of zigzag segments: an early and a late one of each sequence."""
        device = inputs.q.device
        bounds, first_rows = inputs.key_bounds.tolist(), inputs.key_rows.tolist()
        pieces = tuple(
            (row, end - start)
            for own, rows in zip(bounds, first_rows, strict=True)
            for (start, end), row in zip(itertools.pairwise(own), rows, strict=True)
        )
        starts = (0, *itertools.accumulate(own[-1] for own in bounds))
        cuts, limits = [*itertools.pairwise(inputs.cu_seqlens_q.tolist())], inputs.key_limit.tolist()
        groups = []
        for first in range(2):
            queries = [stop - start for start, stop in cuts[first::2]]
            keys = limits[first::2]
            rows = itertools.chain.from_iterable(range(*cut) for cut in cuts[first::2])
            groups.append(Group(
                torch.tensor([*rows], dtype=torch.int64, device=device),
                tuple((start, start + limit) for start, limit in zip(starts, keys, strict=False)),
                cumulative(tuple(queries), device), cumulative(tuple(keys), device),
                max(queries, default=0), max(keys, default=0),
            ))  # fmt: skip
        return Layout(pieces, tuple(groups))

    def in_order(self, gathered: Tensor) -> Tensor:
        """Keys and values [2, Tk, Hk, D] in the order of sequences."""
        return torch.cat([gathered[:, row : row + keys] for row, keys in self.pieces], 1)

    def as_gathered(self, ordered: Tensor) -> Tensor:
        """The inverse of `in_order`."""
        ends = itertools.accumulate(keys for _, keys in self.pieces)
        placed = sorted((row, end - keys, end) for (row, keys), end in zip(self.pieces, ends, strict=True))
        return torch.cat([ordered[:, start:end] for _, start, end in placed], 1)


def _cut(ordered: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    k, v = (torch.cat([each[start:end] for start, end in group.ranges]) for each in ordered.unbind())
    return k, v


class _TwoCalls(torch.autograd.Function):
    """out of q, k and v, which are views of the gathered buffer."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gathered: Tensor, layout: Layout, attention: Attention
    ) -> Tensor:
        ordered = layout.in_order(gathered)
        out = q.new_zeros(q.shape)
        lse = q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
        for group in layout.groups:
            own = q.index_select(0, group.rows)
            out[group.rows], lse[:, group.rows] = attention.forward(own, *_cut(ordered, group), group)
        ctx.save_for_backward(q, gathered, out, lse)
        ctx.layout, ctx.attention = layout, attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, gathered, out, lse = ctx.saved_tensors
        ordered, dq = ctx.layout.in_order(gathered), torch.empty_like(q)
        sums = torch.zeros_like(ordered)
        for group in ctx.layout.groups:
            own_dout, own_q, own_out = (each.index_select(0, group.rows) for each in (dout, q, out))
            own_lse = lse.index_select(1, group.rows)
            dq[group.rows], *gradients = ctx.attention.backward(
                own_dout, own_q, *_cut(ordered, group), own_out, own_lse, group
            )
            for total, gradient in zip(sums, gradients, strict=True):
                parts = gradient.split([end - start for start, end in group.ranges])
                for (start, end), part in zip(group.ranges, parts, strict=True):
                    total[start:end] += part
        dk, dv = ctx.layout.as_gathered(sums)
        return dq, dk, dv, None, None, None


class _OneCall(torch.autograd.Function):
    """out of a group whose queries and keys are ready."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, attention: Attention) -> Tensor:
        out, lse = attention.forward(q, k, v, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.attention = group, attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.attention.backward(dout, *ctx.saved_tensors, ctx.group), None, None)


def _bind_two_calls(attention: Attention, case: Any, inputs: SegmentInputs) -> Call:
    gathered = torch.stack([inputs.k, inputs.v])
    leaves = {
        name: each.detach().requires_grad_()
        for name, each in zip(("q", "k", "v"), (inputs.q, *gathered), strict=True)
    }  # fmt: skip
    layout = Layout.of(inputs)
    return Call(lambda: _TwoCalls.apply(*leaves.values(), gathered, layout, attention), leaves, inputs.dout)


def _bind_alone(attention: Attention, case: Any, inputs: SegmentInputs) -> Call:
    """Both calls on queries and keys that lie as the calls want them."""
    layout = Layout.of(inputs)
    ordered = layout.in_order(torch.stack([inputs.k, inputs.v]))
    leaves: dict[str, Tensor] = {}
    for index, group in enumerate(layout.groups):
        for name, each in zip("qkv", (inputs.q[group.rows], *_cut(ordered, group)), strict=True):
            leaves[f"{name}{index}"] = each.detach().requires_grad_()

    def forward() -> tuple[Tensor, ...]:
        tensors = iter(leaves.values())
        return tuple(
            _OneCall.apply(next(tensors), next(tensors), next(tensors), group, attention) for group in layout.groups
        )

    douts = tuple(inputs.dout[group.rows] for group in layout.groups)
    return Call(forward, leaves, douts, outputs=("out0", "out1"))


@cache
def _unused(device: torch.device) -> tuple[Tensor, Tensor]:
    """The state of a random number generator for dropout, which no call has, and one more that none reads."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _flash2_forward(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    results = torch.ops.aten._flash_attention_forward(q, k, v, *group[2:], 0.0, True, False)
    return results[0], results[1]


def _flash2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *group[2:], 0.0, True, *_unused(q.device)
    )
    return dq, dk, dv


def _window_forward(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.vk.window_attn(q, k, v, group.cu_seqlens_q, group.cu_seqlens_k, causal=True)
    return out, lse


def _window_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.vk.window_attn_backward(
        dout, None, q, k, v, out, lse, group.cu_seqlens_q, group.cu_seqlens_k, causal=True
    )
    return dq, dk, dv


FLASH2, WINDOW = Attention(_flash2_forward, _flash2_backward), Attention(_window_forward, _window_backward)

DIRECTIONS = ("forward", "backward", BOTH)
COPIES = "ring-flash-attention's copies: keys put in order, cut for each group, results scattered"
CALLS_ALONE = "makes the two calls without any copy of queries, keys or results"
ABOUT_FLASH2 = f"FlashAttention-2, aten._flash_attention_forward of torch {torch.__version__}"


def _needs_half(case: Any, dtype: torch.dtype, device: torch.device) -> str:
    return needs_half_on_gpu(dtype, device)


FLASH2_TWICE = Impl(
    "flash2_twice", partial(_bind_two_calls, FLASH2), f"two calls of {ABOUT_FLASH2}, and {COPIES}", _needs_half,
    DIRECTIONS,
)  # fmt: skip
WINDOW_TWICE = Impl(
    "window_attn_twice", partial(_bind_two_calls, WINDOW),
    f"two calls of vk::window_attn on the path that is set, and {COPIES}", directions=DIRECTIONS,
)  # fmt: skip
FLASH2_ALONE = Impl(
    "flash2_alone", partial(_bind_alone, FLASH2), f"two calls of {ABOUT_FLASH2}, on keys that are in order and cut",
    _needs_half, DIRECTIONS, CALLS_ALONE,
)  # fmt: skip
WINDOW_ALONE = Impl(
    "window_attn_alone", partial(_bind_alone, WINDOW),
    "two calls of vk::window_attn on the path that is set, on keys that are in order and cut", directions=DIRECTIONS,
    reference_point=CALLS_ALONE,
)  # fmt: skip
ZIGZAG_BASELINES = (FLASH2_TWICE, WINDOW_TWICE, FLASH2_ALONE, WINDOW_ALONE)
