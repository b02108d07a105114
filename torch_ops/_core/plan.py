"""Plans and bound kernels: everything of a call that its metadata decides.

A plan is made once per signature of a call. It lists its kernels, so that `torch_ops.explain` prints what is launched.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

from csrc_free_ops.configs.rows import Config
from torch_ops._core.driver import DriverLaunch
from torch_ops._core.registry import Mode, current_mode, recorded_tensor

Kernels = dict[str, tuple[Config, str]]


class Plan:
    """A function that launches on one value, the tensors of a call, and the kernels that it binds.

    kernels: by name, the config of each and its source
    path:    "portable", "hopper", "aten" or "reference"
    why:     why this path
    extra:   more that `explain` says of the call
    """

    __slots__ = ("extra", "kernels", "launch", "path", "why")

    def __init__(
        self, launch: Callable[[Any], Any], kernels: Kernels | None = None, path: str = "portable", why: str = "",
        extra: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.path, self.why = launch, path, why
        self.kernels: Kernels = {} if kernels is None else kernels
        self.extra = {} if extra is None else extra

    def because(self, why: str, path: str | None = None) -> "Plan":
        """Return the plan with its reason, and with another path if one is given."""
        self.why, self.path = why, self.path if path is None else path
        return self


def reference_plan(launch: Callable[[Any], Any], tensor: Tensor) -> Plan:
    """Plan a call that ATen computes."""
    return Plan(launch, {}, "reference", f"tensors on {tensor.device} are computed by ATen")


def merged(*kernels: Kernels) -> Kernels:
    """Merge kernels by name. Where two of one name have different sources, both are kept."""
    result: Kernels = {}
    for each in kernels:
        for name, (launch, source) in each.items():
            before = result.get(name, (launch, source))[1]
            result[name] = launch, source if before == source else f"{before}; {source}"
    return result


def either(
    tensors: Any, preferred: Plan, fits: Callable[[Any], bool], plan_other: Callable[[Any], Plan], why_not: str
) -> Plan:
    """Launch the preferred plan; for tensors that do not fit it, one that is planned with the first such tensors.

    `fits` looks at what metadata does not show: addresses. `explain` has the real tensors and looks at once.
    """
    if current_mode() is Mode.EXPLAINED:
        return preferred if fits(tensors) else plan_other(tensors).because(why_not)
    first, other = preferred.launch, None

    def launch(tensors: Any) -> None:
        nonlocal other
        if fits(tensors):
            first(tensors)
            return
        if other is None:
            other = plan_other(tensors).launch
        other(tensors)

    return Plan(launch, preferred.kernels, preferred.path, preferred.why, preferred.extra)


def has_tma_addresses(*tensors: Tensor) -> bool:
    """Return whether TMA can start at these addresses, and whether there is anything to address."""
    if not all([tensor.numel() for tensor in tensors]):
        return False
    if current_mode() is not Mode.EXPLAINED:
        return _aligned(tensors)
    return all([_address(tensor) % 16 == 0 for tensor in tensors])


def _address(tensor: Tensor) -> int:
    # Fake tensors have no address. `explain` knows the real one of an argument; a result's is a multiple of 16.
    real = recorded_tensor(tensor)
    return 0 if real is None else real.data_ptr()


class Bound:
    """A kernel bound to everything of its launch but the tensors.

    The first launch on aligned tensors is kept as compiled. Triton inspects some forty arguments at each launch, which
    is most of its host time; a plan fixes them all but the addresses. The driver then launches it directly
    (`_core/driver.py`), or Triton's launcher where it has hooks to call. For a pointer off 16 bytes Triton builds other
    code, so such a launch takes the long way. Compiler settings in `triton.knobs` therefore count before the first
    call; launch hooks are called each time.

    Plans write `Bound(wrap_triton(_kernel), ...)` with the kernel's bare name: torch reads the source for the kernels
    that enter the key of compiled artefacts.
    """

    __slots__ = ("_constants", "_direct", "_grid", "_kept", "_launch", "_rest", "_scalars")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], scalars: Iterable[Any] = (), constants: dict[str, Any] | None = None
    ) -> None:
        self._launch, self._scalars, self._constants = kernel[grid], tuple(scalars), constants or {}
        self._grid = (*grid, 1, 1)[:3]
        self._kept: Callable[..., None] | None = None
        self._direct: DriverLaunch | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None, descriptors: tuple[Any, ...] = ()) -> None:
        """Launch on tensors in the order of the kernel's arguments; TMA descriptors, of aligned tensors, come first."""
        direct = self._direct
        if direct is not None:
            addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
            if _are_aligned(addresses) and direct(descriptors, addresses):
                return
        kept = self._kept
        if kept is not None and _aligned(tensors):
            kept(*descriptors, *tensors, *self._rest)
            return
        compiled = self.launch_anew(*descriptors, *tensors)
        # Traces and the interpreter return no compiled kernel.
        if kept is None and isinstance(compiled, CompiledKernel) and _aligned(tensors):
            constants = self._constants
            in_order = (constants[name] for name in compiled.src.fn.arg_names if name in constants)
            self._kept, self._rest = compiled[self._grid], (*self._scalars, *in_order)
            self._direct = DriverLaunch.of(compiled, self._grid, descriptors, tensors, self._rest)

    def launch_anew(self, *arguments: Any) -> Any:
        """Launch through Triton, which inspects every argument."""
        return self._launch(*arguments, *self._scalars, **self._constants)


def _aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    return _are_aligned([tensor.data_ptr() for tensor in tensors if tensor is not None])


def _are_aligned(addresses: list[int]) -> bool:
    bits = 0
    for address in addresses:
        bits |= address
    return bits % 16 == 0
