"""Names that lead to the wrong place, or nowhere: the traps of /etc/hosts and of slow resolvers.

Many distributions write `127.0.1.1 myhost` into /etc/hosts. Unless GLOO_SOCKET_IFNAME is set, Gloo
tells the others the address that this host's own name resolves to, so they all call themselves. The
same happens with a MASTER_ADDR that is localhost, or that is so on the host whose name it is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

from thalweg.doctor.finding import Finding, RankFacts, by_host, concerning, together
from thalweg.transports.security import is_loopback

LOOKUP_TIMEOUT_SECONDS = 3.0  # seconds for a lookup
SLOW_LOOKUP_SECONDS = 1.0
SLURM_NODES_VARIABLE = "SLURM_STEP_NUM_NODES"
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """`addresses` is None if nobody answered in time, and empty if there are none."""

    addresses: list[str] | None
    seconds: float


def resolve_name(name: str, patience: float = LOOKUP_TIMEOUT_SECONDS) -> Lookup:
    """The addresses of a name."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    return _bounded(ask, patience)


def resolve_address(address: str, patience: float = LOOKUP_TIMEOUT_SECONDS) -> Lookup:
    """The name of an address, as torch asks for it: IPv4 in the clothes of IPv6."""
    asked = address if ":" in address else f"::ffff:{address}"
    return _bounded(lambda: [socket.getnameinfo((asked, 0), 0)[0]], patience)


def _bounded(ask: Callable[[], list[str]], patience: float) -> Lookup:
    """In a thread, which is left behind if the resolver hangs: nothing can interrupt it."""
    answer: SimpleQueue[list[str]] = SimpleQueue()

    def run() -> None:
        try:
            answer.put(ask())
        except OSError:
            answer.put([])

    start = monotonic()
    Thread(target=run, name="lookup", daemon=True).start()
    try:
        found: list[str] | None = answer.get(timeout=patience)
    except Empty:
        found = None
    return Lookup(addresses=found, seconds=monotonic() - start)


def lookups(host: str, address: str, own: Lookup) -> Finding:
    """How long they take: of this host's name, and of the name behind its address."""
    back = resolve_address(address)
    slow = {
        f"what {host} resolves to": own,
        f"the name behind {address}": back,
    }
    for what, lookup in slow.items():
        if lookup.addresses is None or lookup.seconds > SLOW_LOOKUP_SECONDS:
            took = "nobody answered within" if lookup.addresses is None else "the answer took"
            return Finding(
                check="name lookups",
                verdict="warn",
                detail=f"asked for {what}, {took} {lookup.seconds:.1f} s; torch asks for the name "
                "behind every connection",
                remedy="write the hosts into /etc/hosts, mend /etc/resolv.conf, or set "
                "RES_OPTIONS='timeout:1 attempts:1'",
            )
    longest = max(lookup.seconds for lookup in slow.values())
    return Finding(
        check="name lookups", verdict="ok", detail=f"answered within {1000 * longest:.0f} ms"
    )


def across_hosts(size: int, environment: Mapping[str, str]) -> bool:
    """Whether the launcher says that workers are on several hosts."""
    if (
        environment.get(SLURM_NODES_VARIABLE, "").isdigit()
        and int(environment[SLURM_NODES_VARIABLE]) > 1
    ):
        return True
    said = next((environment[v] for v in LOCAL_SIZE_VARIABLES if environment.get(v)), "")
    return said.isdigit() and int(said) < size


def rendezvous_finding(meeting: str | None, across: bool) -> Finding | None:
    """Of what this rank alone knows: the address where all meet, seen from here."""
    if meeting is None or not across:
        return None
    if is_loopback(meeting):
        return Finding(
            check="meeting point",
            verdict="fail",
            detail=f"MASTER_ADDR is {meeting}, which is this host on every host, and workers are "
            "on several",
            remedy="set MASTER_ADDR to an address of rank 0's host that the others reach",
        )
    seen = resolve_name(meeting)
    if seen.addresses is None or not seen.addresses:
        return Finding(
            check="meeting point",
            verdict="fail",
            detail=f"MASTER_ADDR is {meeting}, and nobody here knows that name",
            remedy="set MASTER_ADDR to the address, or write the name into /etc/hosts",
        )
    return Finding(
        check="meeting point", verdict="ok", detail=f"MASTER_ADDR {meeting}: {seen.addresses[0]}"
    )


def alone(name: str, own: Lookup, gloo_interface: str) -> Finding:
    trap = _trap(name, own.addresses)
    if trap and not gloo_interface:
        return Finding(
            check="host name",
            verdict="warn",
            detail=f"{trap}; with workers on other hosts Gloo would tell them that address",
            remedy=_remedy(name, ""),
        )
    where = ", ".join(own.addresses or ()) or "unknown"
    return Finding(check="host name", verdict="ok", detail=f"{name} is {where}")


def traps(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Of all ranks' facts: whose name or address leads others back to themselves."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [_fine("all ranks are on one host, where loopback serves")]
    found = []
    for there in hosts.values():
        who = [facts for facts in there if is_loopback(facts.address)]
        if who:
            found.append(_loopback_address(who))
        gullible = [facts for facts in there if not facts.gloo_interface]
        trap = _trap(gullible[0].name, gullible[0].resolved) if gullible else ""
        if trap and gullible:
            found.append(_loopback_name(gullible, trap))
    return found or [_fine("no host's name or address leads others back to themselves")]


def _trap(name: str, addresses: Sequence[str] | None) -> str:
    """In words; empty if there is none. Who hasn't answered isn't judged."""
    if addresses is None:
        return ""
    if not addresses:
        return f"the host's own name, {name}, resolves to nothing, and Gloo then takes loopback"
    if all(map(is_loopback, addresses)):
        return f"the host's own name, {name}, resolves to {addresses[0]}, a loopback address"
    return ""


def _loopback_address(who: Sequence[RankFacts]) -> Finding:
    return Finding(
        check="meeting point",
        verdict="fail",
        detail=f"{together(who)} would tell the others to come to {who[0].address}, which is each "
        "host's own loopback: MASTER_ADDR leads there",
        remedy="set MASTER_ADDR to an address that other hosts reach, or name the interface: "
        "THALWEG_IFNAME",
        **concerning(*who, named=True),
    )


def _loopback_name(who: Sequence[RankFacts], trap: str) -> Finding:
    return Finding(
        check="host name",
        verdict="fail",
        detail=f"{trap}; Gloo would tell the other hosts that address, and they would call "
        "themselves",
        remedy=_remedy(who[0].name, who[0].interface),
        **concerning(*who),
    )


def _remedy(name: str, interface: str) -> str:
    value = interface if interface and interface != "lo" else "the interface to use"
    return f"set GLOO_SOCKET_IFNAME to {value}, or give {name} its own address in /etc/hosts"


def _fine(detail: str) -> Finding:
    return Finding(check="host name", verdict="ok", detail=detail)
