"""The first call of every op in a process that has only imported the library."""

from pathlib import Path

import pytest
import torch

import torch_ops
from compile_tests.contract.calls import small_calls
from compile_tests.contract.graph import backends_of
from compile_tests.contract.process import run_forked
from torch_ops._core.registry import OPS

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


@pytest.mark.parametrize("how", ("eager", "compiled", "compiled_with_backward"))
def test_first_calls_of_a_process_work(how: str, tmp_path: Path) -> None:
    public = {op for op in OPS if not op.startswith("_")}
    missing = {op for op in public if not op.endswith("_backward")} - small_calls().keys()
    assert not missing, f"no small call of {sorted(missing)}; add one to DRAWN, from cases with the tag smoke"
    calls = {}
    for op, (args, leaf) in small_calls().items():
        cloned = {name: arg.clone() if isinstance(arg, torch.Tensor) else arg for name, arg in args.items()}
        results = getattr(torch_ops, op)(**cloned)
        calls[op] = args, results if isinstance(results, tuple) else (results,), leaf, backends_of(op)[-1]
    file = str(tmp_path / "calls.pt")
    torch.save(calls, file)
    code = FIRST_CALLS.format(file=file, compiled=how != "eager", backward=how == "compiled_with_backward")
    assert run_forked(code) == "right\n"
