"""The declaration of a topology: a file in `topologies/` holds a `TOPOLOGY`, and nothing else
changes.

`build(group, elements, itemsize, step, **arguments)` returns a schedule and is pure; most ignore
the step. `coded_fanout(workers, **arguments)` is the number of children of a node in the form that
tolerates stragglers (`schedules.coded_tree`), for topologies that have one; None if that is open.
`groups(group, step)` are the averaging groups that begin at a step, for topologies that average in
changing groups; the schedule is then built for each. `keeps_apart(group)` are the contended links,
which average less often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from thalweg.declarations import Parameter
from thalweg.schedules.group import Group
from thalweg.schedules.schedule import Schedule
from thalweg.schedules.shuffle.contended_links import ContendedLinks
from thalweg.schedules.shuffle.group_table import AveragingGroup


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
    mixes: bool = False  # averages some ranks only: replicas differ, their mean is kept
    backend: bool = False  # the backend runs its own collective
