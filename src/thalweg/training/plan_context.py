"""The context in which plans run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thalweg.catalog import parse_plan
from thalweg.engine.collectives import RoundCounter
from thalweg.engine.engine import Engine
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
class PlanContext:
    """The context in which plans run: one rank in one membership epoch. `snapshot` is its state
    before a step; the exchange calls `on_interrupted` when a rendezvous interrupts a step,
    and `notify` with the kind, step, text and data of an event.
    Parameters are averaged from `first_step` on. `root` is the rank with the newest parameters
    after a rendezvous under `asp`."""

    world: World
    abort_flag: AbortFlag
    group: Group
    engine: Engine
    clock: RoundCounter
    data_position: DataPosition
    agreement: Agreement
    bad_gradients: BadGradients
    snapshot: Callable[[], Snapshot]
    on_interrupted: Callable[[], None]
    notify: Callable[[str, int, str, Any], None]
    first_step: int = 0
    root: int | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def tree_under_way(self) -> tuple[Plan, int] | None:
        """The coded plan that the other ranks run, and its first step; None if their plan has no
        code, or they don't run one yet, as they may be waiting for this rank's former process."""
        value = self.world.wait_for(RUNNING_PLAN_KEY, 0.0, self.abort_flag)
        if value is None:
            return None
        text, since = json.loads(value)
        plan = parse_plan(text)
        return (plan, since) if is_relayed(plan) else None

    def checkpoint_writer(self, plan: Plan) -> int:
        """The rank that writes and reads checkpoints."""
        root = self.root if self.root is not None else root_of(plan, self.group)
        return self.group.ranks[0] if root is None else root
