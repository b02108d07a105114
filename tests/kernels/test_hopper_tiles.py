"""The tiles of the Hopper attention forward, chosen from sizes alone."""

from dataclasses import replace

import pytest

from csrc_free_ops.configs.attention import covered_width
from csrc_free_ops.configs.attention_hopper import (
    HEAD_DIMS,
    forward_rule,
    one_segment_config,
    overlaps,
    pairs_ends,
    registers,
)
from csrc_free_ops.configs.rows import HOPPER_CONFIGS, Config, shipped_rows

pytestmark = pytest.mark.no_interpret

FORWARD = HOPPER_CONFIGS["attention_fwd_hopper"]
# Rows and keys of a tile, and stages, on 132 multiprocessors; keys: head dimension, and rows of one segment of 16
# heads.
ONE_SEGMENT = {
    64: {256: (128, 64, 3), 1024: (128, 64, 3), 2048: (192, 128, 3), 2304: (192, 128, 3), 9216: (192, 128, 3)},
    72: {256: (128, 64, 3), 1024: (128, 64, 3), 2048: (128, 64, 3), 2304: (192, 128, 3), 9216: (192, 128, 3)},
    80: {256: (128, 64, 3), 1024: (128, 64, 3), 2048: (128, 128, 3), 2304: (192, 128, 3), 9216: (192, 128, 3)},
    96: {256: (128, 64, 2), 1024: (128, 64, 2), 2048: (128, 128, 2), 2304: (192, 128, 2), 9216: (192, 128, 2)},
    128: {256: (128, 128, 2), 2048: (128, 128, 2), 9216: (128, 128, 2)},
}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_segment_takes_the_tile_that_is_done_first(head_dim: int) -> None:
    long = forward_rule(covered_width(head_dim, 2), False)
    for rows, tile in ONE_SEGMENT[head_dim].items():
        launch = one_segment_config(long, head_dim, rows, 16, 132, False, False)
        assert (*launch.tile, launch.num_stages) == tile, rows


def test_narrow_heads_of_a_masked_batch_take_low_tiles_from_the_second_wave_on() -> None:
    long = Config(192, 64, 12, 3)
    assert one_segment_config(long, 64, 1024, 128, 132, True, True) == Config(128, 128, 8, 3)
    assert one_segment_config(long, 64, 1024, 16, 132, True, True) == Config(128, 64, 8, 3)
    assert one_segment_config(long, 64, 1024, 128, 132, True, False) == long


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_choice_is_a_launch_that_the_kernel_has_with_registers_for_it(head_dim: int) -> None:
    tiles = HEAD_DIMS[head_dim]
    measured = {
        row.launch for row in shipped_rows("h200") if (row.kernel, row.head_dim) == ("attention_fwd_hopper", head_dim)
    }
    chosen = {
        one_segment_config(long, head_dim, rows, heads, programs, masked, dense)
        for long in {tiles.unmasked, tiles.masked, *measured}
        for rows in (1, 200, 1024, 2048, 2304, 16384)
        for heads in (1, 16, 100)
        for programs in (78, 132)
        for masked in (False, True)
        for dense in (False, True)
    }
    assert measured and chosen | {tiles.fp32} <= set(FORWARD)
    for launch in chosen | {tiles.fp32}:
        for fp32 in (False, True) if launch.block_m == 128 else (False,):
            consumer, producer, at_launch = registers(launch, head_dim, fp32)
            assert 128 * (launch.block_m // 64 * consumer + producer) <= 65536
            # Threads begin with registers for all warps, whose number is a multiple of four.
            assert 32 * (launch.num_warps + 4) * at_launch <= 65536
            assert {each % 8 for each in (consumer, producer, at_launch)} == {0}
    assert all(overlaps(launch, head_dim) for launch in chosen if launch.block_m == 128)


def test_the_rule_takes_the_next_head_dimension_for_others() -> None:
    assert [forward_rule(width, False) for width in (16, 48, 64)] == [HEAD_DIMS[64].unmasked] * 3
    assert forward_rule(88, True) == HEAD_DIMS[96].masked
    assert forward_rule(256, False) == HEAD_DIMS[128].unmasked


def test_rows_from_both_ends_are_for_one_causal_wave() -> None:
    low, tall = HEAD_DIMS[128].unmasked, replace(HEAD_DIMS[64].unmasked, num_stages=2)
    assert pairs_ends(low, 1024, 12, 132, -1, 0)
    for launch, rows, heads, left, right in (
        (tall, 1024, 12, -1, 0), (low, 960, 12, -1, 0), (low, 1024, 8, -1, 0), (low, 1024, 17, -1, 0),
        (low, 1024, 12, 64, 0), (low, 1024, 12, -1, -1),
    ):  # fmt: skip
        assert not pairs_ends(launch, rows, heads, 132, left, right)
