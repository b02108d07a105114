"""Whole vision encoders: implementations, rows, timeline."""
