"""`probe()`: measure the cluster that this worker is part of, together with all other workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from thalweg.catalog import SETTINGS, refuse_retired
from thalweg.errors import PeerFailed, PeerLate, ThalwegError, TransportError, UsageError
from thalweg.facts import Cluster, Duration, read_cluster
from thalweg.probing.conductor import Conductor, Effort
from thalweg.probing.exchange import Exchange
from thalweg.probing.result import Probed
from thalweg.probing.survey import survey
from thalweg.probing.worker import LEADER, serve
from thalweg.runtime import Alarm, World

ABOUT_A_HOST = 11  # measurements
Progress = Callable[[int, int], None]
"""Called with how many measurements are done, and about how many there will be."""


def silent(done: int, total: int) -> None:
    pass


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
    effort: Effort | None = None,
    progress: Progress = silent,
) -> Probed:
    """As `probe`, with all that is to be said about it."""
    seconds = Duration.parse(timeout).seconds if isinstance(timeout, str) else float(timeout)
    declared = cluster if cluster is None or isinstance(cluster, Cluster) else _read(cluster)
    world = World.join(seconds)
    alarm = world.alarm()
    try:
        return _together(world, alarm, declared, seconds, effort or Effort(), progress)
    except BaseException as error:
        raise _told(alarm, error) from None


def refuse_other_transports(name: str) -> None:
    refuse_retired(name)
    if name not in SETTINGS["transport"].choices:
        raise UsageError(f"there is no transport {name!r}", "leave it out")


def _together(
    world: World,
    alarm: Alarm,
    declared: Cluster | None,
    seconds: float,
    effort: Effort,
    progress: Progress,
) -> Probed:
    if declared is not None and declared.workers != world.size:
        raise UsageError(
            f"the cluster has {declared.workers} workers, and {world.size} were started",
            "start as many as it has, or describe those that were started",
        )
    line = world.transport()
    try:
        exchange = Exchange(line, alarm, seconds)
        if world.rank != LEADER:
            found = serve(exchange)
        else:
            start = monotonic()

            def counted(done: int) -> None:
                progress(done, max(done + 1, ABOUT_A_HOST * world.size))

            conductor = Conductor(exchange, world.size, effort, counted)
            found = survey(conductor, declared, start).packed()
            conductor.end(found)
        world.part(seconds, alarm)
    finally:
        line.close()
    return Probed.unpacked(found)


def _read(path: str | Path) -> Cluster:
    return read_cluster(Path(path))


def _told(alarm: Alarm, error: BaseException) -> BaseException:
    """Sound the alarm; the first cause, if another rank has told it."""
    if isinstance(error, PeerLate):
        alarm.sound_lateness(error)
    elif isinstance(error, ThalwegError) and not isinstance(error, PeerFailed):
        alarm.sound(error.problem)
    elif not isinstance(error, ThalwegError):
        alarm.sound(f"{type(error).__name__}: {error}")
    heard = alarm.heard() if isinstance(error, TransportError) else None
    return heard or error
