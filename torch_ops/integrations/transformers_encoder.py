"""The encoder of `torch_ops.models` in place of the vision encoders of Transformers models.

In an existing model the two share their parameters, so state dicts, optimizers and wrappers see no change. For later
models Transformers itself builds ours: its patch mapping names a class to be built instead of another.
"""

from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from torch_ops._core.checks import refuse
from torch_ops._core.torch_private import ORIGINAL_MODULE, children_of
from torch_ops.models._layers import LAYERS, NORMS, plain
from torch_ops.models._sharing import (
    check_in_place,
    copy_modes,
    drop_same_forwards,
    from_transformers,
    is_inside,
    is_vision_model,
    kinds_of,
    modules_of,
    own_forward,
    rotary_like,
    share,
    vision_classes,
)
from torch_ops.models.families import FAMILIES
from torch_ops.models.graph_cache import GraphCache
from torch_ops.models.vision import QwenVisionEncoder

ModelT = TypeVar("ModelT", bound=nn.Module)

# Attribute of an encoder: the module that it replaces, in a tuple, so that it is no submodule.
_ORIGINAL = "_encoder_of_transformers"


def holds_encoder(model: nn.Module) -> bool:
    """Whether a `QwenVisionEncoder` is in `model`, or is it."""
    return any(isinstance(module, QwenVisionEncoder) for module in modules_of(model))


def accelerate(model: ModelT, *, graphs: bool = True) -> ModelT:
    """Replace every vision encoder in `model`, in place, by `torch_ops.models.QwenVisionEncoder`; return `model`.

    With `graphs` (default: True), an encoder captures a CUDA graph for a size that comes again in inference on a GPU.
    `encoder.graphs` is its `GraphCache`, which shows what is held. With graphs=False every call is eager.

    Both share the same parameters and hooks: state dicts, checkpoints, optimizers, requires_grad and gradient
    checkpointing stay as they are. Wrappers (PEFT, DDP) are fine. Layers, norms, MLPs, mergers and the patch embedding
    that were replaced are called as modules. Calling it again changes nothing but `graphs`, and `restore` undoes it.
    The hook by which Accelerate moves an encoder's inputs to its device (`device_map`) is carried over.

    If `model` itself is the vision encoder, there is no place for ours: it is returned, so use the result.

    Raises TypeError for a model without an encoder of a supported family, or with a separately compiled one (compile it
    afterwards). Raises ValueError for an encoder with other parameters or modules than its family's, or with parameters
    that are sharded, offloaded or on several devices. Raises ValueError for hooks on its rotary embedding, which ours
    does not have. Nothing is replaced then.
    """
    towers = {id(module): module for module in modules_of(model) if is_vision_model(module)}
    if not towers:
        raise TypeError(
            f"model is {type(model).__name__}, expected a vision encoder of Transformers or a model that holds one "
            f"({vision_classes()})"
        )
    for tower in towers.values():
        drop_same_forwards(tower)
    # All are made before the first is put in its place, so that a refusal leaves the model whole.
    made = {key: _made(tower) for key, tower in towers.items() if not isinstance(tower, QwenVisionEncoder)}
    for tower in towers.values():
        encoder: Any = made.get(id(tower), tower)
        if (encoder.graphs is not None) != graphs:
            encoder.graphs = GraphCache() if graphs else None
    return cast(ModelT, _replaced(model, made))


def put_back(model: ModelT) -> ModelT:
    """`model` with the modules that `accelerate` replaced, on the parameters that ours have now."""
    encoders = [module for module in model.modules() if isinstance(module, QwenVisionEncoder)]
    return cast(ModelT, _replaced(model, {id(each): _original(each) for each in encoders if hasattr(each, _ORIGINAL)}))


def register_encoders() -> None:
    """Have from_pretrained and from_config of Transformers build ours as the vision encoder of whole models.

    Holds for models of the families in `torch_ops.models` until `unregister_encoders`; harmless if called again. A
    vision class that is loaded on its own stays as it is, and `restore` has no module to put back.

    Raises ImportError if Transformers has no patch mapping or cannot use it. Raises ValueError if another library has
    one for such a class.
    """
    patching = _monkey_patching()
    _try_patching(patching)
    present = patching.get_patch_mapping()
    ours = {key: value for key, value in _PATCHES.items() if present.get(key) is not value}
    patching.register_patch_mapping(ours)


def unregister_encoders() -> None:
    """Undo `register_encoders`; models that were built in between keep their encoder."""
    patching = _monkey_patching()
    present = patching.get_patch_mapping()
    patching.unregister_patch_mapping([key for key, value in _PATCHES.items() if present.get(key) is value])


class BuiltEncoder(QwenVisionEncoder):
    """The encoder, with the constructor that Transformers' models call for their vision class."""

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> "BuiltEncoder":
        dtype = kwargs.get("dtype", config.dtype)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        encoder = cls(config)
        encoder.graphs = GraphCache()
        return encoder if dtype is None else encoder.to(dtype)


# Keys are searched for as regular expressions, in all names of classes.
_PATCHES: dict[str, type[nn.Module]] = {f"^{family.vision_class}$": BuiltEncoder for family in FAMILIES.values()}


def _monkey_patching() -> Any:
    import transformers

    try:
        from transformers import monkey_patching
    except ImportError as error:
        raise ImportError(
            f"registering encoders needs a transformers with transformers.monkey_patching, such as 5.5.3; "
            f"this is {transformers.__version__}. accelerate(model) works after loading"
        ) from error
    return monkey_patching


def _try_patching(patching: Any) -> None:
    """Refuses where Transformers cannot patch: 5.5 to 5.17 look into all modules, and want torchvision for some."""
    nothing: dict[str, type[nn.Module]] = {"^$": nn.Identity}
    patching.register_patch_mapping(nothing)
    try:
        with patching.apply_patches():
            pass
    except ImportError as error:
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} cannot build other classes here ({error}); install that, "
            f"or transformers 5.23, or use accelerate(model) after loading"
        ) from error
    finally:
        patching.unregister_patch_mapping(list(nothing))


def _made(tower: nn.Module) -> QwenVisionEncoder:
    hook = _hook_of_device(tower)
    encoder = from_transformers(tower)
    _copy_checkpointing(tower, encoder)
    setattr(encoder, _ORIGINAL, (tower,))
    if hook is not None:
        # As Accelerate does, and not by PyTorch's hooks, which both encoders share.
        encoder.forward = partial(_within, hook, encoder)  # type: ignore[method-assign]
    return encoder


def _hook_of_device(tower: nn.Module) -> Any:
    """Accelerate's hook of the tower; those inside do nothing more, where all is on one device and stays there."""
    check_in_place("accelerate", tower, "accelerate", "accelerate the model first, then offload")
    devices = sorted({str(parameter.device) for parameter in tower.parameters()})
    if len(devices) > 1:
        wanted = "on one device; name it whole in device_map"
        refuse("accelerate", "the vision encoder", wanted, f"on {', '.join(devices)}")
    return getattr(tower, "_hf_hook", None)


def _within(hook: Any, encoder: QwenVisionEncoder, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = hook.pre_forward(encoder, *args, **kwargs)
    return hook.post_forward(encoder, type(encoder).forward(encoder, *args, **kwargs))


def _original(encoder: QwenVisionEncoder) -> nn.Module:
    (tower,) = getattr(encoder, _ORIGINAL)
    check_in_place("restore", encoder, "restore", "remove Accelerate's hooks first (remove_hook_from_submodules)")
    drop_same_forwards(encoder)
    with torch.device("meta"):
        made = dict(QwenVisionEncoder(encoder.config).named_modules())
    called = _called(encoder, tower, made)
    _check_structure(encoder, made, called)
    _check_depth(encoder, tower, called)
    _check_dispatched(encoder, called)
    _check_forwards(encoder, made, called)
    share(encoder, tower, called)
    _copy_checkpointing(encoder, tower)
    if hasattr(tower, "gradient_checkpointing"):
        tower.gradient_checkpointing = encoder.is_gradient_checkpointing
    _let_gradients_enter(tower)
    # Its frequencies are in no state dict, and did not move with the parameters.
    rotary = tower.rotary_pos_emb
    if any(buffer.device != encoder.device for buffer in rotary.buffers()):
        with torch.device(encoder.device):
            tower.rotary_pos_emb = rotary_like(rotary)
    copy_modes(encoder, tower)
    return tower


def _called(encoder: QwenVisionEncoder, tower: nn.Module, made: dict[str, nn.Module]) -> list[str]:
    """Return the modules that the tower takes as they are, our norms too; for other modules it takes parameters."""
    kinds = kinds_of(encoder)
    modules, theirs = (dict(each.named_modules(remove_duplicate=False)) for each in (encoder, tower))
    called: list[str] = []
    for name in encoder.places:
        if name not in modules or name not in made or is_inside(name, called):
            continue
        ours = modules[name]
        if name in encoder.layer_names:
            kept = plain(ours, LAYERS + NORMS) and plain(theirs[name], (type(kinds[name]),))
        else:
            kept = type(ours) is type(made[name]) and "forward" not in vars(ours)
            kept = kept and isinstance(theirs[name], type(kinds[name]))
        if not kept:
            called.append(name)
    return called


def _check_structure(encoder: QwenVisionEncoder, made: dict[str, nn.Module], called: list[str]) -> None:
    """Refuse an encoder that has other modules than it was made with, except modules that are called."""
    modules = dict(encoder.named_modules(remove_duplicate=False))
    for name, module in made.items():
        if is_inside(name, called):
            continue
        if name not in modules:
            refuse("restore", name, f"{type(module).__name__}, as it was made", "none")
        if not isinstance(module, nn.ModuleList) and not isinstance(modules[name], type(module)):
            refuse("restore", name, f"{type(module).__name__}, as it was made", type(modules[name]).__name__)
    for name in modules:
        if name not in made and not is_inside(name, called):
            refuse("restore", name, "no module, as Transformers' encoder has none there", type(modules[name]).__name__)


def _check_depth(encoder: QwenVisionEncoder, tower: nn.Module, called: list[str]) -> None:
    """Refuse an encoder that lacks modules of the tower, because blocks and their number in `config` were taken out."""
    names = {name for name, _ in encoder.named_modules(remove_duplicate=False)}
    for name, module in tower.named_modules(remove_duplicate=False):
        if name not in names and any(True for _ in module.parameters()) and not is_inside(name, called):
            refuse("restore", name, f"{type(module).__name__}, as the tower has it", "none")


def _check_dispatched(encoder: QwenVisionEncoder, called: list[str]) -> None:
    """Refuse hooks of Accelerate on modules that the tower replaces by its own, because it would lack them."""
    for name, module in encoder.named_modules():
        if hasattr(module, "_hf_hook") and not is_inside(name, called):
            wanted = "one without; remove Accelerate's hooks first (remove_hook_from_submodules)"
            refuse("restore", name or "the vision encoder", wanted, "a module with a hook")


def _check_forwards(encoder: QwenVisionEncoder, made: dict[str, nn.Module], called: list[str]) -> None:
    """Refuse forwards that somebody put on modules afterwards, because the tower has other modules."""
    for name, module in encoder.named_modules(remove_duplicate=False):
        if is_inside(name, called):
            continue
        own, kind = own_forward(module), type(made[name])
        # The hook that was carried over is no other forward.
        if getattr(own, "func", own) not in (None, _within) or type(module).forward is not kind.forward:
            wanted = f"that of {kind.__name__}; undo what was put there first"
            refuse("restore", f"{name}.forward".lstrip("."), wanted, "another")


def _copy_checkpointing(source: Any, target: Any) -> None:
    for theirs, ours in zip(source.blocks, target.blocks, strict=True):
        ours.gradient_checkpointing = theirs.gradient_checkpointing
        if theirs.gradient_checkpointing:
            ours._gradient_checkpointing_func = theirs._gradient_checkpointing_func


def _let_gradients_enter(tower: Any) -> None:
    """The hook that Transformers would have set, where checkpoints are reentrant: without it they lose gradients."""
    functions = [block._gradient_checkpointing_func for block in tower.blocks if block.gradient_checkpointing]
    reentrant = any(getattr(each, "keywords", {}).get("use_reentrant") is not False for each in functions)
    if reentrant and hasattr(tower, getattr(tower, "_input_embed_layer", "")):
        tower.disable_input_require_grads()
        tower.enable_input_require_grads()


def _replaced(model: nn.Module, replacements: dict[int, Any]) -> nn.Module:
    """`model` with modules replaced, by their id, in all places; the replacement where it is one itself."""
    places = [
        (parent, name, replacements[id(child)])
        for parent in model.modules()
        for name, child in children_of(parent).items()
        if id(child) in replacements
    ]
    for parent, name, _ in places:
        if name == ORIGINAL_MODULE:
            raise TypeError(
                f"the parent of the vision encoder is {type(parent).__name__}, expected an uncompiled module; "
                "compile it afterwards"
            )
    for parent, name, replacement in places:
        setattr(parent, name, replacement)
    return replacements.get(id(model), model)


__all__ = ["accelerate", "holds_encoder", "put_back", "register_encoders", "unregister_encoders"]
