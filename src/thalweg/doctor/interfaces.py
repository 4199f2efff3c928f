"""The interface by which other ranks reach this one, and why the others weren't chosen.

The address is the one that `World.join` takes: of the interface that is named, or on the route to
the rendezvous address. Every other interface has one reason, the first of: loopback, down, no
address, only a link-local address, made for containers, not named or not on the route.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from thalweg.doctor.finding import Finding, ok, warn
from thalweg.facts import about
from thalweg.members.world import INTERFACE_VARIABLES, own_address
from thalweg.transports.security import is_loopback

EXTERNAL_ADDRESS = "198.51.100.1"  # RFC 5737: unassigned, so reached by the default route
VIRTUAL_INTERFACE_PATTERN = re.compile(
    r"(docker|br-|veth|virbr|cni|flannel|cali|cilium|lxc|lxd|podman|vnet|kube)"
)
FASTER_INTERFACE_FACTOR = 2.0


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


def list_interfaces() -> list[Interface]:
    """All interfaces of this host's network stack."""
    states = psutil.net_if_stats()
    return [
        Interface(
            name=name,
            addresses=tuple(
                str(found.address).partition("%")[0]
                for found in addresses
                if found.family in (socket.AF_INET, socket.AF_INET6)
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


def why(rendezvous: str | None, environment: Mapping[str, str]) -> str:
    """The reason for which the interface was chosen."""
    for variable in filter(environment.get, INTERFACE_VARIABLES):
        return f"{variable} names it"
    if rendezvous is None:
        return "this process is alone"
    return f"on the route to {rendezvous}, the rendezvous address"


def rejected(interface: Interface, reason_of_choice: str) -> str:
    """The first reason that applies why this interface wasn't chosen."""
    reasons = {
        "loopback": any(map(is_loopback, interface.addresses)),
        "down": not interface.up,
        "no address": not interface.addresses,
        "link-local address only": not interface.useful,
        "for containers or virtual machines": VIRTUAL_INTERFACE_PATTERN.match(interface.name),
        "not named": "names it" in reason_of_choice,
    }
    return next((reason for reason, applies in reasons.items() if applies), "not on the route")


def judge(address: str, reason: str, interfaces: Sequence[Interface]) -> Finding:
    """The finding on the chosen address; `reason` is why it was chosen."""
    chosen = holder(address, interfaces)
    name = chosen.name if chosen else "no interface"
    others = [other for other in interfaces if other is not chosen]
    detail = f"{name} {address}{_speed(chosen)}: {reason}"
    if others:
        detail += "; not " + ", ".join(f"{o.name} ({rejected(o, reason)})" for o in others)
    faster = _faster(chosen, others, reason)
    if chosen is not None and VIRTUAL_INTERFACE_PATTERN.match(chosen.name):
        return warn(
            "interface",
            f"{detail}; {name} is for containers, and other hosts hardly reach it",
            "name the one that leads to the other hosts: THALWEG_IFNAME",
        )
    if faster is not None:
        return warn(
            "interface",
            f"{detail}; {faster.name} {faster.useful[0]} is faster{_speed(faster)}",
            f"set THALWEG_IFNAME={faster.name} (and GLOO_SOCKET_IFNAME) if it leads to the other "
            "hosts",
        )
    return ok("interface", detail)


def judge_alone(
    address: str, interfaces: Sequence[Interface], environment: Mapping[str, str]
) -> Finding:
    """The finding on the interface that a job across hosts would most likely take."""
    default = own_address(EXTERNAL_ADDRESS, {})
    if is_named(environment) or is_loopback(default):
        return judge(address, why(None, environment), interfaces)
    reason = "the default route; a job takes the one on the route to MASTER_ADDR"
    return judge(default, reason, interfaces)


def _faster(chosen: Interface | None, others: Sequence[Interface], reason: str) -> Interface | None:
    if chosen is None or chosen.mbps <= 0:
        return None
    usable = [o for o in others if rejected(o, reason).startswith("not ")]
    best = max(usable, key=lambda other: other.mbps, default=None)
    return best if best is not None and best.mbps >= FASTER_INTERFACE_FACTOR * chosen.mbps else None


def _speed(interface: Interface | None) -> str:
    known = interface is not None and interface.mbps > 0
    return f" ({about(1e6 * interface.mbps, 'bit/s')})" if known and interface else ""
