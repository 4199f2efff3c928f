"""The declaration of a topology: a file in `topologies/`, or an installed package's entry point,
holds a `TOPOLOGY`, and nothing else changes.

`build(group, elements, itemsize, step, **arguments)` returns a schedule and is pure; most ignore
the step. `coded_fanout(workers, **arguments)` is the number of children of a node in the form that
tolerates stragglers (`schedules.coded_tree`), for topologies that have one; None if that is open.
`groups(group, step)` are the averaging groups that begin at a step, for topologies that average in
changing groups; the schedule is then built for each. `keeps_apart(group)` are the contended links,
which average less often.

For predictions, `form(symbols, **arguments)` is the cost of one synchronisation
(`schedules.closed_form`); without it, clusters that are too large to simulate have no prediction.
`lanes(group, **arguments)` is the number of chunks that travel side by side instead of one after
the other, and `scopes(symbols)` are the symbols of the groups that average at the same time, if
that isn't everybody.

Advice tries `variants`: None stands for the topology with default arguments, and an empty tuple for
nothing. `straggler(group, **arguments)` is the member for whose arrival the others have something
to do, which `before_straggler(symbols)` prices. Calibration times a topology with `is_calibrated`:
its connections pause and restart in one exchange, which slows some networks down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thalweg.declarations import Parameter, Variant
from thalweg.schedules.closed_form import ClosedForm, Symbols
from thalweg.schedules.group import Group
from thalweg.schedules.schedule import Schedule
from thalweg.schedules.shuffle.contended_links import ContendedLinks
from thalweg.schedules.shuffle.group_table import AveragingGroup

COMPRESS_BETWEEN = "between"  # of an argument `compress`: compress between the racks alone


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
    form: ClosedForm | None = None
    lanes: Callable[..., int] = lambda group, **arguments: 1
    scopes: Callable[[Symbols], tuple[Symbols, ...]] = lambda x: (x,)
    variants: tuple[Variant, ...] | None = None
    straggler: Callable[..., int] | None = None
    before_straggler: ClosedForm | None = None
    is_calibrated: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """The default value of every argument."""
        return {name: parameter.default for name, parameter in self.parameters.items()}
