"""How a run continues when its members change: rendezvous, and transfer of one member's state.

A membership epoch begins where its most advanced members are. Members that are behind, because they
lack a step's result, load the state of one of the most advanced, and so do ranks that join. All
members repeat the interrupted step from its beginning on the same samples, distributed over the new
members: no sample is lost, and none is applied twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, time

import torch

from thalweg.engine.collectives import (
    BROADCAST_CHUNK_BYTES,
    SEE_OUTPUT_REMEDY,
    Collectives,
    RoundCounter,
)
from thalweg.engine.engine import Engine
from thalweg.errors import StoreLost, ranks_text
from thalweg.members.membership import Membership
from thalweg.members.membership_epoch import MembershipEpoch, MemberStatus, departure_text
from thalweg.members.world import World
from thalweg.schedules import Group
from thalweg.training.snapshot import Snapshot
from thalweg.training.state_encoding import places_for

STATE_ROUND_COUNT = 1 << 16  # round numbers of snapshots, below those of other collectives
INCIDENT_HISTORY_COUNT = 10_000
log = logging.getLogger("thalweg")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """One change of a run's members: `left` are ranks that were found dead, silent or hung,
    `joined` are new or returning ranks. Times are those of `time.time()`."""

    formation: int
    step: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    reason: str
    noticed: float  # when this rank learnt of the change
    over: float  # when its training could continue
    samples: int = 0
    """The samples lost with the ranks that left, where replicas differ: their slices of the steps
    since they last averaged with others. 0 if the script has its own loader."""


class EpochTransition:
    """The transitions of one rank from epoch to epoch. Restarted ranks find `published` in the
    store."""

    def __init__(
        self, world: World, membership: Membership, engine: Engine, published: Mapping[str, str]
    ) -> None:
        self.changes: list[MembershipChange] = []
        self.membership = membership
        self._world = world
        self._engine = engine
        self._published = dict(published)
        self._noticed: float | None = None
        self._unawaited: set[int] = set()  # absent ranks that no rank waits for
        self.on_change: Callable[[MembershipChange], None] = lambda change: None
        membership.on_suspected = self._note_absence
        membership.on_recovered = self._note_return

    @property
    def membership_epoch(self) -> MembershipEpoch:
        return self.membership.membership_epoch

    def find_epoch(self) -> World:
        """The members that train now, for a restarted rank, which may be one of them."""
        epoch = self.membership.find()
        if self._world.rank in epoch.members and epoch.number > 1:
            return self._enter()
        return self._world

    def rendezvous(self, status: MemberStatus) -> World:
        """The members of the next epoch, at a store that answers."""
        self._noticed = self._noticed or time()
        deadline = monotonic() + self._world.timeout
        while True:
            try:
                if self.membership.heartbeat.store_is_lost:
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
        self, group: Group, recipients: tuple[int, ...], snapshot: Callable[[], Snapshot]
    ) -> Snapshot | None:
        """The donor's snapshot on each of the recipients; None on other ranks. A joining rank's own
        tensors are overwritten, which saves memory. A member that is behind keeps its own until all
        of the donor's have arrived: if the donor fails, the step is repeated without it."""
        donor = self.membership_epoch.donor
        rank = self._world.rank
        if not recipients or rank not in (donor, *recipients):
            return None
        clock = RoundCounter(self.membership_epoch.place[0])
        clock.shared = -STATE_ROUND_COUNT
        collectives = Collectives(
            group.subgroup(sorted((donor, *recipients))),
            self._engine,
            clock,
            SEE_OUTPUT_REMEDY,
        )
        head, tensors = snapshot().in_parts()
        length = torch.tensor([len(head)])
        collectives.broadcast(donor, [length])
        if rank != donor:
            head = bytes(int(length))
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        collectives.broadcast(donor, [text])
        head = text.numpy().tobytes()
        if rank != donor:
            own = tensors if rank in self.membership_epoch.joined else {}
            tensors = places_for(json.loads(head)["tensors"], own)
        raw = (tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel())
        chunks = (chunk for one in raw for chunk in torch.split(one, BROADCAST_CHUNK_BYTES.nbytes))
        collectives.broadcast(donor, chunks)
        return None if rank == donor else Snapshot.of_parts(head, tensors)

    def note(self, step: int, samples: int) -> None:
        """Record that training resumes at `step`; `samples` were lost."""
        epoch, now = self.membership_epoch, time()
        reasons = [departure_text(rank, why) for rank, why in epoch.left.items()]
        if epoch.joined:
            reasons.append(f"{ranks_text(epoch.joined)} joined")
        change = MembershipChange(
            formation=epoch.number,
            step=step,
            left=tuple(rank for rank in epoch.left if rank not in epoch.joined),
            joined=epoch.joined,
            reason="; ".join(reasons) or epoch.cause,
            noticed=now if self._noticed is None else self._noticed,
            over=now,
            samples=samples,
        )
        self._noticed = None
        self._add(change)
        if self._world.rank == epoch.donor:
            members = ranks_text(epoch.members)
            text = "%s: membership epoch %d resumes at step %d with %s"
            log.warning(text, change.reason, epoch.number, step, members)

    def _note_absence(self, rank: int, reason: str) -> None:
        """Record a suspected rank. The failure detector's thread calls this."""
        now = time()
        if self.membership.triggers_rendezvous(rank):
            self._noticed = self._noticed or now
            return
        self._unawaited.add(rank)
        self._note_without(
            left=(rank,), reason=f"{departure_text(rank, reason)}; no rank waits for it"
        )

    def _note_return(self, rank: int) -> None:
        """Record a recovered rank. The failure detector's thread calls this."""
        if rank not in self._unawaited:
            return
        self._unawaited.discard(rank)
        self._note_without(joined=(rank,), reason=f"rank {rank} recovered")

    def _note_without(
        self, *, left: tuple[int, ...] = (), joined: tuple[int, ...] = (), reason: str
    ) -> None:
        """Record a change that needs no rendezvous."""
        now = time()
        self._add(
            MembershipChange(
                formation=self.membership_epoch.number,
                step=self.membership.heartbeat.step,
                left=left,
                joined=joined,
                reason=reason,
                noticed=now,
                over=now,
            )
        )
        if self._world.rank == self.membership_epoch.members[0]:
            log.warning("%s, at step %d", reason, self.membership.heartbeat.step)

    def _add(self, change: MembershipChange) -> None:
        self.changes.append(change)
        self.on_change(change)
        del self.changes[:-INCIDENT_HISTORY_COUNT]
