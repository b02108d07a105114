"""How the ops of packed attention are judged: outputs and every gradient, by the tolerance rule."""

from typing import Any

import torch

from torch_ops.testing import check_draws, poisoned, redrawn, references
from torch_ops.testing.cases import WindowAttnInputs
from torch_ops.testing.tolerance import Draw


def differentiate(function: Any, inputs: WindowAttnInputs, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """out, lse and, by autograd, all gradients of a weighted sum of both; in `dtype` where given."""
    q, k, v = (tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    out, lse = inputs.call(function, q=q, k=k, v=v)
    seen = torch.isfinite(lse)
    loss = (out * inputs.dout.to(out.dtype)).sum() + (lse[seen] * inputs.dlse.to(lse.dtype)[seen]).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v), materialize_grads=True)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def backward(inputs: WindowAttnInputs, out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """The backward reference at the inputs' dtype, from this out and lse."""
    tensors = (inputs.dout, inputs.dlse.to(lse.dtype), inputs.q, inputs.k, inputs.v, out, lse)
    grads = getattr(references, f"{inputs.op}_backward")(*tensors, *inputs.places, **inputs.options)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def verify(inputs: WindowAttnInputs) -> None:
    """The op against its reference, by the tolerance rule, with unwritten memory poisoned.

    Eager's gradients start, as the op's do, from an out and lse that were rounded to be saved.
    """
    check_draws(lambda seed: _judged(redrawn(inputs, seed)))


def _judged(inputs: WindowAttnInputs) -> Draw:
    dtype = inputs.q.dtype
    reference = getattr(references, inputs.op)
    with poisoned():
        actual = differentiate(getattr(torch.ops.vk, inputs.op), inputs)
    truth = differentiate(reference, inputs, torch.float64)
    out, lse = inputs.call(reference)
    saved_lse = truth["lse"].to(torch.promote_types(dtype, torch.float32))
    return actual, {"out": out, "lse": lse, **backward(inputs, truth["out"].to(dtype), saved_lse)}, truth
