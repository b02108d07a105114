"""The testing kit: named cases, one reference per op, the tolerance rule. Importable, and needs no pytest.

    from torch_ops.testing import cases, check, poisoned, references

Use it for your own ops too: run the op, the reference in the op's dtype and the reference in fp64, and `check` them.
For a case with few numbers, use `check_draws` of `redrawn` inputs.
"""

from torch_ops.testing.poison import poisoned
from torch_ops.testing.redraw import redrawn
from torch_ops.testing.tolerance import Report, assert_close_to_reference, check, check_draws, compare, compare_draws

__all__ = [
    "Report",
    "assert_close_to_reference",
    "check",
    "check_draws",
    "compare",
    "compare_draws",
    "poisoned",
    "redrawn",
]
