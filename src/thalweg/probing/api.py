"""`probe()`: measure the cluster that this worker is part of, together with all other workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from thalweg.catalog import SETTINGS, refuse_retired
from thalweg.errors import PeerFailed, PeerLate, ThalwegError, TransportError, UsageError
from thalweg.facts import Cluster, Duration, read_cluster
from thalweg.members.abort import Alarm
from thalweg.members.world import World
from thalweg.probing.coordinator import Conductor, Effort, conducted
from thalweg.probing.result import Probed
from thalweg.probing.survey import survey

ABOUT_A_HOST = 11  # measurements
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
) -> Probed:
    """As `probe`, with all that is to be said about it."""
    seconds = Duration.parse(timeout).seconds if isinstance(timeout, str) else float(timeout)
    declared = read_cluster(Path(cluster)) if isinstance(cluster, str | Path) else cluster
    world = World.join(seconds)
    alarm, start = world.alarm(), monotonic()

    def counted(done: int) -> None:
        progress(done, max(done + 1, ABOUT_A_HOST * world.size))

    def survey_all(conductor: Conductor) -> dict[str, Any]:
        return survey(conductor, declared, start).packed()

    try:
        if declared is not None and declared.workers != world.size:
            raise UsageError(
                f"the cluster has {declared.workers} workers, and {world.size} were started",
                "start as many as it has, or describe those that were started",
            )
        return Probed.unpacked(conducted(world, alarm, Effort(), survey_all, counted))
    except BaseException as error:
        raise _told(alarm, error) from None


def refuse_other_transports(name: str) -> None:
    refuse_retired(name)
    if name not in SETTINGS["transport"].choices:
        raise UsageError(f"there is no transport {name!r}", "leave it out")


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
