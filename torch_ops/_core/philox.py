"""The numbers of dropout, in ATen: Philox4x32 (Salmon et al., SC 2011), as `csrc_free_ops.tiles.dropout` takes them."""

import torch
from torch import Tensor

from torch_ops._core.device import host_tensor

ROUNDS = 7
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox(seed: Tensor, counter: tuple[Tensor, ...], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four words, in int64, for a seed of 64 bits and a counter of four words, which broadcast."""
    a, b, c, d = counter
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(rounds):
        # int64 holds the low 64 bits of a product of two words, whatever its sign.
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (
            ((second >> 32) & WORD) ^ b ^ low, second & WORD, ((first >> 32) & WORD) ^ d ^ high, first & WORD
        )  # fmt: skip
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return a, b, c, d


def keep_weights(seed: Tensor, streams: Tensor, queries: Tensor, num_keys: int, dropout: float) -> Tensor:
    """Which weights [*streams, queries, num_keys] are kept.

    `queries` are rows of a sequence, modulo 2^32. Streams are as in the kernels: the number of the sequence times the
    heads, plus the head.
    """
    fours = torch.arange((num_keys + 3) // 4, device=seed.device)
    counter = (
        fours, queries.to(torch.int64)[:, None] & WORD, streams.to(torch.int64)[..., None, None],
        torch.zeros((), dtype=torch.int64, device=seed.device),
    )  # fmt: skip
    words = torch.stack(torch.broadcast_tensors(*philox(seed.reshape(()), counter)), -1).flatten(-2)
    # In fp32, as the kernels have it.
    limit = int(host_tensor(dropout, torch.float32).double() * 2**32)
    return words[..., :num_keys] >= limit
