"""`vk::segment_attention`: segments of queries over sequences of keys that they share, and its backward.

Context parallel needs it. A rank holds several groups of queries of a sequence, and each sees the sequence's keys up to
a limit of its own. The keys lie in pieces, as an all-gather leaves them, and are read in place. `torch_ops.segments`
makes the index tensors. Kernels: `csrc_free_ops.attention`.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torch_ops._attention.checks import attention_outputs, differentiate_attention, is_differentiated, seed_of
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.segment_checks import (
    check_segment_values,
    check_segments,
    check_segments_backward,
    segment_backward_flops,
    segment_flops,
    segment_gradients,
)
from torch_ops._attention.segments import (
    plan_segment_backward,
    plan_segment_forward,
    segment_backward_tensors,
    segment_forward_tensors,
)
from torch_ops._attention.tensors import SegmentBackward, SegmentForward
from torch_ops._core.checks import check_bool, check_number
from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import gradient, planned_op


class SegmentAttention(NamedTuple):
    """The arguments of `vk::segment_attention`; the function below documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    key_sequence: Tensor
    key_limit: Tensor
    key_bounds: Tensor
    key_rows: Tensor
    scale: float | None = None
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = True
    return_lse: bool = True
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    query_start: Tensor | None = None


class SegmentAttentionBackward(NamedTuple):
    """The arguments of `vk::segment_attention_backward`.

    With float32_kv dk and dv are fp32, as a sum over ranks wants them; fp64 stays fp64.
    """

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor
    key_sequence: Tensor
    key_limit: Tensor
    key_bounds: Tensor
    key_rows: Tensor
    scale: float | None = None
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = True
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    float32_kv: bool = False
    query_start: Tensor | None = None


def _plan(t: SegmentForward, call: SegmentAttention) -> Plan:
    return plan_segment_forward(t, AttentionOptions.of(call))


segment_attention_op = planned_op(
    "segment_attention",
    SegmentAttention,
    tuple[Tensor, Tensor],
    check=partial(check_segments, "segment_attention"),
    outputs=attention_outputs,
    tensors=segment_forward_tensors,
    plan=_plan,
    check_values=partial(check_segment_values, "segment_attention"),
    flops=segment_flops,
    autocast=True,
    keeps_dtype=("alibi_slopes", "sinks"),
)


def _plan_backward(t: SegmentBackward, call: SegmentAttentionBackward) -> Plan:
    return plan_segment_backward(t, AttentionOptions.of(call))


segment_attention_backward_op = planned_op(
    "segment_attention_backward",
    SegmentAttentionBackward,
    tuple[Tensor, Tensor, Tensor],
    check=partial(check_segments_backward, "segment_attention_backward"),
    outputs=segment_gradients,
    tensors=segment_backward_tensors,
    plan=_plan_backward,
    check_values=partial(check_segment_values, "segment_attention_backward"),
    flops=segment_backward_flops,
)
segment_attention_backward_op.refuse_autograd()
gradient(
    segment_attention_op,
    SegmentAttention,
    differentiate_attention(
        segment_attention_op, SegmentAttention, segment_attention_backward_op, SegmentAttentionBackward
    ),
    of=("q", "k", "v", "sinks"),
    saves=(
        "q", "k", "v", "cu_seqlens_q", "key_sequence", "key_limit", "key_bounds", "key_rows", "alibi_slopes", "sinks",
        "dropout_seed", "query_start",
    ),
    saves_results=(0, 1),
)  # fmt: skip


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    key_sequence: Tensor,
    key_limit: Tensor,
    key_bounds: Tensor,
    key_rows: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = False,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    query_start: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale q k^T) v for segments of queries, each over the first keys of a sequence that it names.

    Segment i is rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q. It sees the first key_limit[i] keys of sequence
    key_sequence[i]. Any number of segments may name one sequence. Row r of a segment with n queries and kv_len keys
    stands at key position r + kv_len - n (aligned bottom-right), unless query_start says where. A row that sees no key
    gives out 0 and lse -inf, and gets no gradient. The same holds for rows in no segment.

    Sequence s lies in P pieces. Piece p holds the keys from key_bounds[s, p] to key_bounds[s, p + 1], in rows of k and
    v from key_rows[s, p] on. A contiguous buffer has one piece for each sequence. The rank-major buffer that an
    all-gather of zigzag chunks leaves has 2 W of them. `torch_ops.segments` makes the five index tensors, once for all
    layers.

    Args:
        q: [Tq, H, D], fp16, bf16 or fp32, on the CPU also fp64; D is a multiple of 8 up to 256. Any strides; columns
            that are not contiguous are copied.
        k, v: [Tk, Hk, D], dtype and device of q. H is a multiple of Hk: each key head serves H / Hk query heads.
        cu_seqlens_q: int32 [n + 1] on q's device, boundaries of n segments. Empty segments are allowed. Boundaries are
            clamped to the tensor, and one that falls counts as the largest before it.
        key_sequence: int32 [n], the sequence of each segment's keys. A segment sees nothing if there is no such
            sequence.
        key_limit: int32 [n], how many keys of its sequence a segment sees; clamped to key_bounds[s, P], the sequence's
            length.
        key_bounds: int32 [S, P + 1], rising from 0, up to 2^29 keys. A piece whose bounds fall is empty.
        key_rows: int32 [S, P], the first row of each piece. Keys whose rows lie outside of k do not exist. Pieces may
            share rows.
        scale: positive number that multiplies q k^T; it gets no gradient. Default: 1 / sqrt(D).
        causal: whether a query sees only keys up to its own position. Default: True.
        window_left, window_right: number of keys that a query sees before and after its position. Default: -1, all.
        softcap: c > 0 replaces a score s by c tanh(s / c). Default: 0, none.
        deterministic: accepted for later kernels; this op always gives the same bits. Default: True.
        return_lse: whether to return (out, lse). `torch.ops.vk.segment_attention` always returns both: with
            return_lse=False lse is [H, 0], and a later backward recomputes it. Default: False.
        alibi_slopes: fp32 [H], or [S, H] with a row for each sequence of keys. Slope times the distance of query and
            key position is subtracted from a score, after the softcap. Slopes get no gradient. Default: none.
        sinks: [H], fp32 or q's dtype; one more logit in the softmax of each row of a segment, without a value.
            Differentiable. lse includes it, also for a row that sees no key. Default: none.
        dropout_p: probability that a weight counts as 0, from 0 to below 1; the other weights grow by 1 / (1 -
            dropout_p). lse is the sum over all weights. Default: 0.
        dropout_seed: int64 [1] on q's device. The mask is Philox of the seed, the sequence, the head, and the positions
            of query and key. A rank therefore drops the weights that a single device drops. Default: from PyTorch's
            generator.
        query_start: int32 [n], the key position of each segment's first row, at most 2^29 from 0. Without causal order
            a segment may see keys behind its last row; windows, ALiBi and dropout then need it. Default: kv_len - n.

    Returns:
        out [Tq, H, D] in q's dtype. With return_lse also lse [H, Tq], fp32 (fp64 for fp64): the natural logarithm of
        the sum of exp(score), differentiable.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came. Values of the index
            tensors are checked only within `torch_ops.settings(checked=True)`.
        RuntimeError: from PyTorch, for an argument of another type.

    Products accumulate in fp32. Forward and backward give the same bits for the same inputs. dk and dv are summed over
    all segments in fp32 and rounded once; rows of k that no segment sees get 0. FlashAttention-2, arXiv 2307.08691; the
    zigzag layout is that of ring-flash-attention.
    """
    dropout_p = check_number("segment_attention", "dropout_p", dropout_p)
    # The backward takes lse; without one, lse need not lie in memory.
    keeps_lse = check_bool("segment_attention", "return_lse", return_lse) or is_differentiated(q, k, v, sinks)
    seed = seed_of(q, dropout_p, dropout_seed)
    # PyTorch's dispatcher takes longer with more arguments, so defaults are not passed on.
    plain = alibi_slopes is None and sinks is None and dropout_p == 0 and dropout_seed is None and query_start is None
    scored = () if plain else (alibi_slopes, sinks, dropout_p, seed, query_start)
    out, lse = segment_attention_op(
        q, k, v, cu_seqlens_q, key_sequence, key_limit, key_bounds, key_rows, scale, causal, window_left, window_right,
        softcap, deterministic, keeps_lse, *scored,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["segment_attention"]
