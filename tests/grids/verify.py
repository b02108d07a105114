"""The contract of every op on image grids; the tests of each op subclass it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import torch_ops
from tests.verify import DTYPES, GPU, INTERPRET, assert_waits_for_nothing
from torch_ops.bench.app import BENCHES
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.testing import poisoned
from torch_ops.testing.cases import ROW_LAYOUTS, GridCase, GridInputs, grid_cases, make_grid_inputs

# There the dtypes share all code but a cast, and each program takes milliseconds.
FULL_DTYPES = [torch.float16] if INTERPRET else DTYPES
CASES = [case for case in grid_cases("edge") if not INTERPRET or case.layout in ("contiguous", "odd_strides")]
GRID = torch.tensor([(1, 4, 4)])
# Batches of images and videos, as Transformers takes them.
BATCHES = [
    pytest.param(((1, 16, 12),), id="image"),
    pytest.param(((4, 6, 8),), id="video"),
    pytest.param(((1, 4, 30), (2, 8, 8), (1, 2, 2), (3, 10, 6)), id="mixed"),
    pytest.param(((1, 2, 2),) * 150, id="many"),
]
BAD = [
    ((1, 4, 4), (1, 3, 4), r"the height of image 1, grid\[1, 1\] is 3, expected even and at least 0"),
    ((1, 4, 7), (1, 4, 4), r"the width of image 0, grid\[0, 2\] is 7, expected even and at least 0"),
    ((1, 4, 4), (1, 4, -2), r"the width of image 1, grid\[1, 2\] is -2, expected even and at least 0"),
    ((-1, 4, 4), (1, 4, 4), r"the number of frames of image 0, grid\[0, 0\] is -1, expected at least 0"),
    ((1, 4, 4), (1, 2, 2**20 + 2), r"the width of image 1, grid\[1, 2\] is 1048578, expected at most 1048576"),
]
WILD = [
    ((1, 3, 5), (2, 7, 1)),
    ((-3, 4, 4), (1, -4, 4)),
    ((1, 2**40, 2**40), (1, 4, 4)),
    ((2**62, 2, 2),),
    ((1, 1, 2**62), (1, 2**31, 1)),
    ((1, 2, 6), (5, 1, 2)),
    ((0, 0, 0),),
    ((1, 400, 400),),
]


def ids(value: Any) -> str | None:
    return value.name if isinstance(value, GridCase) else None


@st.composite
def batches(draw: Any) -> GridCase:
    """Images of any number, but that no result has few numbers."""
    merge_size = draw(st.sampled_from([1, 2, 2, 2, 3]))
    longest, most = (6, 4) if INTERPRET else (24, 8)
    sides = st.integers(0, longest // merge_size).map(lambda n: n * merge_size)
    images = st.tuples(st.integers(0, 3), sides, sides)
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    always = (1, 6, 6) if INTERPRET else (1, 12, 18)
    side = draw(st.integers(1, 12))
    fewest = max(20, 200 // side**2)
    return GridCase(
        "fuzz", "anything", (*draw(st.lists(images, max_size=most)), always),
        width=draw(st.integers(fewest, fewest + 50)), side=side,
        padding=draw(st.sampled_from([0, 0, 1, 9, 36])), merge_size=merge_size,
        layout=draw(st.sampled_from(ROW_LAYOUTS)),
    )  # fmt: skip


def differentiate(function: Callable[..., Tensor], leaf: Tensor, dout: Tensor, *rest: Any) -> dict[str, Tensor]:
    leaf = leaf.detach().requires_grad_()
    out = function(leaf, *rest)
    (gradient,) = torch.autograd.grad(out, leaf, dout.to(out.dtype))
    return {"out": out, "gradient": gradient}


def placed(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in arguments.items()
    }


class GridContract:
    """A subclass says how its op is called, and what of it is made by which kernels."""

    op: str
    kernels: tuple[str, ...]
    directions: tuple[str, ...] = ("forward", "backward")
    # Arguments that are taken, of the images in GRID.
    good: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(torch_ops, self.op)

    def call(self, grid: Tensor, device: str) -> Any:
        """The public function, of 40 patches."""
        raise NotImplementedError

    def op_calls(self, grid: Tensor, device: str) -> dict[str, Callable[[], Any]]:
        """Calls of the operators themselves with 40 patches, by name."""
        raise NotImplementedError

    def results_of_wild(self, grid: Tensor, x: Tensor) -> list[Tensor]:
        """Everything that the op makes of a grid that no image has, and of x where it takes rows."""
        raise NotImplementedError

    def call_without_waiting(self, inputs: GridInputs) -> None:
        """With its gradient, if it has one."""
        raise NotImplementedError

    @pytest.mark.parametrize("grids", WILD, ids=str)
    def test_wild_grids_stay_inside(self, grids: Any, device: str) -> None:
        """Nothing is promised of what comes out, but that all of it is written and nothing else is read."""
        guard, total = 64, 48
        rows = torch.full((guard + total + guard, 8), torch.nan, device=device)
        x = rows[guard : guard + total].requires_grad_()
        with torch.no_grad():
            x.normal_()
        with poisoned():
            results = self.results_of_wild(torch.tensor(grids, device=device), x)
        if GPU:
            torch.cuda.synchronize()
        assert results and all(result.isfinite().all() for result in results)

    @pytest.mark.parametrize(("one", "other", "message"), BAD)
    def test_grids_on_the_cpu_are_checked(self, one: Any, other: Any, message: str, device: str) -> None:
        with pytest.raises(ValueError, match=f"^{self.op}: {message}"):
            self.call(torch.tensor([one, other]), device)

    @pytest.mark.parametrize("value", [None, "2", 8.5, True, torch.tensor(8)], ids=str)
    def test_counts_are_integers(self, value: Any) -> None:
        for name in ("total", "merge_size"):
            message = f"^{self.op}: {name} is .*, expected an integer"
            with pytest.raises(ValueError, match=message):
                self.function(**{**self.good, name: value})

    @pytest.mark.parametrize(("one", "other", "message"), BAD)
    def test_checked_mode_names_the_image(self, one: Any, other: Any, message: str, device: str) -> None:
        """The op itself takes what it is given, unless settings say otherwise; a device's grid is passed on to it."""
        for name, call in self.op_calls(torch.tensor([one, other], device=device), device).items():
            with torch_ops.settings(checked=True), pytest.raises(ValueError, match=f"^{name}: {message}"):
                call()
            call()

    def test_explain_says_what_would_run(self, device: str) -> None:
        arguments = placed(self.good, device)
        report = torch_ops.explain(self.function, **arguments)
        assert report["op"] == f"vk::{self.op}"
        computed = GPU or INTERPRET
        assert report["path"] == ("portable" if computed else "reference")
        assert tuple(report["kernels"]) == (self.kernels if computed else ())
        with pytest.raises(ValueError, match=f"^{self.op}: total is -4, expected"):
            torch_ops.explain(self.function, **{**arguments, "total": -4})
        # Named arguments come in any order.
        assert torch_ops.explain(self.function, **dict(reversed(arguments.items()))) == report

    def test_autocast_changes_no_dtype(self, device: str) -> None:
        with torch.autocast(device, dtype=torch.float16):
            result = self.function(**placed(self.good, device))
        assert (result[0] if isinstance(result, tuple) else result).dtype == torch.float32

    @pytest.mark.no_interpret
    def test_benchmark_finds_all_implementations_right(self) -> None:
        """Compiled baselines are left to GPUs: here they would take a minute to build."""
        bench, cpu = BENCHES[self.op], torch.device("cpu")
        case = bench.cases(["mixed*"], cpu)[-1]
        usual = [baseline for baseline in bench.baselines if baseline.name in bench.usual["cpu"]]
        setup = Setup(torch.float32, cpu, ("forward", "backward"), rounds=2)
        records = run_case(bench, case, (bench.ours, *usual), setup)
        assert tuple(dict.fromkeys(one.direction for one in records)) == self.directions
        assert [one.status for one in records] == ["ok", "ok"] * len(self.directions)
        assert all(one.bytes_moved > 0 for one in records)

    @pytest.mark.gpu
    def test_no_call_waits_for_the_device(self, device: str) -> None:
        inputs = make_grid_inputs(grid_cases("smoke")[0], torch.bfloat16, device)
        assert_waits_for_nothing(lambda: self.call_without_waiting(inputs))


class OfTransformers:
    """Mixed into tests against what the installed Transformers computes for its Qwen-VL encoders."""

    @pytest.fixture(autouse=True)
    def vision(self) -> Any:
        self.utils = pytest.importorskip("transformers.vision_utils")
        self.qwen3 = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")

    def positions(self, grid: Tensor, merge_size: int = 2) -> Tensor:
        return self.utils.get_vision_position_ids(grid, merge_size)

    def encode(self, grid: Tensor, total: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """(embedded patches, table of positions, what its first block gets) of a whole encoder of theirs."""
        config = self.qwen3.Qwen3VLVisionConfig(
            hidden_size=64, num_heads=2, depth=1, intermediate_size=64, out_hidden_size=32, num_position_embeddings=81,
            deepstack_visual_indexes=[],
        )  # fmt: skip
        model = self.qwen3.Qwen3VLVisionModel(config).eval()
        patches = torch.randn(total, config.in_channels * config.temporal_patch_size * config.patch_size**2)
        seen: dict[str, Any] = {}

        def note(module: Any, args: Any, kwargs: Any) -> None:
            seen["hidden"] = args[0] if args else kwargs["hidden_states"]
            seen["rotary"] = kwargs["position_embeddings"]

        model.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            model(patches, grid)
            return model.patch_embed(patches), model.pos_embed.weight, seen
