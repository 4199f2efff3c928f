"""Convergence of replicas that are averaged in groups: whether and how fast they agree, and their
drift.

*Mixing*: the weights W_t with which a plan mixes replicas at each step, read off its rounds. After
a local step x_i + u_i on every rank, the averages of step t give

    x(t) = W_t (x(t-1) + u(t))

W_t has a block for each exchange that begins at t: row i has equal weights on the ranks whose sum
the exchange promises to rank i (the postcondition of its schedule). A rank without an exchange
keeps its own values. Rows and columns add up to one, so the mean over all ranks is preserved.

An average that is applied `delay` steps later, as in DS-Sync's windows, mixes as if it were applied
at once: x += mean(sent) - sent keeps the steps taken meanwhile, and its members have no other
exchange until then. Only in between do replicas differ by more: see `expected_drift`.

Compressed averages add the mean of all payloads to each replica, so their mean is preserved too;
their mixing is computed as if compression were lossless.

*Contraction*: the rate at which a table of exchanges brings replicas together, without noise. With
P = W_{T-1} ... W_0 over a period of T steps, less the mean:

    lambda_2   the largest absolute eigenvalue: the asymptotic rate, lambda_2^(1/T) per step
    sigma_2    the largest singular value: the part of the worst disagreement left by one period
    k(eps)     steps until eps of the worst disagreement is left, from the worst first step

Both are one for tables that aren't connected and zero for those that reach the mean exactly. Long
periods leave less than rounding errors, so products are kept scaled; lambda_2 is Gelfand's
lim ||P^m||^(1/m), by squaring.

*Drift*: the expected root mean square distance of replicas to their mean. If every rank's step adds
independent noise of variance one to each value,

    B_t = A_{t-1} + I - 11'/N      covariance of the differences to the mean, before averaging
    A_t = W_t B_t W_t'             and after it

has one periodic solution for a connected table. With A_0' = P A_0 P' + Q over a period, it is
A_0 = sum of P^k Q P'^k, added up by doubling (Smith, SIAM J. Appl. Math., 1968). Expected drift is
tr(A_t)/N, averaged over the period; before averaging it is (N-1)/N more, one step's noise.

A result that is applied d steps later leaves its members unchanged for d steps: each adds
tr(B_t) - tr(A_t) over its members. With delay=1 and an exchange at every step this makes tr(B_t),
as it must: x(t) = W_{t-1} x(t-1) + u(t) is averaged a step later.
Units: variance of one rank's step, for one value. With noise of variance v in each of n values,
replicas are sqrt(drift * v * n) from their mean.

*Uplink traffic*: the bytes per step that leave the busiest rack. More bytes always reduce drift, so
tables are to be compared by both.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log

import numpy as np
from numpy.typing import NDArray

from thalweg.catalog import Catalog
from thalweg.errors import PlanError
from thalweg.facts import Link, Size, Workload
from thalweg.plan import Plan
from thalweg.schedules import Group, connected, traffic
from thalweg.steps import PART_PAYLOAD, Round, compile_rounds, cycle

Matrix = NDArray[np.float64]
MAX_MIXING_STEPS = 4096  # of a longer period
ONE_VALUE_WORKLOAD = Workload.of_size(Size.parse("4B"))
ROUNDING_NORM_RATIO = 1e-10  # a step that leaves less leaves only rounding errors
MAX_SQUARING_COUNT = 30
MAX_COUNTED_STEPS = 512  # up to which k(eps) is counted and not estimated
MAX_START_PHASES = 512  # first steps that are tried for k(eps)
MAX_DOUBLING_COUNT = 60
VARIANCE_TOLERANCE_RATIO = 1e-12  # of the total
SMALL_DISAGREEMENT_RATIO = 1e-3
MAX_UPLINK_TRAFFIC_STEPS = 64
UPLINK_TRAFFIC_WORKLOAD = Workload.of_size(Size.parse("100KB"))  # large enough for even chunks


@dataclass(frozen=True, slots=True, eq=False)
class MixingBlock:
    """The block of W of one exchange, for the members in the order of `ranks`."""

    ranks: tuple[int, ...]
    places: NDArray[np.intp]  # indices of the members among all ranks
    weights: Matrix
    lasts: int = 1  # steps during which its members have no other exchange
    delay: int = 0  # steps until its result is applied


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The exchanges that begin at each step of a period, or at its first steps. A later exchange
    of a step averages the results of earlier ones."""

    ranks: tuple[int, ...]
    period: int
    steps: tuple[tuple[MixingBlock, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_connected(self) -> bool:
        """True if values of every rank reach every rank. If and only if they do, the powers of a
        period's product of W_t converge to the mean of all (von Neumann and Halperin on products
        of projections; for gossip, every W_t has a positive diagonal)."""
        reached = (
            (block.ranks[i], *(block.ranks[j] for j in np.flatnonzero(block.weights[i])))
            for blocks in self.steps
            for block in blocks
            for i in range(len(block.ranks))
        )
        return connected(self.ranks, ([members] for members in reached))

    @property
    def longest_pause(self) -> int | None:
        """The most steps between two exchanges of a rank; None if a rank has none."""
        steps_of: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for step, blocks in enumerate(self.steps):
            for block in blocks:
                for rank in block.ranks:
                    steps_of[rank].append(step)
        if not all(steps_of.values()):
            return None
        length = len(self.steps)
        return max(
            later - earlier
            for steps in steps_of.values()
            for earlier, later in zip(steps, [*steps[1:], steps[0] + length], strict=True)
        )

    def only(self, exchanges: Sequence[MixingBlock]) -> Mixing:
        """The mixing of a single step with these exchanges."""
        return Mixing(self.ranks, 1, (tuple(exchanges),))

    def mixed(self, step: int, values: Matrix) -> Matrix:
        """W_t times values, which have a row for each rank."""
        result = values.copy()
        for exchange in self.steps[step % len(self.steps)]:
            result[exchange.places] = exchange.weights @ result[exchange.places]
        return result

    def mixed_first(self, step: int, values: Matrix) -> Matrix:
        """Values times W_t: a product of later steps, extended by step t before it."""
        result = values.copy()
        for exchange in reversed(self.steps[step % len(self.steps)]):
            result[:, exchange.places] = result[:, exchange.places] @ exchange.weights
        return result


def mixing_of(plan: Plan, group: Group, catalog: Catalog) -> Mixing:
    """The mixing of a plan that averages parameters; PlanError for others."""
    if not plan.averages_parameters:
        raise PlanError(f"{plan} averages {plan.what.value}, replicas never differ", "try dssync")
    plain = replace(plan, precision=None)
    period = cycle(plain, group, catalog)
    ranks = tuple(sorted(group.ranks))
    places = {rank: place for place, rank in enumerate(ranks)}
    steps = [
        tuple(_exchanges(rounds, places))
        for rounds in (
            compile_rounds(plain, group, ONE_VALUE_WORKLOAD, step, catalog)
            for step in range(min(period, MAX_MIXING_STEPS))
        )
    ]
    if period == len(steps):  # rings alternate their direction, which mixes the same
        period = _repeats(steps)
    return Mixing(ranks, period, tuple(steps[:period]))


def _repeats(steps: list[tuple[MixingBlock, ...]]) -> int:
    """The least number of steps after which the exchanges repeat."""
    seen = [{(each.ranks, each.weights.tobytes(), each.lasts) for each in step} for step in steps]
    lengths = (n for n in range(1, len(steps)) if len(steps) % n == 0)
    return next((n for n in lengths if seen == seen[:n] * (len(seen) // n)), len(steps))


def _exchanges(rounds: Iterable[Round], places: dict[int, int]) -> Iterator[MixingBlock]:
    """The blocks of a step's rounds; the parts that racks exchange make one average of all."""
    across = None
    for round_ in rounds:
        if round_.payload.name == PART_PAYLOAD:
            across = round_
        elif round_.group.size > 1:
            yield _exchange(round_, places)
    if across is not None:
        size = len(places)
        everybody = np.full((size, size), 1 / size)
        yield MixingBlock(tuple(places), np.arange(size), everybody, delay=across.delay)


def _exchange(round_: Round, places: dict[int, int]) -> MixingBlock:
    members = round_.schedule.ranks
    weights = np.array([_row(round_, rank, members) for rank in members])
    return MixingBlock(
        members,
        np.array([places[rank] for rank in members], dtype=np.intp),
        weights,
        lasts=round_.lasts,
        delay=round_.delay,
    )


def _row(round_: Round, rank: int, members: tuple[int, ...]) -> list[float]:
    """The weights of the mean that the round promises to this rank."""
    promised = round_.schedule.after.holds(rank, 0)
    assert isinstance(promised, int), "parameters are averaged without a code"
    return [(promised >> peer & 1) / promised.bit_count() for peer in members]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    gap: float  # 1 - lambda_2
    sigma_gap: float  # 1 - sigma_2
    per_step: float


def contraction_of(mixing: Mixing) -> Contraction:
    if not mixing.is_connected:
        return Contraction(gap=0.0, sigma_gap=0.0, per_step=1.0)
    product, scale = _centred(np.eye(mixing.size)), 0.0
    steps = len(mixing.steps)
    for step in range(steps):
        product, scale = _scaled(_centred(mixing.mixed(step, product)), scale)
    sigma = float(np.linalg.norm(product, 2)) * exp(scale)
    eigenvalue = 0.0
    for squaring in range(1, MAX_SQUARING_COUNT + 1):
        product, scale = _scaled(_centred(product @ product), 2 * scale)
        eigenvalue = scale / 2**squaring  # its logarithm
    rate = exp(eigenvalue / steps)
    return Contraction(gap=1 - exp(eigenvalue), sigma_gap=1 - sigma, per_step=rate)


def steps_to(mixing: Mixing, eps: float, rate: float) -> int | None:
    """The number of steps k(eps), None if infinite; estimated from the asymptotic `rate` per step
    where it is large."""
    if rate >= 1.0:
        return None
    expected = ceil(log(eps) / log(rate)) if rate > 0 else 0
    if expected > MAX_COUNTED_STEPS:
        return expected
    window = _MatrixWindow(mixing)
    longest = 0
    for start in range(min(len(mixing.steps), MAX_START_PHASES)):
        window.grow(start + longest)
        while window.left_over() > eps:
            longest += 1
            window.grow(start + longest)
        window.drop_first()
    return longest


class _MatrixWindow:
    """The product of the matrices of consecutive steps, later ones to the left; it drops the first
    step and appends the next. No W_t increases disagreement, so the longest window never gets
    shorter and the search goes forward only."""

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self.begins = self.ends = 0
        self.older: deque[Matrix] = deque()  # products from each step to the begin of `newer`
        self.newer = _centred(np.eye(mixing.size))

    def grow(self, ends: int) -> None:
        for step in range(self.ends, ends):
            self.newer = _centred(self.mixing.mixed(step, self.newer))
        self.ends = max(self.ends, ends)

    def drop_first(self) -> None:
        if self.begins == self.ends:
            self.grow(self.ends + 1)
        if not self.older:
            product = self.newer = _centred(np.eye(self.mixing.size))
            for step in reversed(range(self.begins, self.ends)):
                product = self.mixing.mixed_first(step, product)
                self.older.appendleft(product)
        self.older.popleft()
        self.begins += 1

    def left_over(self) -> float:
        whole = self.newer @ self.older[0] if self.older else self.newer
        return float(np.linalg.norm(whole, 2))


def _centred(values: Matrix) -> Matrix:
    """The values less their mean over ranks, which rounding errors bring back."""
    means: Matrix = values.mean(axis=0)
    return values - means


def _scaled(product: Matrix, scale: float) -> tuple[Matrix, float]:
    """The product with a norm of one, and the logarithm of its scale."""
    norm = float(np.linalg.norm(product))
    if norm < ROUNDING_NORM_RATIO:
        return np.zeros_like(product), -inf
    return product / norm, scale + log(norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDrift:
    """The variance of the replicas after averaging, and before it, both averaged over a period, and
    the `worst` before averaging."""

    after: float
    before: float
    worst: float


def expected_drift(mixing: Mixing) -> ExpectedDrift:
    """The drift of a table of exchanges; infinite if it isn't connected."""
    if not mixing.is_connected:
        return ExpectedDrift(after=inf, before=inf, worst=inf)
    steps, noise = len(mixing.steps), 1 - 1 / mixing.size
    covariance = _stationary(mixing)
    apart = np.zeros(steps)
    for step, exchanges in enumerate(mixing.steps):
        at_once = mixing.only([e for e in exchanges if not e.delay])
        before = _averaged(at_once, 0, covariance + _noise(mixing.size))
        covariance = _averaged(mixing, step, covariance + _noise(mixing.size))
        apart[step] += np.trace(covariance)
        for exchange in exchanges:
            own = np.diagonal(before - covariance)[exchange.places].sum()
            for later in range(exchange.delay):
                apart[(step + later) % steps] += own
    apart /= mixing.size
    after = float(apart.mean())
    return ExpectedDrift(after=after, before=after + noise, worst=float(apart.max()) + noise)


def _stationary(mixing: Mixing) -> Matrix:
    """The matrix A after the last step of a period."""
    own = np.zeros((mixing.size, mixing.size))  # covariance from one period's noise
    product = _noise(mixing.size)
    for step in range(len(mixing.steps)):
        own = _averaged(mixing, step, own + _noise(mixing.size))
        product = mixing.mixed(step, product)
        product -= product.mean(axis=0)
    for _ in range(MAX_DOUBLING_COUNT):
        more = product @ own @ product.T
        own = own + more
        if np.trace(more) <= VARIANCE_TOLERANCE_RATIO * np.trace(own):
            break
        product = product @ product
    return own


def _averaged(mixing: Mixing, step: int, covariance: Matrix) -> Matrix:
    return mixing.mixed(step, mixing.mixed(step, covariance).T).T


def _noise(size: int) -> Matrix:
    """The covariance of independent steps of variance one, less their mean."""
    return np.eye(size) - 1 / size


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingSummary:
    """The convergence of a plan, computed from the first `looked_at` steps of its period as if they
    repeated."""

    connected: bool
    gap: float  # 1 - lambda_2 of a period's product
    sigma_gap: float  # 1 - sigma_2
    contraction: float  # asymptotic rate per step
    steps_to_little: int | None  # until a thousandth is left; None: never
    drift: float  # variance, in units of one step's noise
    drift_before: float  # before averaging
    period: int
    looked_at: int
    longest_pause: int | None  # steps between two exchanges of a rank; None: never


def mixing_summary(plan: Plan, group: Group, catalog: Catalog) -> MixingSummary:
    return mixing_summary_of(mixing_of(plan, group, catalog))


def mixing_summary_of(mixing: Mixing) -> MixingSummary:
    found, apart = contraction_of(mixing), expected_drift(mixing)
    return MixingSummary(
        connected=mixing.is_connected,
        gap=found.gap,
        sigma_gap=found.sigma_gap,
        contraction=found.per_step,
        steps_to_little=steps_to(mixing, SMALL_DISAGREEMENT_RATIO, found.per_step),
        drift=apart.after,
        drift_before=apart.before,
        period=mixing.period,
        looked_at=len(mixing.steps),
        longest_pause=mixing.longest_pause,
    )


def uplink_traffic(plan: Plan, group: Group, catalog: Catalog, period: int) -> float | None:
    """The bytes per step out of the busiest rack, in units of the model size, averaged over a
    period or its first steps; None for a single rack. A window's bytes are counted once."""
    if len(group.racks) == 1:
        return None
    steps = min(period, MAX_UPLINK_TRAFFIC_STEPS)
    leaving: Counter[Link] = Counter()
    for step in range(steps):
        for round_ in compile_rounds(plan, group, UPLINK_TRAFFIC_WORKLOAD, step, catalog):
            leaving.update(traffic(round_.schedule, group.cluster).links)
    uplinks = [n for link, n in leaving.items() if (link.kind, link.direction) == ("uplink", "out")]
    return max(uplinks, default=0) / steps / UPLINK_TRAFFIC_WORKLOAD.nbytes
