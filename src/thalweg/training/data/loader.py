"""The data of a run on one rank: its samples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from thalweg.codes import Allocation
from thalweg.errors import UsageError
from thalweg.training.data.sampler import BatchSampler, BatchSlice

IsOver = Callable[[int], bool]
"""True if the step of the n-th batch from here is over, and no rank waits for this rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankLoader:
    """Loads the batches of one rank. `loader` are options for torch's DataLoader."""

    data: Dataset[Any]
    sampler: BatchSampler
    loader: Mapping[str, Any]
    rank: int

    def with_members(self, members: tuple[int, ...], allocation: Allocation | None) -> RankLoader:
        """A loader for the same data among these ranks."""
        sampler = replace(self.sampler, members=members, size=len(members), allocation=allocation)
        return self if sampler == self.sampler else replace(self, sampler=sampler)

    def load(self, epoch: int, first: int, is_over: IsOver) -> Iterator[tuple[BatchSlice, Any]]:
        """The samples of this rank in every batch of an epoch, from the `first` on."""
        wanted = (
            batch_slice.in_brief() if is_over(number) else batch_slice
            for number, batch_slice in enumerate(self.sampler.slices(epoch, self.rank, first))
        )
        batch_slices, ahead = tee(wanted)
        try:
            loader: DataLoader[Any] = DataLoader(
                self.data,
                batch_sampler=(batch_slice.samples for batch_slice in ahead),
                generator=self.sampler.generator(
                    epoch, first, self.rank
                ),  # not the script's generator
                **self.loader,
            )
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"loader= doesn't suit a DataLoader: {error}", "leave it out"
            ) from None
        return zip(batch_slices, loader, strict=True)

    def seed_of(self, step: int, batch_slice: BatchSlice) -> int:
        """A seed that is equal on all ranks that compute these samples at this step."""
        return self.sampler.generator(step, batch_slice.samples[0]).initial_seed()


def weighted_mean(losses: torch.Tensor, batch_slice: BatchSlice) -> torch.Tensor:
    """The plain mean, with the gradient of the slice's weighted sum."""
    if losses.shape != batch_slice.weights.shape:
        inner = "average over tokens or pixels first, and " if losses.dim() > 1 else ""
        raise UsageError(
            f"run.mean got {list(losses.shape)} losses for {len(batch_slice.weights)} samples",
            f'{inner}give it one loss per sample (reduction="none")',
        )
    exact = losses.to(torch.promote_types(losses.dtype, torch.float32))
    weighted = torch.dot(exact, batch_slice.weights.to(exact))
    return exact.detach().mean() + (weighted - weighted.detach())
