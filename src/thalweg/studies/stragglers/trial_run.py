"""One scheme of the straggler study, run: a process for each worker, and one for the root.

Gradients are compared by the training thread after it has read the clock: the root's communication
thread goes on meanwhile, the ring's next iteration waits for it (under a millisecond at 1 MB).

What the workers send, and what must come of it, is made before they are: messages for every model,
the checked schedule, and the sum that float32 gives if nobody is late are shared by all processes.
A coded sum must equal that one bit for bit; the ring, which adds in an order of its own, must come
as near to the true gradient as float32 can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from statistics import fmean
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from thalweg.bench.site import Site
from thalweg.codes import Allocation
from thalweg.engine.tree_join import join_tree
from thalweg.engine.tree_node import Form, Node, pieces_of
from thalweg.engine.tree_relay import Relay
from thalweg.errors import RunError, ScheduleError
from thalweg.launch.supervisor import Report, run_workers
from thalweg.members.abort import Alarm
from thalweg.members.world import World
from thalweg.schedules import Group, Schedule, coded_tree
from thalweg.schedules.check import check
from thalweg.studies.stragglers.config import UNCOUNTED, WARM_UP, Trial
from thalweg.studies.stragglers.problem import Single, Softmax, distance, message
from thalweg.transports.best_effort import Sort

FEWEST = 10  # iterations that count, however long they take
TIMEOUT = 120.0  # seconds for one iteration
LONGEST = 24 * 3600.0  # seconds; for the ring, where the master has nothing to do
MOST_KEPT = 8  # results in each of many processes; nobody but the root looks at them
PATIENCE = 5.0  # seconds without news after which a worker asks whether all is over
TOLD = 0.2  # seconds between two reports of how far it is
COUNT, OVER = "iterations", "over"  # keys of the store
MASTER, FIRST_WORKER = 0, 1  # ranks

Progress = Callable[[int, int], None]
"""Called with how many iterations are done, and of how many."""
CLOSE = 1e-5  # of the true gradient's norm: what float32 sums may lack


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: tuple[float, ...]  # of each iteration that counts
    wrong: tuple[int, ...]  # iterations whose gradient wasn't exact


def run_trial(prepared: Prepared, site: Site, progress: Progress) -> Outcome:
    trial = prepared.trial
    lateness = trial.lateness()

    def work(rank: int, report: Report) -> dict[str, Any]:
        play = _Play(prepared, rank, lateness[:, rank].tolist(), report)
        return play.in_tree() if prepared.schedule is not None else play.in_ring()

    def heard(rank: int, told: dict[str, Any]) -> None:
        progress(told["done"], told["of"])

    longest = 60 + 2 * trial.budget + (UNCOUNTED + FEWEST) * TIMEOUT
    results = run_workers(
        trial.workers + 1, work, timeout=longest, on_message=heard, place=site.place
    )
    told = results[MASTER if prepared.schedule is not None else FIRST_WORKER]
    return Outcome(seconds=tuple(told["seconds"]), wrong=tuple(told["wrong"]))


class _Play:
    """What one rank does."""

    def __init__(self, prepared: Prepared, rank: int, late: Sequence[bool], report: Report) -> None:
        self.prepared = prepared
        self.trial = prepared.trial
        self.rank = rank
        self.late = late  # by iteration
        self.messages = prepared.messages.get(rank, ())
        self.compute = self.trial.compute * float(prepared.allocation.loads.get(rank, 0))
        self.world = World.join(TIMEOUT)
        self.alarm = self.world.alarm()
        self.clock = _Clock(prepared, self.world, report)

    def in_tree(self) -> dict[str, Any]:
        schedule = self.prepared.schedule
        assert schedule is not None
        relay = join_tree(
            self.world,
            self.alarm,
            self.prepared.allocation,
            [schedule],
            [Form()],
            timeout=TIMEOUT,
            make=partial(Node, most_kept=MOST_KEPT),
        )
        try:
            if self.rank == MASTER:
                self._decode(relay)
            else:
                self._answer(relay)
            self.world.part(TIMEOUT, self.alarm)
        finally:
            relay.close()
        return self.clock.told()

    def _decode(self, relay: Relay) -> None:
        step = 0
        while step < self.clock.count:
            results = relay.result(step)
            self.clock.tick(step, () if results is None else results.arrays)
            step += 1
        self.world.put(OVER, "yes")

    def _answer(self, relay: Relay) -> None:
        count, step = WARM_UP, 0
        while step < count:
            if self.compute:
                relay.result(step, self.compute)
            if self.late[step]:
                if self.trial.way == "away":
                    sleep(self.trial.delay)
                else:
                    relay.result(step, self.trial.delay)
            if relay.newest <= step:
                relay.contribute(step, 0, self.messages[step % len(self.messages)])
            if not self._comes_to_an_end(relay, step):
                return
            step = relay.newest
            if step >= WARM_UP and count == WARM_UP:
                count = _how_many(self.world, self.alarm)

    def _comes_to_an_end(self, relay: Relay, step: int) -> bool:
        """Wait until the iteration is over; False if all of them are. Letters may be lost, and so
        may the last, if this host's link lags far behind."""
        began = perf_counter()
        while relay.newest <= step:
            relay.result(step, PATIENCE)
            if relay.newest > step:
                break
            if self.world.wait_for(OVER, 0, self.alarm) is not None:
                return False
            if perf_counter() - began > TIMEOUT:
                raise RunError(
                    f"rank {self.rank} waited {TIMEOUT:g} s for iteration {step}",
                    "give smaller messages or faster NICs",
                )
        return True

    def in_ring(self) -> dict[str, Any]:
        if self.rank != MASTER:
            self._go_round()
        self.world.part(LONGEST if self.rank == MASTER else TIMEOUT, self.alarm)
        return self.clock.told()

    def _go_round(self) -> None:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("ring", self.world.store),
            rank=self.rank - FIRST_WORKER,
            world_size=self.trial.workers,
            timeout=timedelta(seconds=TIMEOUT),
        )
        tensor = torch.empty(self.trial.elements)
        own = [torch.from_numpy(each) for each in self.messages]
        count, step = WARM_UP, 0
        while step < count:
            sleep(self.compute + self.trial.delay * self.late[step])
            tensor.copy_(own[step % len(own)])
            dist.all_reduce(tensor)
            if self.rank == FIRST_WORKER:
                self.clock.tick(step, (tensor.numpy(),))
            step += 1
            if step == WARM_UP:
                count = _how_many(self.world, self.alarm)


def _how_many(world: World, alarm: Alarm) -> int:
    told = world.wait_for(COUNT, TIMEOUT, alarm)
    if told is None:
        raise RunError("nobody said how many iterations there are", "please report this")
    return int(told)


class _Clock:
    """Where iterations end: their times, and whether their gradients are exact. Says after the
    warm-up how many there will be."""

    def __init__(self, prepared: Prepared, world: World, report: Report) -> None:
        self.count = WARM_UP
        self._prepared = prepared
        self._world = world
        self._report = report
        self._reported = 0.0
        self._ends: list[float] = []
        self._wrong: list[int] = []

    def tick(self, step: int, arrays: Sequence[Single]) -> None:
        now = perf_counter()
        self._ends.append(now)
        if step + 1 == WARM_UP:
            self.count = UNCOUNTED + how_many(self._prepared.trial, self._ends)
            self._world.put(COUNT, str(self.count))
        if not arrays or not self._prepared.is_exact(step, arrays):
            self._wrong.append(step)
        if now - self._reported > TOLD:
            self._report({"done": step + 1, "of": self.count})
            self._reported = now

    def told(self) -> dict[str, Any]:
        seconds = np.diff(self._ends)[WARM_UP:]
        return {"seconds": [float(each) for each in seconds], "wrong": self._wrong}


def how_many(trial: Trial, ends: Sequence[float]) -> int:
    """As asked, or as the budget allows at this pace, but some at least."""
    affordable = int(trial.budget / max(fmean(np.diff(ends)), 1e-9))
    return min(trial.iterations, max(FEWEST, affordable))


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
