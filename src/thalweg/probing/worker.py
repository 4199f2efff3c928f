"""A worker of the probe: does what rank 0 orders, until told that it is over.

An order is a small message: say who you are, echo pings, send some, send a flow, take one in. Each
is answered with a figure or a description.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from thalweg.probing.flow import receive_flow, send_flow
from thalweg.probing.messages import ANSWERS, ORDERS, PINGS, PONGS, Exchange

Order = dict[str, Any]
LEADER = 0
LONGEST_SILENCE = 600.0  # seconds for which others may be measured
OVER = "over"
BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def serve(exchange: Exchange) -> Any:
    """Until it is over; what rank 0 found."""
    while True:
        order = exchange.hear(LEADER, ORDERS, LONGEST_SILENCE)
        if order["do"] == OVER:
            return order["result"]
        exchange.tell(LEADER, ANSWERS, obey(exchange, order))


def obey(exchange: Exchange, order: Order) -> Any:
    """What was asked for; None if it was nothing."""
    match order["do"]:
        case "introduce":
            return introduction()
        case "ping":
            return _ping(exchange, order["peer"], order["pings"])
        case "echo":
            return _echo(exchange, order["peer"], order["pings"])
        case "send":
            return send_flow(exchange, order["peer"], order["seconds"])
        case _:
            return receive_flow(exchange, order["peer"], order["seconds"])


def introduction() -> dict[str, Any]:
    """This process's host: ranks with the same name, machine and network stack are on one, and no
    network is between them. Hosts on one machine (containers, a lab) share its cores."""
    machine = stack = ""
    with suppress(OSError):
        machine, stack = BOOT.read_text().strip(), str(NETWORK.readlink())
    return {
        "name": socket.gethostname(),
        "machine": machine or socket.gethostname(),
        "stack": stack,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    }


def _ping(exchange: Exchange, peer: int, pings: int) -> float:
    """Seconds of the fastest round trip: whatever else happens on the hosts only adds to it."""
    least = float("inf")
    ping = np.zeros(1, np.uint8)
    for _ in range(pings):
        start = perf_counter()
        sending = exchange.send(peer, PINGS, ping)
        exchange.receive(peer, PONGS)
        least = min(least, perf_counter() - start)
        sending.wait(monotonic() + exchange.patience)
    return least


def _echo(exchange: Exchange, peer: int, pings: int) -> None:
    for _ in range(pings):
        sending = exchange.send(peer, PONGS, exchange.receive(peer, PINGS))
        sending.wait(monotonic() + exchange.patience)
