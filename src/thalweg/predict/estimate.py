"""The results of predictions and of the advisor: step times, their breakdown, ranked plans, and
predictions beside measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thalweg.declarations import Promise
from thalweg.facts import Situation, about
from thalweg.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The parts of a step time in seconds, which add up to it."""

    compute: float = 0.0  # forward, backward, optimizer
    encode: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0  # exposed communication
    waiting: float = 0.0  # for stragglers

    @property
    def seconds(self) -> float:
        return self.compute + self.encode + self.decode + self.transfer + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted mean step time of one plan in seconds, and its 80 % prediction interval. `form`
    is how it was computed: by simulation (`replay`) or in closed form."""

    plan: Plan
    parts: Breakdown
    low: float
    high: float
    form: str
    assumed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The mean step time in seconds."""
        return self.parts.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The predicted step time of a plan in seconds with its 80 % interval, and the measured step
    time, None until it is known."""

    sync: str
    predicted: float
    low: float
    high: float
    measured: float | None = None

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measurement; 0 until there is one."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def covered(self) -> bool:
        """True if the measured step time is in the interval."""
        return self.measured is not None and self.low <= self.measured <= self.high

    def __str__(self) -> str:
        text = f"{self.sync}: predicted {about(self.predicted, 's')}"
        text += f" ({about(self.low, 's')} to {about(self.high, 's')})"
        return text if self.measured is None else f"{text}, measured {about(self.measured, 's')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan in the ranking. `steps` is the number of steps that it needs per step of `ddp`, None
    if not measured; plans are ranked by `steps` times seconds, those with unreliable `steps`
    last."""

    estimate: Estimate
    vs_ddp: float  # speed-up per step: above 1 is faster
    promise: Promise
    steps: float | None
    reliable: bool = True  # True if `steps` holds in a long run too
    survives: str
    why: str

    @property
    def plan(self) -> Plan:
        """The plan of the estimate."""
        return self.estimate.plan

    @property
    def gain(self) -> float:
        """The speed-up including extra steps; 0 if those aren't reliable."""
        return self.vs_ddp / self.steps if self.steps and self.reliable else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """The link rate in bits per second at which two plans take the same time."""

    slower_links: str  # the plan that is better below
    faster_links: str  # and the one above
    bits_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The step time of each plan in seconds, with all links scaled to each of these rates."""

    rates: tuple[float, ...]  # bits per second of the slowest NIC
    seconds: Mapping[str, tuple[float, ...]]
    breaks: tuple[Crossover, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The result of `advise`. `ranking` has the best plan first and always includes `ddp`;
    `left_out` has the reasons for plans that weren't ranked."""

    situation: Situation
    allow: Promise
    ranking: tuple[RankedPlan, ...]
    verdict: str  # one sentence: the plan to use
    optimizer: str = ""
    next_class: RankedPlan | None = None  # the best plan of a weaker class, if no allowed one gains
    assumed: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    sweep: Sweep | None = None

    def hint(self, option: str = "With --allow {}") -> str:
        """A hint at the gain of a weaker class, if no allowed plan gains enough; else empty."""
        if (ranked := self.next_class) is None:
            return ""
        return f"{option.format(ranked.promise.value)}: {ranked.plan} {ranked.gain:.2f}x"

    @property
    def best(self) -> RankedPlan:
        """The first plan of the ranking."""
        return self.ranking[0]
