"""The kernels of vk, in Triton. Nothing here imports torch or reads the environment."""
