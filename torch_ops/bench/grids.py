"""The bench rooms of the ops on image grids: rotary_table, pos_embed_interpolate, spatial_merge.

Peers are what Transformers does for its Qwen-VL encoders, in eager mode and under torch.compile, and for the merge what
one would write in PyTorch. Theirs read the grid back to the host, which is part of their time.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import torch_ops
from csrc_free_ops.grids import (
    _pos_embed_bwd_kernel,
    _pos_embed_fwd_kernel,
    _rotary_table_kernel,
    _spatial_merge_bwd_kernel,
    _spatial_merge_fwd_kernel,
)
from torch_ops.bench import results
from torch_ops.bench.room import Call, Contender, Cost, HostCall, Room, Trial, TunedKernel, find_named, one_line
from torch_ops.testing import references
from torch_ops.testing.cases import GridCase, GridInputs, grid_cases, make_grid_inputs

HEAD_DIM = 72
PROFILED = "qwen3vl_8x896"


@dataclass(frozen=True)
class GridCall:
    """A case with the options of one op, such as the mode and order of a merge."""

    name: str
    case: GridCase
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallInputs(GridInputs):
    """Inputs that know what they were drawn for."""

    call: GridCall


def _draw(call: GridCall, dtype: torch.dtype, device: torch.device, seed: int) -> CallInputs:
    return CallInputs(**vars(make_grid_inputs(call.case, dtype, device, seed)), call=call)


def _arguments(op: str, inputs: CallInputs, leaf: Tensor | None) -> tuple[Any, ...]:
    if op == "rotary_table":
        return inputs.grid, inputs.total, HEAD_DIM, 10000.0, inputs.merge_size
    return leaf, inputs.grid, inputs.total, *inputs.call.options, inputs.merge_size


def _leaf(op: str, inputs: CallInputs) -> dict[str, Tensor]:
    """What is differentiated, by its name."""
    if op == "rotary_table":
        return {}
    return {"table": inputs.table} if op == "pos_embed_interpolate" else {"x": inputs.x}


def _call(op: str, function: Callable[..., Any], inputs: CallInputs) -> Call:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in _leaf(op, inputs).items()}
    arguments = _arguments(op, inputs, next(iter(leaves.values()), None))
    outputs = ("cos", "sin") if op == "rotary_table" else ("out",)
    dout: Tensor | tuple[Tensor, ...] = inputs.dout
    if op == "spatial_merge":
        rows = inputs.total // inputs.merge_size**2
        dout = inputs.dout.reshape(rows, -1) if inputs.call.options[0] == "concat" else inputs.dout[:rows]
    return Call(lambda: function(*arguments), leaves, dout, outputs=outputs)


def _hf_rotary_table(grid: Tensor, total: int, dim: int, theta: float, merge_size: int) -> tuple[Tensor, Tensor]:
    positions = importlib.import_module("transformers.vision_utils").get_vision_position_ids(grid, merge_size)
    half = dim // 2
    frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=grid.device) / half))
    angles = (positions[..., None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def _hf_pos_embed(table: Tensor, grid: Tensor, total: int, merge_size: int) -> Tensor:
    utils = importlib.import_module("transformers.vision_utils")
    indices, weights = utils.get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=int(table.shape[0] ** 0.5), mode="bilinear", align_corners=True,
        spatial_merge_size=merge_size,
    )  # fmt: skip
    return (torch.nn.functional.embedding(indices, table) * weights[:, :, None]).sum(1).to(table.dtype)


def _peers_of(op: str, eager: Callable[..., Any], what: str) -> tuple[Contender, ...]:
    def refuses(call: GridCall, dtype: torch.dtype, device: torch.device) -> str:
        if op == "spatial_merge":
            return ""
        try:
            importlib.import_module("transformers.vision_utils")
        except Exception as error:
            return one_line(error)
        return ""

    def about() -> str:
        if op == "spatial_merge":
            return f"{what}, torch {torch.__version__}"
        try:
            return f"{what}, transformers {importlib.metadata.version('transformers')}"
        except importlib.metadata.PackageNotFoundError:
            return what

    def contender(name: str, run: Callable[..., Any], said: Callable[[], str]) -> Contender:
        return Contender(name, lambda call, inputs: _call(op, run, inputs), refuses, said, _directions(op))

    compiled: Callable[..., Any] = torch.compile(eager)
    return (
        contender("eager", eager, about),
        contender("compiled", compiled, lambda: f"torch.compile of {about()}"),
    )


def _directions(op: str) -> tuple[str, ...]:
    return ("forward",) if op == "rotary_table" else ("forward", "backward")


def _truth(op: str, inputs: CallInputs, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    if op == "rotary_table":
        tables = references.rotary_table(
            inputs.grid, inputs.total, HEAD_DIM, merge_size=inputs.merge_size, dtype=dtype
        )  # fmt: skip
        return dict(zip(("cos", "sin"), tables, strict=True))
    exact = replace(inputs, x=inputs.x.to(dtype), table=inputs.table.to(dtype), dout=inputs.dout.to(dtype))
    if op == "spatial_merge":
        return _call(op, references.spatial_merge, exact).results(backward)
    return _call(op, _reference_of_positions, exact).results(backward)


def _reference_of_positions(table: Tensor, grid: Tensor, total: int, merge_size: int) -> Tensor:
    return references.pos_embed_interpolate(table, grid, total, merge_size)


def _ours_of_positions(table: Tensor, grid: Tensor, total: int, merge_size: int) -> Tensor:
    return torch_ops.pos_embed_interpolate(table, grid, total, merge_size)


def _cost(op: str, inputs: CallInputs) -> Cost:
    """Rows read once and written once, with the table; four products and sums for each number of an embedding.

    The backward moves and multiplies as many.
    """
    if op == "rotary_table":
        return Cost(0, inputs.total * HEAD_DIM * torch.float32.itemsize)
    rows, item = inputs.total * inputs.x.shape[1], inputs.x.element_size()
    if op == "pos_embed_interpolate":
        return Cost(8 * rows, item * (rows + inputs.table.numel()))
    mean = inputs.call.options[0] == "mean"
    return Cost(rows if mean else 0, item * (rows + (rows // inputs.merge_size**2 if mean else rows)))


def _room(
    op: str, ours: Callable[..., Any], eager: Callable[..., Any], what: str, options: Sequence[tuple[Any, ...]],
    kernels: tuple[str, ...], jits: tuple[Any, ...],
) -> Room:  # fmt: skip
    def with_options(cases: Sequence[GridCase]) -> tuple[GridCall, ...]:
        return tuple(GridCall("_".join((case.name, *chosen)), case, chosen) for case in cases for chosen in options)

    def find(wanted: Sequence[str], device: torch.device) -> tuple[GridCall, ...]:
        if wanted:
            return find_named(with_options((*grid_cases("bench"), *grid_cases("smoke"))), wanted)
        return with_options(grid_cases("bench" if device.type == "cuda" else "smoke"))

    def profiled(wanted: Sequence[str], device: torch.device) -> tuple[GridCall, ...]:
        named = [PROFILED + "*"] if device.type == "cuda" else []
        return find(wanted or named, device)[: None if wanted else 1]

    def trials(call: GridCall, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
        inputs = _draw(call, dtype, device, 1)
        eager_dtype = torch.float32 if op == "rotary_table" else dtype
        truths = (_truth(op, inputs, kind, backward) for kind in (torch.float64, eager_dtype))
        return [Trial(call.name, call, inputs, lambda name, tensor: tensor, *truths)]

    def host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
        (call, *_) = with_options(grid_cases("smoke"))
        inputs = _draw(call, dtype, device, 0)
        leaf = next(iter(_leaf(op, inputs).values()), None)
        arguments = _arguments(op, inputs, leaf)
        number = torch.ones(16, device=device)
        return [
            HostCall("ATen add", lambda: torch.add(number, number)),
            HostCall("raw Triton launch", None, raw=True, note="not taken"),
            HostCall(f"torch.ops.vk.{op}", lambda: getattr(torch.ops.vk, op)(*arguments)),
            HostCall(f"torch_ops.{op}", lambda: ours(*arguments)),
        ]

    def tuned(call: GridCall, inputs: CallInputs) -> list[TunedKernel]:
        dtype = "float32" if op == "rotary_table" else str(inputs.x.dtype).removeprefix("torch.")
        width = HEAD_DIM // 2 if op == "rotary_table" else call.case.width
        if not inputs.x.is_cuda:
            return []
        return [TunedKernel(name, name.endswith("bwd"), dtype, width, False, inputs.total) for name in kernels]

    return Room(
        op=op,
        cases=find,
        profiled=profiled,
        shape=lambda call: f"{len(call.case.grids)} images, {call.case.total} patches x {call.case.width}",
        inputs=_draw,
        trials=trials,
        cost=lambda inputs, backward: _cost(op, inputs),
        path=lambda inputs: "portable" if inputs.x.is_cuda else "reference",
        ours=Contender(
            results.OURS,
            lambda call, inputs: _call(op, ours, inputs),
            lambda call, dtype, device: "",
            lambda: f"vk::{op}",
            _directions(op),
        ),
        peers=_peers_of(op, eager, what),
        default_peers=lambda device: ("eager", "compiled") if device.type == "cuda" else ("eager",),
        host_calls=host_calls,
        kernels=tuned,
        jits=jits,
    )


ROTARY_TABLE = _room(
    "rotary_table", torch_ops.rotary_table, _hf_rotary_table, "Transformers' position ids, angles and their cosines",
    ((),), ("rotary_table",), (_rotary_table_kernel,),
)  # fmt: skip
POS_EMBED_INTERPOLATE = _room(
    "pos_embed_interpolate", _ours_of_positions, _hf_pos_embed, "Transformers' indices and weights, and a sum of four",
    ((),), ("pos_embed_fwd", "pos_embed_bwd"), (_pos_embed_fwd_kernel, _pos_embed_bwd_kernel),
)  # fmt: skip
SPATIAL_MERGE = _room(
    "spatial_merge", torch_ops.spatial_merge, references.spatial_merge, "views and copies, image by image",
    tuple((mode, order) for mode in ("concat", "mean") for order in ("merge_block", "raster")),
    ("spatial_merge_fwd", "spatial_merge_bwd"), (_spatial_merge_fwd_kernel, _spatial_merge_bwd_kernel),
)  # fmt: skip

ROOMS = (ROTARY_TABLE, POS_EMBED_INTERPOLATE, SPATIAL_MERGE)
