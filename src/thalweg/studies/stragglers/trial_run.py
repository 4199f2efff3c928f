"""A run of one scheme of the straggler study: a process for each worker, and one for the root.

The training thread compares gradients after it has read the clock: the root's communication thread
continues meanwhile, the ring's next iteration waits for it (under a millisecond at 1 MB).

Before the workers are forked, the messages for every model, the checked schedule, and the float32
sum without stragglers are computed and shared by all processes. A coded sum must be bitwise equal
to that sum; the ring, which adds in another order, must be as close to the true gradient as float32
allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from statistics import fmean
from time import perf_counter, sleep

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from thalweg.bench.run_everywhere import Deployment, Progress, Report, Result, run_everywhere
from thalweg.codes import Allocation
from thalweg.engine.tree_node import ElementType, Node, pieces_of
from thalweg.engine.tree_relay import Relay, join_tree
from thalweg.errors import RunError, ScheduleError
from thalweg.members.world import World
from thalweg.schedules import Group, Schedule, check, coded_tree
from thalweg.studies.stragglers.config import (
    UNCOUNTED_ITERATIONS,
    WARMUP_ITERATIONS,
    Single,
    Softmax,
    StragglerTrial,
    distance,
    message,
)
from thalweg.transports.best_effort import MessageKind

MIN_COUNTED_ITERATIONS = 10
ITERATION_TIMEOUT_SECONDS = 120.0
RING_TIMEOUT_SECONDS = 24 * 3600.0  # for the ring's master, which only waits
WORKER_RESULT_HISTORY_STEPS = 8  # results that a worker keeps; only the root reads them
NO_NEWS_TIMEOUT_SECONDS = 5.0  # after which a worker checks whether the trial is over
PROGRESS_PERIOD_SECONDS = 0.2
ITERATION_COUNT_KEY, TRIAL_OVER_KEY = "iterations", "over"  # keys of the store
MASTER_RANK, FIRST_WORKER_RANK = 0, 1
GRADIENT_ERROR_TOLERANCE = 1e-5  # of float32 sums, relative to the true gradient's norm


def run_trial(prepared: PreparedTrial, deployment: Deployment, progress: Progress) -> Result:
    """The `seconds` of each counted iteration, and the iterations whose gradient was `wrong`."""
    trial = prepared.trial
    delayed = trial.lateness()
    in_tree = prepared.schedule is not None
    timed_rank = MASTER_RANK if in_tree else FIRST_WORKER_RANK

    def work(rank: int, report: Report) -> Result:
        trial_rank = _TrialRank(prepared, rank, delayed[:, rank].tolist(), report)
        return trial_rank.in_tree() if in_tree else trial_rank.in_ring()

    iterations = UNCOUNTED_ITERATIONS + MIN_COUNTED_ITERATIONS
    timeout = 60 + 2 * trial.budget + iterations * ITERATION_TIMEOUT_SECONDS
    return run_everywhere(deployment, work, progress, timeout=timeout, reporting_rank=timed_rank)[
        timed_rank
    ]


class _TrialRank:
    """The part of one rank in a trial, and on the rank where iterations end their times.

    After the warm-up that rank publishes the number of iterations.
    """

    def __init__(
        self, prepared: PreparedTrial, rank: int, straggles: Sequence[bool], report: Report
    ) -> None:
        self.prepared = prepared
        self.trial = prepared.trial
        self.rank = rank
        self.straggles = straggles  # by iteration
        self.messages = prepared.messages.get(rank, ())
        self.compute = self.trial.compute * float(prepared.allocation.loads.get(rank, 0))
        self.world = World.join(ITERATION_TIMEOUT_SECONDS)
        self.abort_flag = self.world.abort_flag()
        self.count = WARMUP_ITERATIONS
        self._report = report
        self._reported = 0.0
        self._ends: list[float] = []
        self._wrong: list[int] = []

    def in_tree(self) -> Result:
        schedule = self.prepared.schedule
        assert schedule is not None
        relay = join_tree(
            self.world,
            self.abort_flag,
            self.prepared.allocation,
            [schedule],
            [ElementType()],
            make=partial(Node, most_kept=WORKER_RESULT_HISTORY_STEPS),
        )
        try:
            if self.rank == MASTER_RANK:
                self._decode(relay)
            else:
                self._answer(relay)
            self.world.leave(ITERATION_TIMEOUT_SECONDS, self.abort_flag)
        finally:
            relay.close()
        return self._result()

    def _decode(self, relay: Relay) -> None:
        step = 0
        while step < self.count:
            results = relay.result(step)
            self._tick(step, () if results is None else results.arrays)
            step += 1
        self.world.put(TRIAL_OVER_KEY, "yes")

    def _answer(self, relay: Relay) -> None:
        count, step = WARMUP_ITERATIONS, 0
        while step < count:
            if self.compute:
                relay.result(step, self.compute)
            if self.straggles[step]:
                if self.trial.way == "away":
                    sleep(self.trial.delay)
                else:
                    relay.result(step, self.trial.delay)
            if relay.newest <= step:
                relay.contribute(step, 0, self.messages[step % len(self.messages)])
            if not self._wait_for_end(relay, step):
                return
            step = relay.newest
            if step >= WARMUP_ITERATIONS and count == WARMUP_ITERATIONS:
                count = self._iteration_count()

    def _wait_for_end(self, relay: Relay, step: int) -> bool:
        """Wait until the iteration is over; False if the trial is.

        Messages may be lost, and so may the last one, if this host's link lags far behind.
        """
        began = perf_counter()
        while relay.newest <= step:
            relay.result(step, NO_NEWS_TIMEOUT_SECONDS)
            if relay.newest > step:
                return True
            if self.world.wait_for(TRIAL_OVER_KEY, 0, self.abort_flag) is not None:
                return False
            if perf_counter() - began > ITERATION_TIMEOUT_SECONDS:
                raise RunError(
                    f"rank {self.rank} timed out after {ITERATION_TIMEOUT_SECONDS:g} s "
                    f"in iteration {step}",
                    "give smaller messages or faster NICs",
                )
        return True

    def in_ring(self) -> Result:
        timeout = RING_TIMEOUT_SECONDS
        if self.rank != MASTER_RANK:
            self._all_reduce()
            timeout = ITERATION_TIMEOUT_SECONDS
        self.world.leave(timeout, self.abort_flag)
        return self._result()

    def _all_reduce(self) -> None:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("ring", self.world.store),
            rank=self.rank - FIRST_WORKER_RANK,
            world_size=self.trial.workers,
            timeout=timedelta(seconds=ITERATION_TIMEOUT_SECONDS),
        )
        tensor = torch.empty(self.trial.elements)
        own = [torch.from_numpy(message) for message in self.messages]
        count, step = WARMUP_ITERATIONS, 0
        while step < count:
            sleep(self.compute + self.trial.delay * self.straggles[step])
            tensor.copy_(own[step % len(own)])
            dist.all_reduce(tensor)
            if self.rank == FIRST_WORKER_RANK:
                self._tick(step, (tensor.numpy(),))
            step += 1
            if step == WARMUP_ITERATIONS:
                count = self._iteration_count()

    def _iteration_count(self) -> int:
        late = RunError("no rank published the number of iterations", "please report this")
        return int(self.world.read(ITERATION_COUNT_KEY, self.abort_flag, late))

    def _tick(self, step: int, arrays: Sequence[Single]) -> None:
        now = perf_counter()
        self._ends.append(now)
        if step + 1 == WARMUP_ITERATIONS:
            self.count = UNCOUNTED_ITERATIONS + iterations_to_run(self.trial, self._ends)
            self.world.put(ITERATION_COUNT_KEY, str(self.count))
        if not arrays or not self.prepared.is_exact(step, arrays):
            self._wrong.append(step)
        if now - self._reported > PROGRESS_PERIOD_SECONDS:
            self._report(step + 1, self.count)
            self._reported = now

    def _result(self) -> Result:
        seconds = np.diff(self._ends)[WARMUP_ITERATIONS:]
        return {"seconds": seconds.tolist(), "wrong": self._wrong}


def iterations_to_run(trial: StragglerTrial, ends: Sequence[float]) -> int:
    """The requested number, or what the budget allows at this pace, but a minimum."""
    affordable = int(trial.budget / max(fmean(np.diff(ends)), 1e-9))
    return min(trial.iterations, max(MIN_COUNTED_ITERATIONS, affordable))


@dataclass(frozen=True, kw_only=True)
class PreparedTrial:
    """The data of a trial that is computed once, before the workers are forked.

    `right` has the expected sum of each model: the float32 sum of a tree, the true gradient for
    the ring.
    """

    trial: StragglerTrial
    allocation: Allocation
    schedule: Schedule | None  # None: torch's own ring
    messages: Mapping[int, Sequence[Single]]  # by rank and model
    right: Sequence[Single]

    @classmethod
    def of(cls, trial: StragglerTrial, deployment: Deployment, problem: Softmax) -> PreparedTrial:
        assert deployment.cluster is not None
        group = Group.everybody(deployment.cluster)
        allocation = trial.allocation(deployment.cluster)
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
            right = expected_sums(allocation, schedule, messages)
            for error in map(distance, right, problem.true_gradients):
                if not error <= GRADIENT_ERROR_TOLERANCE:  # or if it is no number
                    raise ScheduleError(
                        f"{trial.sync}: without stragglers the relative error of the gradient is "
                        f"{error:.1e}",
                        "please report this",
                    )
        return cls(
            trial=trial, allocation=allocation, schedule=schedule, messages=messages, right=right
        )

    def is_exact(self, step: int, arrays: Sequence[Single]) -> bool:
        """True if these pieces together are the expected sum."""
        right = self.right[step % len(self.right)]
        if self.schedule is None:
            [got] = arrays
            return distance(got, right) <= GRADIENT_ERROR_TOLERANCE
        return all(
            np.array_equal(array.view(np.uint32), right[start:stop].view(np.uint32))
            for array, (start, stop) in zip(arrays, pairwise(self.schedule.offsets), strict=True)
        )


def expected_sums(
    allocation: Allocation, schedule: Schedule, messages: Mapping[int, Sequence[Single]]
) -> list[Single]:
    """The sum of each model that the root decodes without stragglers.

    It is computed by the nodes of the real tree, without a network.
    """
    nodes = {
        rank: Node(rank, pieces_of([schedule], [ElementType()], rank), allocation)
        for rank in allocation.ranks
    }
    sums = []
    for model in range(len(next(iter(messages.values())))):
        queue = deque(
            (rank, sent)
            for rank, own in messages.items()
            for sent in nodes[rank].contribute(model, 0, own[model])
        )
        while queue:
            sender, sent = queue.popleft()
            if sent.kind is MessageKind.ANSWER:
                receiver = sent.peer
                answers = nodes[receiver].arrive(sent._replace(peer=sender))
                queue.extend((receiver, answer) for answer in answers)
        sums.append(np.concatenate(nodes[allocation.host].finished[model].arrays))
        for node in nodes.values():
            node.skip_to(model + 1)
    return sums
