"""Choice of configs: measured rows, one rule file for each family of kernels, and `pick`."""
