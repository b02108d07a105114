"""The commands of `vk bench`."""
