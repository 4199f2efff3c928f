"""Which samples a rank takes of each batch, and with what weight.

Every epoch has its own order of the samples, drawn from seed and epoch alone: all ranks know it
without asking, and a resumed run goes on in it. A batch is cut into near-equal shares, one a
rank. What a plan aggregates must be the mean over the whole batch of B samples: plans that average
N ranks need N/B on each sample, whatever the size of the share; coded plans sum up cells of the
batch, of which each worker has some, with weights of their own, and need that weight over B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thalweg.codes import Allocation
from thalweg.errors import UsageError
from thalweg.schedules.chunks import split

SEED_PRIME = 1_000_003  # keeps (seed, epoch) pairs apart
TORCH_SEED_COUNT = 2**63  # so many does torch know
MIN_VARIANCE_SAMPLES = 2  # samples of which there is a variance


@dataclass(frozen=True, slots=True)
class BatchSlice:
    samples: list[int]
    weights: torch.Tensor  # one a sample, float64
    counts: bool = True  # in the sum; else nobody waits for what is computed of it

    def in_brief(self) -> BatchSlice:
        """As few samples as a model can go through, batch norm included."""
        return BatchSlice(
            self.samples[:MIN_VARIANCE_SAMPLES], self.weights[:MIN_VARIANCE_SAMPLES], counts=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampler:
    """`batch` samples at a time, over all ranks; what is left over joins the last batch if it is
    too little for everybody."""

    samples: int
    batch: int
    size: int
    seed: int
    allocation: Allocation | None = None  # under a code
    members: tuple[int, ...] | None = None  # the `size` ranks that share; 0, 1, ... if None

    def __post_init__(self) -> None:
        if self.batch < self.size:
            raise UsageError(
                f"a batch of {self.batch} has no sample for each of {self.size} workers",
                f"give batch={self.size} or more: it is the whole batch, over all workers",
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
        return whole + self._suffices(rest)

    @property
    def why_weighed(self) -> str:
        """Why the mean over a batch isn't the mean of the ranks' own means; empty if it is."""
        if self.allocation is not None:
            return "the plan shares samples out with weights of their own"
        last = self.samples - (len(self) - 1) * self.batch
        uneven = [str(n) for n in dict.fromkeys((self.batch, last)) if n % self.size]
        samples = " or ".join(uneven)  # the second in the last batch of an epoch
        return f"{samples} samples aren't shared evenly by {self.size} workers" if uneven else ""

    def slices(self, epoch: int, rank: int, first: int = 0) -> Iterator[BatchSlice]:
        """This rank's shares of the epoch's batches, from the `first` on."""
        order = torch.randperm(self.samples, generator=self.generator(epoch))
        for index in range(first, len(self)):
            last = index == len(self) - 1
            stop = self.samples if last else (index + 1) * self.batch
            yield self._slice(order[index * self.batch : stop], rank)

    def generator(self, *places: int) -> torch.Generator:
        """Another for each epoch, or whatever else is to have random numbers of its own."""
        seed = self.seed
        for place in places:
            seed = (seed * SEED_PRIME + place) % TORCH_SEED_COUNT
        return torch.Generator().manual_seed(seed)

    def _suffices(self, samples: int) -> bool:
        """For everybody."""
        fits = self.allocation is None or self.allocation.suffices(samples)
        return samples >= self.size and fits

    def _slice(self, batch: torch.Tensor, rank: int) -> BatchSlice:
        if self.allocation is None:
            place = rank if self.members is None else self.members.index(rank)
            own = _cut(batch, self.size)[place].tolist()
            weight = self.size / len(batch)
            return BatchSlice(own, torch.full((len(own),), weight, dtype=torch.float64))
        taken = self.allocation.samples(rank, len(batch))
        if not taken:  # a root beside the workers: it has to hold the model, and go along
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


def _cut(batch: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    return torch.split(batch, split(len(batch), parts))
