"""Inputs that every op takes or refuses alike: nested tensors, NumPy's integers, no rows, any default of PyTorch."""

import ast
import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ops
import torch_ops.compat
from compile_tests.contract.calls import small_calls
from compile_tests.contract.graph import DEVICE, DTYPE, as_tuple
from torch_ops import KVCache, PagedKVCache
from torch_ops._core.registry import OPS, Op
from torch_ops.distributed import spread_images
from torch_ops.models import GraphCache, Padding, VisionSizes, token_budgets
from torch_ops.models.vision_metadata import vision_metadata
from torch_ops.segments import dual_group, zigzag, zigzag_indices
from torch_ops.vision_attention import vision_attention

ROOT = Path(torch_ops.__file__).parent
Inputs = dict[str, Any]


def _drawn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cpu").to(DEVICE, dtype)


def _counts(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=DEVICE)


def _attention_calls() -> Iterator[tuple[str, Inputs]]:
    """All that changes scores, in one small call of each attention."""
    score = {"softcap": 5.0, "alibi_slopes": _drawn(4, dtype=torch.float32).abs(), "sinks": _drawn(4)}
    window = {"causal": True, "window_left": 9, "window_right": 2, "return_lse": True}
    dropped = {"dropout_p": 0.3, "dropout_seed": torch.tensor([7], device=DEVICE)}
    q, k, v = _drawn(2, 4, 7, 16), _drawn(2, 2, 12, 16), _drawn(2, 2, 12, 16)
    yield "attention", {"q": q, "k": k, "v": v, **score, **window, **dropped}
    packed = {"q": _drawn(12, 4, 16), "k": _drawn(12, 2, 16), "v": _drawn(12, 2, 16)}
    yield "window_attn", {**packed, "cu_seqlens": _counts(0, 5, 5, 12), **score, **window, **dropped}
    shared = {"cu_seqlens_q": _counts(0, 5, 12), "key_sequence": _counts(0, 0), "key_limit": _counts(9, 12)}
    pieces = {"key_bounds": _counts(0, 7, 12).view(1, 3), "key_rows": _counts(5, 0).view(1, 2)}
    yield "segment_attention", {**packed, **shared, **pieces, **score, **window, **dropped}
    pools = {name: _drawn(3, 2, 16, 16) for name in ("k_cache", "v_cache")}
    prefix = {"prefix_k": _drawn(1, 2, 6, 16), "prefix_v": _drawn(1, 2, 6, 16)}
    table = {"cache_seqlens": _counts(20, 9), "block_table": _counts(2, 0, 1, 0).view(2, 2)}
    yield "attention_decode", {"q": q, **pools, **table, **score, **window, **prefix}


def _calls() -> list[tuple[str, Inputs, str]]:
    """Op, arguments of the public function, and the name of one with a gradient."""
    plain = [(op, args, leaf) for op, (args, leaf) in small_calls().items()]
    return [*plain, *((op, args, "" if op == "attention_decode" else "q") for op, args in _attention_calls())]


def _copied(args: Inputs) -> Inputs:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in args.items()}


def _results(op: str, args: Inputs, leaf: str = "") -> list[Tensor]:
    """Results of a call of the public function, what it wrote to, and a gradient."""
    args = _copied(args)
    if leaf:
        args[leaf].requires_grad_()
    results = as_tuple(getattr(torch_ops, op)(**args))
    if leaf:
        sum(result.float().sum() for result in results).backward()
        results = *results, args[leaf].grad
    if op == "kv_cache_append":
        results = *results, args["k_cache"], args["v_cache"]
    return [result.detach() for result in results]


@contextlib.contextmanager
def _defaults(device: str | None, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


DEFAULTS = pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.bfloat16), (None, torch.float64)], ids=["meta, bfloat16", "float64"]
)


@DEFAULTS
def test_defaults_of_pytorch_change_no_op(device: str | None, dtype: torch.dtype) -> None:
    for op, args, leaf in _calls():
        expected = _results(op, args, leaf)
        with _defaults(device, dtype):
            results = _results(op, args, leaf)
        for one, other in zip(results, expected, strict=True):
            assert one.device == other.device and one.dtype == other.dtype and torch.equal(one, other), op


def _step_caches(of: Callable[[int], Any]) -> list[Tensor]:
    """Every method of both caches, with `of` of each integer; then all that they hold."""
    options = {"dtype": DTYPE, "device": DEVICE}
    whole = KVCache(of(2), of(2), of(1), of(4), of(8), **options)
    paged = PagedKVCache(of(2), of(2), of(1), of(6), of(16), of(8), max_pages=of(3), **options)
    paged.reserve(of(10))
    whole.grow(of(6))
    k = torch.arange(2 * 5 * 8, device=DEVICE).view(2, 1, 5, 8).to(DTYPE)
    for cache in (whole, paged):
        cache.append(of(1), k, k + 1)
        cache.reorder([of(1), of(0)])
        cache.truncate([of(3), of(2)])
        cache.append(of(1), k[:, :, :1], k[:, :, :1])
        cache.append(of(1), k[:, :, :0], k[:, :, :0])
    paged.reserve([of(20), of(0)])
    paged.reorder([of(1), of(1)], of(4))
    paged.grow(of(8), of(5))
    paged.truncate(of(3))
    return [*whole.layer(of(1)), *paged.layer(of(1))]


@DEFAULTS
def test_defaults_of_pytorch_change_no_function_of_the_host(device: str | None, dtype: torch.dtype) -> None:
    def call() -> list[Any]:
        q, cache = torch.ones(1, 1, 1, 8, device=DEVICE, dtype=DTYPE), torch.ones(1, 2, 1, 8, device=DEVICE).to(DTYPE)
        out = torch_ops.compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=2)
        return [*_step_caches(int), out, spread_images([(1, 4, 4)], 2)]

    expected = call()
    with _defaults(device, dtype):
        found = call()
    assert found[-1] == expected[-1]
    assert all(torch.equal(one, other) for one, other in zip(found[:-1], expected[:-1], strict=True))


# Functions of PyTorch that make a tensor on the default device.
MAKERS = frozenset(
    "arange as_tensor asarray empty empty_strided eye full linspace logspace normal ones rand randint randn randperm "
    "range scalar_tensor tensor tril_indices triu_indices zeros".split()
)


def test_the_library_says_where_it_makes_tensors() -> None:
    """Parameters alone follow PyTorch's default device: `with torch.device("meta")` builds a model without memory."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(ROOT / "bench"):
            continue
        tree = ast.parse(path.read_text())
        parameters = {
            id(argument) for each in ast.walk(tree) if isinstance(each, ast.Call)
            and ast.unparse(each.func) == "nn.Parameter" for argument in each.args
        }  # fmt: skip
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in parameters:
                continue
            name = ast.unparse(node.func)
            if name.removeprefix("torch.") in MAKERS and name.startswith("torch."):
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "add a device, or use host_tensor:\n" + "\n".join(found)


class _Recorded(TorchDispatchMode):
    """The first call of each op of the library, its gradients included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vk":
            self.calls.setdefault(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def recorded() -> dict[str, tuple[Any, ...]]:
    """Small arguments of every op, by place; defaults are filled in."""
    with _Recorded() as record:
        for op, args, leaf in _calls():
            _results(op, args, leaf)
        x = _drawn(6, 16).requires_grad_()
        vision_attention(x, _drawn(48, 16), _drawn(48), _drawn(16, 16), None, _counts(0, 2, 6), 2).sum().backward()
    calls = record.calls
    merger = small_calls()["patch_merger"][0]
    # An op made of ops is taken apart before a mode sees it.
    calls["patch_merger"] = tuple(merger.get(name) for name in ("x", "norm_weight", "norm_bias")) + tuple(
        merger.get(name) for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    )
    assert calls.keys() >= OPS.keys()
    filled = {}
    for name, op in OPS.items():
        parameters = list(inspect.signature(op.body).parameters.values())
        given = calls[name]
        values = [*given, *(parameter.default for parameter in parameters[len(given) :])]
        filled[name] = tuple(each.detach() if isinstance(each, Tensor) else each for each in values)
    return filled


def _with(args: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return tuple(value if at == place else each.clone() if isinstance(each, Tensor) else each
                 for at, each in enumerate(args))  # fmt: skip


NO_INTEGERS = (True, np.True_, 2.0, np.float32(2), np.array(2.0), np.array([2]), "2", torch.tensor(2))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_integers_are_python_s_or_numpy_s(op: Op, recorded: dict[str, Any]) -> None:
    args = recorded[op.name]
    for place, argument, kind in op.numbers:
        if kind != "int":
            continue
        value = args[place]
        for bad in NO_INTEGERS:
            with pytest.raises(ValueError, match=f"^{op.name}: {argument} is .*, expected an integer"):
                op(*_with(args, place, bad))
        if value is None:
            continue
        expected = as_tuple(op(*_with(args, place, value)))
        for kind in (np.int64, np.int16, np.array):
            results = as_tuple(op(*_with(args, place, kind(value))))
            assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True)), argument


NO_NUMBERS = (True, False, np.True_, np.array([0.5]), 1j, np.complex64(1), "0.5", torch.tensor(0.5))


NO_BOOLS = (1, 0, None, 1.0, np.int64(1), np.array([True]), "True", torch.tensor(True))
NOT = {"int": (NO_INTEGERS, "an integer"), "float": (NO_NUMBERS, "a number"), "bool": (NO_BOOLS, "True or False")}


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_real_numbers_and_bools_are_python_s_or_numpy_s(op: Op, recorded: dict[str, Any]) -> None:
    args = recorded[op.name]
    for place, argument, kind in op.numbers:
        if kind == "int":
            continue
        for bad in NOT[kind][0]:
            with pytest.raises(ValueError, match=f"^{op.name}: {argument} is .*, expected {NOT[kind][1]}"):
                op(*_with(args, place, bad))
        if args[place] is None:
            continue
        for make in (np.bool_, np.array) if kind == "bool" else (np.float64, np.float32, np.array, np.int64):
            value = make(args[place])
            if argument != "eps" or value:
                results, expected = (as_tuple(op(*_with(args, place, each))) for each in (value, value.item()))
                assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True)), argument


def test_public_functions_refuse_what_is_no_number() -> None:
    for name, args, _ in _calls():
        for _, argument, kind in OPS[name].numbers:
            bads, wanted = NOT[kind]
            public = getattr(torch_ops, name)
            for bad in bads if argument in inspect.signature(public).parameters else ():
                with pytest.raises(ValueError, match=f"^{name}: {argument} is .*, expected {wanted}"):
                    public(**{**args, argument: bad})


def test_compiled_functions_take_numpy_s_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch logs what its compilers cannot do with them."""
    monkeypatch.setattr(logging.getLogger("torch._dynamo"), "handlers", [caplog.handler])
    q, grid, counts = _drawn(1, 2, 3, 16), torch.tensor([[1, 2, 6]], device=DEVICE), _counts(3)

    def call(whole: Callable[[int], Any], real: Callable[[float], Any]) -> list[Tensor]:
        cache = KVCache(2, 1, 2, 8, 16, dtype=DTYPE, device=DEVICE)

        def compute(x: Tensor, one: Any, two: Any, twelve: Any, half: Any) -> tuple[Tensor, ...]:
            cache.append(one, q, q)
            cache.truncate(two)
            return (
                torch_ops.attention(q, q, q, half, window_left=one),
                torch_ops.attention_decode(q, q, q, counts, window_left=two),
                torch_ops.spatial_merge(x, grid, twelve, "mean"),
                *torch_ops.rotary_table(grid, twelve, 16, 2.0 * twelve),
                torch_ops.rms_norm(x, None, half),
            )

        compiled = torch.compile(compute, backend="aot_eager")
        x = torch.arange(12 * 8, device=DEVICE).view(12, 8).to(DTYPE)
        return [*compiled(x, whole(1), whole(2), whole(12), real(0.5)), *cache.layer(1)]

    found, expected = call(np.int64, np.float64), call(int, float)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_caches_take_numpy_s_integers() -> None:
    expected = _step_caches(int)
    for kind in (np.int64, np.uint8, np.array):
        assert all(torch.equal(one, other) for one, other in zip(_step_caches(kind), expected, strict=True))
    cache = KVCache(1, 2, 1, 4, 8, device=DEVICE)
    cache.truncate(np.array([1, 2]))
    cache.reorder(np.array([1, 0]))
    for bad in NO_INTEGERS:
        for call in (cache.layer, cache.grow, cache.truncate, lambda value: cache.reorder([0, value])):
            if not (isinstance(bad, Tensor) and call == cache.truncate):
                with pytest.raises(ValueError, match=r"^KVCache.* (is|has) .*, expected "):
                    call(bad)


def _host_calls() -> dict[str, Callable[[Any], Any]]:
    """Functions of one integer that no op checks. Each takes 4."""
    q, encoder = torch.ones(1, 4, 3, 8), {"head_dim": 8, "window": None}
    grid, sizes = torch.tensor([[1, 4, 4]]), VisionSizes(**encoder)
    rows, cu = torch.ones(3, 6, 1, 8).unbind(), torch.tensor([0, 2, 6], dtype=torch.int32)
    return {
        "reshape_for_gqa": lambda value: torch_ops.compat.reshape_for_gqa(q, value),
        "flash_attn_func": lambda value: torch_ops.compat.flash_attn_func(q, q, q, window_size=(value, value)),
        "fused_zigzag_llama3_flash_attn_varlen_forward": lambda value: (
            torch_ops.compat.fused_zigzag_llama3_flash_attn_varlen_forward(
                *rows, rows[0], *[cu] * 3, value, value, value, value, value
            )[3]
        ),
        "zigzag: rank": lambda value: zigzag([90, 7], value, 5).key_limit,
        "zigzag: world_size": lambda value: zigzag([2000, 7], 1, value).key_rows,
        "zigzag: rows_per_rank": lambda value: zigzag([8, 2], 1, 4, value).key_rows,
        "zigzag: lengths": lambda value: zigzag([value, 7], 1, 2).key_rows,
        "zigzag_indices": lambda value: zigzag_indices([2000, 7], 1, value),
        "dual_group: rows_q0": lambda value: dual_group(cu, cu, cu, 3, 3, value).cu_seqlens_q,
        "spread_images": lambda value: spread_images([(1, 4, 4)], value),
        "spread_images: grid_thw": lambda value: spread_images([(1, value, 4)], 2),
        "token_budgets: max_tokens": token_budgets,
        "token_budgets: min_tokens": lambda value: token_budgets(1024, value, 2),
        "token_budgets: per_doubling": lambda value: token_budgets(1024, None, value),
        "GraphCache": lambda value: GraphCache(max_graphs=value).max_graphs,
        "vision_metadata": lambda value: vision_metadata(grid, sizes, padding=Padding(images=value)).cu_seqlens,
    }


@pytest.mark.parametrize("name", _host_calls())
def test_functions_of_the_host_take_numpy_s_integers(name: str) -> None:
    """uint8 too, in which 1024 and 2 * 128 have no place."""
    call = _host_calls()[name]
    expected = call(4)
    for kind in (np.int64, np.uint8, np.array):
        found = call(kind(4))
        assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
    for bad in NO_INTEGERS:
        with pytest.raises(ValueError, match=f"^{name}.* is .*, expected (an|three) integer"):
            call(bad)


@pytest.mark.parametrize("op", ["rotary_table", "pos_embed_interpolate", "spatial_merge"])
def test_vmap_of_grids_equals_a_loop(op: str) -> None:
    args, _ = small_calls()[op]
    swapped = args["grid"][:, [0, 2, 1]].contiguous()
    found = as_tuple(torch.func.vmap(lambda grid: getattr(torch_ops, op)(**{**args, "grid": grid}))(
        torch.stack((args["grid"], swapped))
    ))  # fmt: skip
    looped = [as_tuple(getattr(torch_ops, op)(**{**args, "grid": grid})) for grid in (args["grid"], swapped)]
    for actual, expected in zip(found, zip(*looped, strict=True), strict=True):
        assert torch.equal(actual, torch.stack(expected))


def _undense(kind: str) -> Tensor:
    if kind == "sparse":
        return torch.eye(2, device=DEVICE).to(DTYPE).to_sparse()
    parts = [torch.ones(rows, 8, device=DEVICE, dtype=DTYPE) for rows in (2, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged if kind == "jagged" else torch.strided)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["jagged", "strided", "sparse"])
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_tensors_that_are_not_dense_are_refused_by_name(op: Op, kind: str, recorded: dict[str, Any]) -> None:
    args = recorded[op.name]
    got = "of layout torch.sparse_coo" if kind == "sparse" else "a nested tensor"
    for place, (argument, parameter) in enumerate(inspect.signature(op.body, eval_str=True).parameters.items()):
        if parameter.annotation not in (Tensor, Tensor | None):
            continue
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(ValueError, match=f"^{op.name}: {argument} is {got}, expected a dense tensor"):
                op(*_with(args, place, _undense(kind)))


def _no_rows(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return dict.fromkeys(names, lambda tensor: tensor[:0])


def _no_keys(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return dict.fromkeys(names, lambda tensor: tensor[:, :, :0])


# Changes that empty the arguments of an op's small call.
EMPTY: dict[str, list[dict[str, Any]]] = {
    "attention": [_no_rows("q", "k", "v"), _no_keys("q"), _no_keys("k", "v"), _no_keys("q", "k", "v")],
    "attention_decode": [_no_rows("q", "k_cache", "v_cache", "cache_seqlens"), _no_keys("q"),
                         _no_keys("k_cache", "v_cache")],
    "kv_cache_append": [_no_rows("k", "v", "k_cache", "v_cache", "cache_seqlens", "q"), _no_keys("k", "v", "q"),
                        _no_keys("k_cache", "v_cache"), {**_no_keys("k", "v", "q"), **_no_rows("cos", "sin")}],
    "window_attn": [{**_no_rows("q", "k", "v"), "cu_seqlens": torch.zeros_like}, {"cu_seqlens": lambda cu: cu[:1]}],
    "segment_attention": [
        {**_no_rows("q"), "cu_seqlens_q": torch.zeros_like}, _no_rows("k", "v"),
        {"cu_seqlens_q": lambda cu: cu[:1], **_no_rows("key_sequence", "key_limit")},
        _no_rows("key_bounds", "key_rows"),
    ],
    "rope_window_attn": [{**_no_rows("q", "k", "v", "cos", "sin"), "cu_seqlens": torch.zeros_like}],
    "qkv_rope": [_no_rows("x", "cos", "sin")],
    "rotary_table": [{**_no_rows("grid"), "total": 0}, _no_rows("grid")],
    "pos_embed_interpolate": [{**_no_rows("grid"), "total": 0}, _no_rows("grid")],
    "spatial_merge": [{**_no_rows("x", "grid"), "total": 0}, {"total": 0, **_no_rows("grid")}],
    "add_layer_norm": [_no_rows("x", "residual")],
    "add_rms_norm": [_no_rows("x", "residual")],
    **{op: [_no_rows("x")] for op in ("layer_norm", "rms_norm", "mlp", "patch_merger")},
}  # fmt: skip


@pytest.mark.parametrize("op", [name for name in OPS if not name.startswith("_") and not name.endswith("_backward")])
def test_nothing_is_computed_of_nothing(op: str) -> None:
    args, leaf = small_calls()[op]
    for empty in EMPTY[op]:
        given = {
            name: empty[name](value) if callable(empty.get(name)) and value is not None else empty.get(name, value)
            for name, value in args.items()
        }
        assert all(result.isfinite().all() for result in _results(op, given, leaf)), empty
