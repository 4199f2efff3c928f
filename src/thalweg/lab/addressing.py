"""Names and addresses in a lab: a routed leaf-spine network without bridges.

    spine ─ r0 ══ up ─ rack 0 ─ h0 ══ eth0 ─ host 0
          │                   └ h1 ══ eth0 ─ host 1
          └ r1 ══ up ─ rack 1 ─ ...

Each name is a network namespace, each ══ a pair of virtual interfaces. Packets are shaped where
they leave an interface: those `out` of a host at `eth0`, those `in` at the rack's end. Host h of
rack r has the address 10.84.r.(h+1), rack r 10.85.r.1, the spine 10.84.255.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from thalweg.errors import LabError
from thalweg.facts import Cluster, Link

HOST_DEVICE = "eth0"
SPINE_ADDRESS = "10.84.255.1"
GATEWAY = "169.254.1.1"  # the rack as a host sees it, and the spine as a rack sees it
MAX_LAB_RACKS = 255
MAX_HOSTS_PER_RACK = 254
NEAR_MAC, FAR_MAC = "02:54:00:00:00:01", "02:54:00:00:00:02"
"""Fixed addresses, which static neighbour entries can name; only two ends share a cable."""
_LAB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class Port(NamedTuple):
    """An interface in a namespace, at which one direction of a link is shaped."""

    namespace: str
    device: str
    address: str  # by which other namespaces reach this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """Both ends of a link: `near` belongs to its owner, `far` is one level up."""

    near: Port
    far: Port
    behind: str  # the addresses that the far end reaches through the link


@dataclass(frozen=True, slots=True)
class Wiring:
    """The namespaces, interfaces and addresses of a cluster in a lab of this name."""

    lab: str
    cluster: Cluster
    hosts: dict[str, str] = field(init=False, repr=False)  # addresses by name
    cables: dict[tuple[str, str], Cable] = field(init=False, repr=False)  # by kind and owner

    def __post_init__(self) -> None:
        if not _LAB_NAME.fullmatch(self.lab):
            raise LabError(
                f"{self.lab!r} is not a name for a lab",
                "use up to 32 lower-case letters, digits, _ and -",
            )
        racks = self.cluster.racks
        largest = max(len(rack.hosts) for rack in racks)
        if len(racks) > MAX_LAB_RACKS or largest > MAX_HOSTS_PER_RACK:
            raise LabError(
                f"a lab has too few addresses for {len(racks)} racks of up to {largest} hosts",
                f"use at most {MAX_LAB_RACKS} racks, and {MAX_HOSTS_PER_RACK} hosts in each",
            )
        object.__setattr__(self, "hosts", {})
        object.__setattr__(self, "cables", {})
        for number, rack in enumerate(racks):
            namespace, rack_address = self.rack(number), f"10.85.{number}.1"
            self.cables["uplink", rack.name] = Cable(
                near=Port(namespace, "up", rack_address),
                far=Port(self.spine, f"r{number}", SPINE_ADDRESS),
                behind=f"10.84.{number}.0/24",
            )
            for slot, host in enumerate(rack.hosts):
                address = self.hosts[host.name] = f"10.84.{number}.{slot + 1}"
                self.cables["nic", host.name] = Cable(
                    near=Port(self.host(host.name), HOST_DEVICE, address),
                    far=Port(namespace, f"h{slot}", rack_address),
                    behind=f"{address}/32",
                )

    @property
    def spine(self) -> str:
        return f"{prefix(self.lab)}@@spine"  # a rack may be called spine

    def rack(self, number: int) -> str:
        return f"{prefix(self.lab)}@{self.cluster.racks[number].name}"

    def host(self, name: str) -> str:
        return f"{prefix(self.lab)}{name}"

    def host_of(self, rank: int) -> str:
        return self.host(self.cluster.host(rank).name)

    def namespaces(self) -> list[str]:
        return [self.spine, *(cable.near.namespace for cable in self.cables.values())]

    def host_table(self) -> str:
        """The text of /etc/hosts; torch looks up IPv4 addresses that are mapped to IPv6."""
        spine = "@spine" if "spine" in self.hosts else "spine"
        lines = ["127.0.0.1 localhost"]
        for name, address in {spine: SPINE_ADDRESS, **self.hosts}.items():
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        return "\n".join(lines) + "\n"

    def ends(self, link: Link) -> tuple[Port, Port]:
        """The interface at which this direction of a link is shaped, and the opposite one."""
        cable = self.cables[link.kind, link.owner]
        ends = cable.near, cable.far
        return ends if link.direction == "out" else ends[::-1]


def prefix(lab: str) -> str:
    """The prefix that the namespaces of this lab have, and those of no other."""
    return f"thalweg.{lab}."
