"""Segment attention over the ranks of a process group (tests/models/context_parallel.py)."""

from pathlib import Path

import pytest
import torch

from tests.models import context_parallel
from tests.models import ranks as group

pytestmark = pytest.mark.no_interpret


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of PyTorch has no gloo")
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    group.start(2, "cpu", tmp_path, context_parallel.BODIES)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (2, 4))
def test_ranks_on_gpus(ranks: int, tmp_path: Path) -> None:
    devices = torch.cuda.device_count()
    if devices < ranks:
        pytest.skip(f"needs {ranks} GPUs, this machine has {devices}")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this build of PyTorch has no NCCL")
    group.start(ranks, "cuda", tmp_path, context_parallel.BODIES)
