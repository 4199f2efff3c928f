"""The position of a rank in the data: epoch and batch, and the samples that the last step has
used."""

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
    """The index of the next batch to load."""

    epoch: int = 0
    batch: int = 0


class DataPosition:
    """The position of one rank. `loader` is None if the script has its own: then only epochs are
    known."""

    def __init__(self, loader: RankLoader | None) -> None:
        self.rank_loader = loader
        self.batch_slice: BatchSlice | None = None  # of the current batch
        self.position = BatchIndex()  # after the last step of the optimizer
        self.stopping = False
        self._reached = BatchIndex()  # after the samples loaded so far
        self._steps_in_epoch = 0
        self._mean_called = True  # run.mean was called for this batch,
        self.weighed = True  # ... and a backward passed through its result,
        self._weighs = False  # ... and so does the current backward
        self.computed = True  # this batch had a backward
        self._skipped = False  # an earlier batch had none
        self._used = False  # this batch had a step
        self._epoch: int | None = None  # the script's current epoch
        self._again: Callable[[], None] | None = None

    @property
    def counts(self) -> bool:
        """True if the current batch belongs to the step; False if its step is over."""
        return self.batch_slice is None or self.batch_slice.counts

    @property
    def is_elsewhere(self) -> bool:
        """True if the position is in another epoch than the script, which ends its own first."""
        in_epoch = self.rank_loader is not None and self._epoch is not None
        return in_epoch and self._epoch != self._reached.epoch

    @property
    def in_epoch(self) -> bool:
        """True while the script is in an epoch of `epochs` or `batches`."""
        return self._epoch is not None

    @property
    def sampling(self) -> dict[str, int]:
        """The settings that the position depends on; none with the script's own loader."""
        if self.rank_loader is None:
            return {}
        sampler = self.rank_loader.sampler
        return {"samples": sampler.samples, "batch size": sampler.batch, "seed": sampler.seed}

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean loss, weighted by this rank's slice of the batch if gradients are computed."""
        if self.batch_slice is None or not torch.is_grad_enabled():
            return losses.mean()
        self._mean_called = True
        mean = weighted_mean(losses, self.batch_slice)
        if mean.requires_grad:
            mean.register_hook(self._note_weighed)  # type: ignore[no-untyped-call]
        return mean

    def _note_weighed(self, _: torch.Tensor) -> None:
        self.weighed = self._weighs = True

    def start_backward(self) -> None:
        """The first gradient of a backward is ready, and nothing was sent yet."""
        self.computed = True
        self.refuse_unweighed()

    def refuse_unweighed(self, *, through: bool = False) -> None:
        """Refuse a loss that isn't run.mean's, whose gradient would differ from the batch's: before
        anything is sent if run.mean wasn't called, and once backward is `through` if its result was
        only logged."""
        seen = self._weighs if through else self._mean_called
        self._weighs = self._weighs and not through
        if self.rank_loader is None or self.batch_slice is None or seen:
            return
        if why := self.rank_loader.sampler.why_weighed:
            raise RunError(
                "backward was called on a loss that run.mean hasn't weighed, so the gradient "
                f"would be wrong: {why}",
                "give run.mean one loss per sample, and call backward on its result",
            )

    def start_checks(self) -> None:
        """Check from this batch on that each is computed and used once."""
        self._skipped, self.computed = False, True

    def refuse_other_batch(self) -> None:
        """Refuse a step of another batch than the other ranks', under plans where the step number
        identifies the batch: after a second step on one batch, or a batch that was skipped."""
        if self._used:
            raise RunError(
                "the optimizer steps twice on one batch, which stragglers can't follow under this "
                "plan",
                "step once per batch, or use another plan",
            )
        if self._skipped:
            raise RunError(
                "a batch had no backward on this rank, and under this plan the step number "
                "identifies the batch",
                "call backward on every batch, with something to train, or use another plan",
            )

    @property
    def resume_at(self) -> BatchIndex:
        """The position at which a resumed run begins. A script's own loader has no known position:
        an epoch in which steps were taken counts as done."""
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
            left_early = self._reached.epoch == epoch  # not all of its batches were loaded
            if left_early and not self.stopping:
                self._reached = self.position = BatchIndex(epoch=epoch + 1)

    def batches(
        self, epoch: int, safe_point: Callable[[], None], over: Callable[[], IsOver]
    ) -> Iterator[Any]:
        """Yield this rank's batches. `safe_point` is called before each, and may change the loader,
        the position and `stopping`; `over` then tells which of the coming batches belong to steps
        that are over."""
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
            if self._reached.batch >= len(self.rank_loader.sampler):
                continue  # the safe point has skipped the rest of the epoch
            if (
                source is not self.rank_loader or self._reached != expected
            ):  # a new plan or position
                source, loaded = (
                    self.rank_loader,
                    self.rank_loader.load(epoch, self._reached.batch, over()),
                )
            self.batch_slice, batch = next(loaded)
            self._reached = expected = BatchIndex(epoch=epoch, batch=self._reached.batch + 1)
            self._used = self._mean_called = self.weighed = False
            self._skipped, self.computed = self._skipped or not self.computed, False
            yield batch
        else:
            if self._reached.epoch == epoch:
                self._reached = self.position = BatchIndex(epoch=epoch + 1)
        self.batch_slice = None

    def stepped(self) -> None:
        """The optimizer has used all samples that were loaded."""
        self._steps_in_epoch += 1
        self._used = True
        self.position = self._reached

    def jump(self, position: BatchIndex, again: Callable[[], None] | None = None) -> None:
        """Continue from this position. If the script is in another epoch, `again` is called at the
        end of that, since scripts change settings there."""
        self._again = again if self._epoch != position.epoch else None
        self._reached = self.position = position
        self.start_checks()

    def skip(self, batches: int) -> None:
        """Skip batches, which other ranks have used or which are dropped."""
        assert self.rank_loader is not None
        epoch, batch = self.position.epoch, self.position.batch + batches
        while batch > len(self.rank_loader.sampler):
            epoch, batch = epoch + 1, batch - len(self.rank_loader.sampler)
        self.jump(BatchIndex(epoch=epoch, batch=batch), self._again)

    def leave_epoch(self) -> None:
        """The script has finished an epoch."""
        again, self._again = self._again, None
        self._epoch = None
        if again is not None:
            again()
