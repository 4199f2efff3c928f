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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import ceil, exp, inf, log

import numpy as np
from numpy.typing import NDArray

from thalweg.catalog import Catalog
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Link, Size, Workload, grouped
from thalweg.plan import Plan
from thalweg.schedules import Group, Schedule, connected, together, traffic
from thalweg.steps import Chain, compile_step, cycle

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
    """The block of W of one exchange."""

    places: NDArray[np.intp]  # indices of the members among all ranks
    weights: Matrix
    lasts: int = 1  # steps during which its members have no other exchange
    delay: int = 0  # steps until its result is applied


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The exchanges of `size` ranks that begin at each step of a period, or at its first steps. A
    later exchange of a step averages the results of earlier ones."""

    size: int
    period: int
    steps: tuple[tuple[MixingBlock, ...], ...]

    @property
    def is_connected(self) -> bool:
        """True if values of every rank reach every rank. If and only if they do, the powers of a
        period's product of W_t converge to the mean of all (von Neumann and Halperin on products
        of projections; for gossip, every W_t has a positive diagonal)."""
        reached = (
            [(place, *block.places[np.flatnonzero(weights)])]
            for blocks in self.steps
            for block in blocks
            for place, weights in zip(block.places, block.weights, strict=True)
        )
        return connected(range(self.size), reached)

    @property
    def longest_pause(self) -> int | None:
        """The most steps between two exchanges of a rank; None if a rank has none."""
        steps_of = grouped(
            (place, step)
            for step, blocks in enumerate(self.steps)
            for block in blocks
            for place in block.places
        )
        if len(steps_of) < self.size:
            return None
        return max(
            later - earlier
            for steps in steps_of.values()
            for earlier, later in pairwise([*steps, steps[0] + len(self.steps)])
        )

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
        raise PlanError(f"{plan} averages {plan.averaged}, replicas never differ", "try dssync")
    plain = replace(plan, precision=None)
    period = cycle(plain, group, catalog)
    places = {rank: place for place, rank in enumerate(sorted(group.ranks))}
    steps = []
    for step in range(min(period, MAX_MIXING_STEPS)):
        compiled = compile_step(plain, group, ONE_VALUE_WORKLOAD, step, catalog)
        steps.append(tuple(_blocks(compiled.chains, places)))
    if period == len(steps):  # rings alternate their direction, which mixes the same
        period = _repeats(steps)
    return Mixing(group.size, period, tuple(steps[:period]))


def _repeats(steps: list[tuple[MixingBlock, ...]]) -> int:
    """The least number of steps after which the exchanges repeat."""
    seen = [{(b.places.tobytes(), b.weights.tobytes(), b.lasts) for b in step} for step in steps]
    lengths = (n for n in range(1, len(steps)) if len(steps) % n == 0)
    return next((n for n in lengths if seen == seen[:n] * (len(seen) // n)), len(steps))


def _blocks(chains: Iterable[Chain], places: dict[int, int]) -> Iterator[MixingBlock]:
    """The blocks of a step; the parts that racks exchange make one average of all."""
    across = None
    for one in chains:
        if one.span is not None:
            across = one
            continue
        for round_ in one.rounds:
            if round_.group.size > 1:
                members = np.array([places[rank] for rank in round_.schedule.ranks])
                yield MixingBlock(members, _weights(round_.schedule), one.lasts, one.delay)
    if across is not None:
        size = len(places)
        yield MixingBlock(np.arange(size), np.full((size, size), 1 / size), delay=across.delay)


def _weights(schedule: Schedule) -> Matrix:
    """The weights of the mean that the schedule promises to each rank."""
    rows = []
    for rank in schedule.ranks:
        promised = schedule.after.content(rank, 0)
        assert isinstance(promised, int), "parameters are averaged without a code"
        rows.append([(promised >> peer & 1) / promised.bit_count() for peer in schedule.ranks])
    return np.array(rows)


def _contraction(mixing: Mixing) -> tuple[float, float]:
    """The logarithm of lambda_2, and sigma_2, of the product of a period."""
    if not mixing.is_connected:
        return 0.0, 1.0
    product, scale = _without_mean(mixing.size), 0.0
    for step in range(len(mixing.steps)):
        product, scale = _scaled(_centred(mixing.mixed(step, product)), scale)
    sigma = float(np.linalg.norm(product, 2)) * exp(scale)
    eigenvalue = 0.0
    for squaring in range(1, MAX_SQUARING_COUNT + 1):
        product, scale = _scaled(_centred(product @ product), 2 * scale)
        eigenvalue = scale / 2**squaring
    return eigenvalue, sigma


def steps_to(mixing: Mixing, eps: float, rate: float) -> int | None:
    """The number of steps k(eps), None if infinite; estimated from the asymptotic `rate` per step
    where it is large. No W_t increases disagreement, so a window of steps that leaves eps never
    gets shorter as it moves on."""
    if rate >= 1.0:
        return None
    expected = ceil(log(eps) / log(rate)) if rate > 0 else 0
    if expected > MAX_COUNTED_STEPS:
        return expected
    older: list[Matrix] = []  # products from each step of the window, last to first, to `newer`'s
    newer, end, longest = _without_mean(mixing.size), 0, 0
    for start in range(min(len(mixing.steps), MAX_START_PHASES)):
        if not older:
            newer = _without_mean(mixing.size)
            older = [newer]
            for step in reversed(range(start, end)):
                older.append(mixing.mixed_first(step, older[-1]))
        while end < start + longest or np.linalg.norm(newer @ older[-1], 2) > eps:
            newer, end = _centred(mixing.mixed(end, newer)), end + 1
        longest = end - start
        older.pop()
    return longest


def _centred(values: Matrix) -> Matrix:
    """The values less their mean over ranks, which rounding errors bring back."""
    means: Matrix = values.mean(axis=0)
    return values - means


def _without_mean(size: int) -> Matrix:
    """The projection on differences to the mean, which is also the covariance of independent steps
    of variance one, less their mean."""
    return np.eye(size) - 1 / size


def _scaled(product: Matrix, scale: float) -> tuple[Matrix, float]:
    """The product with a norm of one, and the logarithm of its scale."""
    norm = float(np.linalg.norm(product))
    if norm < ROUNDING_NORM_RATIO:
        return np.zeros_like(product), -inf
    return product / norm, scale + log(norm)


def expected_drift(mixing: Mixing) -> NDArray[np.float64]:
    """The variance of the replicas after the averaging of each step; infinite if the exchanges
    aren't connected. Before averaging it is one step's noise more."""
    steps, noise = len(mixing.steps), _without_mean(mixing.size)
    if not mixing.is_connected:
        return np.full(steps, inf)
    covariance, drift = _stationary(mixing), np.zeros(steps)
    for step, exchanges in enumerate(mixing.steps):
        at_once = Mixing(mixing.size, 1, (tuple(e for e in exchanges if not e.delay),))
        before = _averaged(at_once, 0, covariance + noise)
        covariance = _averaged(mixing, step, covariance + noise)
        drift[step] += np.trace(covariance)
        for exchange in exchanges:
            own = np.diagonal(before - covariance)[exchange.places].sum()
            for later in range(exchange.delay):
                drift[(step + later) % steps] += own
    return drift / mixing.size


def _stationary(mixing: Mixing) -> Matrix:
    """The matrix A after the last step of a period."""
    product = noise = _without_mean(mixing.size)
    own = np.zeros_like(noise)  # covariance from one period's noise
    for step in range(len(mixing.steps)):
        own = _averaged(mixing, step, own + noise)
        product = _centred(mixing.mixed(step, product))
    for _ in range(MAX_DOUBLING_COUNT):
        more = product @ own @ product.T
        own = own + more
        if np.trace(more) <= VARIANCE_TOLERANCE_RATIO * np.trace(own):
            break
        product = product @ product
    return own


def _averaged(mixing: Mixing, step: int, covariance: Matrix) -> Matrix:
    return mixing.mixed(step, mixing.mixed(step, covariance).T).T


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


def mixing_summary(mixing: Mixing) -> MixingSummary:
    (eigenvalue, sigma), drift = _contraction(mixing), float(expected_drift(mixing).mean())
    rate = exp(eigenvalue / len(mixing.steps))
    return MixingSummary(
        connected=mixing.is_connected,
        gap=1 - exp(eigenvalue),
        sigma_gap=1 - sigma,
        contraction=rate,
        steps_to_little=steps_to(mixing, SMALL_DISAGREEMENT_RATIO, rate),
        drift=drift,
        drift_before=drift + (1 - 1 / mixing.size),
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
    sent = link_bytes(plan, group, UPLINK_TRAFFIC_WORKLOAD, steps, catalog, group.cluster)
    uplinks = [n for link, n in sent.items() if (link.kind, link.direction) == ("uplink", "out")]
    return max(uplinks, default=0) / steps / UPLINK_TRAFFIC_WORKLOAD.nbytes


def link_bytes(
    plan: Plan, group: Group, workload: Workload, steps: int, catalog: Catalog, cluster: Cluster
) -> Mapping[Link, int]:
    """The bytes on each link of the cluster in the first steps of a period."""
    compiled = (compile_step(plan, group, workload, step, catalog) for step in range(steps))
    rounds = chain.from_iterable(step.rounds for step in compiled)
    return together(traffic(round_.schedule, cluster) for round_ in rounds).links
