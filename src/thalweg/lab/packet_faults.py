"""Packet faults in a host's own namespace: black-hole routes, and bytes that change in transit.

A rule of nftables overwrites bytes of every packet to another host that is longer than
`MAX_UNGARBLED_BYTES`. TCP doesn't notice, since no checksums are verified between virtual
interfaces; a faulty NIC that computes checksums itself has the same effect. Packets to the store
are spared, and so are short packets such as handshakes.
"""

from __future__ import annotations

from contextlib import closing, suppress
from socket import inet_aton
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nftsocket import Cmp, Regs
from pyroute2.nftables.expressions import genex
from pyroute2.nftables.main import NFTables

from thalweg.lab.addressing import SPINE_ADDRESS, Wiring
from thalweg.lab.fabric import Sockets, try_in_own_network
from thalweg.lab.namespaces import inside

GARBLE_TABLE, GARBLE_CHAIN = "garbled", "out"
NFPROTO_IPV4 = 2  # of nftables' families
NF_ACCEPT = 1
NETWORK_HEADER, TRANSPORT_HEADER = 1, 2
MAX_UNGARBLED_BYTES = 700  # the length of an IP packet
# Offsets of fields in an IPv4 header.
TOTAL_LENGTH_OFFSET_BYTES, DESTINATION_OFFSET_BYTES = 2, 16
GARBLE_OFFSET_BYTES = 400  # from the start of the TCP header
GARBLE_PATTERN = b"\xde\xad\xbe\xef"


def set_blackhole(wiring: Wiring, rank: int, peer: int, *, on: bool) -> None:
    """Drop the packets of one rank's host to another's, or stop that. Connections stay open."""
    route = {"dst": f"{wiring.hosts[wiring.cluster.host(peer).name]}/32", "type": "blackhole"}
    with Sockets() as sockets:
        netlink = sockets[wiring.host_of(rank)]
        if on:
            netlink.route("add", **route)
        else:
            with suppress(NetlinkError):  # there is no such route
                netlink.route("del", **route)


def set_garbling(wiring: Wiring, rank: int, *, on: bool) -> None:
    """Overwrite bytes that a rank's host sends to other hosts, or stop that."""
    with inside(wiring.host_of(rank)):
        _garble(on=on)


def can_garble() -> bool:
    """True if this kernel can overwrite bytes of packets."""
    return try_in_own_network(lambda: _garble(on=True)) == 0


def _garble(*, on: bool) -> None:
    with closing(NFTables(nfgen_family=NFPROTO_IPV4)) as rules:
        if on:
            _add_rule(rules)
        else:
            with suppress(NetlinkError):  # there is no such table
                rules.table("del", name=GARBLE_TABLE)


def _add_rule(rules: NFTables) -> None:
    """Add a table with one chain of one rule: overwrite long packets that aren't for the store."""
    rules.table("add", name=GARBLE_TABLE)
    rules.chain(
        "add", table=GARBLE_TABLE, name=GARBLE_CHAIN, hook="output", type="filter", policy=NF_ACCEPT
    )
    not_store = _compare(DESTINATION_OFFSET_BYTES, Cmp.NFT_CMP_NEQ, inet_aton(SPINE_ADDRESS))
    limit = MAX_UNGARBLED_BYTES.to_bytes(2, "big")
    is_long = _compare(TOTAL_LENGTH_OFFSET_BYTES, Cmp.NFT_CMP_GT, limit)
    expressions = [not_store, is_long, _overwrite()]
    rules.rule("add", table=GARBLE_TABLE, chain=GARBLE_CHAIN, expressions=expressions)


def _compare(offset: int, operator: Cmp, value: bytes) -> list[dict[str, Any]]:
    """The expressions that continue a rule if the field at `offset` of the IP header is related to
    `value` as `operator` says."""
    read = {"dreg": 1, "base": NETWORK_HEADER, "offset": offset, "len": len(value)}
    return [
        genex("payload", read),
        genex("cmp", {"sreg": Regs.NFT_REG_1, "op": operator, "data": _data(value)}),
    ]


def _overwrite() -> list[dict[str, Any]]:
    """The expressions that write the pattern into the packet, without a new checksum."""
    length = len(GARBLE_PATTERN)
    write = {"sreg": 1, "base": TRANSPORT_HEADER, "offset": GARBLE_OFFSET_BYTES, "len": length}
    return [
        genex("immediate", {"dreg": 1, "data": _data(GARBLE_PATTERN)}),
        genex("payload", {**write, "csum_type": 0, "csum_offset": 0}),
    ]


def _data(value: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", value)]}
