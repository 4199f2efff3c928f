"""Events that change a cluster while workers run in it.

    { at_step = 20, action = "degrade", rack = 0, rate = "50mbit", direction = "in" }

    action                           target        note
    degrade, restore                 rack or host  an uplink or a NIC; restore also ends flows
    flow                             rack or host  competing TCP flows through that link alone
    cut, heal                        rack or host  a cut link drops all packets
    kill, restart, pause, resume     host          the workers on that host

`rack` is a number from 0 or a name; `host` is a rank on that host, or a name. `direction` is `out`
of the host or rack, `in`, or both. `at_step` is the number of steps that the slowest running worker
has finished, 0 before any worker starts; `at` is a time since the start.

Fault injection adds `until`, the time at which an event ends, and these actions:

    blackhole, reroute   rank  packets of its host to the host of `peer` are lost
    garble, ungarble     rank  bytes that its host sends to other hosts change
    store                -     the process of the store is killed
    disk, free           -     the disk for checkpoints is full
    corrupt              -     a byte of the newest checkpoint is flipped
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
FaultAction = Literal[
    "blackhole", "reroute", "garble", "ungarble", "store", "disk", "free", "corrupt"
]
Action = LinkAction | WorkerAction | FaultAction
LINK_ACTIONS: tuple[str, ...] = get_args(LinkAction)
WORKER_ACTIONS: tuple[str, ...] = get_args(WorkerAction)
ACTIONS_WITHOUT_TARGET: tuple[Action, ...] = ("store", "disk", "free", "corrupt")
END_ACTIONS: dict[Action, Action] = {
    "degrade": "restore",
    "flow": "restore",
    "cut": "heal",
    "kill": "restart",
    "pause": "resume",
    "blackhole": "reroute",
    "garble": "ungarble",
    "disk": "free",
}
BOTH_DIRECTIONS: tuple[Direction, ...] = ("out", "in")
EVENT_KEYS = ("action", "at_step", "at", "rack", "host", "rate", "direction", "flows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event has one target, unless its action needs none, and one of `at_step` and `at`."""

    action: Action
    at_step: int | None = None
    at: Duration | None = None
    until: Duration | None = None  # the time since the start at which `END_ACTIONS` applies
    rack: int | str | None = None
    host: int | str | None = None
    rank: int | None = None  # a single worker, or the NIC of its host
    peer: int | None = None  # the rank that a black hole separates from `rank`
    rate: Rate | None = None  # of degrade, and the limit of each flow
    directions: tuple[Direction, ...] = BOTH_DIRECTIONS
    flows: int = 1  # TCP connections that compete in each direction

    def __post_init__(self) -> None:
        targets = [target for target in (self.rack, self.host, self.rank) if target is not None]
        targets_needed = self.action not in ACTIONS_WITHOUT_TARGET
        on_a_rack = self.action in WORKER_ACTIONS and self.rack is not None
        without_rate = self.action == "degrade" and self.rate is None
        for is_wrong, problem, remedy in (
            (len(targets) != targets_needed, "needs one target", "give rack or host"),
            ((self.at_step is None) == (self.at is None), "needs one time", "give at_step or at"),
            (on_a_rack, "applies to workers", "give host instead of rack"),
            (without_rate, "needs a rate", 'give rate = "50mbit"'),
        ):
            if is_wrong:
                raise LabError(f"{self.action} {problem}", remedy)

    @classmethod
    def parse(cls, data: Mapping[str, Any] | Event, where: str = "the event") -> Event:
        """The event that the keys of a scenario file describe."""
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
            at_step=table.whole("at_step", 0) if "at_step" in table else None,
            at=table.duration("at", Duration(0.0)) if "at" in table else None,
            rack=_target(table, "rack"),
            host=_target(table, "host"),
            rate=table.rate("rate") if "rate" in table else None,
            directions=directions(table.data.get("direction", "both")),
            flows=table.whole("flows", 1, 1),
        )

    def links(self, cluster: Cluster) -> list[Link]:
        """The links of the target: the uplink of a rack or the NIC of a host."""
        host = self.rank if self.host is None else self.host
        return links_of(cluster, rack=self.rack, host=host, directions=self.directions)

    def __str__(self) -> str:
        when = f"step {self.at_step}" if self.at is None else str(self.at)
        target = f"rack {self.rack}" if self.host is None else f"host {self.host}"
        rate = "" if self.rate is None else f" at {self.rate}"
        direction = "" if self.directions == BOTH_DIRECTIONS else f" ({self.directions[0]})"
        return f"{when}: {self.action} {target}{rate}{direction}"


def directions(text: object) -> tuple[Direction, ...]:
    if text == "both":
        return BOTH_DIRECTIONS
    if text == "out" or text == "in":
        return (text,)
    raise LabError(f"{text!r} is not a direction", "give out, in or both")


def _target(table: TomlTable, key: str) -> int | str | None:
    value = table.data.get(key)
    if value is None or (type(value) is int and value >= 0) or (isinstance(value, str) and value):
        return value
    raise LabError(
        f"{key} of {table.where} is {value!r}", f"give a number from 0, or a {key}'s name"
    )


def links_of(
    cluster: Cluster,
    *,
    rack: int | str | None = None,
    host: int | str | None = None,
    directions: Sequence[Direction] = BOTH_DIRECTIONS,
) -> list[Link]:
    """The uplink of a rack or the NIC of a host, in these directions."""
    if rack is not None and host is None:
        owner = rack_named(cluster, rack).name
        return [Link("uplink", owner, direction) for direction in directions]
    if host is not None and rack is None:
        owner = host_named(cluster, host).name
        return [Link("nic", owner, direction) for direction in directions]
    raise LabError("a link belongs to a rack or a host", "give one of rack and host")


def rack_named(cluster: Cluster, rack: int | str) -> Rack:
    """The rack with this number, counted from 0, or with this name."""
    for number, found in enumerate(cluster.racks):
        if rack in (number, found.name):
            return found
    raise LabError(f"there is no rack {rack!r}", f"there are {len(cluster.racks)}, numbered from 0")


def host_named(cluster: Cluster, host: int | str) -> Host:
    """The host of this rank, or with this name."""
    for found in cluster.hosts:
        if host == found.name or host in found.ranks:
            return found
    raise LabError(
        f"there is no host {host!r}", f"give a rank from 0 to {cluster.workers - 1}, or a name"
    )
