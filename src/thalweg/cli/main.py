"""The `thalweg` command: where commands are listed, and errors become one line."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import thalweg
from thalweg.cli import demo, explain
from thalweg.errors import ThalwegError

UsageMistake: type[Exception] = typer.BadParameter.__bases__[0]
"""The parser's base of all wrong usage, which typer doesn't export by name."""

app = typer.Typer(
    name="thalweg",
    help="Distributed training as fast as the network at hand allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("explain")(explain.command)
app.command("demo")(demo.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thalweg {thalweg.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


def run() -> None:
    """Entry point: 0 fine, 1 a check or a run failed, 2 bad usage or it can't run here."""
    arguments = sys.argv[1:]
    debug = _take_debug(arguments)
    try:
        result = app(arguments, prog_name="thalweg", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except ThalwegError as error:
        code = error.exit_code
        _say(str(error), debug)
    except UsageMistake as error:
        code = 2
        _say(f"{_message(error)}; see {_help_of(error)}", debug)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
        _say("interrupted; nothing was left running", debug=False)
    except BrokenPipeError:  # the reader of a pipe has gone: nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _take_debug(arguments: list[str]) -> bool:
    """`--debug` serves anywhere before a `--`."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--debug" not in ours:
        return False
    arguments.remove("--debug")
    return True


def _say(message: str, debug: bool) -> None:
    if debug:
        raise
    one_line = " ".join(message.split())
    print(f"thalweg: {one_line}", file=sys.stderr)


def _message(error: Exception) -> str:
    text: str = error.format_message() if hasattr(error, "format_message") else str(error)
    return text.rstrip(".")


def _help_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"`{context.command_path} --help`" if context else "`thalweg --help`"
