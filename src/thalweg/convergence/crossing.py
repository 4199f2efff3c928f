"""What a table costs where it hurts: bytes that leave the busiest rack, a step.

Drift can always be bought with bytes, so tables are to be compared by both.
"""

from __future__ import annotations

from collections import Counter

from thalweg.catalog import Catalog
from thalweg.facts import Link, Size, Workload
from thalweg.plan import Plan
from thalweg.rounds import compile_rounds
from thalweg.schedules import Group, traffic

MOST_STEPS = 64
MODEL = Workload.of_size(Size.parse("100KB"))  # large enough for even chunks


def crossing(plan: Plan, group: Group, catalog: Catalog, period: int) -> float | None:
    """In units of the model, averaged over a period or its first steps; None for a single rack. A
    window's bytes are counted once, however many steps it lasts."""
    if len(group.racks) == 1:
        return None
    steps = min(period, MOST_STEPS)
    leaving: Counter[Link] = Counter()
    for step in range(steps):
        for round_ in compile_rounds(plan, group, MODEL, step, catalog):
            leaving.update(traffic(round_.schedule, group.cluster).links)
    uplinks = [n for link, n in leaving.items() if (link.kind, link.direction) == ("uplink", "out")]
    return max(uplinks, default=0) / steps / MODEL.nbytes
