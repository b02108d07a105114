"""The `vk` console script. It lies outside `torch_ops`, whose import may be refused: by a version or by a variable."""

import sys


def main() -> None:
    """Run `vk`. A refused import costs one line and exit code 2."""
    try:
        from torch_ops.command.app import main as run
    except (ImportError, OSError, ValueError) as error:
        print("vk:", " ".join(str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
