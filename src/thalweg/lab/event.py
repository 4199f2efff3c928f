"""What happens to a cluster while work runs in it: when, what, and to whom.

    { at_step = 20, action = "degrade", rack = 0, rate = "50mbit", direction = "in" }

    action                           happens to    note
    degrade, restore                 rack or host  its uplink, or its NIC; restore also ends flows
    flow                             rack or host  competing TCP flows through that link alone
    cut, heal                        rack or host  a cut link swallows what is sent into it
    kill, restart, pause, resume     host          its workers

`rack` counts from 0 or is a name; `host` is the rank that lives there, or a name. `direction` is
`out` of the host or rack, `in`, or both. `at_step` means that the slowest living worker has done so
many steps, 0 before any starts; `at` is a time since the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from thalweg.errors import LabError
from thalweg.facts import Cluster, Duration, Host, Link, Rack, Rate
from thalweg.facts.toml_reader import TomlTable

Direction = Literal["out", "in"]
LinkAction = Literal["degrade", "restore", "flow", "cut", "heal"]
WorkerAction = Literal["kill", "restart", "pause", "resume"]
LINK_ACTIONS: tuple[str, ...] = get_args(LinkAction)
WORKER_ACTIONS: tuple[str, ...] = get_args(WorkerAction)
BOTH_DIRECTIONS: tuple[Direction, ...] = ("out", "in")
EVENT_KEYS = ("action", "at_step", "at", "rack", "host", "rate", "direction", "flows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One of `rack` and `host` is given, and one of `at_step` and `at`."""

    action: LinkAction | WorkerAction
    at_step: int | None = None
    at: Duration | None = None
    rack: int | str | None = None
    host: int | str | None = None
    rate: Rate | None = None  # of degrade, and the most that a flow takes
    directions: tuple[Direction, ...] = BOTH_DIRECTIONS
    flows: int = 1  # so many TCP connections compete in each direction

    def __post_init__(self) -> None:
        who = [target for target in (self.rack, self.host) if target is not None]
        if len(who) != 1:
            raise LabError(f"{self.action} doesn't say what it happens to", "give rack or host")
        if (self.at_step is None) == (self.at is None):
            raise LabError(f"{self.action} doesn't say when", "give at_step or at")
        if self.action in WORKER_ACTIONS and self.host is None:
            raise LabError(f"only workers of a host {self.action}", "give host instead of rack")
        if self.action == "degrade" and self.rate is None:
            raise LabError("degrade doesn't say to which rate", 'give rate = "50mbit"')

    @classmethod
    def parse(cls, data: Mapping[str, Any] | Event, where: str = "the event") -> Event:
        """From the keys of a scenario file."""
        if isinstance(data, Event):
            return data
        table = TomlTable(dict(data), where, LabError)
        table.only(*EVENT_KEYS)
        action = table.data.get("action")
        if action not in LINK_ACTIONS + WORKER_ACTIONS:
            known = ", ".join(LINK_ACTIONS + WORKER_ACTIONS)
            raise LabError(f"{where} has no action {action!r}", f"give one of {known}")
        return cls(
            action=action,
            at_step=_count(table, "at_step", 0) if "at_step" in table else None,
            at=table.duration("at", Duration(0.0)) if "at" in table else None,
            rack=_target(table, "rack"),
            host=_target(table, "host"),
            rate=table.rate("rate") if "rate" in table else None,
            directions=directions(table.data.get("direction", "both")),
            flows=_count(table, "flows", 1) if "flows" in table else 1,
        )

    def __str__(self) -> str:
        when = f"step {self.at_step}" if self.at is None else str(self.at)
        who = f"rack {self.rack}" if self.host is None else f"host {self.host}"
        to = "" if self.rate is None else f" at {self.rate}"
        way = "" if self.directions == BOTH_DIRECTIONS else f" ({self.directions[0]})"
        return f"{when}: {self.action} {who}{to}{way}"


def directions(text: object) -> tuple[Direction, ...]:
    match text:
        case "both":
            return BOTH_DIRECTIONS
        case "out" | "in":
            return (text,)
    raise LabError(f"{text!r} is no direction", "give out, in or both")


def _target(table: TomlTable, key: str) -> int | str | None:
    value = table.data.get(key)
    if value is None or (type(value) is int and value >= 0) or (isinstance(value, str) and value):
        return value
    raise LabError(
        f"{key} of {table.where} is {value!r}", f"give a number from 0, or a {key}'s name"
    )


def _count(table: TomlTable, key: str, least: int) -> int:
    value = table.data[key]
    if type(value) is int and value >= least:
        return value
    raise LabError(f"{key} of {table.where} is {value!r}", f"give a whole number from {least}")


def links_of(
    cluster: Cluster,
    *,
    rack: int | str | None = None,
    host: int | str | None = None,
    directions: Sequence[Direction] = BOTH_DIRECTIONS,
) -> list[Link]:
    """The uplink of a rack, or the NIC of a host."""
    if rack is not None and host is None:
        owner = rack_named(cluster, rack).name
        return [Link("uplink", owner, direction) for direction in directions]
    if host is not None and rack is None:
        owner = host_named(cluster, host).name
        return [Link("nic", owner, direction) for direction in directions]
    raise LabError("a link belongs to a rack or to a host", "name one of the two")


def rack_named(cluster: Cluster, rack: int | str) -> Rack:
    """By its number from 0, or its name."""
    for number, found in enumerate(cluster.racks):
        if rack in (number, found.name):
            return found
    raise LabError(f"there is no rack {rack!r}", f"there are {len(cluster.racks)}, numbered from 0")


def host_named(cluster: Cluster, host: int | str) -> Host:
    """By a rank that lives there, or its name."""
    for found in cluster.hosts:
        if host == found.name or host in found.ranks:
            return found
    raise LabError(
        f"there is no host {host!r}", f"give a rank from 0 to {cluster.workers - 1}, or a name"
    )
