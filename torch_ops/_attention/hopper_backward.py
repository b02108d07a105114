"""The attention core's Hopper backward, for packed and dense calls: what `hopper` is for the forward."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.attention.hopper.bwd import _attention_bwd_hopper_kernel
from csrc_free_ops.attention.hopper.bwd_dq_finalize import (
    _attention_bwd_delta_dense_kernel,
    _attention_bwd_delta_kernel,
    _attention_bwd_round_acc2_kernel,
    _attention_bwd_round_kernel,
    first_columns,
)
from csrc_free_ops.attention.hopper.bwd_protocol import dq_acc_count, tile_columns
from csrc_free_ops.attention.hopper.bwd_small import _attention_bwd_small_hopper_kernel
from csrc_free_ops.attention.hopper.scheduler import BY_LENGTH, DENSE, EVEN, SINGLE
from csrc_free_ops.configs.attention import split_head_dim
from csrc_free_ops.configs.attention_hopper_backward import (
    BLOCK_M,
    BLOCK_N,
    DQ_ACC2_ROWS,
    FINALIZED_ROWS,
    NUM_WARPS,
    SMALL_STAGES,
    kv_stages,
    registers,
)
from csrc_free_ops.configs.rows import Config
from torch_ops._attention.choose import choose
from torch_ops._attention.hopper import constants_of, describe, folded, has_tma_strides, order_of
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.split import allocate_partial, plan_split_sum
from torch_ops._attention.tensors import Backward, num_segments, query_length
from torch_ops._core.counters import work_counters
from torch_ops._core.hopper import Descriptors, programs
from torch_ops._core.launch import WIDE_STRIDE, are_settled, dense_like, dense_strides, packed_strides
from torch_ops._core.plan import Bound, Plan, has_tma_addresses

# From 12 waves on, an order took up to 4 % less time at head dimension 128 and up to 2 % more at 80 (H200); 10 to 12
# were not measured.
MANY_WAVES = 10
# As rows would say it, of the kernel that has none, where gradients are made by the small kernel.
SMALL_CONFIG = Config(BLOCK_M, BLOCK_N, NUM_WARPS, SMALL_STAGES)


def _rows_back(total: int) -> int:
    """Distance of the two accumulators in rows, as `acc2_distance` is on the device."""
    return (-(-total // BLOCK_M) - 1) // 2 * BLOCK_M


def _describe_dq_acc2(part: Tensor, rows: int) -> TensorDescriptor:
    """Columns of the second dq accumulator, which lies in dq; `part` is dq as fp32, [T, H, half of the columns].

    The first half of a row's columns lies in an earlier row, which `dq_order` gives, and the second half in the row
    itself. In shared memory the halves follow each other, so strides cannot fall from the first to the last.
    """
    total, heads, width = part.shape
    back = _rows_back(total)
    row, head, _ = part.stride()
    shape, strides = [heads, total - back, 2, width], [head, row, back * row, 1]
    return TensorDescriptor(part, shape, strides, [1, rows, 2, width], NVMMASharedLayout(0, 32, rank=4))


def _tiles_together(q: Tensor, k: Tensor, segments: int, options: AttentionOptions) -> int:
    """How many tiles begin at blocks of their own, with a second dq accumulator (`dq_order`), or 1 for none.

    Those of one segment that run side by side, where they are few: the last would wait for all others at the end. With
    more than three waves of them it was no faster. TMA, which writes the second accumulator, takes tiles of powers of
    two: half of 64, and of 8 or 16 more. Semaphores of both must fit the first block of dq.
    """
    together = programs(q.device.index) // k.shape[1]
    tiles = -(-k.shape[0] // BLOCK_N)
    num_semaphores = 2 * (q.shape[0] // BLOCK_M + 3)
    has_room = q.shape[0] > 2 * BLOCK_M and num_semaphores * 4 <= BLOCK_M * q.shape[2] * q.itemsize
    few = segments == 1 and q.shape[2] <= 80 and tiles <= 3 * together
    return together if few and has_room and not options.masked else 1


def fits_small(q: Tensor, k: Tensor, segments: int, options: AttentionOptions) -> bool:
    """Whether dq and, beside it, dk and dv of one segment can be made by programs of their own, all at once.

    q and k are [T, H, D], or [B, H, S, D], whose heads are all one segment's. Wide heads leave no registers for masks.
    """
    batch, row = (q.shape[0], 2) if q.dim() == 4 else (1, 0)
    tiles = sum(-(-tensor.shape[row] // BLOCK_N) * tensor.shape[1] for tensor in (q, k)) * batch
    has_registers = q.shape[-1] <= 96 or not options.masked
    return segments == 1 and has_registers and tiles <= programs(q.device.index)


def _keeps_order(q: Tensor, k: Tensor, segments: int, deterministic: bool) -> bool:
    """Whether dq is added up in a fixed order. Sums begin at 0, so of two tiles any order gives the same.

    With several segments and many waves of tiles there is hardly any wait. In order, the first part is written instead
    of added to zeros.
    """
    waves = k.shape[0] // BLOCK_N * k.shape[1] / programs(q.device.index)
    return k.shape[0] > 2 * BLOCK_N and (deterministic or (segments > 1 and waves > MANY_WAVES))


def _dkdv_splits(q: Tensor, k: Tensor, options: AttentionOptions) -> int:
    """How many query heads of a dense call's group have programs of their own, or 1; their dk and dv are then added up.

    All of them, where programs for key heads alone would leave multiprocessors without work. With bounds that holds at
    the end too, since tiles then take unequally long.
    """
    group = q.shape[1] // k.shape[1]
    waves = -(-k.shape[2] // BLOCK_N) * k.shape[0] * k.shape[1] / programs(q.device.index)
    return group if waves <= (2 if options.masked else 0.5) else 1


def _bind_delta(t: Backward, options: AttentionOptions, ordered: bool = False, num_accs: int = 0) -> Bound:
    """Bind what makes delta of out and dout, and sets dq_acc and semaphores to 0.

    Packed: (out, lse, dout, dlse, cu_q, cu_k, delta, dq_acc, semaphores); dense: (out, lse, dout, dlse, delta, dq,
    semaphores), where semaphores are None if dq is not added up.
    """
    is_dense, head_dim = t.cu_q is None, t.q.shape[-1]
    main, tail = split_head_dim(head_dim, t.q.dtype.itemsize)
    constants = {
        "HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail, "HAS_DLSE": t.dlse is not None,
        "HAS_LEFT": options.left >= 0, "HAS_RIGHT": options.right >= 0,
        "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_stages": 1, "num_warps": NUM_WARPS, "launch_pdl": True,
    }  # fmt: skip
    if is_dense:
        batch, heads, length, _ = t.q.shape
        stride_unit, outer, rows, numbers = dense_strides(t.out, t.dout, t.dq)
        constants |= {
            **dict(zip(("STRIDE_OT", "STRIDE_DOT", "STRIDE_DQT"), rows, strict=True)),
            "STRIDE_UNIT": stride_unit,
        }
        scalars = (*outer, *numbers, heads, length, t.k.shape[2], *options.bounds())
        return Bound(_attention_bwd_delta_dense_kernel, (batch * heads, -(-length // BLOCK_M)), scalars, constants)
    segments, total_q = num_segments(t), t.q.shape[0]
    stride_unit, outer, (out_row, dout_row), numbers = packed_strides(t.out, t.dout)
    constants |= {
        "STRIDE_OT": out_row, "STRIDE_DOT": dout_row, "STRIDE_UNIT": stride_unit,
        "ORDERED": ordered, "DQ_ACCS": num_accs, "ONE_SEGMENT": segments == 1, "OVERLAPPED": True,
    }  # fmt: skip
    scalars = (*outer, *numbers, total_q, t.k.shape[0], segments, *options.bounds())
    grid = (total_q // BLOCK_M + segments + 2, t.q.shape[1])
    return Bound(_attention_bwd_delta_kernel, grid, scalars, constants)


def _tile_descriptors(head_dim: int) -> list[Any]:
    """Those of q, k, v and dout."""
    return [partial(describe, rows=BLOCK_M, columns=tile_columns(head_dim))] * 4


def _rows_are_settled(t: Backward) -> bool:
    """Whether row strides of dk, dv and dq are constants, since none follows from a batch."""
    gradients = t.dk, t.dv, t.dq
    rows, heads = [x.stride(2) for x in gradients], [x.shape[1] for x in gradients]
    # Offsets by numbers have 32 bits.
    return t.cu_q is not None or max(rows) > WIDE_STRIDE or are_settled(rows, heads, t.q.shape[3])


def _row_strides(t: Backward) -> dict[str, int]:
    if not _rows_are_settled(t):
        return {"STRIDE_DKT": 0, "STRIDE_DVT": 0, "STRIDE_DQT": 0}
    row = 2 if t.cu_q is None else 0
    return {"STRIDE_DKT": t.dk.stride(row), "STRIDE_DVT": t.dv.stride(row), "STRIDE_DQT": t.dq.stride(row)}


def _scalars(t: Backward, options: AttentionOptions) -> tuple[Any, ...]:
    """Strides between batches, heads and rows of dk, dv and dq, sizes, scale and bounds."""
    if t.cu_q is None:
        gradients = t.dk, t.dv, t.dq
        strides = (*(x.stride(0) for x in gradients), *(x.stride(1) for x in gradients))
        sizes = t.q.shape[2], t.k.shape[2], t.q.shape[0]
        rows = (0, 0, 0) if _rows_are_settled(t) else tuple([x.stride(2) for x in gradients])
    else:
        rows = (0, 0, 0)
        head = t.q.shape[2] if fits_small(t.q, t.k, num_segments(t), options) else 0
        strides = (0, 0, 0, head, head, head)
        sizes = t.q.shape[0], t.k.shape[0], num_segments(t)
    return *strides, *rows, *sizes, options.scale, *options.bounds()


def _folded(t: Backward) -> int:
    return folded(t.q, t.k, t.v, t.dout) if t.cu_q is None else 0


def small_constants(t: Backward, options: AttentionOptions) -> dict[str, Any]:
    constants = constants_of(t.q, t.k, SMALL_CONFIG, options, registers(t.q.shape[-1]))
    del constants["STAGES"]
    order = DENSE.value if t.cu_q is None else SINGLE.value
    return {**constants, "ORDER": order, **_row_strides(t), "FOLDED": _folded(t), "launch_pdl": True}


def pass_constants(
    t: Backward, options: AttentionOptions, launch: Config, *, ordered: bool, order: int, together: int = 1,
    dkdv_splits: int = 1,
) -> dict[str, Any]:  # fmt: skip
    head_dim = t.q.shape[-1]
    return {
        **constants_of(t.q, t.k, launch, options, registers(head_dim)),
        "ORDERED": ordered, "ORDER": order, "WAVE": together, **_row_strides(t), "FOLDED": _folded(t),
        "DKDV_SPLITS": dkdv_splits,
        # Keys of as many tiles as there is shared memory for.
        "KV_STAGES": kv_stages(head_dim),
        # Its programs begin while the kernel before ends, and do what needs none of its results.
        "launch_pdl": True,
    }  # fmt: skip


def fits_hopper_backward(t: Backward) -> bool:
    # A dout without tiles is copied.
    return has_tma_addresses(t.q, t.k, t.v, t.out, *((t.dout,) if has_tma_strides(t.dout) else ()))


def plan_backward_hopper(t: Backward, options: AttentionOptions) -> Plan:
    """Plan tensors that `has_tma_addresses` allows. Unless deterministic, dq may be added up in any order."""
    if has_tma_strides(t.dout):
        return _plan_for_tiles(t, options)
    # An expanded one, of a sum's backward, is copied.
    layout = torch.empty(t.dout.shape, dtype=t.dout.dtype, device="meta")
    plan = _plan_for_tiles(t._replace(dout=layout), options)
    return Plan(lambda t: plan.launch(t._replace(dout=t.dout.contiguous())), plan.kernels)


def _plan_for_tiles(t: Backward, options: AttentionOptions) -> Plan:
    if fits_small(t.q, t.k, num_segments(t), options):
        return _plan_small(t, options)
    return _plan_dense(t, options) if t.cu_q is None else _plan_packed(t, options)


def _plan_small(t: Backward, options: AttentionOptions) -> Plan:
    """Plan dq, and dk and dv, by programs of their own, where `fits_small`."""
    is_dense = t.cu_q is None
    batch, row = (t.q.shape[0], 2) if is_dense else (1, 0)
    grid = (batch * sum(-(-x.shape[row] // BLOCK_N) * x.shape[1] for x in (t.q, t.k)), 1)
    bound_delta = _bind_delta(t, options)
    descriptors_of = Descriptors(*_tile_descriptors(t.q.shape[-1]))
    bound = Bound(_attention_bwd_small_hopper_kernel, grid, _scalars(t, options), small_constants(t, options))

    def launch_backward(t: Backward) -> None:
        lse = t.lse.contiguous()
        dlse = lse if t.dlse is None else t.dlse.contiguous()
        delta = torch.empty_like(lse)
        cu_q = cu_k = None
        if is_dense:
            bound_delta(t.out, lse, t.dout, dlse, delta, t.dq, None)
        else:
            cu_q, cu_k = _boundaries(t)
            # delta stands in for dq_acc and semaphores, of which there are none.
            bound_delta(t.out, lse, t.dout, dlse, cu_q, cu_k, delta, delta, delta)
        bound(lse, delta, cu_q, cu_k, t.dk, t.dv, t.dq, descriptors=descriptors_of(t.q, t.k, t.v, t.dout))

    source = "one segment that leaves room for dq beside dk and dv"
    if is_dense:
        source = "so few tiles that there is room for dq beside dk and dv"
    return Plan(launch_backward, {"attention_bwd_small_hopper": (SMALL_CONFIG, source)})


def _boundaries(t: Backward) -> tuple[Tensor, Tensor]:
    assert t.cu_q is not None
    cu_q = t.cu_q.contiguous()
    return cu_q, cu_q if t.cu_k is None else t.cu_k.contiguous()


def _plan_packed(t: Backward, options: AttentionOptions) -> Plan:
    q, k, segments = t.q, t.k, num_segments(t)
    launch, source = choose("attention_bwd_hopper", q, options, query_length(t))
    ordered = _keeps_order(q, k, segments, options.deterministic)
    total_q, num_heads, head_dim = q.shape
    main, tail = split_head_dim(head_dim, q.dtype.itemsize)
    together = _tiles_together(q, k, segments, options) if ordered else 1
    # The producer of wider heads lacks registers for EVEN.
    order = order_of(segments, (EVEN if head_dim <= 80 else BY_LENGTH).value)
    tiles = total_q // BLOCK_M + segments + 2
    num_accs = dq_acc_count(together)
    # Semaphores lie in dq, which is written last, where it has room for them. Between rows of a strided dq lie dk and
    # dv, which are written before.
    num_semaphores = num_accs * num_heads * tiles
    semaphores_fit = t.dq.is_contiguous() and num_semaphores * 4 <= q.numel() * q.itemsize
    bound_delta = _bind_delta(t, options, ordered, num_accs)
    widths = (first_columns(head_dim) // 2, (head_dim - first_columns(head_dim)) // 2)
    has_tail = widths[1] > 0
    finalize_constants = {
        "STRIDE_DQT": t.dq.stride(0), "HEAD_DIM": head_dim, "BLOCK_M": FINALIZED_ROWS, "OVERLAPS": True,
        "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    rounded_rows = total_q
    if num_accs == 1:
        finalize_kernel = _attention_bwd_round_kernel
        finalize_scalars: tuple[Any, ...] = (total_q, options.scale)
        finalize_constants |= {"MAIN": main, "TAIL": tail, "num_stages": 1}
        descriptors_of = Descriptors(*_tile_descriptors(head_dim))
    else:
        finalize_kernel = _attention_bwd_round_acc2_kernel
        # The rows before those are rounded with them.
        rounded_rows -= _rows_back(total_q)
        finalize_scalars = (total_q, k.shape[0], options.scale)
        finalize_constants |= {"WAVE": together, "ACC_BLOCK": BLOCK_M, "BLOCK_N": BLOCK_N}
        describe_dq_acc2 = [partial(_describe_dq_acc2, rows=rows) for rows in DQ_ACC2_ROWS]
        descriptors_of = Descriptors(*_tile_descriptors(head_dim), *describe_dq_acc2[: 2 if has_tail else 1])
    device = q.device
    constants = pass_constants(t, options, launch, ordered=ordered, order=order, together=together)
    bound = Bound(_attention_bwd_hopper_kernel, (programs(device.index), 1), _scalars(t, options), constants)
    bound_finalize = Bound(
        finalize_kernel, (-(-rounded_rows // FINALIZED_ROWS), num_heads), finalize_scalars, finalize_constants
    )

    def launch_backward(t: Backward) -> None:
        lse, (cu_q, cu_k) = t.lse.contiguous(), _boundaries(t)
        dlse = lse if t.dlse is None else t.dlse.contiguous()
        # Before the kernel that the main one overlaps: it may be made of zeros here.
        counter = work_counters(device).acquire()
        delta = torch.empty_like(lse)
        dq_acc = torch.empty(num_heads * total_q * head_dim, dtype=torch.float32, device=device)
        if semaphores_fit:
            semaphores = t.dq.view(torch.int32)
        else:
            semaphores = torch.empty(num_semaphores, dtype=torch.int32, device=device)
        bound_delta(t.out, lse, t.dout, dlse, cu_q, cu_k, delta, dq_acc, semaphores)
        if num_accs == 1:
            descriptors = (*descriptors_of(t.q, t.k, t.v, t.dout), None, None)
            rounded: tuple[Tensor, ...] = (dq_acc, t.dq)
        else:
            dq_acc2 = t.dq.view(torch.float32)
            dq_acc2_tiles = dq_acc2.split(widths, 2) if has_tail else (dq_acc2,)
            descriptors = (*descriptors_of(t.q, t.k, t.v, t.dout, *dq_acc2_tiles), *(None,) * (not has_tail))
            rounded = (dq_acc, dq_acc2, t.dq, cu_q, cu_k)
        bound(lse, delta, cu_q, cu_k, dq_acc, semaphores, counter, t.dk, t.dv, None, descriptors=descriptors)
        bound_finalize(*rounded)

    return Plan(launch_backward, {"attention_bwd_hopper": (launch, source)})


def _plan_dense(t: Backward, options: AttentionOptions) -> Plan:
    """Plan a batch as one segment, whose heads are those of all sequences.

    dq is added up in order in any case: who adds last to a row rounds it, and knows so by the order.
    """
    launch, source = choose("attention_bwd_hopper", t.q, options, query_length(t))
    batch, heads, length, head_dim = t.q.shape
    lines, tiles = batch * heads, -(-length // BLOCK_M)
    dkdv_splits = _dkdv_splits(t.q, t.k, options)
    # Parts of dk and dv are as those of as many key heads as there are query heads.
    own = t
    if dkdv_splits > 1:
        part = dense_like(t.q.new_empty((batch, heads, t.k.shape[2], head_dim), device="meta"))
        own = t._replace(k=part, dk=part, dv=part)
    constants = pass_constants(own, options, launch, ordered=True, order=DENSE.value, dkdv_splits=dkdv_splits)
    constants["FOLDED"] = _folded(t)
    device = t.q.device
    bound_delta = _bind_delta(t, options)
    descriptors_of = Descriptors(*_tile_descriptors(head_dim))
    bound = Bound(_attention_bwd_hopper_kernel, (programs(device.index), 1), _scalars(own, options), constants)
    add_partial = plan_split_sum(t[9:12], 1, dkdv_splits) if dkdv_splits > 1 else None

    def launch_backward(t: Backward) -> None:
        lse = t.lse.contiguous()
        delta = torch.empty_like(lse)
        # Before the kernel that the main one overlaps: it may be made of zeros here.
        counter = work_counters(device).acquire()
        dq_acc = torch.empty(lines * length * head_dim, dtype=torch.float32, device=device)
        semaphores = torch.empty(lines * tiles, dtype=torch.int32, device=device)
        dk, dv = allocate_partial(t.dk, dkdv_splits), allocate_partial(t.dv, dkdv_splits)
        descriptors = (*descriptors_of(t.q, t.k, t.v, t.dout), None, None)
        bound_delta(t.out, lse, t.dout, lse if t.dlse is None else t.dlse.contiguous(), delta, t.dq, semaphores)
        bound(lse, delta, None, None, dq_acc, semaphores, counter, dk, dv, t.dq, descriptors=descriptors)
        if add_partial is not None:
            add_partial(t.dq, dk, dv, t.dq, t.dk, t.dv)

    return Plan(launch_backward, {"attention_bwd_hopper": (launch, source)})
