"""Fine-tune a vision tower with LoRA adapters on the ops of this library; a tiny tower, on the CPU.

python examples/finetune_tower.py
"""

import torch
from torch import nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from torch_ops.integrations.transformers import accelerate, restore


class LoRA(nn.Module):
    """A frozen linear layer, plus a product of low rank that learns."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=3, hidden_size=144, num_heads=2, intermediate_size=288, out_hidden_size=64,
        num_position_embeddings=64, deepstack_visual_indexes=[0],
    )  # fmt: skip
    tower = Qwen3VLVisionModel(config).requires_grad_(False)
    for block in tower.blocks:
        block.attn.qkv = LoRA(block.attn.qkv)
        block.mlp.linear_fc2 = LoRA(block.mlp.linear_fc2)

    # The tower is no part of a larger model here, so that the encoder is what accelerate returns.
    encoder = accelerate(tower).train()
    learned = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2)

    # Two images and a video, and features that they should have.
    grid_thw = torch.tensor([[1, 8, 6], [1, 4, 10], [2, 4, 4]])
    pixel_values = torch.randn(int(grid_thw.prod(1).sum()), 3 * 2 * 16 * 16)
    with torch.no_grad():
        target = encoder(pixel_values, grid_thw).pooler_output.roll(1, dims=1)

    for step in range(20):
        loss = nn.functional.mse_loss(encoder(pixel_values, grid_thw).pooler_output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")

    # Transformers' own module again, with what was learned.
    restored = restore(encoder)
    count = sum(parameter.numel() for parameter in learned)
    print(f"{type(restored).__name__} with {count} adapted parameters, trained in {len(learned)} tensors")


if __name__ == "__main__":
    main()
