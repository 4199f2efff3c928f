"""What the workers of the straggler study send, and what must come of it: made before they are.

Messages for every model, the checked schedule, and the sum that float32 gives if nobody is late are
shared by all processes. A coded sum must equal that one bit for bit; the ring, which adds in an
order of its own, must come as near to the true gradient as float32 can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from thalweg.bench.site import Site
from thalweg.bench.softmax import Single, Softmax, distance, message
from thalweg.bench.stragglers import Trial
from thalweg.codes import Allocation
from thalweg.errors import ScheduleError
from thalweg.runtime.node import Form, Node, pieces_of
from thalweg.schedules import Group, Schedule, coded_tree
from thalweg.schedules.check import check
from thalweg.transports.post import Sort

CLOSE = 1e-5  # of the true gradient's norm: what float32 sums may lack


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is made once, before the workers are. `right` is what a sum is compared with, by model:
    float32's own for a tree, the true one for the ring."""

    trial: Trial
    allocation: Allocation
    schedule: Schedule | None  # None: torch's own ring
    messages: Mapping[int, Sequence[Single]]  # by rank and model
    right: Sequence[Single]

    @classmethod
    def of(cls, trial: Trial, site: Site, problem: Softmax) -> Prepared:
        assert site.cluster is not None
        group = Group.everybody(site.cluster)
        allocation = trial.allocation(site.cluster)
        cells = problem.gradients(allocation)
        messages = {
            rank: [message(gradients, weights) for gradients in cells]
            for rank, weights in allocation.weights.items()
        }
        schedule = None
        right = [true.astype(np.float32) for true in problem.true_gradients]
        if trial.scheme != "rar":
            schedule = coded_tree(group, trial.elements, 4, allocation)
            check(schedule)
            right = sums_on_time(allocation, schedule, messages)
            _refuse_far_from_true(trial, right, problem)
        return cls(
            trial=trial,
            allocation=allocation,
            schedule=schedule,
            messages=messages,
            right=right,
        )

    @property
    def load(self) -> float:
        """What part of the data a worker computes, at most."""
        return float(max(self.allocation.loads.values()))

    def is_exact(self, step: int, arrays: Sequence[Single]) -> bool:
        """Whether these pieces together are the right sum."""
        right = self.right[step % len(self.right)]
        if self.schedule is None:
            [got] = arrays
            return float(np.linalg.norm(got - right)) <= CLOSE * float(np.linalg.norm(right))
        return all(
            np.array_equal(array.view(np.uint32), right[start:stop].view(np.uint32))
            for array, (start, stop) in zip(arrays, pairwise(self.schedule.offsets), strict=True)
        )


def sums_on_time(
    allocation: Allocation, schedule: Schedule, messages: Mapping[int, Sequence[Single]]
) -> list[Single]:
    """By model, what the root decodes if everybody answers: the nodes of the real tree, without a
    network."""
    nodes = {
        rank: Node(rank, pieces_of([schedule], [Form()], rank), allocation)
        for rank in allocation.ranks
    }
    found = []
    for model in range(len(next(iter(messages.values())))):
        under_way = deque(
            (rank, letter)
            for rank, own in messages.items()
            for letter in nodes[rank].contribute(model, 0, own[model])
        )
        while under_way:
            sender, letter = under_way.popleft()
            if letter.sort is Sort.ANSWER:
                node = nodes[letter.peer]
                under_way.extend(
                    (node.rank, further) for further in node.arrive(letter._replace(peer=sender))
                )
        found.append(np.concatenate(nodes[allocation.host].finished[model].arrays))
        for node in nodes.values():
            node.skip_to(model + 1)
    return found


def _refuse_far_from_true(trial: Trial, sums: Sequence[Single], problem: Softmax) -> None:
    for got, true in zip(sums, problem.true_gradients, strict=True):
        off = distance(got, true)
        if not off <= CLOSE:
            raise ScheduleError(
                f"{trial.sync} sums to a gradient that is {off:.1e} off the true one, with nobody "
                "late",
                "please report this",
            )
