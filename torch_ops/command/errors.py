"""The Typer group of `vk` and of its benchmark: an error of use costs one line on stderr, a defect a traceback."""

import re
import sys
from typing import Any

import typer
from typer.core import TyperGroup


def on_one_line(text: object) -> str:
    """A name or a message as it is, but for what breaks a line, drives a terminal or cannot be encoded.

    These characters are shown as Python would write them: a file's name may hold any.
    """
    return re.sub("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", _escaped, str(text))


def on_lines(text: str) -> str:
    """A text of several lines, each as `on_one_line` shows it."""
    return "\n".join(map(on_one_line, text.split("\n")))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class OneLineErrors(TyperGroup):
    """Prints every error of use, Typer's and ours, as one line on stderr."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(130)
        except Exception as error:
            # Typer's errors of use have this method too, whichever click it stands on.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            context = getattr(error, "ctx", None)
            hint = f" See '{context.command_path} --help'." if context is not None else ""
            typer.echo(on_one_line(f"vk: {message()}{hint}"), err=True)
            sys.exit(getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)
