"""The one attention core. `portable_fwd` and `portable_bwd` are stock Triton and run on every GPU."""
