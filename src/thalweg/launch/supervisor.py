"""Workers in processes of their own, under one small supervisor.

The supervisor forks a process that hosts the store, then the workers, and reads their output and
messages until all have ended. If one fails, the others get `grace` seconds to end by themselves,
since they may know a better reason; then they are ended. However the supervisor leaves, by return,
error, Ctrl-C or SIGKILL, no worker stays behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Any

from thalweg.errors import DEBUG_VARIABLE, UsageError, WorkerFailed
from thalweg.launch.place import HERE, Director, Place
from thalweg.launch.rank_assignment import LAUNCHER_VARIABLE
from thalweg.launch.root_cause import verdict
from thalweg.launch.secret import SECRET_VARIABLE, find_secret, new_secret
from thalweg.launch.worker_group import Crew, OnLine, OnMessage
from thalweg.launch.worker_process import Job, Report, Work, program

__all__ = ["Report", "Work", "print_prefixed", "run_command", "run_workers"]


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
    director: Director | None = None,
    on_message: OnMessage = ignore,
    on_line: OnLine = print_prefixed,
    grace: float = 5.0,
    spare: Collection[int] = (),
    survives: bool = False,
    restarts: int = 0,
    debug: bool | None = None,
) -> list[dict[str, Any]]:
    """Run `work(rank, report)` in `size` forks of this process; every worker's result, by rank.

    If a worker fails that isn't `spare`, all end; with `survives` not if it is killed, and then it
    is started again up to `restarts` times. The result of one that failed and that the others did
    without is empty, as is that of one that a director killed. A message with a `step` in it also
    tells how far that worker is. Times are in seconds.
    """
    import torch._dynamo  # once, for all forks; optimizers load it

    def limited(rank: int, report: Report) -> Any:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        log = logging.getLogger("thalweg")
        log.setLevel(log.level or logging.WARNING)  # who forks has its own way of telling
        return work(rank, report)

    crew = Crew(
        size=size,
        place=place,
        returns=True,
        on_message=on_message,
        on_line=on_line,
        director=director,
        spare=spare,
        survives=survives,
        restarts=restarts,
    )
    wanted = DEBUG_VARIABLE in os.environ if debug is None else debug
    _supervise(crew, limited, grace, timeout, wanted)
    results: dict[int, dict[str, Any]] = {end.rank: end.result or {} for end in crew.ends}
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
    """Run a program as `size` workers, until all have ended; with `keep_going` also if one
    fails. One that is killed is started again up to `restarts` times; the others go on, unless they
    fail too."""
    if not command or shutil.which(command[0]) is None:
        missing = f"there is no program {command[0]!r}" if command else "no program is named"
        raise UsageError(missing, "name a program or a .py file")
    crew = Crew(
        size=size,
        place=place,
        returns=False,
        keep_going=keep_going,
        survives=True,
        restarts=restarts,
        on_message=ignore,
        on_line=on_line,
    )
    _supervise(crew, program(command), grace, timeout, debug=False)


def _supervise(crew: Crew, work: Work, grace: float, timeout: float | None, debug: bool) -> None:
    """Start all, wait for all, and raise what went wrong."""
    deadline = None if timeout is None else monotonic() + timeout
    with crew.keeping_signals():
        try:
            shared = _environment(crew.size, crew.place.address, crew.host_store())
            crew.start(Job(work=work, place=crew.place, environment=shared, debug=debug))
            crew.watch(deadline, crew.done)
            overdue = [] if crew.done() else sorted(crew.living)
            if crew.has_failed():
                crew.watch(_earlier(deadline, monotonic() + grace), crew.called_off)
            if signal.SIGINT in crew.signals:
                crew.interrupt(grace)
        finally:
            crew.end(grace)
    if crew.broken is not None:
        raise crew.broken
    if crew.signals:
        raise KeyboardInterrupt
    if crew.has_failed() or crew.is_lost():
        why = verdict(crew.size, crew.failures, crew.killed, crew.place.called, crew.spare)
        crew.tell_all_but(why.problem)
        raise why from None
    if overdue:
        raise WorkerFailed(
            f"ranks {overdue} weren't done after {timeout:g} s",
            "allow more time, or look at what they wait for",
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
        "PYTHONUNBUFFERED": "1",  # a pipe isn't a terminal, but somebody is watching
        **_secret(os.environ),
    }


def _secret(environment: Mapping[str, str]) -> dict[str, str]:
    """One for this job alone, if none was given: by the environment, which no other user sees."""
    return {} if find_secret(environment) else {SECRET_VARIABLE: new_secret()}


def _earlier(deadline: float | None, other: float) -> float:
    return other if deadline is None else min(deadline, other)
