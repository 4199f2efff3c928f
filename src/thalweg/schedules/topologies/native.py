"""The backend's own all-reduce, which Thalweg calls and does not schedule.

So that it can be drawn and priced like the rest, it is described as what Gloo does for large
tensors: a ring in the order of the rank numbers, whatever the racks.
"""

from __future__ import annotations

from thalweg.schedules import Group, Schedule, Topology
from thalweg.schedules.topologies.ring import ring_cost, round_ring

GLOO_CHUNKS_PER_RANK = 2  # Gloo cuts into two chunks per rank


def native(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    return round_ring(
        "native", group, sorted(group.ranks), elements, itemsize, GLOO_CHUNKS_PER_RANK
    )


TOPOLOGY = Topology(
    name="native",
    summary="torch's own all-reduce; drawn as Gloo does it, a ring in order of rank",
    build=native,
    form=lambda x: ring_cost(x, leaving=x.r),
    variants=(),  # the preset `ddp` is
    backend=True,
)
