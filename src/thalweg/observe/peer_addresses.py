"""The rank behind each address, and the round-trip time to the store.

Every rank publishes the addresses of its host. One that several hosts have, as bridges of
containers do, tells nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import psutil
from torch._C._distributed_c10d import Store

from thalweg.facts import grouped
from thalweg.members.world import World, server_of
from thalweg.transports.tcp_info import ConnectionTraffic, plain


class PeerAddresses:
    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks: dict[str, int] | None = None
        self._store = _endpoint(world.store)

    def publish(self, store: Any) -> None:
        own = [self._world.address, *sorted(own_addresses())]
        store.set(_key(self._world.rank), json.dumps(own))

    def find(self, store: Any) -> None:
        """Read the addresses of all members, once all have published theirs."""
        keys = [_key(rank) for rank in self._world.members]
        if self._ranks is None and store.check(keys):
            texts = zip(self._world.members, store.multi_get(keys), strict=True)
            self._ranks = ranks_by_address({rank: json.loads(text) for rank, text in texts})

    def rank_at(self, address: str) -> int | None:
        """The first rank of the host that has this address."""
        return None if self._ranks is None else self._ranks.get(address)

    def round_trip(self, sent: Sequence[ConnectionTraffic]) -> float:
        """The round-trip time to the store in seconds; 0 without traffic to it."""
        return max((s.round_trip for s in sent if (s.address, s.port) == self._store), default=0.0)


def ranks_by_address(addresses: dict[int, Sequence[str]]) -> dict[str, int]:
    """The rank of each address; a rank's list begins with its published address."""
    ranks = grouped((address, rank) for rank in sorted(addresses) for address in addresses[rank])
    first = {address: using[0] for address, using in ranks.items()}
    unique = {
        address: first[address]
        for address, using in ranks.items()
        if len({frozenset(addresses[rank]) for rank in using}) == 1
    }
    found_at = {own[0]: first[own[0]] for own in addresses.values()}
    return {a: r for a, r in {**unique, **found_at}.items() if not ip_address(a).is_loopback}


def own_addresses() -> frozenset[str]:
    """The addresses of this host in all of its networks."""
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(
        plain(entry.address)
        for interface in psutil.net_if_addrs().values()
        for entry in interface
        if entry.family in families
    )


def _endpoint(store: Store) -> tuple[str, int] | None:
    host, port = server_of(store)
    with suppress(OSError):
        if host is not None and port is not None:
            target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
            return plain(str(target[0])), port
    return None


def _key(rank: int) -> str:
    return f"addresses/{rank}"
