"""What ranks tell each other in the run's own store, as JSON; every wait has a deadline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Any

from thalweg.members.world import World

MIN_BOARD_POLL_SECONDS, MAX_BOARD_POLL_SECONDS = 0.002, 0.05  # seconds between two looks


class StoreExchange:
    """RunError if the store is gone."""

    def __init__(self, world: World) -> None:
        self._store_client = world.namespace("doctor").store_client

    def put(self, key: str, content: Any) -> None:
        self._store_client.call(lambda store: store.set(key, json.dumps(content)))

    def get(self, key: str, deadline: float) -> Any | None:
        """None if it isn't there in time."""
        found = self.gather([key], deadline)
        return found.get(key)

    def gather(
        self,
        keys: Iterable[str],
        deadline: float,
        counted: Callable[[int], None] = lambda number: None,
    ) -> dict[str, Any]:
        """What is there of these by the deadline; at once if all of it is."""
        missing = list(keys)
        found: dict[str, Any] = {}
        pause = MIN_BOARD_POLL_SECONDS
        while missing:
            there = self._present(missing)
            found |= self._read(there)
            missing = [key for key in missing if key not in found]
            counted(len(found))
            if not missing or monotonic() >= deadline:
                break
            pause = MIN_BOARD_POLL_SECONDS if there else min(2 * pause, MAX_BOARD_POLL_SECONDS)
            sleep(min(pause, max(0.0, deadline - monotonic())))
        return found

    def _read(self, keys: list[str]) -> dict[str, Any]:
        texts = self._store_client.call(lambda store: [store.get(key) for key in keys])
        return {key: json.loads(text) for key, text in zip(keys, texts, strict=True)}

    def _present(self, keys: list[str]) -> list[str]:
        return self._store_client.call(lambda store: [key for key in keys if store.check([key])])
