"""Heads of grouped-query attention, apart and together. The ops need neither: they take q of more heads than k has."""

from torch import Tensor

from torch_ops._core.checks import check_dense, check_int, refuse


def reshape_for_gqa(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, S, D] as [B, Hk, G, S, D], a view: the G = H / Hk heads that share a key head side by side.

    Head h of q stands at [h // G, h % G]. k and v [B, Hk, S, D] go with it as they are, by `k.unsqueeze(2)`.

    Raises:
        ValueError: names the argument, what was wanted and what came.
    """
    op = "reshape_for_gqa"
    check_dense(op, "q", q)
    if q.dim() != 4:
        refuse(op, "q", "of shape [B, H, S, D]", list(q.shape))
    check_int(op, "num_kv_heads", num_kv_heads)
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads or not q.shape[1]:
        refuse(op, "num_kv_heads", f"a divisor of q's {q.shape[1]} heads", num_kv_heads)
    return q.unflatten(1, (num_kv_heads, q.shape[1] // num_kv_heads))


def restore_from_gqa(out: Tensor) -> Tensor:
    """[B, Hk, G, S, D] as [B, H, S, D], what `reshape_for_gqa` took; a view where memory allows it, else a copy.

    Raises:
        ValueError: names the argument, what was wanted and what came.
    """
    op = "restore_from_gqa"
    check_dense(op, "out", out)
    if out.dim() != 5:
        refuse(op, "out", "of shape [B, Hk, G, S, D]", list(out.shape))
    return out.flatten(1, 2)


__all__ = ["reshape_for_gqa", "restore_from_gqa"]
