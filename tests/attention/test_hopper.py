"""The Hopper path alone: the sizes, streams and graphs that it plans for.

Under VK_PATH=hopper all of tests/attention/test_window_attn.py runs on it too, wherever it can.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.errors import CompilationError

import torch_ops
from csrc_free_ops.configs.rows import HOPPER_CONFIGS, Config
from tests.attention.verify import backward, differentiate
from torch_ops import settings, window_attn
from torch_ops._attention import hopper as attention_hopper
from torch_ops._attention import hopper_backward as attention_hopper_backward
from torch_ops._attention import plan as attention
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Backward, Forward
from torch_ops._core import counters
from torch_ops._core.device import gpu
from torch_ops.bench.measure.opbench import one_line
from torch_ops.bench.measure.timing import peak_bytes
from torch_ops.testing import check, references
from torch_ops.testing.cases import WindowAttnCase, WindowAttnInputs, make_inputs

HEAD_DIMS = tuple(attention_hopper.HEAD_DIMS)
# One, few and many segments are scheduled differently; one segment is cut so that the last wave is full.
LENGTHS = {
    "one": (1024,),
    "one_of_several_waves": (4096,),
    "one_uneven": (2311,),
    # Keys for two tiles at most.
    "one_of_two_tiles": (200,),
    "two_of_two_tiles": (130, 120),
    "few": (784, 17, 0, 1764, 64, 1),
    "many": (130, 7, 256, 0) * 12,
}


@pytest.fixture(autouse=True)
def hopper(device: str) -> Iterator[None]:
    if device != "cuda" or gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    with settings(path=settings.path):
        yield


def _inputs(lengths: tuple[int, ...], head_dim: int = 72, num_heads: int = 16, **options: object) -> WindowAttnInputs:
    case = WindowAttnCase("hopper", "path", lengths, num_heads, head_dim, options=options)
    return make_inputs(case, torch.bfloat16, "cuda")


def _call(inputs: WindowAttnInputs, path: str) -> tuple[Tensor, Tensor]:
    with settings(path=path):
        return inputs.call(lambda *args, **options: window_attn(*args, **options, return_lse=True))


def _assert_right(inputs: WindowAttnInputs, actual: tuple[Tensor, Tensor]) -> None:
    exact = inputs.call(references.window_attn, q=inputs.q.double(), k=inputs.k.double(), v=inputs.v.double())
    eager = inputs.call(references.window_attn)
    names = ("out", "lse")
    check(*(dict(zip(names, values, strict=True)) for values in (actual, eager, exact)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_deals_out_every_row_once(head_dim: int, lengths: str) -> None:
    inputs = _inputs(LENGTHS[lengths], head_dim)
    first = _call(inputs, "hopper")
    _assert_right(inputs, first)
    for _ in range(3):
        again = _call(inputs, "hopper")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "lengths"),
    [(72, 128, (1000,)), (72, 160, (1000, 30)), (128, 128, (1000, 30)), (128, 20, (4200,)), (128, 10, (4200, 30))],
    ids=str,
)
def test_heads_that_the_cache_does_not_hold_at_once(head_dim: int, num_heads: int, lengths: tuple[int, ...]) -> None:
    """So many that they are gone over a few at a time, or so long ones that each goes alone."""
    inputs = _inputs(lengths, head_dim, num_heads)
    _assert_right(inputs, _call(inputs, "hopper"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_current_one() -> None:
    """The backend "aot_eager" does not make the tensors' GPU the current one, so the launch itself has to."""
    settings.update(path="hopper")
    compiled = torch.compile(torch.ops.vk.window_attn, fullgraph=True, backend="aot_eager")
    for where in ("cuda:1", "cuda:0", "cuda:1"):
        inputs = make_inputs(WindowAttnCase("hopper", "another GPU", (1024,), 2, 72), torch.bfloat16, where)
        expected = _call(inputs, "hopper")
        _assert_right(inputs, expected)
        for a, b in zip(inputs.call(compiled), expected, strict=True):
            assert torch.equal(a, b)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("bounds", ({"causal": True}, {"window_left": 100, "window_right": 30}, {"window_left": 200}))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bounds_over_several_blocks(head_dim: int, bounds: dict[str, int]) -> None:
    inputs = _inputs((1500, 300), head_dim, 4, **bounds)
    _assert_right(inputs, _call(inputs, "hopper"))


# Launches that need too much shared memory, by head dimension.
TOO_LARGE = {
    128: {Config(128, 128, 8, 3), Config(192, 128, 12, 2), Config(192, 128, 12, 3), Config(64, 128, 8, 3)}
}  # fmt: skip


def _refuses(head_dim: int, launch: Config) -> bool:
    return launch in TOO_LARGE.get(head_dim, ())


@contextlib.contextmanager
def _too_large() -> Iterator[None]:
    with pytest.raises(CompilationError) as error:
        yield
    assert "227 KiB of shared memory" in one_line(error.value)


@pytest.mark.parametrize("launch", HOPPER_CONFIGS["attention_fwd_hopper"], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_every_launch_that_rows_may_name(head_dim: int, launch: Config) -> None:
    """The kernel takes it for granted where its shared memory lies, and stops where that is not so."""
    inputs = _inputs((300, 1, 700), head_dim, 4)
    out, lse = torch.full_like(inputs.q, torch.nan), torch.full((4, inputs.q.shape[0]), torch.nan, device="cuda")
    tensors = Forward(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, None, out, lse)
    with mock.patch.object(attention_hopper, "forward_config", lambda *_: (launch, "this test")):
        plan = attention_hopper.plan_forward_hopper(tensors, AttentionOptions(head_dim**-0.5))
    if _refuses(head_dim, launch):
        with _too_large():
            plan.launch(tensors)
        return
    plan.launch(tensors)
    _assert_right(inputs, (out, lse))


@pytest.mark.parametrize("launch", HOPPER_CONFIGS["attention_bwd_hopper"], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_every_launch_of_the_backward_that_rows_may_name(head_dim: int, launch: Config) -> None:
    inputs = _inputs((300, 1, 700), head_dim, 4)
    if _refuses(head_dim, launch):
        with _too_large():
            _assert_gradients_right(inputs, "ordered", launch)
        return
    _assert_gradients_right(inputs, "ordered", launch)


def test_every_call_sees_its_own_tensors() -> None:
    """Launches after the first are kept ones."""
    for seed in range(3):
        inputs = make_inputs(WindowAttnCase("own", "tensors", (700, 300), 4, 72), torch.bfloat16, "cuda", seed)
        _assert_right(inputs, _call(inputs, "hopper"))


def test_paths_are_as_explained() -> None:
    inputs = _inputs((1024,))
    explained = {}
    for path in ("auto", "hopper", "portable"):
        with settings(path=path):
            explained[path] = torch_ops.explain(window_attn, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)["path"]
    assert explained == {"auto": "hopper", "hopper": "hopper", "portable": "portable"}
    for rows, kernel in ((1024, "attention_bwd_hopper"), (512, "attention_bwd_small_hopper")):
        few = [tensor[:rows] for tensor in (inputs.q, inputs.k, inputs.v)]
        with settings(path="auto"):
            kernels = torch_ops.explain(window_attn, *few, inputs.cu_seqlens)["kernels"]
        assert list(kernels) == ["attention_fwd_hopper", kernel]
    shifted = torch.empty(inputs.q.numel() + 1, device="cuda", dtype=inputs.q.dtype)[1:].view(inputs.q.shape)
    with settings(path="hopper"):
        explained = torch_ops.explain(window_attn, shifted, inputs.k, inputs.v, inputs.cu_seqlens)
    assert explained["path"] == "portable" and "16 bytes" in explained["why"]
    inputs = _inputs((100, 120))
    with settings(path="auto"):
        assert torch_ops.explain(window_attn, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)["path"] == "portable"


KINDS = ("free", "ordered")


def _backward(
    inputs: WindowAttnInputs, out: Tensor, lse: Tensor, kind: str, launch: Config | None = None
) -> Callable[[], dict[str, Tensor]]:
    """The Hopper backward from this out and lse, of one of KINDS or "apart"; what it leaves unwritten is NaN."""
    given = inputs.options
    options = AttentionOptions(
        given.get("scale") or inputs.q.shape[2] ** -0.5,
        given.get("window_left", -1),
        0 if given.get("causal") else given.get("window_right", -1),
        deterministic=kind == "ordered",
    )
    read = (inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse, inputs.cu_seqlens, inputs.cu_seqlens_k)
    chosen = launch or choose("attention_bwd_hopper", inputs.q, options, 1024)[0]

    def tensors() -> Backward:
        return Backward(*read, *(torch.full_like(tensor, torch.nan) for tensor in (inputs.q, inputs.k, inputs.v)))

    with (
        mock.patch.object(attention_hopper_backward, "fits_small", lambda *_: kind == "apart"),
        mock.patch.object(attention_hopper_backward, "choose", lambda *_: (chosen, "this test")),
    ):
        plan = attention_hopper_backward.plan_backward_hopper(tensors(), options)

    def call() -> dict[str, Tensor]:
        t = tensors()
        plan.launch(t)
        return {"dq": t.dq, "dk": t.dk, "dv": t.dv}

    return call


def _gradients(
    inputs: WindowAttnInputs, out: Tensor, lse: Tensor, kind: str, launch: Config | None = None
) -> dict[str, Tensor]:
    return _backward(inputs, out, lse, kind, launch)()


def _assert_gradients_right(inputs: WindowAttnInputs, kind: str, launch: Config | None = None) -> None:
    exact = differentiate(references.window_attn, inputs, torch.float64)
    out, lse = exact["out"].to(inputs.q.dtype), exact["lse"].float()
    actual = _gradients(inputs, out, lse, kind, launch)
    check(actual, backward(inputs, out, lse), {name: exact[name] for name in actual})
    if kind != "free":
        for _ in range(3):
            again = _gradients(inputs, out, lse, kind, launch)
            for name in actual:
                assert torch.equal(actual[name], again[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients(head_dim: int, lengths: str, kind: str) -> None:
    _assert_gradients_right(_inputs(LENGTHS[lengths], head_dim, 4), kind)


@pytest.mark.parametrize("rows", [1, 64, 200, 512, 2311])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_apart(head_dim: int, rows: int) -> None:
    """dq by programs of its own; also of more programs than the GPU has room for."""
    _assert_gradients_right(_inputs((rows,), head_dim, 4), "apart")


@pytest.mark.parametrize("kind", [*KINDS, "apart"])
@pytest.mark.parametrize("bounds", ({"causal": True}, {"window_left": 100, "window_right": 30}, {"window_left": 200}))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_with_bounds(head_dim: int, bounds: dict[str, int], kind: str) -> None:
    _assert_gradients_right(_inputs((1500,) if kind == "apart" else (1500, 300), head_dim, 4, **bounds), kind)


ORDERED = {
    "d64": {"lengths": (1024,) * 16, "head_dim": 64},
    "d72": {"lengths": (1024,) * 16},
    "d128": {"lengths": (1024,) * 16, "head_dim": 128},
    "second_lane": {"lengths": (1024,)},
    "causal": {"lengths": (1024,) * 16, "options": {"causal": True}},
    "groups": {"lengths": (1024,) * 16, "num_k_heads": 4},
}


@pytest.mark.parametrize("case", ORDERED)
def test_parts_are_added_in_their_order(case: str) -> None:
    """The bits of the fp32 sums, of many launches: rounded, parts that changed places would hardly ever show."""
    fields = {"num_heads": 16, "head_dim": 72, **ORDERED[case]}
    inputs = make_inputs(WindowAttnCase("ordered", "sums", **fields), torch.bfloat16, "cuda")
    call = _backward(inputs, *_call(inputs, "hopper"), "ordered")
    made: list[Tensor] = []
    make = torch.empty

    def keep_made(*sizes: int, **options: object) -> Tensor:
        made.append(make(*sizes, **options))
        return made[-1]

    with mock.patch.object(torch, "empty", keep_made):
        call()
        # The sums are all that it makes by this function.
        (first,) = made
        assert first.dtype == torch.float32 and first.numel() == inputs.q.numel()
        differing = 0
        for _ in range(300):
            made.clear()
            call()
            differing += not torch.equal(made[0], first)
    assert differing == 0


GENERAL = {
    "other_keys": {"lengths": (300, 40, 500), "k_lengths": (700, 0, 90)},
    "other_keys_causal": {"lengths": (300, 40, 500), "k_lengths": (700, 10, 90), "options": {"causal": True}},
    "other_keys_window": {
        "lengths": (300, 40, 500), "k_lengths": (700, 10, 90), "options": {"window_left": 50, "window_right": 9}
    },
    "outside": {"lengths": (300, 200), "skipped": 130, "padding": 300},
    "groups": {"lengths": (300, 200), "num_heads": 6, "num_k_heads": 2},
    "views": {"lengths": (300, 200), "layout": "qkv_view"},
    "one_outside": {"lengths": (500,), "skipped": 130, "padding": 300},
    "one_of_other_keys": {"lengths": (333,), "k_lengths": (900,)},
    "one_of_few_keys": {"lengths": (900,), "k_lengths": (400,), "skipped": 40},
    "one_of_groups": {
        "lengths": (900,), "num_heads": 6, "num_k_heads": 2, "head_dim": 64, "skipped": 70, "padding": 9
    },
    # Tiles of several waves, each of which begins anew at the last block.
    "one_of_waves": {"lengths": (1500,), "num_heads": 32, "head_dim": 64, "skipped": 70, "padding": 9},
    "one_causal": {"lengths": (700,), "k_lengths": (900,), "options": {"causal": True}},
    # More heads than the L2 cache holds keys and queries of.
    "one_of_many_heads": {"lengths": (900,), "num_heads": 64, "head_dim": 80},
    # With more counters than dq has room for.
    "empty": {"lengths": (3, *(0,) * 600), "k_lengths": (300, *(1,) * 600)},
}  # fmt: skip


APART = [name for name in GENERAL if name.startswith("one_")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("case", "kind"), [*((case, kind) for case in GENERAL for kind in KINDS), *((case, "apart") for case in APART)]
)
def test_gradients_in_general(case: str, kind: str, dtype: torch.dtype) -> None:
    fields = {"num_heads": 2, "head_dim": 72, **GENERAL[case]}
    _assert_gradients_right(make_inputs(WindowAttnCase("general", "path", **fields), dtype, "cuda"), kind)


@pytest.mark.parametrize(
    ("kind", "lengths"), [*((kind, (300, 200)) for kind in KINDS), ("ordered", (500,)), ("apart", (500,))], ids=str
)
def test_rows_outside_of_segments_may_be_nan(kind: str, lengths: tuple[int, ...]) -> None:
    inputs = make_inputs(
        WindowAttnCase("nan", "outside", lengths, 2, 72, skipped=130, padding=300), torch.bfloat16, "cuda"
    )
    exact = differentiate(references.window_attn, inputs, torch.float64)
    out, lse = exact["out"].to(inputs.q.dtype), exact["lse"].float()
    clean = _gradients(inputs, out, lse, kind)
    for name in ("q", "k", "v"):
        getattr(inputs, name)[:130] = torch.nan
        getattr(inputs, name)[630:] = torch.nan
    spoiled = _gradients(inputs, out, lse, kind)
    if kind == "free":
        check(spoiled, clean, {name: exact[name] for name in clean})
    else:
        assert all(torch.equal(spoiled[name], clean[name]) for name in clean)


def test_peak_memory_is_that_of_results_and_sums() -> None:
    """As cuDNN's: no lse where nobody wants one, and beside the gradients delta and fp32 sums of dq alone."""
    inputs = _inputs((1024,))
    bytes_of_one = inputs.q.numel() * inputs.q.itemsize
    with settings(path="hopper"):
        out, lse = inputs.call(torch.ops.vk.window_attn)
        backward_of = torch.ops.vk.window_attn_backward
        args = (inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, inputs.cu_seqlens)
        for call in (lambda: inputs.call(window_attn), lambda: backward_of(*args)):
            call()
        assert peak_bytes(lambda: inputs.call(window_attn), inputs.q.device) == bytes_of_one
        expected = 3 * bytes_of_one + 2 * bytes_of_one + lse.numel() * lse.itemsize
        assert peak_bytes(lambda: backward_of(*args), inputs.q.device) == expected
        # Where dq is made by programs of its own there are no sums.
        few = inputs.q[:512], inputs.k[:512], inputs.v[:512], out[:512], lse[:, :512].contiguous()
        args = (inputs.dout[:512], None, *few, inputs.cu_seqlens // 2)
        backward_of(*args)
        expected = 3 * bytes_of_one // 2 + few[-1].numel() * lse.itemsize
        assert peak_bytes(lambda: backward_of(*args), inputs.q.device) == expected


def test_addresses_that_tma_cannot_reach_are_computed_too() -> None:
    inputs = _inputs((300, 200))
    shifted = {}
    for name in ("q", "k", "v"):
        tensor = getattr(inputs, name)
        shifted[name] = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:].view(tensor.shape)
        shifted[name].copy_(tensor)
    with settings(path="hopper"):
        out = inputs.call(window_attn, **shifted)
    assert torch.equal(out, _call(inputs, "portable")[0])


def _out_and_gradients(inputs: WindowAttnInputs) -> tuple[Tensor, ...]:
    leaves = tuple(getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v"))
    with settings(path="hopper"):
        out = window_attn(*leaves, inputs.cu_seqlens)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)


def _all_equal(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, right) for one, right in zip(results, expected, strict=True))


# With one segment dq has a second accumulator.
SIDE_BY_SIDE = pytest.mark.parametrize("lengths", [(700, 900, 20, 800), (1024,)], ids=str)


@SIDE_BY_SIDE
def test_streams_do_not_share_their_tiles(lengths: tuple[int, ...]) -> None:
    """Programs of one launch draw tiles from a counter; two launches at once must not draw from the same."""
    inputs = [_inputs(lengths) for _ in range(2)]
    expected = [_out_and_gradients(each) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for stream, each, of_stream in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                of_stream.append(_out_and_gradients(each))
    torch.cuda.synchronize()
    for of_stream, right in zip(results, expected, strict=True):
        assert all(_all_equal(one, right) for one in of_stream)


@SIDE_BY_SIDE
def test_graphs_captured_alike_replay_side_by_side(lengths: tuple[int, ...]) -> None:
    inputs = [_inputs(lengths) for _ in range(2)]
    expected = [_out_and_gradients(each) for each in inputs]
    graphs, results = [], []
    for each in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(_out_and_gradients(each))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(_all_equal(one, right) for one, right in zip(results, expected, strict=True))


def test_graphs_of_torch_compile_are_left_with_nothing_of_ours() -> None:
    """Their warm-up gives all that a call allocates to a graph's memory, and refuses what is kept of it."""
    inputs = _inputs((1024,))
    expected = _out_and_gradients(inputs)
    leaves = tuple(getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v"))
    compiled = torch.compile(window_attn, mode="reduce-overhead", fullgraph=True)
    work_counters = lru_cache(counters.WorkCounters)
    with ExitStack() as stack:
        stack.enter_context(settings(path="hopper"))
        # As if this were the first call of all.
        for module in (attention_hopper, attention_hopper_backward):
            stack.enter_context(mock.patch.object(module, "work_counters", work_counters))
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*leaves, inputs.cu_seqlens)
            grads = torch.autograd.grad(out, leaves, inputs.dout)
            assert _all_equal((out.detach().clone(), *(grad.clone() for grad in grads)), expected)
            del out, grads


def test_gradient_of_a_sum_takes_the_hopper_backward() -> None:
    """Its strides are 0, which TMA cannot address: it is copied."""
    inputs = _inputs((400, 300), 64, 4)
    grads = []
    for dout in (torch.ones_like(inputs.dout), torch.ones((), device="cuda", dtype=inputs.dout.dtype)):
        leaves = [getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")]
        no_other = mock.patch.object(attention, "_plan_backward_portable", side_effect=AssertionError)
        with settings(path="hopper"), no_other:
            window_attn(*leaves, inputs.cu_seqlens).backward(dout.expand_as(inputs.dout))
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_more_captures_than_counters() -> None:
    """A captured launch without a counter of its own sets one to 0 in its graph."""
    inputs = _inputs((700, 300))
    expected = _out_and_gradients(inputs)
    work_counters = attention_hopper.work_counters(inputs.q.device)
    graphs = []
    with mock.patch.dict(work_counters._fresh, {1: work_counters._fresh[1][:1]}):
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = _out_and_gradients(inputs)
            graphs.append((graph, results))
    for graph, results in reversed(graphs * 2):
        for result in results:
            result.zero_()
        graph.replay()
        assert _all_equal(results, expected)


@triton.jit
def _hold_kernel(released_ptr, values_ptr, patience, VALUES: tl.constexpr):
    """Keeps its multiprocessor until released, or until its patience ends, so that a failing test ends too.

    Its registers leave too few for a program of another kernel.
    """
    places = values_ptr + tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    values = tl.load(places)
    looks = 0
    released = 0
    while (released == 0) & (looks < patience):
        released = tl.atomic_add(released_ptr, 0)
        looks += 1
    tl.store(places, values + looks)


@contextlib.contextmanager
def _holding_all_but(left: int) -> Iterator[Callable[[], bool]]:
    """Within, another kernel holds all multiprocessors but so many; yields what says whether it still does."""
    held = torch.cuda.get_device_properties(0).multi_processor_count - left
    released = torch.zeros(1, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    values = torch.zeros(held, 2**15, device="cuda")
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    _hold_kernel[(held,)](released, values, 0, VALUES=2**15, num_warps=32)
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(stream):
            _hold_kernel[(held,)](released, values, 20_000_000, VALUES=2**15, num_warps=32)
            over = stream.record_event()
        yield lambda: not over.query()
    finally:
        with torch.cuda.stream(other):
            released.copy_(one, non_blocking=True)
        torch.cuda.synchronize()


def _ends(done: torch.cuda.Event) -> bool:
    deadline = time.monotonic() + 30
    while not done.query() and time.monotonic() < deadline:
        time.sleep(0.01)
    return done.query()


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("left", [1, 12])
def test_ends_beside_a_kernel_that_holds_most_of_the_gpu(left: int, captured: bool, deterministic: bool) -> None:
    """It does not matter how few programs run at once."""
    inputs = _inputs((700, 900, 20, 800))
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    settings.update(path="hopper")

    def step() -> tuple[Tensor, ...]:
        out = window_attn(**leaves, cu_seqlens=inputs.cu_seqlens, deterministic=deterministic)
        return out, *torch.autograd.grad(out, tuple(leaves.values()), inputs.dout)

    # Twice, so that beside the holder no kernel is loaded and no memory asked for: either waits for the whole GPU.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected = step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                results = step()
    with _holding_all_but(left) as held, torch.cuda.stream(stream):
        if captured:
            graph.replay()
        else:
            results = step()
        assert _ends(stream.record_event()) and held()
    if deterministic:
        assert all(torch.equal(actual, right) for actual, right in zip(results, expected, strict=True))
        return
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves.values()]
    out = references.window_attn(*exact, inputs.cu_seqlens)[0]
    truth = (out, *torch.autograd.grad(out, exact, inputs.dout.double()))
    check(*(dict(zip(("out", "dq", "dk", "dv"), each, strict=True)) for each in (results, expected, truth)))


@pytest.mark.parametrize("lengths", [(4096, 300), (1024,)], ids=str)
@pytest.mark.parametrize("left", [1, 12])
def test_programs_in_order_end_beside_such_a_kernel_too(left: int, lengths: tuple[int, ...]) -> None:
    """Those that add dq up in order do wait for others, but only for such as are running."""
    inputs = _inputs(lengths, 64, 4)
    exact = differentiate(references.window_attn, inputs, torch.float64)
    out, lse = exact["out"].to(inputs.q.dtype), exact["lse"].float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected = _gradients(inputs, out, lse, "ordered")
    with _holding_all_but(left) as held, torch.cuda.stream(stream):
        actual = _gradients(inputs, out, lse, "ordered")
        assert _ends(stream.record_event()) and held()
    for name, right in expected.items():
        assert torch.equal(actual[name], right), name


def test_opaque_launch_is_a_sound_op() -> None:
    inputs = _inputs((40, 23), 64, 2)
    out = torch.zeros_like(inputs.q)
    lse = torch.zeros(2, 63, device="cuda")
    args = (*Forward(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, None, out, lse), *AttentionOptions(0.125))
    with settings(path="hopper"):
        torch.library.opcheck(torch.ops.vk._attention_fwd.default, args)
