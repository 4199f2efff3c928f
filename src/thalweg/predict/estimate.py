"""What a step is predicted to take, and what of; and what the advisor says of it: plans in order,
and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thalweg.declarations import Promise
from thalweg.facts import Cluster, Machine, Workload
from thalweg.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds of a step, which add up to all of it."""

    compute: float = 0.0  # forward, backward, optimizer
    encode: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0  # that nothing hides
    waiting: float = 0.0  # for late workers

    @property
    def seconds(self) -> float:
        return self.compute + self.encode + self.decode + self.transfer + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one plan: the mean of a step's seconds, and an interval that it is in four times of five.
    `form` says how it was reckoned: by replay, or in closed form."""

    sync: str
    workers: int
    parts: Breakdown
    low: float
    high: float
    form: str
    assumed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The mean of a step."""
        return self.parts.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan in the ranking. `steps` is how many steps it needs for one of `ddp`'s, None if nobody
    measured that; plans are ranked by `steps` times seconds, those last whose `steps`
    can't be relied on."""

    plan: Plan
    estimate: Estimate
    vs_ddp: float  # speed-up of a step: above 1 is faster
    promise: Promise
    steps: float | None
    reliable: bool = True  # whether `steps` holds in a long run too
    survives: str
    why: str

    @property
    def gain(self) -> float:
        """The speed-up with the steps that it needs on top; 0 if those can't be relied on."""
        return self.vs_ddp / self.steps if self.steps and self.reliable else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Two plans take the same time at this rate of the links, in bits per second."""

    slower_links: str  # the plan that is better below
    faster_links: str  # and the one above
    bits_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Seconds of a step by plan, with all links at each of these rates times what they are."""

    rates: tuple[float, ...]  # bits per second of the slowest NIC
    seconds: Mapping[str, tuple[float, ...]]
    breaks: tuple[Crossover, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `advise` says. `ranking` has the best first; `ddp` is always among them.
    `left_out` says why of plans that weren't ranked."""

    cluster: Cluster
    workload: Workload
    machine: Machine
    allow: Promise
    ranking: tuple[RankedPlan, ...]
    verdict: str  # one sentence: what to do, and whether plain DDP would do as well
    optimizer: str = ""
    next_class: RankedPlan | None = None  # if nothing allowed gains enough: what would, if allowed
    assumed: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    sweep: Sweep | None = None

    def hint(self, option: str = "With --allow {}") -> str:
        """What the next class would gain, if nothing that is allowed gains enough; or nothing."""
        if (ranked := self.next_class) is None:
            return ""
        return f"{option.format(ranked.promise.value)}: {ranked.plan} {ranked.gain:.2f}x"

    @property
    def best(self) -> RankedPlan:
        """The first of the ranking."""
        return self.ranking[0]
