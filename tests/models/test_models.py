"""The vision encoder of the Qwen-VL families against Transformers' classes, and its metadata."""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import vision_utils

import torch_ops.models as models
from compile_tests.models import GRID, draw_pixels, full_tower, named_outputs, tiny_tower, vision_config
from tests.models.verify import KINDS, about, check_outputs, doubled, frozen, tiny_model
from torch_ops.models import (
    Padding,
    QwenVisionEncoder,
    VisionAttention,
    VisionSizes,
    from_config,
    from_transformers,
    qwen_vl,
    vision_metadata,
)
from torch_ops.models._chunks import split_images
from torch_ops.models.families import FAMILIES, family_key, vision_config_of
from torch_ops.models.vision_block import VisionBlock
from torch_ops.models.vision_metadata import CACHE_SIZE, precomputed_metadata
from torch_ops.testing import assert_close_to_reference, check, check_draws
from torch_ops.testing.tolerance import Draw

pytestmark = pytest.mark.no_interpret

IMAGES = torch.tensor(GRID)


def run(tower: nn.Module, pixels: Tensor, grid: Tensor = IMAGES, seed: int = 0, **named: Any) -> dict[str, Tensor]:
    """Outputs, and the gradients of the pixels and of every parameter, for gradients of the outputs drawn by `seed`."""
    pixels = pixels.detach().requires_grad_()
    outputs = named_outputs(tower(pixels, grid_thw=grid, **named))
    leaves = {"pixel_values": pixels, **dict(tower.named_parameters())}
    grads = [
        torch.randn(output.shape, generator=torch.Generator().manual_seed(index)).to(output)
        for index, output in enumerate(outputs.values(), seed * len(outputs))
    ]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), grads)
    named_gradients = {f"d {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {**{name: output.detach() for name, output in outputs.items()}, **named_gradients}


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(model_type, torch.float32) for model_type in FAMILIES]
    + [(model_type, dtype) for model_type in KINDS for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_transformers(model_type: str, dtype: torch.dtype) -> None:
    tower = tiny_tower(model_type, dtype)

    def draw(seed: int) -> Draw:
        pixels = draw_pixels(tower, IMAGES, dtype, seed)
        truth = run(doubled(tower), pixels.double(), seed=seed)
        eager = run(tower, pixels, seed=seed)
        actual = run(from_transformers(tower), pixels, seed=seed)
        assert actual.keys() == eager.keys()
        assert {name: tensor.dtype for name, tensor in actual.items()} == {
            name: tensor.dtype for name, tensor in eager.items()
        }
        return actual, eager, truth

    check_draws(draw)


@pytest.mark.parametrize("model_type", KINDS)
def test_output_has_transformers_class_and_order(model_type: str) -> None:
    tower = tiny_tower(model_type)
    pixels = draw_pixels(tower, IMAGES)
    encoder = from_transformers(tower)
    with torch.no_grad():
        theirs = tower(pixels, grid_thw=IMAGES, output_hidden_states=True)
        ours = encoder(pixels, grid_thw=IMAGES, output_hidden_states=True)
        assert type(ours) is type(theirs)
        check_outputs(ours, theirs, doubled(tower)(pixels.double(), grid_thw=IMAGES, output_hidden_states=True))
        as_tuple = encoder(hidden_states=pixels, grid_thw=IMAGES, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == len(theirs) - 1
    assert torch.equal(as_tuple[1], ours.pooler_output)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_state_dicts_load_both_ways(model_type: str) -> None:
    tower = tiny_tower(model_type)
    encoder = from_config(tower.config)
    assert list(encoder.state_dict()) != [] and encoder.state_dict().keys() == tower.state_dict().keys()
    encoder.load_state_dict(tower.state_dict())
    pixels = draw_pixels(tower, IMAGES)
    assert torch.equal(encoder(pixels, IMAGES)[0], from_transformers(tower)(pixels, IMAGES)[0])
    fresh = from_config(tower.config)
    tower.load_state_dict(fresh.state_dict())
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name)), name


def test_from_transformers_shares_the_very_parameters() -> None:
    tower = tiny_tower("qwen3_vl_vision").train()
    tower.blocks[0].requires_grad_(False)
    encoder = from_transformers(tower)
    assert encoder.training and encoder.dtype is torch.float32
    theirs = dict(tower.named_parameters())
    for name, parameter in encoder.named_parameters():
        assert parameter is theirs[name]
    assert not encoder.blocks[0].attn.qkv.weight.requires_grad
    pixels = draw_pixels(tower, IMAGES)
    before = tower(pixels, grid_thw=IMAGES).pooler_output
    optimizer = torch.optim.SGD((parameter for parameter in encoder.parameters() if parameter.requires_grad), lr=0.1)
    encoder(pixels, IMAGES).pooler_output.square().mean().backward()
    optimizer.step()
    after = tower(pixels, grid_thw=IMAGES)
    assert (after.pooler_output - before).abs().max() > 1e-3
    check_outputs(encoder(pixels, IMAGES), after, doubled(tower)(pixels.double(), grid_thw=IMAGES))
    tower.double()
    assert encoder.dtype is torch.float64


def test_encoder_stands_in_a_whole_model() -> None:
    model = tiny_model()
    pixels = draw_pixels(model.model.visual, IMAGES)
    tokens = torch.tensor([[token for t, h, w in GRID for token in (6, *[5] * (t * h * w // 4))]])
    named = {
        "input_ids": tokens,
        "pixel_values": pixels,
        "image_grid_thw": IMAGES,
        "mm_token_type_ids": (tokens == 5).int(),
    }
    with torch.no_grad():
        eager = model(**named).logits
        truth = doubled(model)(**{**named, "pixel_values": pixels.double()}).logits
        encoder = from_transformers(model)
        model.model.visual = encoder
        assert_close_to_reference(model(**named).logits, eager, truth, "logits")
    assert from_transformers(model) is encoder
    assert from_config(model.config).state_dict().keys() == encoder.state_dict().keys()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert encoder.is_gradient_checkpointing


def test_models_without_an_encoder_are_refused() -> None:
    with pytest.raises(TypeError, match="model is Linear with no vision encoders, .*Qwen3VLVisionModel"):
        from_transformers(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model is NoneType with no vision encoders, expected one of"):
        from_transformers(None)
    with pytest.raises(ValueError, match="config is Qwen3VLTextConfig .*, expected one of qwen2_vl_vision"):
        from_config(tiny_model().config.text_config)
    tower = tiny_tower("qwen3_vl_vision")
    tower.blocks[0].attn.qkv.adapter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="Qwen3VLVisionModel also holds blocks.0.attn.qkv.adapter; merge adapters"):
        from_transformers(tower)
    with pytest.raises(ValueError, match="window_size is 4, expected at least a merged cell, 8 pixels"):
        from_transformers(tiny_tower("qwen2_5_vl_vision", window_size=4))
    with pytest.raises(ValueError, match="hidden_act is 'gelu', expected silu"):
        from_config(vision_config("qwen2_5_vl_vision", hidden_act="gelu"))
    with pytest.raises(ValueError, match="hidden_act is 'relu', expected one of gelu"):
        from_config(vision_config("qwen3_vl_vision", hidden_act="relu"))


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_checkpointing_gives_the_same_gradients(
    model_type: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = from_transformers(tiny_tower(model_type, torch.float64)).train()
    pixels = draw_pixels(encoder, IMAGES)
    expected = run(encoder, pixels)
    computed: list[VisionBlock] = []
    step = VisionBlock.step
    monkeypatch.setattr(VisionBlock, "step", lambda self, *args: computed.append(self) or step(self, *args))
    encoder.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        # autograd.grad does not pass through it.
        pixels.requires_grad_()
        outputs = named_outputs(encoder(pixels, IMAGES))
        grads = [
            torch.randn(out.shape, generator=torch.Generator().manual_seed(i)) for i, out in enumerate(outputs.values())
        ]
        torch.autograd.backward(list(outputs.values()), grads)
        leaves = {"pixel_values": pixels, **dict(encoder.named_parameters())}
        actual = {**outputs, **{f"d {name}": leaf.grad for name, leaf in leaves.items()}}
    else:
        actual = run(encoder, pixels)
    assert len(computed) == 2 * len(encoder.blocks)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=about(name))
    computed.clear()
    encoder.eval()
    encoder(pixels, IMAGES)
    assert len(computed) == len(encoder.blocks)
    encoder.gradient_checkpointing_disable()
    assert not encoder.is_gradient_checkpointing


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("model_type", KINDS)
def test_autocast(model_type: str, dtype: torch.dtype) -> None:
    tower = tiny_tower(model_type)
    pixels = draw_pixels(tower, IMAGES)
    truth = run(doubled(tower), pixels.double())
    with torch.autocast("cpu", dtype):
        eager = run(tower, pixels)
        actual = run(from_transformers(tower), pixels)
    assert actual["pooler_output"].dtype is eager["pooler_output"].dtype is dtype
    assert actual[
        "d merger.mlp.0.weight" if FAMILIES[model_type].merger[0] == "ln_q" else "d pos_embed.weight"
    ].dtype is (torch.float32)
    check(actual, eager, truth)


def precomputed(encoder: QwenVisionEncoder, grid: Tensor) -> dict[str, Any]:
    """All that Transformers' helpers make for this family."""
    merge_size, config = encoder.spatial_merge_size, encoder.config
    made = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, merge_size),
        "max_seqlen": int((grid[:, 1] * grid[:, 2]).max()),
    }
    if encoder.pos_embed is not None:
        side = int(config.num_position_embeddings**0.5)
        made["interp_indices"], made["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, side, align_corners=True, spatial_merge_size=merge_size
        )
    if encoder.family.windows:
        made["window_index"], made["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grid, merge_size, config.window_size, config.patch_size
        )
    return made


@pytest.mark.parametrize("model_type", KINDS)
def test_precomputed_arguments_of_transformers(model_type: str) -> None:
    tower = tiny_tower(model_type).requires_grad_(False)
    encoder = from_transformers(tower)
    pixels = draw_pixels(encoder, IMAGES)
    eager, truth = tower(pixels, grid_thw=IMAGES), doubled(tower)(pixels.double(), grid_thw=IMAGES)
    given = precomputed(encoder, IMAGES)
    calls = [(None, given)]
    calls += [(IMAGES, {name: value for name, value in given.items() if name != left_out}) for left_out in given]
    calls += [(IMAGES, {name: value}) for name, value in given.items()]
    for grid, named in calls:
        check_outputs(encoder(pixels, grid, **named), eager, truth)
    # They are used: another order of segments gives other features.
    one_segment = torch.tensor([0, pixels.shape[0]], dtype=torch.int32)
    full = encoder(pixels, IMAGES, cu_seqlens=one_segment.long())
    assert (full.last_hidden_state - eager.last_hidden_state).abs().max() > 1e-3


def test_a_window_order_of_other_patches_is_refused() -> None:
    encoder = frozen("qwen2_5_vl_vision")
    pixels, given = draw_pixels(encoder, IMAGES), precomputed(encoder, IMAGES)
    for change, wanted in (
        ({"window_index": given["window_index"][:-1]}, "69, expected 70 entries, the merged cells of the 280 patches"),
        ({"position_ids": given["position_ids"][:4]}, "70, expected 1 entries, the merged cells of the 4 patches"),
    ):
        with pytest.raises(ValueError, match=f"vision encoder: window_index has {wanted}"):
            encoder(pixels, IMAGES, **{**given, **change})


grids = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 11).map(lambda n: 2 * n), st.integers(1, 11).map(lambda n: 2 * n)),
    min_size=1,
    max_size=4,
)


@given(images=grids)
def test_metadata_is_that_of_transformers(images: list[tuple[int, int, int]]) -> None:
    grid = torch.tensor(images)
    metadata = vision_metadata(grid, VisionSizes(80, window=4))
    assert torch.equal(metadata.cu_seqlens, vision_utils.get_vision_cu_seqlens(grid))
    index, borders = vision_utils.get_vision_window_index(grid, 2, 112, 14)
    assert torch.equal(metadata.window_index, index)
    assert torch.equal(metadata.cu_window_seqlens, borders)
    assert torch.equal(metadata.reverse_index, torch.argsort(index))
    positions = vision_utils.get_vision_position_ids(grid, 2).view(-1, 4, 2)[index].flatten(0, 1)
    eager, truth = (
        (positions[..., None] * (1 / 10000 ** (torch.arange(0, 40, 2, dtype=dtype) / 40))).flatten(1)
        for dtype in (torch.float32, torch.float64)
    )
    assert_close_to_reference(metadata.cos, eager.cos(), truth.cos(), "cos")
    assert_close_to_reference(metadata.sin, eager.sin(), truth.sin(), "sin")
    assert metadata.total == int(grid.prod(1).sum())
    plain = vision_metadata(grid, VisionSizes(80))
    assert torch.equal(plain.cos.view(-1, 4, 40)[index].flatten(0, 1), metadata.cos)
    assert plain.window_index is None and plain.cu_window_seqlens is None


def test_function_of_checkpointing_is_no_method() -> None:
    """From Python 3.14 on a `partial` of a class is bound to the instance, unless it is static."""
    assert isinstance(inspect.getattr_static(VisionBlock, "_gradient_checkpointing_func"), staticmethod)


def test_metadata_is_remembered_and_bounded() -> None:
    sizes = VisionSizes(72)
    with torch.inference_mode():
        first = vision_metadata(IMAGES, sizes)
    assert vision_metadata(IMAGES.clone().int(), sizes) is first
    assert not any(tensor.is_inference() or tensor._is_view() for _, tensor in first.tensors())
    assert vision_metadata(IMAGES, replace(sizes, theta=100.0)) is not first
    assert vision_metadata(IMAGES, sizes, padding=Padding(rows=1000)) is not first
    for width in range(1, CACHE_SIZE + 1):
        vision_metadata(torch.tensor([[1, 2, 2 * width]]), sizes)
    assert vision_metadata(IMAGES, sizes) is not first


def test_a_video_of_no_frames_and_no_image_at_all() -> None:
    encoder = frozen("qwen2_5_vl_vision")
    empty = torch.zeros((0, 3), dtype=torch.int64)
    with_empty = torch.cat([IMAGES[:1], torch.tensor([[0, 4, 4]]), IMAGES[1:]])
    pixels = draw_pixels(encoder, IMAGES)
    assert torch.equal(encoder(pixels, with_empty)[1], encoder(pixels, IMAGES)[1])
    output = encoder(pixels[:0], empty)
    assert output.last_hidden_state.shape == (0, 160) and output.pooler_output.shape == (0, 40)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_was_set_on_modules_counts_or_is_refused(model_type: str) -> None:
    def activation(tower: nn.Module) -> None:
        mlp = tower.blocks[0].mlp
        setattr(mlp, "act_fn" if hasattr(mlp, "act_fn") else "act", nn.ReLU())

    def eps(tower: nn.Module) -> None:
        norm = tower.blocks[0].norm2
        setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.5)

    def scale(tower: nn.Module) -> None:
        tower.blocks[0].attn.scaling = 0.01

    tower = tiny_tower(model_type)
    scale(tower)
    with pytest.raises(ValueError, match=r"^from_transformers: blocks\.0\.attn\.scaling is 0\.01, expected .*, by"):
        from_transformers(tower)
    tower = tiny_tower(model_type).requires_grad_(False)
    pixels = draw_pixels(tower, IMAGES)
    for change in (activation, eps):
        before = tower(pixels, grid_thw=IMAGES)
        change(tower)
        eager, truth = tower(pixels, grid_thw=IMAGES), doubled(tower)(pixels.double(), grid_thw=IMAGES)
        assert (eager[0] - before[0]).abs().max() > 1e-2
        check_outputs(from_transformers(tower)(pixels, IMAGES), eager, truth)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"grid_thw has shape \[3\], expected a tensor of shape \[n, 3\]"),
        ([[1, 2, 2]], "grid_thw is list, expected a tensor"),
        (torch.ones(1, 3), "grid_thw has torch.float32, expected an integer dtype"),
        (
            torch.tensor([[1, 2, 2], [1, 2, 3]]),
            r"grid_thw\[1, 2\], the width, is 3, expected at least 0 and a multiple of 2",
        ),
        (torch.tensor([[1, -2, 2]]), r"grid_thw\[0, 1\], the height, is -2, expected at least 0 and a multiple"),
        (torch.ones(1, 3, dtype=torch.int64, device="meta"), "grid_thw is a tensor on the meta device, expected"),
        (torch.tensor([[-1, 2, 2]]), r"grid_thw\[0, 0\], frames, is -1, expected at least 0"),
        (
            torch.ones(1, 3, dtype=torch.int64).to_sparse(),
            "grid_thw is of layout .*, expected a dense tensor",
        ),
        (torch.tensor([[1, 2, 2], [2**40, 0, 0]]), f"grid_thw has {2**40 + 1}, expected at most {2**24} frames"),
    ],
)
def test_bad_grids_are_refused(grid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vision_metadata(grid, VisionSizes(72))


@pytest.mark.parametrize("grid", [[[1, 2, 2]], torch.ones(3)], ids=str)
def test_helpers_refuse_what_is_no_grid(grid: Any) -> None:
    encoder = frozen("qwen3_vl_vision")
    output = encoder(draw_pixels(encoder, IMAGES), IMAGES)
    with pytest.raises(ValueError, match="^encode: grid_thw .* expected a tensor of shape"):
        qwen_vl.encode(encoder, draw_pixels(encoder, IMAGES), grid)
    with pytest.raises(ValueError, match="^split_by_image: grid_thw .* expected a tensor of shape"):
        qwen_vl.split_by_image(output, grid)


def test_metadata_of_another_encoder_is_refused() -> None:
    """Without a word it would be another order of rows, or images that see each other."""
    with_windows, without = frozen("qwen2_5_vl_vision"), frozen("qwen2_vl_vision")
    for encoder, other, message in (
        (with_windows, without, "without windows, expected with windows, as the encoder is"),
        (without, with_windows, "with windows, expected without windows, as the encoder is"),
    ):
        pixels, metadata = draw_pixels(encoder, IMAGES), vision_metadata(IMAGES, other.sizes)
        with pytest.raises(ValueError, match=r"metadata is .*, expected made for encoder\.sizes = VisionSizes\("):
            encoder(pixels, metadata=metadata)
        # A clone, like metadata that a compiler takes apart, may hold tensors alone.
        with pytest.raises(ValueError, match=f"metadata is {message}"):
            encoder.encode_packed(pixels, replace(metadata, sizes=None))
    turned = vision_metadata(IMAGES, replace(without.sizes, theta=100.0))
    with pytest.raises(ValueError, match="metadata is .*, expected made for encoder.sizes"):
        without(draw_pixels(without, IMAGES), metadata=turned)


def test_bad_calls_are_refused() -> None:
    encoder = frozen("qwen3_vl_vision")
    pixels = draw_pixels(encoder, IMAGES)
    with pytest.raises(ValueError, match="metadata is Tensor, expected a result of vision_metadata"):
        encoder.encode_packed(pixels, IMAGES)
    metadata, made = vision_metadata(IMAGES, encoder.sizes), precomputed(encoder, IMAGES)
    for message, args, named in (
        ("grid_thw is None, expected a grid, unless metadata or cu_seqlens, position_ids", (pixels,), {}),
        (r"pixel_values has .*, expected shape \[T, 96\]", (pixels[:, 1:], IMAGES), {}),
        ("pixel_values has 279, expected 280 rows, the patches of the grid", (pixels[1:], IMAGES), {}),
        # Before there are tables of so many.
        (f"pixel_values has .*, expected {2**50} rows", (pixels, torch.tensor([[2**20, 2**15, 2**15]])), {}),
        ("metadata is Tensor, expected a result of vision_metadata", (pixels,), {"metadata": IMAGES}),
        ("pixel_values is list, expected a tensor", (pixels.tolist(), IMAGES), {}),
        ("pixel_values has complex128, expected a real dtype", (pixels.to(torch.complex128), IMAGES), {}),
        ("pixel_values is on meta, expected on cpu as the encoder is", (pixels.to("meta"), IMAGES), {}),
        ("position_ids is list, expected a tensor", (pixels, IMAGES), {"position_ids": [[0, 0]]}),
        (r"position_ids.* expected shape \[T, 2\]", (pixels, IMAGES), {"position_ids": made["position_ids"][:, :1]}),
        ("cu_seqlens has float32, expected int32 or int64", (pixels, IMAGES), {"cu_seqlens": torch.tensor([0, 8.9])}),
        ("cu_seqlens has bool, expected int32 or int64", (pixels, IMAGES), {"cu_seqlens": torch.tensor([False])}),
        ("cu_seqlens has shape .*, expected 1 dimensions", (pixels, IMAGES), {"cu_seqlens": torch.zeros(2, 2).int()}),
        (
            r"interp_weights has shape \[280, 1\], expected shape \[280, 4\] as interp_indices is",
            (pixels, IMAGES),
            {**made, "interp_weights": made["interp_weights"][:, :1]},
        ),
        *(
            (f"chunk_tokens is {most!r}, expected an integer", (pixels, IMAGES), {"chunk_tokens": most})
            for most in (8.5, True, "3")
        ),
        ("chunk_tokens is 0, expected 1 or more", (pixels, IMAGES), {"chunk_tokens": 0}),
        ("chunk_tokens.* expected None with a clone", (pixels,), {"metadata": metadata.clone(), "chunk_tokens": 8}),
        (
            "chunk_tokens is .*, expected None with metadata that is padded",
            (torch.cat([pixels, pixels[:8]]),),
            {"metadata": vision_metadata(IMAGES, encoder.sizes, padding=Padding(rows=288)), "chunk_tokens": 8},
        ),
        *(
            ("chunk_tokens is .*, expected None with a clone", (pixels, IMAGES), {**named, "chunk_tokens": 8})
            for named in ({"cu_seqlens": made["cu_seqlens"]}, {"position_ids": made["position_ids"]}, made)
        ),
    ):
        with pytest.raises(ValueError, match=message):
            encoder(*args, **named)
    for message, padding in (
        ("padding.rows is 8, expected at least the 280 of the batch", Padding(rows=8)),
        ("padding.rows is 281, expected a multiple of 4", Padding(rows=281)),
        ("padding.segments is 5, expected at least the 6 of the batch", Padding(segments=5)),
        ("padding.segments is 'a', expected an integer", Padding(segments="a")),
        ("padding.rows is 400.0, expected an integer", Padding(rows=400.0)),
    ):
        with pytest.raises(ValueError, match=message):
            vision_metadata(IMAGES, encoder.sizes, padding=padding)
    with pytest.raises(ValueError, match="padding is int, expected a Padding or None"):
        vision_metadata(IMAGES, encoder.sizes, padding=8)
    with pytest.raises(ValueError, match="sizes is int, expected VisionSizes, as encoder.sizes"):
        vision_metadata(IMAGES, 16)


@pytest.mark.parametrize("model_type", KINDS)
def test_padding_changes_nothing_and_is_finite(model_type: str) -> None:
    encoder = frozen(model_type)
    pixels = draw_pixels(encoder, IMAGES)
    expected = encoder.encode_packed(pixels, vision_metadata(IMAGES, encoder.sizes))
    rows = pixels.shape[0]
    padding = Padding(rows=rows + 64, images=9, segments=12, windows=30)
    padded = vision_metadata(IMAGES, encoder.sizes, padding=padding)
    assert padded.grid.shape == (9, 3) and padded.cu_seqlens.shape == (13,)
    # The same tensors again, as a graph's inputs that are filled for another batch.
    static = vision_metadata(IMAGES.flip(0), encoder.sizes, padding=padding).clone().copy_(padded)
    for metadata in (padded, static):
        actual = encoder.encode_packed(functional.pad(pixels, (0, 0, 0, 64), value=3.0), metadata)
        for name, (ours, wanted) in enumerate(zip(flat(actual), flat(expected), strict=True)):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours[: wanted.shape[0]], wanted, msg=about(name))


def test_remembered_metadata_is_not_written_to() -> None:
    metadata = vision_metadata(IMAGES, VisionSizes(72))
    with pytest.raises(ValueError, match=r"self is .*, expected a clone\(\)"):
        metadata.copy_(metadata)
    with pytest.raises(ValueError, match=r"grid has shape \[3, 3\], expected shape \[4, 3\]"):
        metadata.clone().copy_(vision_metadata(IMAGES[1:], VisionSizes(72)))
    with pytest.raises(ValueError, match="images is .*, expected known to the host"):
        _ = metadata.clone().total


@pytest.mark.parametrize("model_type", KINDS)
def test_what_is_precomputed_on_the_host_is_sent(model_type: str) -> None:
    encoder = frozen(model_type)
    given = precomputed(encoder, IMAGES)
    for left_out in (None, *given):
        named = {name: value for name, value in given.items() if name != left_out}
        learned = encoder.pos_embed is not None
        metadata = precomputed_metadata(named, IMAGES, encoder.sizes, torch.device("meta"), learned)
        assert {tensor.device.type for _, tensor in metadata.tensors()} == {"meta"}


def flat(outputs: tuple[Tensor, Tensor, tuple[Tensor, ...]]) -> list[Tensor]:
    return [outputs[0], outputs[1], *outputs[2]]


@pytest.mark.parametrize("chunk_tokens", (1, np.int64(40), 64, 10**6))
@pytest.mark.parametrize("model_type", KINDS)
def test_chunks_of_frames_change_nothing(model_type: str, chunk_tokens: int) -> None:
    encoder = frozen(model_type)
    grid = torch.tensor([[5, 4, 6], [1, 8, 8], [7, 2, 2]])
    pixels = draw_pixels(encoder, grid)
    expected = named_outputs(encoder(pixels, grid, output_hidden_states=True))
    actual = named_outputs(encoder(pixels, grid, output_hidden_states=True, chunk_tokens=chunk_tokens))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if chunk_tokens == 10**6:
            assert torch.equal(actual[name], tensor), name
        torch.testing.assert_close(actual[name], tensor, msg=about(name))


@pytest.mark.parametrize("images", ([], [(0, 4, 4)], [(2, 0, 4), (1, 4, 4)]), ids=str)
@pytest.mark.parametrize("grad", (False, True))
def test_chunks_of_nothing(images: list[tuple[int, int, int]], grad: bool) -> None:
    encoder = frozen("qwen3_vl_vision").requires_grad_(grad)
    grid = torch.tensor(images, dtype=torch.int64).view(-1, 3)
    pixels = draw_pixels(encoder, grid, torch.float64)
    expected, actual = (named_outputs(encoder(pixels, grid, chunk_tokens=most)) for most in (None, 1))
    assert {name: tensor.shape for name, tensor in actual.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=about(name))


def test_one_chunk_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = frozen("qwen3_vl_vision", torch.float32)
    grid = torch.tensor([[6, 4, 4]])
    alive: list[Any] = []
    encode = QwenVisionEncoder._encode

    def watched(self: QwenVisionEncoder, *args: Any) -> Any:
        assert not [each for each in alive if each() is not None], "what chunks before gave is still held"
        outputs = encode(self, *args)
        alive.extend(map(weakref.ref, pytree.tree_leaves(outputs)))
        return outputs

    monkeypatch.setattr(QwenVisionEncoder, "_encode", watched)
    encoder(draw_pixels(encoder, grid), grid, chunk_tokens=16)
    assert len(alive) == 6 * 4


@pytest.mark.parametrize("model_type", ["qwen3_vl_vision", "qwen2_5_vl_vision"])
def test_what_entered_a_block_is_let_go_of_before_its_mlp(model_type: str) -> None:
    """Unless something taps it: there memory is at its peak."""
    encoder = frozen(model_type, torch.float32)
    entered: list[Any] = []
    alive: list[int] = []
    for block in encoder.blocks:
        # The tensor that attention's result is added to.
        add = block.norm2.after_sum
        block.norm2.after_sum = lambda x, total, add=add: entered.append(weakref.ref(total)) or add(x, total)
        block.mlp.register_forward_pre_hook(lambda *args: alive.append(sum(each() is not None for each in entered)))
    encoder(draw_pixels(encoder, IMAGES), IMAGES)
    tapped = [layer + 1 for layer in encoder._taps]
    # The first of an encoder without positions to add is the caller's own.
    expected = [int(layer in tapped or (layer == 0 and encoder.pos_embed is None)) for layer in range(len(alive))]
    assert alive == expected and 0 in alive


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_may_be_wrapped(reentrant: bool) -> None:
    """As FSDP's checkpoints are. A reentrant one sees gradients only of tensors that are arguments themselves."""

    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(self.block, **kwargs), *args, use_reentrant=reentrant)

    encoder = from_transformers(tiny_tower("qwen3_vl_vision", torch.float64)).train()
    pixels = draw_pixels(encoder, IMAGES).double().requires_grad_()

    def gradients() -> dict[str, Tensor]:
        encoder.zero_grad()
        outputs = named_outputs(encoder(pixels, IMAGES))
        torch.stack([out.sum() for out in outputs.values()]).sum().backward()
        return {name.replace(".block.", "."): leaf.grad.clone() for name, leaf in encoder.named_parameters()}

    expected = gradients()
    seen: list[int] = []
    for layer, block in enumerate(encoder.blocks):
        encoder.blocks[layer] = Wrapped(block)
        block.register_full_backward_hook(lambda block, inputs, outputs: seen.append(len(inputs + outputs)))
    actual = gradients()
    assert len(seen) == len(encoder.blocks) and min(seen) >= 2
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=about(name))


@pytest.mark.parametrize("key", FAMILIES)
def test_vision_configurations_with_the_name_of_the_whole_model(key: str) -> None:
    """Transformers 5.5 gives most of them."""
    config = vision_config(key)
    assert family_key(config) == key and vision_config_of(config) is config
    if key.endswith("_vision"):
        part = SimpleNamespace(model_type=key.removesuffix("_vision"), base_config_key="vision_config")
        assert family_key(part) == key and vision_config_of(SimpleNamespace(vision_config=part)) is part
        part.base_config_key = ""
        assert family_key(part) not in FAMILIES


def test_the_configuration_says_what_is_returned() -> None:
    tower = tiny_tower("qwen3_vl_vision").requires_grad_(False)
    encoder = from_transformers(tower)
    pixels = draw_pixels(encoder, IMAGES)
    encoder.config.output_hidden_states = True
    assert list(encoder(pixels, IMAGES)) == list(tower(pixels, grid_thw=IMAGES))
    assert "hidden_states" in encoder(pixels, IMAGES) and "hidden_states" not in encoder(
        pixels, IMAGES, output_hidden_states=False
    )
    encoder.config.return_dict = False
    ours, theirs = encoder(pixels, IMAGES), tower(pixels, grid_thw=IMAGES)
    assert type(ours) is type(theirs) is tuple and len(ours) == len(theirs) == 4
    assert encoder(pixels, IMAGES, return_dict=True).pooler_output is not None


def test_gradients_pass_through_chunks() -> None:
    encoder = from_transformers(tiny_tower("qwen3_vl_vision", torch.float64))
    pixels = draw_pixels(encoder, IMAGES)
    expected, actual = run(encoder, pixels), run(encoder, pixels, chunk_tokens=50)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=about(name))
    # Where the merger alone is trained.
    encoder.requires_grad_(False).merger.requires_grad_()
    output = encoder(pixels, IMAGES, chunk_tokens=50)
    assert output.pooler_output.requires_grad and not output.last_hidden_state.requires_grad
    whole = encoder(pixels, IMAGES).pooler_output
    for ours, wanted in zip(
        *(torch.autograd.grad(each.square().sum(), encoder.merger.parameters()) for each in (output[1], whole)),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted)


@given(images=grids, most=st.integers(1, 600))
def test_images_are_split_between_frames(images: list[tuple[int, int, int]], most: int) -> None:
    def frames(parts: Any) -> list[tuple[int, int]]:
        return [(h, w) for t, h, w in parts for _ in range(t)]

    runs = list(split_images(images, most))
    assert frames(part for run in runs for part in run) == frames(images)
    for part in runs:
        assert sum(t * h * w for t, h, w in part) <= most or len(frames(part)) == 1
    for first, second in zip(runs, runs[1:], strict=False):
        tokens = sum(t * h * w for t, h, w in first)
        assert tokens + second[0][1] * second[0][2] > most, "a frame that had room"


def test_attention_alone() -> None:
    """One segment without rotation, unless told otherwise."""
    attention = VisionAttention(144, 2)
    assert attention.head_dim == 72
    x = torch.randn(50, 144)
    q, k, v = functional.linear(x, attention.qkv.weight, attention.qkv.bias).view(50, 3, 2, 72).permute(1, 2, 0, 3)
    expected = attention.proj(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(attention(x), expected)
    halves = torch.cat([attention(x[:30]), attention(x[30:])])
    torch.testing.assert_close(attention(x, cu_seqlens=torch.tensor([0, 30, 50], dtype=torch.int32)), halves)
    assert VisionAttention(96, 2, 64).qkv.weight.shape == (384, 96)
    with pytest.raises(ValueError, match="cos is a tensor, expected None where sin is"):
        attention(x, torch.ones(50, 36))
    with pytest.raises(ValueError, match=r"x has shape \[2, 25, 144\], expected shape \[T, C\]"):
        attention(x.view(2, 25, 144))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((104, 12), r"hidden_size is 104, expected a multiple of num_heads = 12"),
        ((30, 3), r"head dimension of q, head_dim, is 10, expected a multiple of 8 from 8 to 256"),
        ((528, 2), r"head dimension of q, head_dim, is 264, expected a multiple of 8 from 8 to 256"),
        ((96, 2, 12), r"head dimension of q, head_dim, is 12, expected a multiple of 8 from 8 to 256"),
        ((96, 0), r"number of heads of q, num_heads, is 0, expected from 1 to 65535"),
        ((96, 0, 64), r"number of heads of q, num_heads, is 0, expected from 1 to 65535"),
    ],
    ids=str,
)
def test_attention_that_cannot_be_is_refused_when_it_is_made(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^VisionAttention: the {message}$|^VisionAttention: {message}$"):
        VisionAttention(*sizes)


@pytest.mark.parametrize("model_type", KINDS)
def test_attention_is_that_of_transformers(model_type: str) -> None:
    tower = tiny_tower(model_type)
    theirs = tower.blocks[0].attn
    ours = VisionAttention(theirs.dim, theirs.num_heads)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(int(IMAGES.prod(1).sum()), theirs.dim)
    cu_seqlens = vision_utils.get_vision_cu_seqlens(IMAGES)
    cos, sin = tower.rotary_pos_emb(x, vision_utils.get_vision_position_ids(IMAGES, 2))
    eager, truth = (
        module(x.to(dtype), cu_seqlens=cu_seqlens, position_embeddings=(cos.to(dtype), sin.to(dtype)))
        for module, dtype in ((theirs, torch.float32), (doubled(theirs), torch.float64))
    )
    assert_close_to_reference(ours(x, cos, sin, cu_seqlens), eager, truth)
    # Behind a layer that has to be called, attention itself turns q and k.
    ours.qkv.register_forward_hook(lambda *_: None)
    assert_close_to_reference(ours(x, cos, sin, cu_seqlens), eager, truth)
    half = [table[:, : table.shape[1] // 2].contiguous() for table in (cos, sin)]
    assert torch.equal(ours(x, *half, cu_seqlens), ours(x, cos, sin, cu_seqlens))


def test_public_names() -> None:
    assert models.VisionAttention is VisionAttention
    assert all(hasattr(models, name) for name in models.__all__)
    inner = vision_config("qwen3_omni_moe_vision_encoder")
    outer = type("Thinker", (), {"thinker_config": type("Config", (), {"vision_config": inner})()})()
    assert vision_config_of(outer) is inner


@torch.no_grad()
def test_encode_takes_the_encoder_compiled_or_not() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    encoder = from_transformers(tower)
    pixels = draw_pixels(tower, IMAGES)
    eager, truth = qwen_vl.encode(tower, pixels, IMAGES), qwen_vl.encode(doubled(tower), pixels.double(), IMAGES)
    for ours in (encoder, torch.compile(encoder, fullgraph=True, backend="eager")):
        actual = qwen_vl.encode(ours, pixels, IMAGES)
        assert_close_to_reference(actual.pooler_output, eager.pooler_output, truth.pooler_output)
    images = qwen_vl.split_by_image(actual, IMAGES)
    assert [len(image.pooler_output) for image in images] == [t * h * w // 4 for t, h, w in GRID]


# Settings in which published models differ from Transformers' defaults.
FULL_SIZE: dict[str, dict[str, Any]] = {"qwen2_5_vl_vision": {"hidden_size": 1280}}
full_size = pytest.mark.parametrize("model_type", FAMILIES)
dtypes = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)


@torch.no_grad()
def check_features(tower: Any, grid: Tensor) -> None:
    pixels = draw_pixels(tower, grid, tower.dtype).to(tower.device)
    eager = named_outputs(tower(pixels, grid_thw=grid.to(tower.device)))
    actual = named_outputs(from_transformers(tower)(pixels, grid))
    check(actual, eager, named_outputs(doubled(tower)(pixels.double(), grid_thw=grid.to(tower.device))))


def check_gradients(tower: Any, grid: Tensor) -> None:
    """The reference keeps only what enters its blocks, since scores in fp64 of all of them would fit no memory."""
    encoder, exact = from_transformers(tower), doubled(tower).train()
    exact.gradient_checkpointing_enable({"use_reentrant": False})

    # Among hundreds of tensors, one may have its largest error where PyTorch is lucky.
    def draw(seed: int) -> Draw:
        pixels, on_device = draw_pixels(tower, grid, tower.dtype, seed).to(tower.device), grid.to(tower.device)
        truth = run(exact, pixels.double(), on_device, seed)
        return run(encoder, pixels, grid, seed), run(tower, pixels, on_device, seed), truth

    check_draws(draw)


@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_omni_moe_vision_encoder"))
def test_checks_of_towers_of_full_size(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the GPU tests passes small towers too, and fails a wrong encoder."""
    tower = tiny_tower(model_type, torch.bfloat16)
    check_features(tower, IMAGES)
    check_gradients(tower, IMAGES)
    tower.rotary_pos_emb.inv_freq.mul_(2)
    # It would be refused.
    monkeypatch.setattr("torch_ops.models._sharing._other_frequencies", lambda name, theirs: None)
    for check_one in (check_features, check_gradients):
        with pytest.raises(AssertionError, match="outside the rule"):
            check_one(tower, IMAGES)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.slow
@full_size
@dtypes
def test_towers_of_full_size(model_type: str, dtype: torch.dtype) -> None:
    tower = full_tower(model_type, FULL_SIZE.get(model_type, {}), dtype).cuda()
    check_features(tower, torch.tensor([[1, 32, 48], [2, 28, 28], [1, 54, 94]]))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.slow
@full_size
@dtypes
def test_gradients_of_towers_of_full_size(model_type: str, dtype: torch.dtype) -> None:
    tower = full_tower(model_type, FULL_SIZE.get(model_type, {}), dtype).cuda()
    check_gradients(tower, torch.tensor([[1, 32, 48], [2, 28, 28]]))


@pytest.mark.gpu
def test_a_grid_on_the_cpu_costs_no_synchronisation() -> None:
    encoder = frozen("qwen3_vl_vision", torch.bfloat16).cuda()
    pixels = draw_pixels(encoder, IMAGES).cuda()
    encoder(pixels, IMAGES.flip(0))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        encoder(pixels, IMAGES)
        with pytest.raises(RuntimeError, match="synchronizing"):
            encoder(pixels, IMAGES.cuda())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copies_of(call: Callable[[], Any]) -> list[str]:
    """The copies to the device that a call makes, as CUDA names them: from pageable memory they may wait."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "Memcpy HtoD" in event.name]


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", KINDS)
def test_nothing_is_copied_from_pageable_memory(model_type: str) -> None:
    """Tensors that Transformers' helpers make on the host are sent."""
    tower = tiny_tower(model_type, torch.bfloat16).cuda().requires_grad_(False)
    encoder = from_transformers(tower)
    pixels = draw_pixels(encoder, IMAGES, torch.bfloat16).cuda()
    given = precomputed(encoder, IMAGES)
    calls = [lambda: encoder(pixels, IMAGES, **given)]
    if encoder.pos_embed is not None:
        calls.append(lambda: qwen_vl.encode(tower, pixels, IMAGES))
    for call in calls:
        copies = copies_of(call)
        assert copies and not [name for name in copies if "Pageable" in name], copies


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", KINDS)
def test_cuda_graph_replays_other_images(model_type: str) -> None:
    tower = tiny_tower(model_type, torch.float16).cuda().requires_grad_(False)
    encoder = from_transformers(tower)
    padding = Padding(rows=512, images=8, segments=16, windows=64)
    other = torch.tensor([[2, 8, 8], [1, 6, 10]])
    static = vision_metadata(IMAGES, encoder.sizes, "cuda", padding).clone()
    pixels = functional.pad(draw_pixels(encoder, IMAGES), (0, 0, 0, 512 - 280)).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        encoder.encode_packed(pixels, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = encoder.encode_packed(pixels, static)
    for grid in (IMAGES, other):
        fresh = draw_pixels(encoder, grid, seed=1).cuda()
        pixels.zero_()[: fresh.shape[0]] = fresh
        static.copy_(vision_metadata(grid, encoder.sizes, "cuda", padding))
        graph.replay()
        eager = named_outputs(tower(fresh, grid_thw=grid.cuda()))
        truth = named_outputs(doubled(tower)(fresh.double(), grid_thw=grid.cuda()))
        pairs = zip(eager.items(), flat(captured), strict=True)
        check({name: ours[: wanted.shape[0]] for (name, wanted), ours in pairs}, eager, truth)
