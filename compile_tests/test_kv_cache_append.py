"""The graph contract of `vk::kv_cache_append`, which writes to its caches, and the code of its kernel."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from compile_tests.contract.graph import DEVICE, Call, GraphContract, Subject
from compile_tests.contract.trace import capture, cloned_tensors, fake_gpu
from compile_tests.kernels import KV_CACHE_APPEND, kv_cache_append_calls
from torch_ops import kv_cache_append
from torch_ops._core.registry import OPS
from torch_ops.testing import references
from torch_ops.testing.cases import KvCacheCase, KvCacheInputs, make_kv_cache_inputs

OP = torch.ops.vk.kv_cache_append.default
CASE = KvCacheCase("compiled", "", (0, 3, 5), 4, 2, 32, 12, num_heads=6, columns=16, layout="tokens")
PAGED = replace(CASE, name="paged", page_size=4, capacity=3, lengths=(4, 1, 2))
# Sequences, tokens and room of calls that share one graph. PyTorch would take two equal sizes of the first for one.
SIZES = (
    CASE,
    replace(CASE, before=(2, 0), tokens=7, capacity=9),
    replace(CASE, before=(7, 1, 2, 3, 0), tokens=2, capacity=30),
)
BATCH, TOKENS, CAPACITY, POSITIONS = (
    torch.export.Dim(name, min=2, max=4096) for name in ("batch", "tokens", "capacity", "positions")
)


def draw(case: KvCacheCase, dtype: torch.dtype, seed: int = 0) -> Call:
    """Without gradients; what a call writes to counts as a result."""
    written = ("k_cache", "v_cache")
    inputs = make_kv_cache_inputs(case, dtype, DEVICE, seed)
    return Call.of(kv_cache_append, inputs, (), grads={"q": None}, written=written)


def _laid(case: KvCacheCase, layout: str) -> KvCacheCase:
    return replace(case, name=f"{case.name}_{layout}", layout=layout, cache_layout=layout)


class TestGraphs(GraphContract):
    subjects = (
        Subject(
            "kv_cache_append", kv_cache_append, references.kv_cache_append, draw, SIZES,
            moving={
                **dict.fromkeys(("k", "v", "q"), {0: BATCH, 2: TOKENS}),
                **dict.fromkeys(("k_cache", "v_cache"), {0: BATCH, 2: CAPACITY}),
                "cache_seqlens": {0: BATCH},
                **dict.fromkeys(("cos", "sin"), {0: POSITIONS}),
            },
            kernels=KV_CACHE_APPEND,
            checked=(
                *(_laid(case, layout) for case in (CASE, PAGED) for layout in ("heads", "tokens", "gaps")),
                *(replace(case, name=f"{case.name}_plain", num_heads=0, columns=0) for case in (CASE, PAGED)),
            ),
            compiled=(CASE, PAGED),
            layouts=tuple(replace(CASE, name=each, layout=each) for each in ("heads", "tokens", "gaps", "columns")),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("variant", KV_CACHE_APPEND.variants)
def test_no_cache_is_cloned(variant: str) -> None:
    with fake_gpu() as mode:
        with mode:
            args, _ = kv_cache_append_calls(**KV_CACHE_APPEND.variants[variant])["kv_cache_append"]
        assert cloned_tensors(OP, args) == [set()], "a copy of a whole cache for each token"


def _args() -> tuple[Any, ...]:
    return kv_cache_append_calls()["kv_cache_append"][0]


def test_caches_that_a_graph_reads_before_or_makes_are_not_cloned() -> None:
    def around(*args: Any) -> Any:
        old = args[2] + 0
        k_cache, v_cache = torch.zeros_like(args[2]), args[3].clone()
        return old, OP(*args), OP(*args[:2], k_cache, v_cache, *args[4:]), k_cache.sum(), v_cache

    with fake_gpu() as mode:
        with mode:
            args = _args()
        assert cloned_tensors(around, args) == [set(), set()]


def test_cloned_tensors_are_found() -> None:
    """As those of caches that are views of one tensor."""

    def of_both(both: Tensor, *args: Any) -> Any:
        return OP(*args[:2], *both.unbind(), *args[4:])

    with fake_gpu() as mode:
        with mode:
            args = _args()
            both = torch.empty(2, *args[2].shape, device="cuda", dtype=args[2].dtype)
        assert cloned_tensors(of_both, (both, *args)) == [{"k_cache_ptr", "v_cache_ptr"}]


def _inputs(case: KvCacheCase, dtype: torch.dtype = torch.float32) -> KvCacheInputs:
    return make_kv_cache_inputs(case, dtype, DEVICE)


def test_schema_says_what_is_written_to() -> None:
    schema = OPS["kv_cache_append"].overload._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    assert not any(result.alias_info for result in schema.returns)


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
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_steps_equal_eager_ones(backend: str, step: Any) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, step):
        inputs = _inputs(CASE)
        outs = [out for _ in range(2) for out in inputs.call(function)]
        results.append((*outs, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("step", (_step, _fresh), ids=("inputs", "intermediates"))
def test_generated_code_copies_no_cache(step: Any) -> None:
    """Only the caches that the graph makes have a cache's shape in the code that Inductor writes."""
    case = replace(CASE, capacity=59)
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True, dynamic=False), *vars(_inputs(case)).values())
    made = re.findall(r"empty_strided\w*\(\(3, 2, 59, 32\)", "".join(codes))
    assert len(made) == (2 if step is _fresh else 0)


def test_compiled_calls_refuse_gradients_and_run_without() -> None:
    inputs = _inputs(CASE)
    compiled = torch.compile(kv_cache_append, fullgraph=True, backend="aot_eager")
    leaf = inputs.k.detach().requires_grad_()
    with pytest.raises(Exception, match="vk::kv_cache_append has no gradient, and k requires one"):
        inputs.call(compiled, k=leaf)
    with torch.no_grad():
        assert torch.equal(inputs.call(compiled, k=leaf), _inputs(CASE).call(kv_cache_append))


class _Append(torch.nn.Module):
    """As a program has it: its caches are buffers."""

    def __init__(self, inputs: KvCacheInputs) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, getattr(inputs, name).clone())

    def forward(self, k: Tensor, v: Tensor, seqlens: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = kv_cache_append(k, v, self.k_cache, self.v_cache, seqlens, None, q, cos, sin)
        return q + self.k_cache[:, :1, 5:6] * self.v_cache[:, 1:, 5:6]


def _export() -> tuple[torch.export.ExportedProgram, tuple[Tensor, ...], _Append]:
    inputs = _inputs(CASE)
    tokens = torch.export.Dim("tokens", min=2, max=8)
    new = {2: tokens}
    args = (inputs.k, inputs.v, inputs.cache_seqlens, inputs.q, inputs.cos, inputs.sin)
    program = torch.export.export(_Append(inputs), args, dynamic_shapes=(new, new, None, new, None, None))
    return program, args, _Append(inputs)


def test_exported_program_survives_saving_and_writes_its_buffers() -> None:
    program, args, module = _export()
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


def test_decomposed_export_keeps_the_op_functionalized() -> None:
    program, args, module = _export()
    decomposed = program.run_decompositions()
    called = [str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"]
    assert sum("auto_functionalized" in name for name in called) == 1
    assert torch.equal(decomposed.module()(*args), module(*args))


@pytest.mark.gpu
def test_eager_calls_bump_version_counters_on_the_thin_path() -> None:
    inputs = _inputs(CASE, torch.bfloat16)
    for expected in (1, 2):
        inputs.call(OP)
        assert [cache._version for cache in (inputs.k_cache, inputs.v_cache, inputs.k)] == [expected, expected, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", (CASE, PAGED), ids=lambda case: case.name)
def test_cuda_graph_replays_at_other_lengths(case: KvCacheCase) -> None:
    """Each replay writes behind what the one before wrote."""
    case = replace(case, before=(0, 1, 2), tokens=1, lengths=None)
    inputs, same = _inputs(case, torch.bfloat16), _inputs(case, torch.bfloat16)

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
        found, wanted = ((q, each.k_cache, each.v_cache) for q, each in ((captured, inputs), (expected, same)))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_compiled_with_cuda_graphs_equals_eager() -> None:
    compiled = torch.compile(_step, fullgraph=True, mode="reduce-overhead")
    results = []
    for function in (compiled, _step):
        inputs = _inputs(replace(CASE, capacity=40))
        outs = [out.clone() for _ in range(4) for out in inputs.call(function)]
        results.append((*outs, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("variant", ("decode", "paged", "plain", "wide", "interleaved", "fp32"))
def test_rows_move_by_16_bytes(variant: str) -> None:
    """The other accesses read lengths and pages, one for each row."""
    ptx = KV_CACHE_APPEND.builds("sm_90", variant)[0].asm["ptx"]
    accesses = re.findall(r"(ld|st)\.global\S*?(\.v\d)?\.b(\d+)", ptx)
    widths = {(what, int(lanes[2:] or 1) * int(width)) for what, lanes, width in accesses}
    assert {width for what, width in widths if what == "st"} == {128}
    assert {width for what, width in widths if what == "ld"} == {32, 128}
