"""The launcher of the Hopper kernel for gradients of keys and values of fp32, which stock Triton has besides.

`dense_portable` calls it for dk and dv, behind the kernel that makes delta and dq.
"""

from collections.abc import Callable

from torch import Tensor
from triton import cdiv

from csrc_free_ops.attention.hopper.bwd_fp32_dkdv import BLOCK_M, BLOCK_N, WIDTH, _attention_bwd_keys_hopper_kernel
from csrc_free_ops.configs.rows import Launch
from torch_ops._attention.choose import choose
from torch_ops._attention.parts import MOST_SPLITS, parts_of, plan_parts
from torch_ops._attention.scores import Scores
from torch_ops._core.hopper import is_measured, is_packaged, programs
from torch_ops._core.launch import Relaunch, dense_like, dense_strides, length_of, with_columns
from torch_ops._core.registry import is_eager, opaque_launch, remembered
from torch_ops.settings import settings

KEYS_LAUNCH = Launch(BLOCK_M.value, BLOCK_N.value, 8, 1)


def takes_hopper_keys(q: Tensor, k: Tensor, scores: Scores, products: str, few: bool) -> bool:
    """Whether the kernel takes them: of one query head to a key head, and nothing between scores and their sums.

    Of 128 columns `few` programs are faster as stock Triton's, beside those of queries, and whoever gave stock Triton's
    kernel a row of their own wants that one.
    """
    fits = q.shape[3] in (WIDTH.value, *(() if few else (2 * WIDTH.value,))) and q.shape[1] == k.shape[1]
    if products != "bf16x6" or not fits or scores.backward_steps or settings.path == "portable":
        return False
    with_rows, without = (
        choose("attention_bwd_dkdv", q, scores, length_of(k), own_rows=rows, precision=products) for rows in (None, ())
    )
    return with_rows == without and is_measured() and not is_packaged()


def _splits(q: Tensor, k: Tensor) -> int:
    """Into how many the rows are split, where tiles of keys alone would leave multiprocessors without work."""
    tiles = cdiv(k.shape[2], BLOCK_N.value) * k.shape[0] * k.shape[1]
    most = cdiv(q.shape[2], 2 * BLOCK_M.value)
    return max(1, min(programs(q.device.index) // max(tiles, 1), most, MOST_SPLITS))


def plan_dense_keys(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Callable[..., None]:
    """launch(q, k, v, lse, dout, delta, dk, dv), where `takes_hopper_keys`; lse and delta are contiguous."""
    if not is_eager():
        bounds = scores.scale, scores.left, scores.right
        return lambda *tensors: _launch_dense_keys_opaque(*tensors, *bounds)
    batch, heads, k_length, head_dim = k.shape
    splits = _splits(q, k)
    results = [parts_of(dense_like(tensor), splits) for tensor in (k, v)]
    unit, outer, rows = dense_strides(q, k, v, dout, *results)
    scalars = (*outer, q.shape[2], k_length, scores.scale, *scores.bounds())
    names = ("STRIDE_QT", "STRIDE_KT", "STRIDE_VT", "STRIDE_DOT", "STRIDE_DKT", "STRIDE_DVT")
    constants = {
        **dict(zip(names, rows, strict=True)), "UNIT": unit, "HEAD_DIM": head_dim, "SPLITS": splits,
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "num_warps": KEYS_LAUNCH.num_warps,
    }  # fmt: skip
    grid = (cdiv(k_length, BLOCK_N.value) * batch, heads, splits)
    relaunch = Relaunch(grid, scalars)
    add_parts = plan_parts(k, k, v, 1, splits) if splits > 1 else None

    def launch_backward(*tensors: Tensor) -> None:
        if add_parts is not None:
            *read, dk, dv = tensors
            parts = [parts_of(result, splits) for result in (dk, dv)]
            launch_keys(*read, *parts)
            add_parts(dk, *parts, dk, dk, dv)
        else:
            launch_keys(*tensors)

    def launch_keys(*tensors: Tensor) -> None:
        if not relaunch(None, tensors):
            compiled = _attention_bwd_keys_hopper_kernel[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_backward


_prepare_dense_keys = remembered(plan_dense_keys)


@opaque_launch("_attention_dense_bwd_keys", writes=("dk", "dv"))
def _launch_dense_keys_opaque(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dout: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    scale: float, left: int, right: int,
) -> None:  # fmt: skip
    q, k, v, dout = (with_columns(tensor) for tensor in (q, k, v, dout))
    plan = _prepare_dense_keys(dout, q, k, v, Scores(scale, left, right))
    plan(q, k, v, lse, dout, delta, dk, dv)
