"""Images spread over the ranks of a process group: the plan, and what the ranks make of it (tests/models/ranks.py)."""

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.models import vision_config
from tests.models import ranks as group
from torch_ops.distributed import Part, encode_across_ranks, spread_images
from torch_ops.distributed.spread import BALANCE, balance_of, least_loaded
from torch_ops.models.families import FAMILIES

pytestmark = pytest.mark.no_interpret

costs = st.lists(st.integers(0, 50), max_size=7)
grids = st.lists(st.tuples(st.integers(0, 9), *[st.integers(0, 8).map(lambda n: 2 * n)] * 2), max_size=12)


def loads(items: list[int], chosen: list[int], ranks: int) -> list[int]:
    return [sum(cost for cost, rank in zip(items, chosen, strict=True) if rank == each) for each in range(ranks)]


@given(items=costs, ranks=st.integers(1, 3))
def test_the_largest_load_is_near_the_least_possible(items: list[int], ranks: int) -> None:
    largest = max(loads(items, least_loaded(items, ranks), ranks))
    best = min(max(loads(items, list(chosen), ranks)) for chosen in product(range(ranks), repeat=len(items)))
    assert 3 * ranks * largest <= (4 * ranks - 1) * best


@given(items=st.lists(st.integers(0, 10**6), min_size=1, max_size=200), ranks=st.integers(1, 16))
def test_no_rank_has_more_than_the_mean_and_one_item(items: list[int], ranks: int) -> None:
    largest = max(loads(items, least_loaded(items, ranks), ranks))
    assert ranks * largest <= sum(items) + (ranks - 1) * max(items)


def test_of_equals_the_first_rank_is_chosen() -> None:
    assert least_loaded([2, 5, 2, 2, 1], 3) == [1, 0, 2, 1, 2]
    assert least_loaded([], 2) == []


@given(images=grids, ranks=st.integers(1, 9))
def test_every_frame_has_one_place(images: list[tuple[int, int, int]], ranks: int) -> None:
    grid = torch.tensor(images, dtype=torch.int64).view(-1, 3)
    shares = spread_images(grid, ranks)
    assert len(shares) == ranks and shares == spread_images(images, ranks)
    for share in shares:
        assert [part.start for part in share.parts] == sorted(part.start for part in share.parts)
        assert share.patches == sum(part.patches for part in share.parts)
        assert share.cost == pytest.approx(
            sum(part.frames * (side + side**2 / BALANCE) for part in share.parts for side in [part.height * part.width])
        )
    # Laid side by side the parts are the batch, image by image.
    start = 0
    parts = sorted((part for share in shares for part in share.parts), key=lambda part: part.start)
    left = iter(parts)
    for t, h, w in images:
        frames = t if h * w else 0
        while frames:
            part = next(left)
            assert (part.start, part.height, part.width) == (start, h, w) and 0 < part.frames <= frames
            frames, start = frames - part.frames, start + part.patches
    assert next(left, None) is None and start == int(grid.prod(1).sum())
    whole = [part.cost for part in shares]
    frame = max((h * w + (h * w) ** 2 / BALANCE for t, h, w in images if t), default=0)
    assert max(whole) - min(whole) <= frame * (1 + 1e-9)


def test_what_cannot_be_spread_is_refused() -> None:
    for arguments, message in (
        (([(1, 2, 2)], 1.5), "ranks is 1.5, expected an integer"),
        (([(1, 2, 2)], 2, "x"), "balance is x, expected a positive number of patches"),
        ((None, 2), r"grid_thw is NoneType, expected a tensor or triples \(t, h, w\)"),
        (([(10**12, 0, 0)], 2), "grid_thw has .*, expected at most"),
    ):
        with pytest.raises(ValueError, match=f"^spread_images: {message}"):
            spread_images(*arguments)


def test_videos_are_parted_and_attention_counts() -> None:
    assert [share.parts for share in spread_images([(5, 4, 4)], 2)] == [
        (Part(0, 3, 4, 4),),
        (Part(48, 2, 4, 4),),
    ]
    # As many patches, but in one frame they attend to four times as many.
    images = [(1, 64, 64), *[(1, 32, 32)] * 4]
    by_patches, by_cost = spread_images(images, 2, float("inf")), spread_images(images, 2, 1024.0)
    assert [share.patches for share in by_patches] == [4096, 4096]
    assert [share.cost for share in by_cost] == [4096 + 4 * 4096, 4 * (1024 + 1024)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_balance_follows_the_configuration(model_type: str) -> None:
    """As many multiplications in attention as in the layers of the blocks, counted one by one."""
    family, config = FAMILIES[model_type], vision_config(model_type)
    width, inner = getattr(config, family.width), family.intermediate_size(config)
    length = balance_of(type("Encoder", (), {"config": config})())
    layers = 3 * width * width + width * width + len(family.mlp) * width * inner
    full = 1 if family.windows else config.depth
    assert config.depth * layers == pytest.approx(full * 2 * length * width)


def test_balance_of_what_is_not_known() -> None:
    assert balance_of(lambda pixels, grid: pixels) == BALANCE
    assert balance_of(torch.nn.Linear(2, 2)) == BALANCE
    config = vision_config("qwen3_vl_vision", hidden_size=1152, intermediate_size=4304, depth=27)
    assert balance_of(type("Encoder", (), {"config": config})()) == BALANCE
    config = vision_config("qwen2_5_vl_vision", fullatt_block_indexes=[])
    assert balance_of(type("Encoder", (), {"config": config})()) == float("inf")


def test_bad_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0, expected 1 or more"):
        spread_images([(1, 2, 2)], 0)
    with pytest.raises(ValueError, match="balance is nan, expected a positive number of patches"):
        spread_images([(1, 2, 2)], 2, float("nan"))
    with pytest.raises(ValueError, match=r"spread_images: grid_thw has .*, expected a tensor of shape \[n, 3\]"):
        spread_images(torch.zeros(3, dtype=torch.int64), 2)
    for rows in ([(1, 2, 2), (1, -2, 2)], torch.tensor([(1, 2, 2), (1, -2, 2)])):
        with pytest.raises(ValueError, match=r"spread_images: grid_thw\[1, 1\], the height, is -2, expected "):
            spread_images(rows, 1)
    for row in ((1, 2), (1, 2.0, 2), 4):
        with pytest.raises(ValueError, match=r"spread_images: grid_thw\[1\].* expected three integers \(t, h, w\)"):
            spread_images([(1, 2, 2), row], 1)
    assert spread_images([], 1) == spread_images(torch.zeros(0, 3, dtype=torch.int64), 1)


def test_a_process_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group is no process group, expected .*init_process_group"):
        encode_across_ranks(lambda pixels, grid: pixels, torch.zeros(4, 8), torch.tensor([[1, 2, 2]]))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of PyTorch has no gloo")
def test_ranks_on_the_cpu(tmp_path: Path) -> None:
    """Four processes, and groups of two and one among them."""
    group.start(4, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (2, 4))
def test_ranks_on_gpus(ranks: int, tmp_path: Path) -> None:
    devices = torch.cuda.device_count()
    if devices < ranks:
        pytest.skip(f"needs {ranks} GPUs, this machine has {devices}")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this build of PyTorch has no NCCL")
    group.start(ranks, "cuda", tmp_path)
