"""Other libraries' kernels, called as ours are."""
