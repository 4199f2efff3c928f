"""A step that sends gradients tensor by tensor while backward goes on, replayed message by message.

Wait-free backpropagation (WFBP): every tensor is a message of its own, in the order of backward, on
one link that carries one at a time. With c_l for a ring's time of message l,

    start of l = max(end of the message before it, end of backward of l);   end = start + c_l

MG-WFBP (Shi et al., INFOCOM 2019) merges: a message that would start now waits for the next tensor
if that is ready within the time that one message costs besides its bytes, since going together
saves that time.

Closed forms with full buckets are wrong by a seventh for such steps: what counts is the number of
messages times their latency. `fit` finds latency and rate from steps that were measured, whichever
way they sent: it is the same all-reduce, so all ways tell of the same network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from tests.predict.robust import Guess, Vector, fit_constants
from thalweg.facts import Workload
from thalweg.predict.ddp_step import AlphaBetaNetwork, ring

FORWARD = 1 / 3  # of a step's computing; backward does twice as many products
LATENCY = Guess(3e-5, 3.0)  # seconds: a message over TCP, in a data centre
RATE = Guess(1.5e9, 1.5)  # bytes per second
OVERHEAD = Guess(0.01, 3.0)  # seconds
USUAL, TRUST = 0.03, 1e-5


@dataclass(frozen=True, slots=True)
class Message:
    nbytes: float
    ready: float  # seconds since the start of backward


Way = Callable[[Sequence[Message], AlphaBetaNetwork, int], Sequence[Message]]
"""What is sent of these tensors' gradients: as they are, merged, or all at the end."""


def messages_of(workload: Workload, backward: float) -> tuple[Message, ...]:
    """One a tensor, in the order of backward, which is taken to spend its time in proportion to
    elements."""
    total = sum(tensor.elements for tensor in workload.tensors)
    messages, done = [], 0
    for tensor in reversed(workload.tensors):
        done += tensor.elements
        messages.append(Message(tensor.nbytes, backward * done / total))
    return tuple(messages)


def each(messages: Sequence[Message], network: AlphaBetaNetwork, workers: int) -> Sequence[Message]:
    """WFBP"""
    return messages


def at_the_end(
    messages: Sequence[Message], network: AlphaBetaNetwork, workers: int
) -> Sequence[Message]:
    """All in one, when backward is over (bulk-synchronous)."""
    return [Message(sum(message.nbytes for message in messages), messages[-1].ready)]


def merged(
    messages: Sequence[Message], network: AlphaBetaNetwork, workers: int
) -> Sequence[Message]:
    """MG-WFBP"""
    latency = ring(network, 0, workers)
    sent: list[Message] = []
    waiting = free = 0.0  # bytes that wait, and when the link is free
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        waiting += message.nbytes
        start = max(free, message.ready)
        if following is not None and following.ready - start < latency:
            continue
        sent.append(Message(waiting, message.ready))
        free = start + ring(network, waiting, workers)
        waiting = 0.0
    return sent


def replay(messages: Sequence[Message], network: AlphaBetaNetwork, workers: int) -> float:
    """When the last of them has come, counted from the start of backward."""
    end = 0.0
    for message in messages:
        end = max(end, message.ready) + ring(network, message.nbytes, workers)
    return end


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model's messages, and what it computes before the first of them can be ready."""

    name: str
    forward: float  # seconds
    messages: tuple[Message, ...]

    @classmethod
    def of(cls, workload: Workload, alone: float) -> Job:
        """On a worker that takes so many seconds for a step by itself."""
        backward = (1 - FORWARD) * alone
        return cls(
            name=workload.name,
            forward=alone - backward,
            messages=messages_of(workload, backward),
        )

    def seconds(
        self, way: Way, network: AlphaBetaNetwork, workers: int, overhead: float = 0.0
    ) -> float:
        """Of a step among so many; `overhead` is what taking part costs a worker besides."""
        sent = way(self.messages, network, workers)
        return self.forward + replay(sent, network, workers) + overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    way: Way
    job: Job
    network: str
    workers: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Networks by name, and by model what taking part costs on any of them."""

    networks: Mapping[str, AlphaBetaNetwork]
    overheads: Mapping[str, float]

    def seconds(self, way: Way, job: Job, network: str, workers: int) -> float:
        overhead = self.overheads[job.name]
        return job.seconds(way, self.networks[network], workers, overhead)


def fit(steps: Sequence[Measured]) -> Fitted:
    """Latency and rate of each network, and the overhead of each model, for which the ratios of
    predicted to measured seconds are nearest to 1."""
    networks = list(dict.fromkeys(step.network for step in steps))
    models = list(dict.fromkeys(step.job.name for step in steps))

    def fitted(constants: Vector) -> Fitted:
        alphas, rates, overheads = np.split(constants, [len(networks), 2 * len(networks)])
        return Fitted(
            networks={
                name: AlphaBetaNetwork(float(alpha), float(rate))
                for name, alpha, rate in zip(networks, alphas, rates, strict=True)
            },
            overheads=dict(zip(models, overheads.tolist(), strict=True)),
        )

    def errors(constants: Vector) -> Vector:
        found = fitted(constants)
        return np.array(
            [log(found.seconds(s.way, s.job, s.network, s.workers) / s.seconds) for s in steps]
        )

    guesses = [*[LATENCY] * len(networks), *[RATE] * len(networks), *[OVERHEAD] * len(models)]
    return fitted(fit_constants(errors, guesses, usual=USUAL, trust=TRUST))
