"""Where the workers of a run are: on this machine, or in a lab.

The supervisor forks the processes of the store and of the workers on this machine either way. They
differ in the network namespace that they enter and in their environment: here all share the host's
network, and in a lab (`lab.lab.LabPlace`) each worker has the namespace of its emulated host.
"""

from __future__ import annotations

from collections.abc import Mapping


class Place:
    """All workers on this machine; a subclass for another place overrides what differs."""

    @property
    def address(self) -> str:
        """The address at which the store listens and workers reach it."""
        return "127.0.0.1"

    def enter(self, rank: int | None) -> None:
        """Prepare the process that calls this: a forked worker of this rank before its work, or
        with None the forked store before it listens. Nothing to do here."""

    def environment(self, rank: int) -> Mapping[str, str]:
        """The environment variables of this worker beyond those of all workers."""
        return {"LOCAL_RANK": str(rank)}

    def label(self, rank: int) -> str:
        """The name of a worker in errors."""
        return f"rank {rank}"


HERE = Place()
