"""The benchmark of `torch_ops.models.VisionAttention`: projection, attention of one image, projection.

Baselines are the module written down in PyTorch, on its own choice of attention, on cuDNN's and on FlashAttention-4's,
eager and compiled. A reference point attends to ready q, k and v, which is less work: the module is to come within a
tenth of that. `vk_compiled`, our module compiled, stands beside ours.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import torch_ops
from torch_ops.bench.encoder.peers import Attend, Runs, attend_cudnn, attend_flash4
from torch_ops.bench.measure.opbench import Call, Check, Cost, HostCall, Impl, OpBench, ours, runs_anywhere, select
from torch_ops.bench.measure.results import OURS
from torch_ops.bench.peers.packed import CUDNN, FLASH4
from torch_ops.bench.rooms.projections import bind, linear_cost, whole_checks
from torch_ops.models import VisionAttention
from torch_ops.testing import references
from torch_ops.testing.cases import (
    VISION_ATTENTION,
    VisionAttentionCase,
    VisionAttentionInputs,
    WindowAttnCase,
    make_vision_attention_inputs,
)

HOST_CASE = VisionAttentionCase("host", "so small that the device is never behind", 128, 1024, 16, 64)


def _shape(case: VisionAttentionCase) -> str:
    return f"{case.rows}x{case.width}, {case.num_heads}x{case.head_dim}{', turned' if case.turned else ''}"


def _bind_ours(case: VisionAttentionCase, inputs: VisionAttentionInputs, compiled: bool = False) -> Call:
    """Called as a user calls it: without tables and borders where it has defaults.

    The eager module remembers borders. A graph would make them in each call, so it takes ready ones, as the baselines
    do.
    """
    with torch.device("meta"):
        module = VisionAttention(case.width, case.num_heads, case.head_dim)
    module.qkv.weight, module.qkv.bias = nn.Parameter(inputs.qkv_weight), nn.Parameter(inputs.qkv_bias)
    module.proj.weight, module.proj.bias = nn.Parameter(inputs.proj_weight), nn.Parameter(inputs.proj_bias)
    leaves = {
        "x": inputs.x.detach().requires_grad_(),
        **{name.replace(".", "_"): parameter for name, parameter in module.named_parameters()},
    }
    given = {} if inputs.cos is None else {"cos": inputs.cos, "sin": inputs.sin}
    function: Callable[..., Tensor] = module
    if compiled:
        given["cu_seqlens"] = _borders(inputs)
        function = torch.compile(module, fullgraph=True, dynamic=False)
    return Call(lambda: function(leaves["x"], **given), leaves, inputs.dout)


def attend_default(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: Runs) -> Tensor:
    """One segment, by whatever PyTorch chooses."""
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


def written_down(attend: Attend, cu_seqlens: Tensor, x: Tensor, *arguments: Any) -> Tensor:
    """The module in PyTorch, with the rotation of Transformers; `arguments` are those of the reference after x."""
    qkv_weight, qkv_bias, proj_weight, proj_bias, cos, sin, num_heads = arguments
    q, k, v = functional.linear(x, qkv_weight, qkv_bias).unflatten(1, (3, num_heads, -1)).unbind(1)
    if cos is not None and sin is not None:
        q, k = references.rotated(q, cos, sin), references.rotated(k, cos, sin)
    out = attend(q, k, v, cu_seqlens, ((x.shape[0], 1),))
    return functional.linear(out.flatten(1), proj_weight, proj_bias)


def _borders(inputs: VisionAttentionInputs) -> Tensor:
    return torch.tensor([0, inputs.x.shape[0]], dtype=torch.int32, device=inputs.x.device)


def _bind_baseline(attend: Attend, compiled: bool, case: VisionAttentionCase, inputs: VisionAttentionInputs) -> Call:
    """Tables as wide as a head and the borders are made before the call."""
    if inputs.cos is not None and inputs.sin is not None:
        inputs = replace(inputs, cos=torch.cat([inputs.cos] * 2, 1), sin=torch.cat([inputs.sin] * 2, 1))
    function: Callable[..., Any] = written_down
    if compiled:
        # FlashAttention-4 with gradients cannot be followed.
        function = torch.compile(written_down, fullgraph=attend is not attend_flash4, dynamic=False)
    return bind(partial(function, attend, _borders(inputs)), inputs)


def _refuses(baseline: Impl) -> Callable[[Any, torch.dtype, torch.device], str]:
    """As an attention of this shape does."""
    return lambda case, dtype, device: baseline.refuses(
        WindowAttnCase(case.name, case.reaches, (case.rows,), case.num_heads, case.head_dim), dtype, device
    )


def _baselines() -> tuple[Impl, ...]:
    attentions: tuple[tuple[str, Attend, Any, str], ...] = (
        ("", attend_default, runs_anywhere, "scaled_dot_product_attention as PyTorch chooses"),
        ("cudnn", attend_cudnn, _refuses(CUDNN), CUDNN.about),
        ("flash4", attend_flash4, _refuses(FLASH4), FLASH4.about),
    )
    return tuple(
        Impl(
            f"{how}_{name}" if name else how, partial(_bind_baseline, attend, how == "compiled"),
            f"{say}the module in PyTorch, attention: {about}", refuses,
        )
        for how, say in (("eager", ""), ("compiled", "torch.compile of "))
        for name, attend, refuses, about in attentions
    )  # fmt: skip


def _bind_alone(case: VisionAttentionCase, inputs: VisionAttentionInputs) -> Call:
    """Attention of q, k and v as the projection makes them, but each [1, H, T, D] by itself."""
    with torch.no_grad():
        packed = functional.linear(inputs.x, inputs.qkv_weight, inputs.qkv_bias)
        q, k, v = packed.unflatten(1, (3, case.num_heads, -1)).permute(1, 2, 0, 3).contiguous()[:, None].unbind()
    leaves = {name: each.clone().requires_grad_() for name, each in {"q": q, "k": k, "v": v}.items()}
    return Call(lambda: functional.scaled_dot_product_attention(*leaves.values()), leaves, q.flip(2))


ALONE = Impl(
    "sdpa_alone", _bind_alone,
    "scaled_dot_product_attention of ready q, k and v [1, H, T, D], as PyTorch chooses: the baseline of which "
    "the module, projections and all, is to reach 0.9",
    reference_point="attends to ready q, k and v, without rotation and projections",
)  # fmt: skip
COMPILED = Impl(
    "vk_compiled", partial(_bind_ours, compiled=True), "torch.compile of torch_ops.models.VisionAttention", group=OURS
)
BASELINES = (ALONE, *_baselines())


def _checks(case: VisionAttentionCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    inputs = make_vision_attention_inputs(case, dtype, device, seed=1)
    return whole_checks(references.vision_attention, inputs, _shape(case), case, backward)


def _cost(inputs: VisionAttentionInputs, backward: bool) -> Cost:
    """Two products for each of a projection in the backward, five for attention's two."""
    rows, columns = inputs.x.shape[0], inputs.proj_weight.shape[1]
    attention = 4 * rows * rows * columns
    projections = 2 * rows * (inputs.qkv_weight.numel() + inputs.proj_weight.numel())
    cost = linear_cost(lambda *args: projections + attention, inputs, backward)
    return replace(cost, flops=cost.flops + attention // 2) if backward else cost


def _path(inputs: VisionAttentionInputs) -> str:
    """The path of attention."""
    head_dim = inputs.proj_weight.shape[1] // inputs.num_heads
    q, k, v = inputs.x.new_empty((3, inputs.x.shape[0], inputs.num_heads, head_dim)).unbind()
    return str(torch_ops.explain(torch_ops.window_attn, q, k, v, _borders(inputs))["path"])


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    inputs = make_vision_attention_inputs(HOST_CASE, dtype, device)
    ours, eager = _bind_ours(HOST_CASE, inputs), _bind_baseline(attend_default, False, HOST_CASE, inputs)
    return [
        HostCall("the module in eager PyTorch", eager.forward_alone),
        HostCall("the module in eager PyTorch with gradients", eager.forward),
        HostCall("VisionAttention", ours.forward_alone),
        HostCall("VisionAttention with gradients", ours.forward),
    ]


BENCH = OpBench(
    op="vision_attention", cases=partial(select, VISION_ATTENTION), profiled="attention_1024_4096", shape=_shape,
    inputs=make_vision_attention_inputs, checks=_checks, cost=_cost, path=_path,
    ours=ours(_bind_ours, "torch_ops.models.VisionAttention"), baselines=(COMPILED, *BASELINES),
    usual={"cuda": tuple(each.name for each in (COMPILED, *BASELINES)), "cpu": ("sdpa_alone", "eager")},
    host_calls=_host_calls,
)  # fmt: skip
