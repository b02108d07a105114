"""`python -m torch_ops.bench ...` is `vk bench ...`."""

from torch_ops.bench.app import app

if __name__ == "__main__":
    app(prog_name="vk bench")
