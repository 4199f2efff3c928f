"""Sleeps instead of computation, so that a few cores can simulate many workers.

    a step   straggler | forward  | backward, a sleep before each gradient
             delay     | (1-b) T  | b T n / N for a parameter of n of all N elements

A gradient's sleep ends before anything else sees the gradient, so a bucket is sent when its last
gradient would have been computed, and communication overlaps with backward as it would in a real
step, under DDP and under our plans. T is the time for one slice of the batch; a worker to which a
code assigns two slices sleeps twice as long.

The sleeps of a step share one deadline: real computation goes on inside of them, and a late wake-up
shortens the next sleep. Stragglers are drawn from seed, rank and step alone, so they are the same
under every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch import nn

from thalweg.facts import Cluster, Duration, StragglerDelay
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed
from thalweg.schedules import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The simulated compute time of a step, and its stragglers."""

    step: Duration = Duration(0.0)
    backward: float = 2 / 3  # its fraction of the step, from 0 to 1
    late: StragglerDelay = StragglerDelay()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCompute:
    """The simulated computation of a run's workers, with stragglers drawn from `seed`."""

    compute: Compute
    cluster: Cluster
    seed: int

    def delay(self, rank: int, step: int) -> float:
        """The straggler delay of a rank at a step in seconds, the sum over all causes."""
        causes = (self.compute.late, self.cluster.host(rank).late)
        draws = np.random.default_rng((self.seed, rank, step)).random(len(causes))
        return sum(
            cause.delay.seconds
            for cause, draw in zip(causes, draws, strict=True)
            if draw < cause.probability
        )


@cache
def shares_of(plan: Plan, cluster: Cluster, rank: int) -> float:
    """The number of N-th slices of the batch that a rank computes: above one under a code."""
    if not is_relayed(plan):
        return 1.0
    allocation = allocation_of(plan, Group.everybody(cluster))
    return float(cluster.workers * allocation.loads.get(rank, 0))


class ComputeSleeper:
    """The sleeps of one worker: `begin` sleeps for the forward, hooks on the gradients of its model
    for the rest.

    `shares` is called at each step, since plans may change.
    """

    def __init__(
        self,
        injection: SimulatedCompute,
        rank: int,
        model: nn.Module,
        shares: Callable[[], float] = lambda: 1.0,
        *,
        now: Callable[[], float] = perf_counter,
        pause: Callable[[float], None] = sleep,
    ) -> None:
        self._injection = injection
        self._rank = rank
        self._shares_now = shares
        self._shares = 1.0  # at this step
        self._now = now
        self._pause = pause
        self._due = 0.0  # when the computation so far would have ended
        parameters = [p for p in model.parameters() if p.requires_grad]
        elements = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            register: Callable[[Any], Any] = parameter.register_hook
            register(partial(self._gradient, parameter.numel() / elements))

    def begin(self, step: int) -> None:
        compute = self._injection.compute
        self._shares = self._shares_now()
        self._due = self._now() + self._injection.delay(self._rank, step)
        self._spend(compute.step.seconds * (1 - compute.backward))

    def _gradient(self, part: float, gradient: torch.Tensor) -> None:
        compute = self._injection.compute
        self._spend(compute.step.seconds * compute.backward * part)

    def _spend(self, seconds: float) -> None:
        self._due += seconds * self._shares
        left = self._due - self._now()
        if left > 0:
            self._pause(left)
