"""The vision encoder in graphs: compiled once for all images, exported, packaged."""

import copy
import random
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from compile_tests.contract.process import run_forked
from compile_tests.contract.trace import capture_graphs
from compile_tests.models import draw_pixels, named_outputs, tiny_tower
from torch_ops.models import PackedEncoder, QwenVisionEncoder, from_transformers, vision_metadata
from torch_ops.models.vision_metadata import VisionMetadata
from torch_ops.testing import check, check_draws
from torch_ops.testing.tolerance import Draw

# With windows, and with learned positions and taps.
KINDS = ("qwen2_5_vl_vision", "qwen3_vl_vision")


def encoder_of(model_type: str, depth: int = 2) -> QwenVisionEncoder:
    changes: dict[str, Any] = {"depth": depth}
    if model_type == "qwen3_vl_vision":
        changes["deepstack_visual_indexes"] = [0]
    return from_transformers(tiny_tower(model_type, **changes))


def draw_grid(source: random.Random) -> Tensor:
    images = [
        (source.choice((1, 1, 1, 2, 5)), 2 * source.randint(1, 9), 2 * source.randint(1, 9))
        for _ in range(source.randint(1, 6))
    ]
    return torch.tensor(images)


def flat(outputs: tuple[Tensor, Tensor, tuple[Tensor, ...]]) -> list[Tensor]:
    return [outputs[0], outputs[1], *outputs[2]]


def named(outputs: tuple[Tensor, Tensor, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    return {str(index): output for index, output in enumerate(flat(outputs))}


def exact_of(encoder: QwenVisionEncoder) -> QwenVisionEncoder:
    """In fp64, which is on the CPU alone."""
    return copy.deepcopy(encoder).cpu().double()


def on_host(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: output.cpu() for name, output in outputs.items()}


def inputs(encoder: QwenVisionEncoder, grid: Tensor, seed: int = 0) -> tuple[Tensor, VisionMetadata]:
    device = encoder.device
    return draw_pixels(encoder, grid, encoder.dtype, seed).to(device), vision_metadata(grid, encoder.sizes, device)


@pytest.mark.parametrize("model_type", KINDS)
def test_fifty_batches_compile_at_most_twice(model_type: str, device: str) -> None:
    """fullgraph: no graph breaks. The second is for a batch of one image, whose number PyTorch takes for a constant."""
    encoder = encoder_of(model_type).requires_grad_(False).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True, backend=counter)
    source, exact = random.Random(0), exact_of(encoder)
    for _ in range(50):
        grid = draw_grid(source)
        args = inputs(encoder, grid)
        actual, eager = (on_host(named(call(*args))) for call in (compiled, encoder.encode_packed))
        check(actual, eager, named(exact.encode_packed(*inputs(exact, grid))))
    assert counter.frame_count <= 2
    # A single merged cell is another such case.
    cell = inputs(encoder, torch.tensor([[1, 2, 2]]))
    for _ in range(2):
        compiled(*cell)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("model_type", KINDS)
def test_mergers_are_one_op_each_where_their_layers_are_plain(model_type: str, device: str) -> None:
    encoder = encoder_of(model_type).requires_grad_(False).to(device)
    args = inputs(encoder, torch.tensor([[1, 6, 8], [2, 4, 4]]))
    function, graphs = capture_graphs(encoder.encode_packed)
    function(*args)
    ops = [name for name in graphs.dynamo.split("\n") if name.startswith("vk.")]
    mergers = 2 if encoder.family.taps else 1
    assert ops.count("vk.patch_merger.default") == mergers
    assert ops.count("vk.mlp.default") == ops.count("vk.qkv_rope.default") == len(encoder.blocks)
    encoder.get_submodule(f"merger.{encoder.family.merger[1]}").register_forward_hook(lambda *_: None)
    encoder.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    function, graphs = capture_graphs(encoder.encode_packed)
    function(*args)
    ops = [name for name in graphs.dynamo.split("\n") if name.startswith("vk.")]
    assert ops.count("vk.patch_merger.default") == mergers - 1
    assert ops.count("vk.rope_window_attn.default") == 1


@pytest.mark.parametrize(("model_type", "most"), (("qwen2_5_vl_vision", 90), ("qwen3_vl_vision", 77)))
def test_guards_of_a_block_are_few(model_type: str, most: int) -> None:
    """They are looked at before each call. A block has 9 modules and 11 or 12 parameters: a handful for each."""

    def guards(depth: int) -> list[str]:
        encoder = encoder_of(model_type, depth).requires_grad_(False)
        found: list[str] = []

        def keep_all(entries: Any) -> list[bool]:
            names = [f"{entry.guard_type} {entry.name}" for entry in entries]
            # Those on hooks of modules are not installed by default.
            found.extend(name for name in names if not name.startswith("EMPTY_NN_MODULE_HOOKS_DICT"))
            return [True] * len(entries)

        compiled = torch.compile(
            encoder.encode_packed, fullgraph=True, backend="eager", options={"guard_filter_fn": keep_all}
        )
        compiled(*inputs(encoder, torch.tensor([[1, 6, 8], [2, 4, 4]])))
        return found

    few, many = guards(2), guards(4)
    # From PyTorch 2.14 on, guards are on the hooks that the library reads: two for each layer and norm at most.
    hooks = [sum(name.endswith(("_forward_hooks", "_backward_hooks")) for name in names) for names in (few, many)]
    layers = [name for name in encoder_of(model_type, 2).layer_names if name.startswith("blocks.")]
    assert hooks[1] - hooks[0] <= 2 * len(layers)
    assert (len(many) - hooks[1]) - (len(few) - hooks[0]) <= 2 * most
    # A guard on the keys of a dictionary walks through it.
    assert not [name for name in many if "KEYS" in name.split()[0] and "_parameters" in name]
    # Where Dynamo may, it takes a block whose dictionaries are as they were as a whole: best without its class.
    assert not [name for name in many if "type(" in name and "'gradient_checkpointing'" in name]


def test_frozen_weights_are_each_encoder_s_own_and_may_be_replaced(device: str) -> None:
    """With equal options PyTorch compiles once for all encoders unless its guards tell them apart."""
    encoders = [encoder_of("qwen3_vl_vision").requires_grad_(False).to(device) for _ in range(2)]
    with torch.no_grad():
        encoders[1].blocks[0].attn.qkv.weight.mul_(2)
    grid = torch.tensor([[1, 8, 12], [2, 4, 6]])

    def agree(encoder: QwenVisionEncoder, compiled: Any) -> Tensor:
        args, exact = inputs(encoder, grid), exact_of(encoder)
        actual, eager = (on_host(named(call(*args))) for call in (compiled, encoder.encode_packed))
        check(actual, eager, named(exact.encode_packed(*inputs(exact, grid))))
        return actual["1"]

    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = [torch.compile(each.encode_packed, fullgraph=True, dynamic=True) for each in encoders]
        before, other = map(agree, encoders, compiled)
        assert not torch.equal(before, other)
        qkv = encoders[0].blocks[0].attn.qkv
        qkv.weight = torch.nn.Parameter(2 * qkv.weight, requires_grad=False)
        torch.testing.assert_close(agree(encoders[0], compiled[0]), other)


class OtherTensor(Tensor):
    """As quantised weights are."""


@pytest.mark.parametrize("parameter", ("weight", "bias"))
def test_weights_of_another_kind_are_left_to_their_layer(parameter: str, device: str) -> None:
    encoder = encoder_of("qwen3_vl_vision").requires_grad_(False).to(device)
    args = inputs(encoder, torch.tensor([[1, 6, 8], [2, 4, 4]]))
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True, backend=counter)
    truth = named(exact_of(encoder).encode_packed(*inputs(exact_of(encoder), torch.tensor([[1, 6, 8], [2, 4, 4]]))))
    eager = on_host(named(encoder.encode_packed(*args)))
    check(on_host(named(compiled(*args))), eager, truth)
    layer = encoder.blocks[0].attn.qkv
    held = getattr(layer, parameter).detach().as_subclass(OtherTensor)
    setattr(layer, parameter, torch.nn.Parameter(held, requires_grad=False))
    check(on_host(named(compiled(*args))), eager, truth)
    assert counter.frame_count == 2
    ops = [[str(node.target) for node in graph.graph.nodes] for graph in counter.graphs]
    assert [names.count("vk.qkv_rope.default") for names in ops] == [2, 1]


@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("model_type", KINDS)
def test_compiled_gradients_equal_eager_ones(model_type: str, checkpointed: bool, device: str) -> None:
    encoder = encoder_of(model_type).train().to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True, backend=counter)
    source = random.Random(1)
    exact = exact_of(encoder)

    def gradients(call: Any, encoder: QwenVisionEncoder, grid: Tensor, seed: int) -> dict[str, Tensor]:
        outputs = flat(call(*inputs(encoder, grid, seed)))
        parameters = dict(encoder.named_parameters())
        found = torch.autograd.grad(sum(out.square().sum() for out in outputs), list(parameters.values()))
        return on_host(dict(zip(parameters, found, strict=True)))

    def draw(grid: Tensor, seed: int) -> Draw:
        encoder.gradient_checkpointing_disable()
        eager = gradients(encoder.encode_packed, encoder, grid, seed)
        if checkpointed:
            encoder.gradient_checkpointing_enable()
        actual = gradients(compiled, encoder, grid, seed)
        return actual, eager, gradients(exact.encode_packed, exact, grid, seed)

    for _ in range(4):
        check_draws(partial(draw, torch.cat([draw_grid(source), draw_grid(source)])))
    assert counter.frame_count == 1


@pytest.mark.parametrize("model_type", KINDS)
def test_whole_call_compiles_with_its_metadata(model_type: str, device: str) -> None:
    """Also with what Transformers' helpers make, which is worked on in the graph."""
    from transformers import vision_utils

    encoder = encoder_of(model_type).requires_grad_(False).to(device)
    grid = torch.tensor([[1, 6, 8], [2, 4, 4]])
    pixels, metadata = inputs(encoder, grid)
    exact = exact_of(encoder)
    truth = named_outputs(exact(pixels.double().cpu(), grid))
    eager = on_host(named_outputs(encoder(pixels, metadata=metadata)))
    given = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, 2),
    }
    if encoder.family.windows:
        size, patch = encoder.config.window_size, encoder.config.patch_size
        made = vision_utils.get_vision_window_index(grid, 2, size, patch)
        given.update(zip(("window_index", "cu_window_seqlens"), made, strict=True))
    else:
        made = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, 8, align_corners=True, spatial_merge_size=2
        )
        given.update(zip(("interp_indices", "interp_weights"), made, strict=True))
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    for named in ({"metadata": metadata}, {name: value.to(device) for name, value in given.items()}):
        actual = compiled(pixels, **named)
        assert type(actual) is encoder.family.output_class()
        check(on_host(named_outputs(actual)), eager, truth)


@pytest.mark.parametrize("model_type", KINDS)
def test_whole_call_compiles_around_a_grid_that_the_host_reads(model_type: str, device: str) -> None:
    encoder = encoder_of(model_type).requires_grad_(False).to(device)
    exact = exact_of(encoder)
    counters.clear()
    compiled = torch.compile(encoder, dynamic=True, backend=(counter := CompileCounterWithBackend("aot_eager")))
    for named in ({}, {"chunk_tokens": 40}):
        for rows in ([[1, 6, 8], [2, 4, 4]], [[3, 4, 10], [1, 2, 6]]):
            grid = torch.tensor(rows)
            pixels, _ = inputs(encoder, grid)
            truth = named_outputs(exact(pixels.double().cpu(), grid))
            for given in (grid, grid.to(device)):
                actual, eager = (on_host(named_outputs(call(pixels, given, **named))) for call in (compiled, encoder))
                check(actual, eager, truth)
        if not named:
            (broken,) = counters["graph_break"]
            assert "the host reads the grid" in broken
            # More counts of images than PyTorch would compile one function for.
            for count in range(1, 13):
                grid = torch.tensor([[1, 4, 6]] * count)
                compiled(inputs(encoder, grid)[0], grid)
            # PyTorch may make others, of sizes alone.
            assert 1 <= sum("vk.qkv_rope" in graph.code for graph in counter.graphs) <= 2


def export(encoder: QwenVisionEncoder) -> Any:
    packed = PackedEncoder(encoder)
    pixels, metadata = inputs(encoder, torch.tensor([[1, 6, 8], [2, 4, 4], [1, 2, 10]]))
    return torch.export.export(packed, (pixels, metadata), dynamic_shapes=packed.dynamic_shapes(metadata))


@pytest.mark.parametrize("model_type", KINDS)
def test_exported_program_takes_other_images(model_type: str, tmp_path: Path, device: str) -> None:
    encoder = encoder_of(model_type).requires_grad_(False).to(device)
    torch.export.save(export(encoder), tmp_path / "encoder.pt2")
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    source, exact = random.Random(2), exact_of(encoder)
    for grid in (*(draw_grid(source) for _ in range(5)), torch.tensor([[1, 2, 4]])):
        args = inputs(encoder, grid)
        actual, eager = (on_host(named(call(*args))) for call in (program, encoder.encode_packed))
        check(actual, eager, named(exact.encode_packed(*inputs(exact, grid))))


RUN_PACKAGE = """
import torch, torch_ops.models
from torch_ops.testing import check
package, file = {paths!r}
encode = torch._inductor.aoti_load_package(package)
for args, eager, truth in torch.load(file):
    last, pooled, taps = encode(*args)
    check({{str(index): each for index, each in enumerate((last, pooled, *taps))}}, eager, truth)
print("within the rule")
"""


# The ops whose place in packages is tested here; the others have packages of their own.
PACKAGED = {
    "qwen2_5_vl_vision": ("window_attn", "qkv_rope", "mlp", "rms_norm", "add_rms_norm"),
    "qwen3_vl_vision": ("window_attn", "qkv_rope", "mlp", "layer_norm", "add_layer_norm", "pos_embed_interpolate"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="loading any AOTInductor package fails on the GPU machines")
@pytest.mark.parametrize("model_type", KINDS)
def test_aoti_package_runs_in_a_fresh_process(model_type: str, tmp_path: Path) -> None:
    encoder = encoder_of(model_type).requires_grad_(False)
    package = torch._inductor.aoti_compile_and_package(export(encoder), package_path=str(tmp_path / "encoder.pt2"))
    with zipfile.ZipFile(package) as archive:
        contents = b"".join(map(archive.read, archive.namelist()))
    assert not [name for name in PACKAGED[model_type] if f"vk::{name}".encode() not in contents]
    source, exact, calls = random.Random(3), exact_of(encoder), []
    for _ in range(3):
        grid = torch.cat([draw_grid(source), draw_grid(source)])
        args = inputs(encoder, grid)
        truth = named(exact.encode_packed(*inputs(exact, grid)))
        calls.append((args, named(encoder.encode_packed(*args)), truth))
    torch.save(calls, tmp_path / "calls.pt")
    assert run_forked(RUN_PACKAGE.format(paths=(package, str(tmp_path / "calls.pt")))) == "within the rule\n"


# A stand-in for the ops, which such packages cannot hold.
KERNELS = {
    "qwen2_5_vl_vision": ("_attention_fwd_kernel", "_gemm_kernel", "_gemm_pair_kernel", "_norm_fwd_kernel"),
    "qwen3_vl_vision": (
        "_attention_fwd_kernel", "_gemm_kernel", "_gemm_pair_kernel", "_norm_fwd_kernel", "_pos_embed_fwd_kernel",
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", KINDS)
def test_aoti_package_for_cuda_holds_kernels_and_no_op(model_type: str, tmp_path: Path) -> None:
    """Built alone: loading any package fails on the GPU machines."""
    encoder = encoder_of(model_type).requires_grad_(False).to("cuda", torch.float16)
    package = torch._inductor.aoti_compile_and_package(export(encoder), package_path=str(tmp_path / "encoder.pt2"))
    with zipfile.ZipFile(package) as archive:
        contents = b"".join(map(archive.read, archive.namelist()))
    assert not [name for name in KERNELS[model_type] if name.encode() not in contents]
    assert not [name for name in (*PACKAGED[model_type], "patch_merger") if f"vk::{name}".encode() in contents]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_fifty_batches_compile_at_most_twice_by_inductor(model_type: str) -> None:
    """Entry points of users, by the tolerance rule over the rows of all batches."""
    encoder = encoder_of(model_type).requires_grad_(False).to("cuda", torch.bfloat16)
    exact = copy.deepcopy(encoder).to("cpu", torch.float64)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True, backend=counter)
    source = random.Random(0)
    batches = [inputs(encoder, draw_grid(source)) for _ in range(50)]
    assert len({(len(metadata.cu_seqlens), len(pixels)) for pixels, metadata in batches}) > 40
    actual, eager = (rows_of_all(call, batches) for call in (compiled, encoder.encode_packed))
    assert counter.frame_count <= 2
    on_host = [(pixels.cpu().double(), vision_metadata(m.grid.cpu(), exact.sizes)) for pixels, m in batches]
    check(actual, eager, rows_of_all(exact.encode_packed, on_host))


def rows_of_all(call: Any, batches: list[tuple[Tensor, VisionMetadata]]) -> dict[str, Tensor]:
    """Each output, that of all batches in one tensor."""
    outputs = [[each.cpu() for each in flat(call(*args))] for args in batches]
    return {f"output {place}": torch.cat(each) for place, each in enumerate(zip(*outputs, strict=True))}
