"""A tile that Hopper cannot hold fails to build, with a sentence that says why."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure

from compile_tests.attention import hopper_launches
from compile_tests.contract.build import build_now
from compile_tests.contract.trace import SM90, KernelLaunch, fake_gpu
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS
from csrc_free_ops.configs.attention_hopper_backward import BLOCK_M, BLOCK_N, NUM_WARPS
from csrc_free_ops.configs.rows import Config
from torch_ops.bench.measure.opbench import one_line


def _rows(head_dim: int) -> dict[str, Config]:
    backward = Config(BLOCK_M, BLOCK_N, NUM_WARPS, 2)
    return {"attention_fwd_hopper": HEAD_DIMS[head_dim].unmasked, "attention_bwd_hopper": backward}


def _forward(head_dim: int, fp32: bool) -> KernelLaunch:
    options: dict[str, Any] = {"batch": 2, "dtype": torch.float32} if fp32 else {}
    return next(iter(hopper_launches(_rows(head_dim), head_dim, **options).values()))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "changes", "sentence"),
    [
        (128, {"GROUPS": 4}, "two .*consumer warpgroups"),
        (64, {"STAGES": 5}, "16 named barriers"),
        (128, {"STAGES": 4}, "227 KiB of shared memory"),
        (128, {"CONSUMER_REGISTERS": 248}, "65536 registers"),
    ],
)
def test_a_tile_too_large_says_what_it_lacks(head_dim: int, changes: dict[str, int], sentence: str, fp32: bool) -> None:
    launch = _forward(head_dim, fp32)
    with fake_gpu(SM90), pytest.raises(CompileTimeAssertionFailure, match=sentence) as error:
        build_now(replace(launch, kwargs={**launch.kwargs, **changes}), SM90)
    # Footnotes of benchmarks have room for the sentence alone.
    assert re.search(f"^CompileTimeAssertionFailure: [^=]*{sentence}", one_line(error.value))


@pytest.mark.parametrize(
    ("head_dim", "changes", "sentence"),
    [
        (64, {"STAGES": 4}, "named barrier"),
        (64, {"STAGES": 1}, "STAGES must be 2 or 3"),
        (128, {"KV_STAGES": 2}, "227 KiB of shared memory"),
        (128, {"CONSUMER_REGISTERS": 248}, "65536 registers"),
    ],
)
def test_a_backward_too_large_says_what_it_lacks(head_dim: int, changes: dict[str, int], sentence: str) -> None:
    launch = hopper_launches(_rows(head_dim), head_dim)["_attention_bwd_hopper_kernel"]
    # The assertion is in a function that the kernel calls.
    with fake_gpu(SM90), pytest.raises(CompilationError) as error:
        build_now(replace(launch, kwargs={**launch.kwargs, **changes}), SM90)
    assert sentence in one_line(error.value)
