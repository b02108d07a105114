"""An encoder on the very parameters of a vision encoder of Transformers, and back."""

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops._core.checks import refuse
from torch_ops._core.torch_private import (
    COMPILED_CALL,
    FIELDS_OF_HOOKS,
    HOOKS_OF_MODULES,
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)
from torch_ops.models._layers import plain
from torch_ops.models._watch import OFFLOADED, who_moves_weights
from torch_ops.models.families import FAMILIES, family_key
from torch_ops.models.vision import QwenVisionEncoder

_EPS = ("eps", "variance_epsilon")
# Attributes of Transformers' modules on which no result depends.
_NO_CONSTANTS = ("training", "gradient_checkpointing", "name_or_path")


def from_transformers(model: nn.Module) -> QwenVisionEncoder:
    """Return the vision encoder in `model`, itself or part of a whole model, on the same parameters.

    Nothing is copied: training, moving or casting one module changes the other. Layers, norms, MLPs, mergers and the
    patch embedding are shared as modules and called if they were replaced, as by adapters. So are those with another
    forward or activation. Hooks are shared too, and run in both.

    Raises TypeError if `model` has no vision encoder of a supported family. Raises ValueError if it has parameters or
    modules that its class does not have, or hooks on a module that is never called here. So it does if the encoder is
    sharded or offloaded.
    """
    found = [module for module in modules_of(model) if is_vision_model(module)]
    if len(found) != 1:
        raise TypeError(
            f"model is {type(model).__name__} with {len(found) or 'no'} vision encoders, expected one of Transformers "
            f"or a model that holds one ({vision_classes()})"
        )
    (source,) = found
    drop_same_forwards(source)
    if isinstance(source, QwenVisionEncoder):
        return source
    check_in_place("from_transformers", source, "accelerate", "accelerate the model first, then offload")
    with torch.device("meta"):
        encoder = QwenVisionEncoder(source.config)
    called = _check_modules(source, encoder)
    _check_parameters(source, encoder, called)
    share(source, encoder, called)
    copy_modes(source, encoder)
    return encoder


def check_in_place(op: str, model: nn.Module, first: str, then: str) -> None:
    """Refuse weights that hooks bring to modules of `model` for each call: other modules would not get them.

    `first` is what the caller should do before sharding, `then` what to do about offloading.
    """
    flat = next(model.parameters(), None) is None
    for name, module in model.named_modules():
        place, who, own = name or "the vision encoder", who_moves_weights(module), parameters_of(module).values()
        if who == OFFLOADED:
            refuse(op, place, f"on a device; {then}", "offloaded")
        # Modules without parameters are FSDP's even if it was told to ignore all that is inside.
        sharded = bool(who) and (bool(own) or flat)
        # Hooks of tensor parallelism belong to the layer, and both encoders call it.
        hooked = any(getattr(module, hooks) for hooks in HOOKS_OF_MODULES)
        if sharded or not hooked and any(hasattr(tensor, "device_mesh") for tensor in own):
            refuse(op, place, f"whole; {first} the model first, then shard it", "sharded")


def kinds_of(encoder: QwenVisionEncoder) -> dict[str, nn.Module]:
    """The modules of Transformers' class for the encoder's configuration, by name, without values."""
    config: Any = copy.deepcopy(encoder.config)
    # Whatever was chosen instead counts nowhere here.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return dict(encoder.family.tower_class()(config).named_modules())


# Where Transformers has hooks that record hidden states, and hooks that let gradients enter.
_DO_WITHOUT = ("transformers.utils.output_capturing", "transformers.modeling_utils")

# An argument, what was expected and what came.
Difference = tuple[str, str, object]


def _check_modules(source: nn.Module, encoder: QwenVisionEncoder) -> list[str]:
    """Return the names of modules to be called, which are not as the configuration has them.

    Refuses other differences: what these modules do would not count here.
    """
    modules = dict(source.named_modules(remove_duplicate=False))
    ours = dict(encoder.named_modules())
    called: list[str] = []
    for name, made in kinds_of(encoder).items():
        if is_inside(name, called):
            continue
        theirs = modules.get(name)
        if name in encoder.layer_names and theirs is not None:
            if _other_constant(theirs, made, _EPS) is not None or not plain(theirs, (type(made),)):
                called.append(name)
            continue
        difference = _difference(name, theirs, made, ours.get(name))
        if difference is None:
            continue
        place = name if theirs is not None else name.rpartition(".")[0]
        while place and not (place in encoder.places and _can_be_called(place, modules[place])):
            place = place.rpartition(".")[0]
        if not place:
            refuse("from_transformers", *difference)
        called = [*(each for each in called if not is_inside(each, [place])), place]
    return called


def is_inside(name: str, places: Iterable[str]) -> bool:
    """Whether a module of this name is one of the places, or inside one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _can_be_called(place: str, theirs: nn.Module) -> bool:
    # The encoder reads shape, dtype and device of its pixels from the layer inside.
    return place != "patch_embed" or hasattr(theirs, "proj")


def _difference(name: str, theirs: nn.Module | None, made: nn.Module, ours: nn.Module | None) -> Difference | None:
    """Find something that a module of the tower does and the encoder's own would not."""
    kind, place = type(made), name or "the vision encoder"
    if theirs is None:
        return place, f"{kind.__name__}, by the config", "none"
    # Nobody calls a list; the encoder calls its parts itself, as it does with a sequence.
    if (ours is None or type(ours) in (nn.Sequential, nn.GELU)) and hooks_of_user(theirs):
        return place, "without hooks; the encoder has no such module, so put them on another one", "hooked"
    if kind is nn.ModuleList:
        return None
    if not isinstance(theirs, kind):
        got = type(theirs).__name__
        got = f"{got} of {type(theirs).__module__}" if got == kind.__name__ else got
        return place, f"{kind.__name__}, by the config; accelerate the model first, then replace modules", got
    # Transformers wraps the forward of each subclass of a block.
    other = inspect.unwrap(type(theirs).forward) is not inspect.unwrap(kind.forward)
    if other or _is_patched(theirs) or COMPILED_CALL in vars(theirs):
        wanted = f"that of {kind.__name__} (compile it afterwards, undo what else was put there)"
        return f"{name}.forward".lstrip("."), wanted, "another"
    constants = [each for each in vars(made) if each[0] != "_" and each not in _NO_CONSTANTS]
    if (found := _other_constant(theirs, made, constants)) is not None:
        constant, by_config, held = found
        return f"{name}.{constant}".lstrip("."), f"{by_config}, by the config", held
    return _other_frequencies(name, theirs)


def _other_constant(theirs: nn.Module, made: nn.Module, names: Iterable[str]) -> tuple[str, object, object] | None:
    """The first constant of these names that `made` has and `theirs` has otherwise: its name, and both values."""
    for name in names:
        wanted, got = getattr(made, name, None), getattr(theirs, name, None)
        if isinstance(wanted, bool | int | float | str | list | tuple) and wanted != got:
            return name, wanted, got
    return None


def _other_frequencies(name: str, theirs: Any) -> Difference | None:
    """Rotary frequencies are in no state dict, because they follow from the config. Casting a tower rounds them."""
    got = getattr(theirs, "inv_freq", None)
    if not isinstance(got, Tensor) or got.is_meta:
        return None
    with torch.device("cpu"):
        wanted: Tensor = rotary_like(theirs).inv_freq
    rounded_to_bf16 = 2.0**-8
    if got.shape == wanted.shape and torch.allclose(got.cpu().to(wanted.dtype), wanted, rounded_to_bf16, 0.0):
        return None
    return f"{name}.inv_freq", "the frequencies of the config", "different"


def rotary_like(rotary: Any) -> Any:
    """A new rotary embedding of a tower, with the frequencies of its configuration, on the default device."""
    # Transformers 5.5 builds it from the sizes, which the tower's class takes from the configuration.
    arguments = (rotary.config,) if hasattr(rotary, "config") else (rotary.dim, rotary.theta)
    return type(rotary)(*arguments)


def own_forward(module: nn.Module) -> Any:
    """Return the forward that somebody put on an instance, or None; Accelerate's hooks keep what they wrap."""
    forward = vars(module).get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    same = getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module
    return None if same else forward


def drop_same_forwards(model: nn.Module) -> None:
    """Delete forwards of instances that are their class's own: a module with a forward looks like a replaced one.

    Accelerate leaves them where it removes its hooks.
    """
    for module in model.modules():
        if "forward" in vars(module) and not hasattr(module, "_hf_hook") and own_forward(module) is None:
            del module.forward


def _is_patched(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own that may do something else.

    The hub's kernels give activations one, which computes the same.
    """
    return own_forward(module) is not None and bool([*module.parameters(), *module.buffers()])


def _check_parameters(source: nn.Module, encoder: QwenVisionEncoder, called: Iterable[str]) -> None:
    """Refuses a source that is no tower of the encoder's family, but for modules that are called."""
    shapes = {name: parameter.shape for name, parameter in encoder.named_parameters()}
    parameters = dict(source.named_parameters(remove_duplicate=False))
    for layer in called:
        for named in (shapes, parameters):
            for name in [name for name in named if name.startswith(f"{layer}.")]:
                del named[name]
    kind = type(source).__name__
    # Layers may do without a bias.
    without = {
        f"{name}.bias"
        for name, module in source.named_modules(remove_duplicate=False)
        if parameters_of(module).get("bias", module) is None
    }
    if lacking := shapes.keys() - parameters - without:
        raise ValueError(f"{kind} lacks {_first(lacking)}")
    if surplus := parameters.keys() - shapes.keys():
        raise ValueError(f"{kind} also holds {_first(surplus)}; merge adapters first")
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            refuse("from_transformers", name, f"of shape {list(shapes[name])}", list(parameter.shape))


def _first(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])


def share(source: nn.Module, target: nn.Module, called: Iterable[str]) -> None:
    """Give target the parameters, buffers and hooks of source themselves, and the modules of source that are called."""
    for name in called:
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, source.get_submodule(name))
    places = dict(target.named_modules(remove_duplicate=False))
    for name, module in source.named_modules(remove_duplicate=False):
        place = places.get(name)
        # Transformers' activations and rotary embeddings have no place, and no parameters.
        if place is None or place is module:
            continue
        # A bias may be None.
        for leaf, parameter in parameters_of(module).items():
            setattr(place, leaf, parameter)
        for leaf, buffer in buffers_of(module).items():
            place.register_buffer(leaf, buffer, persistent=leaf not in unsaved_buffers_of(module))
        for fields in (parameters_of, buffers_of, children_of):
            _order_as(fields(module), fields(place))
        _share_hooks(module, place)


def _order_as(wanted: Iterable[str], held: dict[str, Any]) -> None:
    """Put entries in the order of the names, in which optimizers and state dicts have them."""
    names = [name for name in wanted if name in held]
    if names != [name for name in held if name in names]:
        for name in names:
            held[name] = held.pop(name)


def hooks_of_user(module: nn.Module) -> list[Any]:
    """The hooks of a module, but for those that Transformers sets itself, whose task the encoder does without them."""
    held = [vars(module)[name] for name in FIELDS_OF_HOOKS]
    hooks = [hook for each in held if isinstance(each, dict) for hook in each.values() if callable(hook)]
    return [hook for hook in hooks if getattr(hook, "__module__", None) not in _DO_WITHOUT]


def _share_hooks(source: nn.Module, target: nn.Module) -> None:
    """Give target the very dictionaries, so that `remove()` of a handle takes a hook from both."""
    if not (hooks := hooks_of_user(source)):
        return
    # PyTorch's hooks of loading hold their module weakly. In a tuple, it is no submodule.
    vars(target)["_owners_of_hooks"] = tuple(hook.module() for hook in hooks if getattr(hook, "with_module", False))
    for name in FIELDS_OF_HOOKS:
        held, shared = vars(target)[name], vars(source)[name]
        if isinstance(shared, dict):
            # Those of Transformers' own modules stay there.
            shared.update(held)
        vars(target)[name] = shared


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Give each module of target the mode of the module in source by that name, or of the nearest one around it."""
    modes = {name: module.training for name, module in source.named_modules(remove_duplicate=False)}
    for name, module in target.named_modules(remove_duplicate=False):
        while name not in modes:
            name = name.rpartition(".")[0]
        module.training = modes[name]


def modules_of(model: object) -> Iterable[nn.Module]:
    """Return all modules of a model, and none for another object, which callers then refuse."""
    return model.modules() if isinstance(model, nn.Module) else ()


def is_vision_model(module: nn.Module) -> bool:
    return (
        family_key(getattr(module, "config", None)) in FAMILIES
        and {"patch_embed", "blocks"} <= children_of(module).keys()
    )


def vision_classes() -> str:
    return ", ".join(family.vision_class for family in FAMILIES.values())


__all__ = [
    "check_in_place", "copy_modes", "drop_same_forwards", "from_transformers", "is_inside", "is_vision_model",
    "kinds_of", "modules_of", "own_forward", "rotary_like", "share", "vision_classes",
]  # fmt: skip
