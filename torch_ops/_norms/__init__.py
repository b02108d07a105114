"""The norm family."""
