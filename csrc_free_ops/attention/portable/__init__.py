"""The attention core in portable Triton, for every GPU."""
