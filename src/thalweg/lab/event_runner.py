"""Makes the events of a script happen to a lab, each when its step or its time has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from thalweg.facts import Link
from thalweg.lab.event import LINK_ACTIONS, Event
from thalweg.lab.shaping import Shape
from thalweg.launch.place import WorkerControl

if TYPE_CHECKING:
    from thalweg.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEvent:
    """An event that has happened: so long after the start, when the slowest had so many steps."""

    event: Event
    seconds: float
    step: int


class EventRunner:
    def __init__(self, lab: Lab, events: Sequence[Event]) -> None:
        for event in events:
            find_target(lab, event)
            if event.action == "degrade":
                Shape(rate=event.rate)  # refuses what can't be had
        self.fired: list[AppliedEvent] = []
        self._lab = lab
        self._pending = list(events)
        self._start = 0.0
        self._step = 0

    def prepare(self) -> None:
        self._start = monotonic()
        for event in [e for e in self._pending if e.at_step == 0 and e.action in LINK_ACTIONS]:
            self._fire(event)
            apply(self._lab, event)

    def poll(self, workers: WorkerControl) -> None:
        if workers.running:
            self._step = min(workers.steps.get(rank, 0) for rank in workers.running)
        for event in [event for event in self._pending if self._is_due(event)]:
            self._fire(event)
            if event.action in LINK_ACTIONS:
                apply(self._lab, event)
            else:
                for rank in self._lab.host(event.host or 0).ranks:
                    getattr(workers, event.action)(rank)

    def _is_due(self, event: Event) -> bool:
        if event.at is not None:
            return monotonic() - self._start >= event.at.seconds
        return event.at_step is not None and self._step >= event.at_step

    def _fire(self, event: Event) -> None:
        self._pending.remove(event)
        self.fired.append(
            AppliedEvent(event=event, seconds=monotonic() - self._start, step=self._step)
        )


def find_target(lab: Lab, event: Event) -> list[Link]:
    return lab.links.of(rack=event.rack, host=event.host, directions=event.directions)


def apply(lab: Lab, event: Event) -> None:
    """What an event does to links, now."""
    links = find_target(lab, event)
    match event.action:
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
