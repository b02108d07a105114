"""The attention core in stock Triton, for every GPU."""
