"""Encode a batch of images of many sizes on all GPUs of a machine, or small ones in several processes on the CPU.

torchrun --nproc-per-node 4 examples/encode_ranks.py

Every rank takes the time alone, all at once; on the CPU they do so on the same cores.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_ops.distributed import encode_across_ranks, spread_images
from torch_ops.distributed.spread import balance_of
from torch_ops.models.qwen_vl import TOWERS, build_tower, from_config, from_transformers

# Patches of 16 x 16 pixels: photographs, a page, small pictures, and a video of 8 frames.
GRID = [(1, 28, 28), (1, 64, 64), (1, 120, 88), (1, 16, 24), (1, 28, 40), (8, 28, 28), (1, 40, 40), (1, 56, 56)]


def milliseconds(function: Callable[[], Any], device: str, rounds: int = 3) -> float:
    """The best of some calls, each from when all ranks are ready to when this one is done."""
    best = float("inf")
    for _ in range(rounds):
        dist.barrier(device_ids=[torch.cuda.current_device()] if device == "cuda" else None)
        begin = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 1000 * best


@torch.inference_mode()
def show(device: str, tiny: bool = False) -> None:
    """Prints what each rank takes, and the time of one rank alone and of all; `tiny` is for slow machines."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if device == "cuda" and not tiny:
        encoder = from_transformers(build_tower("L", dtype=torch.bfloat16, device=device))
    else:
        config = TOWERS["S"].config()
        config.depth, config.hidden_size, config.num_heads = 2, 144, 2
        encoder = from_config(config).eval().to(device)
    grid_thw = torch.tensor([(t, h // 4 // 2 * 2, w // 4 // 2 * 2) for t, h, w in GRID] if tiny else GRID)
    columns = encoder.patch_embed.proj.weight[0].numel()
    pixel_values = torch.randn(int(grid_thw.prod(1).sum()), columns).to(device, encoder.dtype)

    def alone() -> Any:
        return encoder(pixel_values, grid_thw)

    def spread() -> Any:
        return encode_across_ranks(encoder, pixel_values, grid_thw)

    difference = (alone().pooler_output - spread().pooler_output).abs().max().item()
    times = milliseconds(alone, device), milliseconds(spread, device)
    if rank:
        return
    shares = spread_images(grid_thw, ranks, balance_of(encoder))
    mean = sum(share.cost for share in shares) / ranks
    for each, share in enumerate(shares):
        parts = ", ".join(f"{part.frames} x {part.height} x {part.width}" for part in share.parts)
        print(f"rank {each}: {share.patches} patches, {share.cost / mean:.2f} of the mean cost ({parts})")
    print(f"alone {times[0]:.2f} ms, spread over {ranks} {times[1]:.2f} ms; largest difference {difference:.2g}")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        show(device, tiny=device == "cpu")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
