"""What a topology declares: a file in `topologies/` holds a `TOPOLOGY`, and nothing else changes.

`build(group, elements, itemsize, step, **arguments)` is a pure function to a schedule; most ignore
the step. `coded_fanout(workers, **arguments)` is how many children a node has in the form that goes
on without stragglers (`schedules.coded`), for topologies that have one; None if that is open.
`groups(group, step)` are the meetings that begin at a step, for topologies that let members meet by
turns; the schedule is then built for each. `keeps_apart(group)` is what meets the others less
often, since it is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from thalweg.declarations import Parameter
from thalweg.schedules.group import Group
from thalweg.schedules.schedule import Schedule
from thalweg.schedules.shuffle.averaging_group import AveragingGroup
from thalweg.schedules.shuffle.contended_links import ContendedLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    name: str
    summary: str
    build: Callable[..., Schedule]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    coded_fanout: Callable[..., int | None] | None = None
    groups: Callable[[Group, int], tuple[AveragingGroup, ...]] | None = None
    keeps_apart: Callable[[Group], ContendedLinks] | None = None
    period: Callable[[Group], int] = lambda group: 1  # steps after which the groups repeat
    mixes: bool = False  # averages neighbours, not everybody: replicas differ, their mean is kept
    backend: bool = False  # the backend's own collective, described here and run there
