"""Counters that outlive a launch: whose they are, and when new ones are made, which waits for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_ops._core import counters as counters_module

pytestmark = pytest.mark.no_interpret


class _Gpu:
    """A device with a stream of this number, which may be capturing."""

    def __init__(self) -> None:
        self.stream = 1
        self.capturing = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    gpu = _Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(counters_module, "raw_cuda_stream", lambda index: gpu.stream)
    return gpu


class _WorkCounters(counters_module.WorkCounters):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.filled = 0

    def _fill(self, size: int) -> None:
        self.filled += 1
        self._fresh[size] += torch.zeros(3, max(size, 4), dtype=torch.int32)[:, :size].unbind()


def capturing(gpu: _Gpu, pool: _WorkCounters, launches: int, size: int = 1) -> list[Any]:
    gpu.capturing = True
    taken = [pool.acquire(size) for _ in range(launches)]
    gpu.capturing = False
    return taken


def pointers(counters: list[Any]) -> list[int]:
    return [counter.data_ptr() for counter in counters]


def test_a_known_stream_keeps_its_counter_when_all_are_taken(gpu: _Gpu) -> None:
    """Making new ones waits for the device, which an ordinary call never does."""
    pool = _WorkCounters()
    first = pool.acquire()
    captured = capturing(gpu, pool, 4)
    assert len({*pointers(captured), first.data_ptr()}) == 5
    assert pool.acquire() is first and pool.filled == 1
    gpu.stream = 2
    assert pool.acquire() is not first and pool.filled == 2


def test_counters_of_a_graph_come_back(gpu: _Gpu) -> None:
    pool = _WorkCounters()
    pool.acquire()
    for _ in range(5):
        counters: list[Any] = []
        with pool.recording_acquired(counters):
            taken = capturing(gpu, pool, 2)
        assert pointers(counters) == pointers(taken)
        pool.release(counters)
    assert pool.filled == 1


def test_counters_of_other_captures_are_not_lent(gpu: _Gpu) -> None:
    """Those before on the same stream, and those of another thread meanwhile, on its own."""
    pool = _WorkCounters()
    pool.acquire()
    capturing(gpu, pool, 1)
    counters: list[Any] = []
    with pool.recording_acquired(counters):
        gpu.stream = 2
        capturing(gpu, pool, 1)
        gpu.stream = 1
    assert counters == []


def test_more_are_made_before_a_capture_and_not_for_devices_without_the_path(gpu: _Gpu) -> None:
    pool = _WorkCounters()
    with pool.recording_acquired([]):
        pass
    assert pool.filled == 0
    pool.acquire()
    capturing(gpu, pool, 2)
    with pool.recording_acquired([]):
        assert pool.filled == 2


def test_counters_of_a_capture_that_failed_come_back_too(gpu: _Gpu) -> None:
    pool = _WorkCounters()
    pool.acquire()
    counters: list[Any] = []

    with pytest.raises(RuntimeError, match="out of memory"), pool.recording_acquired(counters):
        capturing(gpu, pool, 1)
        raise RuntimeError("out of memory")
    assert len(counters) == 1


@pytest.mark.parametrize(("count", "size"), [(1, 32), (32, 32), (33, 64), (1000, 1024)])
def test_blocks_have_few_sizes(count: int, size: int) -> None:
    assert counters_module.block_size(count) == size


def test_blocks_are_lent_as_single_counters_are(gpu: _Gpu) -> None:
    """Each size for itself, whichever a capture takes of several."""
    pool = _WorkCounters()
    single, block = pool.acquire(), pool.acquire(64)
    assert (single.numel(), block.numel(), pool.filled) == (1, 64, 2)
    assert pool.acquire(64) is block and pool.acquire() is single and pool.acquire(128) is not block
    for _ in range(4):
        counters: list[Any] = []
        with pool.recording_acquired(counters):
            taken = capturing(gpu, pool, 2, 64) + capturing(gpu, pool, 2)
        assert pointers(counters) == pointers(taken) and [each.numel() for each in counters] == [64, 64, 1, 1]
        assert len({*pointers(counters), single.data_ptr(), block.data_ptr()}) == 6
        pool.release(counters)
    assert pool.filled == 3


def test_a_capture_without_blocks_sets_its_own_to_zero(gpu: _Gpu) -> None:
    pool = _WorkCounters()
    pool.acquire(64)
    counters: list[Any] = []
    with pool.recording_acquired(counters):
        taken = capturing(gpu, pool, 3, 64)
    assert pointers(counters) == pointers(taken[:2])
    assert taken[2].data_ptr() not in pointers(counters) and not taken[2].any()


def test_large_blocks_are_kept_by_nobody(gpu: _Gpu) -> None:
    pool = _WorkCounters()
    size = counters_module.block_size(pool.LARGEST + 1)
    first, second = pool.acquire(size), pool.acquire(size)
    assert first is not second and first.numel() == size and not first.any()
    counters: list[Any] = []
    with pool.recording_acquired(counters):
        capturing(gpu, pool, 1, size)
    assert counters == [] and pool.filled == 0


def test_a_slab_holds_aligned_counters_of_a_size(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "to_keep", lambda make, device: make())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    pool = counters_module.WorkCounters(torch.device("cpu"))
    for size in (1, 32, pool.LARGEST):
        pool.acquire(size)
        left = pool._fresh[size]
        assert len(left) == pool.SLAB // max(size, 4) - 1 and {each.numel() for each in left} == {size}
        assert all(pointer % 16 == 0 for pointer in pointers(left))
