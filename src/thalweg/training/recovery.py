"""How a rank continues when members leave or join.

A rendezvous may interrupt anything that all members do together: a step, a safe point, or a
collective between the two, such as a checkpoint. The members then rendezvous (`rendezvous.py`),
members that are behind or new load the state of one of the most advanced, and the interrupted
operation is repeated.

If the other members are past the operation, this rank doesn't repeat it, nor the collectives that
they completed since: `_collectives_to_skip` counts these until its next safe point.
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

MAX_STATE_LAG_STEPS = 4  # of a rank whose state is requested
GROUPING_WORKLOAD = Workload.of_size(Size.parse("4KB"))  # groups don't depend on it


class Recovery:
    """The recovery of one rank. `transition` is None where members can't change;
    `on_members_changed` is called after a rendezvous."""

    def __init__(
        self,
        session: RankSession,
        transition: EpochTransition | None,
        on_members_changed: Callable[[], None],
    ) -> None:
        self.transition = transition
        self._session = session
        self._on_members_changed = on_members_changed
        self._collectives_done = 0  # since the last step
        self._collectives_to_skip = 0.0  # that the other members completed without this rank
        self._stops_at: int | None = None  # the step at which others have stopped already
        self._has_no_state = False  # its own state is void, and no other is loaded yet

    def start(self) -> None:
        """Begin to trigger a rendezvous when a rank fails that others wait for."""
        if self.transition is not None:
            self.transition.membership.triggers_rendezvous = self._triggers_rendezvous
            self.transition.membership.heeds_losses = self._all_wait

    # Operations that may be interrupted

    def run_collective(self, work: Callable[[], Any]) -> None:
        """Run a collective of all members between a step and the next safe point. Nothing happens
        if the step was interrupted, as the members before it don't come to this collective."""
        if self._session.saved_objects is not None:
            return
        if self._collectives_to_skip > 0:
            self._collectives_to_skip -= 1
            self._collectives_done += 1
            return

        def with_members() -> None:
            with self._session.restricted_to(self._collective_members()):
                work()

        try:
            self._together(with_members, MemberPhase.COLLECTIVE)
        finally:
            self._collectives_done += 1

    def safe_point(self, work: Callable[[], Any]) -> None:
        """Run the work of a safe point, where ranks that request it may join."""

        def come() -> None:
            self._check_members()
            work()

        self._collectives_to_skip = 0.0
        self._together(come, MemberPhase.SAFE_POINT)

    def stepped(self) -> None:
        self._collectives_done = 0

    def switch_plan(self, plan: Plan) -> None:
        """Switch the plan. If this is interrupted, all members continue with the old plan and
        switch later."""
        session = self._session
        try:
            session.switch_plan(plan)
        except (Interrupted, StoreLost):
            if self.transition is None:
                raise
            self._rendezvous(MemberPhase.SAFE_POINT)
            session.agreement.propose("sync", str(plan))

    def leave(self, seconds: float) -> bool:
        """Wait until all members end too, as they may still need this rank's state."""
        session = self._session
        with suppress(RunIsOver):  # the others have seen all members leave, and ended
            while True:
                try:
                    return session.world.leave(seconds, session.abort_flag)
                except Interrupted:
                    if session.shutdown.failed or session.engine.failed:
                        return True
                    self._rendezvous(MemberPhase.COLLECTIVE)
        return True

    def recover_step(self) -> None:
        """Recover from an interrupted step. It is repeated from its beginning; or with the present
        gradients, if only the script knows the samples, or each rank keeps its place. Where
        replicas differ, each rank keeps its own."""
        if self.transition is None:
            raise  # the store is lost, so no rendezvous is possible
        session, data_position = self._session, self._session.data_position
        # Torch's all-reduce has overwritten the gradients with means or partial sums.
        spoilt = default_catalog().is_native(session.plan)
        loaded = self._rendezvous(MemberPhase.STEP)
        if loaded is None and session.replicas_differ:
            return
        synchronizer = session.synchronizer
        again = (data_position.rank_loader is None and not spoilt) or session.keeps_own
        if loaded is None and again and isinstance(synchronizer, GradientSynchronizer):
            synchronizer.repeat()
            return
        session.saved_objects = deepcopy([part.state_dict() for part in session.state])
        if loaded is None:
            data_position.jump(data_position.position)
        for parameter in session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def rejoin(self) -> None:
        """Join a running job after a restart: the coded tree, if this rank still has its place
        there, or else the next rendezvous."""
        assert self.transition is not None
        with self.transition.membership.joining():
            if self._joins_tree(self.transition):
                return
            if self._session.data_position.rank_loader is None:
                raise RunError(
                    "this rank was restarted, and its place in the script's own loader isn't known",
                    "give data= and batch= to attach(), or restart all ranks from a checkpoint",
                )
            self._has_no_state = True
            self._rendezvous(MemberPhase.SAFE_POINT)

    def _joins_tree(self, transition: EpochTransition) -> bool:
        session = self._session
        with suppress(Interrupted, StoreLost):  # the others rendezvous, maybe without it
            if session.rank in transition.membership_epoch.members:
                found = session.context.tree_under_way()
                if found is not None:
                    session.refuse_what_does_not_run(found[0])
                    session.plan, session.clock.step = found
                    session.run_plan()
                    assert session.tree is not None
                    near = transition.membership.heartbeat.detector.furthest - MAX_STATE_LAG_STEPS
                    session.load_snapshot(session.tree.request_snapshot(after=near))
                    return True
        return False

    def _check_members(self) -> None:
        """Interrupt if a rank requests to join, and stop where others have stopped."""
        session = self._session
        if self.transition is not None:
            self.transition.membership.heartbeat.step = session.step
            self.transition.membership.raise_if_join_requested()
        if self._stops_at is not None and session.step >= self._stops_at:
            session.data_position.stopping = True

    def _together(self, work: Callable[[], Any], doing: MemberPhase) -> None:
        """Run `work`, and repeat it after an interruption with the members that are left. A rank
        that finds the others at another place continues from there: past the work, or before it if
        the rank was evicted."""
        while True:
            begun = self._session.step, self._collectives_done
            try:
                work()
                return
            except (Interrupted, StoreLost):
                if self.transition is None or self._session.synchronizer is None:
                    raise
                self._rendezvous(doing)
                if self.transition.membership_epoch.place != begun:
                    return

    def _collective_members(self) -> tuple[int, ...]:
        """The members that take part in the collectives before this step."""
        session = self._session
        if self.transition is None or self.transition.membership_epoch.number == 1:
            return session.world.members
        return self.transition.membership_epoch.collective_members(session.step)

    # Rendezvous

    def _rendezvous(self, doing: MemberPhase) -> Snapshot | None:
        """Rendezvous, and continue from where the most advanced members are. Returns the snapshot
        that was loaded, if this rank wasn't one of these."""
        session, transition = self._session, self.transition
        assert transition is not None
        abort = session.abort_flag.poll()
        if abort is not None and not isinstance(abort, StoreLost):
            raise abort
        lost_samples = self._lost_samples()
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
        loaded: Snapshot | None = None
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
                loaded = self._enter_epoch(transition, status, held) or loaded
                break
            except (Interrupted, StoreLost):
                continue
        lost = 0 if lost_samples is None else self._lost(lost_samples, transition.membership_epoch)
        transition.note(session.step, lost)
        return loaded

    def _enter_epoch(
        self, transition: EpochTransition, status: MemberStatus, held: CompressorState
    ) -> Snapshot | None:
        """Enter the next membership epoch; returns the snapshot that was loaded, if any."""
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
        gc.collect()  # the interrupted step has cycles, and buckets that will be replaced
        with session.holding(replicated_state(held)):
            loaded = transition.transfer_snapshot(
                session.group, membership_epoch.recipients, session.snapshot
            )
        if loaded is not None:
            self._load_snapshot(loaded, membership_epoch)
            held = {k: {n: t.numpy() for n, t in v.items()} for k, v in loaded.held.items()}
        if session.closed:
            return loaded
        session.run_plan()
        session.load_compressor_state(held)
        for name, value in pending:
            if name in ("sync", "stop"):
                session.agreement.propose(name, value)
        self._on_members_changed()
        return loaded

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
                f"rank {session.rank} missed steps {session.step} to {place - 1}, and the place in "
                "its own loader isn't known",
                "give data= and batch= to attach(): then it can rejoin",
            )

    def _lost_samples(self) -> LostSamples | None:
        session, loader = self._session, self._session.data_position.rank_loader
        if loader is None:
            return None
        return LostSamples(
            plan=session.plan, group=session.group, batches=loader.sampler, since=session.first_step
        )

    def _lost(self, lost_samples: LostSamples, membership_epoch: MembershipEpoch) -> int:
        """The number of samples lost with the ranks that left."""
        stayed = {
            r: s for r, s in membership_epoch.statuses.items() if r not in membership_epoch.joined
        }
        return lost_samples.lost(
            stayed,
            over=min(status.step for status in stayed.values()),
            begins=self._session.first_step,
            step=self._session.step,
            position=self._session.data_position.position,
        )

    def _all_wait(self) -> bool:
        """True if all ranks wait for one another. Under a code lost messages are requested
        again."""
        return not waits_for_nobody(self._session.plan)

    def _triggers_rendezvous(self, rank: int) -> bool:
        """True if the absence of this rank requires a rendezvous. A code can do without some ranks
        for a while."""
        session = self._session
        if waits_for_nobody(session.plan) and session.tree is None:
            return rank == session.checkpoint_writer()
        absent = {} if self.transition is None else self.transition.membership.suspected
        return session.tree is None or session.tree.needs(rank, absent)


def _fitting(plan: Plan, group: Group) -> Plan:
    """The plan that these members can run: a code needs more than one worker, and torch's process
    group can't lose any."""
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
    """The ranks that shared the batches from step `since` on: those of `group`, and those that had
    left it but whose samples weren't redistributed yet.

    Where replicas differ, a failed rank takes with it its slices of the steps since it last
    averaged with others: the work after that is in no other replica. Where replicas are equal
    nothing is lost, as the interrupted step is repeated.
    """

    plan: Plan
    group: Group
    batches: BatchSampler
    since: int

    def lost(
        self, members: Collection[int], *, over: int, begins: int, step: int, position: BatchIndex
    ) -> int:
        """The number of samples that are lost if only `members` continue. Steps before `over` are
        over for all of them, and from `begins` on the batches are redistributed; `position` is that
        of `step`."""
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
        """The first step after the rank's last averaging with others."""
        if rank in self.group.ranks:
            for step in range(over - 1, self.since - 1, -1):
                if rank in self._averaging_groups(step):
                    return step + 1
        return self.since

    def _averaging_groups(self, step: int) -> Iterator[int]:
        for one in compile_rounds(self.plan, self.group, GROUPING_WORKLOAD, step):
            if one.group.size > 1:
                yield from one.group.ranks

    def _share(self, rank: int, position: BatchIndex, batches: int) -> int:
        """The size of this rank's slice of a batch, `batches` batches after that position."""
        number = position.epoch * len(self.batches) + position.batch + batches
        epoch, batch = divmod(number, len(self.batches))
        return len(next(self.batches.slices(epoch, rank, batch)).samples)
