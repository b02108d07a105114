"""Whole vision encoders: contenders, rows, timeline."""
