"""Where a rank is in the data: epoch by epoch, batch by batch, and what the last step has used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from thalweg.errors import RunError, UsageError
from thalweg.training.data.loader import IsOver, RankLoader, weighted_mean
from thalweg.training.data.sampler import BatchSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchIndex:
    """The next batch to take."""

    epoch: int = 0
    batch: int = 0


class DataPosition:
    """`feed` is None if the script has a loader of its own: then only epochs are known."""

    def __init__(self, loader: RankLoader | None) -> None:
        self.rank_loader = loader
        self.batch_slice: BatchSlice | None = None  # of the batch that is being computed
        self.position = BatchIndex()  # what the last step of the optimizer has used
        self.stopping = False
        self._reached = BatchIndex()  # what the samples taken so far lead to
        self._steps_in_epoch = 0
        self._asked = True  # run.mean had the losses of this batch,
        self.weighed = True  # ... and a backward came through it,
        self._weighs = False  # ... and so does the one that is under way
        self.computed = True  # there was a backward on this batch
        self._skipped = False  # a batch before it had none
        self._used = False  # a step was taken with this batch
        self._epoch: int | None = None  # that the script is in
        self._again: Callable[[], None] | None = None

    @property
    def counts(self) -> bool:
        """Whether what is computed now belongs to the step, or is only gone through."""
        return self.batch_slice is None or self.batch_slice.counts

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Weighed by this rank's share of the batch, where there is something to learn from it."""
        if self.batch_slice is None or not torch.is_grad_enabled():
            return losses.mean()
        self._asked = True
        mean = weighted_mean(losses, self.batch_slice)
        if mean.requires_grad:
            mean.register_hook(self._note_weighed)  # type: ignore[no-untyped-call]
        return mean

    def _note_weighed(self, _: torch.Tensor) -> None:
        self.weighed = self._weighs = True

    def refuse_unweighed(self, *, through: bool = False) -> None:
        """A loss that isn't run.mean's, whose gradient would be another than the batch's: before
        anything is sent if run.mean wasn't called, and once backward is `through` if what it
        returned was only logged."""
        seen = self._weighs if through else self._asked
        self._weighs = self._weighs and not through
        if self.rank_loader is None or self.batch_slice is None or seen:
            return
        if why := self.rank_loader.sampler.why_weighed:
            raise RunError(
                "backward was called on a loss that run.mean hasn't weighed, and the gradient "
                f"would be wrong: {why}",
                "give run.mean one loss a sample, and call backward on what it returns",
            )

    def start_checks(self) -> None:
        """From this batch on, whether each is computed and used once."""
        self._skipped, self.computed = False, True

    def refuse_second_step(self) -> None:
        """Where others tell by the step which batch it is of."""
        if self._used:
            raise RunError(
                "the optimizer steps twice on one batch, which late workers can't go along with "
                "under this plan",
                "step once a batch, or use another plan",
            )

    def refuse_skipped_batch(self) -> None:
        """For the same reason: the others' part of this step is of another batch."""
        if self._skipped:
            raise RunError(
                "a batch was left out here, and the others don't know it: under this plan the step "
                "says which batch it is of",
                "call backward on every batch, or use another plan",
            )

    @property
    def resume_at(self) -> BatchIndex:
        """Where a resumed run begins. The place in one's own loader isn't known: an epoch in which
        steps were taken counts as done."""
        if self.rank_loader is None and self._steps_in_epoch:
            return BatchIndex(epoch=self.position.epoch + 1)
        return self.position

    def epochs(self, number: int) -> Iterator[int]:
        while self._reached.epoch < number and not self.stopping:
            epoch = self._epoch = self._reached.epoch
            self._steps_in_epoch = 0
            yield epoch
            self.batch_slice = None
            self.leave_epoch()
            left_early = self._reached.epoch == epoch  # its batches weren't asked for, or not all
            if left_early and not self.stopping:
                self._reached = self.position = BatchIndex(epoch=epoch + 1)

    def batches(
        self, epoch: int, safe_point: Callable[[], None], over: Callable[[], IsOver]
    ) -> Iterator[Any]:
        """`safe_point` is called before each batch, and may change the feed, the position and
        whether to stop; `over` tells then which of the batches to come are only gone through."""
        if self.rank_loader is None:
            raise UsageError("run.batches needs the data", "give data= and batch= to attach()")
        if self._again is not None and epoch < self._reached.epoch:
            return
        self.leave_epoch()
        self._epoch = epoch
        if epoch != self._reached.epoch:
            self._reached = BatchIndex(epoch=epoch)
        source: RankLoader | None = None
        loaded: Iterator[tuple[BatchSlice, Any]] = iter(())
        expected = self._reached
        while self._reached.epoch == epoch and self._reached.batch < len(self.rank_loader.sampler):
            safe_point()
            if self.stopping or self._reached.epoch != epoch:
                break
            if source is not self.rank_loader or self._reached != expected:  # a new plan, or a jump
                source, loaded = (
                    self.rank_loader,
                    self.rank_loader.load(epoch, self._reached.batch, over()),
                )
            self.batch_slice, batch = next(loaded)
            self._reached = expected = BatchIndex(epoch=epoch, batch=self._reached.batch + 1)
            self._used = self._asked = self.weighed = False
            self._skipped, self.computed = self._skipped or not self.computed, False
            yield batch
        else:
            if self._reached.epoch == epoch:
                self._reached = self.position = BatchIndex(epoch=epoch + 1)
        self.batch_slice = None

    def stepped(self) -> None:
        """The optimizer has used all samples that were taken."""
        self._steps_in_epoch += 1
        self._used = True
        self.position = self._reached

    def jump(self, position: BatchIndex, again: Callable[[], None] | None = None) -> None:
        """Go on from there. If that is in another epoch than the script's, `again` is called when
        that is over, since scripts change things at the end of an epoch."""
        self._again = again if self._epoch != position.epoch else None
        self._reached = self.position = position
        self.start_checks()

    def skip(self, batches: int) -> None:
        """So many batches were used by others, or are left out."""
        assert self.rank_loader is not None
        epoch, batch = self.position.epoch, self.position.batch + batches
        while batch > len(self.rank_loader.sampler):
            epoch, batch = epoch + 1, batch - len(self.rank_loader.sampler)
        self.jump(BatchIndex(epoch=epoch, batch=batch), self._again)

    def leave_epoch(self) -> None:
        """The script is through with one."""
        again, self._again = self._again, None
        self._epoch = None
        if again is not None:
            again()
