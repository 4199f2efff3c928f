"""How a rank goes on when members leave or come.

Whatever all do together may be broken off: a step, a safe point, or a work between the two, such as
a checkpoint. Then they meet (`survival.py`), those who are behind or new take over the state of one
of the furthest, and what was broken off is done again.

A rank may find others beyond what it was at. Then it doesn't do that again, nor the works that they
have done since: `missed` counts them until its next safe point.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from thalweg.catalog import parse_plan
from thalweg.errors import Interrupted, LayoutError, RunError, RunIsOver, StoreLost
from thalweg.facts import Size, Workload
from thalweg.members.membership_epoch import Doing, Formation, Standing
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed, waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import compile_rounds
from thalweg.training.auto.request import with_settings
from thalweg.training.compressor_state import Slots, common, to_go_on_with
from thalweg.training.data.position import Position
from thalweg.training.data.sampler import Batches
from thalweg.training.factory import is_native
from thalweg.training.lifecycle import Session
from thalweg.training.rendezvous import Survival
from thalweg.training.snapshot import State
from thalweg.training.sources.gradients import GradientAverager

NEAR = 4  # steps that one may be behind whose state is taken
SMALL = Workload.of_size(Size.parse("4KB"))  # who meets whom doesn't depend on it


class Regrouping:
    """`survival` is None where members can't change. `regrouped` is called when they have."""

    def __init__(
        self, session: Session, survival: Survival | None, regrouped: Callable[[], None]
    ) -> None:
        self.survival = survival
        self._session = session
        self._regrouped = regrouped
        self._works = 0  # that all have done together since the last step
        self._missed = 0.0  # those to come that the others have done without this rank
        self._stops_at: int | None = None  # the step at which others have stopped already
        self._adrift = False  # it has left its own state, and not yet another's

    def watch(self) -> None:
        """From now on form anew if somebody is gone who is waited for."""
        if self.survival is not None:
            self.survival.membership.calls_for = self._calls_for
            self.survival.membership.heeds_losses = self._all_wait

    # What may be broken off

    def work(self, work: Callable[[], Any]) -> None:
        """What all members do together between a step and the next safe point; nothing if the step
        was broken off, since those who were still before it don't come to this."""
        if self._session.aside is not None:
            return
        if self._missed > 0:
            self._missed -= 1
            self._works += 1
            return

        def with_those_at_work() -> None:
            with self._session.among(self._at_work()):
                work()

        try:
            self._together(with_those_at_work, Doing.WORK)
        finally:
            self._works += 1

    def safe_point(self, work: Callable[[], Any]) -> None:
        """The same at a safe point, where those are let in who ask for it."""

        def come() -> None:
            self._look_about()
            work()

        self._missed = 0.0
        self._together(come, Doing.SAFE_POINT)

    def stepped(self) -> None:
        self._works = 0

    def take_up(self, plan: Plan) -> None:
        """If it is broken off, all go on with the plan they had, and take it up later."""
        session = self._session
        try:
            session.take_up(plan)
        except (Interrupted, StoreLost):
            if self.survival is None:
                raise
            self._regroup(Doing.SAFE_POINT)
            session.agreement.propose("sync", str(plan))

    def part(self, seconds: float) -> bool:
        """Wait until all members end too, who may still need this rank's state."""
        session = self._session
        with suppress(RunIsOver):  # the others have seen that all have come, and are gone
            while True:
                try:
                    return session.world.part(seconds, session.alarm)
                except Interrupted:
                    if session.ending.failed or session.engine.failed:
                        return True
                    self._regroup(Doing.WORK)
        return True

    def break_off(self) -> None:
        """A step whose averages won't come. It is redone from its beginning, or with the gradients
        that are there if only the script knows the samples, or everybody keeps its place; where
        replicas differ, everybody keeps what it has."""
        if self.survival is None:
            raise  # the store is gone, and nobody can meet
        session, course = self._session, self._session.course
        # Torch's own all-reduce has written over the gradients: means, parts of sums, or anything.
        spoilt = is_native(session.plan)
        taken = self._regroup(Doing.STEP)
        if taken is None and session.replicas_differ:
            return
        averager = session.averager
        again = (course.feed is None and not spoilt) or session.keeps_own
        if taken is None and again and isinstance(averager, GradientAverager):
            averager.repeat()
            return
        session.aside = deepcopy([part.state_dict() for part in session.state])
        if taken is None:
            course.jump(course.position)
        for parameter in session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def come_back(self) -> None:
        """Of one that was started again: into the tree if it still has its place in one, or else by
        a muster."""
        assert self.survival is not None
        with self.survival.membership.coming_in():
            if self._comes_into_tree(self.survival):
                return
            if self._session.course.feed is None:
                raise RunError(
                    "this rank was started again, and where it was in its own loader isn't known",
                    "give data= and batch= to attach(), or start the whole run from its checkpoint",
                )
            self._adrift = True
            self._regroup(Doing.SAFE_POINT)

    def _comes_into_tree(self, survival: Survival) -> bool:
        session = self._session
        with suppress(Interrupted, StoreLost):  # the others meet anew, maybe without it
            if session.rank in survival.formation.members:
                found = session.setting.tree_under_way()
                if found is not None:
                    session.refuse_what_does_not_run(found[0])
                    session.plan, session.clock.step = found
                    session.run_plan()
                    assert session.tree is not None
                    near = survival.membership.furthest - NEAR
                    session.take_over(session.tree.take(after=near))
                    return True
        return False

    def _look_about(self) -> None:
        """Whether somebody is to be met, and whether others have stopped here."""
        session = self._session
        if self.survival is not None:
            self.survival.membership.step = session.step
            self.survival.membership.refuse_if_wanted()
        if self._stops_at is not None and session.step >= self._stops_at:
            session.course.stopping = True

    def _together(self, work: Callable[[], Any], doing: Doing) -> None:
        """If it is broken off, it is done again by those who are left; one of them that finds
        others elsewhere goes on from there: beyond it, or before it if it was left out."""
        while True:
            begun = self._session.step, self._works
            try:
                work()
                return
            except (Interrupted, StoreLost):
                if self.survival is None or self._session.averager is None:
                    raise
                self._regroup(doing)
                if self.survival.formation.place != begun:
                    return

    def _at_work(self) -> tuple[int, ...]:
        """The members that do the works before this step."""
        session = self._session
        if self.survival is None or self.survival.formation.number == 1:
            return session.world.members
        return self.survival.formation.at_work(session.step)

    # Meeting

    def _regroup(self, doing: Doing) -> State | None:
        """Meet the members that are left or new, and go on from where the furthest of them are: the
        state that was taken over, if this rank wasn't one of these."""
        session, survival = self._session, self.survival
        assert survival is not None
        heard = session.alarm.heard()
        if heard is not None and not isinstance(heard, StoreLost):
            raise heard
        sharers = self._sharers()
        held: Slots = {}
        if session.averager is not None:
            in_step = doing is Doing.STEP
            held = session.averager.held_before if in_step else session.averager.held
            held = to_go_on_with(held)
            session.averager.break_off()
        taken: State | None = None
        while True:
            standing = Standing(
                step=session.step,
                works=self._works,
                doing=doing,
                joins=self._adrift,
                keeps=session.keeps_own,
                stops=session.course.stopping,
                plan=str(session.plan),
                version=session.ledger.version,
            )
            try:
                taken = self._go_on_in(survival, standing, held) or taken
                break
            except (Interrupted, StoreLost):
                continue
        lost = 0 if sharers is None else self._lost(sharers, survival.formation)
        survival.note(session.step, lost)
        return taken

    def _go_on_in(self, survival: Survival, standing: Standing, held: Slots) -> State | None:
        """The next formation. The state that was taken over, if one was."""
        session = self._session
        pending = session.agreement.pending
        world = survival.meet(standing)
        formation = survival.formation
        self._adrift = self._adrift or session.rank in formation.joined
        self._refuse_unknown_place(formation)
        session.begins = formation.begins
        session.form(world, world.alarm(), self.break_off, formation.root)
        plan = _fitting(parse_plan(formation.plan), session.group)
        session.refuse_what_does_not_run(plan)
        session.plan = plan
        session.clock.go_to(session.step)
        self._missed = formation.missed(session.rank)
        self._stops_at = formation.stops_at
        gc.collect()  # what was broken off has cycles, and buckets that are to be made anew
        with session.holding(common(held)):
            taken = survival.hand_over(session.group, formation.takers, session.snapshot)
        if taken is not None:
            self._take_over(taken, formation)
            held = {k: {n: t.numpy() for n, t in v.items()} for k, v in taken.held.items()}
        if session.closed:
            return taken
        session.run_plan()
        session.go_on_with(held)
        for name, value in pending:
            if name in ("sync", "stop"):
                session.agreement.propose(name, value)
        self._regrouped()
        return taken

    def _take_over(self, state: State, formation: Formation) -> None:
        session = self._session
        session.take_over(state)
        self._works = formation.place[1]
        if session.keeps_own and session.course.feed is not None:
            session.course.skip(session.begins - session.step)
            session.clock.go_to(session.begins)
            self._works = formation.start[1]
        self._adrift = False

    def _refuse_unknown_place(self, formation: Formation) -> None:
        session, place = self._session, formation.place[0]
        behind = session.rank in formation.takers
        if behind and session.course.feed is None and session.step < place - 1:
            raise RunError(
                f"rank {session.rank} missed steps {session.step} to {place - 1}, and where "
                "its own loader would be isn't known",
                "give data= and batch= to attach(): then it can come back",
            )

    def _sharers(self) -> Sharers | None:
        session, feed = self._session, self._session.course.feed
        if feed is None:
            return None
        return Sharers(
            plan=session.plan, group=session.group, batches=feed.batches, since=session.begins
        )

    def _lost(self, sharers: Sharers, formation: Formation) -> int:
        """Samples."""
        stayed = {r: s for r, s in formation.standings.items() if r not in formation.joined}
        return sharers.lost(
            stayed,
            over=min(standing.step for standing in stayed.values()),
            begins=self._session.begins,
            step=self._session.step,
            position=self._session.course.position,
        )

    def _all_wait(self) -> bool:
        """For one another: not under a code, whose letters are asked for again if they are lost."""
        return not waits_for_nobody(self._session.plan)

    def _calls_for(self, rank: int) -> bool:
        """Whether the absence of this rank is reason to form anew. Not under a code, which can do
        without some for a while."""
        session = self._session
        if waits_for_nobody(session.plan) and session.tree is None:
            return rank == session.keeper()
        absent = {} if self.survival is None else self.survival.membership.absent
        return session.tree is None or session.tree.needs(rank, absent)


def _fitting(plan: Plan, group: Group) -> Plan:
    """For members that have met anew: a code needs more than one worker, and torch's process group
    can't lose any."""
    if is_native(plan):
        return with_settings(parse_plan("ring"), plan)
    if is_relayed(plan):
        try:
            allocation_of(plan, group)
        except LayoutError:
            return with_settings(parse_plan("ring"), plan)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """Who shared out the batches among themselves from step `since` on: those of `group`, and those
    who had left it but whose samples weren't given to others yet.

    What is lost with one of them, where replicas differ, is its share of the steps since it met
    others. What it learnt before that is in the others' replicas too. Afterwards it was alone with
    it: with what it had computed, and with its samples of the steps that the others were at when
    it was gone. Where replicas are equal nothing is lost, as the step that was broken off is
    redone.
    """

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
