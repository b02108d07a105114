"""All private interfaces of PyTorch that operators and models use; compile_tests/test_torch_private.py tries each.

Two kinds stand elsewhere: ops of `torch.ops.aten`, which have schemas, and what `torch_ops.bench` calls of the kernels
and compilers that it measures. Nothing here imports Dynamo or Inductor, which take longer than everything else.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch._library.triton as _library_triton
from torch import Tensor, nn
from torch._C._dynamo import guards as _guards
from torch._library.autograd import make_autograd_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "COMPILED_CALL",
    "FIELDS_OF_HOOKS",
    "FIELDS_OF_MODULES",
    "HOOKS_OF_MODULES",
    "IS_REPLICA",
    "MANAGED_BY_FSDP",
    "ORIGINAL_MODULE",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "NestedTensor",
    "addmm_activation",
    "addresses_equal",
    "any_requires_grad",
    "assumed_constant",
    "autograd_impl",
    "backward_of",
    "buffers_of",
    "children_of",
    "clamp_all",
    "copy_all",
    "count_dispatch_modes",
    "current_cuda_device",
    "decomposes_triton_ops",
    "empty_strided_cuda",
    "exclude_key",
    "has_function_modes",
    "has_functorch_transforms",
    "has_global_hooks",
    "has_plain_keys",
    "has_tangents",
    "is_aot_compiling",
    "is_exporting",
    "is_profiling",
    "is_traceable_wrapper_subclass",
    "launch_triton_directly",
    "leave_frames_uncompiled",
    "mark_static_address",
    "name_kernels",
    "nothing_watches",
    "overload_of",
    "parameters_of",
    "pytree",
    "raw_cuda_stream",
    "schema_of",
    "sdpa_priorities",
    "setup_context_of",
    "statically_known_true",
    "tensor_guards",
    "unsaved_buffers_of",
    "without_autocast",
    "zero_all",
]

# How many modes, such as fake tensors', stand between a call and its kernel.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
has_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
# (sizes, strides, dtype) to memory on the current GPU, as compiled code allocates it.
empty_strided_cuda: Callable[..., Tensor] | None = getattr(_guards, "_empty_strided_cuda", None)
# Whether torch.func transforms the call.
has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Whether any of the arguments, tensors or not, requires a gradient.
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
# A stream's handle, without the object of the public function.
raw_cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
# Whether tensors lie at addresses, in one step; builds for CUDA have it.
addresses_equal: Callable[[list[Tensor], list[int], list[int]], bool] | None = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", None
)
# The order in which scaled_dot_product_attention tries its kernels.
sdpa_priorities: Callable[[], tuple[int, ...]] = getattr(torch._C, "_get_sdp_priority_order", tuple)
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
# Within, `torch.library.wrap_triton` gives the kernel itself.
launch_triton_directly = functools.partial(_library_triton.set_wrap_triton_enabled, False)
# A custom op's overload, and what `register_autograd` gave it.
overload_of: Callable[[Any], Any] = attrgetter("_opoverload")
backward_of: Callable[[Any], Callable[..., Any] | None] = attrgetter("_backward_fn")
setup_context_of: Callable[[Any], Callable[..., Any] | None] = attrgetter("_setup_context_fn")
schema_of: Callable[[Any], Any] = attrgetter("_schema")
# A module's own entries by name, also None and those that are there twice.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
# The names of buffers that a state dict leaves out.
unsaved_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
# The attributes that every module has, those of them that hold hooks of its call, and all that have to do with hooks.
FIELDS_OF_MODULES = frozenset(vars(nn.Module()))
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FIELDS_OF_HOOKS = tuple(sorted(name for name in FIELDS_OF_MODULES if "hook" in name))
# The attribute that `module.compile()` sets.
COMPILED_CALL = "_compiled_call_impl"
# Whether there are hooks of all modules.
has_global_hooks: Callable[[], bool] = nn.modules.module._has_any_global_hook
# Both versions of FSDP mark the modules whose weights they gather.
MANAGED_BY_FSDP = "_is_fsdp_managed_module"
# DataParallel marks the replicas of a module.
IS_REPLICA = "_is_replica"
# A product with bias and ReLU or GELU in cuBLAS's epilogue.
addmm_activation: Callable[..., Tensor] = torch._addmm_activation
# Where a compiled module keeps the module that it was made of.
ORIGINAL_MODULE = "_orig_mod"
# Fill tensors with zeros, or with what others hold, in few launches; and the smaller of both, in new tensors.
zero_all: Callable[[list[Tensor]], None] = torch._foreach_zero_
copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
clamp_all: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]] = torch._foreach_clamp_max
_CUDA = torch._C.DispatchKey.CUDA


# PyTorch crashes where arguments of another version are given.
_GUARDS_OF_VERSIONS = ((2, 11), (2, 15))


def _make_tensor_guards(*tensors: Tensor) -> Any:
    return _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _has_tensor_guards() -> bool:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return _GUARDS_OF_VERSIONS[0] <= version <= _GUARDS_OF_VERSIONS[1] and hasattr(_guards, "TensorGuards")


# Returns an object for these tensors. Its `check(*others)` compares types, dispatch keys, requires_grad, dtypes,
# devices, sizes, strides and the state of the thread. None where PyTorch's guards are of an unknown version.
tensor_guards: Callable[..., Any] | None = _make_tensor_guards if _has_tensor_guards() else None


def autograd_impl(definition: Any) -> Callable[..., Any]:
    """Return the kernel for Autograd keys that `register_autograd` gives a custom op."""
    implementation: Callable[..., Any] = make_autograd_impl(overload_of(definition), definition)
    return implementation


_PLAIN_KEYS = torch._C._dispatch_keys(torch.empty(0, device="cpu")) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def has_plain_keys(tensor: Tensor) -> bool:
    """Return whether memory holds the tensor's values as they are: no batching, negation or conjugation is pending."""
    others = torch._C._dispatch_keys(tensor) - _PLAIN_KEYS
    return others.highestPriorityTypeId() == torch._C.DispatchKey.Undefined


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own modules. Dynamo traces a function, and no attrgetter."""
    return module._modules


def exclude_key(name: str) -> AbstractContextManager[None]:
    """Within this context, calls of this thread skip kernels of this dispatch key."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


@functools.cache
def nothing_watches(keys: int) -> bool:
    """Return whether CUDA is the highest of a call's dispatch keys.

    Modes, subclasses, fake tensors and functionalisation add a higher one. The key by which PyTorch bumps version
    counters does not count.
    """
    keyset = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return bool(keyset.highestPriorityTypeId() == _CUDA)


def has_tangents() -> bool:
    """Return whether a forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def is_aot_compiling() -> bool:
    """Return whether AOTInductor is making a package."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)


def is_exporting() -> bool:
    """Return whether torch.export traces. Dynamo of PyTorch 2.11 takes `torch.compiler.is_exporting()` for True."""
    return torch.compiler._is_exporting_flag


def mark_static_address(tensor: Tensor) -> None:
    """Tell CUDA graphs of torch.compile that the tensor stays where it is. Imports Dynamo."""
    torch._dynamo.mark_static_address(tensor)


def leave_frames_uncompiled(*functions: Callable[..., Any]) -> None:
    """Let Dynamo run the functions uncompiled, except where it inlines them into a caller. Imports Dynamo."""
    for function in functions:
        torch._dynamo.eval_frame.skip_code(function.__code__)


def assumed_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which imports Dynamo to set one attribute."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def statically_known_true(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition holds for all sizes of a graph, without a guard. Plain booleans need no import."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def decomposes_triton_ops() -> bool:
    """Return whether a functionalized graph shows the kernels of an op; torch.export keeps ops whole."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return not custom_triton_ops_decomposition_disabled()


class _Kernels:
    """The Triton kernels of a function, which PyTorch finds by its source, once it asks for them.

    `torch.library.triton_op` looks for them when an op is registered: it imports Inductor, and parses every
    function that the op's function calls. For all ops of the library that takes seconds.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.cached_property
    def _found(self) -> list[Any]:
        return list(_library_triton.get_inner_triton_kernels(self._function))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, place: Any) -> Any:
        return self._found[place]


def name_kernels(op: str, function: Callable[..., Any]) -> None:
    """Let the kernels of an op's function enter the key of compiled artefacts, as a `triton_op` does with its own."""
    kernels: Any = _Kernels(function)
    _library_triton.triton_ops_to_kernels[op] = kernels
