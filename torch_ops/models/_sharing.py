"""An encoder on the very parameters of a vision encoder of Transformers, and back."""

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_ops._checks import refuse
from torch_ops.models._layers import plain
from torch_ops.models.families import FAMILIES
from torch_ops.models.vision import QwenVisionEncoder


def from_transformers(model: nn.Module) -> QwenVisionEncoder:
    """The vision encoder in `model`, itself or the one of a whole model, with the very parameters it has.

    Nothing is copied: what trains, moves or casts one does so to the other. Linear layers and norms that were replaced
    (adapters, quantised ones) or have hooks are shared as modules, and called. Raises TypeError where `model` has no
    vision encoder of a supported family, ValueError where other parameters or modules are not that class's own.
    """
    found = [module for module in modules_of(model) if is_vision_model(module)]
    if len(found) != 1:
        raise TypeError(
            f"model must be or hold one vision encoder of Transformers ({vision_classes()}), "
            f"got {type(model).__name__}, which holds {len(found) or 'none'}"
        )
    (source,) = found
    if isinstance(source, QwenVisionEncoder):
        return source
    with torch.device("meta"):
        encoder = QwenVisionEncoder(source.config)
    called = _check_modules(source, encoder)
    _check_parameters(source, encoder, called)
    # Before what is called is in it, which has a mode of its own.
    encoder.train(source.training)
    share(source, encoder, called)
    return encoder


def kinds_of(encoder: QwenVisionEncoder) -> dict[str, nn.Module]:
    """The modules of Transformers' class for the encoder's configuration, by name, without values."""
    config: Any = copy.deepcopy(encoder.config)
    # Whatever was chosen instead counts nowhere here.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return dict(encoder.family.tower_class()(config).named_modules())


def _check_modules(source: nn.Module, encoder: QwenVisionEncoder) -> list[str]:
    """Refuses modules of the tower that are not as its configuration has them: what they do would not count here.

    Layers and norms may be others, since those are called. Returns their names.
    """
    modules = dict(source.named_modules(remove_duplicate=False))
    called = []
    for name, module in kinds_of(encoder).items():
        kind, place = type(module), name or "the vision encoder"
        if name not in modules:
            refuse("from_transformers", place, f"{kind.__name__}, by the config", "none")
        theirs = modules[name]
        other = _other_constant(theirs, module)
        if name in encoder.layer_names:
            if other is not None or not plain(theirs, (kind,)):
                called.append(name)
            continue
        # Of a list nothing is used but what it holds.
        if kind is nn.ModuleList:
            continue
        if not isinstance(theirs, kind):
            got = type(theirs).__name__
            got = f"{got} of {type(theirs).__module__}" if got == kind.__name__ else got
            refuse("from_transformers", place, f"{kind.__name__}, by the config", got)
        # Transformers wraps the forward of each subclass of a block.
        if inspect.unwrap(type(theirs).forward) is not inspect.unwrap(kind.forward) or _is_patched(theirs):
            wanted = f"that of {kind.__name__} (compile it afterwards, undo what else was put there)"
            refuse("from_transformers", f"{name}.forward".lstrip("."), wanted, "another")
        if other is not None:
            refuse("from_transformers", f"{name}.{other[0]}", f"{other[1]}, by the config", other[2])
    return called


def _other_constant(theirs: nn.Module, made: nn.Module) -> tuple[str, object, object] | None:
    """The first of the constants that `made` has and `theirs` has otherwise: its name, and both values."""
    for constant in ("eps", "variance_epsilon", "scaling", "approximate"):
        wanted, got = getattr(made, constant, None), getattr(theirs, constant, None)
        if wanted is not None and wanted != got:
            return constant, wanted, got
    return None


def _is_patched(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own that may do something else.

    The hub's kernels give activations one, which computes the same; Accelerate's hooks keep what they wrap.
    """
    forward = module.__dict__.get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    same = getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module
    return forward is not None and not same and bool([*module.parameters(), *module.buffers()])


def _check_parameters(source: nn.Module, encoder: QwenVisionEncoder, called: Iterable[str]) -> None:
    """Refuses a source that is no tower of the encoder's family, but for modules that are called."""
    shapes = {name: parameter.shape for name, parameter in encoder.named_parameters()}
    parameters = dict(source.named_parameters(remove_duplicate=False))
    for layer in called:
        for named in (shapes, parameters):
            for name in [name for name in named if name.startswith(f"{layer}.")]:
                del named[name]
    for what, names in (("lacks", shapes.keys() - parameters), ("also holds", parameters.keys() - shapes.keys())):
        if names:
            raise ValueError(f"{type(source).__name__} {what} {', '.join(sorted(names)[:3])}; merge adapters first")
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            refuse("from_transformers", name, f"of shape {list(shapes[name])}", list(parameter.shape))


def share(source: nn.Module, target: nn.Module, called: Iterable[str]) -> None:
    """Gives target the very parameters of source, and those of its modules that are called as modules."""
    for name in called:
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, source.get_submodule(name))
    for name, module in source.named_modules(remove_duplicate=False):
        # A bias may be None.
        for leaf, parameter in module._parameters.items():
            setattr(target.get_submodule(name), leaf, parameter)


def modules_of(model: object) -> Iterable[nn.Module]:
    """None of what is no module, which callers then refuse by what they look for."""
    return model.modules() if isinstance(model, nn.Module) else ()


def is_vision_model(module: nn.Module) -> bool:
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return model_type in FAMILIES and {"patch_embed", "blocks"} <= module._modules.keys()


def vision_classes() -> str:
    return ", ".join(family.vision_class for family in FAMILIES.values())


__all__ = ["from_transformers", "is_vision_model", "kinds_of", "modules_of", "share", "vision_classes"]
