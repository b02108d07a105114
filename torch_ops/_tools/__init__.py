"""`explain`, `info` and `warmup`: they print plans and decide nothing."""
