"""Which plan `auto` runs next: decisions alone, the same on every rank that is told the same.

    advised   the best plan is taken up, unless the one that runs is predicted to be as good
    measured  a few steps later it is known what it takes. If that is more than another plan was
              predicted to take, that one is tried, and in the end the best that was measured stays
    drifting  once a step takes much less or more than it was measured to, advice is asked for again

It doesn't flap. A change must promise more than noise; and after an advice some steps pass before
the next, twice as many if the plan has stayed, or if it is asked for again soon after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from thalweg.facts import about

AS_GOOD = 0.98  # of the time of the plan that runs: what is above isn't worth a change at first
WORTH_IT = 0.95  # the same of what it was measured to take, later
REFUTED = 1.03  # times what another is predicted to take, before that one is tried
MOST_TRIALS = 3  # of plans, after an advice
PAUSE, LONGEST_PAUSE = 30, 4000  # steps from one advice to the next
SOON = 4  # times the pause
LOOKED_AT = 8  # steps at least, to tell what is usual now
DRIFTED = 1.25  # times slower or faster than it was
IN_A_ROW = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A plan that can be run here, and what a step of it is predicted to take."""

    sync: str
    seconds: float
    low: float
    high: float
    steps: float = 1.0  # that it is assumed to need for one of an exact plan
    settling: int = 2  # steps that don't tell what it takes
    timed: int = 6  # steps that do, after those
    cycle: int = 1  # steps after which it repeats itself
    late: bool = False  # some steps wait for late workers: all of them count, not the usual one
    why: str = ""

    @property
    def cost(self) -> float:
        return self.steps * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """From `step` on this plan is run. `measured` is None until it is known, in seconds."""

    step: int
    sync: str
    predicted: float
    low: float
    high: float
    measured: float | None = None
    reason: str

    def __str__(self) -> str:
        text = f"{self.sync}: predicted {about(self.predicted, 's')}"
        text += f" ({about(self.low, 's')} to {about(self.high, 's')})"
        return text + (
            f", measured {about(self.measured, 's')}" if self.measured is not None else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What is run, since when, and the step at which something is due: advice, or what a step
    takes. None while nothing is."""

    sync: str
    since: int
    due: int | None
    asks: bool = False  # for advice
    advices: int = 0  # so far
    ranking: Sequence[Prospect] = ()  # best first; empty until the first advice
    tried: Mapping[str, float] = field(default_factory=dict)  # seconds, since the last advice
    trials: int = 0
    came_from: str = ""  # what ran when advice was asked for
    soon: bool = False  # after the last advice
    pause: int = PAUSE
    rests_until: int = 0
    reason: str = ""

    @property
    def prospect(self) -> Prospect | None:
        return next((one for one in self.ranking if one.sync == self.sync), None)

    def chosen(self) -> Chosen | None:
        one = self.prospect
        if one is None:
            return None
        return Chosen(
            step=self.since,
            sync=self.sync,
            predicted=one.seconds,
            low=one.low,
            high=one.high,
            reason=self.reason,
        )


def ask(heading: Heading, step: int, meanwhile: str, due: int) -> Heading:
    """For advice, which is to come at step `due`; until then another plan may be run."""
    quiet = step - (heading.rests_until - heading.pause)
    return replace(
        heading,
        sync=meanwhile,
        since=step,
        due=due,
        asks=True,
        came_from=heading.sync,
        soon=quiet < SOON * heading.pause,
    )


def advised(heading: Heading, step: int, ranking: Sequence[Prospect], now: float) -> Heading:
    """Take up the best, or stay; `now` is what a step usually takes under the plan that runs, which
    is in the ranking too."""
    before = heading.came_from or heading.sync
    first = not heading.advices
    own = next((one for one in ranking if one.sync == before), None)
    best = ranking[0]
    seen = own is not None and not own.late  # a few steps tell little where some are late
    heading = replace(
        heading,
        ranking=tuple(ranking),
        tried={before: now} if seen else {},
        trials=1,
        came_from=before,
        asks=False,
        advices=heading.advices + 1,
    )
    worth_it = own is None or (
        best.cost < AS_GOOD * own.cost
        and (first or own.late or best.cost < WORTH_IT * own.steps * now)
    )
    if worth_it:
        return _try(heading, step, best, best.why)
    assert own is not None
    gain = "2 %" if first else "5 %"
    return _try(heading, step, own, f"nothing else promises to gain {gain} on it")


def without_advice(heading: Heading, step: int, problem: str) -> Heading:
    """There was none: stay."""
    before = heading.came_from or heading.sync
    heading = replace(heading, sync=before, asks=False, advices=heading.advices + 1, reason=problem)
    return _rest(heading, step)


def measured(heading: Heading, step: int, seconds: float, *, may_leave: bool = True) -> Heading:
    """What a step of the plan that runs takes: stay, try another, or go back to a better one."""
    tried = {**heading.tried, heading.sync: seconds}
    heading = replace(heading, tried=tried)
    costs = {one.sync: one.steps * tried[one.sync] for one in heading.ranking if one.sync in tried}
    known = {_name(sync) for sync in tried}
    rival = next((one for one in heading.ranking if _name(one.sync) not in known), None)
    if not may_leave or heading.sync not in costs:
        return _rest(heading, step)
    if (
        rival is not None
        and heading.trials < MOST_TRIALS
        and REFUTED * rival.cost < min(costs.values())
    ):
        reason = f"{heading.sync} takes {about(seconds, 's')}, more than is predicted of this"
        return _try(replace(heading, trials=heading.trials + 1), step, rival, reason)
    best = min(costs, key=costs.__getitem__)
    if costs[best] < AS_GOOD * costs[heading.sync]:
        told = f"the best that was tried: {about(tried[best], 's')} a step"
        heading = replace(heading, sync=best, since=step, reason=told)
    return _rest(heading, step)


def _name(sync: str) -> str:
    """Without its settings, which change little."""
    return sync.partition(" @")[0]


def _try(heading: Heading, step: int, one: Prospect, reason: str) -> Heading:
    due = step + one.settling + one.timed
    return replace(heading, sync=one.sync, since=step, due=due, reason=reason)


def _rest(heading: Heading, step: int) -> Heading:
    """Until it drifts, and for some steps even then."""
    stayed = heading.sync == heading.came_from
    longer = heading.advices > 1 and (stayed or heading.soon)
    pause = min(2 * heading.pause, LONGEST_PAUSE) if longer else PAUSE
    return replace(heading, due=None, pause=pause, rests_until=step + pause, came_from="")


def usual(seconds: Sequence[float], cycle: int = 1) -> float:
    """The middle one of whole cycles' means, so that a pause now and then doesn't count."""
    blocks = [seconds[i : i + cycle] for i in range(len(seconds) % cycle, len(seconds), cycle)]
    return median(fmean(block) for block in blocks) if blocks else fmean(seconds)


class Drift:
    """Whether steps take another time than they did when they were measured."""

    def __init__(self, seconds: float, cycle: int = 1) -> None:
        self._before = seconds
        self._cycle = cycle
        self._last: deque[float] = deque(maxlen=-(-LOOKED_AT // cycle) * cycle)
        self._in_a_row = 0

    @property
    def now(self) -> float:
        """What a step takes now."""
        return usual([*self._last], self._cycle) if self._last else self._before

    def begin_again(self) -> None:
        """Something was done about it: look whether that helps."""
        self._last.clear()
        self._in_a_row = 0

    def add(self, seconds: float) -> bool:
        self._last.append(seconds)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        ratio = self.now / self._before
        self._in_a_row = self._in_a_row + 1 if not 1 / DRIFTED < ratio < DRIFTED else 0
        return self._in_a_row >= IN_A_ROW
