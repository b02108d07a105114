"""Measuring: correctness check, timing, records, tuning."""
