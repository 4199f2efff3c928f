"""`probe()`: measure the cluster that this worker is part of, together with all other workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from thalweg.catalog import SETTING_PARAMETERS, refuse_retired
from thalweg.errors import PeerFailed, PeerLate, ThalwegError, TransportError, UsageError
from thalweg.facts import Cluster, Duration, read_cluster
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.probing.coordinator import Effort, ProbeCoordinator, run_coordinated
from thalweg.probing.result import ProbeResult
from thalweg.probing.survey import survey

MEASUREMENTS_PER_HOST = 11  # measurements
Progress = Callable[[int, int], None]
"""Called with how many measurements are done, and about how many there will be."""


def probe(
    cluster: Cluster | str | Path | None = None,
    *,
    transport: str = "tcp",
    timeout: str | float = "30s",
) -> Cluster:
    """The cluster as all workers together measure it; every rank gets the same.

    cluster    racks that are known already (a `Cluster` or its file): they are kept, with what was
               measured about them
    transport  over which to measure: the one that there is
    timeout    how long to wait for another worker beyond what a measurement takes

    Under torchrun, `thalweg run` and other launchers, or after init_process_group. `measure` gives
    all that was found, not only the cluster.
    """
    refuse_other_transports(transport)
    return measure(cluster, timeout=timeout).cluster


def measure(
    cluster: Cluster | str | Path | None = None,
    *,
    timeout: str | float = "30s",
    progress: Progress = lambda done, total: None,
) -> ProbeResult:
    """As `probe`, with all that is to be said about it."""
    seconds = Duration.parse(timeout).seconds if isinstance(timeout, str) else float(timeout)
    declared = read_cluster(Path(cluster)) if isinstance(cluster, str | Path) else cluster
    world = World.join(seconds)
    abort_flag, start = world.abort_flag(), monotonic()

    def counted(done: int) -> None:
        progress(done, max(done + 1, MEASUREMENTS_PER_HOST * world.size))

    def survey_all(conductor: ProbeCoordinator) -> dict[str, Any]:
        return survey(conductor, declared, start).packed()

    try:
        if declared is not None and declared.workers != world.size:
            raise UsageError(
                f"the cluster has {declared.workers} workers, and {world.size} were started",
                "start as many as it has, or describe those that were started",
            )
        return ProbeResult.unpacked(
            run_coordinated(world, abort_flag, Effort(), survey_all, counted)
        )
    except BaseException as error:
        raise _first_cause(abort_flag, error) from None


def refuse_other_transports(name: str) -> None:
    refuse_retired(name)
    if name not in SETTING_PARAMETERS["transport"].choices:
        raise UsageError(f"there is no transport {name!r}", "leave it out")


def _first_cause(abort_flag: AbortFlag, error: BaseException) -> BaseException:
    """Sound the alarm; the first cause, if another rank has told it."""
    if isinstance(error, PeerLate):
        abort_flag.raise_for_late_peer(error)
    elif isinstance(error, ThalwegError) and not isinstance(error, PeerFailed):
        abort_flag.raise_flag(error.problem)
    elif not isinstance(error, ThalwegError):
        abort_flag.raise_flag(f"{type(error).__name__}: {error}")
    abort = abort_flag.poll() if isinstance(error, TransportError) else None
    return abort or error
