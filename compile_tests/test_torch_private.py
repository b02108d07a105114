"""Each private interface of PyTorch does what the library uses it for."""

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.triton import get_triton_kernels_for_op
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.library import Library
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from compile_tests.contract.trace import fake_gpu, symbolic_size
from torch_ops._core import torch_private
from torch_ops._core.registry import OPS, wrap_triton


def test_modes_are_counted() -> None:
    assert torch_private.count_dispatch_modes() == 0
    with torch_private.FakeTensorMode():
        assert torch_private.count_dispatch_modes() == 1


def test_frames_are_left_uncompiled_and_inlined_all_the_same() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    def alone(x: Tensor) -> Tensor:
        return x + 1

    torch_private.leave_frames_uncompiled(alone)
    assert torch.compile(alone, backend=keep)(torch.ones(2)).tolist() == [2, 2] and not graphs
    torch.compile(lambda x: alone(x).sin(), backend=keep, fullgraph=True)(torch.ones(2))
    assert len(graphs) == 1


def test_transforms_of_torch_func_are_seen() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_private.has_functorch_transforms())
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    function(torch.ones(3))
    assert seen == [True, False]


def test_hooks_of_modules_have_these_names() -> None:
    """Whatever is called at a module's call lies in one of them."""
    layer = nn.Linear(2, 2)
    register = (
        layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
    )  # fmt: skip
    for add, name in zip(register, torch_private.HOOKS_OF_MODULES, strict=True):
        assert not getattr(layer, name)
        handle = add(lambda *args: None)
        assert len(getattr(layer, name)) == 1
        handle.remove()
    assert vars(nn.Module()).keys() == torch_private.FIELDS_OF_MODULES


def test_fields_of_hooks_are_all_that_two_modules_need_to_share_hooks() -> None:
    seen: list[nn.Module] = []
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    handles = [
        first.register_forward_pre_hook(lambda module, args, kwargs: seen.append(module), with_kwargs=True),
        first.register_forward_hook(lambda module, args, kwargs, output: seen.append(module), with_kwargs=True),
        first.register_full_backward_pre_hook(lambda module, grads: seen.append(module)),
        first.register_full_backward_hook(lambda module, grads, others: seen.append(module)),
        first.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(module)),
        first.register_state_dict_post_hook(lambda module, *rest: seen.append(module)),
    ]
    for name in torch_private.FIELDS_OF_HOOKS:
        vars(second)[name] = vars(first)[name]

    def called() -> list[nn.Module]:
        seen.clear()
        second(torch.ones(1, 2, requires_grad=True)).sum().backward()
        second.state_dict()
        return list(seen)

    assert called() == [second] * 6
    for handle in handles:
        handle.remove()
    assert called() == []


def test_a_compiled_call_is_seen() -> None:
    layer = nn.Linear(2, 2)
    assert torch_private.COMPILED_CALL not in vars(layer)
    layer.compile(backend="eager")
    assert torch_private.COMPILED_CALL in vars(layer)


def test_hooks_of_all_modules_are_seen() -> None:
    assert not torch_private.has_global_hooks()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *args: None)
    assert torch_private.has_global_hooks()
    handle.remove()
    assert not torch_private.has_global_hooks()


def test_fsdp_marks_its_modules(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()
    assert getattr(model[0], torch_private.MANAGED_BY_FSDP)


def test_arguments_that_require_gradients_are_seen() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert torch_private.any_requires_grad(torch.ones(2), 3, None, leaf)
    assert not torch_private.any_requires_grad(torch.ones(2), 3, None, leaf.detach())


def test_what_bumps_version_counters_is_no_watcher() -> None:
    """Eager calls of an op that writes to arguments take the thin path, which bumps them itself."""
    keys = torch._C.DispatchKey
    called = torch._C.DispatchKeySet(keys.CUDA) | torch._C.DispatchKeySet(keys.AutogradCUDA)
    called |= torch._C.DispatchKeySet(keys.ADInplaceOrView)
    assert torch_private.nothing_watches(called.raw_repr())
    for key in (keys.Functionalize, keys.Python, keys.Fake if hasattr(keys, "Fake") else keys.Negative):
        assert not torch_private.nothing_watches((called | torch._C.DispatchKeySet(key)).raw_repr())


def test_autocast_is_off_within() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with torch_private.without_autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


# It lives as long as torch.ops lists its op: torch.export looks at all ops.
LIBRARY = Library("_test_private", "FRAGMENT")
LIBRARY.define("which(Tensor x) -> int")
LIBRARY.impl("which", lambda x: 1, "CompositeExplicitAutograd")
LIBRARY.impl("which", lambda x: 2, "AutocastCPU")


def test_a_dispatch_key_is_left_out_within() -> None:
    with torch.autocast("cpu"):
        assert torch.ops._test_private.which(torch.ones(1)) == 2
        with torch_private.exclude_key("AutocastCPU"):
            assert torch.ops._test_private.which(torch.ones(1)) == 1


def test_autograd_of_a_custom_op_is_made() -> None:
    definition: Any = torch.library.custom_op("_test_private::twice", mutates_args=())(_twice)
    definition.register_autograd(lambda ctx, grad: 5 * grad)
    kernel = torch_private.autograd_impl(definition)
    keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    leaf = torch.ones(2, requires_grad=True)
    out = kernel(keyset, leaf)
    assert torch.equal(torch.autograd.grad(out.sum(), leaf)[0], torch.full((2,), 5.0))


def _twice(x: Tensor) -> Tensor:
    return 2 * x


def test_a_custom_op_tells_what_was_registered() -> None:
    definition: Any = torch.library.custom_op("_test_private::thrice", mutates_args=())(_twice)
    assert torch_private.backward_of(definition) is torch_private.setup_context_of(definition) is None
    definition.register_autograd(_twice, setup_context=test_a_custom_op_tells_what_was_registered)
    assert torch_private.backward_of(definition) is _twice
    assert torch_private.setup_context_of(definition) is test_a_custom_op_tells_what_was_registered
    assert torch_private.overload_of(definition) is torch.ops._test_private.thrice.default


def test_a_product_has_its_activation_in_the_epilogue() -> None:
    """CPUs compute GELU by erf. cuBLAS computes it by tanh, which tests of products compare on a GPU."""
    bias, x, weight = torch.randn(3), torch.randn(2, 4), torch.randn(4, 3)
    pre = x @ weight + bias
    torch.testing.assert_close(torch_private.addmm_activation(bias, x, weight, use_gelu=True), functional.gelu(pre))
    torch.testing.assert_close(torch_private.addmm_activation(bias, x, weight), pre.relu())


def test_tangents_are_seen() -> None:
    assert not torch_private.has_tangents()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.has_tangents()
    assert not torch_private.has_tangents()


def test_a_schema_counts_results() -> None:
    assert len(torch_private.schema_of(torch.ops.aten.topk.default).returns) == 2


def test_a_module_tells_what_it_holds() -> None:
    """Also None, which the public iterators leave out."""
    module = nn.BatchNorm1d(2, affine=False)
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    outer = nn.Sequential(module, module)
    assert list(torch_private.children_of(outer).values()) == [module, module]
    assert torch_private.parameters_of(module) == {"weight": None, "bias": None}
    assert torch_private.buffers_of(module)["running_mean"] is module.running_mean
    assert torch_private.unsaved_buffers_of(module) == {"unsaved"}
    assert "unsaved" not in module.state_dict()


def test_a_replica_is_marked() -> None:
    module = nn.Linear(1, 1)
    assert getattr(module._replicate_for_data_parallel(), torch_private.IS_REPLICA)
    assert not hasattr(module, torch_private.IS_REPLICA)


def test_a_compiled_module_keeps_the_original() -> None:
    module = nn.Linear(1, 1)
    assert getattr(torch.compile(module), torch_private.ORIGINAL_MODULE) is module


def test_tensors_whose_memory_holds_other_values_are_told() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.randn(3)
    assert all(map(torch_private.has_plain_keys, (x, x.detach(), inferred, nn.Parameter(x.detach()))))
    turned = torch.randn(3, dtype=torch.complex64).conj()
    assert not torch_private.has_plain_keys(turned) and not torch_private.has_plain_keys(turned.imag)
    seen: list[bool] = []
    x.register_hook(lambda grad: seen.append(torch_private.has_plain_keys(grad)))
    torch.autograd.grad(x * 2, x, torch.ones(2, 3), is_grads_batched=True)
    assert seen == [False]


def test_graphs_and_exports_are_told_apart() -> None:
    class Telling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if torch_private.is_exporting() else x - 1

    x = torch.zeros(2)
    for _ in range(2):
        assert torch.equal(torch.compile(Telling(), backend="eager", fullgraph=True)(x), x - 1)
        for strict in (True, False):
            assert torch.equal(torch.export.export(Telling(), (x,), strict=strict).module()(x), x + 1)
    assert not torch_private.is_exporting()


def test_the_order_of_attention_kernels_is_told() -> None:
    before = torch_private.sdpa_priorities()
    kernels = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    with torch.nn.attention.sdpa_kernel(kernels, set_priority=True):
        assert torch_private.sdpa_priorities() != before
    assert torch_private.sdpa_priorities() == before


def test_tensors_are_zeroed_together() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    torch_private.zero_all(tensors)
    assert not any(tensor.any() for tensor in tensors)


def test_tensors_are_copied_together() -> None:
    """Also where dtypes and strides differ."""
    sources = [torch.randn(2), torch.randn(3, 4).T]
    copies = [torch.ones(2, dtype=torch.float64), torch.ones(4, 3)]
    torch_private.copy_all(copies, sources)
    assert torch.equal(copies[0], sources[0].double()) and torch.equal(copies[1], sources[1])


def test_tensors_are_clamped_together() -> None:
    tensors = [torch.tensor([1, 5]), torch.tensor([7, 0])]
    smaller = torch_private.clamp_all(tensors, [torch.tensor([3, 3])] * 2)
    assert [each.tolist() for each in smaller] == [[1, 3], [3, 0]]
    assert [each.tolist() for each in tensors] == [[1, 5], [7, 0]]


def test_function_modes_are_counted() -> None:
    """Those that are entered, not the default device alone."""
    assert torch_private.has_function_modes() == 0
    with BaseTorchFunctionMode():
        assert torch_private.has_function_modes() == 1


def test_a_profiler_is_seen() -> None:
    assert not torch_private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiling()
    assert not torch_private.is_profiling()


# Each differs from one row of x in one thing that guards see.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "size": lambda x: x.new_zeros(3, 5),
    "stride": lambda x: x.new_zeros(4, 3).T,
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "dispatch keys": lambda x: torch._neg_view(x),
    "type": nn.Parameter,
}


@pytest.mark.parametrize("what", OTHERS)
def test_guards_tell_tensors_apart(what: str) -> None:
    assert torch_private.tensor_guards is not None, "check the arguments of TensorGuards in this version of PyTorch"
    x, y = torch.zeros(3, 4), torch.zeros(2)
    check = torch_private.tensor_guards(x, y).check
    assert check(torch.ones(3, 4), torch.ones(2))
    assert not check(OTHERS[what](x), y)


def test_guards_see_the_state_of_the_thread() -> None:
    """Autocast, inference mode and transforms are no property of a tensor."""
    assert torch_private.tensor_guards is not None
    x = torch.zeros(3)
    check = torch_private.tensor_guards(x).check
    seen = []

    def within(y: Tensor) -> Tensor:
        seen.append(check(x))
        return y.sum()

    torch.func.grad(within)(torch.ones(2))
    with torch.autocast("cpu"):
        seen.append(check(x))
    with torch.inference_mode():
        seen.append(check(x))
    assert seen == [False] * 3 and check(x)


def test_guards_keep_no_tensor() -> None:
    assert torch_private.tensor_guards is not None
    x = torch.zeros(3)
    kept, guards = weakref.ref(x), torch_private.tensor_guards(x)
    del x
    assert kept() is None and guards.check(torch.ones(3))


def test_trees_are_flattened_and_mapped() -> None:
    leaves, structure = torch_private.pytree.tree_flatten({"a": [1, 2], "b": (3,)})
    assert torch_private.pytree.tree_leaves({"a": [1, 2], "b": (3,)}) == leaves == [1, 2, 3]
    assert torch_private.pytree.tree_unflatten([4, 5, 6], structure) == {"a": [4, 5], "b": (6,)}
    assert torch_private.pytree.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


def test_wrapper_subclasses_are_told_apart() -> None:
    wrapped = TwoTensor(torch.ones(2), torch.ones(2))
    assert torch_private.is_traceable_wrapper_subclass(wrapped)
    assert not torch_private.is_traceable_wrapper_subclass(nn.Parameter(torch.ones(2)))


def test_addresses_are_marked_static() -> None:
    tensor = torch.ones(3)
    assert not hasattr(tensor, "_dynamo_static_input_type")
    torch_private.mark_static_address(tensor)
    assert hasattr(tensor, "_dynamo_static_input_type")


# Names with a leading underscore: modules and functions of PyTorch, and attributes of its objects.
PRIVATE = re.compile(
    r"torch\._(?!private|ops\b)[A-Za-z]\w*|torch(\.\w+)+ import .*\b_(?!torch_)\w+|torch\.utils\._|_orig_mod"
    r"|\._(opoverload|backward_fn|setup_context_fn|schema|current_level|parameters|buffers|modules|non_persistent\w*)\b"
)


def test_private_interfaces_are_used_in_one_file_alone() -> None:
    """The benchmark, which no user's program imports, has some of its own."""
    root = Path(torch_private.__file__).parents[1]
    for path in root.rglob("*.py"):
        if path.name == "torch_private.py" or root / "bench" in path.parents:
            continue
        code = [line for line in path.read_text().splitlines() if '"torch._dynamo" in sys.modules' not in line]
        assert not [line for line in code if PRIVATE.search(line)], path


def test_packages_are_told_from_other_traces() -> None:
    from torch._inductor.virtualized import V

    assert not torch_private.is_aot_compiling()
    with V.set_aot_compilation(True):
        assert torch_private.is_aot_compiling()


def test_exports_keep_ops_whole() -> None:
    from torch.export._trace import _disable_custom_triton_op_functional_decomposition

    assert torch_private.decomposes_triton_ops()
    with _disable_custom_triton_op_functional_decomposition():
        assert not torch_private.decomposes_triton_ops()


def test_kernels_of_an_op_are_found_when_they_are_asked_for() -> None:
    name = "_test_private::named"
    torch_private.name_kernels(name, OPS["window_attn"].body)
    found = [kernel.fn.__name__ for kernel in get_triton_kernels_for_op(name)]
    assert "_attention_fwd_kernel" in found and len(found) == len(get_triton_kernels_for_op(name))


def test_kernels_are_launched_directly_within() -> None:
    """Also where a mode is on, such as one that counts FLOPs."""
    from csrc_free_ops.rope import _rope_kernel

    with fake_gpu() as mode, mode:
        wrapped = wrap_triton(_rope_kernel)
        with torch_private.launch_triton_directly():
            assert torch.library.wrap_triton(_rope_kernel) is _rope_kernel
        assert wrapped is not _rope_kernel


def test_what_holds_for_all_sizes_is_known_without_a_guard() -> None:
    with fake_gpu() as mode:
        rows, others = symbolic_size(mode, "rows", 16), symbolic_size(mode, "others", 16)
        holds = torch_private.statically_known_true
        assert holds(True) and not holds(False)
        assert holds(rows * 24 % 8 == 0) and holds(rows == rows + 0) and not holds(rows == others)
        assert not mode.shape_env.guards


def test_fake_and_functional_tensors_are_theirs() -> None:
    with torch_private.FakeTensorMode():
        fake = torch.ones(2)
    assert isinstance(fake, torch_private.FakeTensor)
    with torch_private.FunctionalTensorMode():
        assert isinstance(torch_private.FunctionalTensor.to_functional(torch.ones(2)), torch_private.FunctionalTensor)


@pytest.mark.gpu
def test_device_stream_and_addresses_are_those_of_public_functions() -> None:
    assert torch_private.current_cuda_device() == torch.cuda.current_device()
    assert torch_private.raw_cuda_stream(0) == torch.cuda.current_stream(0).cuda_stream
    tensor = torch.ones(3, device="cuda")
    if torch_private.addresses_equal is not None:
        assert torch_private.addresses_equal([tensor], [tensor.data_ptr()], [0])
        assert not torch_private.addresses_equal([tensor], [tensor.data_ptr() + 4], [0])


@pytest.mark.gpu
def test_memory_is_allocated_as_compiled_code_does() -> None:
    assert torch_private.empty_strided_cuda is not None
    made = torch_private.empty_strided_cuda((3, 4), (1, 3), torch.float16)
    assert made.shape == (3, 4) and made.stride() == (1, 3) and made.dtype is torch.float16
    assert made.device == torch.ones(1, device="cuda").device and not made.is_inference()
    with torch.inference_mode():
        assert torch_private.empty_strided_cuda((3,), (1,), torch.float32).is_inference()
