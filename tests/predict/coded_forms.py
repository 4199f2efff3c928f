"""What a coded step costs in closed form (CodedReduce, Reisizadeh et al., and what it is compared
with), for N workers in a regular tree of n children and L levels, N = n + n^2 + ... + n^L.

    scheme   sends, one after the other       computes (shares of 1/N)     waits for
    UMW      N t_c                            1                            all N
    GC       (N-S) t_c                        S + 1                        N-S of N
    CR       L (n-s) t_c                      r N                          n-s of n at every parent
    RAR      2(N-1) (latency + t_x / N)       1                            all N

with t_c = latency + t_x, a message of the whole gradient, which a parent takes one at a time, and
r = 1 / (q + q^2 + ... + q^L), q = n/(s+1). Redundancy is paid for in computing; it pays where
delays don't grow with the load.

A parent that waits for n-s of its n children answers when they and its own work are there. With
F(t) the chance that a worker's own work is done by t, its answer is there by t with chance

    A(t) = F(t) P(at least n-s of n answers from below, each with its A(t))

so what holds for one t gives the whole distribution; the root has no work of its own.

A worker's own work is a shifted exponential: everybody takes D, and a tail of mean 1/mu more, so

    E[max of N] = D + H_N / mu          E[N-s of N] = D + (H_N - H_s) / mu

with H_n = 1 + 1/2 + ... + 1/n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, fsum, inf, log

import numpy as np
from numpy.typing import NDArray

from thalweg.facts import StragglerDelay

EULER = 0.5772156649015329
EXACT_HARMONICS = 10_000  # beyond that the series is exact to the last digit

STEPS = 4000  # of the integral over a tail
TAILS = 40.0  # means, beyond which e^-40 of a tail is left


@dataclass(frozen=True, slots=True)
class Message:
    """Of the whole gradient."""

    latency: float  # seconds
    transfer: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


Arrived = Callable[[float], float]
"""From the chance that a worker's own work is done to the chance that the step's is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """`sends` are messages one after the other, each of this `part` of the gradient."""

    workers: int
    sends: int
    part: float
    load: float  # shares of the batch, 1/N each, that a worker computes
    arrived: Arrived

    def communication(self, message: Message) -> float:
        return self.sends * (message.latency + self.part * message.transfer)

    def waiting(self, delay: StragglerDelay) -> float:
        """Expected seconds beyond computing, if each worker is late now and then."""
        return delay.delay.seconds * (1 - self.arrived(1 - delay.probability))

    def computing(self, one: ShiftedExponential) -> float:
        """Expected seconds until enough is computed, `one` being a worker's time for its load; the
        integral by Simpson's rule."""
        width = TAILS * one.tail / STEPS
        weights = [1, *(4 - 2 * (i % 2 == 0) for i in range(1, STEPS)), 1]
        late = sum(
            weight * (1 - self.arrived(one.by(one.shift + i * width)))
            for i, weight in enumerate(weights)
        )
        return one.shift + late * width / 3

    def seconds(self, message: Message, share: float, delay: StragglerDelay) -> float:
        """Of a step, where a share of the batch takes so long to compute."""
        return self.load * share + self.waiting(delay) + self.communication(message)


@dataclass(frozen=True, slots=True)
class Tree:
    """n children under every parent, L levels, s of every n may be late."""

    children: int
    levels: int
    stragglers: int

    @property
    def workers(self) -> int:
        return sum(self.children**level for level in range(1, self.levels + 1))

    @property
    def load(self) -> float:
        """r N"""
        q = self.children / (self.stragglers + 1)
        return self.workers / sum(q**level for level in range(1, self.levels + 1))

    @property
    def sends(self) -> int:
        return self.levels * (self.children - self.stragglers)

    def arrived(self, done: float) -> float:
        answered = done  # a leaf's
        for _ in range(self.levels - 1):
            answered = done * self._enough(answered)
        return self._enough(answered)

    def _enough(self, answered: float) -> float:
        return 1 - chance_of_more([1 - answered] * self.children, self.stragglers)


def umw(workers: int) -> Form:
    """Uncoded master and workers."""
    return Form(
        workers=workers, sends=workers, part=1.0, load=1.0, arrived=lambda done: done**workers
    )


def gc(workers: int, stragglers: int) -> Form:
    """Gradient coding: S of N may be late."""
    return Form(
        workers=workers,
        sends=workers - stragglers,
        part=1.0,
        load=stragglers + 1.0,
        arrived=lambda done: 1 - chance_of_more([1 - done] * workers, stragglers),
    )


def codedreduce(tree: Tree) -> Form:
    return Form(
        workers=tree.workers, sends=tree.sends, part=1.0, load=tree.load, arrived=tree.arrived
    )


def ring(workers: int) -> Form:
    """Ring all-reduce (RAR)."""
    return Form(
        workers=workers,
        sends=2 * (workers - 1),
        part=1 / workers,
        load=1.0,
        arrived=lambda done: done**workers,
    )


def ring_overtakes_at(tree: Tree) -> float:
    """The t_x / latency beyond which a ring's communication is shorter than CR's:

        (2(N-1) - L(n-s)) / (L(n-s) - 2(N-1)/N)

    0 if it always is, inf if it never is."""
    hops, sends = 2 * (tree.workers - 1), tree.sends
    more_messages, less_bytes = hops - sends, sends - hops / tree.workers
    if less_bytes <= 0:
        return inf if more_messages >= 0 else 0.0
    return max(0.0, more_messages / less_bytes)


def ring_overtakes(tree: Tree, latency: float, bytes_per_second: float) -> float:
    """Bytes of a gradient beyond which a ring's communication is shorter than CR's."""
    return ring_overtakes_at(tree) * latency * bytes_per_second


@dataclass(frozen=True, slots=True)
class ShiftedExponential:
    """`shift` seconds for everybody, and a tail of this mean: D and 1/mu."""

    shift: float
    tail: float

    def times(self, load: float) -> ShiftedExponential:
        """Of so many times the work, where the tail grows with it too."""
        return ShiftedExponential(self.shift * load, self.tail * load)

    def by(self, seconds: float) -> float:
        """The chance of being there after so many seconds."""
        late = seconds - self.shift
        return 1 - exp(-late / self.tail) if late > 0 else 0.0

    def expected_latest(self, workers: int) -> float:
        return self.shift + harmonic(workers) * self.tail

    def expected_arrival(self, workers: int, number: int) -> float:
        return self.shift + (harmonic(workers) - harmonic(workers - number)) * self.tail


def harmonic(number: int) -> float:
    """1 + 1/2 + ... + 1/n, which is ln n + Euler's constant + 1/2n - 1/12n^2 for large n."""
    if number <= EXACT_HARMONICS:
        return fsum(1 / i for i in range(1, number + 1))
    return log(number) + EULER + 1 / (2 * number) - 1 / (12 * number**2)


def chance_of_more(chances: Sequence[float], number: int) -> float:
    """The probability that more than `number` of these independent events happen."""
    happening = np.ones(1)
    for chance, times in Counter(chances).items():
        happening = np.convolve(happening, binomial(times, chance)[: number + 1])[: number + 1]
    if number >= len(chances):
        return 0.0
    return max(0.0, 1.0 - float(happening.sum()))


def binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """The probability of 0, 1, ..., `trials` successes, in logarithms so that 100,000 trials don't
    underflow: P(k+1) / P(k) = (n-k)/(k+1) p/(1-p)."""
    if chance in (0.0, 1.0):
        certain = np.zeros(trials + 1)
        certain[round(trials * chance)] = 1.0
        return certain
    k = np.arange(trials)
    ratios = np.log((trials - k) / (k + 1.0)) + log(chance / (1 - chance))
    logs = trials * log(1 - chance) + np.concatenate(([0.0], np.cumsum(ratios)))
    return np.asarray(np.exp(logs), np.float64)
