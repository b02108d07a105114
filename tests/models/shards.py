"""Accelerated encoders in shards of FSDP, computed by the ranks of a process group; `test_sharding` starts them."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from compile_tests.models import GRID, draw_pixels, named_outputs, tiny_tower
from tests.models.verify import doubled
from torch_ops.integrations.transformers import accelerate
from torch_ops.models import graph_cache
from torch_ops.testing import check

IMAGES = torch.tensor(GRID)
# More than a layer of a merger holds and fewer than both, so that FSDP wraps the sequence of them.
SEQUENCE = 420_000

Sharding = Callable[[Any], Any]


def results(encoder: Any, pixels: Tensor) -> dict[str, Tensor]:
    """Outputs and the gradient of the pixels; parameters keep theirs."""
    pixels = pixels.clone().requires_grad_()
    # Transformers before 5.18 takes grids on the device of the weights alone.
    outputs = named_outputs(encoder(pixels, grid_thw=IMAGES.to(pixels.device)))
    torch.stack([each.float().square().mean() for each in outputs.values()]).sum().backward()
    assert pixels.grad is not None
    return {**{name: each.detach() for name, each in outputs.items()}, "pixels.grad": pixels.grad}


def gradients(encoder: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}


def with_gradients(encoder: Any, pixels: Tensor) -> dict[str, Tensor]:
    return {**results(encoder, pixels), **gradients(encoder)}


def _fsdp2(device: str, encoder: Any, parts: Callable[[Any], list[Any]], **options: Any) -> Any:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in parts(encoder):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(encoder, mesh=mesh, **options)


def _embeddings_apart(encoder: Any) -> list[Any]:
    embeddings = [encoder.patch_embed, *([] if encoder.pos_embed is None else [encoder.pos_embed])]
    return [*encoder.blocks, *embeddings]


def _layers(encoder: Any) -> list[Any]:
    return [each for each in encoder.modules() if isinstance(each, nn.Linear | nn.Conv3d | nn.Embedding)]


def _fsdp1(device: str, encoder: Any, policy: Callable[[Any], Any], original: bool) -> Any:
    at = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return FullyShardedDataParallel(
        encoder, auto_wrap_policy=policy(encoder), device_id=at, use_orig_params=original
    )  # fmt: skip


def shardings(device: str) -> dict[str, tuple[str, Sharding]]:
    """Ways to shard an encoder, and the tower to try each on."""
    # Windows, and a sequence of layers in the merger; taps and learned positions.
    windows, taps = "qwen2_5_vl_vision", "qwen3_vl_vision"
    second, first = partial(_fsdp2, device), partial(_fsdp1, device)
    offloading = CPUOffloadPolicy(pin_memory=device == "cuda")
    sizes, sequence = (partial(size_based_auto_wrap_policy, min_num_params=size) for size in (300, SEQUENCE))

    def blocks(encoder: Any) -> Any:
        return ModuleWrapPolicy({type(encoder.blocks[0])})

    return {
        "whole": (windows, partial(second, parts=lambda encoder: [])),
        "blocks": (windows, partial(second, parts=lambda encoder: [*encoder.blocks, encoder.merger])),
        "layers": (taps, partial(second, parts=_layers)),
        "embeddings apart, offloaded": (taps, partial(second, parts=_embeddings_apart, offload_policy=offloading)),
        "FSDP 1": (taps, partial(first, policy=blocks, original=True)),
        "FSDP 1, flat": (taps, partial(first, policy=blocks, original=False)),
        "FSDP 1, small": (taps, partial(first, policy=lambda _: sizes, original=True)),
        "FSDP 1, a sequence": (windows, partial(first, policy=lambda _: sequence, original=True)),
    }


def whole_gradients(encoder: Any) -> dict[str, Tensor]:
    """Gradients of all parameters, gathered; FSDP 1 has none to give for what it flattened."""
    if not isinstance(encoder, FullyShardedDataParallel):
        return {name: each.full_tensor() for name, each in gradients(encoder).items()}  # type: ignore[attr-defined]
    if not encoder._use_orig_params:
        return {}
    with FullyShardedDataParallel.summon_full_params(encoder, with_grads=True):
        return {name.replace("_fsdp_wrapped_module.", ""): each.clone() for name, each in gradients(encoder).items()}


def encoders_in_shards_compute_the_same(device: str) -> None:
    expected = {}
    for name, (model_type, shard) in shardings(device).items():
        if model_type not in expected:
            theirs = tiny_tower(model_type).to(device)
            pixels, exact = draw_pixels(theirs, IMAGES).to(device), doubled(theirs)
            expected[model_type] = pixels, with_gradients(theirs, pixels), with_gradients(exact, pixels.double())
        pixels, *others = expected[model_type]
        encoder = accelerate(tiny_tower(model_type).to(device))
        graphs = encoder.graphs
        encoder = shard(encoder)
        actual = results(encoder, pixels)
        actual.update({key: each.to(device) for key, each in whole_gradients(encoder).items()})
        assert len(actual) > 20 or name == "FSDP 1, flat"
        check(actual, *({key: each[key] for key in actual} for each in others))
        # Weights were given back meanwhile. The second call of a size would be captured.
        with torch.no_grad(), mock.patch.object(graph_cache, "DEVICES", ("cuda", "cpu")):
            for _ in range(2):
                outputs = named_outputs(encoder(pixels, grid_thw=IMAGES))
                check(outputs, *({key: each[key] for key in outputs} for each in others))
        assert graphs.captured == () and graphs.why_eager.startswith("FSDP gathers"), (name, graphs.why_eager)


BODIES = (encoders_in_shards_compute_the_same,)
