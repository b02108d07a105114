"""Build the recorded variants of all kernels with whatever Triton is installed, without PyTorch.

    python -m compile_tests.triton_alone VARIANTS.jsonl [--kernel PATTERN] [--jobs N]

`make builds` records the file. Each of its lines is a variant: a kernel, its arguments, options and target, and limits
for its machine code.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from csrc_free_ops.tiles.hopper.versions import PTXAS

Variant = dict[str, Any]
FIELDS = {"name", "kernel", "target", "args", "kwargs", "shared_memory", "most_spilled", "wgmma"}
VERSION = int(triton.__version__.split(".")[0]), int(triton.__version__.split(".")[1])
# (pattern, factor, more): limit of spills relative to Triton 3.7. The first pattern that is found in a variant's kernel
# and name holds; newer versions than these have the newest entry. Bytes, as in `spilled`.
# The factor is for fp32's gradients of keys, whose 448 bytes become 616 with ptxas 13.4.
SPILLED_MORE = {
    (3, 6): (("hopper", 1.0, 0), ("_segment_attention_bwd_dkdv", 1.0, 64), ("", 1.0, 40)),
    (3, 8): (
        ("hopper", 1.0, 24),
        ("decode_kernel .*'HEAD_DIM': 72,", 1.0, 288),
        ("bwd_dq_kernel .*'HEAD_DIM': 256,", 1.0, 208),
        ("bwd_dkdv_dense_kernel .*'PRECISION': 'tf32',", 1.0, 144),
        ("", 1.0, 56),
    ),
    (3, 9): (
        ("hopper", 1.4, 48),
        ("decode_kernel .*'HEAD_DIM': 72,", 1.0, 360),
        ("bwd_dkdv_kernel .*'HEAD_DIM': (72|80),", 1.0, 152),
        ("", 1.0, 56),
    ),
}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class FakeDriver:
    """Stand in for Triton's driver as far as builds ask for it. The target serves as the device of built kernels."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target

    def get_current_stream(self, device: Any) -> int:
        return 0


def read_argument(argument: Any) -> Any:
    """Make an argument from what `contract.variants.write_argument` wrote."""
    if not isinstance(argument, dict):
        return argument
    ((kind, value),) = argument.items()
    if kind == "pointer":
        return MockTensor(value)
    if kind == "dtype":
        return tl.dtype(value)
    if kind == "float":
        return float(value)
    if kind == "tuple":
        return tuple(map(read_argument, value))
    dtype, shape, strides, block, layout = (value[name] for name in ("dtype", "shape", "strides", "block", "layout"))
    return TensorDescriptor(MockTensor(dtype), shape, strides, block, gl.NVMMASharedLayout(**layout))


def cuobjdump(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [BINARIES / "cuobjdump", *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(cubin: bytes, resource: str) -> int:
    """Return a figure that cuobjdump prints of the only kernel: REG, STACK or LOCAL."""
    text = cuobjdump(cubin, "-res-usage")
    figures = re.findall(rf"\b{resource}:(\d+)", text)
    assert len(figures) == 1, f"one kernel's figures expected of cuobjdump, got {text!r}"
    return int(figures[0])


def spilled(asm: dict[str, Any]) -> int:
    """Return bytes of stack and local memory of a thread, or VGPRs on AMD."""
    if "cubin" in asm:
        return usage(asm["cubin"], "STACK") + usage(asm["cubin"], "LOCAL")
    return int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", asm["amdgcn"])[0])


def build(variant: Variant) -> Any:
    """Compile a variant."""
    module, name = variant["kernel"].rsplit(".", 1)
    kernel = getattr(importlib.import_module(module), name)
    args = list(map(read_argument, variant["args"]))
    kwargs = {name: read_argument(value) for name, value in variant["kwargs"].items()}
    if "hopper" in module:
        kwargs |= PTXAS
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(FakeDriver(GPUTarget(*variant["target"])))
    try:
        return kernel.warmup(*args, grid=(1,), **kwargs)
    finally:
        triton.runtime.driver.set_active(before)


def placed(ttgir: str) -> list[tuple[int, int]]:
    """Return where buffers in shared memory begin, in bytes, and their sizes, the largest first."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    manager = ir.pass_manager(context)
    # As the compiler itself does before it makes LLVM's code.
    passes.ttgpuir.add_allocate_warp_groups(manager, *([False] if VERSION >= (3, 8) else []))
    passes.convert.add_scf_to_cf(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 87)
    manager.run(module, "placed")
    found = re.findall(r"local_alloc \{allocation\.offset = (\d+) .*!ttg\.memdesc<((?:\d+x)+)[a-z]+(\d+)", str(module))
    sizes = ((int(at), math.prod(map(int, shape.rstrip("x").split("x"))) * int(bits) // 8) for at, shape, bits in found)
    return sorted(sizes, key=lambda each: -each[1])


def misplaced(kernel: str, ttgir: str) -> str:
    """Return which buffer is not at the address that `shared_base` assumes."""
    buffers = placed(ttgir)
    if buffers[0][0] != 0:
        return f"the largest buffer begins at {buffers[0][0]}"
    if kernel.endswith("_attention_bwd_hopper_kernel") and buffers[1][0] != buffers[0][1]:
        return f"the second largest buffer begins at {buffers[1][0]}, behind {buffers[0][1]} bytes"
    return ""


def allowed_spills(variant: Variant, version: tuple[int, int]) -> int:
    """Return how many bytes of a thread the variant may spill when this version of Triton builds it."""
    most_spilled: int = variant["most_spilled"]
    for pattern, factor, more in SPILLED_MORE.get(min(version, max(SPILLED_MORE)), ()):
        if re.search(pattern, f"{variant['kernel']} {variant['name']}"):
            return int(factor * most_spilled) + more
    return most_spilled


def faults(variant: Variant) -> tuple[list[str], dict[str, int]]:
    """Return the faults of a variant's machine code, and figures of the code."""
    built = build(variant)
    found = {"shared": built.metadata.shared, "spilled": spilled(built.asm)}
    wrong = []
    if found["shared"] > variant["shared_memory"]:
        wrong.append(f"{found['shared']} bytes of shared memory, of {variant['shared_memory']}")
    most_spilled = allowed_spills(variant, VERSION)
    if found["spilled"] > most_spilled:
        wrong.append(f"{found['spilled']} spilled, at most {most_spilled} allowed")
    if variant["wgmma"]:
        ptx = built.asm["ptx"]
        found["products"] = len(re.findall(r"wgmma\.mma_async", ptx))
        if not found["products"] or "mma.sync" in ptx:
            wrong.append("products that are not wgmma")
    if variant["wgmma"] == "overlapping" and (where := misplaced(variant["kernel"], built.asm["ttgir"])):
        wrong.append(where)
    if variant["wgmma"] == "overlapping":
        found["waits"] = cuobjdump(built.asm["cubin"], "-sass").count("WARPGROUP.DEPBAR")
        if found["waits"] > found["products"] / 2:
            wrong.append(f"{found['waits']} waits for {found['products']} products")
    return wrong, found


def _try(variant: Variant) -> dict[str, Any]:
    about = {"kernel": variant["kernel"], "name": variant["name"]}
    try:
        wrong, found = faults(variant)
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        return {**about, "wrong": [f"does not build: {last[-500:]}"]}
    return {**about, "wrong": wrong, **found}


def read_variants(file: Path) -> list[Variant]:
    """Read the file's variants, each once."""
    try:
        lines = list(dict.fromkeys(filter(str.strip, file.read_text().splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{file} cannot be read ({error}); make builds records one") from error
    if not lines:
        raise argparse.ArgumentTypeError(f"{file} is empty; make builds records one")
    variants = []
    for line in lines:
        try:
            variants.append(json.loads(line))
            missing = FIELDS - variants[-1].keys()
        except (ValueError, AttributeError, TypeError):
            missing = FIELDS
        if missing:
            raise argparse.ArgumentTypeError(
                f"{file} has a line without {', '.join(sorted(missing))}: {line[:80]!r}; make builds records one"
            )
    return variants


def _writable(text: str) -> Path:
    try:
        with open(text, "a") as file:
            file.flush()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error}); give another file") from error
    return Path(text)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error}); escape its signs") from error


def main() -> None:
    # The AMD backend of Triton 3.6 and 3.7 imports PyTorch, and asks it nothing about these arguments.
    if VERSION < (3, 8) and importlib.util.find_spec("torch") is None:
        sys.modules["torch"] = ModuleType("torch")
    parser = argparse.ArgumentParser(description="Build recorded variants with this Triton, without PyTorch.")
    parser.add_argument("variants", type=lambda text: read_variants(Path(text)), help="file that make builds records")
    parser.add_argument("--kernel", type=_pattern, default="", help="regular expression of kernels (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side (default: one a core)")
    parser.add_argument("--out", type=_writable, help="file for the figures, as JSON (default: none)")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"argument --jobs: {options.jobs} is no number of processes; give 1 or more")
    variants = [each for each in options.variants if re.search(options.kernel, each["kernel"])]
    if not variants:
        parser.error("the file has no variant of such a kernel; give another --kernel")
    if options.share is not None:
        for variant in variants[options.share :: options.jobs]:
            print(json.dumps(_try(variant)), flush=True)
        return
    figures = _in_processes(variants, options.jobs)
    for each in figures:
        if each["wrong"]:
            print(f"{'; '.join(each['wrong'])}: {each['name']}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"triton": triton.__version__, "builds": figures}, indent=1))
    right = sum(not each["wrong"] for each in figures)
    print(f"triton {triton.__version__}: {right} of {len(variants)} variants are as they must be")
    sys.exit(right < len(variants))


def _in_processes(variants: list[Variant], jobs: int) -> list[dict[str, Any]]:
    """Return the figures of all variants, from processes that each take a share.

    A process that ends early leaves the rest of its share without figures; the first of the rest ended it.
    """
    command = [sys.executable, "-m", "compile_tests.triton_alone", *sys.argv[1:], "--jobs", str(jobs)]
    processes = [
        subprocess.Popen([*command, "--share", str(share)], stdout=subprocess.PIPE, text=True) for share in range(jobs)
    ]
    with ThreadPoolExecutor(jobs) as pool:
        answers = list(pool.map(lambda process: process.communicate()[0], processes))
    figures = []
    for share, (process, answer) in enumerate(zip(processes, answers, strict=True)):
        found = [json.loads(line) for line in answer.splitlines() if line.startswith("{")]
        figures += found
        for index, variant in enumerate(variants[share::jobs][len(found) :]):
            why = "not tried" if index else f"its process ended with code {process.returncode}"
            figures.append({"kernel": variant["kernel"], "name": variant["name"], "wrong": [why]})
    return figures


if __name__ == "__main__":
    main()
