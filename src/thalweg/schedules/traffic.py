"""The bytes that a schedule sends over every NIC and uplink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.facts import Cluster, Link
from thalweg.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Traffic:
    sent: dict[int, int]  # bytes by rank
    received: dict[int, int]
    messages: dict[int, int]  # sent, by rank
    links: dict[Link, int]  # bytes by link


def together(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of several schedules, added up."""
    sent, received, messages = (Counter[int]() for _ in range(3))
    links = Counter[Link]()
    for part in parts:
        sent.update(part.sent)
        received.update(part.received)
        messages.update(part.messages)
        links.update(part.links)
    return Traffic(dict(sent), dict(received), dict(messages), dict(links))


def traffic(schedule: Schedule, cluster: Cluster) -> Traffic:
    """The traffic of a schedule, including answers that a quorum may not need."""
    sent, received, messages = (dict.fromkeys(schedule.ranks, 0) for _ in range(3))
    flows: Counter[tuple[int, int]] = Counter()
    for rank in schedule.ranks:
        for move in schedule.moves(rank):
            if move.kind.sends:
                messages[rank] += 1
                flows[rank, move.peer] += schedule.span_bytes(move)
    links: Counter[Link] = Counter()
    for (source, target), nbytes in flows.items():
        sent[source] += nbytes
        received[target] += nbytes
        for link in cluster.path(source, target):
            links[link] += nbytes
    return Traffic(sent, received, messages, dict(links))
