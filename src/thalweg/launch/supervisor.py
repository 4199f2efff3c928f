"""The supervisor of worker processes on this machine.

It forks a process that hosts the store, then the workers, and reads their output and messages until
all have ended. If one fails, the others get `grace` seconds to end by themselves, since they may
report a better reason; then they are killed. However the supervisor ends, by return, error, Ctrl-C
or SIGKILL, no worker survives it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Collection, Sequence
from math import inf
from time import monotonic
from typing import Any

from thalweg.errors import DEBUG_VARIABLE, UsageError, WorkerFailed, ranks_text
from thalweg.launch.launcher_variables import LAUNCHER_VARIABLE
from thalweg.launch.place import HERE, Place
from thalweg.launch.root_cause import root_cause
from thalweg.launch.secret import SECRET_VARIABLE, find_secret, new_secret
from thalweg.launch.worker_group import OnLine, OnMessage, SupervisorHook, WorkerGroup
from thalweg.launch.worker_process import SendMessage, Work, WorkerSpec, program, signals_noted

__all__ = ["SendMessage", "Work", "print_prefixed", "run_command", "run_workers"]


def print_prefixed(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


def ignore(rank: int, message: dict[str, Any]) -> None:
    pass


def run_workers(
    size: int,
    work: Work,
    *,
    timeout: float | None,
    place: Place = HERE,
    director: SupervisorHook | None = None,
    on_message: OnMessage = ignore,
    on_line: OnLine = print_prefixed,
    grace: float = 5.0,
    spare: Collection[int] = (),
    survives: bool = False,
    restarts: int = 0,
    debug: bool | None = None,
) -> list[dict[str, Any]]:
    """Run `work(rank, report)` in `size` forks of this process; the workers' results, by rank.

    If a worker fails that isn't `spare`, all end. With `survives` a killed worker is restarted up
    to `restarts` times instead, and then the others continue. A worker that failed or that
    `director` killed has an empty result. A message with a `step` sets the worker's progress. Times
    are in seconds.
    """
    import torch._dynamo  # once, for all forks; optimizers load it

    def limited(rank: int, report: SendMessage) -> Any:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        log = logging.getLogger("thalweg")
        log.setLevel(log.level or logging.WARNING)  # the caller reports progress itself
        return work(rank, report)

    workers = WorkerGroup(
        size=size,
        place=place,
        returns=True,
        on_message=on_message,
        on_line=on_line,
        director=director,
        spare=spare,
        survives=survives,
        max_restarts=restarts,
    )
    wanted = DEBUG_VARIABLE in os.environ if debug is None else debug
    _supervise(workers, limited, grace, timeout, wanted)
    results: dict[int, dict[str, Any]] = {exit_.rank: exit_.result or {} for exit_ in workers.exits}
    return [results[rank] for rank in range(size)]


def run_command(
    size: int,
    command: Sequence[str],
    *,
    place: Place = HERE,
    on_line: OnLine = print_prefixed,
    grace: float = 5.0,
    timeout: float | None = None,
    keep_going: bool = False,
    restarts: int = 0,
) -> None:
    """Run a program as `size` workers until all have ended; with `keep_going` also if one fails. A
    killed worker is restarted up to `restarts` times; the others continue unless they fail too."""
    if not command or shutil.which(command[0]) is None:
        missing = f"there is no program {command[0]!r}" if command else "no program is named"
        raise UsageError(missing, "name a program or a .py file")
    workers = WorkerGroup(
        size=size,
        place=place,
        returns=False,
        keep_going=keep_going,
        survives=True,
        max_restarts=restarts,
        on_message=ignore,
        on_line=on_line,
    )
    _supervise(workers, program(command), grace, timeout, debug=False)


def _supervise(
    workers: WorkerGroup, work: Work, grace: float, timeout: float | None, debug: bool
) -> None:
    """Start all workers, wait for them, and raise the root cause of a failure."""
    deadline = inf if timeout is None else monotonic() + timeout
    with signals_noted(workers.signals):
        try:
            shared = _environment(workers.size, workers.place.address, workers.host_store())
            workers.start(
                WorkerSpec(entry_point=work, place=workers.place, environment=shared, debug=debug)
            )
            workers.watch(deadline, workers.done)
            overdue = [] if workers.done() else sorted(workers.running)
            if workers.has_failed():
                workers.watch(min(deadline, monotonic() + grace), workers.is_cancelled)
            if signal.SIGINT in workers.signals:
                workers.interrupt(grace)
        finally:
            workers.end(grace)
    if workers.error is not None:
        raise workers.error
    if workers.signals:
        raise KeyboardInterrupt
    if workers.has_failed() or workers.is_lost():
        error = root_cause(
            workers.size, workers.failures, workers.killed, workers.place.label, workers.spare
        )
        workers.print_failures_except(error.problem)
        raise error from None
    if overdue:
        raise WorkerFailed(
            f"{ranks_text(overdue)} didn't finish within {timeout:g} s",
            "allow more time, or find out what they wait for",
        )


def _environment(size: int, address: str, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_VARIABLE: "thalweg",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1",
        "PYTHONUNBUFFERED": "1",  # the output goes through a pipe, and is shown at once
        # No other user can read variables.
        **({} if find_secret(os.environ) else {SECRET_VARIABLE: new_secret()}),
    }
