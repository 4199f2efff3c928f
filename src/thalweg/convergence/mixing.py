"""Which replicas a plan mixes at each step, with what weights: W_t, read off its rounds.

After a local step x_i + u_i on every rank, the averages of step t give

    x(t) = W_t (x(t-1) + u(t))

W_t has a block for each exchange that begins at t: row i holds equal weights on those whose sum the
exchange promises to rank i (the postcondition of the schedule that is run). Who meets nobody keeps
its own. Rows and columns add up to one, so the mean over all ranks is kept.

An average that is applied `delay` steps later, as those of DS-Sync's windows are, mixes the same as
if it were applied at once: x += mean(sent) - sent keeps the steps taken meanwhile, and its members
meet nobody else until then. Only in between do replicas differ by more: see `expected_drift`.

Compressed averages add the mean of what was sent to each of them, so their mean is kept too; how
they mix is worked out as if nothing were lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thalweg.catalog import Catalog
from thalweg.errors import PlanError
from thalweg.facts import Size, Workload
from thalweg.plan import Plan
from thalweg.rounds import PART, Round, compile_rounds, cycle
from thalweg.schedules import Group, connected

Matrix = NDArray[np.float64]
MOST_STEPS = 4096  # of a longer period, only so many are looked at
ONE_VALUE = Workload.of_size(Size.parse("4B"))


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Those who mix, and how: a block of W, for the members in the order of `ranks`."""

    ranks: tuple[int, ...]
    places: NDArray[np.intp]  # of the members among all
    weights: Matrix
    lasts: int = 1  # steps for which its members meet nobody else
    delay: int = 0  # steps until its result is applied


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The exchanges that begin at each of the first steps of a period, mostly all of them. One that
    comes later in a step is of what the earlier ones have made."""

    ranks: tuple[int, ...]
    period: int
    steps: tuple[tuple[Exchange, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_connected(self) -> bool:
        """Whether everybody's knowledge reaches everybody. If and only if it does, the product of
        the W_t of a period, again and again, goes to the mean of all (von Neumann and Halperin on
        products of projections; for gossip, every W_t has a positive diagonal)."""
        reached = (
            (
                exchange.ranks[i],
                *(exchange.ranks[j] for j in np.flatnonzero(exchange.weights[i])),
            )
            for exchanges in self.steps
            for exchange in exchanges
            for i in range(len(exchange.ranks))
        )
        return connected(self.ranks, ([members] for members in reached))

    @property
    def longest_pause(self) -> int | None:
        """The most steps from one meeting of a rank to its next; None if somebody has none."""
        met: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for step, exchanges in enumerate(self.steps):
            for exchange in exchanges:
                for rank in exchange.ranks:
                    met[rank].append(step)
        if not all(met.values()):
            return None
        length = len(self.steps)
        return max(
            later - earlier
            for steps in met.values()
            for earlier, later in zip(steps, [*steps[1:], steps[0] + length], strict=True)
        )

    def only(self, exchanges: Sequence[Exchange]) -> Mixing:
        """As if there were one step, with these alone."""
        return Mixing(self.ranks, 1, (tuple(exchanges),))

    def matrix(self, step: int) -> Matrix:
        """W_t, whole."""
        return self.mixed(step, np.eye(self.size))

    def mixed(self, step: int, values: Matrix) -> Matrix:
        """W_t times values, a row for each rank."""
        result = values.copy()
        for exchange in self.steps[step % len(self.steps)]:
            result[exchange.places] = exchange.weights @ result[exchange.places]
        return result

    def mixed_first(self, step: int, values: Matrix) -> Matrix:
        """Values times W_t: what a later product becomes if step t comes before it."""
        result = values.copy()
        for exchange in reversed(self.steps[step % len(self.steps)]):
            result[:, exchange.places] = result[:, exchange.places] @ exchange.weights
        return result


def mixing_of(plan: Plan, group: Group, catalog: Catalog) -> Mixing:
    """Of any plan that averages parameters."""
    if not plan.averages_parameters:
        raise PlanError(f"{plan} averages {plan.what.value}, replicas never differ", "try dssync")
    plain = replace(plan, precision=None)
    period = cycle(plain, group, catalog)
    ranks = tuple(sorted(group.ranks))
    places = {rank: place for place, rank in enumerate(ranks)}
    steps = [
        tuple(_exchanges(rounds, places))
        for rounds in (
            compile_rounds(plain, group, ONE_VALUE, step, catalog)
            for step in range(min(period, MOST_STEPS))
        )
    ]
    if period == len(steps):  # rings go both ways by turns, which mixes the same
        period = _repeats(steps)
    return Mixing(ranks, period, tuple(steps[:period]))


def _repeats(steps: list[tuple[Exchange, ...]]) -> int:
    """The least number of steps after which everything is the same."""
    seen = [{(each.ranks, each.weights.tobytes(), each.lasts) for each in step} for step in steps]
    lengths = (n for n in range(1, len(steps)) if len(steps) % n == 0)
    return next((n for n in lengths if seen == seen[:n] * (len(seen) // n)), len(steps))


def _exchanges(rounds: Iterable[Round], places: dict[int, int]) -> Iterator[Exchange]:
    """Parts that racks exchange among their like are together an average of everybody's."""
    across = None
    for round_ in rounds:
        if round_.payload.name == PART:
            across = round_
        elif round_.group.size > 1:
            yield _exchange(round_, places)
    if across is not None:
        size = len(places)
        everybody = np.full((size, size), 1 / size)
        yield Exchange(tuple(places), np.arange(size), everybody, delay=across.delay)


def _exchange(round_: Round, places: dict[int, int]) -> Exchange:
    members = round_.schedule.ranks
    weights = np.array([_row(round_, rank, members) for rank in members])
    return Exchange(
        members,
        np.array([places[rank] for rank in members], dtype=np.intp),
        weights,
        lasts=round_.lasts,
        delay=round_.delay,
    )


def _row(round_: Round, rank: int, members: tuple[int, ...]) -> list[float]:
    """The mean that this rank is promised."""
    promised = round_.schedule.after.holds(rank, 0)
    assert isinstance(promised, int), "parameters are averaged without a code"
    return [(promised >> peer & 1) / promised.bit_count() for peer in members]
