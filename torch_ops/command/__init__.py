"""The `vk` command."""
