"""Encode images with a Qwen3-VL vision tower on vk::window_attn.

python examples/encode_images.py examples/street.png [another.jpg ...]
"""

import sys
from pathlib import Path

import torch

from torch_ops.integrations.transformers import use_window_attn
from torch_ops.models.qwen_vl import build_tower, encode, open_image, preprocess, split_by_image


def main(paths: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    # Random weights; load_tower("path/to/Qwen3-VL-8B-Instruct", dtype, device) reads real ones.
    tower = use_window_attn(build_tower("S", seed=0, dtype=dtype, device=device))

    # Every image has its own size: all patches are packed into one sequence, grid_thw says where.
    pixel_values, grid_thw = preprocess([open_image(path) for path in paths])
    with torch.inference_mode():
        output = encode(tower, pixel_values.to(device, dtype), grid_thw)

    for path, features in zip(paths, split_by_image(output, grid_thw), strict=True):
        tokens, width = features.last_hidden_state.shape
        merged, out_width = features.pooler_output.shape
        print(f"{path}: {tokens} tokens of {width} -> {merged} for the language model, {out_width}")


if __name__ == "__main__":
    main(sys.argv[1:] or [str(Path(__file__).with_name("street.png"))])
