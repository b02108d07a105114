"""PyTorch's flash registry: what an import does, what activation changes, fakes, traces and compiled graphs."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from compile_tests.contract.trace import (
    assert_expected_inline,
    capture_graphs,
    fake_gpu,
    recompiling_fails,
    trace_kernels,
)
from compile_tests.flash_registry import activated
from torch_ops._core.torch_private import FakeTensorMode, exclude_key
from torch_ops.integrations import torch_flash
from torch_ops.testing.cases import cumulative

aten = torch.ops.aten


@pytest.fixture
def active(device: str) -> Iterator[None]:
    with activated(device):
        yield


# --- registry ---


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_registers_and_activates_nothing() -> None:
    code = (
        "import sys, torch_ops\n"
        "assert 'torch_ops.integrations.torch_flash' not in sys.modules\n"
        "from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls\n"
        "assert 'VK' not in list_flash_attention_impls()\n"
        "import torch_ops.integrations.torch_flash\n"
        "assert 'VK' in list_flash_attention_impls()\n"
        "assert current_flash_attention_impl() is None\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'torch.nn.attention.varlen'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    made = _run(code)
    assert made.returncode == 0, made.stderr


def test_a_torch_without_the_registry_is_named_in_one_line() -> None:
    code = (
        "import torch.nn.attention\n"
        "del torch.nn.attention.register_flash_attention_impl\n"
        "try:\n    import torch_ops.integrations.torch_flash\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert _run(code).stdout == (
        "torch_ops.integrations.torch_flash needs torch.nn.attention.register_flash_attention_impl, which torch "
        f"{torch.__version__} lacks; install a torch from 2.11 to 2.15 that has it\n"
    )


def _registrations() -> dict[str, str]:
    names = [name for name in torch_flash.KERNELS if hasattr(aten, name)]
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in names}


def test_activation_replaces_the_kernels_and_restore_puts_them_back() -> None:
    assert "VK" in list_flash_attention_impls()
    before = _registrations()
    assert len(before) >= 4
    for _ in range(2):
        activate_flash_attention_impl("VK")
        within = _registrations()
        assert current_flash_attention_impl() == "VK"
        assert all(within[name] != before[name] for name in before)
        for name in before:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
        restore_flash_attention_impl()
        assert current_flash_attention_impl() is None and _registrations() == before


def test_a_second_activation_replaces_the_first() -> None:
    before = _registrations()
    activate_flash_attention_impl("VK")
    activate_flash_attention_impl("VK")
    assert current_flash_attention_impl() == "VK"
    restore_flash_attention_impl()
    assert _registrations() == before


def test_a_handle_that_is_kept_lets_go_of_the_kernels() -> None:
    before = _registrations()
    handle = torch_flash.override_kernels()
    assert _registrations() != before
    handle.remove()
    assert _registrations() == before
    handle.remove()


@pytest.mark.parametrize("name", torch_flash.KERNELS)
def test_functions_have_the_arguments_of_their_ops(name: str) -> None:
    """Every argument of the schema is taken, by its place or its name."""
    if not hasattr(aten, name):
        pytest.skip("this torch lacks the op")
    schema = getattr(aten, name).default._schema.arguments
    code = torch_flash.KERNELS[name].__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_places, takes_names = code.co_flags & 0x04, code.co_flags & 0x08
    for place, argument in enumerate(schema):
        if argument.kwarg_only:
            assert argument.name in named or takes_names, argument.name
        else:
            assert place < code.co_argcount and named[place] == argument.name or takes_places, argument.name


# --- fakes ---

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _dense(order: str, rows: int = 5, keys: int = 7, key_heads: int = 2) -> list[Tensor]:
    """q, k and v, named B, H, S and D, in this order of memory."""
    drawn = []
    for heads, length in ((4, rows), (key_heads, keys), (key_heads, keys)):
        sizes = {"B": 2, "H": heads, "S": length, "D": 8}
        memory = torch.randn([sizes[letter] for letter in order])
        drawn.append(memory.permute([order.index(letter) for letter in "BHSD"]))
    return drawn


def _packed(layout: str) -> list[Tensor]:
    if layout == "part_of_qkv":
        return list(torch.randn(9, 3, 4, 8).unbind(1))
    if layout == "heads_first":
        return [torch.randn(4, 9, 8).transpose(0, 1) for _ in range(3)]
    if layout == "columns_apart":
        return [torch.randn(9, 8, 4).transpose(1, 2) for _ in range(3)]
    return [torch.randn(9, 4, 8) for _ in range(3)]


def _sdpa_calls(order: str) -> list[Call]:
    q, k, v = _dense(order)
    forward = "_scaled_dot_product_flash_attention"
    out, lse, _, _, *sizes, state, unused, _ = torch_flash.scaled_dot_product_flash_attention(q, k, v)
    backward = (torch.randn_like(out), q, k, v, out, lse, None, None, *sizes, 0.0, False, state, unused)
    return [(forward, (q, k, v), {}), (f"{forward}_backward", backward, {"scale": 0.5})]


def _flash_calls(tensors: list[Tensor], cu: Tensor | None) -> list[Call]:
    q, k, v = tensors
    tail = (cu, cu, 9, 9, 0.0, True)
    out, lse, state, unused, _ = torch_flash.flash_attention_forward(q, k, v, *tail, False)
    backward = (torch.randn_like(out), q, k, v, out, lse, *tail, state, unused)
    calls: list[Call] = [
        ("_flash_attention_forward", (q, k, v, *tail, False), {"window_size_left": 3}),
        ("_flash_attention_backward", backward, {"window_size_left": 3}),
    ]
    inplace = "_flash_attention_forward_no_dropout_inplace"
    return [*calls, (inplace, (torch.empty_like(q), q, k, v, *tail, False), {})] if hasattr(aten, inplace) else calls


LAYOUTS: dict[str, Callable[[], list[Call]]] = {
    **{f"sdpa_{order}": lambda order=order: _sdpa_calls(order) for order in ("BHSD", "BSHD", "SBHD", "HBSD")},
    "sdpa_columns_apart": lambda: _sdpa_calls("BHDS"),
    **{
        f"packed_{layout}": lambda layout=layout: _flash_calls(_packed(layout), cumulative((4, 0, 5), "cpu"))
        for layout in ("rows_first", "part_of_qkv", "heads_first", "columns_apart")
    },
    "dense_contiguous": lambda: _flash_calls([tensor.transpose(1, 2) for tensor in _dense("BSHD")], None),
    "dense_heads_first": lambda: _flash_calls([tensor.transpose(1, 2) for tensor in _dense("BHSD")], None),
}


def _described(results: Any) -> list[Any]:
    """But for the device of random states, which PyTorch's fakes put on no device."""
    results = results if isinstance(results, tuple) else (results,)
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in results]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_as_pytorchs_fakes_say(layout: str) -> None:
    for name, args, kwargs in LAYOUTS[layout]():
        actual = torch_flash.KERNELS[name](*args, **kwargs)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
            expected = getattr(aten, name)(*fakes, **kwargs)
        assert _described(actual) == _described(expected), name


# --- on fake CUDA tensors ---


class _OpsCalled(TorchDispatchMode):
    """Notes the ops of this library."""

    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vk":
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _dispatched_by_device(mode: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, ops: list[str]) -> Iterator[None]:
    """Within, aten ops on fake CUDA tensors come to the kernels of the CUDA key, as real ones do.

    A fake tensor has the key of its device below the Python keys, which are left out until one of our kernels is
    called. The kernel itself runs on fake tensors, and the ops that it calls are noted.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def faked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ForceDispatchKeyGuard(include, exclude), mode, _OpsCalled(ops):
                return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name, function in torch_flash.KERNELS.items():
            patch.setitem(torch_flash.KERNELS, name, faked(function))
        activate_flash_attention_impl("VK")
        try:
            with exclude_key("Python"), exclude_key("PythonTLSSnapshot"):
                yield
        finally:
            restore_flash_attention_impl()


def test_every_op_comes_to_ours_by_the_cuda_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ops: list[str] = []
    with fake_gpu() as mode:
        with mode:
            q, k, v = (torch.empty(2, 4, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3))
            rows = torch.empty(300, 4, 64, device="cuda", dtype=torch.float16)
            cu = torch.empty(2, device="cuda", dtype=torch.int32)
        tail = (cu, cu, 9, 9, 0.0, False)
        with _dispatched_by_device(mode, monkeypatch, ops):
            out, lse, *_, state, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v)
            given = (q, k, v, out, lse, None, None, 64, 64, 0.0, False, state, unused)
            aten._scaled_dot_product_flash_attention_backward(out, *given)
            out, lse, state, unused, _ = aten._flash_attention_forward(rows, rows, rows, *tail, False)
            aten._flash_attention_backward(out, rows, rows, rows, out, lse, *tail, state, unused)
            assert out.device.type == "cuda" and out.shape == rows.shape
    assert_expected_inline(
        "\n".join(ops),
        """\
vk.attention.default
vk.attention_backward.default
vk.window_attn.default
vk.window_attn_backward.default""",
    )


def test_kernels_of_the_functions_are_triton_alone() -> None:
    with fake_gpu() as mode:
        with mode:
            q, k, v = (torch.empty(2, 64, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2) for _ in range(3))
            rows = torch.empty(300, 4, 64, device="cuda", dtype=torch.float16)
            cu = torch.empty(2, device="cuda", dtype=torch.int32)
        sdpa = trace_kernels(torch_flash.scaled_dot_product_flash_attention, (q, k, v))
        varlen = trace_kernels(
            torch_flash.flash_attention_forward, (rows, rows.clone(), rows.clone(), cu, cu, 9, 9, 0.0, True, False)
        )
    assert [kernel.name for kernel in sdpa.kernels] == ["_attention_fwd_dense_kernel"]
    assert [kernel.name for kernel in varlen.kernels] == ["_attention_fwd_kernel"]
    for trace in (sdpa, varlen):
        assert "copy" not in trace.targets and "clone" not in trace.targets


# --- compiled ---


def _results(function: Callable[..., Any], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.usefixtures("active")
def test_compiled_varlen_attn_equals_eager(device: str) -> None:
    cu = cumulative((4, 0, 5), device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, cu, cu, 5, 5, window_size=(2, 0))
        assert isinstance(out, Tensor)
        return out

    function, graphs = capture_graphs(call)
    tensors = [tensor.to(device, torch.float16) for tensor in _packed("part_of_qkv")]
    torch.testing.assert_close(_results(function, tensors), _results(call, tensors))
    # PyTorch 2.15 also asks in the graph which backends are enabled.
    ops = [target for target in graphs.dynamo.splitlines() if not re.search(r"_get_\w+_sdp_enabled>$", target)]
    assert ops == ["torch_attn._varlen_attn"]
    assert graphs.forward.count("_varlen_attn") == graphs.backward.count("_varlen_attn_backward") == 1


@pytest.mark.usefixtures("active")
def test_graphs_of_dynamic_lengths_never_recompile(device: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, cu, cu, q.shape[0], q.shape[0])
        assert isinstance(out, Tensor)
        return out

    function, graphs = capture_graphs(call, dynamic=True)
    with recompiling_fails():
        for lengths in ((4, 0, 5), (11, 2, 3)):
            cu = cumulative(lengths, device)
            tensors = [torch.randn(sum(lengths), 4, 8, device=device).half() for _ in range(3)]
            torch.testing.assert_close(function(*tensors, cu), call(*tensors, cu))
    assert graphs.compiled == 1


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("order", ["BHSD", "BSHD"])
def test_the_compiled_op_of_dense_tensors_equals_eager(order: str, device: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    function, graphs = capture_graphs(call)
    tensors = [tensor.to(device, torch.float16) for tensor in _dense(order, 9, 9, 4)]
    torch.testing.assert_close(_results(function, tensors), _results(call, tensors))
    assert "_scaled_dot_product_flash_attention" in graphs.forward
    assert "_scaled_dot_product_flash_attention_backward" in graphs.backward


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("active", "deterministic")
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "chosen"])
def test_inductor_equals_eager(flash: bool) -> None:
    """Both functions, forward and backward, and a graph that outlives the activation."""
    cu = cumulative((100, 0, 200), "cuda")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = varlen_attn(q, k, v, cu, cu, 200, 200)
        assert isinstance(packed, Tensor)
        dense = (tensor[None].transpose(1, 2) for tensor in (q, k, v))
        return packed + functional.scaled_dot_product_attention(*dense, is_causal=True)[0].transpose(0, 1)

    tensors = [torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        compiled = torch.compile(call, fullgraph=True)
        torch.testing.assert_close(_results(compiled, tensors), _results(call, tensors))
        restore_flash_attention_impl()
        torch.testing.assert_close(_results(compiled, tensors), _results(call, tensors))
        activate_flash_attention_impl("VK")
