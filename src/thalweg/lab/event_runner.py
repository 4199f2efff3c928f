"""Applies events to a lab and its workers, each when its step or its time has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

from thalweg.facts import Duration
from thalweg.lab.event import END_ACTIONS, LINK_ACTIONS, WORKER_ACTIONS, Action, Event
from thalweg.lab.shaping import Shape
from thalweg.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from thalweg.lab.lab import Lab

NO_HANDLERS: Mapping[Action, Callable[[], None]] = MappingProxyType({})


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
        handlers: Mapping[Action, Callable[[], None]] = NO_HANDLERS,
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
        for event in [event for event in self._pending if self._is_due(event)]:
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

    def _is_due(self, event: Event) -> bool:
        if event.at is not None:
            return self.now >= event.at
        return event.at_step is not None and self._step >= event.at_step

    def _apply(self, action: Action, event: Event, workers: WorkerGroup | None) -> None:
        if action in self._handlers:
            self._handlers[action]()
        elif workers is not None and action == "store":
            workers.kill_store()
        elif workers is not None and action in WORKER_ACTIONS:
            for rank in self._ranks(event):
                getattr(workers, action)(rank)
        elif self._lab is not None:
            _change_links(self._lab, action, event)

    def _ranks(self, event: Event) -> Sequence[int]:
        if event.rank is not None or self._lab is None:
            return [event.rank or 0]
        return self._lab.host(event.host or 0).ranks


def _change_links(lab: Lab, action: Action, event: Event) -> None:
    from thalweg.lab import packet_faults  # needs Linux and pyroute2

    links, rank, peer = event.links(lab.cluster), event.rank or 0, event.peer or 0
    match action:
        case "degrade" if event.rate is not None:
            lab.links.degrade(links, event.rate)
        case "restore":
            lab.links.restore(links)
        case "flow":
            lab.links.fill(links, flows=event.flows, rate=event.rate)
        case "cut":
            lab.links.cut(links)
        case "heal":
            lab.links.heal(links)
        case "blackhole" | "reroute":
            packet_faults.set_blackhole(lab.wiring, rank, peer, on=action == "blackhole")
        case "garble" | "ungarble":
            packet_faults.set_garbling(lab.wiring, rank, on=action == "garble")
