"""Parts of the encoder's baselines: Transformers' tower with other attention and compiled blocks, an encoder of them.

Without this library, a user would call the fastest attention, compile what can be compiled, and reuse tables of the
grid.
"""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_ops.bench.encoder.rows import Features, Scene, Session, linear_patches, modeling, transformers_metadata
from torch_ops.bench.peers.packed import CUDNN, FLASH2, FLASH4

# (length, count) of each run of equal segments.
Runs = tuple[tuple[int, int], ...]
# q, k, v [T, H, D], cu_seqlens, runs.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Runs], Tensor]


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: Runs) -> Tensor:
    """A call for each run of equal segments."""
    outs, start = [], 0
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for length, count in runs:
            rows = slice(start, start + length * count)
            batches = [tensor[rows].unflatten(0, (count, length)).transpose(1, 2) for tensor in (q, k, v)]
            outs.append(functional.scaled_dot_product_attention(*batches).transpose(1, 2).flatten(0, 1))
            start += length * count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend_flash2(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: Runs) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max([length for length, _ in runs])
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out


def _flash4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: list[int], counts: list[int]
) -> Tensor:  # fmt: skip
    """Equal segments go to its function for batches."""
    interface = importlib.import_module("flash_attn.cute.interface")
    if len(lengths) == 1:
        out = interface.flash_attn_func(*(tensor.unflatten(0, (counts[0], lengths[0])) for tensor in (q, k, v)))
    else:
        places: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        places |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        out = interface.flash_attn_varlen_func(q, k, v, **places)
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(q.shape)


# Dynamo cannot follow what makes its kernels. As an op it leaves a compiled block whole; gradients are its own. Only
# compiled code pays for either.
_flash4_op = torch.library.custom_op("vk_bench::flash4", _flash4, mutates_args=())
_flash4_op.register_fake(lambda q, k, v, cu_seqlens, lengths, counts: q.new_empty(q.shape))
_flash4_with_gradients = torch.compiler.disable(_flash4)


def attend_flash4(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: Runs) -> Tensor:
    flash4: Any = _flash4
    if torch.compiler.is_compiling():
        flash4 = _flash4_with_gradients if torch.is_grad_enabled() else _flash4_op
    out: Tensor = flash4(q, k, v, cu_seqlens, [length for length, _ in runs], [count for _, count in runs])
    return out


ATTENTIONS: dict[str, Attend] = {"cudnn": attend_cudnn, "flash2": attend_flash2, "flash4": attend_flash4}
ATTENTION_IMPLS = {"cudnn": CUDNN, "flash2": FLASH2, "flash4": FLASH4}


def attention_class(attend: Attend) -> type[nn.Module]:
    """Transformers' attention of the tower with `attend` in the place of its interface."""
    base, rotated = modeling().Qwen3VLVisionAttention, modeling().apply_rotary_pos_emb_vision

    class Attention(base):  # type: ignore[misc, valid-type]
        def forward(
            self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any = None,
            runs: Runs = (), **kwargs: Any,
        ) -> Tensor:  # fmt: skip
            q, k, v = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
            q, k = rotated(q, k, *position_embeddings)
            return self.proj(attend(q, k, v, cu_seqlens, runs).flatten(1))

    return Attention


def twin(session: Session, attention: str, compiled: bool) -> Any:
    """The tower on the same parameters with this attention and a linear patch embedding, its blocks compiled or not.

    All blocks, and all implementations with the same attention, share what is compiled: one block.
    """

    def make() -> Any:
        tower = session.tower
        made = copy.deepcopy(tower, {id(kept): kept for kept in (*tower.parameters(), *tower.buffers())})
        kind = session.once(f"attention, {attention}", lambda: attention_class(ATTENTIONS[attention]))
        made.patch_embed.forward = partial(linear_patches, made.patch_embed)
        for block in made.blocks:
            block.attn.__class__ = kind
            if compiled:
                block.forward = partial(_compiled(session, "Qwen3VLVisionBlock"), block)
        return made.train(tower.training)

    return session.once(f"twin, {attention}, {compiled}", make)


def _compiled(session: Session, name: str) -> Any:
    """forward(module, ...) of a class of the tower."""
    return session.once(name, lambda: torch.compile(getattr(modeling(), name).forward, dynamic=False))


class Assembly:
    """Compiled blocks and mergers, a product for the patches; positions and rotary tables made once for the batch."""

    def __init__(self, scene: Scene, attention: str) -> None:
        self.tower = twin(scene.session, attention, compiled=True)
        self.merge = _compiled(scene.session, "Qwen3VLVisionPatchMerger")
        ready = transformers_metadata(scene)
        with torch.no_grad():
            taken = self.tower.pos_embed(ready["interp_indices"]) * ready["interp_weights"][:, :, None]
            self.positions = taken.sum(1).to(scene.dtype)
            # In the very shape in which the tower's own forward calls its blocks, so that nothing is compiled twice.
            self.block_inputs = {
                "cu_seqlens": ready["cu_seqlens"],
                "max_seqlen": ready["max_seqlen"],
                "position_embeddings": self.tower.rotary_pos_emb(self.positions, ready["position_ids"]),
                "runs": scene.row.runs,
            }

    def __call__(self, pixels: Tensor) -> Features:
        tower, taps = self.tower, []
        hidden = linear_patches(tower.patch_embed, pixels) + self.positions
        for layer, block in enumerate(tower.blocks):
            hidden = block(hidden, **self.block_inputs)
            if layer in tower.deepstack_visual_indexes:
                merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(layer)]
                taps.append(self.merge(merger, hidden))
        return hidden, self.merge(tower.merger, hidden), tuple(taps)
