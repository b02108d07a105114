"""The attention core in Gluon, for Hopper GPUs."""
