"""Transformers vision encoders on the ops of this library.

``accelerate(model)`` replaces the model's vision encoder by that of ``torch_ops.models``, on the same parameters.
``register_encoders()`` has Transformers build it. ``use_window_attn(model)`` changes the attention alone.

A Qwen-VL vision encoder packs all images into one sequence and keeps the boundaries in ``cu_seqlens``. With its default
attention (``sdpa``), every layer copies the boundaries to the host and calls attention once per segment. The functions
here make every layer one packed call instead:

    from torch_ops.integrations.transformers import restore, use_window_attn

    use_window_attn(model)   # a vision encoder, or any model that holds one
    restore(model)           # undoes either function

Works with transformers 5.5.3 to 5.24, forward and backward. The CPU tests run both ends of this range.
"""

from typing import Any, TypeVar, cast

import torch
from torch import nn

from torch_ops.integrations.transformers_encoder import (
    accelerate,
    holds_encoder,
    put_back,
    register_encoders,
    unregister_encoders,
)
from torch_ops.models._sharing import modules_of
from torch_ops.window_attn import window_attn

try:
    from transformers import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(
        "torch_ops.integrations.transformers needs transformers 5.5.3 or newer "
        f"({error}): pip install 'vk-ops[transformers]'"
    ) from error

# Transformers makes the packed call only for names that contain "flash".
ATTENTION_NAME = "vk_flash"

_FORMER = "_attention_before_window_attn"

ModelT = TypeVar("ModelT", bound=nn.Module)


def window_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run the attention interface function of Transformers as one ``window_attn`` call.

    ``query`` is ``[1, H, N, D]``, ``key`` and ``value`` are ``[1, H_kv, N_k, D]``; a tensor is copied only if its
    columns are not contiguous. ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (default: the former) are int32 ``[n + 1]`` on
    the device. Returns ``(out, None)`` with ``out`` ``[1, N, H, D]``.

    Nothing is read back to the host; ``max_length_q`` and ``max_length_k`` are accepted and not needed. (The encoder
    makes them itself, and reads the device for it, unless it is called with ``cu_seqlens`` and ``max_seqlen``.)

    Raises ValueError for features that the op lacks: dropout, a mask, a sliding window, attention sinks. It also
    refuses a batch other than 1 and a call without ``cu_seq_lens_q``.
    """
    if attention_mask is not None:
        raise ValueError(
            f"{ATTENTION_NAME}: attention_mask has shape {list(attention_mask.shape)}, expected None; "
            "give segments by cu_seq_lens_q"
        )
    if dropout:
        raise ValueError(f"{ATTENTION_NAME}: dropout is {dropout}, expected 0")
    if cu_seq_lens_q is None:
        raise ValueError(
            f"{ATTENTION_NAME}: cu_seq_lens_q is missing; only encoders that pack their segments "
            f"into one call are supported, and {type(module).__name__} made an unpacked one"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise ValueError(
                f"{ATTENTION_NAME}: {name} has shape {list(tensor.shape)}, expected [1, heads, tokens, head_dim]"
            )
    for name in ("sliding_window", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{ATTENTION_NAME}: {name} is given, expected None; it is not supported")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    out = window_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        None if cu_seq_lens_k is cu_seq_lens_q else cu_seq_lens_k,
        scale=scaling,
        causal=is_causal,
        softcap=softcap or 0.0,
    )
    return cast(torch.Tensor, out).unsqueeze(0), None


def register() -> str:
    """Register the attention with Transformers and return its name; harmless if called again.

    The name works in a config's ``_attn_implementation``, which ``use_window_attn`` sets. As ``attn_implementation=``,
    Transformers would look for a hub kernel of this name.
    """
    AttentionInterface.register(ATTENTION_NAME, window_attention_forward)
    return ATTENTION_NAME


def vision_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the vision encoders in ``model``, itself included; wrappers (PEFT, DDP, compiled) are fine.

    Raises TypeError if it has none whose attention Transformers lets us choose.
    """
    encoders = [
        module
        for module in modules_of(model)
        if isinstance(module, PreTrainedModel)
        and hasattr(module, "patch_embed")
        and hasattr(module, "blocks")
        and module._can_set_attn_implementation()
    ]
    if not encoders:
        raise TypeError(
            f"model is {type(model).__name__}, expected a Qwen-VL vision encoder of Transformers or a model that "
            "holds one, such as Qwen3VLVisionModel or Qwen3VLForConditionalGeneration"
        )
    return encoders


def use_window_attn(model: ModelT) -> ModelT:
    """Switch the vision encoder in ``model``, in place, to ``vk::window_attn``; return ``model``.

    Weights, text model and saved checkpoints stay as they are; calling it again changes nothing. As everywhere in
    Transformers, the choice is in the encoder's ``config``, so encoders built on one config object change together. An
    encoder of ``accelerate`` is on the op already and stays as it is. Raises TypeError for a model without an encoder.
    """
    register()
    if holds_encoder(model):
        return model
    for encoder in vision_encoders(model):
        former = encoder.config._attn_implementation
        if former == ATTENTION_NAME:
            continue
        setattr(encoder, _FORMER, former)
        # set_attn_implementation on a top-level model would look for a hub kernel of this name;
        # this is what it does for the sub-models of one.
        chosen = encoder.get_correct_attn_implementation(ATTENTION_NAME)
        encoder.config._attn_implementation = chosen
    return model


def restore(model: ModelT) -> ModelT:
    """Undo ``accelerate`` and ``use_window_attn``; return ``model``, or its replacement if it is an encoder itself.

    Modules that ``accelerate`` replaced return with the current parameters, buffers, adapters, modes and gradient
    checkpointing, whether trained, cast or moved. Everything else is left alone.

    Raises TypeError for a model without a vision encoder. Raises ValueError for an encoder of ours that got other
    modules than layers and norms, or was sharded or offloaded. It then stays in the model.
    """
    if holds_encoder(model):
        model = put_back(model)
        if holds_encoder(model):
            # Ours from the start, by `register_encoders` or by hand.
            return model
    for encoder in vision_encoders(model):
        if hasattr(encoder, _FORMER):
            # A choice made since then stays.
            if encoder.config._attn_implementation == ATTENTION_NAME:
                encoder.config._attn_implementation = getattr(encoder, _FORMER)
            delattr(encoder, _FORMER)
    return model


__all__ = [
    "ATTENTION_NAME",
    "accelerate",
    "register",
    "register_encoders",
    "restore",
    "unregister_encoders",
    "use_window_attn",
    "vision_encoders",
    "window_attention_forward",
]
