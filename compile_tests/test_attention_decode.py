"""`vk::attention_decode` under torch.compile, torch.export, CUDA graphs, and built for every kind of GPU."""

import io
import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.contract import (
    APART,
    SM90,
    TARGETS,
    Build,
    assert_expected_inline,
    assert_kernels,
    assert_plain_launch,
    build,
    capture,
    capture_graphs,
    fake_gpu,
    opcheck_fully,
    recompiling_fails,
    run_forked,
    sampled,
    sass,
    shared_memory,
    symbolic_size,
    trace_kernels,
)
from compile_tests.decode import ATTEND, COMBINE, KERNELS, VARIANTS, decode_calls, decode_launches
from csrc_free_ops.configs.decode import decode_splits
from csrc_free_ops.configs.rows import Gpu, Launch
from torch_ops import attention_decode
from torch_ops._core.registry import OPS
from torch_ops.testing import check_draws, redrawn, references
from torch_ops.testing.cases import DECODE, DECODE_LAYOUTS, DecodeCase, DecodeInputs, make_decode_inputs
from torch_ops.testing.tolerance import Draw

CASES = {case.name: case for case in DECODE}
# Small heads, as of window_attn.
OPCHECKED = [
    replace(CASES[name], head_dim=16)
    for name in ("one_token", "speculative", "pages_16", "prefix_everything", "invariant", "bshd", "empty", "whole")
]
BACKENDS = ("aot_eager", "inductor")
OP = torch.ops.vk.attention_decode
# Batches and capacities of calls that share one graph.
SIZES = ((11, 40), (5, 100), (6, 17), (7, 300))
with_lse = partial(attention_decode, return_lse=True)


def _ids(case: DecodeCase) -> str:
    return case.name


def _inputs(case: DecodeCase, device: str, dtype: torch.dtype | None = None) -> DecodeInputs:
    return make_decode_inputs(case, dtype or (torch.float16 if device == "cuda" else torch.float32), device)


def _sized(batch: int, capacity: int, device: str, **changes: Any) -> DecodeInputs:
    lengths = tuple(1 + (index * 31) % capacity for index in range(batch))
    return _inputs(replace(CASES["one_token"], lengths=lengths, capacity=capacity, **changes), device)


def _assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def _drawn(function: Any, inputs: DecodeInputs, seed: int) -> Draw:
    """What the tolerance rule judges: by eager PyTorch at the same dtype."""
    inputs = redrawn(inputs, seed)
    reference = references.attention_decode
    results = inputs.call(function), inputs.call(reference), inputs.to(torch.float64).call(reference)
    actual, eager, truth = (dict(zip(("out", "lse"), each, strict=True)) for each in results)
    return actual, eager, truth


@pytest.mark.parametrize("case", OPCHECKED, ids=_ids)
def test_opcheck_passes(case: DecodeCase, device: str) -> None:
    _inputs(case, device, torch.float32).call(lambda **given: opcheck_fully(OP.default, (), given))


def test_graphs_hold_only_the_op(device: str) -> None:
    function, graphs = capture_graphs(attention_decode)
    _inputs(CASES["speculative"], device).call(function)
    assert_expected_inline(graphs.dynamo, """vk.attention_decode.default\n""")
    if device == "cpu":
        assert_expected_inline(graphs.forward, """vk.attention_decode.default\n""")


def _trace(**variant: Any) -> Any:
    with fake_gpu() as mode:
        with mode:
            args, options = decode_calls(**variant)
        return trace_kernels(lambda *args: OP(*args[:5], **dict(zip(options, args[5:], strict=True))),
                             (*args, *options.values()))  # fmt: skip


def test_graphs_for_cuda_hold_only_allocations_and_kernels() -> None:
    assert_expected_inline(
        _trace(num_splits=1).targets,
        """\
aten.new_empty_strided.default
aten.new_empty.default
triton_kernel_wrapper_functional
""",
    )
    assert_expected_inline(
        _trace(prefixes=1).targets,
        """\
aten.new_empty_strided.default
aten.new_empty.default
aten.new_empty.default
aten.new_empty.default
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
""",
    )


def _expected_kernels(variant: str) -> list[tuple[str, set[str]]]:
    kernel = (ATTEND, {"out_ptr", "lse_ptr"})
    prefix = [kernel] if "prefixes" in VARIANTS[variant] else []
    return [*prefix, kernel] if variant == "whole" else [*prefix, kernel, (COMBINE, {"out_ptr", "lse_ptr"})]


@pytest.mark.parametrize("variant", VARIANTS)
def test_traced_kernels_are_all_there_and_write_only_outputs(variant: str) -> None:
    assert_kernels(_trace(**VARIANTS[variant]), _expected_kernels(variant))


@pytest.mark.parametrize("variant", ["plain", "pages_16", "prefix", "invariant", "speculative"])
def test_traces_of_symbolic_sizes_hold_for_all_sizes(variant: str) -> None:
    with fake_gpu(name="h200") as mode:
        with mode:
            sizes = {"capacity": symbolic_size(mode, "capacity", 640) * (16 if variant == "pages_16" else 1)}
            if variant != "prefix":
                sizes["batch"] = symbolic_size(mode, "batch", 5)
            args, options = decode_calls(**{**VARIANTS[variant], **sizes})
        trace = trace_kernels(lambda *args: OP(*args[:5], **dict(zip(options, args[5:], strict=True))),
                              (*args, *options.values()))  # fmt: skip
        assert_kernels(trace, _expected_kernels(variant))
    guards = [str(guard.expr) for guard in mode.shape_env.guards]
    assert not guards and not mode.shape_env.replacements, guards


@pytest.mark.parametrize("variant", VARIANTS)
def test_launches_carry_nothing_that_compilation_drops(variant: str) -> None:
    launches = decode_launches(**VARIANTS[variant])
    assert [launch.name for launch in launches] == [name for name, _ in _expected_kernels(variant)]
    for launch in launches:
        assert_plain_launch(launch)


def test_kernels_enter_the_key_of_compiled_artefacts() -> None:
    assert set(KERNELS) == {ATTEND, COMBINE}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["speculative", "pages_16", "prefix_everything", "bshd", "column_strided"])
def test_compiled_equals_eager(name: str, backend: str, device: str) -> None:
    inputs = _inputs(CASES[name], device)
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=False, backend=backend)
    _assert_equal(inputs.call(compiled), inputs.call(with_lse))


@pytest.mark.parametrize("page_size", [0, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
def test_dynamic_shapes_never_recompile(page_size: int, invariant: bool, device: str) -> None:
    """A graph that does not know the capacity splits keys as no eager call does, but where that is by fixed positions:
    then bits are the same."""
    function = partial(with_lse, batch_invariant=invariant)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    with recompiling_fails():
        for batch, capacity in SIZES:
            inputs = _sized(batch, capacity, device, page_size=page_size)
            if invariant:
                _assert_equal(inputs.call(compiled), inputs.call(function))
            else:
                check_draws(partial(_drawn, compiled, inputs))


class _Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return attention_decode(q, k, v, lengths, window_left=30, softcap=20.0, return_lse=True)


def _args(batch: int, capacity: int, device: str) -> tuple[Tensor, ...]:
    inputs = _sized(batch, capacity, device)
    return inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens


def test_exported_program_survives_saving_and_runs_at_other_sizes(device: str) -> None:
    batch, capacity = (torch.export.Dim(name, min=2, max=65536) for name in ("batch", "capacity"))
    dynamic = ({0: batch}, {0: batch, 2: capacity}, {0: batch, 2: capacity}, {0: batch})
    program = torch.export.export(_Attention(), _args(2, 40, device), dynamic_shapes=dynamic)
    called = [str(node.target) for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert called == ["vk.attention_decode.default", "<built-in function getitem>", "<built-in function getitem>"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in SIZES:
        args = _args(*size, device)
        _assert_equal(loaded(*args), _Attention()(*args))


@pytest.mark.parametrize("layout", [*DECODE_LAYOUTS, "column_strided"])
def test_fake_and_meta_outputs_have_the_strides_of_real_ones(layout: str, device: str) -> None:
    inputs = _inputs(replace(CASES["bshd"], layout=layout), device)
    real = inputs.call(OP)
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(each) for name, each in vars(inputs).items() if isinstance(each, Tensor)}
        fake = replace(inputs, **given).call(OP)
    given = {name: each.to("meta") for name, each in vars(inputs).items() if isinstance(each, Tensor)}
    meta = replace(inputs, **given).call(OP)
    layouts = [[(each.shape, each.stride(), each.dtype) for each in outputs] for outputs in (real, fake, meta)]
    assert layouts[0] == layouts[1] == layouts[2]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one_token", "pages_16", "prefixes", "whole"])
def test_cuda_graph_replays_other_lengths(name: str) -> None:
    inputs = _inputs(CASES[name], "cuda", torch.bfloat16)
    other = make_decode_inputs(CASES[name], torch.bfloat16, "cuda", seed=1)
    graph, captured = capture(lambda: inputs.call(OP))
    for field in ("q", "k_cache", "v_cache"):
        getattr(inputs, field).copy_(getattr(other, field))
    inputs.cache_seqlens.copy_(inputs.cache_seqlens // 2)
    for tensor in captured:
        tensor.fill_(torch.nan)
    graph.replay()
    _assert_equal(captured, inputs.call(OP))


FIRST_CALL = """
import torch, torch_ops
q = torch.randn(2, 4, 1, 64, device={device!r}).half()
k, v = torch.randn(2, 2, 2, 80, 64, device={device!r}).half().unbind()
lengths = torch.tensor([70, 33], dtype=torch.int32, device={device!r})
out = torch.compile(torch_ops.attention_decode, fullgraph=True)(q, k, v, lengths)
torch.testing.assert_close(out, torch_ops.attention_decode(q, k, v, lengths))
print("close")
"""


def test_first_call_of_a_process_works(device: str) -> None:
    assert run_forked(FIRST_CALL.format(device=device)) == "close\n"


# By target, variants and head dimensions: what a release is built for by the rule.
BUILDS = [
    *((target, variant, 128) for target in APART for variant in ("plain", "pages_16", "prefix")),
    *((target, "plain", head_dim) for target in ("sm_90", "gfx942") for head_dim in (64, 72, 256)),
    *((target, variant, 64) for target in ("sm_80", "sm_100") for variant in ("plain", "pages_16")),
    ("sm_90", "everything", 64),
    *(("sm_90", variant, 128) for variant in ("speculative", "pages_128", "everything", "wider_cache")),
    ("sm_80", "speculative", 256), ("sm_90", "prefix", 256), ("sm_90", "prefix", 64),
    *((target, "fp32", head_dim) for target in ("sm_80", "sm_90", "gfx942") for head_dim in (72, 256)),
    ("sm_86", "plain", 256), ("sm_120", "prefix", 128),
]  # fmt: skip


@lru_cache
def _builds(target: str, variant: str, head_dim: int) -> tuple[Build, ...]:
    launches = decode_launches(TARGETS[target], **{**VARIANTS[variant], "head_dim": head_dim})
    with fake_gpu(TARGETS[target]):
        return tuple(build(launch, TARGETS[target]) for launch in launches)


@pytest.mark.parametrize(("target", "variant", "head_dim"), sampled(BUILDS))
def test_nothing_spills_and_all_fits(target: str, variant: str, head_dim: int) -> None:
    limit = shared_memory(TARGETS[target])
    wrong = [str(built) for built in _builds(target, variant, head_dim) if built.spilled or built.shared > limit]
    assert not wrong, "\n".join((f"limit {limit}", *wrong))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", ["whole", "plain", "pages_16", "pages_128"])
def test_keys_come_16_bytes_at_a_time_while_others_are_used(variant: str, head_dim: int) -> None:
    """While as many of either number of columns as 128 KiB of K and V hold."""
    attend = next(built for built in _builds("sm_90", variant, head_dim) if built.launch.name == ATTEND)
    ptx = attend.asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx
    stages, cols = attend.launch.kwargs["num_stages"], attend.launch.kwargs["BLOCK_N"]
    # In front of the loop and in it, each of K and V in rows of so many columns of 16 bytes among 128 threads.
    assert len(re.findall(r"cp\.async\.cg", ptx)) == stages * 2 * cols * (head_dim // 8) // 128
    assert stages == 3 and (stages - 1) * 2 * cols * head_dim * 2 == 2**17


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_parts_are_on_their_way_before_the_first_is_added(head_dim: int) -> None:
    """Sixteen of them and their exponents, each of which is read once; no index takes a division."""
    combine = _builds("sm_90", "plain", head_dim)[-1]
    code = sass(combine)
    first_maximum = code.index("FMNMX")
    loads = len(re.findall(r"LDG", code))
    assert loads == code.count("LDG", 0, first_maximum) == (48 if head_dim == 72 else 32)
    assert not re.search(r"\b(div|rem)\.[su]", combine.asm["ptx"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_that_may_begin_early_wait_before_they_read(variant: str) -> None:
    """Whatever came before them; where they are they find out meanwhile. Launches of traces carry no word of it."""
    for launch in decode_launches(**VARIANTS[variant]):
        assert not launch.kwargs["OVERLAPS"] and "launch_pdl" not in launch.kwargs
        with fake_gpu(SM90):
            built = build(replace(launch, kwargs={**launch.kwargs, "OVERLAPS": True}), SM90)
        assert built.spilled == 0, str(built)
        ahead, after = built.asm["ptx"].split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in ahead and "%ctaid.x" in ahead
        assert "ld.global" in after and not re.search(r"\bld\.(global|volatile)|cp\.async|\bst\.global", ahead)


def test_splits_are_as_many_as_there_are_multiprocessors_for() -> None:
    """On 132 of them, each with room for one program; a row of K and V has 512 bytes."""
    h200 = Gpu("h200", "cuda", 90, 232448, 132)
    launch = Launch(16, 128, 4, 3)

    def splits(batch: int, capacity: int) -> int:
        return decode_splits(h200, launch, batch * 8, capacity, 512)

    assert splits(1, 65536) == splits(1, 8192) == 16 and splits(5, 8192) == 3
    assert splits(16, 8192) == splits(64, 4096) == 1
    # 136 shares would leave all but four idle in a second wave.
    assert splits(17, 65536) == 12
    # Of short caches each split has some blocks.
    assert splits(1, 1024) == 4 and splits(1, 10) == splits(0, 10) == 1
    assert decode_splits(h200, launch, None, None, 512) == decode_splits(h200, launch, None, 8192, 512)


def test_every_kernel_is_launched_by_some_variant() -> None:
    launched = {launch.name for variant in VARIANTS.values() for launch in decode_launches(**variant)}
    assert launched == set(KERNELS) and "attention_decode" in OPS
