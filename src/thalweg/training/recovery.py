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

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import Interrupted, LayoutError, RunError, RunIsOver, StoreLost
from thalweg.facts import Size, Workload
from thalweg.members.membership_epoch import MemberPhase, MembershipEpoch, MemberStatus
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed, waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import compile_rounds
from thalweg.training.auto.request import with_settings
from thalweg.training.compressor_state import (
    CompressorState,
    replicated_state,
    state_after_member_change,
)
from thalweg.training.data.position import BatchIndex
from thalweg.training.data.sampler import BatchSampler
from thalweg.training.lifecycle import RankSession
from thalweg.training.rendezvous import EpochTransition
from thalweg.training.snapshot import Snapshot
from thalweg.training.sources.gradients import GradientSynchronizer

MAX_STATE_LAG_STEPS = 4  # steps that one may be behind whose state is taken
GROUPING_WORKLOAD = Workload.of_size(Size.parse("4KB"))  # who meets whom doesn't depend on it


class Recovery:
    """`survival` is None where members can't change. `regrouped` is called when they have."""

    def __init__(
        self,
        session: RankSession,
        transition: EpochTransition | None,
        regrouped: Callable[[], None],
    ) -> None:
        self.transition = transition
        self._session = session
        self._regrouped = regrouped
        self._collectives_done = 0  # that all have done together since the last step
        self._collectives_to_skip = 0.0  # those to come that the others have done without this rank
        self._stops_at: int | None = None  # the step at which others have stopped already
        self._has_no_state = False  # it has left its own state, and not yet another's

    def start(self) -> None:
        """From now on form anew if somebody is gone who is waited for."""
        if self.transition is not None:
            self.transition.membership.triggers_rendezvous = self._triggers_rendezvous
            self.transition.membership.heeds_losses = self._all_wait

    # What may be broken off

    def run_collective(self, work: Callable[[], Any]) -> None:
        """What all members do together between a step and the next safe point; nothing if the step
        was broken off, since those who were still before it don't come to this."""
        if self._session.saved_objects is not None:
            return
        if self._collectives_to_skip > 0:
            self._collectives_to_skip -= 1
            self._collectives_done += 1
            return

        def with_those_at_work() -> None:
            with self._session.restricted_to(self._collective_members()):
                work()

        try:
            self._together(with_those_at_work, MemberPhase.COLLECTIVE)
        finally:
            self._collectives_done += 1

    def safe_point(self, work: Callable[[], Any]) -> None:
        """The same at a safe point, where those are let in who ask for it."""

        def come() -> None:
            self._check_members()
            work()

        self._collectives_to_skip = 0.0
        self._together(come, MemberPhase.SAFE_POINT)

    def stepped(self) -> None:
        self._collectives_done = 0

    def switch_plan(self, plan: Plan) -> None:
        """If it is broken off, all go on with the plan they had, and take it up later."""
        session = self._session
        try:
            session.switch_plan(plan)
        except (Interrupted, StoreLost):
            if self.transition is None:
                raise
            self._regroup(MemberPhase.SAFE_POINT)
            session.agreement.propose("sync", str(plan))

    def leave(self, seconds: float) -> bool:
        """Wait until all members end too, who may still need this rank's state."""
        session = self._session
        with suppress(RunIsOver):  # the others have seen that all have come, and are gone
            while True:
                try:
                    return session.world.leave(seconds, session.abort_flag)
                except Interrupted:
                    if session.shutdown.failed or session.engine.failed:
                        return True
                    self._regroup(MemberPhase.COLLECTIVE)
        return True

    def recover_step(self) -> None:
        """A step whose averages won't come. It is redone from its beginning, or with the gradients
        that are there if only the script knows the samples, or everybody keeps its place; where
        replicas differ, everybody keeps what it has."""
        if self.transition is None:
            raise  # the store is gone, and nobody can meet
        session, data_position = self._session, self._session.data_position
        # Torch's own all-reduce has written over the gradients: means, parts of sums, or anything.
        spoilt = default_catalog().is_native(session.plan)
        taken = self._regroup(MemberPhase.STEP)
        if taken is None and session.replicas_differ:
            return
        synchronizer = session.synchronizer
        again = (data_position.rank_loader is None and not spoilt) or session.keeps_own
        if taken is None and again and isinstance(synchronizer, GradientSynchronizer):
            synchronizer.repeat()
            return
        session.saved_objects = deepcopy([part.state_dict() for part in session.state])
        if taken is None:
            data_position.jump(data_position.position)
        for parameter in session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def rejoin(self) -> None:
        """Of one that was started again: into the tree if it still has its place in one, or else by
        a muster."""
        assert self.transition is not None
        with self.transition.membership.joining():
            if self._comes_into_tree(self.transition):
                return
            if self._session.data_position.rank_loader is None:
                raise RunError(
                    "this rank was started again, and where it was in its own loader isn't known",
                    "give data= and batch= to attach(), or start the whole run from its checkpoint",
                )
            self._has_no_state = True
            self._regroup(MemberPhase.SAFE_POINT)

    def _comes_into_tree(self, transition: EpochTransition) -> bool:
        session = self._session
        with suppress(Interrupted, StoreLost):  # the others meet anew, maybe without it
            if session.rank in transition.membership_epoch.members:
                found = session.context.tree_under_way()
                if found is not None:
                    session.refuse_what_does_not_run(found[0])
                    session.plan, session.clock.step = found
                    session.run_plan()
                    assert session.tree is not None
                    near = transition.membership.furthest - MAX_STATE_LAG_STEPS
                    session.load_snapshot(session.tree.request_snapshot(after=near))
                    return True
        return False

    def _check_members(self) -> None:
        """Whether somebody is to be met, and whether others have stopped here."""
        session = self._session
        if self.transition is not None:
            self.transition.membership.step = session.step
            self.transition.membership.raise_if_join_requested()
        if self._stops_at is not None and session.step >= self._stops_at:
            session.data_position.stopping = True

    def _together(self, work: Callable[[], Any], doing: MemberPhase) -> None:
        """If it is broken off, it is done again by those who are left; one of them that finds
        others elsewhere goes on from there: beyond it, or before it if it was left out."""
        while True:
            begun = self._session.step, self._collectives_done
            try:
                work()
                return
            except (Interrupted, StoreLost):
                if self.transition is None or self._session.synchronizer is None:
                    raise
                self._regroup(doing)
                if self.transition.membership_epoch.place != begun:
                    return

    def _collective_members(self) -> tuple[int, ...]:
        """The members that do the works before this step."""
        session = self._session
        if self.transition is None or self.transition.membership_epoch.number == 1:
            return session.world.members
        return self.transition.membership_epoch.collective_members(session.step)

    # Meeting

    def _regroup(self, doing: MemberPhase) -> Snapshot | None:
        """Meet the members that are left or new, and go on from where the furthest of them are: the
        state that was taken over, if this rank wasn't one of these."""
        session, transition = self._session, self.transition
        assert transition is not None
        abort = session.abort_flag.poll()
        if abort is not None and not isinstance(abort, StoreLost):
            raise abort
        sharers = self._lost_samples()
        held: CompressorState = {}
        if session.synchronizer is not None:
            in_step = doing is MemberPhase.STEP
            held = (
                session.synchronizer.compressor_state_before
                if in_step
                else session.synchronizer.compressor_state
            )
            held = state_after_member_change(held)
            session.synchronizer.abort()
        taken: Snapshot | None = None
        while True:
            status = MemberStatus(
                step=session.step,
                works=self._collectives_done,
                doing=doing,
                joins=self._has_no_state,
                keeps=session.keeps_own,
                stops=session.data_position.stopping,
                plan=str(session.plan),
                version=session.ledger.version,
            )
            try:
                taken = self._go_on_in(transition, status, held) or taken
                break
            except (Interrupted, StoreLost):
                continue
        lost = 0 if sharers is None else self._lost(sharers, transition.membership_epoch)
        transition.note(session.step, lost)
        return taken

    def _go_on_in(
        self, transition: EpochTransition, status: MemberStatus, held: CompressorState
    ) -> Snapshot | None:
        """The next formation. The state that was taken over, if one was."""
        session = self._session
        pending = session.agreement.pending
        world = transition.rendezvous(status)
        membership_epoch = transition.membership_epoch
        self._has_no_state = self._has_no_state or session.rank in membership_epoch.joined
        self._refuse_unknown_place(membership_epoch)
        session.first_step = membership_epoch.first_step
        session.set_members(world, world.abort_flag(), self.recover_step, membership_epoch.root)
        plan = _fitting(parse_plan(membership_epoch.plan), session.group)
        session.refuse_what_does_not_run(plan)
        session.plan = plan
        session.clock.go_to(session.step)
        self._collectives_to_skip = membership_epoch.collectives_to_skip(session.rank)
        self._stops_at = membership_epoch.stops_at
        gc.collect()  # what was broken off has cycles, and buckets that are to be made anew
        with session.holding(replicated_state(held)):
            taken = transition.transfer_snapshot(
                session.group, membership_epoch.recipients, session.snapshot
            )
        if taken is not None:
            self._load_snapshot(taken, membership_epoch)
            held = {k: {n: t.numpy() for n, t in v.items()} for k, v in taken.held.items()}
        if session.closed:
            return taken
        session.run_plan()
        session.load_compressor_state(held)
        for name, value in pending:
            if name in ("sync", "stop"):
                session.agreement.propose(name, value)
        self._regrouped()
        return taken

    def _load_snapshot(self, state: Snapshot, membership_epoch: MembershipEpoch) -> None:
        session = self._session
        session.load_snapshot(state)
        self._collectives_done = membership_epoch.place[1]
        if session.keeps_own and session.data_position.rank_loader is not None:
            session.data_position.skip(session.first_step - session.step)
            session.clock.go_to(session.first_step)
            self._collectives_done = membership_epoch.start[1]
        self._has_no_state = False

    def _refuse_unknown_place(self, membership_epoch: MembershipEpoch) -> None:
        session, place = self._session, membership_epoch.place[0]
        behind = session.rank in membership_epoch.recipients
        if behind and session.data_position.rank_loader is None and session.step < place - 1:
            raise RunError(
                f"rank {session.rank} missed steps {session.step} to {place - 1}, and where "
                "its own loader would be isn't known",
                "give data= and batch= to attach(): then it can come back",
            )

    def _lost_samples(self) -> LostSamples | None:
        session, loader = self._session, self._session.data_position.rank_loader
        if loader is None:
            return None
        return LostSamples(
            plan=session.plan, group=session.group, batches=loader.sampler, since=session.first_step
        )

    def _lost(self, sharers: LostSamples, membership_epoch: MembershipEpoch) -> int:
        """Samples."""
        stayed = {
            r: s for r, s in membership_epoch.statuses.items() if r not in membership_epoch.joined
        }
        return sharers.lost(
            stayed,
            over=min(status.step for status in stayed.values()),
            begins=self._session.first_step,
            step=self._session.step,
            position=self._session.data_position.position,
        )

    def _all_wait(self) -> bool:
        """For one another: not under a code, whose letters are asked for again if they are lost."""
        return not waits_for_nobody(self._session.plan)

    def _triggers_rendezvous(self, rank: int) -> bool:
        """Whether the absence of this rank is reason to form anew. Not under a code, which can do
        without some for a while."""
        session = self._session
        if waits_for_nobody(session.plan) and session.tree is None:
            return rank == session.checkpoint_writer()
        absent = {} if self.transition is None else self.transition.membership.suspected
        return session.tree is None or session.tree.needs(rank, absent)


def _fitting(plan: Plan, group: Group) -> Plan:
    """For members that have met anew: a code needs more than one worker, and torch's process group
    can't lose any."""
    if default_catalog().is_native(plan):
        return with_settings(parse_plan("ring"), plan)
    if is_relayed(plan):
        try:
            allocation_of(plan, group)
        except LayoutError:
            return with_settings(parse_plan("ring"), plan)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSamples:
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
    batches: BatchSampler
    since: int

    def lost(
        self, members: Collection[int], *, over: int, begins: int, step: int, position: BatchIndex
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
                if rank in self._averaging_groups(step):
                    return step + 1
        return self.since

    def _averaging_groups(self, step: int) -> Iterator[int]:
        for met in compile_rounds(self.plan, self.group, GROUPING_WORKLOAD, step):
            if met.group.size > 1:
                yield from met.group.ranks

    def _share(self, rank: int, position: BatchIndex, batches: int) -> int:
        """So many batches after that position."""
        number = position.epoch * len(self.batches) + position.batch + batches
        epoch, batch = divmod(number, len(self.batches))
        return len(next(self.batches.slices(epoch, rank, batch)).samples)
