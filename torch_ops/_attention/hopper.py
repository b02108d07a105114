"""The attention core's Hopper forward (Gluon), which no compiler of PyTorch's can take apart.

`why_unsupported` says from metadata alone why a call cannot take this path.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.attention.hopper.fwd import _attention_fwd_hopper_kernel
from csrc_free_ops.attention.hopper.fwd_fp32 import _attention_fwd_fp32_hopper_kernel
from csrc_free_ops.attention.hopper.scheduler import BY_LENGTH, CLOSED_FORM, DENSE_CUT, DENSE_ENDS, RANKED, SINGLE
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS, one_segment_config, overlaps, pairs_ends, registers
from csrc_free_ops.configs.rows import Config, Gpu
from csrc_free_ops.tiles.hopper.versions import PTXAS
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Forward, mean_length, num_segments
from torch_ops._core.counters import block_size, work_counters
from torch_ops._core.device import gpu
from torch_ops._core.hopper import Descriptors, programs, why_no_hopper, why_not_this_triton
from torch_ops._core.launch import are_settled
from torch_ops._core.plan import Bound, Plan, has_tma_addresses
from torch_ops.settings import settings

LOG2E = 1.4426950408889634


def why_unsupported(gpu: Gpu, options: AttentionOptions, /, **tensors: Tensor) -> str:
    """Why a call with these, of which q is one, cannot take the Hopper path, or nothing."""
    q = tensors["q"]
    if reason := why_no_hopper(gpu, options.compute_dtype or q.dtype):
        return reason
    # Not `in HEAD_DIMS`: in graphs the size may be a symbol, which has no hash.
    if all(q.shape[-1] != head_dim for head_dim in HEAD_DIMS):
        return f"the Hopper path takes head dimensions {', '.join(map(str, HEAD_DIMS))}"
    for name, is_on in (("softcap", options.softcap), ("ALiBi", options.alibi), ("dropout", options.dropout)):
        if is_on:
            return f"the Hopper path has no {name}"
    for name, tensor in tensors.items():
        if not has_tma_strides(tensor):
            return f"TMA cannot address {name} of strides {tensor.stride()}"
    return why_not_this_triton(gpu)


def has_tma_strides(tensor: Tensor) -> bool:
    """Whether TMA can address tiles of this tensor: strides of whole 16 bytes, none of them 0."""
    *outer, column = tensor.stride()
    sizes = tensor.shape[:-1]
    return bool(
        column == 1
        and all(stride % 8 == 0 and (stride or size == 1) for stride, size in zip(outer, sizes, strict=True))
    )


def fits_hopper(t: Forward) -> bool:
    return has_tma_addresses(t.q, t.k, t.v)


def _layout(columns: int, rank: int, bits: int) -> NVMMASharedLayout:
    # Tensors that warps read without TMA lie in shared memory as in global memory.
    if bits == 32:
        return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)
    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of `rows` rows and `columns` columns of one head of [T, H, D] or [B, H, S, D].

    Elements outside of the tensor read as zero. A batch is described in three dimensions where its strides allow: TMA
    is slower in four.
    """
    shape, strides, bits = list(tensor.shape), list(tensor.stride()), 8 * tensor.dtype.itemsize
    if tensor.dim() == 4:
        batch, heads, length, head_dim = shape
        if folds_heads(tensor):
            shape, strides = [length, batch * heads, head_dim], [strides[2], strides[1], 1]
        elif folds_rows(tensor):
            shape, strides = [batch * length, heads, head_dim], [strides[2], strides[1], 1]
        else:
            return TensorDescriptor(tensor, shape, strides, [1, 1, rows, columns], _layout(columns, 4, bits))
    row, head, _ = strides
    # A dimension of one may have any stride, also one that TMA does not take.
    if shape[1] == 1:
        head = shape[2]
    if shape[0] == 1:
        row = head * shape[1]
    return TensorDescriptor(tensor, shape, [row, head, 1], [rows, 1, columns], _layout(columns, 3, bits))


def folds_heads(tensor: Tensor) -> bool:
    """Whether the heads of all sequences of [B, H, S, D] lie at one distance."""
    batch, heads, _, _ = tensor.shape
    return batch == 1 or tensor.stride(0) == heads * tensor.stride(1)


def folds_rows(tensor: Tensor) -> bool:
    """Whether the rows of all sequences of [B, H, S, D] do."""
    return bool(tensor.stride(0) == tensor.shape[2] * tensor.stride(2))


def folded(*tensors: Tensor) -> int:
    """A bit for each, the first the lowest: FOLDED of `tiles.hopper.memory.coordinates`."""
    return sum((not folds_heads(tensor) and folds_rows(tensor)) << place for place, tensor in enumerate(tensors))


def order_of(num_segments: int, of_one: int) -> int:
    if num_segments == 1:
        return of_one
    return (BY_LENGTH if num_segments <= RANKED.value - 2 else CLOSED_FORM).value


def constants_of(
    q: Tensor, k: Tensor, launch: Config, options: AttentionOptions, registers: tuple[int, int, int]
) -> dict[str, Any]:
    """The build options of both directions."""
    consumer, producer, at_launch = registers
    return {
        "HEAD_DIM": q.shape[-1], "HEADS": q.shape[1], "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": options.left >= 0, "HAS_RIGHT": options.right >= 0, "STAGES": launch.num_stages,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer, "num_warps": 4, "maxnreg": at_launch,
        **PTXAS,
    }  # fmt: skip


def forward_config(q: Tensor, options: AttentionOptions, num_segments: int) -> tuple[Config, str]:
    """The forward's launch, and where it comes from.

    Shipped rows were measured with many segments. One segment, or a batch [B, H, S, D], whose heads are all one
    segment's, takes the launch of long segments. It takes tiles of two warpgroups where their waves of programs end
    sooner than those of three. Smaller blocks begin sooner where there is one wave; at head dimension 72 they are
    always faster.
    """
    rows, heads = (q.shape[2], q.shape[0] * q.shape[1]) if q.dim() == 4 else (q.shape[0], q.shape[1])
    launch, source = choose("attention_fwd_hopper", q, options, mean_length(rows, num_segments))
    if num_segments != 1 or any(row.launch is launch for row in settings.rows):
        return launch, source
    long, source = choose("attention_fwd_hopper", q, options, None, ())
    count = programs(q.device.index)
    return one_segment_config(long, q.shape[-1], rows, heads, count, options.masked, q.dim() == 4), source


def _forward_constants(t: Forward, options: AttentionOptions, launch: Config, folded: int) -> dict[str, Any]:
    head_dim = t.q.shape[-1]
    return {
        **constants_of(t.q, t.k, launch, options, registers(launch, head_dim, options.compute_dtype is not None)),
        "GROUPS": launch.block_m // 64, "BLOCK_N": launch.block_n, "OVERLAP": overlaps(launch, head_dim),
        "ORDER": _forward_order(t, launch, options),
        "HAS_LSE": options.has_lse, "HAS_SINKS": options.has_sinks,
        "OUT_STRIDE": 0 if _out_row(t) else t.out.stride(0 if t.cu_q is not None else 2),
        "FOLDED": folded, "launch_pdl": True,
    }  # fmt: skip


def _out_row(t: Forward) -> int:
    """The row stride of out where it is an argument at run time, since it follows from a batch; else 0."""
    if t.cu_q is not None:
        return 0
    row, head_dim = t.out.stride(2), t.q.shape[3]
    # out has the order of q, whose rows may be packed with those of keys and values.
    return 0 if are_settled([row, head_dim], [t.q.shape[1], t.k.shape[1]], head_dim) else row


def _forward_order(t: Forward, launch: Config, options: AttentionOptions) -> int:
    """The scheduler's order of tiles."""
    if t.cu_q is not None:
        return order_of(num_segments(t), SINGLE.value)
    batch, heads, rows, _ = t.q.shape
    count = programs(t.q.device.index)
    ends = pairs_ends(launch, rows, batch * heads, count, options.left, options.right)
    return (DENSE_ENDS if ends else DENSE_CUT).value


def _forward_scalars(t: Forward, options: AttentionOptions) -> tuple[Any, ...]:
    scale_and_bounds = options.scale * LOG2E, *options.bounds()
    if t.cu_q is not None:
        return 0, 0, 0, t.q.shape[0], t.k.shape[0], num_segments(t), *scale_and_bounds
    return *t.out.stride()[:2], _out_row(t), t.q.shape[2], t.k.shape[2], t.q.shape[0], *scale_and_bounds


def plan_forward_hopper(t: Forward, options: AttentionOptions, skipped_rows: int | None = None) -> Plan:
    """Plan tensors that `has_tma_addresses` allows.

    With skipped_rows, few of many segments are long, and the launch is that of long ones. Segments of up to so many
    rows are left to the kernel before, unless a boundary falls.
    """
    launch, source = forward_config(t.q, options, num_segments(t))
    if skipped_rows is not None:
        launch, source = choose("attention_fwd_hopper", t.q, options, None)
    bits = 0 if t.cu_q is not None else folded(t.q, t.k, t.v, t.out)
    # Main and tail of each but v.
    sizes = HEAD_DIMS[t.q.shape[-1]]
    main, tail, width = sizes.main, sizes.tail, sizes.v_columns
    columns = launch.block_n
    tiles = ((64, main), (64, tail), (columns, main), (columns, tail), (columns, width), (64, main), (64, tail))
    descriptors_of = Descriptors(*[partial(describe, rows=rows, columns=columns) for rows, columns in tiles])
    device = t.q.device
    constants = {**_forward_constants(t, options, launch, bits), "SKIPPED_ROWS": skipped_rows or 0}
    bound = Bound(_attention_fwd_hopper_kernel, (programs(device.index), 1), _forward_scalars(t, options), constants)

    def launch_forward(t: Forward) -> None:
        q, k, v, cu_q, cu_k, out, lse, _, sinks, _ = t
        if cu_q is not None:
            cu_q = cu_q.contiguous()
            cu_k = cu_q if cu_k is None else cu_k.contiguous()
        descriptors = descriptors_of(q, q, k, k, v, out, out)
        bound(out, lse, cu_q, cu_k, sinks, work_counters(device).acquire(), descriptors=descriptors)

    return Plan(launch_forward, {"attention_fwd_hopper": (launch, source)})


def plan_forward_fp32_hopper(t: Forward, options: AttentionOptions) -> Plan:
    """Plan dense fp32 inputs that one kernel casts to `compute_dtype` as it goes; out is not rounded."""
    sizes, dtype = HEAD_DIMS[t.q.shape[3]], options.compute_dtype
    launch = sizes.fp32
    halves = [tensor.new_empty(tensor.shape, dtype=dtype, device="meta") for tensor in (t.k, t.v)]
    constants = _forward_constants(t, options, launch, folded(t.q, *halves, t.out))
    heads, rows = t.k.shape[1], [t.k.stride(2), t.v.stride(2)]
    # Keys and values may be packed with queries.
    is_settled = are_settled([*rows, t.q.shape[3]], [heads, heads, t.q.shape[1]], t.q.shape[3])
    constants |= dict(zip(("K_STRIDE", "V_STRIDE"), rows if is_settled else (0, 0), strict=True))
    scalars = (*t.k.stride()[:2], *t.v.stride()[:2], *rows, *_forward_scalars(t, options))
    device, block = t.q.device, launch.block_n
    main, tail, width = sizes.main, sizes.tail, sizes.v_columns
    # q comes in one part, of whole columns.
    tiles = ((64, int(next_power_of_2(t.q.shape[3]))), (block, main), (block, tail), (block, width))
    descriptors_of = Descriptors(*[partial(describe, rows=height, columns=across) for height, across in tiles])
    num_counts = block_size(t.k.shape[0] * t.k.shape[1] + 1)
    bound = Bound(_attention_fwd_fp32_hopper_kernel, (programs(device.index), 1), scalars, constants)

    def launch_forward(t: Forward) -> None:
        k_half, v_half = (torch.empty(tensor.shape, dtype=dtype, device=device) for tensor in (t.k, t.v))
        counts = work_counters(device).acquire(num_counts)
        descriptors = descriptors_of(t.q, k_half, k_half, v_half)
        counter = work_counters(device).acquire()
        bound(t.k, t.v, k_half, v_half, t.out, t.lse, t.sinks, counts, counter, descriptors=descriptors)

    source = f"rule for {gpu().backend} {gpu().arch}: casts inputs as it goes"
    return Plan(launch_forward, {"attention_fwd_fp32_hopper": (launch, source)})
