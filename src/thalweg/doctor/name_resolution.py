"""Names that resolve to the wrong address, slowly or not at all.

Many distributions write `127.0.1.1 myhost` into /etc/hosts. Unless GLOO_SOCKET_IFNAME is set, Gloo
publishes the address that this host's own name resolves to, so other hosts connect to themselves.
The same happens with a MASTER_ADDR that is localhost, or resolves to it on the host that it names.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, together, warn
from thalweg.transports.security import is_loopback

LOOKUP_TIMEOUT_SECONDS = 3.0
SLOW_LOOKUP_SECONDS = 1.0
SLURM_NODES_VARIABLE = "SLURM_STEP_NUM_NODES"
OTHER_ADDRESS_REMEDY = (
    "set MASTER_ADDR to an address that other hosts reach, or name the interface: THALWEG_IFNAME"
)
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of a lookup; `addresses` is None if it timed out, and empty if there are none."""

    addresses: list[str] | None
    seconds: float


def resolve_name(name: str, patience: float = LOOKUP_TIMEOUT_SECONDS) -> Lookup:

    def ask() -> list[str]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    return _bounded(ask, patience)


def resolve_address(address: str, patience: float = LOOKUP_TIMEOUT_SECONDS) -> Lookup:
    """The name of an address, looked up as torch does: IPv4 mapped to IPv6."""
    asked = address if ":" in address else f"::ffff:{address}"
    return _bounded(lambda: [socket.getnameinfo((asked, 0), 0)[0]], patience)


def _bounded(ask: Callable[[], list[str]], patience: float) -> Lookup:
    """A lookup in a thread, which is abandoned if the resolver hangs: nothing can interrupt it."""
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
    """The finding on the time to look up this host's name, and the name of its address."""
    looked_up = {f"addresses of {host}": own, f"name of {address}": resolve_address(address)}
    for what, lookup in looked_up.items():
        if lookup.addresses is None or lookup.seconds > SLOW_LOOKUP_SECONDS:
            took = "timed out after" if lookup.addresses is None else "took"
            return warn(
                "name lookups",
                f"the lookup of the {what} {took} {lookup.seconds:.1f} s; torch looks up the name "
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
    addresses = resolve_name(rendezvous).addresses
    if not addresses:
        return fail(
            "meeting point",
            f"MASTER_ADDR is {rendezvous}, a name that doesn't resolve on this host",
            "set MASTER_ADDR to the address, or write the name into /etc/hosts",
        )
    return ok("meeting point", f"MASTER_ADDR {rendezvous}: {addresses[0]}")


def alone(name: str, own: Lookup, gloo_interface: str) -> Finding:
    trap = _trap(name, own.addresses)
    if trap and not gloo_interface:
        detail = f"{trap}; with workers on other hosts Gloo would publish that address"
        return warn("host name", detail, _remedy(name, ""))
    where = ", ".join(own.addresses or ()) or "unknown"
    return ok("host name", f"{name} is {where}")


def traps(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Findings on names and addresses by which other hosts would connect to themselves."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [ok("host name", "all ranks are on one host, where loopback serves")]
    found = []
    for there in hosts.values():
        looped = [facts for facts in there if is_loopback(facts.address)]
        if looped:
            detail = (
                f"{together(looped)} would publish {looped[0].address}, which is each host's own "
                "loopback: MASTER_ADDR resolves to it"
            )
            found.append(fail("meeting point", detail, OTHER_ADDRESS_REMEDY, looped, named=True))
        unnamed = [facts for facts in there if not facts.gloo_interface]
        trap = _trap(unnamed[0].name, unnamed[0].resolved) if unnamed else ""
        if trap:
            detail = (
                f"{trap}; Gloo would publish that address, and other hosts would connect to "
                "themselves"
            )
            remedy = _remedy(unnamed[0].name, unnamed[0].interface)
            found.append(fail("host name", detail, remedy, unnamed))
    return found or [ok("host name", "no host's name or address leads others back to themselves")]


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
