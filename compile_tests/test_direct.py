"""Eager calls that do without the dispatcher: when they do, and that they compute what a dispatched call computes.

On a CPU, tensors of the CPU are remembered too, which the library itself leaves to PyTorch.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ops
from compile_tests.contract.graph import DEVICE, DTYPE, GPU
from torch_ops._core import device, direct
from torch_ops._core.direct import MOST_OF_A_SHAPE, Direct, allocator
from torch_ops._core.registry import OPS, KernelOp

pytestmark = pytest.mark.no_interpret
# No other test calls with so many columns.
COLUMNS = 56


class Dispatched:
    """An op that has seen no call, and how many calls of it went through the dispatcher."""

    def __init__(self, name: str) -> None:
        # A new generation hides the plans of other tests.
        torch_ops.settings.generation += 1
        op = OPS[name]
        assert isinstance(op, KernelOp)
        self.calls, self._overload = 0, op.overload
        self.op = dataclasses.replace(op, overload=self._dispatch, direct=Direct())

    def _dispatch(self, *args: Any) -> Any:
        self.calls += 1
        return self._overload(*args)

    def __call__(self, *args: Any) -> Any:
        """Call the op, and compare with a call of its overload."""
        made = self.op(*args)
        torch.testing.assert_close(made, self._overload(*args), rtol=0, atol=0)
        return made


@pytest.fixture(autouse=True)
def _remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        are_plain = direct._are_plain
        on_gpu = property(lambda tensor: True)

        def pretending(args: tuple[Any, ...]) -> bool:
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "is_cuda", on_gpu)
                return are_plain(args)

        monkeypatch.setattr(direct, "_are_plain", pretending)
        for module in (direct, device):
            monkeypatch.setattr(module, "current_cuda_device", lambda: -1)


@pytest.fixture
def norm() -> Dispatched:
    return Dispatched("layer_norm")


def drawn(rows: int = 37, columns: int = COLUMNS, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(rows, columns, device=DEVICE, dtype=dtype)


def arguments(**changes: Any) -> tuple[Any, ...]:
    """Those of `layer_norm`, of new values."""
    return changes.get("x", drawn()), drawn()[0], changes.get("bias", drawn()[0]), changes.get("eps", 1e-6)


def test_calls_of_a_signature_are_dispatched_twice(norm: Dispatched) -> None:
    for expected in (1, 2, 2, 2):
        norm.op(*arguments())
        assert norm.calls == expected
    norm(*arguments())


def test_a_signature_seen_once_is_not_remembered(norm: Dispatched) -> None:
    """Neither shapes that keep changing nor values that do."""
    for step in range(2 * MOST_OF_A_SHAPE):
        norm.op(*arguments(x=drawn(1 + step)))
        norm.op(*arguments(eps=1e-6 * (1 + step)))
    assert norm.calls == 4 * MOST_OF_A_SHAPE and not norm.op.direct._calls


# Each makes arguments of another signature.
CHANGED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rows": lambda: arguments(x=drawn(38)),
    "strides": lambda: arguments(x=drawn(37, 2 * COLUMNS)[:, ::2]),
    "dtype": lambda: arguments(x=drawn(dtype=torch.bfloat16), bias=None)[:1],
    "absent": lambda: arguments(bias=None),
    "value": lambda: arguments(eps=1e-3),
    "fewer": lambda: arguments()[:3],
    "grad": lambda: arguments(x=drawn().requires_grad_()),
}


@pytest.mark.parametrize("what", CHANGED)
def test_another_signature_is_dispatched_anew(what: str, norm: Dispatched) -> None:
    for _ in range(3):
        norm(*arguments())
    assert norm.calls == 2
    # Some have the plan of the call before, which has come more than once.
    for expected in (3, 3, 3) if what in ("fewer", "grad") else (3, 4, 4):
        norm(*CHANGED[what]())
        assert norm.calls == expected
    calls = norm.calls
    norm(*arguments())
    assert norm.calls == calls


# States of the thread. Not all of them are a mode that a call must be shown to.
STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "settings": lambda: torch_ops.settings(path="portable"),
}


@pytest.mark.parametrize("state", STATES)
def test_another_state_is_dispatched_anew(state: str, norm: Dispatched) -> None:
    with torch_ops.settings(path="auto"):
        for _ in range(3):
            norm(*arguments())
        with STATES[state]():
            for _ in range(3):
                made = norm(*arguments())
        # A plan holds with and without inference mode, but not with other settings.
        assert norm.calls == (3 if state == "inference" else 4)
        assert made.is_inference() == (state == "inference")


def test_calls_under_autocast_take_the_type_of_the_region() -> None:
    """Also after calls outside, whose plans are those of other types."""
    attend = Dispatched("window_attn")
    tensors = [torch.randn(24, 2, 24, device=DEVICE) for _ in range(3)]
    cu_seqlens = torch.tensor([0, 24], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        assert attend(*tensors, cu_seqlens)[0].dtype is torch.float32
    with torch.autocast(DEVICE, torch.bfloat16):
        for expected in (3, 4, 5):
            assert attend(*tensors, cu_seqlens)[0].dtype is torch.bfloat16
            assert attend.calls == expected
    assert attend(*tensors, cu_seqlens)[0].dtype is torch.float32
    assert attend.calls == 5


def test_values_of_another_type_are_refused_as_ever() -> None:
    """Though they are equal to those of a remembered call."""
    attend = Dispatched("window_attn")
    tensors = [torch.randn(24, 2, 24, device=DEVICE) for _ in range(3)]
    given = *tensors, torch.tensor([0, 24], dtype=torch.int32, device=DEVICE), None, None, False
    for _ in range(3):
        attend(*given, -1)
    assert attend.calls == 2
    with pytest.raises(ValueError, match=r"^window_attn: window_left is -1\.0, expected an integer"):
        attend.op(*given, -1.0)


class _Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


WATCHERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": _Seeing,
    "function mode": BaseTorchFunctionMode,
    "forward mode": forward_ad.dual_level,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "checked": lambda: torch_ops.settings(checked=True),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_watched_calls_are_dispatched(watcher: str, norm: Dispatched) -> None:
    for _ in range(3):
        norm(*arguments())
    with WATCHERS[watcher]():
        for expected in (3, 4):
            norm(*arguments())
            assert norm.calls == expected


def test_a_profiler_names_the_op() -> None:
    x = drawn()
    for _ in range(3):
        torch_ops.layer_norm(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch_ops.layer_norm(x)
    assert "vk::layer_norm" in {event.key for event in profiled.key_averages()}


def test_calls_within_transforms_are_dispatched(norm: Dispatched) -> None:
    """Those on plain tensors too, which a transformed function takes from elsewhere."""
    given = arguments()
    for _ in range(3):
        norm(*given)

    def function(y: Tensor) -> Tensor:
        return y.sum() + norm.op(*given).sum()

    torch.func.grad(function)(torch.ones(2, device=DEVICE))
    assert norm.calls == 3


def test_gradients_are_those_of_dispatched_calls(norm: Dispatched) -> None:
    for count in range(4):
        given = tuple(each.requires_grad_() if isinstance(each, Tensor) else each for each in arguments())
        leaves = given[:3]
        dout = drawn()
        ours = torch.autograd.grad(norm.op(*given), leaves, dout)
        theirs = torch.autograd.grad(OPS["layer_norm"].overload(*given), leaves, dout)
        assert all(map(torch.equal, ours, theirs)) and norm.calls == (2 if count else 1)
        with torch.no_grad():
            assert not norm(*given).requires_grad
        # The state of gradients is part of no signature: only tensors are.
        assert norm.calls == 2


def test_batched_gradients_are_dispatched(norm: Dispatched) -> None:
    """PyTorch's older vmap, which batches tensors without a transform of torch.func."""
    x, dout = drawn(dtype=torch.float32).requires_grad_(), drawn(3 * 37, dtype=torch.float32).view(3, 37, COLUMNS)
    expected = [torch.autograd.grad(torch_ops.layer_norm(x), x, each)[0] for each in dout]
    for _ in range(3):
        (found,) = torch.autograd.grad(norm.op(x), x, dout, is_grads_batched=True)
        torch.testing.assert_close(found, torch.stack(expected))


def test_tensors_that_are_not_what_memory_holds_are_dispatched(norm: Dispatched) -> None:
    for expected in (1, 2, 3):
        x = torch.randn(37, COLUMNS, dtype=torch.complex64, device=DEVICE).conj().imag
        assert x.is_neg()
        norm(x)
        assert norm.calls == expected


def test_a_wrong_call_is_refused_as_ever(norm: Dispatched) -> None:
    for _ in range(3):
        norm(*arguments())
    for _ in range(2):
        with pytest.raises(ValueError, match="bias"):
            norm(*arguments(bias=drawn(1, 8)[0]))
        with pytest.raises((RuntimeError, TypeError)):
            norm(*arguments(bias="none"))
    norm(*arguments())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_as_ever(layout: torch.layout, norm: Dispatched) -> None:
    """PyTorch's guards abort the process on a nested tensor of strided layout."""
    nested = torch.nested.nested_tensor([*drawn(2)], layout=layout)
    for _ in range(3):
        norm(*arguments())
    for argument in ("x", "bias"):
        with pytest.raises(ValueError, match=f"^layer_norm: {argument} is a nested tensor"):
            norm(*arguments(**{argument: nested}))


class ForOneOp(Tensor):
    """A tensor that refuses all but one op, reads of attributes as well."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.vk.layer_norm.default
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_attributes_of_subclasses_are_not_read(norm: Dispatched) -> None:
    for _ in range(3):
        norm.op(*arguments())
    x, weight, *rest = arguments()
    assert norm.op(x, weight.as_subclass(ForOneOp), *rest).shape == x.shape
    assert norm.calls == 3


def test_a_tensor_that_comes_twice_is_dispatched() -> None:
    """Guards of several tensors take them to be different ones."""
    add = Dispatched("add_layer_norm")
    x = drawn()
    for expected in (1, 2, 3):
        add(x, x)
        assert add.calls == expected
    # The plan of these has been seen.
    for expected in (4, 4):
        add(x, drawn())
        assert add.calls == expected
    add(x, x)


def test_the_calls_least_recently_used_of_a_shape_are_forgotten(norm: Dispatched) -> None:
    def call(step: int) -> None:
        norm(*arguments(eps=1e-6 * (1 + step)))

    for step in range(MOST_OF_A_SHAPE):
        for _ in range(2):
            call(step)
    call(0)
    assert norm.calls == 2 * MOST_OF_A_SHAPE
    for _ in range(2):
        call(MOST_OF_A_SHAPE)
    call(0)
    assert norm.calls == 2 * MOST_OF_A_SHAPE + 2
    call(1)
    assert norm.calls == 2 * MOST_OF_A_SHAPE + 3


def test_forgotten_calls_take_no_room(norm: Dispatched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_CALLS", 2 * MOST_OF_A_SHAPE)
    for step in range(4 * MOST_OF_A_SHAPE):
        for _ in range(2):
            norm(*arguments(eps=1e-6 * (1 + step)))
    calls = norm.calls
    for expected in (1, 2, 2):
        norm(*arguments(x=drawn(38)))
        assert norm.calls == calls + expected


def test_a_full_memory_begins_anew_once_it_turned_many_away(norm: Dispatched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_CALLS", 4)
    monkeypatch.setattr(direct, "MOST_TURNED_AWAY", 8)
    for rows in (1, 2, 3, 4):
        for _ in range(3):
            norm(*arguments(x=drawn(rows)))
    assert norm.calls == 8
    for expected in range(9, 17):
        norm(*arguments(x=drawn(5)))
        norm(*arguments(x=drawn(1)))
        assert norm.calls == expected
    for _ in range(2):
        norm(*arguments(x=drawn(5)))
        assert norm.calls == 17
    norm(*arguments(x=drawn(1)))
    assert norm.calls == 18


def test_tensors_of_another_gpu_are_dispatched(norm: Dispatched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatched call makes theirs the current one."""
    current = direct.current_cuda_device() + 1
    monkeypatch.setattr(direct, "current_cuda_device", lambda: current)
    for expected in (1, 2, 3):
        norm(*arguments())
        assert norm.calls == expected


def test_threads_share_what_is_remembered() -> None:
    """More signatures than are remembered, so that threads change the list under each other."""
    calls = [drawn(37, columns)[:, :COLUMNS] for columns in range(COLUMNS, COLUMNS + 2 * MOST_OF_A_SHAPE)]
    expected = [torch_ops.rms_norm(x) for x in calls]

    def run(thread: int) -> bool:
        order = [(thread + step) % len(calls) for step in range(20 * len(calls))]
        return all(torch.equal(torch_ops.rms_norm(calls[place]), expected[place]) for place in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


@pytest.mark.parametrize("graph", [True, False])
def test_a_remembered_call_is_compiled_and_traced(graph: bool) -> None:
    x = drawn()
    expected = [torch_ops.layer_norm(x) for _ in range(3)][-1]
    function = torch.compile(torch_ops.layer_norm, backend="aot_eager", fullgraph=True) if graph else torch.jit.trace(
        torch_ops.layer_norm, x, check_trace=False
    )  # fmt: skip
    other = drawn()
    assert torch.equal(function(x), expected)
    assert torch.equal(function(other), torch_ops.layer_norm(other))


def test_results_on_a_cpu_are_allocated_by_the_op() -> None:
    assert allocator(torch.ones(2)) is None


@pytest.mark.gpu
def test_results_are_allocated_in_the_layouts_of_the_first() -> None:
    first = torch.ones(3, 4, device="cuda").T, torch.ones(5, device="cuda", dtype=torch.bfloat16)
    allocate = allocator(first)
    assert allocate is not None
    made, again = allocate(), allocate()
    assert [(each.shape, each.stride(), each.dtype, each.device) for each in made] == [
        (each.shape, each.stride(), each.dtype, each.device) for each in first
    ]
    assert len({each.data_ptr() for each in (*first, *made, *again)}) == 6
    alone = allocator(first[0])
    assert alone is not None and alone().stride() == (1, 4)
    # Not where results share memory, or are a part of it.
    assert allocator((first[0], first[0].view(4, 3))) is None
    assert allocator(torch.ones(4, device="cuda")[:2]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_new_memory_is_filled_in_deterministic_mode(deterministic: bool) -> None:
    """It is NaN there, for whoever reads what no kernel wrote."""
    x = drawn()
    for _ in range(3):
        torch_ops.layer_norm(x)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            torch_ops.layer_norm(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("aten::fill_" in {event.key for event in profiled.key_averages()}) == deterministic
