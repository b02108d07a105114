"""The first call of every op in a process that has only imported the library."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ops
from compile_tests.contract.graph import DEVICE, DTYPE, Call, backends_of
from compile_tests.contract.process import run_forked
from compile_tests.small_calls import DRAWN
from torch_ops._core.registry import OPS

GRID = torch.tensor([[1, 4, 6], [2, 2, 2]], device=DEVICE)
# Ops that write to an argument or have no inputs with a gradient are called without one.
WITHOUT_GRADIENT = ("attention_decode", "kv_cache_append", "rotary_table")
# Calls each op of a file and compares with the results that the file holds.
FIRST_CALLS = """
import torch, torch_ops
for name, (args, expected, leaf, backend) in torch.load({file!r}).items():
    function = getattr(torch_ops, name)
    if {compiled}:
        function = torch.compile(function, fullgraph=True, backend=backend)
    if {backward} and leaf:
        args[leaf].requires_grad_()
    results = function(**args)
    results = results if isinstance(results, tuple) else (results,)
    for one, wanted in zip(results, expected, strict=True):
        # A graph may split keys otherwise.
        tolerance = {{}} if name == "attention_decode" else {{"rtol": 0, "atol": 0}}
        torch.testing.assert_close(one, wanted, msg=lambda text: name + ": " + text, **tolerance)
    if {backward} and leaf:
        results[0].sum().backward()
        assert args[leaf].grad.abs().sum() > 0, name
print("right")
"""


def _calls() -> dict[str, tuple[dict[str, Any], str]]:
    """The arguments of a small call of each op, and the name of one with a gradient."""
    x, table = (torch.randn(32, 8, device=DEVICE, dtype=DTYPE) for _ in range(2))
    found: dict[str, tuple[dict[str, Any], str]] = {
        "rotary_table": ({"grid": GRID, "total": 32, "dim": 16}, ""),
        "pos_embed_interpolate": ({"table": table[:9], "grid": GRID, "total": 32}, "table"),
        "spatial_merge": ({"x": x, "grid": GRID, "total": 32}, "x"),
    }
    for op, (make, cases_of) in DRAWN.items():
        call = Call.of(getattr(torch_ops, op), make(cases_of("smoke")[0], DTYPE, DEVICE), (), grads={})
        found[op] = call.args, "" if op in WITHOUT_GRADIENT else next(iter(call.args))
    return found


@pytest.mark.parametrize("how", ("eager", "compiled", "compiled_with_backward"))
def test_first_calls_of_a_process_work(how: str, tmp_path: Path) -> None:
    public = {op for op in OPS if not op.startswith("_")}
    missing = {op for op in public if not op.endswith("_backward")} - _calls().keys()
    assert not missing, f"no small call of {sorted(missing)}; add one to DRAWN of small_calls.py"
    calls = {}
    for op, (args, leaf) in _calls().items():
        cloned = {name: arg.clone() if isinstance(arg, torch.Tensor) else arg for name, arg in args.items()}
        results = getattr(torch_ops, op)(**cloned)
        calls[op] = args, results if isinstance(results, tuple) else (results,), leaf, backends_of(op)[-1]
    file = str(tmp_path / "calls.pt")
    torch.save(calls, file)
    code = FIRST_CALLS.format(file=file, compiled=how != "eager", backward=how == "compiled_with_backward")
    assert run_forked(code) == "right\n"
