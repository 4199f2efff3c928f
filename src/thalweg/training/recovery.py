"""How a rank continues when members leave or join.

A rendezvous may interrupt anything that all members do together: a step, a safe point, or a
collective between the two, such as a checkpoint. The members then rendezvous: a membership epoch
begins where its most advanced members are. Members that are behind, because they lack a step's
result, load the state of one of the most advanced, and so do ranks that join. All members repeat
the interrupted operation from its beginning, a step on the same samples, distributed over the new
members: no sample is lost, and none is applied twice.

Members change at safe points only. An interrupted step is marked: its averages are missing, so it
doesn't count, and the rendezvous follows at the next safe point, which begins the step again. Only
where this rank's samples can't be had again (the script's own loader), or each rank keeps its own
step (`asp`), the rendezvous takes place where the averages are waited for.

If the other members are past the operation, this rank doesn't repeat it, nor the collectives that
they completed since: `_collectives_to_skip` counts these until its next safe point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from thalweg.catalog import parse_plan
from thalweg.engine.collectives import SEE_OUTPUT_REMEDY, Collectives, RoundCounter
from thalweg.errors import Interrupted, RunError, RunIsOver, StoreLost
from thalweg.members.membership import Membership
from thalweg.members.membership_epoch import (
    MemberPhase,
    MembershipEpoch,
    MemberStatus,
)
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.training.factory import fitting
from thalweg.training.lifecycle import RankSession
from thalweg.training.plan_context import tree_under_way
from thalweg.training.plan_state import PlanState, after_member_change, equal_state
from thalweg.training.rendezvous import ChangeRecord, LostSamples
from thalweg.training.snapshot import Snapshot
from thalweg.training.sources.source import Source

MAX_STATE_LAG_STEPS = 4  # of a rank whose state is requested
STATE_ROUND_COUNT = 1 << 16  # round numbers of snapshots, below those of other collectives
log = logging.getLogger("thalweg")


@dataclass(slots=True, kw_only=True)
class _Interruption:
    """An operation that a rendezvous interrupts, and this rank's part in the rendezvous: its place,
    its kept state from before, and its proposals that haven't taken effect."""

    doing: MemberPhase
    place: tuple[int, int]  # step, and collectives since
    kept: PlanState
    proposals: Sequence[tuple[str, Any]]


class Recovery:
    """The recovery of one rank. `membership` is None where members can't change. Restarted ranks
    find `published` in the store."""

    def __init__(self, session: RankSession, published: Mapping[str, str]) -> None:
        self._world = world = session.world
        self.membership = world.membership
        self._session = session
        self._published = dict(published)
        self._interruption: _Interruption | None = None  # until the rendezvous
        self.changes = ChangeRecord(world.rank, world.membership)
        self._collectives_done = 0  # since the last step
        self._collectives_to_skip = 0.0  # that the other members completed without this rank
        self._stops_at: int | None = None  # the step at which others have stopped already
        self._has_no_state = False  # its own state is void, and no other is loaded yet
        session.on_interrupted = self.mark_step
        if self.membership is not None:
            self.membership.on_suspected = self.changes.note_absence
            self.membership.on_recovered = self.changes.note_return

    @property
    def membership_epoch(self) -> MembershipEpoch:
        return self._world.membership_epoch

    @property
    def is_interrupted(self) -> bool:
        """True from an interruption to the next rendezvous."""
        return self._interruption is not None

    def find_world(self) -> World:
        """The members that train now; a restarted rank may be one of them."""
        if self.membership is not None and self._world.restarted:
            epoch = self.membership.find()
            if self._world.rank in epoch.members and epoch.number > 1:
                return self._enter()
        return self._world

    def start(self) -> None:
        """Begin to trigger a rendezvous when a rank fails that others wait for."""
        if self.membership is not None:
            self.membership.triggers_rendezvous = self._triggers_rendezvous
            # Under a code lost messages are requested again.
            self.membership.heeds_losses = lambda: self._session.exchange.waits_for_all

    def publish(self, values: Mapping[str, str]) -> None:
        """Keep these values in the store, also in one that replaces it."""
        self._published |= values

    # Operations that may be interrupted

    def run_collective(self, work: Callable[[], Any]) -> None:
        """Run a collective of all members between a step and the next safe point. Nothing happens
        if the step was interrupted, as the members before it don't come to this collective."""
        if self._session.saved_objects is not None:
            return
        self._rendezvous_if_interrupted()
        if self._collectives_to_skip > 0:
            self._collectives_to_skip -= 1
            self._collectives_done += 1
            return

        def with_members() -> None:
            members = self.membership_epoch.collective_members(self._session.step)
            with self._session.restricted_to(members):
                work()

        try:
            self._together(with_members, MemberPhase.COLLECTIVE)
        finally:
            self._collectives_done += 1

    def safe_point(self, work: Callable[[], Any]) -> bool:
        """Run the work of a safe point, where ranks that request it may join. False if the other
        members are in another epoch of the data: then it is left to the safe point there."""

        def come() -> None:
            self._check_members()
            work()

        self._rendezvous_if_interrupted()
        if self._session.data_position.is_elsewhere:
            return False
        self._collectives_to_skip = 0.0
        self._together(come, MemberPhase.SAFE_POINT)
        return True

    def stepped(self) -> None:
        self._collectives_done = 0

    def switch_plan(self, plan: Plan) -> None:
        """Switch the plan. If this is interrupted, all members continue with the old plan and
        switch later."""
        session = self._session
        try:
            session.switch_plan(plan)
        except (Interrupted, StoreLost):
            if self.membership is None:
                raise
            self._interrupt(MemberPhase.SAFE_POINT)
            self._rendezvous()
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
                    self._interrupt(MemberPhase.COLLECTIVE)
                    self._rendezvous()
        return True

    def mark_step(self, error: Interrupted | StoreLost) -> bool:
        """Mark the step whose exchange was interrupted. Where replicas differ it counts without its
        average; elsewhere it is repeated from its beginning. True if it is repeated at once, with
        the present gradients, by the source that called this."""
        if self.membership is None:
            raise error  # the store is lost, so no rendezvous is possible
        session = self._session
        source, own_loader = session.source, session.data_position.rank_loader is None
        self._interrupt(MemberPhase.STEP)
        if session.replicas_differ:
            return False
        loaded = None
        if session.keeps_own or (own_loader and source is not None and source.keeps_gradients):
            loaded = self._rendezvous(repeating=source)
            if loaded is None and session.source is source:
                return True
        session.void_step()
        if loaded is None:
            session.data_position.jump(session.data_position.position)
        return False

    def rejoin(self) -> None:
        """Join a running job after a restart: the coded tree, if this rank still has its place
        there, or else the next rendezvous."""
        assert self.membership is not None
        with self.membership.joining():
            if self._joins_tree(self.membership):
                return
            if self._session.data_position.rank_loader is None:
                raise RunError(
                    "this rank was restarted, and its place in the script's own loader isn't known",
                    "give data= and batch= to attach(), or restart all ranks from a checkpoint",
                )
            self._has_no_state = True
            self._interrupt(MemberPhase.SAFE_POINT)
            self._rendezvous()

    def _joins_tree(self, membership: Membership) -> bool:
        session = self._session
        with suppress(Interrupted, StoreLost):  # the others rendezvous, maybe without it
            if session.rank in membership.membership_epoch.members:
                plan_and_step = tree_under_way(session.world)
                if plan_and_step is not None:
                    plan, session.clock.step = plan_and_step
                    session.enter(session.world, plan)
                    session.exchange.has_diverged = True
                    session.catch_up(membership.heartbeat.detector.furthest - MAX_STATE_LAG_STEPS)
                    return True
        return False

    def _check_members(self) -> None:
        """Interrupt if a rank requests to join, and stop where others have stopped."""
        session = self._session
        if self.membership is not None:
            self.membership.heartbeat.step = session.step
            self.membership.raise_if_join_requested()
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
                if self.membership is None or self._session.source is None:
                    raise
                self._interrupt(doing)
                self._rendezvous()
                if self.membership_epoch.place != begun:
                    return

    # Rendezvous

    def _interrupt(self, doing: MemberPhase) -> None:
        """Stop the plan that runs, unless an interruption did so before, and keep what the
        rendezvous needs."""
        if self._interruption is not None:
            return
        session = self._session
        kept: PlanState = {}
        proposals: Sequence[tuple[str, Any]] = ()
        if session.source is not None:
            in_step = doing is MemberPhase.STEP
            kept = session.source.kept_before if in_step else session.source.kept
            kept = after_member_change(kept)
            session.source.abort()
            proposals = session.agreement.pending
        self._interruption = _Interruption(
            doing=doing,
            place=(session.step, self._collectives_done),
            kept=kept,
            proposals=proposals,
        )

    def _rendezvous_if_interrupted(self) -> None:
        if self._interruption is not None:
            self._rendezvous()

    def _rendezvous(self, repeating: Source | None = None) -> Snapshot | None:
        """Rendezvous, and continue from where the most advanced members are. `repeating` is the
        source that waits for the averages of an interrupted step. Returns the snapshot that was
        loaded, if this rank wasn't one of these."""
        session, interruption = self._session, self._interruption
        assert interruption is not None
        abort = session.abort_flag.poll()
        if abort is not None and not isinstance(abort, StoreLost):
            raise abort
        lost_samples = self._lost_samples()
        loaded: Snapshot | None = None
        while True:
            step, works = interruption.place
            status = MemberStatus(
                step=step,
                works=works,
                doing=interruption.doing,
                joins=self._has_no_state,
                keeps=session.keeps_own,
                stops=session.data_position.stopping,
                plan=str(session.plan),
                version=session.ledger.version,
            )
            with suppress(Interrupted, StoreLost):
                loaded = self._enter_epoch(status, interruption, repeating) or loaded
                break
        self._interruption = None
        samples = 0 if lost_samples is None else self._lost(lost_samples)
        self.changes.note_epoch(self.membership_epoch, session.step, samples)
        return loaded

    def _enter_epoch(
        self, status: MemberStatus, interruption: _Interruption, repeating: Source | None
    ) -> Snapshot | None:
        """Enter the next membership epoch; returns the snapshot that was loaded, if any."""
        session = self._session
        world = self._next_world(status)
        epoch = self.membership_epoch
        self._has_no_state = self._has_no_state or session.rank in epoch.joined
        self._refuse_unknown_place(epoch)
        self._collectives_to_skip = epoch.collectives_to_skip(session.rank)
        self._stops_at = epoch.stops_at
        plan = fitting(parse_plan(epoch.plan), session.everybody.subgroup(epoch.members))
        loaded = session.enter(
            world, plan, lambda: self._transferred(epoch, interruption), repeating
        )
        for name, value in interruption.proposals if not session.closed else ():
            if name in ("sync", "stop"):
                session.agreement.propose(name, value)
        return loaded

    def _next_world(self, status: MemberStatus) -> World:
        """The members of the next epoch, at a store that answers."""
        assert self.membership is not None
        self.changes.notice()
        deadline = monotonic() + self._world.timeout
        while True:
            try:
                if self.membership.heartbeat.store_is_lost:
                    self._reopen_store(self.membership)
                self.membership.rendezvous(status)
                return self._enter()
            except StoreLost:
                if monotonic() > deadline:
                    raise
                self._reopen_store(self.membership)

    def _reopen_store(self, membership: Membership) -> None:
        self._world = self._world.with_new_store()
        for key, value in self._published.items():
            self._world.put(key, value)
        self._session.engine.use_store(self._world.store)
        membership.use_store(self._world.store)

    def _enter(self) -> World:
        epoch = self.membership_epoch
        world = self._world.with_members(epoch)
        self._session.engine.enter_epoch(epoch, world.abort_flag())
        return world

    def _transferred(
        self, epoch: MembershipEpoch, interruption: _Interruption
    ) -> tuple[Snapshot | None, PlanState]:
        """The snapshot of the donor on each recipient, None on other ranks; and the kept state to
        continue with. A joining rank's own tensors are overwritten, which saves memory. A member
        that is behind keeps its own until all of the donor's have arrived: if the donor fails, the
        step is repeated without it."""
        session, recipients, kept = self._session, epoch.recipients, interruption.kept
        if not recipients or session.rank not in (epoch.donor, *recipients):
            return None, kept
        clock = RoundCounter(epoch.place[0])
        clock.shared = -STATE_ROUND_COUNT
        group = session.group.subgroup(sorted((epoch.donor, *recipients)))
        collectives = Collectives(group, session.engine, clock, SEE_OUTPUT_REMEDY)
        found = session.snapshot(equal_state(kept)).broadcast(
            collectives, epoch.donor, overwrites=session.rank in epoch.joined
        )
        if session.rank == epoch.donor:
            return None, kept
        self._has_no_state = False
        interruption.kept = found.kept
        interruption.place = epoch.start if session.keeps_own else epoch.place
        self._collectives_done = interruption.place[1]
        return found, interruption.kept

    def _refuse_unknown_place(self, epoch: MembershipEpoch) -> None:
        session, place = self._session, epoch.place[0]
        behind = session.rank in epoch.recipients
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

    def _lost(self, lost_samples: LostSamples) -> int:
        """The number of samples lost with the ranks that left."""
        session, epoch = self._session, self.membership_epoch
        stayed = {r: s for r, s in epoch.statuses.items() if r not in epoch.joined}
        return lost_samples.lost(
            stayed,
            over=min(status.step for status in stayed.values()),
            begins=session.first_step,
            step=session.step,
            position=session.data_position.position,
        )

    # Calls of the failure detector

    def _triggers_rendezvous(self, rank: int) -> bool:
        """True if the absence of this rank requires a rendezvous. A code can do without some ranks
        for a while."""
        assert self.membership is not None
        return self._session.exchange.needs(rank, self.membership.suspected)
