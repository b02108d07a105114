"""The same inputs with other numbers, for `check_draws`."""

import copy
from typing import TypeVar

import torch
from torch import Tensor

Inputs = TypeVar("Inputs")

# Tables of one angle each, so that neither can be drawn alone.
TABLES = ("cos", "sin")


def redrawn(inputs: Inputs, seed: int) -> Inputs:
    """A copy whose tensors hold their numbers in an order drawn by `seed`, each in its own strides; 0 is `inputs`.

    For tensors whose entries are drawn alike. Distributions stay as they were. Integers, tables of angles and shared
    storage stay as they are.
    """
    if seed == 0:
        return inputs
    drawn = copy.deepcopy(inputs)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in vars(drawn).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and name not in TABLES:
            _shuffle(tensor.detach(), generator)
    return drawn


def _shuffle(tensor: Tensor, generator: torch.Generator) -> None:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            # All entries are one in memory.
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    order = torch.randperm(tensor.numel(), generator=generator, device="cpu").to(tensor.device)
    tensor.copy_(tensor.flatten()[order].view(tensor.shape))
