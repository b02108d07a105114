"""The `vk` command by its old path, for one release: `torch_ops.command.app`."""

from torch_ops.command.app import app, main

__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
