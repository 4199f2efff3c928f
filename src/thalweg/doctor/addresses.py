"""The interface and the names by which other ranks reach this one.

The address is the one that `World.join` takes: of the interface that is named, or on the route to
the rendezvous address. Every other interface has one reason, the first of: loopback, down, no
address, only a link-local address, made for containers, not named or not on the route.

Names may resolve to the wrong address, slowly or not at all. Many distributions write
`127.0.1.1 myhost` into /etc/hosts. Unless GLOO_SOCKET_IFNAME is set, Gloo publishes the address
that this host's own name resolves to, so other hosts connect to themselves. The same happens with a
MASTER_ADDR that is localhost, or resolves to it on the host that it names.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

import psutil

from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, together, warn
from thalweg.facts import about
from thalweg.members.world import INTERFACE_VARIABLES, own_address
from thalweg.transports.security import is_loopback

EXTERNAL_ADDRESS = "198.51.100.1"  # RFC 5737: unassigned, so reached by the default route
VIRTUAL_INTERFACE_PATTERN = re.compile(
    r"(docker|br-|veth|virbr|cni|flannel|cali|cilium|lxc|lxd|podman|vnet|kube)"
)
FASTER_INTERFACE_FACTOR = 2.0
LOOKUP_TIMEOUT_SECONDS = 3.0
SLOW_LOOKUP_SECONDS = 1.0
SLURM_NODES_VARIABLE = "SLURM_STEP_NUM_NODES"
OTHER_ADDRESS_REMEDY = (
    "set MASTER_ADDR to an address that other hosts reach, or name the interface: THALWEG_IFNAME"
)
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    up: bool
    mbps: int  # 0 if unknown

    @property
    def useful(self) -> tuple[str, ...]:
        """The addresses by which another host could reach it."""
        return tuple(
            address
            for address in self.addresses
            if not (is_loopback(address) or ip_address(address).is_link_local)
        )


Reasons = tuple[str, str]
"""The reason for which an interface was chosen, and the one for which others weren't."""


def list_interfaces() -> list[Interface]:
    """All interfaces of this host's network stack."""
    states = psutil.net_if_stats()
    return [
        Interface(
            name=name,
            addresses=tuple(
                str(entry.address).partition("%")[0]
                for entry in addresses
                if entry.family in (socket.AF_INET, socket.AF_INET6)
            ),
            up=name in states and states[name].isup,
            mbps=states[name].speed if name in states else 0,
        )
        for name, addresses in sorted(psutil.net_if_addrs().items())
    ]


def holder(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """The interface that has this address; loopback has all of 127/8."""
    holders = [i for i in interfaces if address in i.addresses]
    if is_loopback(address):
        holders += [i for i in interfaces if any(map(is_loopback, i.addresses))]
    return next(iter(holders), None)


def is_named(environment: Mapping[str, str]) -> bool:
    return any(map(environment.get, INTERFACE_VARIABLES))


def choice(rendezvous: str | None, environment: Mapping[str, str]) -> Reasons:
    """The reasons for the interface that `own_address` chooses in this environment."""
    for variable in filter(environment.get, INTERFACE_VARIABLES):
        return f"{variable} names it", "not named"
    if rendezvous is None:
        return "this process is alone", "not on the route"
    return f"on the route to {rendezvous}, the rendezvous address", "not on the route"


def unusable(interface: Interface) -> str:
    """The first reason that applies why this interface can't serve; empty if it can."""
    reasons = {
        "loopback": any(map(is_loopback, interface.addresses)),
        "down": not interface.up,
        "no address": not interface.addresses,
        "link-local address only": not interface.useful,
        "for containers or virtual machines": VIRTUAL_INTERFACE_PATTERN.match(interface.name),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def judge(address: str, reasons: Reasons, interfaces: Sequence[Interface]) -> Finding:
    """The finding on the address that was chosen for these reasons."""
    why, why_not = reasons
    chosen = holder(address, interfaces)
    name = chosen.name if chosen else "no interface"
    others = [other for other in interfaces if other is not chosen]
    detail = f"{name} {address}{_speed(chosen)}: {why}"
    if others:
        detail += "; not " + ", ".join(f"{o.name} ({unusable(o) or why_not})" for o in others)
    slow = FASTER_INTERFACE_FACTOR * chosen.mbps if chosen and chosen.mbps > 0 else inf
    faster = [other for other in others if other.mbps >= slow and not unusable(other)]
    fastest = max(faster, key=lambda other: other.mbps, default=None)
    if chosen is not None and VIRTUAL_INTERFACE_PATTERN.match(chosen.name):
        return warn(
            "interface",
            f"{detail}; {name} is for containers, and other hosts hardly reach it",
            "name the one that leads to the other hosts: THALWEG_IFNAME",
        )
    if fastest is not None:
        return warn(
            "interface",
            f"{detail}; {fastest.name} {fastest.useful[0]} is faster{_speed(fastest)}",
            f"set THALWEG_IFNAME={fastest.name} (and GLOO_SOCKET_IFNAME) if it leads to the other "
            "hosts",
        )
    return ok("interface", detail)


def judge_alone(
    address: str, interfaces: Sequence[Interface], environment: Mapping[str, str]
) -> Finding:
    """The finding on the interface that a job across hosts would most likely take."""
    default = own_address(EXTERNAL_ADDRESS, {})
    if is_named(environment) or is_loopback(default):
        return judge(address, choice(None, environment), interfaces)
    why = "the default route; a job takes the one on the route to MASTER_ADDR"
    return judge(default, (why, "not on the route"), interfaces)


def _speed(interface: Interface | None) -> str:
    known = interface is not None and interface.mbps > 0
    return f" ({about(1e6 * interface.mbps, 'bit/s')})" if known and interface else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The addresses of a name, or the names of an address: None if the lookup timed out, empty if
    there are none."""

    answers: list[str] | None
    seconds: float


def addresses_of(name: str, patience: float = LOOKUP_TIMEOUT_SECONDS) -> Lookup:
    def look_up() -> list[str]:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in entries))

    return _bounded(look_up, patience)


def name_of(address: str) -> Lookup:
    """The name of an address, looked up as torch does: IPv4 mapped to IPv6."""
    mapped = address if ":" in address else f"::ffff:{address}"
    return _bounded(lambda: [socket.getnameinfo((mapped, 0), 0)[0]], LOOKUP_TIMEOUT_SECONDS)


def _bounded(look_up: Callable[[], list[str]], patience: float) -> Lookup:
    """A lookup in a thread, which is abandoned if the resolver hangs: nothing can interrupt it."""
    answer: SimpleQueue[list[str]] = SimpleQueue()

    def run() -> None:
        try:
            answer.put(look_up())
        except OSError:
            answer.put([])

    start = monotonic()
    Thread(target=run, name="lookup", daemon=True).start()
    try:
        answers: list[str] | None = answer.get(timeout=patience)
    except Empty:
        answers = None
    return Lookup(answers=answers, seconds=monotonic() - start)


def lookups(host: str, address: str, own: Lookup) -> Finding:
    """The finding on the time to look up this host's name, and the name of its address."""
    looked_up = {f"addresses of {host}": own, f"name of {address}": name_of(address)}
    for query, lookup in looked_up.items():
        if lookup.answers is None or lookup.seconds > SLOW_LOOKUP_SECONDS:
            took = "timed out after" if lookup.answers is None else "took"
            return warn(
                "name lookups",
                f"the lookup of the {query} {took} {lookup.seconds:.1f} s; torch looks up the name "
                "behind every connection",
                "write the hosts into /etc/hosts, mend /etc/resolv.conf, or set "
                "RES_OPTIONS='timeout:1 attempts:1'",
            )
    longest = max(lookup.seconds for lookup in looked_up.values())
    return ok("name lookups", f"answered within {1000 * longest:.0f} ms")


def across_hosts(size: int, environment: Mapping[str, str]) -> bool:
    """True if the launcher's variables show that workers are on several hosts."""
    nodes = environment.get(SLURM_NODES_VARIABLE, "")
    if nodes.isdigit() and int(nodes) > 1:
        return True
    local = next((environment[v] for v in LOCAL_SIZE_VARIABLES if environment.get(v)), "")
    return local.isdigit() and int(local) < size


def rendezvous_finding(rendezvous: str | None, across: bool) -> Finding | None:
    """The finding on the rendezvous address as this rank resolves it."""
    if rendezvous is None or not across:
        return None
    if is_loopback(rendezvous):
        return fail(
            "meeting point",
            f"MASTER_ADDR is {rendezvous}, which is this host on every host, and workers are on "
            "several",
            "set MASTER_ADDR to an address of rank 0's host that the others reach",
        )
    addresses = addresses_of(rendezvous).answers
    if not addresses:
        return fail(
            "meeting point",
            f"MASTER_ADDR is {rendezvous}, a name that doesn't resolve on this host",
            "set MASTER_ADDR to the address, or write the name into /etc/hosts",
        )
    return ok("meeting point", f"MASTER_ADDR {rendezvous}: {addresses[0]}")


def host_name_alone(name: str, own: Lookup, gloo_interface: str) -> Finding:
    trap = _trap(name, own.answers)
    if trap and not gloo_interface:
        detail = f"{trap}; with workers on other hosts Gloo would publish that address"
        return warn("host name", detail, _remedy(name, ""))
    where = ", ".join(own.answers or ()) or "unknown"
    return ok("host name", f"{name} is {where}")


def traps(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Findings on names and addresses by which other hosts would connect to themselves."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [ok("host name", "all ranks are on one host, where loopback serves")]
    findings = []
    for ranks_there in hosts.values():
        looped = [facts for facts in ranks_there if is_loopback(facts.address)]
        if looped:
            detail = (
                f"{together(looped)} would publish {looped[0].address}, which is each host's own "
                "loopback: MASTER_ADDR resolves to it"
            )
            findings.append(fail("meeting point", detail, OTHER_ADDRESS_REMEDY, looped, named=True))
        unnamed = [facts for facts in ranks_there if not facts.gloo_interface]
        trap = _trap(unnamed[0].name, unnamed[0].resolved) if unnamed else ""
        if trap:
            detail = (
                f"{trap}; Gloo would publish that address, and other hosts would connect to "
                "themselves"
            )
            remedy = _remedy(unnamed[0].name, unnamed[0].interface)
            findings.append(fail("host name", detail, remedy, unnamed))
    return findings or [
        ok("host name", "no host's name or address leads others back to themselves")
    ]


def _trap(name: str, addresses: Sequence[str] | None) -> str:
    """The problem with a host's own name in words; empty if there is none, or it is unknown."""
    if addresses is None:
        return ""
    if not addresses:
        return f"the host's own name, {name}, resolves to nothing, and Gloo then takes loopback"
    if all(map(is_loopback, addresses)):
        return f"the host's own name, {name}, resolves to {addresses[0]}, a loopback address"
    return ""


def _remedy(name: str, interface: str) -> str:
    value = interface if interface and interface != "lo" else "the interface to use"
    return f"set GLOO_SOCKET_IFNAME to {value}, or give {name} its own address in /etc/hosts"
