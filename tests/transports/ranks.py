"""Run the same work on every rank of a transport: as threads, or as processes with real sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import numpy as np

from tests.threads import run_threads
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.transports import Address, Array, Label, Transport

KINDS = ("memory", "tcp")
LABEL = Label(0, 0, 0, 1)
PATIENCE = 20.0


def soon() -> float:
    """A deadline that only a hang misses."""
    return monotonic() + PATIENCE


def run_ranks(kind: str, size: int, work: Callable[[Transport], Any]) -> list[Any]:
    """What `work` returned, by rank; nobody leaves before all are done."""
    if kind == "memory":
        results = run_threads(range(size), work)
        return [results[rank] for rank in range(size)]

    def in_process(rank: int, report: SendMessage) -> dict[str, Any]:
        world = World.join(PATIENCE)
        transport = world.transport()
        result = work(transport)
        world.leave(PATIENCE, AbortFlag(world.store, rank))
        transport.close()
        return {"result": result}

    results = run_workers(size, in_process, timeout=60, grace=1, debug=True)
    return [result["result"] for result in results]


def in_a_process(work: Callable[[], Mapping[str, Any] | None]) -> dict[str, Any]:
    """What it returned; threads that it starts end with it."""
    [result] = run_workers(1, lambda rank, report: work(), timeout=60, grace=1, debug=True)
    return result


def next_message(transport: Transport, peer: int, label: Label, deadline: float) -> Array:
    return transport.receive_any([Address(peer, label)], deadline)[1]


def tell(transport: Transport, peer: int, number: int = 0) -> None:
    """A sign for `hear`, beside the messages of a test."""
    transport.send(peer, Label(10**6, number, 0, 1), np.zeros(1), soon()).wait(soon())


def hear(transport: Transport, peer: int, number: int = 0) -> None:
    next_message(transport, peer, Label(10**6, number, 0, 1), soon())
