"""The samples of each rank in each batch, and their weights.

Every epoch has its own order of the samples, drawn from seed and epoch alone: all ranks know it
without communication, and a resumed run continues in it. A batch is split into near-equal slices,
one per rank. The aggregate of a plan must be the mean over the global batch of B samples: plans
that average N ranks need the weight N/B on each sample, whatever the size of the slice; coded plans
sum cells of the batch, of which each worker has some with weights of their own, and need that
weight over B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thalweg.codes import Allocation
from thalweg.errors import UsageError
from thalweg.schedules.chunks import split

SEED_PRIME = 1_000_003  # makes (seed, epoch) pairs distinct
TORCH_SEED_COUNT = 2**63
MIN_VARIANCE_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """The samples of one rank in one batch, and their weights."""

    samples: list[int]
    weights: torch.Tensor  # one per sample, float64
    counts: bool = True  # in the sum; else no rank waits for it

    def in_brief(self) -> BatchSlice:
        """A slice with as few samples as a model can compute, batch norm included."""
        return BatchSlice(
            self.samples[:MIN_VARIANCE_SAMPLES], self.weights[:MIN_VARIANCE_SAMPLES], counts=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampler:
    """Global batches of `batch` samples. A rest that is too small for all ranks joins the last
    batch."""

    samples: int
    batch: int
    size: int
    seed: int
    allocation: Allocation | None = None  # under a code
    members: tuple[int, ...] | None = None  # the `size` ranks; 0, 1, ... if None

    def __post_init__(self) -> None:
        if self.batch < self.size:
            raise UsageError(
                f"a batch of {self.batch} has no sample for each of {self.size} workers",
                f"give batch={self.size} or more: it is the global batch, over all workers",
            )
        if self.samples < self.batch:
            raise UsageError(
                f"the data has {self.samples} samples, and a batch {self.batch}",
                "give a smaller batch",
            )
        if self.allocation is not None:
            self.allocation.refuse_batch(self.batch)

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch)
        fits = self.allocation is None or self.allocation.suffices(rest)
        return whole + (rest >= self.size and fits)  # whether the rest suffices for all ranks

    @property
    def why_weighed(self) -> str:
        """The reason why the mean over a batch isn't the mean of the ranks' means; empty if it
        is."""
        if self.allocation is not None:
            return "the plan gives samples different weights"
        last = self.samples - (len(self) - 1) * self.batch
        uneven = [str(n) for n in dict.fromkeys((self.batch, last)) if n % self.size]
        samples = " or ".join(uneven)  # the second in the last batch of an epoch
        return f"{samples} samples don't divide evenly by {self.size} workers" if uneven else ""

    def slices(self, epoch: int, rank: int, first: int = 0) -> Iterator[BatchSlice]:
        """The slices of one rank in the epoch's batches, from the `first` on."""
        order = torch.randperm(self.samples, generator=self.generator(epoch))
        for index in range(first, len(self)):
            last = index == len(self) - 1
            stop = self.samples if last else (index + 1) * self.batch
            yield self._slice(order[index * self.batch : stop], rank)

    def generator(self, *places: int) -> torch.Generator:
        """A random generator of its own for each epoch, or other key."""
        seed = self.seed
        for place in places:
            seed = (seed * SEED_PRIME + place) % TORCH_SEED_COUNT
        return torch.Generator().manual_seed(seed)

    def _slice(self, batch: torch.Tensor, rank: int) -> BatchSlice:
        if self.allocation is None:
            place = rank if self.members is None else self.members.index(rank)
            own = torch.split(batch, split(len(batch), self.size))[place].tolist()
            weight = self.size / len(batch)
            return BatchSlice(own, torch.full((len(own),), weight, dtype=torch.float64))
        taken = self.allocation.samples(rank, len(batch))
        if not taken:  # a root beside the workers has to run the model, too
            return BatchSlice(
                batch.tolist(), torch.zeros(len(batch), dtype=torch.float64)
            ).in_brief()
        return BatchSlice(
            torch.cat([batch[start:stop] for start, stop, _ in taken]).tolist(),
            torch.tensor(
                [weight / len(batch) for start, stop, weight in taken for _ in range(start, stop)],
                dtype=torch.float64,
            ),
        )
