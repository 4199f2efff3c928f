"""Events that change a cluster while workers run in it, and the runner that applies each when its
step or its time has come.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from thalweg.errors import LabError
from thalweg.facts import Cluster, Duration, Host, Link, Rack, Rate
from thalweg.facts.toml_reader import TomlTable
from thalweg.lab.shaping import BOTH_DIRECTIONS, Direction, Shape
from thalweg.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from thalweg.lab.lab import Lab

LinkAction = Literal["degrade", "restore", "flow", "cut", "heal"]
WorkerAction = Literal["kill", "restart", "pause", "resume"]
FaultAction = Literal[
    "blackhole", "reroute", "garble", "ungarble", "store", "disk", "free", "corrupt"
]
Action = LinkAction | WorkerAction | FaultAction
LINK_ACTIONS: tuple[str, ...] = get_args(LinkAction)
WORKER_ACTIONS: tuple[str, ...] = get_args(WorkerAction)
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
        targets_needed = self.action not in ("store", "disk", "free", "corrupt")
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
        table.only("action", "at_step", "at", "rack", "host", "rate", "direction", "flows")
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
    for number, candidate in enumerate(cluster.racks):
        if rack in (number, candidate.name):
            return candidate
    raise LabError(f"there is no rack {rack!r}", f"there are {len(cluster.racks)}, numbered from 0")


def host_named(cluster: Cluster, host: int | str) -> Host:
    """The host of this rank, or with this name."""
    for candidate in cluster.hosts:
        if host == candidate.name or host in candidate.ranks:
            return candidate
    raise LabError(
        f"there is no host {host!r}", f"give a rank from 0 to {cluster.workers - 1}, or a name"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEvent:
    """An event with its time since the start and the step of the slowest worker at that time."""

    event: Event
    seconds: float
    step: int


class EventRunner:
    """`lab` is None for local workers, whose links can't change. `handlers` apply the actions that
    concern neither links nor workers."""

    def __init__(
        self,
        lab: Lab | None,
        events: Sequence[Event] = (),
        handlers: Mapping[Action, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        for event in events:
            if lab is not None:
                event.links(lab.cluster)  # raises if there is no such rack or host
            if event.action == "degrade":
                Shape(rate=event.rate)  # raises if the rate is out of range
        self.fired: list[AppliedEvent] = []
        self._lab = lab
        self._handlers = handlers
        self._pending = list(events)
        self._active: list[Event] = []  # applied, and not ended
        self._start = 0.0
        self._step = 0

    @property
    def now(self) -> Duration:
        """The time since the start of the run."""
        return Duration(monotonic() - self._start)

    def prepare(self) -> None:
        self._start = monotonic()
        for event in [e for e in self._pending if e.at_step == 0 and e.action in LINK_ACTIONS]:
            self._pending.remove(event)
            self.begin(event, None)

    def poll(self, workers: WorkerGroup) -> None:
        if workers.running:
            self._step = min(workers.steps.get(rank, 0) for rank in workers.running)
        for event in list(self._pending):
            reached = event.at_step is not None and self._step >= event.at_step
            if reached or (event.at is not None and self.now >= event.at):
                self._pending.remove(event)
                self.begin(event, workers)
        for _ in self.end_due(workers):
            pass

    def begin(self, event: Event, workers: WorkerGroup | None) -> None:
        """Apply an event now, and end it when its time is over."""
        self.fired.append(AppliedEvent(event=event, seconds=self.now.seconds, step=self._step))
        self._apply(event.action, event, workers)
        if event.until is not None:
            self._active.append(event)

    def end_due(self, workers: WorkerGroup) -> Iterator[Event]:
        """End the events whose time is over, and yield each afterwards."""
        for event in [e for e in self._active if e.until is not None and self.now >= e.until]:
            if event.action in END_ACTIONS:
                self._apply(END_ACTIONS[event.action], event, workers)
            self._active.remove(event)
            yield event

    def _apply(self, action: Action, event: Event, workers: WorkerGroup | None) -> None:
        if action in self._handlers:
            self._handlers[action]()
        elif workers is not None and action == "store":
            workers.kill_store()
        elif workers is not None and action in WORKER_ACTIONS:
            ranks: Sequence[int] = [event.rank or 0]
            if event.rank is None and self._lab is not None:
                ranks = self._lab.host(event.host or 0).ranks
            for rank in ranks:
                getattr(workers, action)(rank)
        elif self._lab is not None:
            _change_links(self._lab, action, event)


def _change_links(lab: Lab, action: Action, event: Event) -> None:
    from thalweg.lab import packet_faults  # needs Linux and pyroute2

    links, rank, peer = event.links(lab.cluster), event.rank or 0, event.peer or 0
    match action:
        case "degrade" if event.rate is not None:
            lab.links.degrade(links, event.rate)
        case "flow":
            lab.links.fill(links, flows=event.flows, rate=event.rate)
        case "restore" | "cut" | "heal":
            getattr(lab.links, action)(links)
        case "blackhole" | "reroute":
            packet_faults.set_blackhole(lab.wiring, rank, peer, on=action == "blackhole")
        case "garble" | "ungarble":
            packet_faults.set_garbling(lab.wiring, rank, on=action == "garble")
