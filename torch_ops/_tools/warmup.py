"""`torch_ops.warmup`: build kernels ahead of the first request."""

from collections.abc import Iterable
from itertools import product

import torch

from torch_ops._core.registry import OPS

LAYOUTS = ("contiguous", "encoder", "qkv_view")


def warmup(
    head_dims: Iterable[int],
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    num_heads: Iterable[int] = (16,),
    mean_lengths: Iterable[int] = (64, 1024),
    layouts: Iterable[str] = ("contiguous", "encoder"),
    causal: bool = False,
    backward: bool = False,
    device: torch.device | str = "cuda",
) -> int:
    """Build `window_attn`'s kernels ahead of the first request; return the number of calls made.

    Every combination is built, for one segment and for more. Head dimension, number of heads and layout set the strides
    between rows, which are constants of a kernel.

    Args:
        head_dims, dtypes, num_heads: those of q, k and v, which have equally many heads. Default: bf16, 16 heads.
        mean_lengths: expected tokens per segment; launch rows of a GPU may differ for short and long ones. Default: 64,
            1024.
        layouts: "contiguous"; "qkv_view", views of one projection [T, 3, H, D]; "encoder", where v is such a view and q
            and k are contiguous. Default: "contiguous" and "encoder", the layout of Qwen-VL's encoders.
        causal: whether the kernels have a causal mask. Default: False.
        backward: whether to build the backward too, and the forward that keeps lse for it. Default: False.
        device: GPU to build for. Default: "cuda".

    Raises:
        ValueError: for another layout, and if there is no such GPU: nothing is built for the CPU.
    """
    if not torch.cuda.is_available() or torch.device(device).type != "cuda":
        raise ValueError(f"warmup: device is {str(device)!r}, expected a GPU that PyTorch finds here")
    layouts = tuple(layouts)
    for layout in layouts:
        if layout not in LAYOUTS:
            raise ValueError(f"warmup: layouts has {layout!r}, expected some of {', '.join(LAYOUTS)}")
    calls = 0
    shapes = product(head_dims, dtypes, num_heads, mean_lengths, layouts, (1, 2))
    for head_dim, dtype, heads, length, layout, segments in shapes:
        packed = torch.randn(segments * length, 3, heads, head_dim, device=device, dtype=dtype)
        views = [packed[:, index] for index in range(3)]
        q, k, v = views if layout == "qkv_view" else (*(view.contiguous() for view in views[:2]), views[2])
        if layout == "contiguous":
            v = v.contiguous()
        cu_seqlens = torch.arange(segments + 1, dtype=torch.int32, device=device) * length
        forward = OPS["window_attn"].overload
        forward(q, k, v, cu_seqlens, causal=causal, return_lse=False)
        if backward:
            q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
            out, _ = forward(q, k, v, cu_seqlens, causal=causal)
            out.backward(out.detach())
        calls += 1
    return calls
