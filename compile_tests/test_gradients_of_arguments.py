"""Every tensor that an op takes and that can require a gradient gets it, right in fp64, or is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.contract.calls import DRAWN
from compile_tests.contract.graph import Call
from torch_ops._core.registry import OPS

pytestmark = pytest.mark.no_interpret

GRID = torch.tensor([[1, 2, 2], [2, 2, 2]])
OF_INTEGERS = {
    "block_table", "cache_seqlens", "cu_seqlens", "cu_seqlens_k", "cu_seqlens_q", "dropout_seed", "grid", "key_bounds",
    "key_limit", "key_rows", "key_sequence", "lengths", "prefix_seqlens", "query_start",
}  # fmt: skip
HAVE_NONE = {("window_attn", "alibi_slopes"), ("attention", "alibi_slopes"), ("segment_attention", "alibi_slopes")}
# Their refusals. A decoder's parameters may require a gradient that nobody asks for: `attention_decode` says it late.
FOR_INFERENCE = {
    "attention_decode": "vk::attention_decode has no derivative: it is for inference",
    "kv_cache_append": "vk::kv_cache_append has no gradient, and {argument}",
}
ARGUMENTS = [
    (op, argument.name)
    for op in OPS
    if not op.endswith("_backward")
    for argument in OPS[op].overload._schema.arguments
    if "Tensor" in str(argument.type) and argument.name not in OF_INTEGERS
]


def call_of(op: str, argument: str) -> dict[str, Any]:
    """Small arguments in fp64 with a tensor for `argument`."""
    x = torch.randn(12, 8, dtype=torch.float64)
    if op in ("pos_embed_interpolate", "spatial_merge"):
        return {"table" if "embed" in op else "x": x[:9] if "embed" in op else x, "grid": GRID, "total": 12}
    if op == "_vision_attention":
        shapes = {"qkv_weight": (48, 8), "qkv_bias": (48,), "proj_weight": (8, 16), "proj_bias": (8,)}
        drawn = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return {"x": x, **drawn, "cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32), "num_heads": 2}
    make, cases_of = DRAWN[op]
    inputs = make(cases_of("smoke")[0], torch.float64, "cpu")
    args = dict(Call.of(OPS[op].body, inputs, (), grads={}).args)
    if argument in ("w_up", "b_up"):
        args |= {"activation": "swiglu", "w_up": torch.randn_like(args["w1"]), "b_up": torch.randn_like(args["b1"])}
    elif args.get(argument) is None:
        heads = args["q"].shape[-3 if args["q"].dim() == 4 else -2]
        shape = args["k_cache"][:1].shape if argument.startswith("prefix") else (heads,)
        args[argument] = torch.rand(shape, dtype=torch.float32 if argument == "alibi_slopes" else torch.float64)
        if argument.startswith("prefix"):
            args |= dict.fromkeys(("prefix_k", "prefix_v"), args[argument])
    if op != "kv_cache_append" and "cos" in args:
        args |= {name: args[name].double() for name in ("cos", "sin")}
    return {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in args.items()}


def total_of(results: Any, weights: list[Tensor]) -> Tensor:
    results = results if isinstance(results, tuple) else (results,)
    return sum(
        (result * weight).nansum() for result, weight in zip(results, weights, strict=False) if result.requires_grad
    )


@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_a_gradient_comes_and_is_right_or_is_refused(op: str, argument: str) -> None:
    torch.manual_seed(0)
    args = call_of(op, argument)
    overload, point = OPS[op].overload, args[argument]

    def call(value: Tensor) -> Any:
        return overload(**{**args, argument: value.detach().requires_grad_()})

    if (op, argument) in HAVE_NONE:
        message = f"{op}: {argument} has requires_grad=True, but it gets no gradient; pass {argument}.detach()"
        with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
            call(point)
        return
    leaf = point.detach().requires_grad_()
    if op in FOR_INFERENCE:
        with pytest.raises(NotImplementedError, match=FOR_INFERENCE[op].format(argument=argument)):
            overload(**{**args, argument: leaf})[0].sum().backward()
        return
    results = overload(**{**args, argument: leaf})
    weights = [torch.randn_like(each) for each in (results if isinstance(results, tuple) else (results,))]
    (gradient,) = torch.autograd.grad(total_of(results, weights), leaf)
    direction, step = torch.randn_like(point), 1e-6
    ahead, behind = (total_of(call(point + sign * step * direction), weights) for sign in (1, -1))
    torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)
    assert gradient.abs().sum() > 0


def test_every_floating_tensor_is_tested() -> None:
    """The names above hide no op and no floating tensor."""
    tested = dict(ARGUMENTS)
    assert {*tested, "rotary_table"} == {op for op in OPS if not op.endswith("_backward")}
    for op, argument in tested.items():
        args = call_of(op, argument)
        integers = [args[name] for name in OF_INTEGERS & args.keys() if args[name] is not None]
        assert not any(tensor.is_floating_point() for tensor in integers), op
