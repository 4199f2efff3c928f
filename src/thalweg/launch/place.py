"""The place where the workers of a run are, and the interfaces that control them there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol


class Place:
    """The base class: this machine with all workers. The lab is another place."""

    @property
    def address(self) -> str:
        """The address at which the store listens."""
        return "127.0.0.1"

    def enter(self, rank: int | None) -> None:
        """Prepare a new worker process, or with None the store's."""

    def environment(self, rank: int) -> Mapping[str, str]:
        """The environment variables of this worker beyond those of all workers."""
        return {"LOCAL_RANK": str(rank)}

    def label(self, rank: int) -> str:
        """The name of a worker in errors."""
        return f"rank {rank}"


HERE = Place()


class WorkerControl(Protocol):
    """Control of a run's workers for a hook. A worker that the hook kills is no failure."""

    @property
    def running(self) -> Collection[int]: ...

    @property
    def steps(self) -> Mapping[int, int]:
        """The last step that each rank reported."""
        ...

    def kill(self, rank: int) -> None: ...

    def restart(self, rank: int) -> None:
        """Start this worker again, after killing it if it runs."""
        ...

    def pause(self, rank: int) -> None: ...

    def resume(self, rank: int) -> None: ...

    def kill_store(self) -> None:
        """Kill the store's process; the supervisor starts another."""
        ...


class SupervisorHook(Protocol):
    """A hook that the supervisor calls, for example to inject events."""

    def prepare(self) -> None:
        """Prepare, before any worker starts."""
        ...

    def poll(self, workers: WorkerControl) -> None:
        """React to the workers, after each of their messages and many times a second."""
        ...
