"""No build depends on a size: few builds of each kernel serve all lengths and batches of a layout."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

from compile_tests import kernels
from compile_tests.attention import hopper_launches
from compile_tests.contract.build import _stand_in, build_now
from compile_tests.contract.kernels import Calls, Kernels
from compile_tests.contract.trace import SM90, KernelLaunch, fake_gpu, record_launches
from csrc_free_ops.configs.rows import Config
from torch_ops._core.registry import OPS
from torch_ops._gemm.portable import table_rows, table_stride

pytestmark = pytest.mark.no_interpret

# Lengths, and numbers of sequences: ones that 16 divides, that 8 divides, odd ones, and one alone.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 24, 31, 32, 33, 48, 64, 100, 129)
# Enough of them to find more builds than MOST; all are for the layouts of ALL_SIZES.
FEW = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64)
ALL_SIZES = ("attention_length", "window_attn_one_of_batch", "rms_norm_1152_last_rows", "mlp_last_rows")
MOST = 4


def of_tensors(calls: Calls, change: Callable[[Tensor], Tensor], place: int | None = None) -> Calls:
    """The calls with their tensors, or the one at that place, in another layout."""
    return {
        op: (
            tuple(
                change(arg) if isinstance(arg, Tensor) and place in (None, at) else arg for at, arg in enumerate(args)
            ),
            options,
        )
        for op, (args, options) in calls.items()
    }


def last_rows(length: int, calls: Calls, place: int | None = None) -> Calls:
    """Matrices that are the last row of each sequence, as h[:, -1] is."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() != 2:
            return tensor
        rows, columns = tensor.shape
        return kernels.new(rows, length, columns, dtype=tensor.dtype).select(1, length - 1)

    return of_tensors(calls, change, place)


def batch_inside(calls: Calls) -> Calls:
    """[B, H, S, D] that lies as [S, B, H, D]."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() != 4:
            return tensor
        batch, heads, rows, columns = tensor.shape
        return kernels.new(rows, batch, heads, columns, dtype=tensor.dtype).permute(1, 2, 0, 3)

    return of_tensors(calls, change)


def one_of_batch(batch: int, calls: Calls, tables: bool = False) -> Calls:
    """Packed tensors that are one sequence of [T, B, H, D], and with `tables` long ones that are one of [T, B, D]."""

    def change(tensor: Tensor) -> Tensor:
        is_table = tables and tensor.dim() == 2 and tensor.shape[0] > tensor.shape[1]
        if tensor.dim() != 3 and not is_table:
            return tensor
        return kernels.new(tensor.shape[0], batch, *tensor.shape[1:], dtype=tensor.dtype).select(1, batch - 1)

    return of_tensors(calls, change)


def _norms() -> Iterator[tuple[str, Kernels, Callable[[int], Calls]]]:
    for op, each in kernels.NORMS.items():
        for width in (1152, 20000):
            calls = partial(each.calls, rows=4, width=width)
            yield f"{op}_{width}_last_rows", each, lambda n, calls=calls: last_rows(n, calls())
        yield f"{op}_rows", each, lambda n, each=each: each.calls(rows=n)


LAYOUTS: dict[str, tuple[Kernels, Callable[[int], Calls]]] = {
    **{name: (each, calls) for name, each, calls in _norms()},
    "attention_batch_inside": (kernels.ATTENTION, lambda n: batch_inside(kernels.attention_calls(batch=n))),
    "attention_gqa_inside": (
        kernels.ATTENTION,
        lambda n: batch_inside(kernels.attention_calls(batch=n, num_heads=8, num_k_heads=2, head_dim=128)),
    ),
    "attention_fp32_inside": (
        kernels.ATTENTION,
        # So many heads and rows that gradients are not split, which is a choice of launches.
        lambda n: batch_inside(kernels.attention_calls(batch=n, num_heads=64, rows=1000, dtype=torch.float32)),
    ),
    "attention_fp32_splits": (
        kernels.ATTENTION,
        # Gradients in 1 to 8 parts.
        lambda n: kernels.attention_calls(num_heads=n, batch=1, rows=1000, head_dim=64, dtype=torch.float32),
    ),
    "attention_length": (kernels.ATTENTION, lambda n: kernels.attention_calls(rows=n, keys=3 * n)),
    "attention_rows_first": (kernels.ATTENTION, lambda n: kernels.attention_calls(rows=n, rows_first=True)),
    "window_attn": (kernels.WINDOW_ATTN, lambda n: kernels.window_attn_calls(rows=100 * n, segments=n)),
    "window_attn_head_major": (kernels.WINDOW_ATTN, lambda n: kernels.window_attn_calls(rows=99 * n, head_major=True)),
    "window_attn_one_of_batch": (
        kernels.WINDOW_ATTN,
        lambda n: one_of_batch(n, kernels.window_attn_calls(num_heads=4, num_k_heads=2)),
    ),
    "small_segments_one_of_batch": (
        kernels.WINDOW_ATTN,
        lambda n: one_of_batch(n, kernels.window_attn_calls(rows=100, segments=4)),
    ),
    "rope_window_attn_one_of_batch": (
        kernels.ROPE_WINDOW_ATTN,
        lambda n: one_of_batch(n, kernels.rope_window_attn_calls(head_dim=128, needs_tables=True), tables=True),
    ),
    "small_segments_head_major": (
        kernels.WINDOW_ATTN,
        lambda n: kernels.window_attn_calls(rows=33 * n, segments=n, head_major=True),
    ),
    "rope_window_attn": (
        kernels.ROPE_WINDOW_ATTN,
        lambda n: kernels.rope_window_attn_calls(rows=100 * n, segments=n, needs_tables=True),
    ),
    "attention_decode": (kernels.ATTENTION_DECODE, lambda n: kernels.attention_decode_calls(batch=n, capacity=64 * n)),
    "attention_decode_batch_inside": (
        kernels.ATTENTION_DECODE,
        lambda n: batch_inside(kernels.attention_decode_calls(batch=n, capacity=100)),
    ),
    "kv_cache_append_batch_inside": (
        kernels.KV_CACHE_APPEND,
        lambda n: batch_inside(kernels.kv_cache_append_calls(batch=n, tokens=3)),
    ),
    "kv_cache_append": (
        kernels.KV_CACHE_APPEND,
        lambda n: kernels.kv_cache_append_calls(batch=n, tokens=n, capacity=100 * n),
    ),
    "mlp": (kernels.MLP, lambda n: kernels.gemm_calls(rows=n)),
    "mlp_last_rows": (kernels.MLP, lambda n: last_rows(n, kernels.gemm_calls(rows=8), 0)),
    "swiglu_last_rows": (kernels.MLP, lambda n: last_rows(n, kernels.gemm_calls(rows=8, activation="swiglu"), 0)),
    "qkv_rope_last_rows": (kernels.QKV_ROPE, lambda n: last_rows(n, kernels.gemm_calls(rows=8), 0)),
    "qkv_rope_one_of_batch": (
        kernels.QKV_ROPE,
        lambda n: one_of_batch(n, kernels.gemm_calls(rows=8)),
    ),
    "qkv_rope": (kernels.QKV_ROPE, lambda n: kernels.gemm_calls(rows=n, needs_tables=True)),
    "vision_attention": (
        kernels.VISION_ATTENTION,
        lambda n: kernels.vision_attention_calls(rows=100 * n, segments=n),
    ),
    **{op: (each, lambda n: kernels.grid_calls(rows=4 * n, images=n)) for op, each in kernels.GRIDS.items()},
    **{
        f"{op}_last_rows": (kernels.GRIDS[op], lambda n: last_rows(n, kernels.grid_calls(rows=16, images=2), 0))
        for op in ("spatial_merge", "pos_embed_interpolate")
    },
}


def build_of(launch: KernelLaunch) -> str:
    """The key of a launch in the cache of its kernel's builds."""
    bind = launch.kernel.device_caches[0][-1]
    _, specialization, _ = bind(*map(_stand_in, launch.args), **launch.kwargs)
    return f"{specialization} {sorted(launch.options.items())}"


def assert_few_builds(launched: Kernels, calls_of: Callable[[int], Calls], path: str, sizes: tuple[int, ...]) -> None:
    """`path` launches: distinct builds of each kernel of each op over the sizes."""
    found: dict[str, dict[str, tuple[int, dict[str, Any]]]] = defaultdict(dict)
    for size in sizes:
        with fake_gpu(path=path) as mode, mode:
            calls = calls_of(size)
            for op in launched.ops:
                products = mock.patch(launched.products) if launched.products else contextlib.nullcontext()
                with products, record_launches() as launches:
                    OPS[op].body(*calls[op][0], **calls[op][1])
                for launch in launches:
                    constants = {name: value for name, value in launch.arguments.items() if name.isupper()}
                    back = "back" * bool(constants.get("BACK"))
                    found[f"{op}: {launch.name} {back}"].setdefault(build_of(launch), (size, constants))
    # An op may launch a kernel once for each of its products, gate and up.
    for kernel, builds in found.items():
        apart = {name for _, constants in builds.values() for name in constants}
        apart = {name for name in apart if len({str(each.get(name)) for _, each in builds.values()}) > 1}
        assert len(builds) <= MOST, f"{kernel} has {len(builds)} builds; their sizes and constants: " + ", ".join(
            f"{size} { ({name: constants.get(name) for name in apart}) }" for size, constants in builds.values()
        )
    assert found


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("rows", [300, 2000], ids=["short", "long"])
def test_few_builds_of_hopper_kernels_serve_all_batches(rows: int, head_dim: int) -> None:
    """[S, B, H, D]: TMA takes any strides, but rows of results are stored by addresses."""
    chosen = {name: Config(128, 128, 8, 2) for name in ("attention_fwd_hopper", "attention_bwd_hopper")}
    found: dict[str, set[str]] = defaultdict(set)
    for batch in FEW:
        launches = hopper_launches(
            chosen, head_dim, batch=batch, rows=rows, num_heads=8, num_k_heads=4, batch_inside=True
        )
        with fake_gpu():
            for name, launch in launches.items():
                constants = {key: value for key, value in launch.arguments.items() if "SPLIT" in key or key == "ORDER"}
                found[f"{name} {constants}"].add(build_of(launch))
    assert len(found) > 2 and all(len(builds) <= MOST for builds in found.values()), {
        name: len(builds) for name, builds in found.items()
    }


# A launch of the Hopper path with so many rows, batches or segments; fp32 ones have a forward alone.
HOPPER_SIZES: dict[str, Callable[[int], dict[str, Any]]] = {
    "segments": lambda n: {"rows": 131 * n, "segments": n},
    "window": lambda n: {"rows": 64 * n, "left": n, "right": 3 * n},
    "lengths": lambda n: {"rows": 64 * n + 300, "batch": 2},
    "batches": lambda n: {"rows": 2000, "batch": n},
    "fp32_lengths": lambda n: {"rows": 64 * n + 300, "batch": 2, "dtype": torch.float32},
    "fp32_inside": lambda n: {"rows": 300, "batch": n, "batch_inside": True, "dtype": torch.float32},
}


@pytest.mark.parametrize("sizes", HOPPER_SIZES)
def test_few_builds_of_hopper_kernels_serve_all_sizes(sizes: str) -> None:
    """Each order of tiles counts as a kernel of its own."""
    chosen = {name: Config(128, 128, 8, 2) for name in ("attention_fwd_hopper", "attention_bwd_hopper")}
    found: dict[str, set[str]] = defaultdict(set)
    for size in FEW:
        launches = hopper_launches(chosen, 64, num_heads=8, num_k_heads=4, **HOPPER_SIZES[sizes](size))
        with fake_gpu():
            for name, launch in launches.items():
                found[f"{name} {launch.arguments.get('ORDER')}"].add(build_of(launch))
    assert found and all(len(builds) <= MOST for builds in found.values()), {
        name: len(builds) for name, builds in found.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_builds_serve_all_sizes(layout: str) -> None:
    assert_few_builds(*LAYOUTS[layout], "portable", SIZES if layout in ALL_SIZES else FEW)


def test_products_copy_tables_whose_rows_follow_from_a_batch() -> None:
    """Tables that are one sequence's of [T, B, D]; those that a model places are read where they lie."""
    tables = [torch.rand(8, batch, 72).select(1, batch - 1) for batch in SIZES]
    for table in tables:
        rows = table_rows(table)
        assert torch.equal(rows, table) and rows.stride() == (table_stride(table), 1)
    assert {table_stride(table) for table in tables} == {72, 3 * 72}
    assert table_rows(tables[0]).data_ptr() == tables[0].data_ptr()


# Kernels that sum loaded values or multiply in parts: op and calls of each.
ADDING: dict[str, tuple[str, Callable[[], Calls]]] = {
    "_attention_bwd_dq_kernel": ("window_attn_backward", lambda: kernels.window_attn_calls(rows=300, segments=1)),
    "_attention_bwd_small_segments_kernel": (
        "window_attn_backward",
        lambda: kernels.window_attn_calls(rows=100, segments=4),
    ),
    "_attention_decode_kernel": ("attention_decode", lambda: kernels.attention_decode_calls(batch=3, capacity=192)),
}


@pytest.mark.parametrize("kernel", ADDING)
def test_inductor_builds_the_layouts_of_eager_calls(kernel: str) -> None:
    """A build with all integers specialized, as Inductor's, has the layouts of the eager build; others change bits.

    16 divides the strides of the last tensor only.
    """
    op, calls_of = ADDING[kernel]

    def odd(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[-1] % 8:
            return tensor
        wide = kernels.new(*tensor.shape[:-1], 3 * tensor.shape[-1] + 3, dtype=tensor.dtype)
        return wide.narrow(-1, 0, tensor.shape[-1])

    with fake_gpu() as mode:
        with mode, record_launches() as launches:
            calls = calls_of()
            args, options = calls[op]
            last = max(at for at, arg in enumerate(args) if isinstance(arg, Tensor) and odd(arg) is not arg)
            odd_args, _ = of_tensors(calls, odd)[op]
            OPS[op].body(*odd_args[:last], args[last], *odd_args[last + 1 :], **options)
        launch = next(launch for launch in launches if launch.name == kernel)
        specialized = replace(launch, kernel=triton.jit(launch.kernel.fn))
        eager, compiled = (build_now(each, SM90).asm["ttgir"] for each in (launch, specialized))
    assert signature_of(eager) != signature_of(compiled)
    assert layouts_of(eager) == layouts_of(compiled)


def signature_of(ttgir: str) -> str:
    return re.sub(r"loc\([^)]*\)", "", next(line for line in ttgir.splitlines() if "tt.func public" in line))


def layouts_of(ttgir: str) -> list[str]:
    return sorted(re.findall(r"^#\w+ = (#ttg\..*)", ttgir, re.MULTILINE))
