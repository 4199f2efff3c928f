"""Bytes that change on their way: some of every longer packet that a host sends to another one.

By a rule of nftables in the sender's own namespace. TCP doesn't notice: between virtual interfaces
nobody verifies its checksums, as behind a faulty NIC that computes them itself. What goes to the
store is spared, and so are short packets, of which handshakes are made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from socket import inet_aton
from typing import Any, NoReturn

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nftsocket import Cmp, Regs
from pyroute2.nftables.expressions import genex
from pyroute2.nftables.main import NFTables

from thalweg.lab.addressing import SPINE_ADDRESS, Wiring
from thalweg.lab.fabric import CLONE_NEWNET
from thalweg.lab.namespaces import inside
from thalweg.launch.worker_process import fork

GARBLE_TABLE, GARBLE_CHAIN = "garbled", "out"
NFPROTO_IPV4 = 2  # of nftables' families
NF_ACCEPT = 1
NETWORK_HEADER, TRANSPORT_HEADER = 1, 2
MAX_UNGARBLED_BYTES = 700  # bytes
GARBLE_OFFSET_BYTES, GARBLE_PATTERN = (
    400,
    b"\xde\xad\xbe\xef",
)  # behind the start of TCP's header, and what is put there


def begin(wiring: Wiring, rank: int) -> None:
    with inside(wiring.host_of(rank)), _rules() as rules:
        _add(rules)


def end(wiring: Wiring, rank: int) -> None:
    with inside(wiring.host_of(rank)), _rules() as rules, suppress(NetlinkError):
        rules.table("del", name=GARBLE_TABLE)


def can_garble() -> bool:
    """Whether this kernel does; asked in a process with a network of its own."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(_try), 0)[1]) == 0


def _try() -> NoReturn:
    code = 1
    try:
        if CDLL(None).unshare(CLONE_NEWNET) == 0:
            with _rules() as rules:
                _add(rules)
            code = 0
    finally:
        os._exit(code)


@contextmanager
def _rules() -> Iterator[NFTables]:
    rules = NFTables(nfgen_family=NFPROTO_IPV4)
    try:
        yield rules
    finally:
        rules.close()


def _add(rules: NFTables) -> None:
    rules.table("add", name=GARBLE_TABLE)
    rules.chain(
        "add", table=GARBLE_TABLE, name=GARBLE_CHAIN, hook="output", type="filter", policy=NF_ACCEPT
    )
    to_store = _compared(NETWORK_HEADER, 16, Cmp.NFT_CMP_NEQ, inet_aton(SPINE_ADDRESS))
    is_long = _compared(NETWORK_HEADER, 2, Cmp.NFT_CMP_GT, MAX_UNGARBLED_BYTES.to_bytes(2, "big"))
    rules.rule(
        "add", table=GARBLE_TABLE, chain=GARBLE_CHAIN, expressions=[to_store, is_long, _written()]
    )


def _compared(header: int, offset: int, how: Cmp, value: bytes) -> list[dict[str, Any]]:
    """The rule goes on if these bytes of the header compare so."""
    read = {"dreg": 1, "base": header, "offset": offset, "len": len(value)}
    return [
        genex("payload", read),
        genex("cmp", {"sreg": Regs.NFT_REG_1, "op": how, "data": _data(value)}),
    ]


def _written() -> list[dict[str, Any]]:
    """The bytes that are put there; no checksum is made anew."""
    write = {
        "sreg": 1,
        "base": TRANSPORT_HEADER,
        "offset": GARBLE_OFFSET_BYTES,
        "len": len(GARBLE_PATTERN),
    }
    return [
        genex("immediate", {"dreg": 1, "data": _data(GARBLE_PATTERN)}),
        genex("payload", {**write, "csum_type": 0, "csum_offset": 0}),
    ]


def _data(value: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", value)]}
