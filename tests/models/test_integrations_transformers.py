"""Transformers vision encoders on vk::window_attn: same values, one packed call per layer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from tests.models.verify import tensors
from torch_ops.integrations import transformers as integration
from torch_ops.integrations.transformers import (
    ATTENTION_NAME,
    register,
    restore,
    use_window_attn,
    window_attention_forward,
)
from torch_ops.models import qwen_vl
from torch_ops.models.qwen_vl import encode
from torch_ops.testing.tolerance import assert_close_to_reference, check

pytestmark = pytest.mark.no_interpret

on_the_host = pytest.mark.skipif(
    not qwen_vl.computes_ahead,
    reason=f"towers of transformers {transformers.__version__} read the grid from the device",
)

DEPTH = 3
SIZES: dict[str, Any] = {"depth": DEPTH, "num_heads": 2}
QWEN3: dict[str, Any] = {
    **SIZES,
    "hidden_size": 48,  # head_dim 24
    "intermediate_size": 80,
    "out_hidden_size": 40,
    "num_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3_vl": (Qwen3VLVisionModel, {**QWEN3, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": (Qwen3_5VisionModel, QWEN3),
    "qwen2_vl": (
        Qwen2VisionTransformerPretrainedModel,
        {**SIZES, "embed_dim": 32, "hidden_size": 40},
    ),
    # windows of 2 x 2 merged cells, and one layer of full attention
    "qwen2_5_vl": (
        Qwen2_5_VisionTransformerPretrainedModel,
        {
            **SIZES,
            "hidden_size": 32,
            "intermediate_size": 52,
            "out_hidden_size": 40,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    ),
}

GRIDS = {
    "one image": [[1, 6, 8]],
    "ragged images": [[1, 8, 6], [1, 2, 2], [1, 4, 10]],
    "video": [[3, 4, 6]],
    "images and a video": [[1, 4, 4], [2, 6, 4], [1, 2, 8]],
}


def build(family: str = "qwen3_vl", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, sizes = FAMILIES[family]
        tower = model(model.config_class(**sizes)).eval()
        for parameter in tower.parameters():
            # wide enough for an attention that tells its keys apart
            torch.nn.init.normal_(parameter, std=0.2)
    return tower.to(dtype)


def draw(tower: PreTrainedModel, grid: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    config = tower.config
    grid_thw = torch.tensor(grid)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    rows = int(grid_thw.prod(dim=1).sum())
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)), grid_thw


class OpCalls(TorchDispatchMode):
    """Counts calls of the op, whoever makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += func is torch.ops.vk.window_attn.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tower() -> PreTrainedModel:
    return build()


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_agree(family: str, grid: list[list[int]]) -> None:
    tower, exact = build(family), build(family, torch.float64)
    pixel_values, grid_thw = draw(tower, grid)
    reference = tensors(exact(pixel_values.double(), grid_thw=grid_thw))
    eager = tensors(tower(pixel_values, grid_thw=grid_thw))
    actual = tensors(use_window_attn(tower)(pixel_values, grid_thw=grid_thw))
    assert actual.keys() == reference.keys()
    check(actual, eager, reference)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_gradients_agree(family: str) -> None:
    def gradients(tower: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        pixel_values, grid_thw = draw(tower, GRIDS["images and a video"])
        pixel_values = pixel_values.to(dtype).requires_grad_()
        outputs = tensors(tower(pixel_values, grid_thw=grid_thw)).values()
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(output.shape, generator=generator).to(dtype) for output in outputs]
        torch.autograd.backward(list(outputs), weights)
        found = {name: parameter.grad for name, parameter in tower.named_parameters()}
        assert pixel_values.grad is not None
        return {"pixel_values": pixel_values.grad, **found}

    reference = gradients(build(family, torch.float64), torch.float64)
    eager = gradients(build(family), torch.float32)
    actual = gradients(use_window_attn(build(family)), torch.float32)
    check(actual, eager, reference)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@torch.no_grad()
def test_one_packed_call_per_layer(tower: PreTrainedModel, grid: list[list[int]]) -> None:
    inputs = draw(tower, grid)
    with OpCalls() as seen:
        encode(tower, *inputs)
    assert seen.count == 0
    with OpCalls() as seen:
        encode(use_window_attn(tower), *inputs)
    assert seen.count == DEPTH


def test_no_copy_of_qkv(tower: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((q, k, v))
        return original(q, k, v, *args, **kwargs)

    original = integration.window_attn
    monkeypatch.setattr(integration, "window_attn", spy)
    pixel_values, grid_thw = draw(tower, GRIDS["one image"])
    use_window_attn(tower)(pixel_values, grid_thw=grid_thw)
    heads, width = tower.config.num_heads, tower.config.hidden_size
    for q, _, v in seen:
        assert q.shape == v.shape == (48, heads, width // heads)
        assert v.stride() == (3 * width, width // heads, 1)  # still a slice of the projection


@on_the_host
@torch.no_grad()
def test_never_waits_for_the_device() -> None:
    """On meta tensors every copy to the host raises, and shapes come out all the same."""
    tower = build()
    pixel_values, grid_thw = draw(tower, GRIDS["images and a video"])
    rows = pixel_values.shape[0]
    tower, pixel_values = tower.to("meta"), pixel_values.to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        encode(tower, pixel_values, grid_thw)
    output = encode(use_window_attn(tower), pixel_values, grid_thw)
    assert output.last_hidden_state.shape == (rows, tower.config.hidden_size)
    assert output.pooler_output.shape == (rows // 4, tower.config.out_hidden_size)


@pytest.mark.parametrize("former", ["sdpa", "eager"])
@torch.no_grad()
def test_restore(tower: PreTrainedModel, former: str) -> None:
    tower.set_attn_implementation(former)
    inputs = draw(tower, GRIDS["ragged images"])
    before = encode(tower, *inputs)
    for _ in range(2):  # a second time changes nothing
        assert use_window_attn(tower) is tower
        assert tower.config._attn_implementation == ATTENTION_NAME
    for _ in range(2):
        assert restore(tower) is tower
        assert tower.config._attn_implementation == former
    after = encode(tower, *inputs)
    for name, value in tensors(before).items():
        assert torch.equal(tensors(after)[name], value)


def test_restore_leaves_a_later_choice(tower: PreTrainedModel) -> None:
    tower.set_attn_implementation("sdpa")
    use_window_attn(tower).set_attn_implementation("eager")
    assert restore(tower).config._attn_implementation == "eager"


def test_register_is_idempotent() -> None:
    assert register() == register() == ATTENTION_NAME
    assert "flash" in ATTENTION_NAME  # what Transformers' packed branch looks for


def full_model() -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(
        vision_config={**QWEN3, "deepstack_visual_indexes": [0]},
        text_config={
            "vocab_size": 64,
            "hidden_size": QWEN3["out_hidden_size"],
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3VLForConditionalGeneration(config).eval()


@torch.no_grad()
def test_inside_a_full_model() -> None:
    model = full_model()
    text = model.model.language_model
    pixel_values, grid_thw = draw(model.model.visual, [[1, 4, 4]])
    input_ids = torch.tensor([[1, 62, 60, 60, 60, 60, 63, 2, 3]])
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == 60).int(),
        "pixel_values": pixel_values,
        "image_grid_thw": grid_thw,
    }
    exact = copy.deepcopy(model).double()(**{**inputs, "pixel_values": pixel_values.double()})
    eager = model(**inputs)
    former = text.config._attn_implementation
    with OpCalls() as seen:
        actual = use_window_attn(model)(**inputs)
    assert seen.count == DEPTH
    assert text.config._attn_implementation == former
    assert_close_to_reference(actual.logits, eager.logits, exact.logits)
    restore(model)
    assert torch.equal(model(**inputs).logits, eager.logits)


def test_saved_checkpoint_does_not_name_us(tmp_path: Any) -> None:
    use_window_attn(full_model()).save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.model.visual.config._attn_implementation == "sdpa"


@on_the_host
@torch.no_grad()
def test_compiles_without_graph_breaks(tower: PreTrainedModel) -> None:
    inputs = draw(tower, GRIDS["ragged images"])
    reference = tensors(encode(build(dtype=torch.float64), inputs[0].double(), inputs[1]))
    eager = tensors(encode(tower, *inputs))
    # aot_eager: what is traced is the question here, not what Inductor makes of it
    compiled = torch.compile(use_window_attn(tower), fullgraph=True, backend="aot_eager")
    check(tensors(encode(compiled, *inputs)), eager, reference)


def call(**changes: Any) -> Any:
    tensor = torch.randn(1, 2, 8, 16)
    arguments: dict[str, Any] = {
        "module": torch.nn.Identity(),
        "query": tensor,
        "key": tensor,
        "value": tensor,
        "attention_mask": None,
        "cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32),
    }
    return window_attention_forward(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(8, 8)}, "attention_mask has shape .*, expected None"),
        ({"dropout": 0.1}, "dropout is 0.1, expected 0"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q is missing"),
        ({"query": torch.randn(2, 2, 8, 16)}, r"query has shape .*, expected \[1, heads, tokens, head_dim\]"),
        ({"sliding_window": 4}, "sliding_window is given, expected None"),
        ({"s_aux": torch.zeros(2)}, "s_aux is given, expected None"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_interface_function_options() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    causal, none = call(query=q, key=k, value=v, is_causal=True, scaling=0.5)
    assert none is None

    def sdpa(dtype: torch.dtype) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.to(dtype) for x in (q, k, v)), is_causal=True, scale=0.5
        )
        return out.transpose(1, 2)

    assert_close_to_reference(causal, sdpa(torch.float32), sdpa(torch.float64))


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), full_model().model.language_model])
@pytest.mark.parametrize("function", [use_window_attn, restore])
def test_models_without_an_encoder(function: Callable[[Any], Any], model: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match="model is .*, expected a Qwen-VL vision encoder"):
        function(model)
