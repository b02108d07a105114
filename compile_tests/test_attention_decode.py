"""The graph contract of `vk::attention_decode`, and the code of its kernels."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from compile_tests.contract.build import build, sampled, sass
from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject, assert_same_bits, compiled_by
from compile_tests.contract.trace import SM90, fake_gpu, recompiling_fails
from compile_tests.kernels import ATTEND, ATTENTION_DECODE
from csrc_free_ops.configs.decode import decode_splits
from csrc_free_ops.configs.rows import Config, Gpu
from torch_ops import attention_decode
from torch_ops.testing import references
from torch_ops.testing.cases import DECODE, DECODE_LAYOUTS, DecodeCase, make_decode_inputs

CASES = {case.name: case for case in DECODE}
with_lse = partial(attention_decode, return_lse=True)


def sized(batch: int, capacity: int, **changes: Any) -> DecodeCase:
    lengths = tuple(1 + (index * 31) % capacity for index in range(batch))
    return replace(CASES["one_token"], name=f"{batch}x{capacity}", lengths=lengths, capacity=capacity, **changes)


# Batches and capacities of calls that share one graph.
BATCHES = ((11, 40), (5, 100), (6, 17), (7, 300))
SIZES = tuple(sized(*size) for size in BATCHES)
BATCH, CAPACITY = (torch.export.Dim(name, min=2, max=65536) for name in ("batch", "capacity"))


def draw(case: DecodeCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_decode_inputs(case, dtype, DEVICE, seed)
    return Call.of(with_lse, inputs, (), grads={"out": None, "lse": None})


class TestGraphs(GraphContract):
    subjects = (
        Subject(
            "attention_decode", with_lse, references.attention_decode, draw, SIZES,
            moving={
                "q": {0: BATCH}, "k_cache": {0: BATCH, 2: CAPACITY}, "v_cache": {0: BATCH, 2: CAPACITY},
                "cache_seqlens": {0: BATCH},
            },
            kernels=ATTENTION_DECODE,
            # Small heads, because opcheck compares calls of static and symbolic size.
            checked=tuple(
                replace(CASES[name], head_dim=16)
                for name in (
                    "one_token", "speculative", "pages_16", "prefix_everything", "invariant", "bshd", "empty", "whole"
                )
            ),
            compiled=tuple(
                CASES[name] for name in ("speculative", "pages_16", "prefix_everything", "bshd", "column_strided")
            ),
            layouts=tuple(
                replace(CASES["bshd"], name=layout, layout=layout) for layout in (*DECODE_LAYOUTS, "column_strided")
            ),
            replayed=tuple(replace(CASES["pages_16"], lengths=lengths) for lengths in (
                CASES["pages_16"].lengths, tuple(length // 2 for length in CASES["pages_16"].lengths)
            )),
            autocast="follows",
            casts=("q", "k_cache", "v_cache"),
            batched="q",
        ),
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [0, 16], ids=["contiguous", "paged"])
def test_one_graph_splits_keys_at_fixed_positions(page_size: int) -> None:
    """A graph that does not know the capacity then gives the bits of eager calls."""
    function = partial(with_lse, batch_invariant=True)
    compiled = compiled_by("inductor" if DEVICE == "cuda" else "aot_eager", function, dynamic=True)
    with recompiling_fails():
        for size in BATCHES:
            call = draw(sized(*size, page_size=page_size), torch.float16)
            assert_same_bits(call.outcome(compiled), call.outcome(function))


@pytest.mark.parametrize(
    ("variant", "head_dim"), sampled(product(("whole", "plain", "pages_16", "pages_128"), (64, 128)))
)
def test_keys_come_16_bytes_at_a_time_while_others_are_used(variant: str, head_dim: int) -> None:
    """While as many of either number of columns as 128 KiB of K and V hold."""
    sizes = {} if head_dim == 128 else {"head_dim": head_dim}
    attend = ATTENTION_DECODE.builds("sm_90", variant, **sizes)[0]
    assert attend.launch.name == ATTEND
    ptx = attend.asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx
    stages, cols = attend.launch.kwargs["num_stages"], attend.launch.kwargs["BLOCK_N"]
    # In front of the loop and in it, each of K and V in rows of so many columns of 16 bytes among 128 threads.
    assert len(re.findall(r"cp\.async\.cg", ptx)) == stages * 2 * cols * (head_dim // 8) // 128
    assert stages == 3 and (stages - 1) * 2 * cols * head_dim * 2 == 2**17


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_parts_are_on_their_way_before_the_first_is_added(head_dim: int) -> None:
    """Sixteen of them and their exponents, each of which is read once; no index takes a division."""
    sizes = {} if head_dim == 128 else {"head_dim": head_dim}
    combine = ATTENTION_DECODE.builds("sm_90", "plain", **sizes)[-1]
    code = sass(combine)
    first_maximum = code.index("FMNMX")
    loads = len(re.findall(r"LDG", code))
    assert loads == code.count("LDG", 0, first_maximum) == (48 if head_dim == 72 else 32)
    assert not re.search(r"\b(div|rem)\.[su]", combine.asm["ptx"])


@pytest.mark.parametrize("variant", ATTENTION_DECODE.variants)
def test_kernels_that_may_begin_early_wait_before_they_read(variant: str) -> None:
    """Whatever came before them; where they are they find out meanwhile. Launches of traces carry no word of it."""
    for launch in ATTENTION_DECODE.launches(**ATTENTION_DECODE.variants[variant])["attention_decode"]:
        assert not launch.kwargs["OVERLAPS"] and "launch_pdl" not in launch.kwargs
        with fake_gpu(SM90):
            built = build(replace(launch, kwargs={**launch.kwargs, "OVERLAPS": True}), SM90)
        assert built.spilled == 0, str(built)
        ahead, after = built.asm["ptx"].split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in ahead and "%ctaid.x" in ahead
        assert "ld.global" in after and not re.search(r"\bld\.(global|volatile)|cp\.async|\bst\.global", ahead)


def test_splits_are_as_many_as_there_are_multiprocessors_for() -> None:
    """On 132 of them, each with room for one program; a row of K and V has 512 bytes."""
    h200 = Gpu("h200", "cuda", 90, 232448, 132)
    launch = Config(16, 128, 4, 3)

    def splits(batch: int, capacity: int) -> int:
        return decode_splits(h200, launch, batch * 8, capacity, 512)

    assert splits(1, 65536) == splits(1, 8192) == 16 and splits(5, 8192) == 3
    assert splits(16, 8192) == splits(64, 4096) == 1
    # 136 shares would leave all but four idle in a second wave.
    assert splits(17, 65536) == 12
    # Each split of a short cache has some blocks.
    assert splits(1, 1024) == 4 and splits(1, 10) == splits(0, 10) == 1
    assert decode_splits(h200, launch, None, None, 512) == decode_splits(h200, launch, None, 8192, 512)
