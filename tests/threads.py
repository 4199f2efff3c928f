"""A group of ranks as threads of one process: schedules run for real, with real waiting, and no
network."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from thalweg.errors import TransportClosed
from thalweg.transports import MemoryNetwork, Transport

T = TypeVar("T")


def run_threads(ranks: Collection[int], work: Callable[[Transport], T]) -> dict[int, T]:
    """What `work` returned on every rank. If one fails, the others stop waiting and its error is
    raised."""
    network = MemoryNetwork(ranks)

    def guarded(rank: int) -> T:
        try:
            return work(network.transport(rank))
        except BaseException:
            for other in ranks:
                network.transport(other).close()
            raise

    with ThreadPoolExecutor(len(ranks), thread_name_prefix="rank") as pool:
        futures = {rank: pool.submit(guarded, rank) for rank in ranks}
        failed = [e for f in futures.values() if (e := f.exception()) is not None]
    first_cause = [e for e in failed if not isinstance(e, TransportClosed)] or failed
    if first_cause:
        raise first_cause[0]
    return {rank: future.result() for rank, future in futures.items()}
