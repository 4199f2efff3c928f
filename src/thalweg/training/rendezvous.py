"""A run goes on when its members change: how they meet, and whose state those take who need one.

What a formation begins with is where the furthest of its members are. Those who are behind, since
they lack a step's result that others have, take over the state of one of the furthest, and so do
those who join. The step that was broken off is redone by all of them from its beginning, on the
same samples, shared out anew: none is lost, and none is applied twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from time import monotonic, time

import torch

from thalweg.engine.engine import Engine
from thalweg.errors import StoreLost, ranks_text
from thalweg.members.membership import Membership
from thalweg.members.membership_epoch import MembershipEpoch, MemberStatus, departure_text
from thalweg.members.world import World
from thalweg.schedules import Group
from thalweg.training.compiled_steps import RoundCounter
from thalweg.training.membership_change import MembershipChange
from thalweg.training.sharing import BROADCAST_CHUNK_BYTES, Collectives
from thalweg.training.snapshot import Snapshot
from thalweg.training.state_encoding import places_for

STATE_ROUND_COUNT = 1 << 16  # round numbers for states, below all that are shared between steps
INCIDENT_HISTORY_COUNT = 10_000  # incidents
log = logging.getLogger("thalweg")


class EpochTransition:
    """One rank's. `published` is what those find in the store who are started again."""

    def __init__(
        self, world: World, membership: Membership, engine: Engine, published: Mapping[str, str]
    ) -> None:
        self.changes: list[MembershipChange] = []
        self.membership = membership
        self._world = world
        self._engine = engine
        self._published = dict(published)
        self._noticed: float | None = None
        self._unawaited: set[int] = set()  # nobody waits for these
        self.on_change: Callable[[MembershipChange], None] = lambda change: None
        membership.on_suspected = self._note_absence
        membership.on_recovered = self._note_return

    @property
    def membership_epoch(self) -> MembershipEpoch:
        return self.membership.membership_epoch

    def find_epoch(self) -> World:
        """The members that train now, for one that was started again: it may be one of them."""
        membership_epoch = self.membership.find()
        if self._world.rank in membership_epoch.members and membership_epoch.number > 1:
            return self._enter()
        return self._world

    def rendezvous(self, status: MemberStatus) -> World:
        """The members that go on, at a store that answers."""
        self._noticed = self._noticed or time()
        deadline = monotonic() + self._world.timeout
        while True:
            try:
                if self.membership.store_is_lost:
                    self._reopen()
                self.membership.rendezvous(status)
                return self._enter()
            except StoreLost:
                if monotonic() > deadline:
                    raise
                self._reopen()

    def _reopen(self) -> None:
        self._world = self._world.with_new_store()
        for key, value in self._published.items():
            self._world.put(key, value)
        self._engine.use_store(self._world.store)
        self.membership.use_store(self._world.store)

    def _enter(self) -> World:
        world = self._world.with_members(self.membership_epoch)
        self._engine.enter_epoch(self.membership_epoch, world.abort_flag())
        return world

    def transfer_snapshot(
        self, group: Group, takers: tuple[int, ...], snapshot: Callable[[], Snapshot]
    ) -> Snapshot | None:
        """The state of the formation's source, on each of the takers; None on others. Who joins has
        its own written over, which saves memory. A member that is behind keeps it until all of the
        source's has come: should that be lost on the way, the step is redone without it."""
        source = self.membership_epoch.donor
        rank = self._world.rank
        if not takers or rank not in (source, *takers):
            return None
        clock = RoundCounter(self.membership_epoch.place[0])
        clock.shared = -STATE_ROUND_COUNT
        collectives = Collectives(
            group.subgroup(sorted((source, *takers))),
            self._engine,
            clock,
            "look at what it printed",
        )
        head, tensors = snapshot().in_parts()
        length = torch.tensor([len(head)])
        collectives.broadcast(source, [length])
        if rank != source:
            head = bytes(int(length))
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        collectives.broadcast(source, [text])
        head = text.numpy().tobytes()
        if rank != source:
            own = tensors if rank in self.membership_epoch.joined else {}
            tensors = places_for(json.loads(head)["tensors"], own)
        raw = (tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel())
        pieces = (piece for one in raw for piece in torch.split(one, BROADCAST_CHUNK_BYTES.nbytes))
        collectives.broadcast(source, pieces)
        return None if rank == source else Snapshot.of_parts(head, tensors)

    def note(self, step: int, samples: int) -> None:
        """That training goes on, without what so many samples had taught."""
        membership_epoch, now = self.membership_epoch, time()
        reasons = [departure_text(rank, why) for rank, why in membership_epoch.left.items()]
        if membership_epoch.joined:
            reasons.append(f"{ranks_text(membership_epoch.joined)} joined")
        change = MembershipChange(
            formation=membership_epoch.number,
            step=step,
            left=tuple(r for r in membership_epoch.left if r not in membership_epoch.joined),
            joined=membership_epoch.joined,
            reason="; ".join(reasons) or membership_epoch.cause,
            noticed=now if self._noticed is None else self._noticed,
            over=now,
            samples=samples,
        )
        self._noticed = None
        self._add(change)
        if self._world.rank == membership_epoch.donor:
            log.warning(
                "%s: membership epoch %d resumes at step %d with %s",
                change.reason,
                membership_epoch.number,
                step,
                ranks_text(membership_epoch.members),
            )

    def _note_absence(self, rank: int, reason: str) -> None:
        """In the heartbeat's thread."""
        now = time()
        if self.membership.triggers_rendezvous(rank):
            self._noticed = self._noticed or now
            return
        self._unawaited.add(rank)
        self._note_without(
            left=(rank,), reason=f"{departure_text(rank, reason)}; no rank waits for it"
        )

    def _note_return(self, rank: int) -> None:
        """In the heartbeat's thread."""
        if rank not in self._unawaited:
            return
        self._unawaited.discard(rank)
        self._note_without(joined=(rank,), reason=f"rank {rank} recovered")

    def _note_without(
        self, *, left: tuple[int, ...] = (), joined: tuple[int, ...] = (), reason: str
    ) -> None:
        """Something for which members needn't meet."""
        now = time()
        self._add(
            MembershipChange(
                formation=self.membership_epoch.number,
                step=self.membership.step,
                left=left,
                joined=joined,
                reason=reason,
                noticed=now,
                over=now,
            )
        )
        if self._world.rank == self.membership_epoch.members[0]:
            log.warning("%s, at step %d", reason, self.membership.step)

    def _add(self, change: MembershipChange) -> None:
        self.changes.append(change)
        self.on_change(change)
        del self.changes[:-INCIDENT_HISTORY_COUNT]
