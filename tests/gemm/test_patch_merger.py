"""Numerics, parity with Transformers and refusals of patch_merger."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.gemm.verify import assert_second_derivatives_refused, check_outcome
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, assert_refuses, assert_same_bits
from torch_ops import patch_merger
from torch_ops.testing import check, references
from torch_ops.testing.cases import MergerCase, MergerInputs, make_merger_inputs, merger_cases, outcome

TOWER, AFTER, RMS = merger_cases("smoke")

pytestmark = pytest.mark.interpret


def verify(inputs: MergerInputs) -> None:
    check_outcome(patch_merger, references.patch_merger, inputs)


@with_dtypes(merger_cases("edge"), DTYPES)
def test_agrees_with_reference(case: MergerCase, dtype: torch.dtype, device: str) -> None:
    verify(make_merger_inputs(case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["merger_1152_784", "merger_1280_3136", "deepstack_1152_3136"])
def test_agrees_at_real_shapes(name: str, device: str) -> None:
    case = next(case for case in merger_cases("bench") if case.name == name)
    verify(make_merger_inputs(case, torch.bfloat16, device))


@st.composite
def mergers(draw) -> MergerCase:
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    merge_size = draw(st.integers(1, 3))
    layout = draw(st.sampled_from(["contiguous", "row_strided", "column_strided"]))
    return MergerCase(
        "fuzz", "anything", merge_size**2 * draw(st.integers(30, 50)), draw(st.integers(24, 48)),
        draw(st.one_of(st.none(), st.integers(24, 60))), draw(st.integers(24, 60)), merge_size,
        draw(st.sampled_from(["layer", "rms", "none"])), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()),
        layout,
    )  # fmt: skip


@given(mergers(), st.sampled_from([torch.float16] if INTERPRET else DTYPES), st.integers(0, 2**16))
@hypothesis_settings(max_examples=8 if INTERPRET else 40)
def test_agrees_on_anything(case: MergerCase, dtype: torch.dtype, seed: int) -> None:
    verify(make_merger_inputs(case, dtype, "cuda" if GPU else "cpu", seed))


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["layer", "rms", "none"])
@pytest.mark.parametrize("outer", [None, 3])
@pytest.mark.parametrize("norm_after", [False, True])
def test_gradcheck_in_fp64(name: str, outer: int | None, norm_after: bool) -> None:
    case = MergerCase("gradcheck", "fp64", 8, 3, outer, inner=5, norm=name, norm_after=norm_after)
    inputs = make_merger_inputs(case, torch.float64)
    leaves = {name: leaf.requires_grad_() for name, leaf in inputs.leaves.items()}
    assert torch.autograd.gradcheck(
        lambda *given: inputs.call(patch_merger, **dict(zip(leaves, given, strict=True))), tuple(leaves.values())
    )


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", merger_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_every_time(case: MergerCase, device: str) -> None:
    inputs = make_merger_inputs(case, torch.float16, device)
    assert_same_bits(lambda: outcome(patch_merger, inputs))


def test_frozen_layers_keep_x_and_the_first_product_alone(device: str) -> None:
    """As a norm and an mlp do: no merged rows, which are for the gradient of fc1_weight."""
    inputs = make_merger_inputs(TOWER, torch.float16, device)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tuple(tensor.shape)), lambda _: None):
        inputs.call(patch_merger, x=inputs.x.clone().requires_grad_())
        assert sorted(shape for shape in kept if shape[0] in (TOWER.total, TOWER.rows)) == [(35, 96), (140, 24)]
        kept.clear()
        inputs.call(patch_merger, fc1_weight=inputs.fc1_weight.clone().requires_grad_())
        assert kept.count((35, 96)) == 2 and (140, 24) not in kept


@pytest.mark.no_interpret
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_no_second_derivative_is_dropped(norm: str, device: str) -> None:
    inputs = make_merger_inputs(MergerCase("second", "", 8, 6, 5, inner=7, norm=norm), torch.float32, device)
    assert_second_derivatives_refused(
        patch_merger, references.patch_merger, inputs, r"vk::\w+_backward has no derivative"
    )


def test_contiguous_rows_are_merged_without_a_copy(device: str) -> None:
    inputs = make_merger_inputs(MergerCase("view", "", 140, 24, 40, norm="none"), torch.float16, device)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        inputs.call(patch_merger, fc1_weight=inputs.fc1_weight.clone().requires_grad_())
    assert inputs.x.data_ptr() in kept


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16], ids=str)
def test_autocast_follows_the_region(dtype: torch.dtype, device: str) -> None:
    inputs = make_merger_inputs(TOWER, torch.float32, device)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in inputs.leaves.items()}
    with torch.autocast(device, dtype=dtype):
        out = inputs.call(patch_merger, **{**leaves, "x": leaves["x"].to(dtype)})
    assert out.dtype == dtype
    out.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 and leaf.grad.isfinite().all() for leaf in leaves.values())


class TestTransformers:
    """Parity with the installed Transformers' Qwen-VL encoders."""

    @staticmethod
    def _assert_theirs(module: Any, norm: Any, layers: tuple[Any, Any], device: str, **options: Any) -> None:
        module = module.to(device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        parameters = [
            norm.weight,
            getattr(norm, "bias", None),
            *(p for layer in layers for p in (layer.weight, layer.bias)),
        ]
        x = torch.randn(160, 24, device=device)
        dout = torch.randn(40, 40, device=device)
        leaves = [x.requires_grad_(), *(each for each in parameters if each is not None)]
        names = [f"d{index}" for index in range(len(leaves))]

        def results(out: Tensor) -> dict[str, Tensor]:
            grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
            return {"out": out.detach(), **dict(zip(names, grads, strict=True))}

        ours = results(patch_merger(x, *parameters, **options))
        theirs = results(module(x))
        module.double()
        doubled = [
            norm.weight,
            getattr(norm, "bias", None),
            *(p for layer in layers for p in (layer.weight, layer.bias)),
        ]
        x = x.detach().double().requires_grad_()
        leaves = [x, *(each for each in doubled if each is not None)]
        check(ours, theirs, results(module(x).double()))

    @pytest.mark.parametrize("norm_after", [False, True])
    def test_merger_of_qwen3_vl(self, norm_after: bool, device: str) -> None:
        qwen3 = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
        config = SimpleNamespace(hidden_size=24, spatial_merge_size=2, out_hidden_size=40)
        module = qwen3.Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=norm_after)
        layers = module.linear_fc1, module.linear_fc2
        self._assert_theirs(module, module.norm, layers, device, norm_after=norm_after)

    def test_merger_of_qwen25_vl(self, device: str) -> None:
        qwen25 = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
        module = qwen25.Qwen2_5_VLPatchMerger(dim=40, context_dim=24)
        # Its norm computes in fp32 whatever it is given, so in fp64 the yardstick is LayerNorm's sibling.
        norm = torch.nn.RMSNorm(24, eps=1e-6)
        norm.weight = module.ln_q.weight
        theirs = module.ln_q(torch.ones(3, 24))
        torch.testing.assert_close(theirs, norm(torch.ones(3, 24)))
        module.ln_q = norm
        self._assert_theirs(module, norm, (module.mlp[0], module.mlp[2]), device, rms=True)

    def test_merger_of_qwen2_vl(self, device: str) -> None:
        qwen2 = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
        module = qwen2.PatchMerger(dim=40, context_dim=24)
        self._assert_theirs(module, module.ln_q, (module.mlp[0], module.mlp[2]), device)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"x": lambda x: x[None]}, r"x has shape \[1, 40, 12\], expected shape \[T, C\]"),
    ({"x": lambda x: x.int()}, r"x is int32, expected float16, bfloat16 or float32"),
    ({"x": lambda x: x[:39]}, r"number of rows of x is 39, expected a multiple of merge_size\^2 = 4"),
    ({"merge_size": 0}, r"merge_size is 0, expected 1 or more"),
    ({"norm_after": True}, r"norm_weight has shape \[12\], expected shape \[48\]"),
    ({"norm_weight": lambda x: x.half()}, r"norm_weight.* expected float32 as x is"),
    ({"norm_bias": lambda x: x[1:]}, r"norm_bias has shape \[11\], expected shape \[12\]"),
    ({"rms": True}, r"norm_bias is a tensor, expected None without norm_weight, and with rms"),
    ({"norm_weight": None}, r"norm_bias is .*, expected None without norm_weight, and with rms"),
    ({"fc1_weight": lambda x: x[:, 1:]}, r"fc1_weight has .*, expected shape .* = \[any, 48\]"),
    ({"fc1_weight": lambda x: x.half()}, r"fc1_weight is .*, expected float32 as x is"),
    ({"fc1_bias": lambda x: x[1:]}, r"fc1_bias has shape \[29\], expected shape \[30\]"),
    ({"fc2_weight": lambda x: x[:, 1:]}, r"fc2_weight has .*, expected shape .* = \[any, 30\]"),
    ({"fc2_weight": None}, r"fc2_bias is a tensor, expected None where fc2_weight is"),
    ({"eps": torch.ones(())}, r"eps is .*, expected a number; a tensor would get no"),
    ({"eps": -1.0}, r"eps is -1.0, expected 0 or a positive number"),
    ({"norm_weight": None, "norm_bias": None, "eps": -1.0}, r"eps.* expected 0 or"),
    ({"fc1_weight": lambda x: x[:0], "fc1_bias": None, "fc2_weight": lambda x: x[:, :0]},
     r"rows of fc1_weight is 0, expected 1 or more"),
    ({"fc2_weight": lambda x: x[:0], "fc2_bias": None}, r"of fc2_weight is 0"),
    ({"fc1_weight": lambda x: x.to("meta")}, r"fc1_weight is on meta, expected on .* as x"),
]  # fmt: skip


def _good(device: str) -> dict[str, Any]:
    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return {
        "x": new(40, 12), "norm_weight": new(12), "norm_bias": new(12), "fc1_weight": new(30, 48),
        "fc1_bias": new(30), "fc2_weight": new(20, 30), "fc2_bias": new(20),
    }  # fmt: skip


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    assert_refuses(patch_merger, _good(device), changes, message)


ALONE = {"fc2_weight": None, "fc2_bias": None}
IN_AUTOCAST: list[tuple[dict[str, Any], str]] = [
    ({"fc1_bias": lambda x: x[1:]}, r"fc1_bias has shape \[29\], expected shape \[30\]"),
    ({**ALONE, "fc1_bias": lambda x: x[None]}, r"fc1_bias.* expected shape \[30\]"),
    ({"fc2_bias": lambda x: x[:1]}, r"fc2_bias has shape \[1\], expected shape \[20\]"),
    ({"fc1_weight": lambda x: x.int()}, r"fc1_weight is int32, expected float32 as x is"),
    ({**ALONE, "fc1_weight": lambda x: x.int()}, r"fc1_weight.* expected float32 as"),
    ({**ALONE, "fc1_bias": lambda x: x.double()}, r"fc1_bias is .*, expected float32 as x is"),
    ({**ALONE, "x": lambda x: x.double(), "norm_weight": None, "norm_bias": None},
     r"fc1_weight is float32, expected float64 as x is"),
    ({"fc1_weight": lambda x: x.to("meta")}, r"fc1_weight is on meta, expected on .* as x"),
]  # fmt: skip


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), IN_AUTOCAST)
def test_refuses_in_an_autocast_region(changes: dict[str, Any], message: str) -> None:
    good = _good("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert patch_merger(**good).dtype == patch_merger(**{**good, **ALONE}).dtype == torch.bfloat16
        assert_refuses(patch_merger, good, changes, message)
