"""Black holes: what one host sends to one other is lost, and nothing else is.

By a route in the sender's own namespace. Connections that are there stay, and hear nothing.
"""

from __future__ import annotations

from contextlib import suppress

from pyroute2.netlink.exceptions import NetlinkError

from thalweg.lab.fabric import Sockets
from thalweg.lab.wiring import Wiring


def dig(wiring: Wiring, rank: int, peer: int) -> None:
    """From this rank's host to that one's."""
    with Sockets() as sockets:
        sockets[wiring.host_of(rank)].route("add", **_route(wiring, peer))


def fill(wiring: Wiring, rank: int, peer: int) -> None:
    with Sockets() as sockets, suppress(NetlinkError):
        sockets[wiring.host_of(rank)].route("del", **_route(wiring, peer))


def _route(wiring: Wiring, peer: int) -> dict[str, str]:
    address = wiring.address(wiring.cluster.host(peer).name)
    return {"dst": f"{address}/32", "type": "blackhole"}
