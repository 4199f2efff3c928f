"""The `thalweg` command: its list of commands, and its errors in one line."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer

import thalweg
from thalweg.cli import (
    bench,
    chaos,
    demo,
    explain,
    lab,
    measure,
    predict,
    report,
    studies,
    train,
)
from thalweg.cli.options import option
from thalweg.errors import DEBUG_VARIABLE, INTERRUPTED_EXIT_CODE, ThalwegError

WRITE_FAILURE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
UsageMistake: Any = typer.BadParameter.__bases__[0]
"""The parser's base class of usage errors, which typer doesn't export by name."""

app = typer.Typer(
    name="thalweg",
    help="Distributed training as fast as the network at hand allows.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    predict.advise,
    predict.simulate,
    explain.explain,
    explain.plans,
    demo.demo,
    measure.doctor,
    measure.probe,
    measure.calibrate,
    train.train,
    report.report,
    train.verify,
    chaos.chaos,
):
    app.command()(command)
app.command("run", context_settings={"allow_interspersed_args": False})(train.run)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.add_typer(studies.app, name="study")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thalweg {thalweg.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        option("Print the version.", None, "--version", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, option("Show tracebacks of errors.", None, "--debug")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """The entry point. Exit codes: 0 success, 1 a check or a run failed, 2 usage error or unable to
    run here."""
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    arguments = sys.argv[1:]
    debug = _take_debug(arguments)
    code = 0
    try:
        result = app(arguments, prog_name="thalweg", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except ThalwegError as error:
        code = error.exit_code
        _print_error(str(error), debug)
    except UsageMistake as error:
        code = 2
        _print_error(_usage_text(error), debug)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # the reader closed the pipe
        _drop_output()
    except OSError as error:
        code = 1
        if error.errno in WRITE_FAILURE_ERRNOS:
            _print_error(
                f"can't write the output: {error.strerror}; make room or write elsewhere", debug
            )
            _drop_output()
        else:
            where = f"{error.filename}: " if error.filename else ""
            _print_error(f"{where}{error.strerror or error}; run with --debug to see where", debug)
    if code == INTERRUPTED_EXIT_CODE:
        print("thalweg: interrupted; nothing was left running", file=sys.stderr)
    sys.exit(code)


def _drop_output() -> None:
    """Discard all further output, including the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _take_debug(arguments: list[str]) -> bool:
    """True if `--debug` stands before a `--` or the script of `thalweg run`; it is removed."""
    theirs = (i for i, word in enumerate(arguments) if word == "--" or word.endswith(".py"))
    if "--debug" not in arguments[: next(theirs, len(arguments))]:
        return False
    arguments.remove("--debug")
    os.environ[DEBUG_VARIABLE] = "1"  # for workers
    return True


def _print_error(message: str, debug: bool) -> None:
    if debug:
        raise
    one_line = " ".join(message.split())
    print(f"thalweg: {one_line}", file=sys.stderr)


def _usage_text(error: typer.BadParameter) -> str:
    """The message of a usage error, and which help to read."""
    path = error.ctx.command_path if error.ctx else "thalweg"
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    return f"{message}; see `{path} --help`"
