"""Views that split and join the heads of grouped-query attention. The ops take q with more heads than k as it is."""

from torch import Tensor

from torch_ops._core.checks import check_dense, check_int, refuse


def reshape_for_gqa(q: Tensor, num_kv_heads: int) -> Tensor:
    """View [B, H, S, D] as [B, Hk, G, S, D]: the G = H / Hk heads that share a key head side by side.

    Head h of q is at [h // G, h % G]. k and v [B, Hk, S, D] match it by `k.unsqueeze(2)`.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "reshape_for_gqa"
    check_dense(op, "q", q)
    if q.dim() != 4:
        refuse(op, "q", "of shape [B, H, S, D]", list(q.shape))
    num_kv_heads = check_int(op, "num_kv_heads", num_kv_heads)
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads or not q.shape[1]:
        refuse(op, "num_kv_heads", f"a divisor of q's {q.shape[1]} heads", num_kv_heads)
    return q.unflatten(1, (num_kv_heads, q.shape[1] // num_kv_heads))


def restore_from_gqa(out: Tensor) -> Tensor:
    """Return [B, Hk, G, S, D] as [B, H, S, D], the input of `reshape_for_gqa`; a view if memory allows it, else a copy.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "restore_from_gqa"
    check_dense(op, "out", out)
    if out.dim() != 5:
        refuse(op, "out", "of shape [B, Hk, G, S, D]", list(out.shape))
    return out.flatten(1, 2)


__all__ = ["reshape_for_gqa", "restore_from_gqa"]
