"""The benchmark of each op: its cases, baselines and calls."""
