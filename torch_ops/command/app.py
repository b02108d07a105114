"""The ``vk`` command: ``vk encode``, ``vk info``, ``vk bench``.

Results go to stdout, progress and errors to stderr. Whatever a user can get wrong costs one line
and exit code 2; only a defect of ours shows a traceback.
"""

import importlib
import json
from typing import Annotated, Any

import typer
from rich.table import Table

import torch_ops
from torch_ops.command.encode import encode
from torch_ops.command.errors import OneLineErrors
from torch_ops.command.report import lines_as_they_are, stdout_console

app = typer.Typer(
    cls=OneLineErrors,
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
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything: schemas, settings and rows of each kernel.")
    ] = False,
) -> None:
    """Versions, devices, paths, launch rows and the number of ops of this machine."""
    report = torch_ops.info()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    if everything:
        report["ops"] = list(report["ops"].values())  # the schemas, which hold the names
    else:
        report = _in_short(report)
    console = stdout_console(400)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section, value in report.items():
        table.add_row(section.replace("_", " "), lines_as_they_are(_cell(value)))
    console.print(table)


def _in_short(report: dict[str, Any]) -> dict[str, str]:
    """Five lines."""
    devices = [f"{each['name']}, {each['memory_gib']} GiB" for each in report["devices"]]
    rows = report["rows"]
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + "".join(f"; {each} was not yet run on a GPU" for each in report["not_run_on_a_gpu"]),
        "devices": "; ".join(devices) or f"CPU{', in the interpreter' * report['interpreter']}",
        "paths": ", ".join(f"{name}: {answer}" for name, answer in report["paths"].items())
        or "the CPU reference alone",
        "launch rows": f"{rows['shipped']} shipped, {rows['user']} of the user's; {rows['source']}",
        "ops": f"{len(report['ops'])}, listed by vk info --all",
    }


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Time ops next to their baselines, profile them, make tables of results: vk bench --help."""
    # Imported here: nothing else needs it.
    importlib.import_module("torch_ops.bench").app(args=context.args, prog_name="vk bench")


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
