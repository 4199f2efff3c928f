"""The changes of members that a run records, and the samples that each has cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from time import time

from thalweg.errors import ranks_text
from thalweg.facts import Size, Workload
from thalweg.members.membership import Membership
from thalweg.members.membership_epoch import MembershipEpoch, departure_text
from thalweg.plan import Plan
from thalweg.schedules import Group
from thalweg.steps import compile_step
from thalweg.training.data.position import BatchIndex
from thalweg.training.data.sampler import BatchSampler

log = logging.getLogger("thalweg")
GROUPING_WORKLOAD = Workload.of_size(Size.parse("4KB"))  # groups don't depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Members(Collection[int]):
    """The ranks that train together in one membership epoch, which is 1 at first, and one more
    after every rendezvous."""

    ranks: tuple[int, ...]
    epoch: int

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks


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
        sharers = self.batches.members or range(self.batches.size)
        return sum(
            self._share(rank, position, number - step)
            for rank in sharers
            if rank not in members
            for number in range(self._alone_from(rank, over), begins)
        )

    def _alone_from(self, rank: int, over: int) -> int:
        """The first step after the rank's last averaging with others."""
        if rank in self.group.ranks:
            for step in range(over - 1, self.since - 1, -1):
                rounds = compile_step(self.plan, self.group, GROUPING_WORKLOAD, step).rounds
                if any(rank in r.group.ranks and r.group.size > 1 for r in rounds):
                    return step + 1
        return self.since

    def _share(self, rank: int, position: BatchIndex, batches: int) -> int:
        """The size of this rank's slice of a batch, `batches` batches after that position."""
        number = position.epoch * len(self.batches) + position.batch + batches
        epoch, batch = divmod(number, len(self.batches))
        return len(next(self.batches.slices(epoch, rank, batch)).samples)


class ChangeRecord:
    """Records the changes of members as this rank learns of them, and calls `on_change` with each.
    The failure detector's thread calls `note_absence` and `note_return`."""

    def __init__(self, rank: int, membership: Membership | None) -> None:
        self.on_change: Callable[[MembershipChange], None] = lambda change: None
        self._rank = rank
        self._membership = membership
        self._noticed: float | None = None  # when this rank learnt of the next change
        self._unawaited: set[int] = set()  # absent ranks that no rank waits for

    def notice(self) -> None:
        """Note the time at which this rank first learns of the next change."""
        self._noticed = self._noticed or time()

    def note_epoch(self, epoch: MembershipEpoch, step: int, samples: int) -> None:
        """Record that training resumes in this epoch; `samples` were lost."""
        reasons = [departure_text(rank, why) for rank, why in epoch.left.items()]
        if epoch.joined:
            reasons.append(f"{ranks_text(epoch.joined)} joined")
        reason = "; ".join(reasons) or epoch.cause
        left = tuple(rank for rank in epoch.left if rank not in epoch.joined)
        noticed, self._noticed = self._noticed, None
        self._note(epoch, step, reason, left, epoch.joined, noticed, samples)
        if self._rank == epoch.donor:
            log.warning(
                "%s: membership epoch %d resumes at step %d with %s",
                reason,
                epoch.number,
                step,
                ranks_text(epoch.members),
            )

    def note_absence(self, rank: int, reason: str) -> None:
        """Record a suspected rank."""
        assert self._membership is not None
        if self._membership.triggers_rendezvous(rank):
            self.notice()
            return
        self._unawaited.add(rank)
        text = f"{departure_text(rank, reason)}; no rank waits for it"
        self._note_without_rendezvous(self._membership, text, left=(rank,))

    def note_return(self, rank: int) -> None:
        """Record a recovered rank."""
        assert self._membership is not None
        if rank in self._unawaited:
            self._unawaited.discard(rank)
            text = f"rank {rank} recovered"
            self._note_without_rendezvous(self._membership, text, joined=(rank,))

    def _note_without_rendezvous(
        self,
        membership: Membership,
        reason: str,
        left: tuple[int, ...] = (),
        joined: tuple[int, ...] = (),
    ) -> None:
        epoch, step = membership.membership_epoch, membership.heartbeat.step
        self._note(epoch, step, reason, left, joined)
        if self._rank == epoch.members[0]:
            log.warning("%s, at step %d", reason, step)

    def _note(
        self,
        epoch: MembershipEpoch,
        step: int,
        reason: str,
        left: tuple[int, ...] = (),
        joined: tuple[int, ...] = (),
        noticed: float | None = None,
        samples: int = 0,
    ) -> None:
        now = time()
        change = MembershipChange(
            formation=epoch.number,
            step=step,
            left=left,
            joined=joined,
            reason=reason,
            noticed=noticed or now,
            over=now,
            samples=samples,
        )
        self.on_change(change)
