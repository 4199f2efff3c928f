"""The context in which plans run: the members of a membership epoch, and the run around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from thalweg.catalog import parse_plan
from thalweg.engine.collectives import COLLECTIVE_TIMEOUT_REMEDY, Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.errors import Interrupted, StoreLost
from thalweg.facts import Cluster
from thalweg.members.abort import AbortFlag
from thalweg.members.agreement import Agreement
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.redundancy import is_relayed, root_of
from thalweg.schedules import Group
from thalweg.training.data.position import DataPosition
from thalweg.training.finite import BadGradients
from thalweg.training.snapshot import Snapshot

RUNNING_PLAN_KEY = "plan"  # in the store: the plan that runs, and its first step


@dataclass(slots=True)
class Ledger:
    """The gradients in this rank's parameters: of each worker all up to a number. `own` is the
    number of this rank's last gradient, which may be under way."""

    applied: dict[int, int] = field(default_factory=dict)
    own: int = 0

    @property
    def version(self) -> int:
        """The number of gradients applied: higher for newer parameters."""
        return sum(self.applied.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The members of one membership epoch as one of them sees them, and the means to reach them.
    An exchange by rounds needs no more."""

    world: World
    abort_flag: AbortFlag
    group: Group
    engine: Engine
    clock: RoundCounter

    @classmethod
    def of(cls, world: World, cluster: Cluster | None = None) -> Self:
        """All ranks of this world, over connections that are opened now; `engine.close()` ends
        them."""
        abort_flag = world.abort_flag()
        return cls(
            world=world,
            abort_flag=abort_flag,
            group=Group.everybody(cluster or Cluster.flat(world.size)),
            engine=Engine(world.transport(), abort_flag, world.timeout, world.membership),
            clock=RoundCounter(),
        )

    def collectives(self, remedy: str = COLLECTIVE_TIMEOUT_REMEDY) -> Collectives:
        """The collectives of these members."""
        return Collectives(self.group, self.engine, self.clock, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext(Peers):
    """The members, and the run in which a plan runs on this rank. `snapshot` is its state before a
    step. A source calls `on_interrupted` when a rendezvous interrupts a step: True if it has been
    opened again among other members, to repeat the step with the same gradients; it calls `notify`
    with the kind, step, text and data of an event. `parameters` are those that were trained when
    the run began, also if they are frozen now; they are averaged from `first_step` on. `root` is
    the rank with the newest parameters after a rendezvous under `asp`."""

    data_position: DataPosition
    agreement: Agreement
    parameters: Mapping[str, nn.Parameter]
    bad_gradients: BadGradients
    snapshot: Callable[[], Snapshot]
    on_interrupted: Callable[[Interrupted | StoreLost], bool]
    notify: Callable[[str, int, str, Any], None]
    first_step: int = 0
    root: int | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def publish_plan(self, plan: Plan) -> None:
        """Publish the plan that begins with the current step, for ranks that rejoin."""
        if self.world.rank == self.checkpoint_writer(plan):
            self.world.put(RUNNING_PLAN_KEY, json.dumps([str(plan), self.clock.step]))

    def checkpoint_writer(self, plan: Plan) -> int:
        """The rank that writes and reads checkpoints."""
        root = self.root if self.root is not None else root_of(plan, self.group)
        return self.group.ranks[0] if root is None else root


def tree_under_way(world: World) -> tuple[Plan, int] | None:
    """The coded plan that the other ranks run, and its first step; None if their plan has no code,
    or they don't run one yet, as they may be waiting for this rank's former process."""
    value = world.wait_for(RUNNING_PLAN_KEY, 0.0, world.abort_flag())
    if value is None:
        return None
    text, since = json.loads(value)
    plan = parse_plan(text)
    return (plan, since) if is_relayed(plan) else None
