"""CUDA graphs of a vision encoder: one for each budget of patches, replayed for every batch that fits it.

    runner = EncoderGraphs(encoder, token_budgets(16384))
    runner.warmup()
    with torch.inference_mode():
        output = runner(pixel_values, grid_thw)

A graph has fixed shapes. A batch is copied into static tensors of the smallest budget that holds it. The rest is empty
images, frames and windows, and rows past the last one, which no row sees. A CPU has no graphs; the encoder is called on
the same static tensors there.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import refuse
from torch_ops.models._recording import Statics
from torch_ops.models._watch import who_moves_weights
from torch_ops.models.budgets import whole_budgets, words_of
from torch_ops.models.vision import QwenVisionEncoder
from torch_ops.models.vision_metadata import (
    PRECOMPUTED,
    Image,
    Padding,
    VisionMetadata,
    filled_sizes,
    images_of,
)
from torch_ops.settings import settings

OP = "EncoderGraphs"

# Arguments that the encoder takes and a replay does not.
NOT_REPLAYED = ("chunk_tokens", "output_hidden_states", "output_attentions", *PRECOMPUTED)


class EncoderGraphs:
    """A `QwenVisionEncoder` in CUDA graphs, called as the encoder is, for inference.

    Args:
        encoder: encoder whose weights the graphs read in place. A weight changed in place counts from the next call on.
            Graphs are captured again after weights were replaced, cast or moved, adapters were switched, or PyTorch's
            numeric flags or `torch_ops.settings` changed. Hooks of modules inside run at the capture alone.
        budgets: numbers of patches, as `token_budgets` makes them, or `Padding`. A number has room for about one image
            and frame per 256 patches and one window per 32. A budget without a number of segments stands for two: one
            of a single frame, for which attention is faster, and one of several.
        fallback: "eager" calls the encoder itself if no budget fits, or for what replays do not offer: chunk_tokens,
            output_hidden_states, Transformers' precomputed tensors, autocast, settings(checked=True). "refuse" raises
            ValueError instead.
        copy_outputs: whether outputs are copies. If not, they are views of static tensors that the next call
            overwrites, whatever its budget.

    Budgets share one pixel tensor and one memory pool; each has its own metadata and outputs. Threads take turns, and
    calls on other streams wait for each other on the device. The caller must order reads of views on other streams.
    With a grid on the CPU a replay never waits for the device.
    """

    def __init__(
        self,
        encoder: QwenVisionEncoder,
        budgets: Iterable[int | Padding],
        *,
        fallback: str = "eager",
        copy_outputs: bool = True,
    ) -> None:
        if not isinstance(encoder, QwenVisionEncoder):
            refuse(OP, "encoder", "a QwenVisionEncoder, as from_transformers makes it", type(encoder).__name__)
        if fallback not in ("eager", "refuse"):
            refuse(OP, "fallback", "'eager' or 'refuse'", repr(fallback))
        if not isinstance(budgets, Iterable):
            refuse(OP, "budgets", "a list, as token_budgets makes it", repr(budgets))
        named = [(f"budgets[{i}]", budget) for i, budget in enumerate(budgets)]
        complete = set[Padding]().union(*(whole_budgets(OP, *each, encoder.sizes) for each in named))
        if not complete:
            refuse(OP, "budgets", "at least one", "none")
        self.encoder = encoder
        self.fallback = fallback
        self.copy_outputs = copy_outputs
        self.budgets = tuple(sorted(complete, key=astuple))
        self._lock = threading.Lock()
        self._statics: Statics | None = None

    def warmup(self) -> "EncoderGraphs":
        """Capture the graphs of all budgets, the largest first, so that others fit into its memory."""
        if (obstacle := _mode(self.encoder)) is not None:
            refuse(OP, *obstacle)
        with self._lock, _device_of(self.encoder):
            if not self._ready().current():
                self._statics = None
            statics = self._ready()
            with statics.in_order():
                for budget in reversed(self.budgets):
                    statics.recording(self.encoder, budget)
        return self

    def clear(self) -> None:
        """Free all graphs and static tensors once none is in use; the next call captures again."""
        with self._lock:
            self._statics = None

    @property
    def captured(self) -> tuple[Padding, ...]:
        """Budgets that have a graph."""
        statics = self._statics
        return tuple(budget for budget in self.budgets if statics is not None and budget in statics.recordings)

    @property
    def static_tensors(self) -> tuple[Tensor, ...]:
        """Tensors outside of the memory pool that calls are copied into: the pixels, and the metadata of each graph."""
        with self._lock, _device_of(self.encoder):
            return self._ready().static_tensors()

    @property
    def pool(self) -> tuple[int, int] | None:
        """Memory pool of all graphs, as `torch.cuda.memory_snapshot` knows it; None without graphs."""
        with self._lock, _device_of(self.encoder):
            own = self._ready().own
        return None if own is None else tuple(own.pool)

    def budget_of(self, grid_thw: Tensor) -> Padding | None:
        """Return the budget that a batch takes, or None if it fits none."""
        return self._budget(images_of("EncoderGraphs", grid_thw, self.encoder.sizes.merge_size))

    @torch.compiler.disable
    def __call__(
        self,
        hidden_states: Tensor,
        grid_thw: Tensor | None = None,
        *,
        metadata: VisionMetadata | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the encoder's output for all images or videos of a batch, as `QwenVisionEncoder.forward` does.

        Pixel values of another dtype are cast to the encoder's. Those on the host are sent, best from pinned memory.
        Raises ValueError if a gradient would be needed or the encoder refuses, and with fallback="refuse" for calls
        that it does not replay.
        """
        if return_dict is None:
            return_dict = getattr(self.encoder.config, "return_dict", None)
        if kwargs.get("output_hidden_states") is None:
            kwargs["output_hidden_states"] = getattr(self.encoder.config, "output_hidden_states", None)
        self.encoder.check_metadata(metadata)
        hidden_states = self.encoder.rows_of(hidden_states)
        images = self._images(grid_thw, metadata)
        budget = None if images is None else self._budget(images)
        if (obstacle := self._obstacle(images, budget, kwargs)) is not None:
            if self.fallback == "refuse":
                refuse(OP, *obstacle)
            if _needs_gradients(hidden_states, self.encoder.parameters):
                _refuse_gradients()
            # Not by a call of the module, whose forward may be this object.
            return QwenVisionEncoder.forward(
                self.encoder, hidden_states, grid_thw, metadata=metadata, return_dict=return_dict, **kwargs
            )
        assert images is not None and budget is not None
        self.encoder.check_pixels(hidden_states, sum(t * h * w for t, h, w in images), sent=True)
        with self._lock, _device_of(self.encoder):
            last, pooled, *taps = self._replayed(hidden_states, images, budget)
        output = self.encoder.output_of(last, pooled, taps)
        return output.to_tuple() if return_dict is False else output

    def _replayed(self, pixel_values: Tensor, images: tuple[Image, ...], budget: Padding) -> list[Tensor]:
        outputs = None
        while outputs is None:
            statics = self._ready()
            if _needs_gradients(pixel_values, statics.weights.tensors):
                if statics.current():
                    _refuse_gradients()
            else:
                outputs = statics.replayed(self.encoder, pixel_values, images, budget, self.copy_outputs)
            if outputs is None:
                # Before others are captured: two would not fit side by side.
                self._statics = None
        return outputs

    def _images(self, grid_thw: Tensor | None, metadata: VisionMetadata | None) -> tuple[Image, ...] | None:
        if metadata is not None:
            return metadata.made_of
        return None if grid_thw is None else images_of("EncoderGraphs", grid_thw, self.encoder.sizes.merge_size)

    def _budget(self, images: tuple[Image, ...]) -> Padding | None:
        filled = filled_sizes(images, self.encoder.sizes)
        return next((budget for budget in self.budgets if budget.holds(filled)), None)

    def _obstacle(
        self, images: tuple[Image, ...] | None, budget: Padding | None, kwargs: dict[str, Any]
    ) -> tuple[str, str, object] | None:
        """Why this call is no replay: an argument, what was wanted and what came."""
        for name in NOT_REPLAYED:
            # Values may be tensors, which are not to be compared.
            if kwargs.get(name) is not None and kwargs[name] is not False:
                return name, "None, since a replay does not take it", "given"
        if images is None:
            return "grid_thw", "a grid, or metadata whose images the host knows", None
        if (mode := _mode(self.encoder)) is not None:
            return mode
        if budget is None:
            budgets = "; ".join(map(words_of, self.budgets))
            filled = words_of(filled_sizes(images, self.encoder.sizes))
            return "the batch", f"of at most one of the budgets ({budgets})", filled
        return None

    def _ready(self) -> Statics:
        """Static tensors on the encoder's device."""
        if self._statics is not None and self._statics.pixels.device != self.encoder.device:
            self._statics = None
        if self._statics is None:
            if who := next(filter(None, map(who_moves_weights, self.encoder.modules())), ""):
                refuse(OP, "encoder", "one whose weights stay in place; call the encoder itself", f"one that {who}")
            self._statics = Statics(self.encoder, max(budget.rows or 0 for budget in self.budgets))
        return self._statics

    def __getstate__(self) -> dict[str, Any]:
        """State of copies and pickles, which have no graphs yet."""
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_statics")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _statics=None)


def _mode(encoder: QwenVisionEncoder) -> tuple[str, str, object] | None:
    """The modes of the caller, or of the encoder, that no graph can have."""
    if encoder.device.type == "meta":
        return "encoder", "on a device; call an offloaded one itself", "on meta"
    if torch.is_autocast_enabled(encoder.device.type):
        return "autocast", "off; cast the encoder instead", "on"
    if settings.checked:
        return "settings.checked", "False, since checks wait for the device", True
    return None


def _device_of(encoder: QwenVisionEncoder) -> Any:
    device = encoder.device
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _needs_gradients(pixel_values: Tensor, weights: Callable[[], Iterable[Tensor]]) -> bool:
    return torch.is_grad_enabled() and (
        pixel_values.requires_grad or any(weight.requires_grad for weight in weights())
    )  # fmt: skip


def _refuse_gradients() -> None:
    wanted = "off, because a replay has no gradients; call it under torch.inference_mode() or torch.no_grad()"
    refuse(OP, "the gradient mode", wanted, "on")


__all__ = ["EncoderGraphs"]
