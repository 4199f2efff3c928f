"""Sleeps in place of computation, so that a few cores can play many workers.

    a step   late? | forward  | backward, a sleep before each gradient
             delay | (1-b) T  | b T n / N for a parameter of n of all N elements

A gradient's sleep ends before anybody sees the gradient, so a bucket leaves when its last gradient
would have been computed, and what overlaps with backward there overlaps here: under DDP and under
our plans alike. T is for a share of the batch; a worker that a code gives two shares sleeps twice
as long.

The sleeps of a step follow one clock: what is computed for real goes on inside of them, and one
that wakes up late shortens the next. Who is late is drawn from seed, rank and step alone, so every
plan meets the same late workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch import nn

from thalweg.errors import UsageError
from thalweg.facts import Cluster, Duration, StragglerDelay
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed
from thalweg.schedules import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a step's computation is to take."""

    step: Duration = Duration(0.0)
    backward: float = 2 / 3  # its part of the step
    late: StragglerDelay = StragglerDelay()

    def __post_init__(self) -> None:
        if not 0 <= self.backward <= 1:
            raise UsageError(
                f"backward can't be {self.backward} of a step", "give a fraction from 0 to 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCompute:
    """How the workers of a run sleep; `seed` says who is late when."""

    compute: Compute
    cluster: Cluster
    seed: int

    def delay(self, rank: int, step: int) -> float:
        """By how many seconds this rank is late at this step, for all reasons together."""
        reasons = (self.compute.late, self.cluster.host(rank).late)
        draws = np.random.default_rng((self.seed, rank, step)).random(len(reasons))
        return sum(
            reason.delay.seconds
            for reason, draw in zip(reasons, draws, strict=True)
            if draw < reason.probability
        )


def shares_of(plan: Plan, cluster: Cluster, rank: int) -> float:
    """How many N-th parts of the batch a worker computes: more than one under a code."""
    if not is_relayed(plan):
        return 1.0
    allocation = allocation_of(plan, Group.everybody(cluster))
    return float(cluster.workers * allocation.loads.get(rank, 0))


class ComputeSleeper:
    """One worker's: `begin` sleeps until its forward would be done, the gradients do the rest.
    `shares` is asked at each step: plans may change."""

    def __init__(
        self,
        injection: SimulatedCompute,
        rank: int,
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
        self._due = 0.0  # when what was to be computed so far is done

    def attach(self, model: nn.Module) -> None:
        """Sleep before each gradient of this model."""
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
