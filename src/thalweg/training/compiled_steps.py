"""The rounds of every step for one rank: compiled, checked before any byte moves, and cached."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.catalog import default_catalog
from thalweg.engine.arithmetic import Arithmetic
from thalweg.engine.execute import RankProgram, Task, View
from thalweg.facts import Workload
from thalweg.plan import Plan
from thalweg.schedules import Group, Schedule, check
from thalweg.steps import Round, compile_rounds, cycle, warm_up
from thalweg.training.buckets import FlatBucket
from thalweg.transports import Array

STEP_CACHE_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class RankRound:
    """A round that this rank takes part in."""

    round: Round
    program: RankProgram
    divisor: int  # the number of contributions, by which each is divided: the sum is a mean

    def task(
        self,
        bucket: FlatBucket,
        step: int,
        first_round: int,
        vector: Array | None = None,
        arithmetic: Arithmetic | None = None,
        view: View | None = None,
    ) -> Task:
        """The task for the engine, on the bucket's vector or on `vector`. The rounds of this step
        are numbered from `first_round` on."""
        return Task(
            program=self.program,
            vector=bucket.vector if vector is None else vector,
            step=step,
            round_number=first_round + self.round.number,
            bucket=bucket.index,
            arithmetic=arithmetic or bucket.arithmetic,
            view=view,
        )


@dataclass(frozen=True, slots=True)
class RankStep:
    """The rounds of one step for this rank, and the number of round numbers that all ranks use."""

    rounds: tuple[RankRound, ...]
    numbers: int

    def of(self, bucket: int) -> list[RankRound]:
        return [rank_round for rank_round in self.rounds if rank_round.round.bucket == bucket]


class CompiledSteps:
    """The compiled steps of one plan, layout and rank."""

    def __init__(self, plan: Plan, group: Group, workload: Workload, rank: int) -> None:
        self._plan = plan
        self._group = group
        self._workload = workload
        self._rank = rank
        self._cycle = cycle(plan, group, default_catalog())
        self._warm = warm_up(plan)
        self._handshake = default_catalog().topologies[plan.topology.name].mixes
        self._rank_steps: dict[int, RankStep] = {}
        self._programs: dict[int, tuple[Schedule, RankProgram]] = {}  # by the schedule's id

    def at(self, step: int) -> RankStep:
        place = step % self._cycle
        if step >= self._warm:  # the same place of a later cycle
            place += -(-self._warm // self._cycle) * self._cycle
        if place not in self._rank_steps:
            if len(self._rank_steps) >= STEP_CACHE_ENTRIES:
                self._rank_steps.clear()
                self._programs.clear()
            self._rank_steps[place] = self._compile(place)
        return self._rank_steps[place]

    def _compile(self, step: int) -> RankStep:
        rounds = compile_rounds(self._plan, self._group, self._workload, step)
        own = [r for r in rounds if self._rank in r.group.ranks]
        rank_rounds = tuple(
            RankRound(r, self._program(r.schedule), r.contributions(self._rank)) for r in own
        )
        return RankStep(rank_rounds, 1 + max((r.number for r in rounds), default=-1))

    def _program(self, schedule: Schedule) -> RankProgram:
        if id(schedule) not in self._programs:
            check(schedule)
            program = RankProgram.of(schedule, self._rank, handshake=self._handshake)
            self._programs[id(schedule)] = schedule, program
        return self._programs[id(schedule)][1]
