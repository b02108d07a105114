"""The encoder over budgets: padding, static tensors, weights that change; on a GPU the graphs themselves."""

import copy
import dataclasses
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

import torch_ops
from compile_tests.models import GRID, draw_pixels, named_outputs, tiny_tower
from tests.models.verify import KINDS, about, frozen, tiny_model
from torch_ops._attention import hopper as attention_hopper
from torch_ops._core.device import gpu
from torch_ops.integrations.transformers import accelerate
from torch_ops.models import EncoderGraphs, Padding, QwenVisionEncoder, from_transformers, qwen_vl, token_budgets
from torch_ops.models._recording import Inputs, Recording, Statics
from torch_ops.models._watch import Weights
from torch_ops.models.vision_metadata import filled_sizes, vision_metadata
from torch_ops.testing import check

pytestmark = pytest.mark.no_interpret

IMAGES = torch.tensor(GRID)
# Batches of 280, 188, 4 and 0 patches; of a video and windows cut at an edge.
BATCHES = (IMAGES, torch.tensor([[2, 8, 8], [1, 6, 10]]), torch.tensor([[1, 2, 2]]), torch.zeros((0, 3)).long())
SMALL, LARGE = Padding(200, 4, 8, 30), Padding(400, 8, 12, 40)


def runner_of(encoder: QwenVisionEncoder, **options: Any) -> EncoderGraphs:
    return EncoderGraphs(encoder, [LARGE, SMALL], **{"fallback": "refuse", **options})


def statics_of(runner: EncoderGraphs) -> Any:
    assert runner._statics is not None
    return runner._statics


def assert_equal_outputs(actual: Any, expected: Any) -> None:
    ours, wanted = named_outputs(actual), named_outputs(expected)
    assert type(actual) is type(expected) and list(ours) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, msg=about(name))


@pytest.mark.parametrize("model_type", KINDS)
def test_outputs_are_those_of_the_encoder(model_type: str) -> None:
    """Whatever was in the static tensors before."""
    encoder = frozen(model_type)
    runner = runner_of(encoder)
    assert runner.budgets == tuple(
        padding if encoder.sizes.window else dataclasses.replace(padding, windows=None) for padding in (SMALL, LARGE)
    )
    budgets = []
    for seed, grid in enumerate((*BATCHES, *reversed(BATCHES), BATCHES[0].flip(0))):
        pixels = draw_pixels(encoder, grid, torch.float64, seed=seed)
        assert_equal_outputs(runner(pixels, grid), encoder(pixels, grid))
        budgets.append(runner.budget_of(grid).rows)
    assert budgets[:4] == [400, 200, 200, 200]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("model_type", KINDS)
def test_outputs_by_the_rule(model_type: str, dtype: torch.dtype) -> None:
    tower = tiny_tower(model_type, dtype)
    exact = from_transformers(copy.deepcopy(tower).double())
    encoder = from_transformers(tower)
    runner = runner_of(encoder)
    with torch.inference_mode():
        for grid in BATCHES[:2]:
            pixels = draw_pixels(tower, grid, dtype)
            eager, actual = named_outputs(encoder(pixels, grid)), named_outputs(runner(pixels, grid))
            check(actual, eager, named_outputs(exact(pixels.double(), grid)))
            assert all(tensor.dtype is eager[name].dtype for name, tensor in actual.items())


grids = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6).map(lambda n: 2 * n), st.integers(0, 6).map(lambda n: 2 * n)),
    max_size=6,
)
_fuzzed: dict[str, EncoderGraphs] = {}


@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
@settings(max_examples=40)
@given(images=grids)
def test_any_batch_that_fits(model_type: str, images: list[tuple[int, int, int]]) -> None:
    """One runner for all of them, so that each finds what the one before has left."""
    if model_type not in _fuzzed:
        _fuzzed[model_type] = EncoderGraphs(frozen(model_type), [64, 320, Padding(1024, 6, 18, 96)], fallback="refuse")
    runner = _fuzzed[model_type]
    grid = torch.tensor(images, dtype=torch.int64).view(-1, 3)
    pixels = draw_pixels(runner.encoder, grid, torch.float64, seed=len(images))
    wanted = filled_sizes(tuple(images), runner.encoder.sizes)
    fits = wanted.rows <= 1024 and (wanted.windows or 0) <= 96
    if not fits:
        with pytest.raises(ValueError, match=f"the batch has {wanted.rows} patches, .*, expected at most one of"):
            runner(pixels, grid)
        return
    assert_equal_outputs(runner(pixels, grid), runner.encoder(pixels, grid))


@given(images=grids)
def test_sizes_of_a_batch(images: list[tuple[int, int, int]]) -> None:
    encoder_sizes = frozen_sizes()
    metadata = vision_metadata(torch.tensor(images, dtype=torch.int64).view(-1, 3), encoder_sizes)
    assert metadata.grid is not None and metadata.cu_window_seqlens is not None
    assert filled_sizes(tuple(images), encoder_sizes) == Padding(
        metadata.cos.shape[0], len(images), len(metadata.cu_seqlens) - 1, len(metadata.cu_window_seqlens) - 1
    )


def frozen_sizes() -> Any:
    return torch_ops.models.VisionSizes(80, window=4)


@pytest.mark.parametrize("model_type", KINDS)
def test_what_is_left_in_static_tensors_is_harmless(model_type: str) -> None:
    """0 times NaN is NaN: neither pixels of a batch before nor what else lies there may reach a row of the next."""
    encoder = frozen(model_type)
    runner = runner_of(encoder)
    first, second = BATCHES[:2]
    pixels = draw_pixels(encoder, second, torch.float64)
    expected = encoder(pixels, second)
    runner(torch.full_like(draw_pixels(encoder, first), torch.nan), first)
    assert_equal_outputs(runner(pixels, second), expected)
    padding = statics_of(runner).pixels[pixels.shape[0] :]
    assert not padding.any(), "rows of padding are zero"
    # Even where rows of padding are not finite.
    padding.fill_(torch.nan)
    assert_equal_outputs(runner(pixels, second), expected)


def test_copies_stay_and_views_are_overwritten() -> None:
    encoder = frozen("qwen3_vl_vision")
    one, other = (draw_pixels(encoder, IMAGES, torch.float64, seed) for seed in (1, 2))
    runner = runner_of(encoder)
    kept = runner(one, IMAGES)
    before = {name: tensor.clone() for name, tensor in named_outputs(kept).items()}
    runner(other, IMAGES)
    for name, tensor in named_outputs(kept).items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "no more memory than its rows"
    runner.copy_outputs = False
    view = runner(one, IMAGES)
    assert_equal_outputs(view, kept)
    now = runner(other, IMAGES)
    for name, tensor in named_outputs(view).items():
        assert tensor.data_ptr() == named_outputs(now)[name].data_ptr()
        assert not torch.equal(tensor, before[name])


def test_weights_changed_in_place_count_and_replaced_ones_are_noticed() -> None:
    encoder = frozen("qwen3_vl_vision")
    runner = runner_of(encoder).warmup()
    assert runner.captured == runner.budgets
    pixels = draw_pixels(encoder, IMAGES, torch.float64)

    def agrees(captured: int) -> None:
        assert_equal_outputs(runner(pixels, IMAGES), encoder(pixels, IMAGES))
        assert len(runner.captured) == captured

    layer = encoder.blocks[1].mlp.linear_fc1
    with torch.no_grad():
        layer.weight.mul_(0.5)
    agrees(2)
    encoder.load_state_dict({name: tensor * 0.9 for name, tensor in encoder.state_dict().items()})
    agrees(2)
    layer.weight.data = layer.weight.data * 2
    agrees(1)
    runner.warmup()
    layer.bias = nn.Parameter(layer.bias.detach() + 1, requires_grad=False)
    agrees(1)
    runner.warmup()
    encoder.blocks[0].attn.proj = nn.Linear(144, 144, dtype=torch.float64).requires_grad_(False)
    agrees(1)
    runner.warmup()
    encoder.float()
    pixels = pixels.float()
    agrees(1)
    runner.warmup()
    with torch_ops.settings(path="auto" if torch_ops.settings.path == "portable" else "portable"):
        agrees(1)
    runner.warmup()
    runner.clear()
    assert runner.captured == ()
    agrees(1)


def test_pixels_of_another_dtype_are_cast() -> None:
    encoder = frozen("qwen3_vl_vision", torch.bfloat16)
    pixels = draw_pixels(encoder, IMAGES)
    assert torch.equal(runner_of(encoder)(pixels, IMAGES)[1], runner_of(encoder)(pixels.bfloat16(), IMAGES)[1])


def test_a_batch_that_fits_no_budget() -> None:
    encoder = frozen("qwen2_5_vl_vision")
    refusing, falling_back = runner_of(encoder), EncoderGraphs(encoder, [LARGE, SMALL])
    for grid, got in (
        (torch.tensor([[1, 20, 22]]), "440 patches, 1 images, 1 frames, 9 windows"),
        (torch.tensor([[1, 2, 2]] * 9), "36 patches, 9 images, 9 frames, 9 windows"),
        (torch.tensor([[13, 2, 2]]), "52 patches, 1 images, 13 frames, 13 windows"),
        (torch.tensor([[1, 2, 2], [5, 2, 36]]), "364 patches, 2 images, 6 frames, 26 windows"),
    ):
        pixels = draw_pixels(encoder, grid, torch.float64)
        assert (refusing.budget_of(grid) is None) is (got != "364 patches, 2 images, 6 frames, 26 windows")
        if refusing.budget_of(grid) is None:
            with pytest.raises(ValueError) as refusal:
                refusing(pixels, grid)
            assert str(refusal.value) == (
                f"EncoderGraphs: the batch has {got}, expected at most one of the budgets (200 patches, 4 images, "
                "8 frames, 30 windows; 400 patches, 8 images, 12 frames, 40 windows)"
            )
            assert torch.equal(falling_back(pixels, grid)[1], encoder(pixels, grid)[1])
            assert falling_back.captured == ()
    assert refusing.budget_of(torch.tensor([[1, 2, 2]] * 5)) == LARGE


def test_what_a_replay_does_not_take() -> None:
    encoder = frozen("qwen3_vl_vision", torch.float32)
    refusing, falling_back = runner_of(encoder), EncoderGraphs(encoder, [LARGE])
    pixels = draw_pixels(encoder, IMAGES)
    cu_seqlens = torch.tensor([0, pixels.shape[0]], dtype=torch.int32)
    for named, message in (
        ({"cu_seqlens": cu_seqlens}, "cu_seqlens is .*, expected None"),
        ({"chunk_tokens": 64}, "chunk_tokens is .*, expected None"),
        ({"output_hidden_states": True}, "output_hidden_states is .*, expected None"),
    ):
        with pytest.raises(ValueError, match=message):
            refusing(pixels, IMAGES, **named)
        assert_equal_outputs(falling_back(pixels, IMAGES, **named), encoder(pixels, IMAGES, **named))
    contexts: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast is .*, expected off"),
        (lambda: torch_ops.settings(checked=True), "settings.checked is .*, expected False"),
    ]
    for context, message in contexts:
        with context():
            with pytest.raises(ValueError, match=message):
                refusing(pixels, IMAGES)
            with pytest.raises(ValueError, match=message):
                falling_back.warmup()
            assert_equal_outputs(falling_back(pixels, IMAGES), encoder(pixels, IMAGES))
    with pytest.raises(ValueError, match="grid_thw is None, expected a grid, or metadata whose images"):
        refusing(pixels)
    assert falling_back.captured == ()
    falling_back(pixels, IMAGES, output_hidden_states=False, chunk_tokens=None, max_seqlen=180)
    assert len(falling_back.captured) == 1


def test_bad_arguments_are_refused() -> None:
    encoder = frozen("qwen3_vl_vision")
    pixels = draw_pixels(encoder, IMAGES)
    for message, args, named in (
        ("encoder is Linear, expected a QwenVisionEncoder", (nn.Linear(2, 2), [4]), {}),
        ("budgets is none, expected at least one", (encoder, []), {}),
        ("budgets is 64, expected a list, as token_budgets makes it", (encoder, 64), {}),
        (r"budgets\[1\] has 10, expected a multiple of 4 patches", (encoder, [8, 10]), {}),
        (r"budgets\[0\] has None, expected a multiple of 4 patches", (encoder, [Padding(images=4)]), {}),
        (
            r"budgets\[0\] is Padding\(rows=8, images=-1, .*expected integers from 1 on",
            (encoder, [Padding(rows=8, images=-1)]),
            {},
        ),
        # No image would ever fit.
        (r"budgets\[0\] is .*images=0, .*expected integers from 1 on", (encoder, [Padding(rows=8, images=0)]), {}),
        (r"budgets\[1\] is 64.0, expected integers from 1 on", (encoder, [64, 64.0]), {}),
        ("fallback is 'no', expected 'eager' or 'refuse'", (encoder, [8]), {"fallback": "no"}),
    ):
        with pytest.raises(ValueError, match=message):
            EncoderGraphs(*args, **named)
    runner = runner_of(encoder)
    others = vision_metadata(IMAGES, dataclasses.replace(encoder.sizes, theta=100.0))
    for message, metadata in (("str, expected a result", "x"), ("made for .*, expected made for", others)):
        with pytest.raises(ValueError, match=f"metadata is {message}"):
            runner(pixels, metadata=metadata)
    with pytest.raises(ValueError, match="pixel_values has 279, expected 280 rows, the patches of the grid"):
        runner(pixels[1:], IMAGES)
    with pytest.raises(ValueError, match="the width, is .*, expected at least 0 and a multiple of 2"):
        runner(pixels, torch.tensor([[1, 2, 3]]))


def test_gradients_are_refused() -> None:
    encoder = from_transformers(tiny_tower("qwen3_vl_vision"))
    runner = EncoderGraphs(encoder, [LARGE])
    pixels = draw_pixels(encoder, IMAGES)
    for _ in range(2):
        with pytest.raises(ValueError, match="the gradient mode is on, expected off"):
            runner(pixels.requires_grad_(), IMAGES)
        encoder.requires_grad_(False)
    runner(pixels.detach(), IMAGES)
    with torch.no_grad():
        assert not runner(pixels, IMAGES)[0].requires_grad


def test_modes_take_turns() -> None:
    """A graph that was captured in inference mode replays outside of it, and the other way round."""
    encoder = from_transformers(tiny_tower("qwen2_5_vl_vision"))
    pixels = draw_pixels(encoder, IMAGES)
    runner = EncoderGraphs(encoder, [LARGE])
    with torch.inference_mode():
        first = runner(pixels, IMAGES)
    with torch.no_grad():
        second = runner(pixels, IMAGES)
    with torch.inference_mode():
        third = runner(pixels, IMAGES)
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], third[0])
    assert not second[0].is_inference()


def test_called_like_the_encoder() -> None:
    encoder = frozen("qwen3_vl_vision", torch.float32)
    runner = runner_of(encoder)
    pixels = draw_pixels(encoder, IMAGES)
    expected = runner(pixels, IMAGES)
    for args, named in (
        ((), {"hidden_states": pixels, "grid_thw": IMAGES, "return_dict": True}),
        ((pixels,), {"metadata": vision_metadata(IMAGES, encoder.sizes)}),
    ):
        assert torch.equal(runner(*args, **named).pooler_output, expected.pooler_output)
    as_tuple = runner(pixels, IMAGES, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[1], expected.pooler_output)
    assert torch.equal(qwen_vl.encode(runner, pixels, IMAGES).pooler_output, expected.pooler_output)
    compiled = torch.compile(lambda pixels: 2 * runner(pixels, IMAGES).pooler_output, backend="eager")
    assert torch.equal(compiled(pixels), 2 * expected.pooler_output)


def test_in_a_whole_model() -> None:
    """As the forward of the encoder that stands there; what does not fit goes through the encoder itself."""
    model = tiny_model()
    names = list(model.state_dict())
    tokens = torch.tensor([[token for t, h, w in GRID for token in (6, *[5] * (t * h * w // 4))]])
    named = {
        "input_ids": tokens,
        "pixel_values": draw_pixels(model.model.visual, IMAGES),
        "image_grid_thw": IMAGES,
        "mm_token_type_ids": (tokens == 5).int(),
    }
    with torch.no_grad():
        eager = {"logits": model(**named).logits}
        exact = copy.deepcopy(model).double()
        truth = {"logits": exact(**{**named, "pixel_values": named["pixel_values"].double()}).logits}
        encoder = from_transformers(accelerate(model))
        for budgets, captured in (([400], 1), ([64], 0)):
            encoder.forward = runner = EncoderGraphs(encoder, [Padding(rows, 8, 8) for rows in budgets])
            check({"logits": model(**named).logits}, eager, truth)
            assert len(runner.captured) == captured
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    "clone", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("copy", "pickle")
)
def test_copies_of_a_model_have_runners_of_their_own(clone: Callable[[Any], Any]) -> None:
    """Copies have weights of their own, and no graphs yet."""
    encoder = frozen("qwen3_vl_vision")
    encoder.forward = runner = runner_of(encoder, copy_outputs=False)
    pixels = draw_pixels(encoder, IMAGES, torch.float64)
    expected = named_outputs(encoder(pixels, IMAGES))
    twin = clone(encoder)
    assert twin.forward.encoder is twin and twin.forward.captured == () and len(runner.captured) == 1
    assert (twin.forward.budgets, twin.forward.fallback, twin.forward.copy_outputs) == (runner.budgets, "refuse", False)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.25)
    assert not torch.equal(twin(pixels, IMAGES).pooler_output, expected["pooler_output"])
    assert_equal_outputs(twin(pixels, IMAGES), QwenVisionEncoder.forward(twin, pixels, IMAGES))
    assert all(torch.equal(value, expected[name]) for name, value in named_outputs(encoder(pixels, IMAGES)).items())


def test_defaults_are_those_of_the_configuration() -> None:
    encoder = frozen("qwen3_vl_vision")
    runner = EncoderGraphs(encoder, [LARGE])
    pixels = draw_pixels(encoder, IMAGES, torch.float64)
    expected = runner(pixels, IMAGES)
    encoder.config.return_dict = False
    as_tuple = runner(pixels, IMAGES)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[1], expected.pooler_output)
    assert_equal_outputs(runner(pixels, IMAGES, return_dict=True), expected)
    assert isinstance(runner(pixels, IMAGES, chunk_tokens=64), tuple)
    encoder.config.return_dict, encoder.config.output_hidden_states = True, True
    assert len(runner(pixels, IMAGES).hidden_states) == len(encoder.blocks) + 1
    assert "hidden_states" not in runner(pixels, IMAGES, output_hidden_states=False)
    runner.fallback = "refuse"
    with pytest.raises(ValueError, match="output_hidden_states is .*, expected None"):
        runner(pixels, IMAGES)


def test_weights_are_looked_at_while_the_device_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """And modules are not walked again, with gradients on neither."""
    encoder = frozen("qwen3_vl_vision")
    runner = runner_of(encoder).warmup()
    pixels = draw_pixels(encoder, IMAGES, torch.float64)
    expected = runner(pixels, IMAGES)
    seen: list[str] = []
    looks = ((Inputs, "fill"), (Statics, "usable"), (Statics, "current"), (Recording, "__init__"))
    for owner, name in (*looks, *((recording, "replay") for recording in statics_of(runner).recordings.values())):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name), name, seen))
    for name in ("modules", "parameters", "named_modules", "named_parameters"):
        monkeypatch.setattr(nn.Module, name, noting(getattr(nn.Module, name), name, seen))
    with torch.enable_grad():
        assert_equal_outputs(runner(pixels, IMAGES), expected)
    assert seen == ["fill", "usable", "replay", "current"]


def noting(function: Callable[..., Any], name: str, seen: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **named: Any) -> Any:
        seen.append(name)
        return function(*args, **named)

    return noted


def test_modules_put_aside_do_not_refuse_and_their_graphs_are_gone_before_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = frozen("qwen3_vl_vision")
    encoder.merger.requires_grad_()
    runner = runner_of(encoder)
    pixels = draw_pixels(encoder, IMAGES, torch.float64)
    with torch.no_grad():
        runner(pixels, IMAGES)
    (recording,) = map(weakref.ref, statics_of(runner).recordings.values())
    alive: list[bool] = []
    original = Recording.__init__

    def noted(*args: Any) -> None:
        alive.append(recording() is not None)
        original(*args)

    monkeypatch.setattr(Recording, "__init__", noted)
    encoder.merger = copy.deepcopy(encoder.merger).requires_grad_(False)
    # No weight needs a gradient any more.
    assert_equal_outputs(runner(pixels, IMAGES), encoder(pixels, IMAGES))
    assert alive == [False]
    (recording,) = map(weakref.ref, statics_of(runner).recordings.values())
    encoder.merger = copy.deepcopy(encoder.merger)
    assert_equal_outputs(runner(pixels, IMAGES), encoder(pixels, IMAGES))
    assert alive == [False, False]
    (recording,) = map(weakref.ref, statics_of(runner).recordings.values())
    encoder.merger = copy.deepcopy(encoder.merger)
    small = torch.tensor([[1, 2, 2]])
    runner(draw_pixels(encoder, small, torch.float64), small)
    # Nothing stale is captured for another budget.
    assert alive == [False, False, False]


def replace_data(layer: Any) -> None:
    layer.weight.data = layer.weight.data.clone()


def reinterpret(layer: Any) -> None:
    layer.weight.data = layer.weight.data.view(torch.int32)


def transpose(layer: Any) -> None:
    layer.weight.data = layer.weight.data.t()


def drop_bias(layer: Any) -> None:
    layer.bias = None


def mask(layer: Any) -> None:
    prune.identity(layer, "weight")


def add_buffer(layer: Any) -> None:
    layer.register_buffer("more", torch.zeros(1))


def add_module(layer: Any) -> None:
    layer.more = nn.Identity()


@pytest.mark.parametrize("change", (replace_data, reinterpret, transpose, drop_bias, mask, add_buffer, add_module))
def test_changes_of_weights_are_found(change: Callable[[Any], None]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)).requires_grad_(False)
    weights = Weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.train(False)
    assert weights.in_place() and weights.unchanged() and len(weights.tensors()) == 6
    change(model[0][1])
    assert not weights.unchanged()
    assert weights.in_place() == (change is not replace_data), "what else was put aside is kept alive"


class _Event:
    """As of CUDA, where there is none; `seen` is the order of what was asked of it."""

    def __init__(self, seen: list[str]) -> None:
        self.record, self.synchronize = (lambda: seen.append("record")), (lambda: seen.append("synchronize"))
        self.wait_event = lambda event: seen.append("wait" if event is self else "wait for another")


def test_calls_wait_for_the_one_before_and_record_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = frozen("qwen3_vl_vision")
    runner = runner_of(encoder).warmup()
    pixels = draw_pixels(encoder, IMAGES, torch.float64)
    seen: list[str] = []
    event = _Event(seen)
    statics_of(runner)._done = event
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: event)
    monkeypatch.setattr(Inputs, "fill", noting(Inputs.fill, "fill", seen))
    for recording in statics_of(runner).recordings.values():
        monkeypatch.setattr(recording, "replay", noting(recording.replay, "replay", seen))
    runner(pixels, IMAGES)
    assert seen == ["wait", "fill", "replay", "record"]
    seen.clear()
    with pytest.raises(ValueError, match="gradients"):
        runner(pixels.requires_grad_(), IMAGES)
    assert seen == []


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = frozen("qwen3_vl_vision", torch.float32)
    runner = runner_of(encoder)
    batches = [(draw_pixels(encoder, grid, seed=seed), grid) for seed in range(2) for grid in BATCHES[:2]]
    encode = encoder.encode_packed

    def wait_and_encode(*args: Any) -> Any:
        # For others to come in between.
        time.sleep(0.005)
        return encode(*args)

    monkeypatch.setattr(encoder, "encode_packed", wait_and_encode)
    expected = [runner(*batch).pooler_output for batch in batches]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(3):
            if not torch.equal(runner(*batches[index]).pooler_output, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_token_budgets() -> None:
    assert token_budgets(4096) == [256, 512, 1024, 2048, 4096]
    assert token_budgets(1500, 256, 2) == [256, 384, 512, 768, 1024, 1500]
    assert token_budgets(601, 100) == [100, 200, 400, 604]
    assert token_budgets(4, 1) == token_budgets(4) == [4]
    for message, args in (
        ("min_tokens is 256, expected from 1 to max_tokens, 64", (64, 256)),
        ("max_tokens is 1000.0, expected an integer", (1000.0,)),
        ("min_tokens is 0.5, expected an integer", (64, 0.5)),
        ("per_doubling is 1.5, expected an integer", (512, 256, 1.5)),
        ("max_tokens is 0, expected 1 or more", (0,)),
        ("min_tokens is .*, expected from 1 to", (64, 0)),
        ("per_doubling is 0, expected 1 or more", (512, 256, 0)),
    ):
        with pytest.raises(ValueError, match=message):
            token_budgets(*args)


@given(smallest=st.integers(1, 600), more=st.integers(0, 5000), per_doubling=st.integers(1, 5))
def test_token_budgets_waste_no_more_than_said(smallest: int, more: int, per_doubling: int) -> None:
    budgets = token_budgets(smallest + more, smallest, per_doubling)
    assert budgets == sorted(set(budgets)) and budgets[-1] >= smallest + more
    assert all(budget % 4 == 0 for budget in budgets)
    for below, above in zip(budgets, budgets[1:], strict=False):
        assert above - (below + 1) <= above / (per_doubling + 1) + 4


def test_budgets_have_bounds_on_everything() -> None:
    encoder, windowed = frozen("qwen3_vl_vision"), frozen("qwen2_5_vl_vision")
    single = Padding(256, 1, 1), Padding(4096, 1, 1)
    several = Padding(256, 2, 2), Padding(4096, 16, 16)
    assert EncoderGraphs(encoder, [4096, 256, 256]).budgets == (single[0], several[0], single[1], several[1])
    assert EncoderGraphs(windowed, [4096]).budgets == (Padding(4096, 1, 1, 132), Padding(4096, 16, 16, 132))
    assert EncoderGraphs(encoder, [Padding(256, segments=9)]).budgets == (Padding(256, 2, 9),)
    assert EncoderGraphs(encoder, [Padding(256, images=9)]).budgets == (single[0], Padding(256, 9, 2))


@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
@pytest.mark.parametrize(
    ("image", "segments"),
    [((1, 16, 16), 1), ((1, 10, 18), 1), ((2, 8, 16), 2), ((0, 4, 4), 1), ((1, 16, 18), 1)],
    ids=str,
)
def test_one_frame_is_one_segment(model_type: str, image: tuple[int, int, int], segments: int) -> None:
    """Whether it fills its budget or not: attention has a schedule for one segment."""
    encoder = frozen(model_type)
    runner = EncoderGraphs(encoder, [256, 512], fallback="refuse")
    grid = torch.tensor([image])
    pixels = draw_pixels(encoder, grid, torch.float64)
    assert_equal_outputs(runner(pixels, grid), encoder(pixels, grid))
    (budget,) = runner.captured
    assert budget == runner.budget_of(grid) and (budget.images, budget.segments) == (segments, segments)
    recording = statics_of(runner).recordings[budget]
    assert recording.metadata.cu_seqlens.shape[0] == segments + 1


def tiny_l(dtype: torch.dtype = torch.bfloat16) -> tuple[QwenVisionEncoder, QwenVisionEncoder]:
    """A tower with L's head dimension, layers and taps, but few heads; and its copy in fp64 on the CPU."""
    tower = tiny_tower("qwen3_vl_vision", dtype, depth=9, deepstack_visual_indexes=[2, 5, 8], patch_size=16)
    exact = from_transformers(copy.deepcopy(tower).double())
    return from_transformers(tower).requires_grad_(False).cuda(), exact


def padded(runner: EncoderGraphs, grid: Tensor, budget: Padding) -> list[Tensor]:
    """The results of this budget's graph, from an eager call on its last inputs."""
    encoder, pixels = runner.encoder, statics_of(runner).pixels[: budget.rows]
    last, pooled, taps = encoder.encode_packed(pixels, vision_metadata(grid, encoder.sizes, "cuda", budget))
    return [last, pooled, *taps]


def assert_same_bits(actual: Any, whole: list[Tensor]) -> None:
    for (name, ours), wanted in zip(named_outputs(actual).items(), whole, strict=True):
        assert torch.equal(ours, wanted[: ours.shape[0]]), name


# Segments on the Hopper kernels' side of the mean length and on the other.
GPU_BATCHES = (
    torch.tensor([[1, 32, 32]]),
    torch.tensor([[1, 16, 16], [1, 24, 20]]),
    torch.tensor([[3, 12, 14], [1, 2, 2]]),
)


def on_host(output: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in named_outputs(output).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("order", (1, -1))
@pytest.mark.parametrize("budget", (Padding(1024, 4, 4), Padding(2048, 8, 64)), ids=("hopper", "short"))
def test_replays_equal_eager_calls(budget: Padding, order: int) -> None:
    encoder, exact = tiny_l()
    runner = EncoderGraphs(encoder, [budget], fallback="refuse")
    for grid in GPU_BATCHES[::order]:
        pixels = draw_pixels(encoder, grid, torch.bfloat16, seed=3).cuda()
        actual, eager = runner(pixels, grid), encoder(pixels, grid)
        truth = named_outputs(exact(pixels.double().cpu(), grid))
        check(on_host(actual), on_host(eager), truth)
        assert_same_bits(actual, padded(runner, grid, budget))
    assert runner.captured == (budget,)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", KINDS)
def test_replays_of_every_family(model_type: str) -> None:
    encoder = frozen(model_type, torch.float16).cuda()
    exact = frozen(model_type, torch.float16).double()
    runner = runner_of(encoder, copy_outputs=False).warmup()
    with torch.inference_mode():
        for grid in (*BATCHES[:3], *reversed(BATCHES)):
            pixels = draw_pixels(encoder, grid, torch.float16)
            actual = on_host(runner(pixels.cuda(), grid))
            eager = on_host(encoder(pixels.cuda(), grid))
            check(actual, eager, named_outputs(exact(pixels.double(), grid)))


@pytest.mark.gpu
def test_a_capture_that_failed_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the only one of its memory pool, which takes no more once it is gone."""
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [1024], fallback="refuse")
    grid, calls = torch.tensor([[1, 20, 20]]), 0
    pixels = draw_pixels(encoder, grid, torch.bfloat16).cuda()
    expected, encode_packed = (
        EncoderGraphs(encoder, [1024], fallback="refuse")(pixels, grid),
        QwenVisionEncoder.encode_packed,
    )

    def encode_or_fail(self: QwenVisionEncoder, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        results = encode_packed(self, *args)
        # The call before the capture, and that which is captured.
        if calls == 2:
            raise MemoryError("none left")
        return results

    monkeypatch.setattr(QwenVisionEncoder, "encode_packed", encode_or_fail)
    with pytest.raises(MemoryError, match="none left"):
        runner(pixels, grid)
    assert runner.captured == ()
    assert_same_bits(runner(pixels, grid), list(named_outputs(expected).values()))
    assert len(runner.captured) == 1 and calls == 4


@pytest.mark.gpu
def test_neither_the_encoder_nor_a_replay_waits() -> None:
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [1024, 2048], fallback="refuse").warmup()
    grids = [torch.tensor([[1, 16, 16], [1, 24, 20]]), torch.tensor([[1, 32, 34]]), torch.tensor([[1, 20, 20]])]
    batches = [(draw_pixels(encoder, grid, torch.bfloat16).cuda(), grid) for grid in grids]
    metadata = [vision_metadata(grid, encoder.sizes, "cuda") for grid in grids]
    for (pixels, _), each in zip(batches, metadata, strict=True):
        encoder(pixels, metadata=each)
    runner(*batches[0])
    pinned, on_device = batches[2][0].cpu().pin_memory(), grids[0].cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for (pixels, grid), each in zip(batches, metadata, strict=True):
            encoder(pixels, metadata=each)
            # The metadata of the padded batch is made in the first call, and remembered in the second.
            runner(pixels, grid)
            runner(pixels, metadata=each)
        runner(pinned, grids[2])
        with pytest.raises(RuntimeError, match="synchronizing"):
            runner(batches[0][0], on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_stays_flat_over_replays() -> None:
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, token_budgets(4096), fallback="refuse").warmup()
    batches = []
    for side in (16, 20, 28, 40, 60):
        grid = torch.tensor([[1, side, side]])
        batches.append((draw_pixels(encoder, grid, torch.bfloat16).cuda(), grid))

    def replay() -> None:
        for batch in (*batches, *reversed(batches)):
            runner(*batch)

    replay()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        replay()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)
    runner.clear()
    assert torch.cuda.memory_allocated() < allocated


@pytest.mark.gpu
def test_graphs_notice_weights() -> None:
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [1024], fallback="refuse")
    grid = GPU_BATCHES[0]
    pixels = draw_pixels(encoder, grid, torch.bfloat16).cuda()
    before = runner(pixels, grid).pooler_output
    layer = encoder.blocks[4].mlp.linear_fc2
    for change in (
        lambda: layer.weight.data.mul_(3),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 3, requires_grad=False)),
        lambda: encoder.half(),
    ):
        change()
        after = runner(pixels, grid)
        assert after.pooler_output.dtype is encoder.dtype
        assert_same_bits(after, padded(runner, grid, runner.budgets[0]))
        assert (after.pooler_output.float() != before.float()).any()
        before = after.pooler_output


@pytest.mark.gpu
def test_streams_and_threads_do_not_mix_batches() -> None:
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [1024, 2048], fallback="refuse").warmup()
    batches = [(draw_pixels(encoder, grid, torch.bfloat16, seed).cuda(), grid) for seed, grid in enumerate(GPU_BATCHES)]
    expected = [runner(*batch).pooler_output for batch in batches]
    torch.cuda.synchronize()
    results: list[tuple[int, Tensor]] = []

    def call(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.extend((index, runner(*batches[index]).pooler_output) for _ in range(10))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 10 * len(batches)
    for index, result in results:
        assert torch.equal(result, expected[index])


# Cycles for which a stream is held, some tenths of a second: far longer than what tests queue meanwhile.
HELD = 10**9


@pytest.mark.gpu
def test_a_call_waits_for_one_on_another_stream() -> None:
    """A replay that is held up still finds its own pixels and metadata."""
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [Padding(1024, 4, 4)], fallback="refuse").warmup()
    batches = [(draw_pixels(encoder, grid, torch.bfloat16, seed).cuda(), grid) for seed, grid in enumerate(GPU_BATCHES)]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()

    def results() -> list[Tensor]:
        pooled = []
        for batch, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):
                pooled.append(runner(*batch).pooler_output)
        return pooled

    # The first time each stream's metadata is made, which may wait.
    expected = results()
    torch.cuda.synchronize()
    (recording,) = statics_of(runner).recordings.values()
    replay = recording.replay

    def late() -> Any:
        torch.cuda._sleep(HELD)
        return replay()

    recording.replay = late
    actual = results()
    assert not streams[0].query(), "nothing was held"
    torch.cuda.synchronize()
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(actual, expected, strict=True))
    assert not torch.equal(expected[0][:1], expected[1][:1])


@pytest.mark.gpu
@pytest.mark.parametrize("cleared", (True, False))
def test_letting_go_of_graphs_waits_for_the_last_call(cleared: bool) -> None:
    """Their tensors belong to the stream of the first call, which knows nothing of the others."""
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [1024], fallback="refuse").warmup()
    grid = GPU_BATCHES[0]
    pixels = draw_pixels(encoder, grid, torch.bfloat16).cuda()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        runner(pixels, grid)
        torch.cuda._sleep(HELD)
        runner(pixels, grid)
    last = statics_of(runner)._done
    assert not last.query(), "nothing was held"
    if cleared:
        runner.clear()
    del runner
    assert last.query()


@pytest.mark.gpu
def test_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is theirs alone: cuBLAS has a workspace for each stream."""
    encoder, _ = tiny_l()
    encode, streams = encoder.encode_packed, set()

    def noted(*args: Any) -> Any:
        streams.add((torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()))
        return encode(*args)

    monkeypatch.setattr(encoder, "encode_packed", noted)
    runner = EncoderGraphs(encoder, [256, 512, 1024]).warmup()
    assert len(runner.captured) == 6
    own, current = statics_of(runner).own.stream.cuda_stream, torch.cuda.current_stream().cuda_stream
    assert streams == {(current, False), (own, True)} and own != current


@pytest.mark.gpu
def test_replays_outlive_the_graphs_of_others() -> None:
    """Memory that ended graphs leave behind is neither read nor written (`torch_ops/models/_capture.py`)."""
    encoder, _ = tiny_l()
    pixels = draw_pixels(encoder, IMAGES, torch.bfloat16).cuda()
    runners = [EncoderGraphs(encoder, [1024]).warmup() for _ in range(3)]
    expected = runners[-1](pixels, IMAGES)
    for _ in range(2):
        del runners[0]
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        assert_equal_outputs(runners[-1](pixels, IMAGES), expected)


@pytest.mark.gpu
def test_counters_of_the_hopper_path_come_back() -> None:
    if gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    with torch_ops.settings(path="auto"):
        _assert_counters_come_back()


def _assert_counters_come_back() -> None:
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [1024]).warmup()
    work_counters = attention_hopper.work_counters(statics_of(runner).pixels.device)

    def left() -> int:
        # Each runner has a stream, and that a counter for good.
        return len(work_counters._fresh[1]) + sum(size == 1 for _, size in work_counters._of_stream)

    runner.clear()
    before = left()
    # Images of one frame and of several.
    taken = 2 * len(encoder.blocks)
    runner.warmup()
    assert before - left() == taken == len(statics_of(runner).counters)
    encoder.half()
    runner.warmup()
    assert before - left() == taken
    del runner
    assert left() == before


@pytest.mark.gpu
def test_one_frame_that_fills_its_budget_is_the_eager_call() -> None:
    """Shapes stay equal, so that kernels and schedules do."""
    encoder, _ = tiny_l()
    runner = EncoderGraphs(encoder, [256, 1024], fallback="refuse")
    for grid in (torch.tensor([[1, 32, 32]]), torch.tensor([[1, 16, 16]])):
        pixels = draw_pixels(encoder, grid, torch.bfloat16).cuda()
        assert_same_bits(runner(pixels, grid), list(named_outputs(encoder(pixels, grid)).values()))
