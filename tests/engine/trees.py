"""Relays of all ranks of a coded tree in one process, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from tests.running import DOUBLE, contributions, tree_schedule
from thalweg.codes import Allocation
from thalweg.engine.tree_relay import Relay, join_tree
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.transports import Array
from thalweg.transports.store_client import StoreClient

T = TypeVar("T")
ELEMENTS = 50
PATIENCE = 30.0  # seconds, which only a hang takes


class Ranks:
    """`relays` by rank; `inputs` are what each contributes, times the step's number plus one."""

    def __init__(self, allocation: Allocation, beyond: str = "wait", first: int = 0) -> None:
        self.allocation = allocation
        self.first = first
        self.store = dist.HashStore()
        self.beyond = beyond
        cells = np.random.default_rng(0).integers(-99, 99, (allocation.cells, ELEMENTS))
        self.total = cells.sum(axis=0).astype(float)
        self.inputs = contributions(allocation, cells.astype(float))
        self.relays: dict[int, Relay] = {}

    def join(self, rank: int) -> Relay:
        """Also again, after its relay was closed."""
        size = len(self.allocation.ranks)
        world = World(
            rank=rank,
            size=size,
            members=tuple(range(size)),
            store=self.store,
            store_client=StoreClient(self.store, rank),
            address="127.0.0.1",
            timeout=PATIENCE,
            name="run/1",
            rank_assignment=None,
        )
        self.relays[rank] = join_tree(
            world,
            AbortFlag(self.store, rank, world.members),
            self.allocation,
            [tree_schedule(self.allocation, ELEMENTS)],
            [DOUBLE],
            beyond=self.beyond,
            first=self.first,
        )
        return self.relays[rank]

    def lost(self, rank: int) -> list[int]:
        """Those below whom it knows to be gone."""
        relay = self.relays[rank]
        return [peer for peer in relay._below if peer not in relay.present()]

    def contribute(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.relays[rank].contribute(step, 0, self.inputs[rank] * (step + 1))

    def expected(self, step: int) -> Array:
        return self.total * (step + 1)

    def assert_result(self, step: int, *ranks: int) -> None:
        """All of these have it, or get it, and it is exact."""
        for rank in ranks or self.relays:
            results = self.relays[rank].result(step)
            assert results is not None, (step, rank)
            assert results.covered == 0
            np.testing.assert_array_equal(
                np.concatenate(results.arrays), self.expected(step), strict=True
            )


@contextmanager
def ranks(allocation: Allocation, beyond: str = "wait", first: int = 0) -> Iterator[Ranks]:
    """All have met."""
    everybody = Ranks(allocation, beyond, first)
    try:
        at_once(everybody.join, allocation.ranks)
        yield everybody
    finally:
        at_once(lambda relay: relay.close(), list(everybody.relays.values()))


def at_once(work: Callable[[T], object], items: list[T] | tuple[T, ...]) -> None:
    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(work, items))
