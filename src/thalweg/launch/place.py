"""The place where the workers of a run are."""

from __future__ import annotations

from collections.abc import Mapping


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
