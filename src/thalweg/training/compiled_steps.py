"""The chains of every step for one rank: compiled, checked before any byte moves, and cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from thalweg.catalog import default_catalog
from thalweg.engine.arithmetic import NUMPY, Arithmetic
from thalweg.engine.collectives import RoundCounter
from thalweg.engine.execute import RankProgram, Task, View
from thalweg.facts import Workload
from thalweg.plan import Plan
from thalweg.schedules import Group, Schedule, check
from thalweg.steps import Chain, Round, compile_step, cycle, warm_up
from thalweg.transports import Array

STEP_CACHE_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class RankStep:
    """The chains of a step on this rank, the program of each of their rounds by its number, and how
    many numbers all ranks use. The rounds of this step are labelled from `first` on."""

    chains: tuple[Chain, ...]
    programs: Mapping[int, RankProgram]
    numbers: int
    step: int = 0
    first: int = 0

    def task(
        self,
        chain: Chain,
        round_: Round,
        vector: Array,
        arithmetic: Arithmetic = NUMPY,
        view: View | None = None,
    ) -> Task:
        """The task for the engine that exchanges this vector."""
        return Task(
            program=self.programs[round_.number],
            vector=vector,
            step=self.step,
            round_number=self.first + round_.number,
            bucket=chain.bucket,
            arithmetic=arithmetic,
            view=view,
        )


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

    def begin(self, clock: RoundCounter) -> RankStep:
        """The current step; every rank claims its numbers, once."""
        rank_step = self.at(clock.step)
        return replace(rank_step, step=clock.step, first=clock.claim(rank_step.numbers))

    def at(self, step: int) -> RankStep:
        """The chains of this step, which another step may have too."""
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
        compiled = compile_step(self._plan, self._group, self._workload, step)
        chains = compiled.of(self._rank)
        programs = {r.number: self._program(r.schedule) for chain in chains for r in chain.rounds}
        return RankStep(chains, programs, compiled.numbers)

    def _program(self, schedule: Schedule) -> RankProgram:
        if id(schedule) not in self._programs:
            check(schedule)
            program = RankProgram.of(schedule, self._rank, handshake=self._handshake)
            self._programs[id(schedule)] = schedule, program
        return self._programs[id(schedule)][1]
