"""The kernels of every op: its calls on fake CUDA tensors, variants of them, and what each kernel writes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from compile_tests.contract.build import ALIKE, APART, TARGETS
from compile_tests.contract.kernels import Calls, Kernels, Point, Writes

HALF = torch.bfloat16


def new(*shape: Any, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def window_attn_calls(
    rows: Any = 200, segments: Any = 2, head_dim: int = 72, num_heads: int = 2, num_k_heads: int | None = None,
    keys: int | None = None, dlse: bool = False, head_major: bool = False, dtype: torch.dtype = HALF, **options: Any,
) -> Calls:  # fmt: skip
    def packed(rows: Any, heads: int) -> Tensor:
        if head_major:
            return new(heads, rows, head_dim, dtype=dtype).transpose(0, 1)
        return new(rows, heads, head_dim, dtype=dtype)

    def boundaries() -> Tensor:
        return new(segments + 1, dtype=torch.int32)

    q, out, dout = (packed(rows, num_heads) for _ in range(3))
    k, v = (packed(rows if keys is None else keys, num_k_heads or num_heads) for _ in range(2))
    lse = new(num_heads, rows, dtype=torch.float32)
    cu = boundaries(), None if keys is None else boundaries()
    return {
        "window_attn": ((q, k, v, *cu), options),
        "window_attn_backward": ((dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse, *cu), options),
    }


# Segments of up to 64 rows are small.
_PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window_and_softcap": {"window_left": 9, "window_right": 3, "softcap": 5.0},
    "gqa": {"num_k_heads": 1},
    "other_keys": {"keys": 70},
    "dlse": {"dlse": True},
    "head_major": {"head_major": True},
    "fp32_d128": {"dtype": torch.float32, "head_dim": 128},
    "small_segments": {"rows": 100},
    "small_segments_with_everything": {"rows": 100, "window_left": 9, "window_right": 3, "softcap": 5.0, "dlse": True},
}


def has_small_segments(name: str) -> bool:
    """Whether this variant, or this kernel, is one of small segments."""
    return "_segments" in name


def _packed_writes(op: str, variant: str) -> Writes:
    if "backward" not in op:
        kinds = ("fwd_small_segments", "fwd_long_segments_fallback") if has_small_segments(variant) else ("fwd",)
        return [(f"_attention_{kind}_kernel", {"out_ptr", "lse_ptr"}) for kind in kinds]
    fallback = "_long_segments_fallback" * has_small_segments(variant)
    return [
        *([("_attention_bwd_small_segments_kernel", {"dq_ptr", "dk_ptr", "dv_ptr"})] if fallback else []),
        (f"_attention_bwd_dq{fallback}_kernel", {"delta_ptr", "dq_ptr"}),
        (f"_attention_bwd_dkdv{fallback}_kernel", {"dk_ptr", "dv_ptr"}),
    ]


WINDOW_ATTN = Kernels(
    ("window_attn", "window_attn_backward"), window_attn_calls, _PACKED, _packed_writes,
    symbolic=(("plain", {"rows": 100, "segments": 3}),),
    graphs={
        ("window_attn", "plain"): "empty_like new_empty KERNEL",
        ("window_attn_backward", "plain"): "empty_like empty_like empty_like empty_like KERNEL KERNEL",
    },
    opaque={"window_attn": [], "window_attn_backward": []},
)  # fmt: skip


def rope_window_attn_calls(
    half: bool = False, table_dtype: torch.dtype = torch.float32, needs_tables: bool = False, **variant: Any
) -> Calls:
    """`half` for tables [T, D / 2]."""
    calls = window_attn_calls(**variant)
    ((q, k, v, *places), options), (given, _) = calls.values()
    tables = [new(q.shape[0], q.shape[2] // (2 if half else 1), dtype=table_dtype) for _ in range(2)]
    return {
        "rope_window_attn": ((q, k, v, *tables, *places), options),
        "rope_window_attn_backward": ((*given[:7], *tables, *places), {**options, "needs_tables": needs_tables}),
    }


_ROTATION = ("_rope_kernel", {"q_out_ptr", "k_out_ptr"})
TABLES = ("_rope_tables_bwd_kernel", {"dcos_ptr", "dsin_ptr"})


def _rope_writes(op: str, variant: str) -> Writes:
    core = _packed_writes(op, "small_segments" if variant == "own_tables" else variant)
    if "backward" not in op:
        return [_ROTATION, *core]
    return [_ROTATION, *core, *([TABLES] if variant == "learned_tables" else []), _ROTATION]


ROPE_WINDOW_ATTN = Kernels(
    ("rope_window_attn", "rope_window_attn_backward"), rope_window_attn_calls,
    {
        **{name: variant for name, variant in _PACKED.items() if name != "other_keys"},
        "own_boundaries": {"keys": 200},
        "half_tables": {"half": True},
        "learned_tables": {"needs_tables": True},
        "own_tables": {"table_dtype": HALF, "rows": 100},
    },
    _rope_writes,
    symbolic=(("plain", {"rows": 100, "segments": 3}),),
    graphs={
        ("rope_window_attn", "plain"): "empty_like new_empty empty_like empty_like KERNEL KERNEL",
        ("rope_window_attn_backward", "plain"):
            "empty_like empty_like empty_like new_empty new_empty empty_like empty_like KERNEL empty_like KERNEL "
            "KERNEL KERNEL",
    },
    opaque={"rope_window_attn": [_ROTATION], "rope_window_attn_backward": [_ROTATION] * 2},
    points=tuple(Point.of(target, variant, num_heads=16, **changes) for target, variant, changes in (
        *((target, "plain", {}) for target in TARGETS),
        *((target, "plain", {"head_dim": 128}) for target in APART),
        *(("sm_90", "half_tables", {"head_dim": head_dim}) for head_dim in (8, 64, 72, 80, 256)),
        *((target, "plain", {"dtype": torch.float32}) for target in ("sm_80", "sm_90", "gfx942")),
        ("sm_90", "head_major", {"head_dim": 80, "dtype": torch.float16}),
        ("sm_90", "gqa", {"head_dim": 128, "num_k_heads": 2}),
        *((target, "learned_tables", {}) for target in ("sm_80", "sm_90", "gfx942")),
        ("sm_90", "learned_tables", {"half": True, "head_dim": 256, "dtype": torch.float32}),
    )),
    built=frozenset({"_rope_kernel", "_rope_tables_bwd_kernel"}),
)  # fmt: skip


def attention_calls(
    batch: Any = 3, rows: Any = 200, head_dim: int = 72, num_heads: int = 2, num_k_heads: int | None = None,
    keys: Any = None, dlse: bool = False, rows_first: bool = False, dtype: torch.dtype = HALF, alibi: int = 0,
    sinks: bool = False, dropout_p: float = 0.0, **options: Any,
) -> Calls:  # fmt: skip
    def tensor(heads: int, rows: Any) -> Tensor:
        if rows_first:
            return new(batch, rows, heads, head_dim, dtype=dtype).transpose(1, 2)
        return new(batch, heads, rows, head_dim, dtype=dtype)

    q, out, dout = (tensor(num_heads, rows) for _ in range(3))
    k, v = (tensor(num_k_heads or num_heads, rows if keys is None else keys) for _ in range(2))
    lse = new(batch, num_heads, rows, dtype=torch.float32)
    if alibi:
        options["alibi_slopes"] = new(*(batch, num_heads)[-alibi:], dtype=torch.float32)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": new(1, dtype=torch.int64)}
    backward = (dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse), dict(options)
    if sinks:
        options["sinks"] = new(num_heads, dtype=torch.float32)
    return {"attention": ((q, k, v), options), "attention_backward": backward}


# With fp32 and few tiles of rows, these are launched in place of the backward's two kernels.
SMALL: Writes = [
    ("_attention_bwd_small_delta_kernel", {"delta_ptr"}),
    ("_attention_bwd_small_kernel", {"dq_ptr", "dk_ptr", "dv_ptr"}),
    ("_attention_bwd_split_sum_kernel", {"dq_ptr", "dk_ptr", "dv_ptr"}),
]
DENSE_BACKWARD: Writes = [
    ("_attention_bwd_dq_dense_kernel", {"delta_ptr", "dq_ptr"}),
    ("_attention_bwd_dkdv_dense_kernel", {"dk_ptr", "dv_ptr"}),
]


def _dense_writes(op: str, variant: str) -> Writes:
    if op == "attention":
        return [("_attention_fwd_dense_kernel", {"out_ptr", "lse_ptr"})]
    return SMALL if variant == "fp32_d128" else DENSE_BACKWARD


ATTENTION = Kernels(
    ("attention", "attention_backward"), attention_calls,
    {
        "plain": {},
        "causal_gqa": {"causal": True, "num_k_heads": 1},
        "window_and_softcap": {"window_left": 9, "window_right": 3, "softcap": 5.0},
        "other_keys_dlse": {"keys": 70, "dlse": True},
        "rows_first": {"rows_first": True},
        "fp32_d128": {"dtype": torch.float32, "head_dim": 128},
        "downcast": {"dtype": torch.float32, "compute_dtype": HALF, "head_dim": 128},
        "steps": {"alibi": 1, "sinks": True, "dropout_p": 0.1, "softcap": 3.0, "causal": True},
    },
    _dense_writes,
    symbolic=tuple((variant, {"batch": 5, "rows": 100, "keys": 70}) for variant in ("plain", "downcast")),
    graphs={
        ("attention", "plain"): "empty_like new_empty KERNEL",
        ("attention_backward", "plain"): "empty_like empty_like empty_like empty_like KERNEL KERNEL",
    },
    opaque={"attention": [], "attention_backward": []},
    points=tuple(
        Point.of(target, variant, head_dim=head_dim)
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
        for head_dim in (64, 72, 128)
        for variant in ("causal_gqa", "window_and_softcap", "steps")
    ),
)  # fmt: skip


def segment_attention_calls(
    rows: Any = 200, keys: Any = 500, segments: Any = 2, sequences: Any = 1, pieces: Any = 4, head_dim: int = 72,
    num_heads: int = 2, num_k_heads: int | None = None, dlse: bool = False, float32_kv: bool = False,
    head_major: bool = False, dtype: torch.dtype = HALF, alibi: int = 0, sinks: bool = False, dropout_p: float = 0.0,
    starts: bool = False, **options: Any,
) -> Calls:  # fmt: skip
    def packed(rows: Any, heads: int) -> Tensor:
        if head_major:
            return new(heads, rows, head_dim, dtype=dtype).transpose(0, 1)
        return new(rows, heads, head_dim, dtype=dtype)

    def index(*shape: Any) -> Tensor:
        return new(*shape, dtype=torch.int32)

    q, out, dout = (packed(rows, num_heads) for _ in range(3))
    k, v = (packed(keys, num_k_heads or num_heads) for _ in range(2))
    lse = new(num_heads, rows, dtype=torch.float32)
    bounds = new(sequences, pieces + 1, dtype=torch.int32)
    places = index(segments + 1), index(segments), index(segments), bounds, index(sequences, pieces)
    if alibi:
        options["alibi_slopes"] = new(*(sequences, num_heads)[-alibi:], dtype=torch.float32)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": new(1, dtype=torch.int64)}
    if starts:
        options["query_start"] = index(segments)
    given = dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse, *places
    backward = given, {**options, "float32_kv": float32_kv}
    if sinks:
        options["sinks"] = new(num_heads, dtype=torch.float32)
    return {"segment_attention": ((q, k, v, *places), options), "segment_attention_backward": backward}


TILE_LIST = ("_segment_tiles_kernel", {"tiles_ptr"})


def _segment_writes(op: str, variant: str) -> Writes:
    if "backward" not in op:
        return [TILE_LIST, ("_segment_attention_fwd_kernel", {"out_ptr", "lse_ptr"})]
    return [
        TILE_LIST,
        ("_segment_attention_bwd_dq_kernel", {"delta_ptr", "dq_ptr"}),
        ("_segment_attention_bwd_dkdv_kernel", {"dk_ptr", "dv_ptr"}),
    ]


SEGMENT_ATTENTION = Kernels(
    ("segment_attention", "segment_attention_backward"), segment_attention_calls,
    {
        "plain": {"causal": False},
        "causal_gqa": {"num_k_heads": 1, "float32_kv": True},
        "window_and_softcap": {"window_left": 9, "window_right": 3, "softcap": 5.0, "causal": False, "starts": True},
        "head_major": {"head_major": True, "dlse": True},
        "fp32_d128": {"dtype": torch.float32, "head_dim": 128},
        "steps": {"alibi": 2, "sinks": True, "dropout_p": 0.1, "softcap": 3.0},
    },
    _segment_writes,
    symbolic=(("plain", {"rows": 100, "keys": 70, "segments": 5, "sequences": 3, "pieces": 6}),),
    graphs={
        ("segment_attention", "plain"): "empty_like new_empty empty.memory_format KERNEL KERNEL",
        ("segment_attention_backward", "plain"):
            "empty_like empty_like empty_like empty.memory_format KERNEL empty_like KERNEL KERNEL",
    },
    points=(
        *(
            Point.of(target, variant, head_dim=head_dim)
            for target in APART
            for head_dim in (64, 72, 128)
            for variant in ("causal_gqa", "window_and_softcap")
        ),
        *(Point.of(target, "causal_gqa", head_dim=128) for target in ALIKE),
        *(Point.of("sm_90", "causal_gqa", head_dim=head_dim) for head_dim in (16, 80, 96, 160, 192, 256)),
        *(Point.of(target, "steps", head_dim=head_dim) for target in ("sm_80", "sm_90") for head_dim in (64, 128)),
        *(Point.of("sm_90", "plain", dtype=torch.float32, head_dim=head_dim) for head_dim in (64, 72, 128)),
        Point.of("sm_90", "head_major", head_dim=128), Point.of("gfx942", "plain", dtype=torch.float32),
    ),
    # Tiles that spill nothing take longer at 96 columns, and fp32 has a second pair of accumulators.
    may_spill={
        "sm_90-causal_gqa-head_dim_96": 24, "sm_90-head_major-head_dim_128": 8,
        **{f"sm_90-plain-dtype_torch.float32-head_dim_{d}": spilled for d, spilled in ((64, 32), (72, 184), (128, 56))},
    },
)  # fmt: skip


def attention_decode_calls(
    batch: Any = 3, capacity: Any = 4096, head_dim: int = 128, num_heads: int = 32, num_k_heads: int = 8,
    queries: Any = 1, page_size: int = 0, pages: Any = 0, prefixes: int = 0, prefix_lengths: bool = False,
    alibi: bool = False, sinks: bool = False, dtype: torch.dtype = HALF, cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> Calls:  # fmt: skip
    cache = cache_dtype or dtype
    blocks, rows, table = batch, capacity, None
    if page_size:
        pages = pages or capacity // page_size
        blocks, rows, table = batch * pages, page_size, new(batch, pages, dtype=torch.int32)
    q = new(batch, num_heads, queries, head_dim, dtype=dtype)
    caches = [new(blocks, num_k_heads, rows, head_dim, dtype=cache) for _ in range(2)]
    if alibi:
        options["alibi_slopes"] = new(num_heads, dtype=torch.float32)
    if sinks:
        options["sinks"] = new(num_heads, dtype=dtype)
    if prefixes:
        for name in ("prefix_k", "prefix_v"):
            options[name] = new(prefixes, num_k_heads, 1000, head_dim, dtype=cache)
        options["prefix_seqlens"] = new(prefixes, dtype=torch.int32) if prefix_lengths else None
    return {"attention_decode": ((q, *caches, new(batch, dtype=torch.int32), table), options)}


ATTEND, COMBINE = (f"_attention_decode{kind}_kernel" for kind in ("", "_combine"))


def _decode_writes(op: str, variant: str) -> Writes:
    splits = variant != "whole"
    launched = [ATTEND] * (2 if DECODE_VARIANTS[variant].get("prefixes") else 1) + [COMBINE] * splits
    return [(kernel, {"out_ptr", "lse_ptr"}) for kernel in launched]


DECODE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {"num_splits": 1},
    "speculative": {"queries": 5, "num_k_heads": 2},
    "pages_16": {"page_size": 16},
    "pages_128": {"page_size": 128},
    "prefix": {"batch": 64, "capacity": 256, "prefixes": 2, "prefix_lengths": True},
    "everything": {
        "queries": 3, "prefixes": 1, "page_size": 64, "window_left": 50, "softcap": 5.0, "alibi": True, "sinks": True,
    },
    "invariant": {"batch_invariant": True},
    "fp32": {"dtype": torch.float32, "head_dim": 72},
    "wider_cache": {"cache_dtype": torch.float32, "num_splits": 2},
}  # fmt: skip
ATTENTION_DECODE = Kernels(
    ("attention_decode",), attention_decode_calls, DECODE_VARIANTS, _decode_writes,
    symbolic=(
        *((variant, {"batch": 5, "capacity": 640}) for variant in ("plain", "invariant", "speculative")),
        ("pages_16", {"batch": 5, "pages": 640}),
        ("prefix", {"capacity": 640}),
    ),
    graphs={
        ("attention_decode", "whole"): "new_empty_strided new_empty KERNEL",
        ("attention_decode", "prefix"): "new_empty_strided new_empty new_empty new_empty KERNEL KERNEL KERNEL",
    },
    points=(
        *(Point.of(target, variant) for target in APART for variant in ("plain", "pages_16", "prefix")),
        *(Point.of(target, "plain", head_dim=d) for target in ("sm_90", "gfx942") for d in (64, 72, 256)),
        *(Point.of(target, each, head_dim=64) for target in ("sm_80", "sm_100") for each in ("plain", "pages_16")),
        Point.of("sm_90", "everything", head_dim=64),
        *(Point.of("sm_90", variant) for variant in ("speculative", "pages_128", "everything", "wider_cache")),
        Point.of("sm_80", "speculative", head_dim=256), Point.of("sm_90", "prefix", head_dim=256),
        Point.of("sm_90", "prefix", head_dim=64),
        *(Point.of(target, "fp32", head_dim=d) for target in ("sm_80", "sm_90", "gfx942") for d in (72, 256)),
        Point.of("sm_86", "plain", head_dim=256), Point.of("sm_120", "prefix"),
    ),
)  # fmt: skip


def gemm_calls(
    rows: Any = 200, width: int = 1152, inner: int = 4304, num_heads: int = 16, num_k_heads: int | None = None,
    head_dim: int = 72, activation: str = "gelu_tanh", bias: bool = True, return_hidden: bool = True,
    half_table: bool = False, table_dtype: torch.dtype = torch.float32, dtype: torch.dtype = HALF, apart: bool = False,
    needs_tables: bool = False,
) -> Calls:  # fmt: skip
    """`apart` for two weights of a gated layer."""

    def each(*shape: Any) -> Tensor:
        return new(*shape, dtype=dtype)

    gated = 2 if activation == "swiglu" else 1
    k_heads = num_k_heads or num_heads
    x, w1, w2 = each(rows, width), each(gated * inner, width), each(width, inner)
    b1, b2 = (each(gated * inner), each(width)) if bias else (None, None)
    hidden = each(rows, gated * inner if return_hidden else 0)
    weight = each((num_heads + 2 * k_heads) * head_dim, width)
    rest: tuple[Any, ...] = (return_hidden,)
    needs: tuple[Any, ...] = (True, True, bias, True, bias)
    if apart:
        w1, w_up = each(inner, width), each(inner, width)
        b1, b_up = (each(inner), each(inner)) if bias else (None, None)
        rest, needs = (return_hidden, w_up, b_up), (*needs, w_up, b_up, True, bias)
    tables = [new(rows, head_dim // 2 if half_table else head_dim, dtype=table_dtype) for _ in range(2)]
    q, k = (each(rows, heads, head_dim) for heads in (num_heads, k_heads))
    return {
        "mlp": ((x, w1, b1, w2, b2, activation, *rest), {}),
        "mlp_backward": ((x, x, w1, b1, w2, hidden, activation, *needs), {}),
        "qkv_rope": ((x, weight, each(weight.shape[0]) if bias else None, *tables, num_heads, k_heads), {}),
        "qkv_rope_backward": ((q, k, k, x, weight, *tables), {"needs_bias": bias, "needs_tables": needs_tables}),
    }


GEMM_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu", "inner": 1365},
    "swiglu": {"activation": "swiglu", "inner": 3420, "num_k_heads": 2, "half_table": True},
    "apart": {"activation": "swiglu", "inner": 3420, "apart": True},
    "apart_again": {"activation": "swiglu", "inner": 3420, "apart": True, "return_hidden": False},
    "bare": {"bias": False, "activation": "quick_gelu", "table_dtype": HALF},
    "forward_alone": {"return_hidden": False},
    "fp32": {"dtype": torch.float32},
}
LINEAR = ("_gemm_kernel", {"out_ptr"})
GRADIENT = ("_mlp_bwd_kernel", {"dpre_ptr", "h_ptr", "column_sums_ptr"})


def gemm_writes(op: str, variant: str) -> Writes:
    bare = variant == "bare"
    again = ("_gemm_pair_kernel", {"first_ptr", "second_ptr"})
    if op == "mlp":
        first = {
            **dict.fromkeys(("swiglu", "apart"), again),
            "apart_again": ("_gemm_pair_kernel", {"first_ptr"}),
            "forward_alone": LINEAR,
        }
        return [first.get(variant, ("_gemm_kernel", {"out_ptr", "pre_ptr"})), LINEAR]
    if op == "mlp_backward":
        made_again = {"apart_again": [again], "forward_alone": [LINEAR]}.get(variant, [])
        return [*made_again, ("_mlp_bwd_kernel", {"dpre_ptr", "h_ptr"}) if bare else GRADIENT]
    if op == "qkv_rope":
        return [("_gemm_pair_kernel", {"first_ptr", "second_ptr", "third_ptr"})]
    tables = [TABLES] if variant == "learned_tables" else []
    return [("_qkv_rope_bwd_kernel", {"packed_ptr"} if bare else {"packed_ptr", "column_sums_ptr"}), *tables]


MLP = Kernels(
    ("mlp", "mlp_backward"), gemm_calls, GEMM_VARIANTS, gemm_writes,
    symbolic=tuple((variant, {"rows": 100}) for variant in ("plain", "swiglu")),
    graphs={
        ("mlp", "plain"): "new_empty new_empty new_empty KERNEL KERNEL",
        ("mlp_backward", "plain"): "new_empty new_empty new_empty mm KERNEL mm t mm sum.dim_IntList _to_copy t mm "
                                   "sum.dim_IntList new_empty new_empty",
    },
    others=dict.fromkeys(("mlp", "mlp_backward"), {"_activate_kernel"}),
    products="torch_ops._gemm.aten.linear_into",
)  # fmt: skip
QKV_ROPE = Kernels(
    ("qkv_rope", "qkv_rope_backward"), gemm_calls, {**GEMM_VARIANTS, "learned_tables": {"needs_tables": True}},
    gemm_writes,
    symbolic=tuple((variant, {"rows": 100}) for variant in ("plain", "swiglu")),
    graphs={
        ("qkv_rope", "plain"): "new_empty new_empty new_empty KERNEL",
        ("qkv_rope_backward", "plain"):
            "new_empty new_empty KERNEL mm t mm sum.dim_IntList _to_copy new_empty new_empty",
    },
    others={"qkv_rope": {"_rotate_kernel"}},
    products="torch_ops._gemm.aten.linear_into",
)  # fmt: skip


def vision_attention_calls(
    rows: Any = 200, segments: Any = 1, num_heads: int = 2, head_dim: int = 72, width: int = 144, bias: bool = True,
    needs: tuple[bool, ...] = (True,) * 5, dtype: torch.dtype = HALF,
) -> Calls:  # fmt: skip
    """`needs`: gradients of x, both weights and biases that are wanted."""
    columns = num_heads * head_dim
    x, dout, packed = (new(rows, size, dtype=dtype) for size in (width, width, 3 * columns))
    qkv_weight, proj_weight = new(3 * columns, width, dtype=dtype), new(width, columns, dtype=dtype)
    biases = [new(size, dtype=dtype) if bias else None for size in (3 * columns, width)]
    cu = new(segments + 1, dtype=torch.int32)
    kept = packed, new(rows, num_heads, head_dim, dtype=dtype), new(num_heads, rows, dtype=torch.float32)
    weights = qkv_weight, biases[0], proj_weight, biases[1]
    return {
        "_vision_attention": ((x, *weights, cu, num_heads), {}),
        "_vision_attention_backward": ((dout, x, qkv_weight, proj_weight, cu, *kept, num_heads, *needs), {}),
    }


COLUMN_SUMS = "_column_sums_kernel"


def _vision_attention_writes(op: str, variant: str) -> Writes:
    core = _packed_writes(op, variant)
    if "backward" not in op or variant == "no_bias":
        return core
    if variant == "projection_alone":
        return [(COLUMN_SUMS, {"second_sums_ptr"})]
    return [*core, (COLUMN_SUMS, {"first_sums_ptr", "second_sums_ptr"})]


VISION_ATTENTION = Kernels(
    ("_vision_attention", "_vision_attention_backward"), vision_attention_calls,
    {
        "plain": {},
        "no_bias": {"bias": False, "needs": (True, True, False, True, False)},
        "projection_alone": {"needs": (False, False, False, True, True)},
        "fp32": {"dtype": torch.float32, "head_dim": 64},
        "small_segments": {"segments": 4},
    },
    _vision_attention_writes,
    symbolic=(("plain", {"rows": 100, "segments": 3}),),
    graphs={
        ("_vision_attention", "plain"):
            "t addmm view select.int select.int select.int new_empty empty_like KERNEL t view addmm",
        ("_vision_attention_backward", "plain"):
            "mm new_empty view select.int select.int select.int empty_like empty_like empty_like view view "
            "select.int select.int select.int empty_like KERNEL KERNEL stack view new_empty new_empty KERNEL "
            "mm t mm t view mm",
    },
    opaque={
        "_vision_attention": [],
        "_vision_attention_backward": [(COLUMN_SUMS, {"first_sums_ptr", "second_sums_ptr"})],
    },
    points=(
        *(Point.of(target, variant, num_heads=16, head_dim=64, width=1024)
          for target in TARGETS for variant in ("plain", "fp32")),
        Point.of("sm_90", "projection_alone", num_heads=16, head_dim=64, width=1024),
    ),
    built=frozenset({COLUMN_SUMS}),
)  # fmt: skip


def norm_calls(
    op: str, rows: Any = 200, width: Any = 1152, batch: Any = None, dtype: torch.dtype = HALF,
    parameters: torch.dtype | None = HALF, needs_dx: bool = True, needs_parameters: bool = True,
) -> Calls:  # fmt: skip
    """`parameters` is the dtype of weight and bias, or None for none; half ones follow x's dtype."""

    def drawn() -> Tensor:
        return new(*(() if batch is None else (batch,)), rows, width, dtype=dtype)

    def vector() -> Tensor | None:
        if parameters is None:
            return None
        return new(width, dtype=torch.float32 if parameters is torch.float32 else dtype)

    vectors = [vector() for _ in range(2 if "layer" in op else 1)]
    needs = [needs_dx, *(parameters is not None and needs_parameters for _ in vectors)]
    added = "add" in op
    return {
        op: ((drawn(), *([drawn()] if added else []), *vectors, 1e-6), {}),
        f"{op}_backward": ((drawn(), *([drawn()] if added else []), drawn(), *vectors, 1e-6, *needs), {}),
    }


def _norm_writes(op: str, variant: str) -> Writes:
    wide = "_wide" * (variant == "wide")
    if "backward" not in op:
        return [(f"_norm_fwd{wide}_kernel", {"out_ptr"} | ({"sum_ptr"} if "add" in op else set()))]
    sums = {"dweight_ptr"} | ({"dbias_ptr"} if "layer" in op else set())
    if variant in ("bare", "frozen"):
        return [(f"_norm_bwd{wide}_kernel", {"dx_ptr"})]
    dx = set() if variant == "parameters_alone" else {"dx_ptr"}
    return [(f"_norm_bwd{wide}_kernel", dx | sums), ("_norm_bwd_sums_kernel", sums)]


# Many and few rows, which have launches of their own.
MANY = 25088
# `add_layer_norm` with fp32 parameters holds most registers of the four norms.
_NORM_POINTS: dict[str, list[Point]] = {
    "add_layer_norm": [
        *(Point.of(target, "mixed", rows=MANY, width=w) for target in APART for w in (72, 1152, 4608, 8192, 20000)),
        *(Point.of(target, "mixed", rows=MANY, width=width) for target in ALIKE for width in (1152, 20000)),
        *(
            Point.of("sm_90", "mixed", rows=MANY, width=width)
            for width in (7, 331, 768, 1024, 1280, 2048, 3456, 4096, 5120, 16384)
        ),
        *(Point.of("sm_90", "fp32", rows=MANY, width=width) for width in (331, 1152, 5120, 6144, 16384)),
        *(Point.of(target, "fp32", rows=MANY, width=1152) for target in ("sm_80", "gfx942")),
    ],
    "rms_norm": [Point.of("sm_90", "plain", rows=MANY, width=width) for width in (1152, 4608)],
}


def _norm(op: str) -> Kernels:
    added = "empty_like " * op.startswith("add_")
    sums = "empty.memory_format " * (2 if "layer" in op else 1)
    vectors = "empty_like " * (2 if "layer" in op else 1)
    return Kernels(
        (op, f"{op}_backward"), partial(norm_calls, op),
        {
            "plain": {},
            "mixed": {"parameters": torch.float32},
            "bare": {"parameters": None},
            "frozen": {"needs_parameters": False},
            "parameters_alone": {"needs_dx": False},
            "fp32": {"dtype": torch.float32, "width": 768},
            "three_dimensions": {"batch": 3, "rows": 50},
            "wide": {"width": 20000},
        },
        _norm_writes,
        symbolic=(("plain", {"rows": 100}), ("plain", {"batch": 3, "rows": 100})),
        graphs={
            (op, "plain"): f"empty_like {added}KERNEL",
            (f"{op}_backward", "plain"): f"empty_like {vectors}{sums}KERNEL KERNEL",
        },
        points=(*_NORM_POINTS.get(op, ()), Point.of("sm_90", "mixed", dtype=torch.float16, rows=784)),
    )  # fmt: skip


NORMS = {op: _norm(op) for op in ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")}


def kv_cache_append_calls(
    batch: Any = 4, tokens: Any = 1, capacity: Any = 1000, max_positions: Any = 4096, pages: Any = 99,
    max_pages: Any = 16, page_size: int = 0, num_heads: int = 32, num_k_heads: int = 8, head_dim: int = 128,
    columns: int = 64, interleaved: bool = False, dtype: torch.dtype = HALF, cache_dtype: torch.dtype | None = None,
    ragged: bool = False, flash: bool = False,
) -> Calls:  # fmt: skip
    """New tokens lie as projections leave them."""

    def cache() -> Tensor:
        outer, rows = (pages, page_size) if page_size else (batch, capacity)
        if flash:
            return new(outer, rows, num_k_heads, head_dim, dtype=cache_dtype or dtype).transpose(1, 2)
        return new(outer, num_k_heads, rows, head_dim, dtype=cache_dtype or dtype)

    def projected(heads: int) -> Tensor:
        return new(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)

    def count() -> Tensor:
        return new(batch, dtype=torch.int32)

    args = (
        projected(num_k_heads), projected(num_k_heads), cache(), cache(), count(),
        new(batch, max_pages, dtype=torch.int32) if page_size else None, projected(num_heads) if num_heads else None,
        *(new(max_positions, columns, dtype=torch.float32) if columns else None for _ in range(2)), interleaved,
        count() if ragged else None,
    )  # fmt: skip
    return {"kv_cache_append": (args, {})}


def _kv_cache_writes(op: str, variant: str) -> Writes:
    queries = KV_CACHE_VARIANTS[variant].get("num_heads", 32)
    return [("_kv_cache_append_kernel", {"k_cache_ptr", "v_cache_ptr", *(["out_ptr"] if queries else [])})]


KV_CACHE_VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {},
    "paged": {"page_size": 64},
    "prompt": {"batch": 2, "tokens": 40},
    "plain": {"columns": 0, "num_heads": 0},
    "without_q": {"num_heads": 0},
    "full_tables": {"columns": 128},
    "partial": {"head_dim": 80, "columns": 16},
    "interleaved": {"interleaved": True, "page_size": 16},
    "d72": {"head_dim": 72, "columns": 36, "page_size": 24},
    "wide": {"head_dim": 256, "columns": 128},
    "fp32": {"dtype": torch.float32},
    "half_cache": {"dtype": torch.float32, "cache_dtype": HALF},
    "ragged": {"tokens": 5, "ragged": True},
    "ragged_pages": {"page_size": 16, "ragged": True},
    "flash_cache": {"flash": True},
}
KV_CACHE_APPEND = Kernels(
    ("kv_cache_append",), kv_cache_append_calls, KV_CACHE_VARIANTS, _kv_cache_writes,
    symbolic=(
        ("ragged", {"batch": 4, "tokens": 7, "capacity": 1000, "max_positions": 4096}),
        ("ragged_pages", {"batch": 4, "tokens": 7, "max_positions": 4096, "pages": 99, "max_pages": 16}),
    ),
    settled={
        "batch": 4, "tokens": 7, "num_heads": 32, "num_k_heads": 8, "head_dim": 128, "columns": 64, "page_size": 16,
        "pages": 99, "max_pages": 12,
    },
    graphs={("kv_cache_append", "decode"): "empty_like KERNEL"},
    points=(
        *(Point.of(target, variant) for target in APART for variant in ("paged", "interleaved")),
        *(Point.of(target, "wide") for target in ALIKE),
        *(
            Point.of("sm_90", variant)
            for variant in ("decode", "plain", "full_tables", "partial", "d72", "wide", "half_cache")
        ),
        *(Point.of(target, "fp32") for target in ("sm_80", "sm_90", "gfx942")),
    ),
)  # fmt: skip


def grid_calls(
    rows: Any = 200, images: Any = 3, width: int = 1152, side: int = 48, head_dim: int = 72, mode: str = "concat",
    order: str = "merge_block", merge_size: int = 2, align_corners: bool = True, dtype: torch.dtype = HALF,
    gap: int = 0,
) -> Calls:  # fmt: skip
    """All rows are merged."""

    def packed(rows: Any, width: Any) -> Tensor:
        return new(rows, width + gap, dtype=dtype).narrow(1, 0, width)

    unit = merge_size * merge_size
    grid = new(images, 3, dtype=torch.int64)
    merged = packed(rows // unit, width * unit if mode == "concat" else width)
    way = (mode, order, merge_size)
    return {
        "rotary_table": ((grid, rows, head_dim, 10000.0, merge_size), {}),
        "pos_embed_interpolate": ((packed(side * side, width), grid, rows, merge_size, align_corners), {}),
        "pos_embed_interpolate_backward": ((packed(rows, width), grid, side * side, merge_size, align_corners), {}),
        "spatial_merge": ((packed(rows, width), grid, rows, *way), {}),
        "spatial_merge_backward": ((merged, grid, rows, rows, *way), {}),
    }


_GRID_WRITES: dict[str, Writes] = {
    "rotary_table": [("_rotary_table_kernel", {"cos_ptr", "sin_ptr"})],
    "pos_embed_interpolate": [("_pos_embed_fwd_kernel", {"out_ptr"})],
    "pos_embed_interpolate_backward": [("_pos_embed_bwd_kernel", {"dtable_ptr"})],
    "spatial_merge": [("_spatial_merge_fwd_kernel", {"out_ptr"})],
    "spatial_merge_backward": [("_spatial_merge_bwd_kernel", {"dx_ptr"})],
}


def _grid(name: str, multiple: int = 0) -> Kernels:
    """One launch serves all images."""
    ops = tuple(op for op in _GRID_WRITES if op.removesuffix("_backward") == name)
    outputs = "new_empty " * (2 if name == "rotary_table" else 1)
    rows = 12544
    return Kernels(
        ops, grid_calls,
        {
            "plain": {},
            "half_pixel": {"align_corners": False},
            "raster": {"order": "raster"},
            "mean": {"mode": "mean"},
            "mean_of_raster": {"mode": "mean", "order": "raster"},
            "row_major": {"merge_size": 1},
            "fp32": {"dtype": torch.float32},
            "far_rows": {"gap": 8},
        },
        lambda op, variant: _GRID_WRITES[op],
        symbolic=(("plain", {"rows": 200, "images": 3}),),
        settled={"rows": 200, "width": 1152, "head_dim": 72, "merge_size": 2},
        multiple=multiple,
        graphs={(op, "plain"): f"{outputs}KERNEL" for op in ops},
        points=(
            *(
                Point.of(target, variant, rows=rows)
                for target in APART
                for variant in ("plain", "half_pixel", "mean_of_raster", "fp32")
            ),
            *(Point.of(target, "mean_of_raster", rows=rows) for target in ALIKE),
            *(Point.of("sm_90", "raster", rows=rows, width=width) for width in (40, 300, 768, 1024, 1280)),
            Point.of("sm_90", "row_major", rows=rows),
        ),
    )  # fmt: skip


# A total that is no multiple of 4 has no merged rows.
GRIDS = {"rotary_table": _grid("rotary_table"), "pos_embed_interpolate": _grid("pos_embed_interpolate"),
         "spatial_merge": _grid("spatial_merge", multiple=4)}  # fmt: skip
EVERY: tuple[Kernels, ...] = (
    WINDOW_ATTN, ROPE_WINDOW_ATTN, ATTENTION, SEGMENT_ATTENTION, ATTENTION_DECODE, MLP, QKV_ROPE, VISION_ATTENTION,
    *NORMS.values(), KV_CACHE_APPEND, *GRIDS.values(),
)  # fmt: skip
