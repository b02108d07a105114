"""`vk bench versions`: our ops under several versions of Triton."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import torch

from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import flag, say
from torch_ops.bench.commands.run import show
from torch_ops.bench.measure.machine import provenance
from torch_ops.bench.measure.opbench import OpBench
from torch_ops.bench.measure.results import Report
from torch_ops.bench.measure.run import Setup
from torch_ops.bench.measure.versions import time_versions, versions

# Every head dimension and mask of the Hopper kernels, many and few segments; products of every epilogue.
SHAPES = {
    "window_attn": (
        "qwen3vl_l_1024,qwen3vl_l_4096,qwen3vl_l_8x4096,qwen3vl_l_mixed,qwen25vl_4096,qwen25vl_ragged,dense_d64_4096,"
        "qwen3vl_m_4x4096,dense_d128_8x4096,dense_d128_causal_32x2048,dense_d128_gqa_causal,8x2048x16x96"
    ),
    "attention": (
        "b32h10s2048d128_causal,b8h32s2048d128_causal,b4h32s1024d64_causal,b8h32kv8s2048d128_causal,b8h32s2048d128,"
        "b4h32s1024d64,b4h16s4096d64,b1h8s512d64"
    ),
    "mlp": "mlp_1152_4304_784,mlp_1152_4304_4096,mlp_1024_4096_25088,mlp_1280_3420_4096",
    "qkv_rope": "qkv_1152_4096,qkv_1024_25088,qkv_1280_784",
}  # fmt: skip


def versions_command(benches: Mapping[str, OpBench]) -> Callable[..., None]:
    def command(
        folders: Annotated[
            list[Path],
            flag("--triton", "Folder of another triton or torch_ops package; repeated.", exists=True, file_okay=False),
        ],
        op: Annotated[list[str] | None, flag("--op", f"Some of {', '.join(SHAPES)} (default: all).")] = None,
        shapes: options.Shapes = None,
        rounds: options.Rounds = 6,
        device: options.DeviceName = None,
        out: options.Out = None,
        show_markdown: options.Markdown = False,
        commit: options.Commit = None,
    ) -> None:
        """Time our own ops under this version of Triton and others on a GPU, forward and backward, in the same rounds.

        The versions take turns in balanced order, each in a process of its own. A folder may also hold another state of
        this library, as git archive COMMIT torch_ops csrc_free_ops gives it. Nothing is compared with a reference: the
        tests do that.
        """
        where = options.find_device(device)
        if where.type != "cuda":
            raise options.bad("--device", "versions differ in the code that they make for a GPU, and there is none")
        for name in op or ():
            if name not in SHAPES:
                raise options.bad("--op", f"unknown op {name!r}; give some of {', '.join(SHAPES)}")
        options.check_output(out, "--out")
        setup = Setup(torch.bfloat16, where, ("forward", "backward"), rounds)
        with options.value_errors("--shapes"):
            cases = [
                (benches[name], case)
                for name in dict.fromkeys(op or SHAPES)
                for case in benches[name].cases(shapes or [SHAPES[name]], where)
            ]
        with contextlib.ExitStack() as stack:
            with options.value_errors("--triton"):
                processes = stack.enter_context(versions(["", *map(str, folders)]))
            names = [process.name for process in processes]
            say(f"triton {', '.join(names)}")
            report = Report(provenance(where, commit, {name: f"triton {name}" for name in names[1:]}))
            for bench, case in cases:
                for direction in setup.directions:
                    say(f"{bench.op} {case.name} {direction}")
                    records = time_versions(bench, case, direction, setup, processes)
                    report = dataclasses.replace(report, records=(*report.records, *records))
                    if out is not None:
                        report.write(out)
        show(report, show_markdown)

    return command
