"""Where the workers of a run are, and what may happen to them there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol


class Place:
    """This machine, all workers side by side. The lab is another place."""

    @property
    def address(self) -> str:
        """Where the store listens."""
        return "127.0.0.1"

    def enter(self, rank: int | None) -> None:
        """Called first in a worker's process, and with None in the store's."""

    def environment(self, rank: int) -> Mapping[str, str]:
        """What this worker is told beyond what all are."""
        return {"LOCAL_RANK": str(rank)}

    def label(self, rank: int) -> str:
        """A worker's name in errors."""
        return f"rank {rank}"


HERE = Place()


class WorkerControl(Protocol):
    """What a director may ask and do of the workers of a run. What it ends is no failure."""

    @property
    def running(self) -> Collection[int]: ...

    @property
    def steps(self) -> Mapping[int, int]:
        """The last step that each rank reported."""
        ...

    def kill(self, rank: int) -> None: ...

    def restart(self, rank: int) -> None:
        """Start it anew, and end it before if it lives."""
        ...

    def pause(self, rank: int) -> None: ...

    def resume(self, rank: int) -> None: ...

    def kill_store(self) -> None:
        """Its host's process; the supervisor starts another."""
        ...


class SupervisorHook(Protocol):
    """Makes things happen while workers run."""

    def prepare(self) -> None:
        """Called before any starts."""
        ...

    def poll(self, workers: WorkerControl) -> None:
        """Called whenever something was heard of them, and many times a second."""
        ...
