"""The command line, in a process of its own that needn't load everything anew.

A server loads once what commands load, torch above all, and runs none of it. Every call is a fork
of it, with arguments, folder, environment and output of its own, that ends as a program does.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import random
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

ROOT = Path(__file__).parents[2]
ALSO = ("matplotlib.pyplot", "sklearn.datasets", "torch._dynamo", "typer._adapters")
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
PR_CAPBSET_DROP, CAPABILITY_VERSION_3 = 24, 0x20080522
_SPENT: list[float] = []


def thalweg(
    *arguments: str, cwd: Path | None = None, rights: bool = True
) -> subprocess.CompletedProcess[str]:
    """Without rights it can't make network namespaces, nor can what it starts."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "environment": {k: v for k, v in os.environ.items() if k != "COLUMNS"},
            "files": [str(out), str(err)],
            "rights": rights,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code, seconds = server.stdout.readline().split()
        _SPENT.append(float(seconds))
        return subprocess.CompletedProcess(arguments, int(code), out.read_text(), err.read_text())


def spent_by_commands() -> float:
    """CPU seconds of all calls so far, which are no children of this process."""
    return sum(_SPENT)


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.command"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )

    owner = os.getpid()

    @atexit.register
    def end() -> None:
        if os.getpid() == owner:  # forks run this, too
            server.communicate()

    return server


def _serve() -> None:
    _load()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
            _run()
        _, status, spent = os.wait4(pid, 0)
        seconds = spent.ru_utime + spent.ru_stime
        print(os.waitstatus_to_exitcode(status), seconds, flush=True)


def _run() -> NoReturn:
    """As the console script does; but what was loaded isn't taken apart at the end, which takes
    longer than most commands."""
    from thalweg.cli.main import run

    code = 1
    try:
        run()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load() -> None:
    import thalweg

    for module in pkgutil.walk_packages(thalweg.__path__, "thalweg."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for name in ALSO:
        with suppress(ModuleNotFoundError):
            import_module(name)
    gc.freeze()


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for descriptor, name in enumerate([os.devnull, *request["files"]]):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    # Theirs until the process ends, as an interpreter's own are.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.argv = ["thalweg", *request["arguments"]]
    random.seed()
    np.random.seed()
    if not request["rights"]:
        _drop_rights()


def _drop_rights() -> None:
    """All capabilities of this process (capabilities(7)), and those that a lab needs of whatever
    it will execute."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN):
        assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capset(header, none) == 0


if __name__ == "__main__":
    _serve()
