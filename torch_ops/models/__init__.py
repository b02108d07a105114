"""Encoders and models that run on the ops of this library."""
