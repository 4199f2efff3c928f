"""Run a schedule for real, one thread a rank; a coded one by its nodes, messages in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random
from time import monotonic

import numpy as np

from tests.threads import run_threads
from thalweg.codes import Allocation
from thalweg.engine.arithmetic import NUMPY, Arithmetic
from thalweg.engine.execute import Execution, RankProgram, Task, View, flat
from thalweg.engine.tree_node import ElementType, Node, Results, pieces_of
from thalweg.facts import Cluster
from thalweg.schedules import Group, Schedule, coded_tree
from thalweg.transports import Array, Transport
from thalweg.transports.best_effort import BestEffortMessage

TIMEOUT = 20.0
DOUBLE = ElementType(np.dtype(np.float64))


def run(schedule: Schedule, inputs: dict[int, Array]) -> dict[int, Array]:
    """What each rank's vector becomes."""

    def work(transport: Transport) -> Array:
        vector = inputs[transport.rank].copy()
        execute(
            RankProgram.of(schedule, transport.rank),
            transport,
            flat(schedule, vector),
            timeout=TIMEOUT,
        )
        return vector

    return run_threads(schedule.ranks, work)


def execute(
    part: RankProgram,
    transport: Transport,
    view: View,
    *,
    step: int = 0,
    round_number: int = 0,
    timeout: float,
    arithmetic: Arithmetic = NUMPY,
) -> dict[int, float]:
    """Do all moves of this rank, in place; PeerLate if they take longer than `timeout` seconds.

    Returns when each peer's first message came, by the clock of `time.monotonic`."""
    task = Task(
        program=part,
        vector=np.empty(0),
        step=step,
        round_number=round_number,
        arithmetic=arithmetic,
        view=view,
    )
    run = Execution(task, transport, monotonic() + timeout)
    while not run.start_ready():
        run.arrive(*transport.receive_any(run.awaited.keys(), run.deadline))
    run.wait_for_sendings()
    return run.came


class SimulatedTree:
    """All ranks' nodes of a coded tree. What they send is delivered in an order drawn at random,
    mixed with their own contributions; step after step on the same nodes."""

    def __init__(
        self,
        allocation: Allocation,
        *schedules: Schedule,
        form: ElementType = DOUBLE,
        seed: int = 0,
    ) -> None:
        self.allocation = allocation
        forms = [form] * len(schedules)
        self.nodes = {
            rank: Node(rank, pieces_of(schedules, forms, rank), allocation)
            for rank in allocation.ranks
        }
        self.step = -1
        self._rounds = len(schedules)
        self._draw = Random(seed)

    def run(
        self,
        inputs: Mapping[int, Array],
        *,
        late: Collection[int] = (),
        gone: Collection[int] = (),
        cut: Collection[tuple[int, int]] = (),
    ) -> dict[int, Results | None]:
        """One more step, of which each rank's results are returned. Who is late contributes
        nothing; who is gone receives nothing either; messages from the first to the second of a cut
        pair are lost. Every round gets the same inputs."""
        self.step += 1
        present = [rank for rank in self.allocation.workers if rank not in {*late, *gone}]
        self.deliver(
            [(rank, number) for rank in present for number in range(self._rounds)],
            inputs,
            gone,
            cut,
        )
        found = {rank: node.finished.get(self.step) for rank, node in self.nodes.items()}
        for node in self.nodes.values():
            node.skip_to(self.step + 1)
        return found

    def deliver(
        self,
        under_way: list[tuple[int, int | BestEffortMessage]],
        inputs: Mapping[int, Array],
        gone: Collection[int] = (),
        cut: Collection[tuple[int, int]] = (),
    ) -> None:
        """To ranks, messages or the numbers of rounds to contribute to; and all that follows."""
        while under_way:
            last = self._draw.randrange(len(under_way))
            under_way[last], under_way[-1] = under_way[-1], under_way[last]
            rank, what = under_way.pop()
            node = self.nodes[rank]
            sent = (
                node.arrive(what)
                if isinstance(what, BestEffortMessage)
                else node.contribute(self.step, what, inputs[rank])
            )
            under_way += [
                (message.peer, message._replace(peer=rank))
                for message in sent
                if message.peer not in gone and (rank, message.peer) not in cut
            ]


def tree_schedule(allocation: Allocation, elements: int, itemsize: int = 8) -> Schedule:
    """On a flat cluster, whose ranks are those of the allocation."""
    group = Group.everybody(Cluster.flat(len(allocation.ranks)))
    return coded_tree(group, elements, itemsize, allocation)


def contributions(allocation: Allocation, cells: Array) -> dict[int, Array]:
    """What each worker computes from the cells' gradients, in their own type."""
    found = {}
    for worker, weights in allocation.weights.items():
        total = np.zeros_like(cells[0])
        for cell, weight in weights.items():
            total += cells[cell] * cells.dtype.type(weight)
        found[worker] = total
    return found


def whole_numbers(schedule: Schedule, seed: int = 0) -> dict[int, Array]:
    """A different vector for each rank, whose sums have no rounding."""
    rng = np.random.default_rng(seed)
    return {rank: rng.integers(-99, 99, schedule.elements).astype(float) for rank in schedule.ranks}


def mean_sets(schedule: Schedule, rank: int) -> list[int]:
    """The ranks whose sum the schedule promises to this one."""
    promised = schedule.after.content(rank, 0)
    assert isinstance(promised, int)
    return [other for other in range(promised.bit_length()) if promised >> other & 1]
