"""`python -m torch_ops.bench ...` is `vk bench ...`."""

import sys

from torch_ops.command.app import app

if __name__ == "__main__":
    app(args=["bench", *sys.argv[1:]], prog_name="vk")
