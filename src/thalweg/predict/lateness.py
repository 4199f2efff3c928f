"""How long a step waits for who is late.

Waiting for all of N is waiting for their maximum; doing without s of them, for the order statistic
of rank N-s. Both are integrals of the chance that too few have come by t:

    E[k-th of N] = integral over t of P(fewer than k of N are there at t)

A host is on time, or with probability p late by its delay; hosts may differ. They are independent
of each other: what delays several at once, as a congested uplink does, is not in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from thalweg.facts import Lateness


def expected_latest(hosts: Sequence[Lateness]) -> float:
    """Seconds until the last of them has come."""
    return expected_arrival(hosts, len(hosts))


def expected_arrival(hosts: Sequence[Lateness], number: int) -> float:
    """Seconds until so many of them have come: the delays cut time into stretches, in each of which
    the number of hosts that are still out is a sum of independent chances."""
    spare = len(hosts) - number
    seconds = start = 0.0
    for stop in sorted({host.delay.seconds for host in hosts if host.probability > 0}):
        out = [host.probability for host in hosts if host.delay.seconds >= stop]
        seconds += (stop - start) * chance_of_more(out, spare)
        start = stop
    return seconds


def chance_of_more(chances: Sequence[float], number: int) -> float:
    """That more than so many of these independent events happen."""
    happening = np.ones(1)
    for chance, times in Counter(chances).items():
        happening = np.convolve(happening, binomial(times, chance)[: number + 1])[: number + 1]
    if number >= len(chances):
        return 0.0
    return max(0.0, 1.0 - float(happening.sum()))


def binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """The chance of 0, 1, ..., `trials` successes, by logarithms so that 100,000 don't underflow:
    P(k+1) / P(k) = (n-k)/(k+1) p/(1-p)."""
    if chance in (0.0, 1.0):
        certain = np.zeros(trials + 1)
        certain[round(trials * chance)] = 1.0
        return certain
    k = np.arange(trials)
    ratios = np.log((trials - k) / (k + 1.0)) + log(chance / (1 - chance))
    logs = trials * log(1 - chance) + np.concatenate(([0.0], np.cumsum(ratios)))
    return np.asarray(np.exp(logs), np.float64)
