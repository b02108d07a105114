"""The Hopper kernel for gradients of keys and values of dense fp32 calls, which stock Triton has besides.

`portable` launches it for dk and dv, behind the kernel that makes delta and dq.
"""

from typing import NamedTuple

from torch import Tensor
from triton import cdiv

from csrc_free_ops.attention.hopper.bwd_fp32_dkdv import BLOCK_M, BLOCK_N, WIDTH, _attention_bwd_fp32_dkdv_hopper_kernel
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.tiles.hopper.versions import PTXAS
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.split import MOST_SPLITS, allocate_partial, plan_split_sum
from torch_ops._attention.tensors import Backward, key_length
from torch_ops._core.device import gpu
from torch_ops._core.hopper import programs, why_not_this_triton
from torch_ops._core.launch import dense_strides, with_columns
from torch_ops._core.plan import Bound, Plan
from torch_ops._core.planned_op import opaque_plan
from torch_ops._core.registry import Mode, current_mode
from torch_ops.settings import settings

FP32_DKDV_CONFIG = Config(BLOCK_M.value, BLOCK_N.value, 8, 1)


class Dkdv(NamedTuple):
    """dk and dv are filled; lse and delta are contiguous, and so are columns of the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor
    dk: Tensor
    dv: Tensor


def supports_fp32_dkdv(t: Backward, options: AttentionOptions, products: str, few: bool) -> bool:
    """Whether the kernel takes them: of one query head to a key head, and nothing between scores and their sums.

    At 128 columns, `few` programs are faster in stock Triton, beside the programs of queries. A row of the user's for
    stock Triton's kernel also selects that kernel.
    """
    q, k = t.q, t.k
    if t.cu_q is not None or products != "bf16x6" or options.backward_score_mods or settings.path == "portable":
        return False
    widths = (WIDTH.value,) if few else (WIDTH.value, 2 * WIDTH.value)
    if q.shape[3] not in widths or q.shape[1] != k.shape[1]:
        return False
    with_rows, without = (
        choose("attention_bwd_dkdv", q, options, key_length(t), own_rows=rows, precision=products)
        for rows in (None, ())
    )
    return with_rows == without and current_mode() is not Mode.PACKAGED and not why_not_this_triton(gpu())


def _splits(q: Tensor, k: Tensor) -> int:
    """Into how many the rows are split, where tiles of keys alone would leave multiprocessors without work."""
    tiles = cdiv(k.shape[2], BLOCK_N.value) * k.shape[0] * k.shape[1]
    most = cdiv(q.shape[2], 2 * BLOCK_M.value)
    return max(1, min(programs(q.device.index) // max(tiles, 1), most, MOST_SPLITS))


def plan_fp32_dkdv(t: Dkdv, options: AttentionOptions) -> Plan:
    """Plan dk and dv, where `supports_fp32_dkdv`."""
    source = f"rule for {gpu().backend} {gpu().arch}"
    kernels = {"attention_bwd_fp32_dkdv_hopper": (FP32_DKDV_CONFIG, source)}
    if current_mode() is Mode.TRACED:
        return Plan(_plan_fp32_dkdv_opaque(options).launch, kernels)
    batch, heads, k_length, head_dim = t.k.shape
    splits = _splits(t.q, t.k)
    results = [allocate_partial(tensor, splits) for tensor in (t.dk, t.dv)]
    stride_unit, outer, rows, numbers = dense_strides(t.q, t.k, t.v, t.dout, *results)
    scalars = (*outer, *numbers, t.q.shape[2], k_length, splits, options.scale, *options.bounds())
    names = ("STRIDE_QT", "STRIDE_KT", "STRIDE_VT", "STRIDE_DOT", "STRIDE_DKT", "STRIDE_DVT")
    constants = {
        **dict(zip(names, rows, strict=True)), "STRIDE_UNIT": stride_unit, "HEAD_DIM": head_dim, "IS_SPLIT": splits > 1,
        "HAS_LEFT": options.left >= 0, "HAS_RIGHT": options.right >= 0, "num_warps": FP32_DKDV_CONFIG.num_warps,
        **PTXAS,
    }  # fmt: skip
    grid = (cdiv(k_length, BLOCK_N.value) * batch, heads, splits)
    bound = Bound(_attention_bwd_fp32_dkdv_hopper_kernel, grid, scalars, constants)
    add_partial = plan_split_sum((t.dk, t.dk, t.dv), 1, splits) if splits > 1 else None

    def launch(t: Dkdv) -> None:
        # A compiler may have laid them out in another way.
        q, k, v, dout = (with_columns(tensor) for tensor in (t.q, t.k, t.v, t.dout))
        dk, dv = allocate_partial(t.dk, splits), allocate_partial(t.dv, splits)
        bound(q, k, v, t.lse, dout, t.delta, dk, dv)
        if add_partial is not None:
            add_partial(dk, dk, dv, t.dk, t.dk, t.dv)

    return Plan(launch, kernels)


_plan_fp32_dkdv_opaque = opaque_plan(
    "_attention_bwd_fp32_dkdv", Dkdv, AttentionOptions, writes=("dk", "dv"), plan=plan_fp32_dkdv
)
