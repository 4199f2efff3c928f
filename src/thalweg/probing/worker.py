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
from thalweg.probing.messages import (
    ANSWERS_LABEL,
    ORDERS_LABEL,
    PINGS_LABEL,
    PONGS_LABEL,
    ProbeMessenger,
)

Order = dict[str, Any]
PROBE_LEADER_RANK = 0
ORDER_TIMEOUT_SECONDS = 600.0  # seconds for which others may be measured
PROBE_OVER_ORDER = "over"
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE_PATH = Path("/proc/self/ns/net")


def serve(exchange: ProbeMessenger) -> Any:
    """Until it is over; what rank 0 found."""
    while True:
        order = exchange.receive_json(PROBE_LEADER_RANK, ORDERS_LABEL, ORDER_TIMEOUT_SECONDS)
        if order["do"] == PROBE_OVER_ORDER:
            return order["result"]
        exchange.send_json(PROBE_LEADER_RANK, ANSWERS_LABEL, obey(exchange, order))


def obey(exchange: ProbeMessenger, order: Order) -> Any:
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
        machine, stack = BOOT_ID_PATH.read_text().strip(), str(NETWORK_NAMESPACE_PATH.readlink())
    return {
        "name": socket.gethostname(),
        "machine": machine or socket.gethostname(),
        "stack": stack,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    }


def _ping(exchange: ProbeMessenger, peer: int, pings: int) -> float:
    """Seconds of the fastest round trip: whatever else happens on the hosts only adds to it."""
    least = float("inf")
    ping = np.zeros(1, np.uint8)
    for _ in range(pings):
        start = perf_counter()
        sending = exchange.send(peer, PINGS_LABEL, ping)
        exchange.receive(peer, PONGS_LABEL)
        least = min(least, perf_counter() - start)
        sending.wait(monotonic() + exchange.patience)
    return least


def _echo(exchange: ProbeMessenger, peer: int, pings: int) -> None:
    for _ in range(pings):
        sending = exchange.send(peer, PONGS_LABEL, exchange.receive(peer, PINGS_LABEL))
        sending.wait(monotonic() + exchange.patience)
