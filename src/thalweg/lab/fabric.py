"""Builds namespaces, virtual interfaces, routes and shaping of a lab through netlink.

Everything is made inside the lab's own namespaces, so that labs don't interfere with each other or
with the machine's network. Neighbour entries are static: with 84 hosts, address resolution by
broadcast is the first thing to fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

from pyroute2 import IPRoute, NetNS, netns
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from thalweg.errors import LabError
from thalweg.lab.addressing import (
    FAR_MAC,
    GATEWAY,
    NEAR_MAC,
    SPINE_ADDRESS,
    Cable,
    Port,
    Wiring,
)
from thalweg.lab.namespaces import NETNS_PATH, inside, not_entered, refused
from thalweg.lab.shaping import ROOT_QDISC_HANDLE, Shape, qdiscs
from thalweg.launch.worker_group import allow_descriptors
from thalweg.launch.worker_process import fork, signals_blocked

DESCRIPTORS_PER_NAMESPACE = 5  # of pyroute2, and a spare one
NO_RIGHTS_EXIT_CODE = 3
NUD_PERMANENT = 0x80  # a static neighbour entry
RT_SCOPE_LINK = 253
RTNH_F_ONLINK = 4
SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
}
Progress = Callable[[int, int], None]
"""Called with the number of parts that are built and the number of all parts."""


def build(wiring: Wiring, shapes: Mapping[Port, Shape], progress: Progress) -> None:
    """Build a lab; if this fails the caller removes the parts that exist."""
    try:
        _build(wiring, shapes, progress)
    except NetlinkError as error:
        raise refused(OSError(error.code, os.strerror(error.code))) from None
    except OSError as error:  # for example a read-only /proc/sys
        raise refused(error) from None


def _build(wiring: Wiring, shapes: Mapping[Port, Shape], progress: Progress) -> None:
    names = wiring.namespaces()
    cables = wiring.cables.values()
    total = len(names) + len(cables)
    allow_descriptors(DESCRIPTORS_PER_NAMESPACE * len(names))
    for number, name in enumerate(names, start=1):
        with signals_blocked():  # pyroute2 forks: Ctrl-C would be lost, or leave half a namespace
            netns.create(name)
        with inside(name):
            for sysctl, value in SYSCTLS.items():
                with suppress(FileNotFoundError):  # a kernel without IPv6
                    Path("/proc/sys", sysctl).write_text(value)
        progress(number, total)
    with Sockets() as sockets:
        # Ctrl-C is handled between two parts: a callback of pyroute2 would lose it.
        for name in names:
            with signals_blocked():
                _up(sockets[name], "lo", *[SPINE_ADDRESS] * (name == wiring.spine))
        for number, cable in enumerate(cables, start=len(names) + 1):
            with signals_blocked():
                _connect(sockets, cable)
                for port in (cable.near, cable.far):
                    shape(sockets, port, shapes.get(port, Shape()))
            progress(number, total)


class Sockets(dict[str, NetNS]):
    """Netlink sockets by namespace, opened on first use."""

    def __missing__(self, namespace: str) -> NetNS:
        try:
            (NETNS_PATH / namespace).stat()  # or pyroute2 would leave an event loop behind
            with signals_blocked():
                self[namespace] = NetNS(namespace, flags=0)
        except OSError as error:
            raise not_entered(namespace, error) from None
        return self[namespace]

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *error: object) -> None:
        with signals_blocked():
            for socket in self.values():
                socket.close()


def _connect(sockets: Sockets, cable: Cable) -> None:
    near, far = sockets[cable.near.namespace], sockets[cable.far.namespace]
    address = cable.near.address
    peer = {
        "ifname": cable.near.device,
        "address": NEAR_MAC,
        "net_ns_fd": cable.near.namespace,
    }
    far.link("add", kind="veth", ifname=cable.far.device, address=FAR_MAC, peer=peer)
    inward = _up(near, cable.near.device, address)
    outward = _up(far, cable.far.device, GATEWAY)
    near.neigh("add", ifindex=inward, dst=GATEWAY, lladdr=FAR_MAC, state=NUD_PERMANENT)
    far.neigh("add", ifindex=outward, dst=address, lladdr=NEAR_MAC, state=NUD_PERMANENT)
    near.route("add", dst="default", gateway=GATEWAY, oif=inward, flags=RTNH_F_ONLINK)
    far.route("add", dst=f"{address}/32", oif=outward, scope=RT_SCOPE_LINK)
    if cable.behind != f"{address}/32":
        far.route("add", dst=cable.behind, gateway=address, oif=outward, flags=RTNH_F_ONLINK)


def _index(socket: NetNS, device: str) -> int:
    found = socket.link_lookup(ifname=device)
    if not found:
        raise LabError(f"interface {device} is gone", "take the lab down and up again")
    return int(found[0])


def _up(socket: NetNS, device: str, *addresses: str) -> int:
    """Give the interface these addresses, bring it up, and return its index."""
    index = _index(socket, device)
    for address in addresses:
        socket.addr("add", index=index, address=address, prefixlen=32)
    socket.link("set", index=index, state="up")
    return index


def shape(sockets: Sockets, port: Port, wanted: Shape) -> None:
    """Shape the packets that leave this interface. A change of the rate alone keeps its queue."""
    socket = sockets[port.namespace]
    index = _index(socket, port.device)
    wanted_qdiscs = qdiscs(wanted)
    if [q["kind"] for q in wanted_qdiscs] == [q.kind for q in _qdiscs(socket, index)]:
        command = "change"
    else:
        command = "add"
        with suppress(NetlinkError):
            socket.tc("del", index=index, parent=TC_H_ROOT)
    for parameters in wanted_qdiscs:
        socket.tc(command, index=index, **parameters)


@dataclass(frozen=True, slots=True)
class QdiscStats:
    """The kernel's counters of a queueing discipline."""

    kind: str
    bits_per_second: float | None  # of a token bucket
    sent_nbytes: int
    drops: int


def read_qdisc_stats(sockets: Sockets, port: Port) -> list[QdiscStats]:
    socket = sockets[port.namespace]
    return _qdiscs(socket, _index(socket, port.device))


def _qdiscs(socket: NetNS, index: int) -> list[QdiscStats]:
    """The queueing disciplines from the root on, without the kernel's default."""
    measured = []
    for message in sorted(socket.get_qdiscs(index=index), key=itemgetter("handle")):
        kind, stats = message.get_attr("TCA_KIND"), message.get_attr("TCA_STATS")
        rate = None
        if kind == "tbf":
            rate = 8.0 * message.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]
        if message["handle"] != 0 and kind != "noqueue":
            measured.append(QdiscStats(kind, rate, stats["bytes"], stats["drop"]))
    return measured


def has_netem() -> bool:
    """True if this kernel can delay packets."""

    def add_netem() -> None:
        with IPRoute() as socket:
            loopback = socket.link_lookup(ifname="lo")[0]
            socket.tc("add", kind="netem", index=loopback, handle=ROOT_QDISC_HANDLE)

    code = try_in_own_network(add_netem)
    if code == NO_RIGHTS_EXIT_CODE:
        raise refused(PermissionError(errno.EPERM, os.strerror(errno.EPERM)))
    return code == 0


def try_in_own_network(attempt: Callable[[], None]) -> int:
    """The exit code of a process with a network of its own that makes this attempt: 0, 1 if it
    fails, or `NO_RIGHTS_EXIT_CODE`."""

    def run() -> NoReturn:
        code = NO_RIGHTS_EXIT_CODE
        try:
            if ctypes.CDLL(None).unshare(netns.CLONE_NEWNET) == 0:
                code = 1
                attempt()
                code = 0
        finally:
            os._exit(code)

    return os.waitstatus_to_exitcode(os.waitpid(fork(run), 0)[1])
