"""KV caches for decoding: memory for each layer, and the number of keys of each sequence in it.

The classes hold tensors and call `vk::kv_cache_append`. Each layer has its own counts on the device. Layers may be
filled in any order, and a CUDA graph of a step continues where the previous replay ended.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops._core.checks import refuse
from torch_ops.kv_cache.base import Cache, Lengths, check_size, check_sizes, publish, static
from torch_ops.kv_cache.pages import Copies, Pages


class KVCache(Cache):
    """Hold keys and values of each layer in one tensor [batch, num_kv_heads, capacity, head_dim].

    Args:
        num_layers, batch, num_kv_heads, capacity, head_dim: sizes; capacity is in positions of a sequence.
        dtype: dtype of the cache, which may differ from the model's. Default: PyTorch's default.
        device: device of the cache. Default: PyTorch's default.

    Raises:
        ValueError: for a bad argument of the constructor or a method; nothing changes then. The message names the
            argument, what was expected and what came.
    """

    def __init__(
        self, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        sizes = {"num_layers": num_layers, "batch": batch, "num_kv_heads": num_kv_heads, "capacity": capacity,
                 "head_dim": head_dim}  # fmt: skip
        num_layers, batch, num_kv_heads, capacity, head_dim = check_sizes("KVCache", sizes)
        super().__init__(num_layers, batch, (batch, num_kv_heads, capacity, head_dim), dtype, device)

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (k, v, seqlens) of a layer, as `torch_ops.attention_decode` takes them."""
        index = self._check_layer(index)
        return self.k[index], self.v[index], self.seqlens[index]

    def _check_room(self, k: Tensor, lengths: Tensor | None) -> None:
        if lengths is None and k.dim() == 4 and k.shape[2] > self.capacity:
            refuse("KVCache", "the number of tokens of k", f"at most the capacity, {self.capacity}", k.shape[2])

    def grow(self, capacity: int) -> None:
        """Make room for more positions and keep the contents.

        The cache moves to new memory, beside the old one until all is copied. CUDA graphs captured before still use the
        old memory and must be captured again.
        """
        self.k, self.v = self._grown(2, check_size("KVCache.grow", "capacity", capacity, self.capacity))

    def truncate(self, lengths: Lengths) -> None:
        """Keep at most so many keys of each sequence in every layer, as after refused speculative tokens.

        Negative lengths in a tensor count as 0.
        """
        publish(self.seqlens, self._kept("KVCache.truncate", lengths))

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Make sequence i the former sequence indices[i], as beam search does.

        Tensors stay where they are. The new order is made in as much memory again, and then copied. The values of an
        index tensor are not checked; PyTorch refuses wrong ones on the device.
        """
        if isinstance(indices, Tensor):
            chosen = self._on_device("KVCache.reorder", "indices", indices).to(torch.int64)
        else:
            each = self._on_host("KVCache.reorder", "indices", indices, 0, self.batch - 1)
            chosen = self._send(each, torch.int64)
        moved = [tensor.index_select(0, chosen) for tensor in (*self.k, *self.v)]
        publish([*self.k, *self.v, *self.seqlens], [*moved, *self._reordered(chosen)])


class PagedKVCache(Cache):
    """Hold keys and values of each layer in a pool of pages [num_pages, num_kv_heads, page_size, head_dim].

    Page p of a sequence is page block_table[b, p] of every layer's pool. `reserve` assigns pages on the host; `append`
    never does. A missing page is -1 in the table, which is changed in place.

    Args:
        num_layers, batch, num_kv_heads, num_pages, page_size, head_dim: sizes. `attention_decode` takes page sizes that
            are multiples of 16.
        dtype: dtype of the cache, which may differ from the model's. Default: PyTorch's default.
        device: device of the cache. Default: PyTorch's default.
        max_pages: largest number of pages of one sequence, the columns of block_table. Default: num_pages.

    Raises:
        ValueError: for a bad argument of the constructor or a method; nothing changes then. The message names the
            argument, what was expected and what came.
    """

    def __init__(
        self, num_layers: int, batch: int, num_kv_heads: int, num_pages: int, page_size: int, head_dim: int,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None, max_pages: int | None = None,
    ) -> None:  # fmt: skip
        max_pages = num_pages if max_pages is None else max_pages
        sizes = {"num_layers": num_layers, "batch": batch, "num_kv_heads": num_kv_heads, "num_pages": num_pages,
                 "page_size": page_size, "head_dim": head_dim, "max_pages": max_pages}  # fmt: skip
        num_layers, batch, num_kv_heads, num_pages, page_size, head_dim, max_pages = check_sizes("PagedKVCache", sizes)
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
        """Number of pages without a sequence."""
        return len(self._pages.free)

    @property
    def reserved(self) -> list[int]:
        """Number of positions of each sequence that have pages."""
        return [len(table) * self.page_size for table in self._pages.tables]

    @property
    def _table(self) -> Tensor:
        return self.block_table

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (k, v, seqlens, block_table) of a layer, as `torch_ops.attention_decode` takes them."""
        index = self._check_layer(index)
        return self.k[index], self.v[index], self.seqlens[index], self.block_table

    def _check_room(self, k: Tensor, lengths: Tensor | None) -> None:
        # A graph would be bound to what is reserved when it is made.
        if lengths is None and k.dim() == 4 and not torch.compiler.is_compiling() and k.shape[2] > self._least_reserved:
            wanted = f"at most {self._least_reserved}, for which every sequence has pages (reserve more)"
            refuse("PagedKVCache", "the number of tokens of k", wanted, k.shape[2])

    def reserve(self, lengths: int | Sequence[int]) -> None:
        """Assign pages so that sequences can hold so many keys in all: one number for all sequences, or one each.

        If pages do not suffice, the error says how many are needed and how many there are, and none is assigned.
        """
        most = self.block_table.shape[1] * self.page_size
        each = self._on_host("PagedKVCache.reserve", "lengths", lengths, 0, most)
        self._publish(self._pages.reserved([-(-length // self.page_size) for length in each]))

    def grow(self, num_pages: int, max_pages: int | None = None) -> None:
        """Make room for more pages in the pool and, with max_pages, of one sequence, and keep the contents.

        The cache moves to new memory, beside the old one until all is copied. CUDA graphs captured before still use the
        old memory and must be captured again.
        """
        op, columns = "PagedKVCache.grow", self.block_table.shape[1]
        num_pages = check_size(op, "num_pages", num_pages, self.num_pages)
        if max_pages is not None:
            columns = check_size(op, "max_pages", max_pages, columns)
        pages = self._pages.grown(num_pages)
        grown = self._grown(0, num_pages)
        with torch.inference_mode(False):
            block_table = static(self._table_of(pages, columns))
        (self.k, self.v), self.block_table, self._pages = grown, block_table, pages

    def truncate(self, lengths: Lengths) -> None:
        """Keep at most so many keys of each sequence in every layer, as after refused speculative tokens.

        Lengths on the host also free the pages behind them. Lengths in a tensor free none. They are for caches without
        shared pages (`reorder`), because later writes would reach pages of other sequences.
        """
        op = "PagedKVCache.truncate"
        if isinstance(lengths, Tensor):
            if self._pages.shared:
                refuse(op, "lengths", "integers on the host, since sequences share pages", "a tensor")
            publish(self.seqlens, self._kept(op, lengths))
            return
        each = self._on_host(op, "lengths", lengths, 0, None)
        counts = [-(-length // self.page_size) for length in each]
        pages, copies = self._pages.cut(counts, [length % self.page_size > 0 for length in each])
        self._publish(pages, copies, self._kept(op, each))

    def reorder(self, indices: Sequence[int], lengths: int | Sequence[int] | None = None) -> None:
        """Make sequence i the former sequence indices[i], as beam search does.

        Pages move with the table. If a sequence is taken more than once, its full pages are shared and later ones are
        copied. `lengths` are the keys of the sequences before the call. Without them they are read from the device,
        which waits for it.
        """
        op = "PagedKVCache.reorder"
        chosen = self._on_host(op, "indices", indices, 0, self.batch - 1)
        if lengths is None:
            counts = torch.stack(self.seqlens).clamp(min=0)
            fewest, most = torch.stack([counts.amin(0), counts.amax(0)]).tolist()
        else:
            fewest = most = self._on_host(op, "lengths", lengths, 0, None)
            for place, (length, reserved) in enumerate(zip(most, self.reserved, strict=True)):
                if length > reserved:
                    refuse(op, f"lengths[{place}]", f"at most {reserved}, for which the sequence has pages", length)
        full = [length // self.page_size for length in fewest]
        held = [-(-length // self.page_size) for length in most]
        pages, copies = self._pages.reordered(chosen, full, held)
        self._publish(pages, copies, self._reordered(self._send(chosen, torch.int64)))

    def reset(self) -> None:
        """Remove all keys and pages of every sequence."""
        self.truncate(0)

    def _publish(self, pages: Pages, copies: Copies = (), seqlens: Sequence[Tensor] = ()) -> None:
        """Make this the state: the pages, with copies of some of their contents, and the counts if they are given."""
        live, new = list(self.seqlens[: len(seqlens)]), list(seqlens)
        if copies:
            sources = self._send([source for source, _ in copies], torch.int64)
            for pool in (*self.k, *self.v):
                live += [pool[target] for _, target in copies]
                new += pool.index_select(0, sources).unbind(0)
        if pages.tables != self._pages.tables:
            live.append(self.block_table)
            new.append(self._table_of(pages, self.block_table.shape[1]))
        least = min(map(len, pages.tables)) * self.page_size
        if live:
            publish(live, new)
        self._pages, self._least_reserved = pages, least

    def _table_of(self, pages: Pages, columns: int) -> Tensor:
        """The block table, for the device."""
        return self._send([table + [-1] * (columns - len(table)) for table in pages.tables], torch.int32)


__all__ = ["KVCache", "PagedKVCache"]
