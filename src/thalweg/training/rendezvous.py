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
from thalweg.members.membership_epoch import Formation, Standing
from thalweg.members.world import World
from thalweg.schedules import Group
from thalweg.training.compiled_steps import Clock
from thalweg.training.membership_change import Incident
from thalweg.training.sharing import AT_ONCE, Sharing
from thalweg.training.snapshot import State
from thalweg.training.state_encoding import places_for

EARLIER = 1 << 16  # round numbers for states, below all that are shared between steps
KEPT = 10_000  # incidents
log = logging.getLogger("thalweg")


class Survival:
    """One rank's. `published` is what those find in the store who are started again."""

    def __init__(
        self, world: World, membership: Membership, engine: Engine, published: Mapping[str, str]
    ) -> None:
        self.incidents: list[Incident] = []
        self.membership = membership
        self._world = world
        self._engine = engine
        self._published = dict(published)
        self._noticed: float | None = None
        self._missed: set[int] = set()  # nobody waits for these
        self.on_incident: Callable[[Incident], None] = lambda incident: None
        membership.on_absence = self._note_absence
        membership.on_return = self._note_return

    @property
    def formation(self) -> Formation:
        return self.membership.formation

    def find(self) -> World:
        """The members that train now, for one that was started again: it may be one of them."""
        formation = self.membership.find()
        if self._world.rank in formation.members and formation.number > 1:
            return self._enter()
        return self._world

    def meet(self, standing: Standing) -> World:
        """The members that go on, at a store that answers."""
        self._noticed = self._noticed or time()
        deadline = monotonic() + self._world.timeout
        while True:
            try:
                if self.membership.is_stranded:
                    self._reopen()
                self.membership.muster(standing)
                return self._enter()
            except StoreLost:
                if monotonic() > deadline:
                    raise
                self._reopen()

    def _reopen(self) -> None:
        self._world = self._world.reopened()
        for key, value in self._published.items():
            self._world.put(key, value)
        self._engine.meet_at(self._world.store)
        self.membership.meet_at(self._world.store)

    def _enter(self) -> World:
        world = self._world.formed(self.formation)
        self._engine.enter(self.formation, world.alarm())
        return world

    def hand_over(
        self, group: Group, takers: tuple[int, ...], snapshot: Callable[[], State]
    ) -> State | None:
        """The state of the formation's source, on each of the takers; None on others. Who joins has
        its own written over, which saves memory. A member that is behind keeps it until all of the
        source's has come: should that be lost on the way, the step is redone without it."""
        source = self.formation.source
        rank = self._world.rank
        if not takers or rank not in (source, *takers):
            return None
        clock = Clock(self.formation.place[0])
        clock.shared = -EARLIER
        sharing = Sharing(
            group.subgroup(sorted((source, *takers))),
            self._engine,
            clock,
            "look at what it printed",
        )
        head, tensors = snapshot().in_parts()
        length = torch.tensor([len(head)])
        sharing.take_from(source, [length])
        if rank != source:
            head = bytes(int(length))
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        sharing.take_from(source, [text])
        head = text.numpy().tobytes()
        if rank != source:
            own = tensors if rank in self.formation.joined else {}
            tensors = places_for(json.loads(head)["tensors"], own)
        raw = (tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel())
        pieces = (piece for one in raw for piece in torch.split(one, AT_ONCE.nbytes))
        sharing.take_from(source, pieces)
        return None if rank == source else State.of_parts(head, tensors)

    def note(self, step: int, samples: int) -> None:
        """That training goes on, without what so many samples had taught."""
        formation, now = self.formation, time()
        reasons = [f"rank {rank} is {why}" for rank, why in formation.left.items()]
        if formation.joined:
            reasons.append(f"{ranks_text(formation.joined)} came in")
        incident = Incident(
            formation=formation.number,
            step=step,
            left=tuple(r for r in formation.left if r not in formation.joined),
            joined=formation.joined,
            reason="; ".join(reasons) or formation.cause,
            noticed=now if self._noticed is None else self._noticed,
            over=now,
            samples=samples,
        )
        self._noticed = None
        self._add(incident)
        if self._world.rank == formation.source:
            log.warning(
                "%s: formation %d goes on at step %d with %s",
                incident.reason,
                formation.number,
                step,
                ranks_text(formation.members),
            )

    def _note_absence(self, rank: int, reason: str) -> None:
        """In the heartbeat's thread."""
        now = time()
        if self.membership.calls_for(rank):
            self._noticed = self._noticed or now
            return
        self._missed.add(rank)
        self._note_without(left=(rank,), reason=f"rank {rank} is {reason}; nobody waits for it")

    def _note_return(self, rank: int) -> None:
        """In the heartbeat's thread."""
        if rank not in self._missed:
            return
        self._missed.discard(rank)
        self._note_without(joined=(rank,), reason=f"rank {rank} is back")

    def _note_without(
        self, *, left: tuple[int, ...] = (), joined: tuple[int, ...] = (), reason: str
    ) -> None:
        """Something for which members needn't meet."""
        now = time()
        self._add(
            Incident(
                formation=self.formation.number,
                step=self.membership.step,
                left=left,
                joined=joined,
                reason=reason,
                noticed=now,
                over=now,
            )
        )
        if self._world.rank == self.formation.members[0]:
            log.warning("%s, at step %d", reason, self.membership.step)

    def _add(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self.on_incident(incident)
        del self.incidents[:-KEPT]
