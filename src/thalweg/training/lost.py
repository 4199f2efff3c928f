"""What is lost with a worker, where replicas differ: its share of the steps since it met others.

What it learnt before that is in the others' replicas too. Afterwards it was alone with it: with
what it had computed, and with its samples of the steps that the others were at when it was gone.
Where replicas are equal nothing is lost, as the step that was broken off is redone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from thalweg.facts import Size, Workload
from thalweg.plan import Plan
from thalweg.rounds import compile_rounds
from thalweg.schedules import Group
from thalweg.training.batches import Batches
from thalweg.training.course import Position

SMALL = Workload.of_size(Size.parse("4KB"))  # who meets whom doesn't depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """Who shared out the batches among themselves from step `since` on: those of `group`, and those
    who had left it but whose samples weren't given to others yet."""

    plan: Plan
    group: Group
    batches: Batches
    since: int

    def lost(
        self, members: Collection[int], *, over: int, begins: int, step: int, position: Position
    ) -> int:
        """Samples that are lost if only `members` go on. Steps before `over` are over for all of
        them, and from `begins` on the batches are shared out anew; `position` is that of `step`."""
        if not self.plan.averages_parameters:
            return 0
        lost = 0
        for rank in self._all:
            if rank not in members:
                for number in range(self._alone_from(rank, over), begins):
                    lost += self._share(rank, position, number - step)
        return lost

    @property
    def _all(self) -> Collection[int]:
        return range(self.batches.size) if self.batches.members is None else self.batches.members

    def _alone_from(self, rank: int, over: int) -> int:
        """The first step after the last at which it met somebody."""
        if rank in self.group.ranks:
            for step in range(over - 1, self.since - 1, -1):
                if rank in self._who_meets(step):
                    return step + 1
        return self.since

    def _who_meets(self, step: int) -> Iterator[int]:
        for met in compile_rounds(self.plan, self.group, SMALL, step):
            if met.group.size > 1:
                yield from met.group.ranks

    def _share(self, rank: int, position: Position, batches: int) -> int:
        """So many batches after that position."""
        number = position.epoch * len(self.batches) + position.batch + batches
        epoch, batch = divmod(number, len(self.batches))
        return len(next(self.batches.shares(epoch, rank, batch)).samples)
