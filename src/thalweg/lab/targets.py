"""Who is meant by "rack 0" or "host 5": numbers and names, in a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.errors import LabError
from thalweg.facts import Cluster, Host, Link, Rack
from thalweg.lab.event import BOTH, Direction


def links_of(
    cluster: Cluster,
    *,
    rack: int | str | None = None,
    host: int | str | None = None,
    directions: Sequence[Direction] = BOTH,
) -> list[Link]:
    """The uplink of a rack, or the NIC of a host."""
    if rack is not None and host is None:
        owner = rack_called(cluster, rack).name
        return [Link("uplink", owner, direction) for direction in directions]
    if host is not None and rack is None:
        owner = host_called(cluster, host).name
        return [Link("nic", owner, direction) for direction in directions]
    raise LabError("a link belongs to a rack or to a host", "name one of the two")


def rack_called(cluster: Cluster, rack: int | str) -> Rack:
    """By its number from 0, or its name."""
    for number, found in enumerate(cluster.racks):
        if rack in (number, found.name):
            return found
    raise LabError(f"there is no rack {rack!r}", f"there are {len(cluster.racks)}, numbered from 0")


def host_called(cluster: Cluster, host: int | str) -> Host:
    """By a rank that lives there, or its name."""
    for found in cluster.hosts:
        if host == found.name or host in found.ranks:
            return found
    raise LabError(
        f"there is no host {host!r}", f"give a rank from 0 to {cluster.workers - 1}, or a name"
    )
