"""`generate()` of a whole model for one image: Transformers as it is, and after `accelerate(model)`.

The model is a Qwen3-VL with random weights: a tower of Qwen3-VL, and a language model of few layers on the tower's
output width. Token ids are made by hand, so no tokenizer is needed.
"""

import copy
import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops.bench.encoder.impls import path_of
from torch_ops.bench.encoder.rows import Row, Scene, Session, linear_patches, make_scene, modeling
from torch_ops.bench.measure.opbench import Check, Cost, Impl, OpBench, split
from torch_ops.bench.measure.results import BASELINE, OURS, VK_DEFAULT
from torch_ops.bench.measure.timing import Work
from torch_ops.integrations.transformers_encoder import accelerate

FIRST, ALL = "first token", "all tokens"
# The second call of a size captures; later calls replay.
WARM_UP_CALLS = 3
IMAGE, START, VIDEO, END = 5, 6, 7, 8
BEFORE, AFTER = (10, 11, 12, 13, START), (END, 14, 15, 16)
# Both sides of a merged cell of 2 x 2 patches.
PATCH, CELL = 16, 32
SYNCHRONISES = "called a synchronizing CUDA operation"


@dataclass(frozen=True)
class Picture:
    """An image as a row of one batch, and the number of tokens to generate."""

    row: Row
    new_tokens: int

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def shape(self) -> str:
        patches = sum(self.row.segments)
        return f"{patches}, {len(BEFORE) + patches // 4 + len(AFTER)} + {self.new_tokens}"


def find_pictures(wanted: Sequence[str], new_tokens: int) -> tuple[Picture, ...]:
    """Images by SIDE or HEIGHTxWIDTH in pixels; ValueError for other texts."""
    found = []
    for text in split(wanted):
        sides = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
        height, width = (int(side or sides[1]) for side in sides.groups()) if sides else (0, 1)
        if not height or height % CELL or width % CELL:
            raise ValueError(f"image is {text!r}, expected SIDE or HEIGHTxWIDTH in multiples of {CELL} pixels")
        found.append(Picture(Row(text, ((1, height // PATCH, width // PATCH),)), new_tokens))
    return tuple(found)


def build_model(tower: Any, layers: int) -> Any:
    """Qwen3VLForConditionalGeneration around `tower`, in its dtype and on its device."""
    weight = tower.patch_embed.proj.weight
    width = tower.config.out_hidden_size
    head_dim, vocabulary = (128, 8192) if width % 128 == 0 else (16, 64)
    heads = width // head_dim
    text = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": heads // 4 or 1,
    }  # fmt: skip
    config = importlib.import_module("transformers.models.qwen3_vl.configuration_qwen3_vl").Qwen3VLConfig(
        vision_config=tower.config.to_dict(), text_config=text,
        image_token_id=IMAGE, vision_start_token_id=START, video_token_id=VIDEO, vision_end_token_id=END,
    )  # fmt: skip
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(weight.device):
        torch.manual_seed(0)
        model = modeling().Qwen3VLForConditionalGeneration._from_config(config, dtype=weight.dtype)
    model.model.visual = tower
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Prompt:
    """An image with its prompt, for all implementations alike."""

    model: Any
    picture: Picture
    scene: Scene
    pixels: Tensor
    calls: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that a processor of Transformers returns, on the model's device."""
        device = self.pixels.device
        ids = torch.tensor([[*BEFORE, *[IMAGE] * (len(self.pixels) // 4), *AFTER]], device=device)
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int(),
            "pixel_values": self.pixels, "image_grid_thw": self.scene.grid.to(device),
        }  # fmt: skip


def generated(model: Any, inputs: dict[str, Tensor], new_tokens: int, **rest: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **rest)


@dataclass(frozen=True)
class GenerateCall:
    """An implementation on a prompt, as the runner calls it."""

    model: Any
    prompt: Prompt
    inputs: dict[str, Tensor]

    def results(self, backward: bool) -> dict[str, Tensor]:
        """The logits of the first token."""
        out = generated(self.model, self.inputs, 1, output_logits=True, return_dict_in_generate=True)
        # Transformers widens them.
        return {"logits": out.logits[0].to(self.prompt.pixels.dtype)}

    def work(self, direction: str, device: torch.device) -> Work:
        new_tokens = 1 if direction == FIRST else self.prompt.picture.new_tokens
        return lambda: generated(self.model, self.inputs, new_tokens)

    def peak_bytes(self, work: Work, device: torch.device) -> int | None:
        return None

    def extras(self, device: torch.device) -> dict[str, Any]:
        ids = generated(self.model, self.inputs, self.prompt.picture.new_tokens)
        new = ids[0, self.inputs["input_ids"].shape[1] :].tolist()
        return {"tokens": tuple(new), "syncs": count_syncs(self._encode, device)}

    @torch.no_grad()
    def _encode(self) -> object:
        encoder = self.model.model.visual
        return encoder(self.inputs["pixel_values"], grid_thw=self.inputs["image_grid_thw"], return_dict=True)


def count_syncs(call: Callable[[], object], device: torch.device) -> int | None:
    """Synchronisations that PyTorch warns of, such as readbacks; None on the CPU, which has none."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum(SYNCHRONISES in str(each.message) for each in caught)


def _twin(session: Session, model: Any, graphs: bool | None) -> Any:
    """The model, or a model on the same parameters after `accelerate(model, graphs=graphs)`."""

    def make() -> Any:
        kept = (*model.parameters(), *model.buffers())
        return accelerate(copy.deepcopy(model, {id(each): each for each in kept}), graphs=bool(graphs))

    return model if graphs is None else session.once(f"whole, graphs={graphs}", make)


def _bind(graphs: bool | None, picture: Picture, prompt: Prompt) -> GenerateCall:
    name = str(graphs)
    if name not in prompt.calls:
        model = _twin(prompt.scene.session, prompt.model, graphs)
        inputs = prompt.inputs
        for _ in range(WARM_UP_CALLS):
            # A replay that writes nothing shows, because the graph has never seen this image.
            generated(model, {**inputs, "pixel_values": torch.zeros_like(prompt.pixels)}, 1)
        prompt.calls[name] = GenerateCall(model, prompt, inputs)
    return prompt.calls[name]


def _check(prompt: Prompt) -> Check:
    """The first token's logits of the model in fp64, and of Transformers as it is."""
    exact = copy.deepcopy(prompt.model).double()
    patch_embed = exact.model.visual.patch_embed
    patch_embed.forward = partial(linear_patches, patch_embed)
    inputs = {**prompt.inputs, "pixel_values": prompt.pixels.double()}
    with torch.no_grad():
        reference = exact(**inputs, logits_to_keep=1).logits[:, -1]
    # A cycle would keep the model and its memory.
    del patch_embed.forward
    eager = _bind(None, prompt.picture, prompt).results(False)
    return Check("first token", prompt.picture, prompt, {"logits": reference}, eager)


def _impl(name: str, group: str, about: str, graphs: bool | None) -> Impl:
    return Impl(name, partial(_bind, graphs), about, directions=(FIRST, ALL), group=group)


IMPLS = (
    _impl(VK_DEFAULT, OURS, "generate() after accelerate(model)", True),
    _impl("vk_default_eager", OURS, "generate() after accelerate(model, graphs=False)", False),
    _impl("hf", BASELINE, "generate() of Transformers' model as it is", None),
)


def generate_bench(model: Any, pictures: Sequence[Picture]) -> OpBench:
    session = Session(model.model.visual)

    def make(picture: Picture) -> Prompt:
        scene = make_scene(session, picture.row)
        return Prompt(model, picture, scene, scene.pixels)

    return OpBench(
        op="generate", cases=lambda wanted, device: tuple(pictures), shape=lambda picture: picture.shape,
        inputs=lambda picture, dtype, device, seed: make(picture),
        checks=lambda picture, dtype, device, backward: [_check(make(picture))],
        cost=lambda prompt, backward: Cost(0, 0), path=lambda prompt: path_of(prompt.scene),
        ours=IMPLS[0], baselines=IMPLS[1:],
    )  # fmt: skip
