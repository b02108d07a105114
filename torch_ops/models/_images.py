"""Image files as Transformers' processor takes them, and the processor of a checkpoint."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from torch_ops._core.files import NotStoredError, check_stored
from torch_ops.models._checkpoint import vision_config
from torch_ops.models._files import (
    NUMBER,
    POSITIVE,
    SWITCH,
    Rule,
    check_values,
    fields,
    is_there,
    listed,
    optional,
    parsing,
    read_json,
    reason,
    refuse_value,
    whole,
)
from torch_ops.models.families import family_key

# Formats whose further images follow the first in time. Those of other formats, such as the MPO of some cameras, are
# other views, layers or sizes of one picture.
_ANIMATIONS = ("GIF", "PNG", "WEBP", "AVIF", "TIFF", "FLI")

# The preprocessor_config.json that the Qwen3-VL and Qwen3.5 checkpoints share.
_QWEN3_PROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# Those of the others; what is not named here is the class's own, patches of 14 x 14 pixels and CLIP's mean.
_OLDER_SIZE = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}}
_OTHER_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl_vision": _OLDER_SIZE,
    "qwen2_5_vl_vision": _OLDER_SIZE,
    "qwen3_omni_moe_vision_encoder": {**_QWEN3_PROCESSOR, **_OLDER_SIZE},
}

# Images are enlarged to the least number of pixels. More than Pillow takes for an attack would exhaust the memory.
_LEAST, _MOST = whole(1, 2 * 89_478_485), whole(1, 2**53)
# All that the processor reads of its file. Keys of other processors, which files have too, change no pixel.
_RULES = {
    "image_processor_type": Rule(
        "Qwen2VLImageProcessor", lambda name: isinstance(name, str) and name.startswith("Qwen") and "Image" in name
    ),
    "do_resize": SWITCH, "do_rescale": SWITCH, "do_normalize": SWITCH, "do_convert_rgb": SWITCH,
    "resample": whole(0, 5), "rescale_factor": POSITIVE, "image_mean": listed(NUMBER, 3),
    "image_std": listed(POSITIVE, 3), "patch_size": whole(1, 1024), "temporal_patch_size": whole(1, 64),
    "merge_size": whole(1, 64), "min_pixels": optional(_LEAST), "max_pixels": optional(_MOST),
    "size": fields({"shortest_edge": _LEAST, "longest_edge": _MOST, "min_pixels": _LEAST, "max_pixels": _MOST}),
}  # fmt: skip
# Settings that a tower shares with its processor, and the tower's names.
_SHARED = {
    "patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size",
}  # fmt: skip


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """Open the image at ``path`` as Transformers' processor takes it: 8-bit RGB, upright (EXIF), first frame.

    Transparent pixels lie on white from Transformers 5.23 on, and lose their transparency before. Values above 255, as
    in images of 16 bits, become 255. Raises OSError for a file that cannot be read. Raises ValueError for one that is
    not an image or is damaged.
    """
    with _readable(path), _opened(path) as image:
        return _upright(image)


def open_frames(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    """Open all frames of an animation, all pages, or the one image at ``path``, each as `open_image` does."""
    with ExitStack() as stack:
        with _readable(path):
            image = stack.enter_context(_opened(path))
            count = getattr(image, "n_frames", 1) if image.format in _ANIMATIONS else 1
            # An APNG may begin with a picture for those who cannot play it.
            first = 1 if image.info.get("default_image") and count > 1 else 0
        for place in range(first, count):
            with _readable(path):
                if count > 1:  # some formats of one image have no seek
                    image.seek(place)
                frame = _upright(image)
            yield frame


def _opened(path: str | os.PathLike[str]) -> Image.Image:
    check_stored(path)
    return Image.open(path)


def _upright(image: Image.Image) -> Image.Image:
    # Transformers turns an image where it opens a file, and its processor turns pixels into RGB.
    processor: Any = image_processor()
    return Image.fromarray(np.asarray(processor.convert_to_rgb(ImageOps.exif_transpose(image))))


@contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    path = os.fspath(path)
    try:
        yield
    except NotStoredError:
        raise
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image that Pillow can read; give a PNG, JPEG or WebP file") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist; give the path of an image file") from error
    except IsADirectoryError as error:
        wanted = "give the images in it one by one, or --frames for those of a video"
        raise IsADirectoryError(f"{path} is a directory; {wanted}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} has too many pixels ({reason(error)}); give a smaller image") from error
    except Exception as error:  # Pillow's readers of damaged files raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(f"{path} cannot be read: {reason(error).lower()}") from error
        raise ValueError(f"{path} cannot be decoded ({reason(error)}); give an intact image") from error


def image_processor(directory: str | os.PathLike[str] | None = None) -> Qwen2VLImageProcessorPil:
    """Return the image processor of the Qwen-VL families that needs no torchvision, with Qwen3-VL's settings.

    With ``directory`` it follows the checkpoint's ``preprocessor_config.json``, or the part of
    ``processor_config.json`` for images. Without these files it has the settings of the family in ``config.json``.
    Raises ValueError for a model of another family and for settings that no processor has. Raises ValueError too if
    patches have other sizes than the tower in ``config.json`` is made for.
    """
    if directory is None:
        return Qwen2VLImageProcessorPil(**_QWEN3_PROCESSOR)
    directory = Path(directory)
    config_file = directory / "config.json"
    config = vision_config(directory) if is_there(config_file) else None
    file, values = _settings_of(directory)
    if file is None:
        file, values = config_file, _OTHER_PROCESSORS.get(family_key(config), _QWEN3_PROCESSOR)
    check_values(file, values, _RULES)
    own = {key: value for key, value in values.items() if key in _RULES and key != "image_processor_type"}
    # A copy: some versions write min_pixels and max_pixels into the size that all processors share.
    own["size"] = dict(own.get("size", Qwen2VLImageProcessorPil.size))
    with parsing(file):
        processor = Qwen2VLImageProcessorPil(**own)
        if None in (processor.size["shortest_edge"], processor.size["longest_edge"]):
            raise ValueError("size has one of shortest_edge and longest_edge, expected both")
    if config is not None:
        _check_beside(processor, config, file, config_file)
    return processor


def _settings_of(directory: Path) -> tuple[Path | None, dict[str, Any]]:
    """The file that holds a checkpoint's settings of images, as Transformers finds it, and the settings."""
    whole_processor, own = (directory / f"{name}_config.json" for name in ("processor", "preprocessor"))
    if is_there(whole_processor) and "image_processor" in (values := read_json(whole_processor)):
        inner = values["image_processor"]
        if not isinstance(inner, dict):
            refuse_value(whole_processor, "image_processor", inner, "a JSON object")
        return whole_processor, inner
    return (own, read_json(own)) if is_there(own) else (None, {})


def _check_beside(processor: Qwen2VLImageProcessorPil, config: Any, file: Path, config_file: Path) -> None:
    """Refuse patches that the tower is not made for. Their number of values alone would not tell some of them apart."""
    for name, towers in _SHARED.items():
        ours, theirs = getattr(processor, name), getattr(config, towers)
        if ours != theirs:
            where = f"{file} has" if file != config_file else "without a preprocessor_config.json the processor has"
            raise ValueError(
                f"{where} {name} {ours}, and {towers} of the tower in {config_file} is {theirs}; "
                f"take both files from one checkpoint"
            )
    if config.in_channels != 3:
        refuse_value(config_file, "in_channels", config.in_channels, "3, since images are RGB")


__all__ = ["image_processor", "open_frames", "open_image"]
