"""The attention family: from tensors and options to launches of its kernels."""
