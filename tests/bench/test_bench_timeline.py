"""Timelines: kernels out of a trace, stored, and as a picture."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.verify import bench, golden_report, refused
from torch_ops.bench.encoder.timeline import KINDS, Lane, Timeline, bars, kernels_of, kind_of, read_timeline

pytestmark = pytest.mark.no_interpret

NAMES = {
    "void cutlass::device_kernel<flash::FlashAttnFwd>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
    "_attention_fwd_hopper_kernel": "attention",
    "_gemm_hopper_kernel": "matmul",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT": "matmul",
    "triton_per_fused_add_addmm_native_layer_norm_view_3": "norm",
    "_norm_fwd_kernel": "norm",
    "triton_poi_fused_addmm_gelu_view_4": "elementwise",
    "_rope_kernel": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
    "Memcpy DtoD (Device -> Device)": "copy",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def made_up(pause: float) -> dict[str, Any]:
    """Three layers of four kernels, and what ran on the host."""
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 900.0}]
    now = 1000.0
    for _ in range(3):
        for name, duration in (("_norm_fwd_kernel", 2.0), ("gemm", 10.0), ("gemm", 5.0), ("flash_fwd", 20.0)):
            events.insert(0, {"cat": "kernel", "name": name, "ts": now, "dur": duration})
            now += duration + pause
    return {"traceEvents": [*events, {"cat": "gpu_user_annotation", "name": "x", "ts": 0.0, "dur": 1.0}, {"ph": "M"}]}


def test_a_timeline_is_stored_and_drawn(tmp_path: Path) -> None:
    dense, sparse = kernels_of(made_up(0.0)), kernels_of(made_up(4.0))
    assert [kernel.name for kernel in dense[:3]] == ["_norm_fwd_kernel", "gemm", "gemm"] and dense[0].start == 0.0
    lanes = Lane("hf_compiled", "theirs", sparse), Lane("vk_graph", "ours", dense)
    assert [lane.busy for lane in lanes] == [111.0, 111.0]
    assert [lane.end for lane in lanes] == [155.0, 111.0]
    assert lanes[1].end_of_layers(2) == 2 * 37.0 + 17.0
    assert bars(dense, 0.5)["matmul"] == [(2.0, 15.0), (39.0, 15.0), (76.0, 15.0)]
    assert len(bars(sparse, 0.5)["matmul"]) == 6
    timeline = Timeline(golden_report().provenance, "896", lanes)
    file = tmp_path / "timeline.json"
    timeline.write(file)
    assert read_timeline(file.read_text()) == timeline
    assert json.loads(file.read_text())["names"] == ["_norm_fwd_kernel", "flash_fwd", "gemm"]
    pictures = tmp_path / "one.svg", tmp_path / "two.svg"
    for picture in pictures:
        result = bench("chart", file, picture)
        assert result.exit_code == 0, result.output
    one, two = (picture.read_text() for picture in pictures)
    assert one == two and len(one) < 100_000
    for word in (*KINDS, "gap", "hf_compiled", "vk_graph", "busy 72%", "0.111 ms, 12 kernels", "its first 2 layers"):
        assert word in one, word
    dataclasses.replace(timeline, lanes=()).write(file)
    assert "no kernels" in refused("chart", file, pictures[0])
