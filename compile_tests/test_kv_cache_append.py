"""`vk::kv_cache_append` under torch.compile, torch.export, AOTInductor, CUDA graphs, and built for every target."""

import io
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.contract import (
    ALIKE,
    APART,
    RUN_PACKAGE,
    TARGETS,
    Build,
    assert_expected_inline,
    assert_kernels,
    assert_plain_launch,
    build,
    capture,
    capture_graphs,
    cloned_tensors,
    fake_gpu,
    opcheck_fully,
    recompiling_fails,
    run_forked,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.kv_cache import VARIANTS, kv_cache_call, kv_cache_launch
from torch_ops import kv_cache_append
from torch_ops._core.registry import OPS
from torch_ops.testing.cases import KvCacheCase, KvCacheInputs, make_kv_cache_inputs

OP = torch.ops.vk.kv_cache_append.default
CACHES = frozenset({"k_cache_ptr", "v_cache_ptr"})
BACKENDS = ("aot_eager", "inductor")
CASE = KvCacheCase("compiled", "", (0, 3, 5), 4, 2, 32, 12, num_heads=6, columns=16, layout="tokens")
CASES = (CASE, replace(CASE, name="paged", page_size=4, capacity=3, lengths=(4, 1, 2)))
# Of one graph: other sequences, tokens, room. No two sizes of the first are alike, which PyTorch would take for one.
SIZES = (
    CASE,
    replace(CASE, before=(2, 0), tokens=7, capacity=9),
    replace(CASE, before=(7, 1, 2, 3, 0), tokens=2, capacity=30),
)


def _inputs(case: KvCacheCase, device: str, dtype: torch.dtype = torch.float32) -> KvCacheInputs:
    return make_kv_cache_inputs(case, dtype, device)


def _results(function: Any, case: KvCacheCase, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    inputs = _inputs(case, device, dtype)
    return inputs.call(function), inputs.k_cache, inputs.v_cache


def _assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def _tensors(args: tuple[Any, ...]) -> frozenset[str]:
    """The names that a trace gives to the caches among its inputs."""
    given = [arg for arg in args if isinstance(arg, Tensor)]
    return frozenset(f"arg{place}_1" for place, arg in enumerate(given) if arg is args[2] or arg is args[3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_traced_kernel_writes_caches_and_queries_alone(variant: str) -> None:
    with fake_gpu() as mode:
        with mode:
            args = kv_cache_call(**VARIANTS[variant])
        trace = trace_kernels(OP, args)
        left = cloned_tensors(OP, args)
    writes = CACHES | ({"out_ptr"} if args[6] is not None else set())
    assert_kernels(trace, {"_kv_cache_append_kernel": set(writes)}, _tensors(args))
    assert left == [set()], "a copy of a whole cache for each token"
    launched = kv_cache_launch(**VARIANTS[variant])
    assert_plain_launch(launched)
    (kernel,) = trace.kernels
    assert {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages} == launched.options


def test_caches_that_a_graph_reads_before_or_makes_are_not_cloned() -> None:
    def around(*args: Any) -> Any:
        old = args[2] + 0
        k_cache, v_cache = torch.zeros_like(args[2]), args[3].clone()
        return old, OP(*args), OP(*args[:2], k_cache, v_cache, *args[4:]), k_cache.sum(), v_cache

    with fake_gpu() as mode:
        with mode:
            args = kv_cache_call()
        assert cloned_tensors(around, args) == [set(), set()]


def test_cloned_tensors_are_found() -> None:
    """As those of caches that are views of one tensor."""

    def of_both(both: Tensor, *args: Any) -> Any:
        return OP(*args[:2], *both.unbind(), *args[4:])

    with fake_gpu() as mode:
        with mode:
            args = kv_cache_call()
            both = torch.empty(2, *args[2].shape, device="cuda", dtype=args[2].dtype)
        assert cloned_tensors(of_both, (both, *args)) == [CACHES]


@pytest.mark.parametrize("page_size", [0, 16])
def test_traces_of_symbolic_sizes_hold_for_all_sizes(page_size: int) -> None:
    with fake_gpu(name="h200") as mode:
        with mode:
            names = ("batch", "tokens", "capacity", "max_positions", "pages", "max_pages")
            hints = (4, 7, 1000, 4096, 99, 16)
            if page_size:
                names, hints = names[:2] + names[3:], hints[:2] + hints[3:]
            else:
                names, hints = names[:4], hints[:4]
            sizes = {name: symbolic_size(mode, name, hint) for name, hint in zip(names, hints, strict=True)}
            args = kv_cache_call(**sizes, page_size=page_size, ragged=True)
        assert_kernels(trace_kernels(OP, args), {"_kv_cache_append_kernel": {*CACHES, "out_ptr"}}, _tensors(args))
    guards = [str(guard.expr) for guard in mode.shape_env.guards]
    assert not guards and not mode.shape_env.replacements


def test_symbols_where_kernels_have_constants_are_settled() -> None:
    """Everything is a symbol under `dynamic=True`, also what is a number of the model."""
    names = ("batch", "tokens", "num_heads", "num_k_heads", "head_dim", "columns", "page_size", "pages", "max_pages")
    with fake_gpu() as mode:
        with mode:
            hints = (4, 7, 32, 8, 128, 64, 16, 99, 12)
            sizes = {name: symbolic_size(mode, name, hint) for name, hint in zip(names, hints, strict=True)}
            args = kv_cache_call(**sizes)
        trace = trace_kernels(OP, args)
    assert_kernels(trace, {"_kv_cache_append_kernel": {*CACHES, "out_ptr"}}, _tensors(args))


def test_graphs_for_cuda_hold_only_an_allocation_and_the_kernel() -> None:
    with fake_gpu() as mode:
        with mode:
            args = kv_cache_call()
        targets = trace_kernels(OP, args).targets
    assert_expected_inline(
        targets,
        """\
aten.empty_like.default
triton_kernel_wrapper_functional
""",
    )


def test_kernel_enters_the_key_of_compiled_artefacts() -> None:
    found = [kernel.fn.__name__ for kernel in get_triton_kernels_for_op("vk::kv_cache_append")]
    assert found == ["_kv_cache_append_kernel"]


def test_schema_says_what_is_written_to() -> None:
    schema = OPS["kv_cache_append"].overload._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    assert not any(result.alias_info for result in schema.returns)


@pytest.mark.parametrize("layout", ["heads", "tokens", "gaps"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_opcheck_passes(case: KvCacheCase, layout: str, device: str) -> None:
    inputs = _inputs(replace(case, layout=layout, cache_layout=layout), device)
    inputs.call(lambda *args: opcheck_fully(OP, args))
    if layout == "heads":
        plain = dict.fromkeys(("q", "cos", "sin"))
        inputs.call(lambda *args: opcheck_fully(OP, args), **plain)


def test_graphs_hold_only_vk_ops(device: str) -> None:
    function, graphs = capture_graphs(kv_cache_append)
    _results(function, CASE, device)
    assert_expected_inline(graphs.dynamo, "vk.kv_cache_append.default\n")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled_equals_eager(case: KvCacheCase, backend: str, device: str) -> None:
    compiled = torch.compile(kv_cache_append, fullgraph=True, dynamic=False, backend=backend)
    _assert_equal(_results(compiled, case, device), _results(kv_cache_append, case, device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_never_recompile(backend: str, device: str) -> None:
    compiled = torch.compile(kv_cache_append, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for case in SIZES:
            _assert_equal(_results(compiled, case, device), _results(kv_cache_append, case, device))


def _step(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """A layer's: what is new is made here, the cache is read after it, lengths advance."""
    before = k_cache.sum()
    q = kv_cache_append(k * 2, v + 1, k_cache, v_cache, seqlens, *rest)
    seqlens.add_(k.shape[2])
    return q + 1, before, k_cache.sum(), (k_cache * v_cache).sum(3)


def _fresh(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Caches that a graph makes."""
    k_cache, v_cache = torch.zeros_like(k_cache), torch.ones_like(v_cache)
    q = kv_cache_append(k, v, k_cache, v_cache, *rest)
    return q, k_cache, v_cache.sum(1)


@pytest.mark.parametrize("step", (_step, _fresh), ids=("inputs", "intermediates"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps_equal_eager_ones(backend: str, step: Any, device: str) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, step):
        inputs = _inputs(CASE, device)
        outs = [out for _ in range(2) for out in inputs.call(function)]
        results.append((*outs, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("step", (_step, _fresh), ids=("inputs", "intermediates"))
def test_generated_code_copies_no_cache(step: Any, device: str) -> None:
    """Of what Inductor writes only the caches that the graph makes have a cache's shape."""
    case = replace(CASE, capacity=59)
    _, codes = run_and_get_code(
        torch.compile(step, fullgraph=True, dynamic=False), *vars(_inputs(case, device)).values()
    )
    made = re.findall(r"empty_strided\w*\(\(3, 2, 59, 32\)", "".join(codes))
    assert len(made) == (2 if step is _fresh else 0)


def test_compiled_calls_refuse_gradients_and_run_without(device: str) -> None:
    inputs = _inputs(CASE, device)
    compiled = torch.compile(kv_cache_append, fullgraph=True, backend="aot_eager")
    leaf = inputs.k.detach().requires_grad_()
    with pytest.raises(Exception, match="vk::kv_cache_append has no gradient, and k requires one"):
        inputs.call(compiled, k=leaf)
    with torch.no_grad():
        assert torch.equal(inputs.call(compiled, k=leaf), _results(kv_cache_append, CASE, device)[0])


class _Append(torch.nn.Module):
    """As a program has it: its caches are buffers."""

    def __init__(self, inputs: KvCacheInputs) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, getattr(inputs, name).clone())

    def forward(self, k: Tensor, v: Tensor, seqlens: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = kv_cache_append(k, v, self.k_cache, self.v_cache, seqlens, None, q, cos, sin)
        return q + self.k_cache[:, :1, 5:6] * self.v_cache[:, 1:, 5:6]


def _export(device: str) -> tuple[torch.export.ExportedProgram, tuple[Tensor, ...], _Append]:
    inputs = _inputs(CASE, device)
    tokens = torch.export.Dim("tokens", min=2, max=8)
    new = {2: tokens}
    args = (inputs.k, inputs.v, inputs.cache_seqlens, inputs.q, inputs.cos, inputs.sin)
    program = torch.export.export(_Append(inputs), args, dynamic_shapes=(new, new, None, new, None, None))
    return program, args, _Append(inputs)


def test_exported_program_survives_saving_and_writes_its_buffers(device: str) -> None:
    program, args, module = _export(device)
    called = [str(node.target) for node in program.graph.nodes if "vk." in str(node.target)]
    assert called == ["vk.kv_cache_append.default"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for begin in (0, 1):
        k, v, seqlens, q, *tables = args
        part = (*(each[:, :, begin:] for each in (k, v)), seqlens + begin, q[:, :, begin:], *tables)
        assert torch.equal(loaded(*part), module(*part))
    assert torch.equal(loaded.k_cache, module.k_cache) and torch.equal(loaded.v_cache, module.v_cache)


def test_decomposed_export_keeps_the_op_functionalized(device: str) -> None:
    program, args, module = _export(device)
    decomposed = program.run_decompositions()
    called = [str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"]
    assert sum("auto_functionalized" in name for name in called) == 1
    assert torch.equal(decomposed.module()(*args), module(*args))


@pytest.mark.skipif(torch.cuda.is_available(), reason="loading any AOTInductor package fails on the GPU machines")
def test_aoti_package_runs_in_a_process_that_only_imports_the_library(tmp_path: Any) -> None:
    program, args, module = _export("cpu")
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "op.pt2"))
    torch.save([(args, (module(*args),))], tmp_path / "calls.pt")
    assert run_forked(RUN_PACKAGE.format(paths=(package, str(tmp_path / "calls.pt")))) == "equal\n"


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


@pytest.mark.parametrize("layout", ["heads", "tokens", "gaps", "columns"])
def test_fake_and_meta_results_are_as_real_ones(layout: str, device: str) -> None:
    inputs = _inputs(replace(CASE, layout=layout), device)
    real = inputs.call(kv_cache_append)
    args = tuple(vars(inputs).values())
    with FakeTensorMode() as mode:
        fake = OP(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    meta = OP(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
    assert _layout(fake) == _layout(real) == _layout(meta) and meta.is_meta
    # Columns that are not contiguous are not those of the result.
    assert real.stride(3) == 1


@pytest.mark.gpu
def test_eager_calls_bump_version_counters_on_the_thin_path(device: str) -> None:
    inputs = _inputs(CASE, device, torch.bfloat16)
    for expected in (1, 2):
        inputs.call(OP)
        assert [cache._version for cache in (inputs.k_cache, inputs.v_cache, inputs.k)] == [expected, expected, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_graph_replays_at_other_lengths(case: KvCacheCase) -> None:
    """Each replay writes behind what the one before wrote."""
    case = replace(case, before=(0, 1, 2), tokens=1, lengths=None)
    inputs, same = _inputs(case, "cuda", torch.bfloat16), _inputs(case, "cuda", torch.bfloat16)

    def step(inputs: KvCacheInputs) -> Tensor:
        q: Tensor = inputs.call(kv_cache_append)
        inputs.cache_seqlens.add_(1)
        return q

    # The call that warms up before the capture counts too.
    graph, captured = capture(lambda: step(inputs))
    expected = step(same)
    for _ in range(3):
        for name in ("k", "v", "q"):
            getattr(inputs, name).normal_()
            getattr(same, name).copy_(getattr(inputs, name))
        graph.replay()
        expected = step(same)
        _assert_equal((captured, inputs.k_cache, inputs.v_cache), (expected, same.k_cache, same.v_cache))


@pytest.mark.gpu
def test_compiled_with_cuda_graphs_equals_eager() -> None:
    compiled = torch.compile(_step, fullgraph=True, mode="reduce-overhead")
    results = []
    for function in (compiled, _step):
        inputs = _inputs(replace(CASE, capacity=40), "cuda")
        outs = [out.clone() for _ in range(4) for out in inputs.call(function)]
        results.append((*outs, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("call", ["torch_ops.kv_cache_append", "torch.ops.vk.kv_cache_append"])
def test_first_call_of_a_process_works(call: str, device: str) -> None:
    code = f"""
import torch, torch_ops
k, v, k_cache, v_cache = (torch.ones(2, 2, n, 16, device={device!r}) for n in (1, 1, 4, 4))
{call}(k * 3, v, k_cache, v_cache, torch.tensor([1, 3], device={device!r}).int())
assert k_cache[0, :, 1].eq(3).all() and k_cache[1, :, 3].eq(3).all() and k_cache.eq(3).sum() == 64
print("right")
"""
    assert run_forked(code) == "right\n"


POINTS = [
    *((target, variant) for target in APART for variant in ("paged", "interleaved")),
    *((target, "wide") for target in ALIKE),
    *(("sm_90", variant) for variant in ("decode", "plain", "full_tables", "partial", "d72", "wide", "half_cache")),
    *((target, "fp32") for target in ("sm_80", "sm_90", "gfx942")),
]


@lru_cache
def _built(target: str, variant: str) -> Build:
    launch = kv_cache_launch(TARGETS[target], **VARIANTS[variant])
    with fake_gpu(TARGETS[target]):
        return build(launch, TARGETS[target])


@pytest.mark.parametrize(("target", "variant"), POINTS)
def test_builds_spill_nothing_and_fit(target: str, variant: str) -> None:
    built = _built(target, variant)
    assert built.spilled == 0 and built.shared <= shared_memory(TARGETS[target]), str(built)


@pytest.mark.parametrize("variant", ("decode", "paged", "plain", "wide", "interleaved", "fp32"))
def test_rows_move_by_16_bytes(variant: str) -> None:
    """What is left are lengths and pages, one for each row."""
    ptx = _built("sm_90", variant).asm["ptx"]
    accesses = re.findall(r"(ld|st)\.global\S*?(\.v\d)?\.b(\d+)", ptx)
    widths = {(what, int(lanes[2:] or 1) * int(width)) for what, lanes, width in accesses}
    assert {width for what, width in widths if what == "st"} == {128}
    assert {width for what, width in widths if what == "ld"} == {32, 128}
