"""How many children, and how many of them may be late: a rule from what was measured.

A step takes, in this model,

    load x compute  +  layers x fanout x message  +  P(somebody is missed) x delay

Redundancy pays only against delays that don't grow with the load: pauses, failures, the network. A
`Lateness` is the chance that a worker is late at a step, whatever it computes, and by how much. P
follows the tree from its leaves: a node is missed if it is late itself, or one of its teams is
missed altogether.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from thalweg.codes.allocation import allocate
from thalweg.codes.fractional import team_tree
from thalweg.codes.tolerance import chance_of_waiting
from thalweg.facts import Lateness

MOST_STRAGGLERS = 3
FANOUTS = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Estimate:
    fanout: int
    stragglers: int
    seconds: float
    load: float  # part of the data that a worker computes
    missed: float  # chance that a step has to wait for somebody late


@lru_cache(maxsize=64)
def choose(
    workers: int,
    lateness: Lateness,
    *,
    compute: float,
    message: float,
    fanout: int | None = None,
    stragglers: int | None = None,
) -> Estimate:
    """The quickest, among those with this fanout and so many stragglers if they are given. Seconds:
    `compute` for all data, `message` for one over a link."""
    fanouts = sorted(
        {f for f in (*FANOUTS, workers) if f <= workers} if fanout is None else {fanout}
    )
    numbers = range(MOST_STRAGGLERS + 1) if stragglers is None else [stragglers]
    fitting = [(f, s) for s in numbers for f in fanouts if s < min(f, workers)]
    if not fitting:  # planting it says why
        return Estimate(fanouts[0], max(numbers), 0.0, 1.0, 0.0)
    return min(
        (estimate(workers, f, s, lateness, compute, message) for f, s in fitting),
        key=lambda found: found.seconds,
    )


def estimate(
    workers: int, fanout: int, stragglers: int, late: Lateness, compute: float, message: float
) -> Estimate:
    branches = team_tree(range(workers), fanout, stragglers)
    load = float(max(allocate(branches, 0).loads.values()))
    missed = chance_of_waiting(branches, dict.fromkeys(branches.workers, late.probability))
    widest = max(map(len, branches.children.values()))
    seconds = load * compute + branches.depth * widest * message + missed * late.delay.seconds
    return Estimate(fanout, stragglers, seconds, load, missed)
