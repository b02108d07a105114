"""Pure pieces that kernels share: a piece enters when two kernels use it unchanged."""
