"""The ``vk`` command: ``vk encode``, ``vk info``, ``vk bench``.

Results go to stdout, progress and errors to stderr. Whatever a user can get wrong costs one line
and exit code 2; only a defect of ours shows a traceback.
"""

import importlib
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

import torch_ops
from torch_ops.command.encode import encode


class _OneLineErrors(TyperGroup):
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
            typer.echo(f"vk: {' '.join(message().split())}{hint}", err=True)
            sys.exit(getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
app.command()(encode)


@app.callback(invoke_without_command=True)
def vk(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """PyTorch operators written in Triton: encode images, look at this machine, measure."""
    if version:
        typer.echo(f"vk {torch_ops.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices, registered ops, and which launch rows apply here."""
    report = torch_ops.info()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    report["ops"] = list(report["ops"].values())  # the schemas, which hold the names
    for section, value in report.items():
        table.add_row(section.replace("_", " "), _cell(value))
    console.print(table)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Time ops next to their peers, profile them, make tables of results: vk bench --help."""
    # Imported here: nothing else needs it.
    application = importlib.import_module("torch_ops.bench").app
    command = typer.main.get_command(application)
    code = command.main(args=context.args, prog_name="vk bench", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} {_cell(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return "\n".join(map(_cell, value)) or "none"
    words = {None: "none", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def main() -> None:
    """The console script's entry point."""
    app()


if __name__ == "__main__":
    main()
