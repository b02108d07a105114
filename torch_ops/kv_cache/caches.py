"""Caches of keys and values for decoding: memory for each layer, and how many keys of it each sequence has.

Ordinary classes that hold tensors and call `vk::kv_cache_append`. Each layer counts for itself, on the device, so that
layers may be filled in any order, and so that a CUDA graph of a step goes on where the replay before it ended.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops._core.checks import refuse
from torch_ops.kv_cache.base import Cache, Lengths, check_size, static
from torch_ops.kv_cache.pages import Copies, Pages


class KVCache(Cache):
    """Keys and values of each layer in one tensor [batch, num_kv_heads, capacity, head_dim].

    Args:
        num_layers, batch, num_kv_heads, capacity, head_dim: its sizes; capacity is in positions of a sequence.
        dtype: of what is kept, which may be another than the model's; PyTorch's default where None.
        device: PyTorch's default where None.

    Raises:
        ValueError: names the argument, what was wanted and what came; of any method. Nothing is changed then.
    """

    def __init__(
        self, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        sizes = {"num_layers": num_layers, "batch": batch, "num_kv_heads": num_kv_heads, "capacity": capacity,
                 "head_dim": head_dim}  # fmt: skip
        for argument, size in sizes.items():
            check_size("KVCache", argument, size)
        super().__init__(num_layers, batch, (batch, num_kv_heads, capacity, head_dim), dtype, device)

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, seqlens) of a layer, as `torch_ops.attention_decode` takes them."""
        self._check_layer(index)
        return self.k[index], self.v[index], self.seqlens[index]

    def _check_room(self, k: Tensor, lengths: Tensor | None) -> None:
        if lengths is None and k.dim() == 4 and k.shape[2] > self.capacity:
            refuse("KVCache", "the number of tokens of k", f"at most the capacity, {self.capacity}", k.shape[2])

    def grow(self, capacity: int) -> None:
        """Makes room for more positions, and keeps what there is.

        In new memory: CUDA graphs that were captured before go on in the old, and have to be captured again.
        """
        self._grow(2, check_size("KVCache.grow", "capacity", capacity, self.capacity))

    def truncate(self, lengths: Lengths) -> None:
        """Leaves each sequence so many keys at most, in every layer, as after speculative tokens that were refused."""
        self._keep("KVCache.truncate", lengths)

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Sequence i becomes what sequence indices[i] was, as beams do.

        Tensors are permuted in their place, one by one, each by way of a copy. The values of a tensor are not looked
        at; PyTorch refuses wrong ones on the device.
        """
        if isinstance(indices, Tensor):
            chosen = self._on_device("KVCache.reorder", "indices", indices, torch.int64)
        else:
            each = self._on_host("KVCache.reorder", "indices", indices, 0, self.batch - 1)
            chosen = self._send(each, torch.int64)
        for tensor in (*self.k, *self.v, *self.seqlens):
            tensor.copy_(tensor.index_select(0, chosen))


class PagedKVCache(Cache):
    """Keys and values of each layer in a pool of pages [num_pages, num_kv_heads, page_size, head_dim].

    Page p of a sequence is page block_table[b, p] of every layer's pool. Pages are given out on the host, by
    `reserve`, and never by `append`. A page that is not there is -1 in the table, which is changed in its place.

    Args:
        num_layers, batch, num_kv_heads, num_pages, page_size, head_dim: its sizes. `attention_decode` takes pages whose
            size is a multiple of 16.
        dtype: of what is kept, which may be another than the model's; PyTorch's default where None.
        device: PyTorch's default where None.
        max_pages: that one sequence may have, columns of block_table; num_pages where None.

    Raises:
        ValueError: names the argument, what was wanted and what came; of any method. Nothing is changed then.
    """

    def __init__(
        self, num_layers: int, batch: int, num_kv_heads: int, num_pages: int, page_size: int, head_dim: int,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None, max_pages: int | None = None,
    ) -> None:  # fmt: skip
        max_pages = num_pages if max_pages is None else max_pages
        sizes = {"num_layers": num_layers, "batch": batch, "num_kv_heads": num_kv_heads, "num_pages": num_pages,
                 "page_size": page_size, "head_dim": head_dim, "max_pages": max_pages}  # fmt: skip
        for argument, size in sizes.items():
            check_size("PagedKVCache", argument, size)
        super().__init__(num_layers, batch, (num_pages, num_kv_heads, page_size, head_dim), dtype, device)
        self.page_size = page_size
        with torch.inference_mode(False):
            self.block_table = static(self.seqlens[0].new_full((batch, max_pages), -1))
        self._pages = Pages("PagedKVCache", num_pages, batch)
        self._least_reserved = 0

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._pages.free)

    @property
    def reserved(self) -> list[int]:
        """Positions that there are pages for, of each sequence."""
        return [len(table) * self.page_size for table in self._pages.tables]

    @property
    def _table(self) -> Tensor:
        return self.block_table

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(k, v, seqlens, block_table) of a layer, as `torch_ops.attention_decode` takes them."""
        self._check_layer(index)
        return self.k[index], self.v[index], self.seqlens[index], self.block_table

    def _check_room(self, k: Tensor, lengths: Tensor | None) -> None:
        # A graph would be bound to what is reserved when it is made.
        if lengths is None and k.dim() == 4 and not torch.compiler.is_compiling() and k.shape[2] > self._least_reserved:
            wanted = f"at most {self._least_reserved}, for which every sequence has pages (reserve more)"
            refuse("PagedKVCache", "the number of tokens of k", wanted, k.shape[2])

    def reserve(self, lengths: int | Sequence[int]) -> None:
        """Gives sequences pages for so many keys in all, those that they have among them: the same for all, or each.

        Where there are not enough, the error says how many are wanted and how many there are, and none is given out.
        """
        most = self.block_table.shape[1] * self.page_size
        each = self._on_host("PagedKVCache.reserve", "lengths", lengths, 0, most)
        if self._pages.reserve([-(-length // self.page_size) for length in each]):
            self._tell()

    def grow(self, num_pages: int, max_pages: int | None = None) -> None:
        """Makes room for more pages, in the pool and, with max_pages, of one sequence, and keeps what there is.

        In new memory: CUDA graphs that were captured before go on in the old, and have to be captured again.
        """
        op, columns = "PagedKVCache.grow", self.block_table.shape[1]
        check_size(op, "num_pages", num_pages, self.num_pages)
        if max_pages is not None:
            columns = check_size(op, "max_pages", max_pages, columns)
        self._grow(0, num_pages)
        self._pages.grow(num_pages)
        with torch.inference_mode(False):
            self.block_table = static(self.block_table.new_full((self.batch, columns), -1))
        self._tell()

    def truncate(self, lengths: Lengths) -> None:
        """Leaves each sequence so many keys at most, in every layer, as after speculative tokens that were refused.

        Lengths on the host also free the pages behind them. Those in a tensor free none, and are for caches none of
        whose pages are shared (`reorder`): what is then written would be in the way of others.
        """
        op = "PagedKVCache.truncate"
        if isinstance(lengths, Tensor):
            if self._pages.shared:
                refuse(op, "lengths", "integers on the host, since sequences share pages", "a tensor")
            return self._keep(op, lengths)
        each = self._on_host(op, "lengths", lengths, 0, None)
        pages = [-(-length // self.page_size) for length in each]
        self._copy(self._pages.cut(pages, [length % self.page_size > 0 for length in each]))
        self._keep(op, each)
        self._tell()
        return None

    def reorder(self, indices: Sequence[int], lengths: int | Sequence[int] | None = None) -> None:
        """Sequence i becomes what sequence indices[i] was, as beams do.

        Pages move with the table. Where a sequence is taken more than once, its full pages are shared and those after
        them copied. `lengths` are the keys that sequences have before the call; where None, they are read from the
        device, which waits for it.
        """
        op = "PagedKVCache.reorder"
        chosen = self._on_host(op, "indices", indices, 0, self.batch - 1)
        if lengths is None:
            counts = torch.stack(self.seqlens).clamp(min=0)
            fewest, most = torch.stack([counts.amin(0), counts.amax(0)]).tolist()
        else:
            fewest = most = self._on_host(op, "lengths", lengths, 0, None)
        full = [length // self.page_size for length in fewest]
        held = [-(-length // self.page_size) for length in most]
        self._copy(self._pages.reorder(chosen, full, held))
        places = self._send(chosen, torch.int64)
        for seqlens in self.seqlens:
            seqlens.copy_(seqlens.index_select(0, places))
        self._tell()

    def reset(self) -> None:
        """Every sequence has no keys and no pages."""
        self.truncate(0)

    def _copy(self, copies: Copies) -> None:
        if not copies:
            return
        sources, targets = self._send(list(zip(*copies, strict=True)), torch.int64)
        for pool in (*self.k, *self.v):
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _tell(self) -> None:
        """The device, what the host knows of pages."""
        columns = self.block_table.shape[1]
        rows = [table + [-1] * (columns - len(table)) for table in self._pages.tables]
        self.block_table.copy_(self._send(rows, torch.int32))
        self._least_reserved = min(self.reserved)


__all__ = ["KVCache", "PagedKVCache"]
