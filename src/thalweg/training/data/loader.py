"""The data of a run, from one rank's side: its samples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from thalweg.codes import Allocation
from thalweg.errors import UsageError
from thalweg.training.data.sampler import Batches, Share

IsOver = Callable[[int], bool]
"""Whether the step of the n-th batch from here is over, and nobody waits for this rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feed:
    """`loader` are options for torch's DataLoader."""

    data: Dataset[Any]
    batches: Batches
    loader: Mapping[str, Any]
    rank: int

    def under(self, allocation: Allocation | None) -> Feed:
        """The same data, as another plan shares it out."""
        if allocation == self.batches.allocation:
            return self
        return replace(self, batches=replace(self.batches, allocation=allocation))

    def among(self, members: tuple[int, ...], allocation: Allocation | None) -> Feed:
        """The same data, for these ranks."""
        batches = replace(self.batches, members=members, size=len(members), allocation=allocation)
        return self if batches == self.batches else replace(self, batches=batches)

    def load(self, epoch: int, first: int, is_over: IsOver) -> Iterator[tuple[Share, Any]]:
        """This rank's samples of every batch of an epoch, from the `first` on."""
        wanted = (
            share.in_brief() if is_over(number) else share
            for number, share in enumerate(self.batches.shares(epoch, self.rank, first))
        )
        shares, ahead = tee(wanted)
        try:
            loader: DataLoader[Any] = DataLoader(
                self.data,
                batch_sampler=(share.samples for share in ahead),
                generator=self.batches.generator(epoch, first, self.rank),  # not the script's
                **self.loader,
            )
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"loader= doesn't suit a DataLoader: {error}", "leave it out"
            ) from None
        return zip(shares, loader, strict=True)

    @property
    def sampling(self) -> dict[str, int]:
        """What the place in the data depends on."""
        cut = self.batches
        return {"samples": cut.samples, "batch size": cut.batch, "seed": cut.seed}

    def seed_of(self, step: int, share: Share) -> int:
        """The same for all who compute these samples at this step."""
        return self.batches.generator(step, share.samples[0]).initial_seed()


def weighted_mean(losses: torch.Tensor, share: Share) -> torch.Tensor:
    """The plain mean, whose gradient has the share's weights."""
    if losses.shape != share.weights.shape:
        inner = "average over tokens or pixels first, and " if losses.dim() > 1 else ""
        raise UsageError(
            f"run.mean got {list(losses.shape)} losses for {len(share.weights)} samples",
            f'{inner}give it one loss a sample (reduction="none")',
        )
    exact = losses.to(torch.promote_types(losses.dtype, torch.float32))
    weighted = torch.dot(exact, share.weights.to(exact))
    return exact.detach().mean() + (weighted - weighted.detach())
