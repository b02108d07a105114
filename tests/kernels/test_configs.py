"""How a launch is chosen, settings, explain, warmup and info."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torch_ops
from csrc_free_ops.attention.portable.bwd import _attention_bwd_dq_kernel
from csrc_free_ops.attention.portable.bwd_dkdv import _attention_bwd_dkdv_kernel
from csrc_free_ops.attention.portable.fwd import _attention_fwd_kernel
from csrc_free_ops.configs.attention import covered_width, split_head_dim
from csrc_free_ops.configs.norms import norm_programs, norm_tail, parameters_early
from csrc_free_ops.configs.pick import pick, rule
from csrc_free_ops.configs.rows import Config, Gpu, TunedConfig, as_document, read_rows, shipped_rows
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import mean_length
from torch_ops._core.device import SHARED_MEMORY
from torch_ops._core.registry import OPS
from torch_ops._core.versions import not_run_on_a_gpu
from torch_ops.settings import Settings
from torch_ops.testing import references
from torch_ops.testing.cases import cumulative

H200 = Gpu("h200", "cuda", 90, SHARED_MEMORY[90])
UNKNOWN = Gpu("cuda-80", "cuda", 80, SHARED_MEMORY[80])

pytestmark = pytest.mark.no_interpret


def test_head_dims_are_covered_without_waste() -> None:
    assert [split_head_dim(d, 2) for d in (8, 64, 72, 80, 96, 128, 136, 256)] == [
        (16, 0), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0),
    ]  # fmt: skip
    assert [split_head_dim(d, 4) for d in (8, 56, 72, 120, 128, 208)] == [
        (16, 0), (32, 32), (32, 16), (32, 32), (32, 0), (32, 16),
    ]  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_parts_hold_every_column_once(head_dim: int, itemsize: int) -> None:
    main, tail = split_head_dim(head_dim, itemsize)
    mains = max(1, head_dim // main)
    assert all(part == 0 or part & (part - 1) == 0 and part >= 16 for part in (main, tail))
    assert mains * main >= head_dim if tail == 0 else 0 < head_dim - mains * main <= tail <= main
    assert head_dim <= covered_width(head_dim, itemsize) == mains * main + tail <= max(16, 2 * head_dim)
    assert itemsize == 2 or main <= 32 and tail <= 32


def test_shipped_rows_come_before_the_rule_and_user_rows_before_them() -> None:
    launch, source = pick("attention_fwd", H200, "bfloat16", 2, 72, False, 1024)
    assert launch in {row.launch for row in shipped_rows("h200")} and "h200.json" in source
    own = TunedConfig("attention_fwd", "bfloat16", 72, Config(16, 16, 1, 1), source="mine")
    assert pick("attention_fwd", H200, "bfloat16", 2, 72, False, 1024, (own,)) == (own.launch, "mine")
    launch, source = pick("attention_fwd", UNKNOWN, "bfloat16", 2, 72, False, 1024)
    assert launch == rule("attention_fwd", UNKNOWN, 2, 72) and "unmeasured" in source


def test_rows_are_chosen_by_length_and_flags() -> None:
    rows = (
        TunedConfig("k", "float16", 64, Config(1, 1, 1, 1), max_length=100),
        TunedConfig("k", "float16", 64, Config(2, 2, 2, 2), causal=True, min_length=100),
        TunedConfig("k", "float16", 64, Config(3, 3, 3, 3), min_length=100),
    )

    def chosen(causal: bool, length: int | None) -> int:
        return pick("k", H200, "float16", 2, 64, causal, length, rows)[0].block_m

    assert [chosen(False, 99), chosen(True, 99), chosen(True, 100), chosen(False, 100)] == [1, 1, 2, 3]
    assert chosen(False, None) == 3, "a graph of dynamic shape takes the row for the longest"


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [TunedConfig("attention_fwd", "float16", 64, Config(64, 32, 4, 2), causal=True, min_length=5, max_length=9)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(as_document(rows, {"gpu": "X", "triton": "3.6.0", "date": "2026-11-20"})))
    (row,) = read_rows(path)
    assert row.source == "rows.json: X, triton 3.6.0, 2026-11-20" and row.gpu == "x"
    assert TunedConfig(**{**vars(row), "source": "", "gpu": ""}) == rows[0]


def test_rows_of_older_files_keep_their_kernels(tmp_path: Path) -> None:
    row = TunedConfig("attention_fwd_short", "bfloat16", 72, Config(64, 64, 4, 1))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(as_document([row], {"gpu": "any", "triton": "3.6.0", "date": "2026-11-20"})))
    assert [each.kernel for each in read_rows(path)] == ["attention_fwd_small_segments"]


@pytest.mark.parametrize("arch", sorted(SHARED_MEMORY))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_rule_has_a_launch_for_every_head_dim(arch: int, itemsize: int) -> None:
    gpu = Gpu(f"cuda-{arch}", "cuda", arch, SHARED_MEMORY[arch])
    for kernel in ("attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv"):
        for head_dim in range(8, 257, 8):
            launch = rule(kernel, gpu, itemsize, head_dim)
            assert launch.block_m >= 16 and launch.block_n >= 16


def test_symbolic_lengths_are_not_looked_at() -> None:
    assert mean_length(100, 3) == 33 and mean_length(7, 0) == 7
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shape_env)
    fake = mode.from_tensor(
        torch.empty(50, 2, 8), symbolic_context=torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
            [torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * 3
        ),
    )  # fmt: skip
    assert mean_length(fake.shape[0], 3) is None
    assert not shape_env.guards


def test_settings_refuse_by_name_and_restore() -> None:
    with pytest.raises(ValueError, match="path is 'fast', expected one of auto, hopper, portable"):
        torch_ops.settings.update(path="fast")
    with pytest.raises(ValueError, match="speed is not a setting; there are path, checked, rows"):
        torch_ops.settings.update(speed=1)
    with pytest.raises(ValueError, match="rows is .*, expected a JSON file"):
        torch_ops.settings.update(rows="/nowhere.json")
    before = torch_ops.settings.path
    with torch_ops.settings(path="hopper"), torch_ops.settings(path="portable", checked=True) as inside:
        assert inside.path == "portable" and inside.checked
    assert torch_ops.settings.path == before and not torch_ops.settings.checked
    with pytest.raises(AttributeError):
        torch_ops.settings.chekced = True


def test_settings_hold_without_a_with_statement() -> None:
    torch_ops.settings(checked=True)
    assert torch_ops.settings.checked
    torch_ops.settings(checked=False)
    assert not torch_ops.settings.checked
    with pytest.raises(ValueError, match="path is .*, expected one of"):
        torch_ops.settings(path="fast")


def test_settings_and_sources_enter_the_key_of_compiled_artefacts() -> None:
    with torch_ops.settings(path="auto"):
        before = torch.compiler.config.cache_key_tag
        assert "vk:" in before
        with torch_ops.settings(path="portable"):
            assert torch.compiler.config.cache_key_tag != before
        assert torch.compiler.config.cache_key_tag == before


def test_a_user_row_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ops._core.launch.gpu", lambda: H200)
    path = tmp_path / "rows.json"
    row = TunedConfig("attention_fwd", "float16", 64, Config(16, 16, 1, 1))
    q = torch.empty(10, 1, 64, dtype=torch.float16)
    assert choose("attention_fwd", q, AttentionOptions(1.0), 10)[0] != row.launch
    for gpu, taken in (("NVIDIA H200", True), ("any", True), ("NVIDIA A100-SXM4-80GB", False)):
        path.write_text(json.dumps(as_document([row], {"gpu": gpu, "triton": "3.6.0", "date": "2026-11-20"})))
        with torch_ops.settings(rows=str(path)):
            assert (choose("attention_fwd", q, AttentionOptions(1.0), 10)[0] == row.launch) == taken, gpu
            # The rows in force are the rows that were read.
            path.unlink()
            assert len(torch_ops.settings.rows) == 1
        assert choose("attention_fwd", q, AttentionOptions(1.0), 10)[0] != row.launch


@pytest.mark.parametrize(
    "row",
    [
        TunedConfig("attention_fwd_small_segments", "float16", 64, Config(48, 48, 4, 1)),
        TunedConfig("attention_fwd_small_segments", "float16", 64, Config(64, 32, 4, 1)),
        TunedConfig("attention_fwd", "float16", 64, Config(8, 64, 4, 1)),
        TunedConfig("attention_fwd", "float16", 64, Config(64, 64, 3, 1)),
        TunedConfig("attention_bwd_hopper", "float16", 64, Config(128, 128, 8, 2)),
        TunedConfig("attention_fwd", "float16", 64, Config(64, 64, 4, 0)),
        TunedConfig("attention_fwd", "float16", 64, Config(64, 64, 64, 2)),
    ],
)
def test_a_launch_that_no_kernel_takes_is_refused(row: TunedConfig, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(as_document([row], {"gpu": "any", "triton": "3.6.0", "date": "2026-11-20"})))
    before = torch_ops.settings.generation
    with pytest.raises(ValueError, match="rows.json holds no launch rows: .* is no launch"):
        torch_ops.settings.update(rows=str(path))
    assert torch_ops.settings.generation == before and torch_ops.settings.rows == ()


@pytest.mark.parametrize(
    ("name", "value"), [("min_length", "64"), ("causal", "no"), ("head_dim", None), ("num_stages", True), ("kernel", 5)]
)
def test_a_row_of_wrong_types_is_refused(name: str, value: object, tmp_path: Path) -> None:
    """When it is read, and not by a call that it would fit."""
    row = TunedConfig("attention_fwd", "float16", 64, Config(16, 16, 1, 1))
    document = as_document([row], {"gpu": "any", "triton": "3.6.0", "date": "2026-11-20"})
    entry = document["rows"][0]
    (entry["launch"] if name in entry["launch"] else entry)[name] = value
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=re.escape(f"{path} holds no launch rows: TypeError: {name} cannot be {value!r}")
    ):
        torch_ops.settings.update(rows=str(path))


def test_a_block_undoes_what_it_changed_alone() -> None:
    before = torch_ops.settings.path
    with torch_ops.settings(path=before):
        with torch_ops.settings(checked=True):
            torch_ops.settings(path="portable")
        assert torch_ops.settings.path == "portable" and not torch_ops.settings.checked
    assert torch_ops.settings.path == before


@pytest.fixture
def own_tag() -> Iterator[None]:
    """New settings write theirs there."""
    with torch.compiler.config.patch(cache_key_tag=torch.compiler.config.cache_key_tag):
        yield


@pytest.mark.usefixtures("own_tag")
def test_without_a_home_there_are_no_rows_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VK_ROWS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vk").mkdir()
    (tmp_path / "vk" / "rows.json").write_text("not the user's")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert Settings().rows == ()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VK_PATH", "fast"), ("VK_ROWS", "/nosuch"), ("VK_CHECKED", "yes"), ("VK_HAND_OVER", "no")],
)
def test_a_wrong_variable_is_named(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} is {value!r}, expected"):
        Settings()


@pytest.mark.usefixtures("own_tag")
def test_a_broken_file_of_rows_is_passed_over_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the default file is passed over; a broken file that VK_ROWS names is refused."""
    path = tmp_path / "vk" / "rows.json"
    path.parent.mkdir()
    path.write_text("{")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("VK_ROWS", raising=False)
    with pytest.warns(UserWarning, match="these launch rows are not used: .*rows.json holds no launch rows"):
        assert Settings().rows == ()
    monkeypatch.setenv("VK_ROWS", str(path))
    with pytest.raises(ValueError, match="VK_ROWS: .*rows.json holds no launch rows"):
        Settings()


def test_explain_says_path_and_reason() -> None:
    q = torch.randn(10, 2, 72)
    report = torch_ops.explain(torch_ops.window_attn, q, q, q, cumulative((10,), "cpu"))
    assert report["path"] == "reference" and report["kernels"] == {}
    with pytest.raises(ValueError, match="heads of k is .*, expected a divisor"):
        torch_ops.explain(torch.ops.vk.window_attn, q[:, :1], q, q, cumulative((10,), "cpu"))
    with pytest.raises(ValueError, match="softcap is .*, expected 0"):
        torch_ops.explain(torch_ops.window_attn, q, q, q, cumulative((10,), "cpu"), softcap=-3.0)
    with pytest.raises(TypeError, match="nonsense"):
        torch_ops.explain(torch_ops.window_attn, q, q, q, cumulative((10,), "cpu"), nonsense=7)
    with pytest.raises(ValueError, match="op is '.*relu', expected one of add_layer_norm, .*, window_attn"):
        torch_ops.explain(torch.relu, q)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (torch.nn.functional.layer_norm, "torch.nn.functional.layer_norm"),
        (torch.ops.aten.native_layer_norm, "torch._ops.aten.native_layer_norm"),
        (torch.ops.vk.layer_norm_backward, "torch._ops.vk.layer_norm_backward"),
        (references.window_attn, "torch_ops.testing.references.packed_attention.window_attn"),
    ],
)
def test_explain_refuses_functions_of_others_and_backwards(op: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"explain: op is '{name}', expected one of add_layer_norm, "):
        torch_ops.explain(op, torch.randn(3, 8), (8,))


def test_explain_takes_a_compiled_function_as_the_function() -> None:
    args = [torch.randn(*shape) for shape in ((8, 16), (16,), (16,), (24, 64), (24,), (8, 24), (8,))]
    expected = torch_ops.explain(torch_ops.patch_merger, *args)
    assert torch_ops.explain(torch.compile(torch_ops.patch_merger), *args) == expected


def test_explain_refuses_tensors_that_are_not_dense() -> None:
    """The check of an op sees fake tensors, which are all dense."""
    args = [torch.randn(*shape) for shape in ((8, 16), (16,), (16,), (24, 64), (24,), (8, 24), (8,))]
    nested = torch.nested.as_nested_tensor(args[0])
    for x, got in ((args[0].to_sparse(), "of layout torch.sparse_coo"), (nested, "a nested tensor")):
        with pytest.raises(ValueError, match=f"patch_merger: x is {got}, expected a dense tensor"):
            torch_ops.explain(torch_ops.patch_merger, x, *args[1:])


def test_explain_asks_for_gradients_where_the_call_does() -> None:
    q, slopes = torch.randn(10, 2, 72), torch.ones(2, requires_grad=True)
    args = q, q, q, cumulative((10,), "cpu")
    with pytest.raises(ValueError, match="alibi_slopes has requires_grad=True"):
        torch_ops.explain(torch_ops.window_attn, *args, alibi_slopes=slopes)
    with torch.no_grad():
        assert torch_ops.explain(torch_ops.window_attn, *args, alibi_slopes=slopes)["path"] == "reference"
        cache = torch.zeros(1, 2, 4, 8)
        with pytest.raises(ValueError, match="v_cache is in the memory of k_cache"):
            torch_ops.explain(torch_ops.kv_cache_append, cache, cache, cache, cache, torch.zeros(1, dtype=torch.int32))


def test_explain_names_the_device_that_the_call_runs_on() -> None:
    grid = torch.tensor([[1, 4, 2]])
    assert torch_ops.explain(torch_ops.rotary_table, grid, 8, 16, device="meta")["device"] == "meta"
    x = torch.empty(8, 8, device="meta")
    assert torch_ops.explain(torch_ops.spatial_merge, grid=grid, x=x, total=8)["device"] == "meta"


@pytest.mark.gpu
def test_explain_names_the_rows_in_use() -> None:
    q = torch.randn(1024, 2, 72, device="cuda", dtype=torch.bfloat16)
    with torch_ops.settings(path="portable"):
        report = torch_ops.explain(torch_ops.window_attn, q, q, q, cumulative((1024,), "cuda"))
    assert report["path"] == "portable"
    assert set(report["kernels"]) == {"attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv"}
    for entry in report["kernels"].values():
        assert entry["launch"]["num_warps"] in (4, 8) and entry["source"]


def test_warmup_refuses_what_it_cannot_build(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device is 'cpu', expected a GPU that PyTorch finds here"):
        torch_ops.warmup([72], device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="layouts has 'packed', expected some of contiguous, encoder, qkv_view"):
        torch_ops.warmup([64], layouts=["packed"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', expected a GPU"):
        torch_ops.warmup([72])


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_warmup_builds_every_combination(backward: bool) -> None:
    calls = torch_ops.warmup([16, 24], dtypes=[torch.float16, torch.float32], mean_lengths=[16, 40], backward=backward)
    assert calls == 32


@pytest.mark.gpu
def test_calls_after_warmup_build_nothing() -> None:
    def built() -> int:
        kernels = (_attention_fwd_kernel, _attention_bwd_dq_kernel, _attention_bwd_dkdv_kernel)
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    with torch_ops.settings(path="portable"):
        torch_ops.warmup([72], num_heads=[4], mean_lengths=[100], backward=True)
        before = built()
        # Other numbers of rows and segments, of which one is no multiple of 16 and the other is 1.
        for lengths in ((100, 117, 90), (101,)):
            packed = torch.randn(sum(lengths), 3, 4, 72, device="cuda", dtype=torch.bfloat16)
            q, k = (packed[:, index].clone().requires_grad_() for index in range(2))
            torch_ops.window_attn(q, k, packed[:, 2], cumulative(lengths, "cuda")).sum().backward()
            with torch.no_grad():
                torch_ops.window_attn(q, k, packed[:, 2], cumulative(lengths, "cuda"))
    assert built() == before > 0


def test_info_lists_ops_and_rows() -> None:
    with torch_ops.settings(path="portable"):
        info = torch_ops.info()
    assert set(info["ops"]) == set(OPS) > {"window_attn", "window_attn_backward"}
    assert info["versions"]["torch"] == torch.__version__
    assert info["settings"] == {"path": "portable", "checked": False, "hand_over": True}
    assert info["not_run_on_a_gpu"] == not_run_on_a_gpu(torch.__version__)
    assert not_run_on_a_gpu("2.11.0+cu130") == [] and not_run_on_a_gpu("2.14.1") == ["torch 2.14.1"]
    assert json.loads(json.dumps(info)) == info


@pytest.mark.parametrize(
    ("name", "arch", "hopper", "forward"),
    [("h200", 90, "yes", r"\d+ rows"), ("l4", 89, "l4 is no Hopper GPU", "rule, unmeasured")],
)
def test_info_says_which_paths_and_rows_there_are(
    name: str, arch: int, hopper: str, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("torch_ops._tools.explain.gpu", lambda: Gpu(name, "cuda", arch, 101376))
    info = torch_ops.info()
    assert info["paths"] == {"portable": "yes", "hopper": hopper}
    assert re.fullmatch(forward, info["rows"]["kernels"]["attention_fwd"])


@pytest.mark.parametrize(
    ("width", "covered"), [(7, 16), (72, 128), (768, 768), (1152, 1280), (4608, 5120), (4096, 4096)]
)
def test_parts_of_a_norm_s_row_hold_it_and_little_more(width: int, covered: int) -> None:
    launch, source = pick("norm_fwd", UNKNOWN, "bfloat16", 2, width, False, None)
    assert "rule" in source
    assert max(1, width // launch.block_n) * launch.block_n + norm_tail(width, launch.block_n) == covered
    assert launch.block_m * launch.block_n == launch.num_warps * 32 * 8 and launch.num_warps >= 4


@pytest.mark.parametrize(("sums", "together"), [(False, 6), (True, 2)])
def test_programs_of_a_norm_take_equally_many_tiles(sums: bool, together: int) -> None:
    launch = Config(2, 512, 4, 1)
    most = together * H200.multiprocessors
    assert norm_programs(H200, launch, None, sums) == norm_programs(H200, launch, 6 * most, sums) == most
    assert norm_programs(H200, launch, 2 * most + 2, sums) == (most + 2) // 2
    assert [norm_programs(H200, launch, rows, sums) for rows in (100, 1, 0)] == [50, 1, 1]


def test_parameters_of_a_norm_come_early_where_all_rows_fit_at_once() -> None:
    rows = 24 * H200.multiprocessors
    for launch in (Config(4, 256, 4, 1), Config(1, 256, 1, 1)):
        assert [parameters_early(H200, launch, some) for some in (rows, rows + 1, None)] == [True, False, False]
    assert not parameters_early(H200, Config(1, 1024, 4, 1), rows)


def test_rows_of_norms_are_keyed_by_width_and_number_of_rows(tmp_path: Path) -> None:
    few, many = Config(1, 128, 1, 1), Config(8, 256, 8, 1)
    rows = [
        TunedConfig("norm_fwd", "bfloat16", 1152, few, max_length=1000),
        TunedConfig("norm_fwd", "bfloat16", 1152, many, min_length=1000),
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(as_document(rows, {"gpu": "any", "triton": "any", "date": "now"})))
    own = read_rows(file)
    found = [pick("norm_fwd", UNKNOWN, "bfloat16", 2, 1152, False, count, own)[0] for count in (784, 25088, None)]
    assert found == [few, many, many]
    assert "rule" in pick("norm_fwd", UNKNOWN, "bfloat16", 2, 768, False, 784, own)[1]
    for bad in (Config(3, 128, 1, 1), Config(1, 8, 1, 1), Config(1, 128, 3, 1)):
        row = TunedConfig("norm_fwd", "bfloat16", 1152, bad)
        file.write_text(json.dumps(as_document([row], {"gpu": "any", "triton": "any", "date": "now"})))
        with pytest.raises(ValueError, match="is no launch"):
            read_rows(file)


def test_rows_of_the_rotation_hold_an_element_for_each_thread(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for launch, fits in ((Config(2, 64, 4, 1), True), (Config(1, 64, 4, 1), False)):
        document = as_document(
            [TunedConfig("rope", "bfloat16", 72, launch)], {"gpu": "any", "triton": "any", "date": "now"}
        )
        file.write_text(json.dumps(document))
        if fits:
            own = read_rows(file)
            assert pick("rope", UNKNOWN, "bfloat16", 2, 72, False, 1024, own)[0] == launch
            assert "rule" in pick("rope", UNKNOWN, "bfloat16", 2, 80, False, 1024, own)[1]
        else:
            with pytest.raises(ValueError, match="less than an element for each thread"):
                read_rows(file)
