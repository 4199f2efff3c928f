"""The compute time of a training step without communication, measured while training.

    a step   ... optimizer's end | forward, and all before it     | backward            | ...
                                 start                            first gradient    last | optimizer

The time between the last gradient and the optimizer is communication under gradient plans, and
isn't counted; under plans that average parameters, profile steps without averaging. Where a step
has several backwards, the last one counts as such, and those before it belong to forward.

A worker straggles at a step if it reaches its last gradient far later than the median worker (of an
even number, the earlier of the two in the middle): by more than five deviations and a fifth of a
step. Each worker uses its own clock only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan, nan, sqrt
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thalweg.facts import (
    MAD_TO_DEVIATION,
    Cluster,
    Costs,
    Duration,
    StragglerDelay,
    Tensor,
    Workload,
)
from thalweg.training.backward_hooks import Hook, after_gradient
from thalweg.training.buckets import DTYPES

STRAGGLER_DEVIATIONS, STRAGGLER_STEP_FRACTION = 5.0, 0.2  # a straggler exceeds both
EQUAL_HOSTS_DEVIATIONS = 3.0  # within which hosts straggle equally often
PROFILE_SECONDS_DIGITS = 7
Seconds = NDArray[np.float64]


@dataclass(slots=True)
class _ProfiledStep:
    """The timestamps of one step by this rank's clock."""

    start: float
    optimizer: float = 0.0  # when it begins
    end: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)


class Profile:
    """Times the steps of these parameters and their optimizer until it is closed."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._parameters = parameters
        self._steps: list[_ProfiledStep] = []
        self._now = _ProfiledStep(nan)  # the beginning of the first is unknown
        self._hooks: list[Any] = [
            *(
                after_gradient(p, partial(self._ready, name))
                for name, p in parameters.items()
                if p.requires_grad  # a frozen one takes no hook
            ),
            optimizer.register_step_pre_hook(Hook(lambda *_: self._optimizes())),
            optimizer.register_step_post_hook(Hook(lambda *_: self._ends())),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __len__(self) -> int:
        """The number of complete steps so far."""
        return len(self._steps)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(name=name, shape=tuple(p.shape), dtype=DTYPES[p.dtype])
            for name, p in self._parameters.items()
        )

    def seconds(self) -> list[float]:
        """The times of each step: forward, backward, optimizer, and when each tensor's gradient was
        ready, counted from the first (a tensor without one: at the end). All ranks have the same
        number."""
        return [second for step in self._steps for second in self._row(step)]

    def _row(self, step: _ProfiledStep) -> list[float]:
        first, last = min(step.ready.values()), max(step.ready.values())
        ready = [step.ready.get(name, last) - first for name in self._parameters]
        return [first - step.start, last - first, step.end - step.optimizer, *ready]

    def _ready(self, name: str, _: torch.Tensor) -> None:
        if name in self._now.ready:  # another backward
            self._now.ready.clear()
        self._now.ready[name] = perf_counter()

    def _optimizes(self) -> None:
        self._now.optimizer = perf_counter()

    def _ends(self) -> None:
        now = perf_counter()
        if self._now.ready and not isnan(self._now.start):
            self._now.end = now
            self._steps.append(self._now)
        self._now = _ProfiledStep(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """The profile over all ranks: the workload with the median times, the straggler delays of each
    rank, and the relative standard deviation of the compute time without straggler delays."""

    workload: Workload
    straggler_delays: tuple[StragglerDelay, ...]  # by rank
    spread: float

    def with_straggler_delays(self, cluster: Cluster) -> Cluster:
        """The cluster with the straggler delays of its hosts. Every rank of a host has the mean
        probability of its ranks."""
        late = self.straggler_delays
        return cluster.with_hosts(
            lambda host: replace(host, late=_pooled([late[rank] for rank in host.ranks]))
        )


def merged(name: str, tensors: Sequence[Tensor], table: Seconds) -> ProfileResult:
    """The profile of all ranks from a row of `Profile.seconds` for each
    (`Collectives.all_gather`)."""
    steps = table.reshape(len(table), -1, 3 + len(tensors))  # ranks, steps, figures
    middle = np.median(np.median(steps, axis=1), axis=0).round(PROFILE_SECONDS_DIGITS)
    forward, backward, optimizer, *ready = middle.tolist()
    arrivals = steps[:, :, 0] + steps[:, :, 1]
    usual = forward + backward + optimizer
    excess = arrivals - np.quantile(arrivals, 0.5, axis=0, method="lower")
    excess -= np.median(
        excess, axis=1, keepdims=True
    )  # a rank that is always slower is no straggler
    deviation = MAD_TO_DEVIATION * float(np.median(np.abs(excess)))
    workload = Workload(
        name=name,
        tensors=tuple(
            replace(tensor, ready=Duration(second))
            for tensor, second in zip(tensors, ready, strict=True)
        ),
        costs=Costs(
            forward=Duration(forward), backward=Duration(backward), optimizer=Duration(optimizer)
        ),
    )
    return ProfileResult(
        workload=workload,
        straggler_delays=straggler_delays(
            excess, limit=max(STRAGGLER_DEVIATIONS * deviation, STRAGGLER_STEP_FRACTION * usual)
        ),
        spread=deviation / usual if usual else 0.0,
    )


def straggler_delays(excess: Seconds, limit: float) -> tuple[StragglerDelay, ...]:
    """The straggler delay of each rank, from its excess over the median rank at each step. Ranks
    that straggle about equally often are pooled, since a few steps tell little of each."""
    late, (ranks, steps) = excess > limit, excess.shape
    often = late.mean(axis=1)
    middle = float(np.median(often))
    apart = EQUAL_HOSTS_DEVIATIONS * sqrt(max(middle * (1 - middle), 1 / steps) / steps)
    alike = np.abs(often - middle) <= apart
    pooled = _rank_delay(excess[alike], late[alike])
    return tuple(
        pooled if alike[rank] else _rank_delay(excess[rank], late[rank]) for rank in range(ranks)
    )


def _rank_delay(excess: Seconds, late: NDArray[np.bool_]) -> StragglerDelay:
    if not late.any():
        return StragglerDelay()
    return StragglerDelay(
        probability=float(late.mean()),
        delay=Duration(round(float(np.median(excess[late])), PROFILE_SECONDS_DIGITS)),
    )


def _pooled(late: Sequence[StragglerDelay]) -> StragglerDelay:
    """The mean probability and delay of ranks that are taken as equal."""
    probability = fmean(straggler.probability for straggler in late)
    if not probability:
        return StragglerDelay()
    lost = fmean(straggler.probability * straggler.delay.seconds for straggler in late)
    return StragglerDelay(
        probability=probability, delay=Duration(round(lost / probability, PROFILE_SECONDS_DIGITS))
    )
