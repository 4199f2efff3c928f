"""Which samples a rank takes of each batch, and with what weight.

Every epoch has its own order of the samples, drawn from seed and epoch alone: all ranks know it
without asking, and a resumed run goes on in it. A batch is cut into near-equal shares, one a
rank. What a plan aggregates must be the mean over the whole batch of B samples: plans that average
N ranks need N/B on each sample, whatever the size of the share; coded plans sum up n blocks, of
which each rank has some, weighted by its row of the code, and need that weight over B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thalweg.catalog import default_catalog
from thalweg.declarations import Code
from thalweg.errors import UsageError
from thalweg.plan import Plan
from thalweg.schedules import Group
from thalweg.schedules.chunks import split

PRIME = 1_000_003  # keeps (seed, epoch) pairs apart
SEEDS = 2**63  # so many does torch know


@dataclass(frozen=True, slots=True)
class Share:
    samples: list[int]
    weights: torch.Tensor  # one a sample, float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """This rank's row of the code: the weights of the blocks that it takes."""

    code: Code
    member: int


def is_coded(plan: Plan) -> bool:
    return plan.redundancy is not None and plan.redundancy.name in default_catalog().codes


def coding_of(plan: Plan, group: Group, rank: int) -> Coding | None:
    """This rank's part in the plan's code; None if it has none."""
    if plan.redundancy is None or not is_coded(plan):
        return None
    make = default_catalog().codes[plan.redundancy.name].make
    code = make(group.size, stragglers=plan.redundancy.arguments["stragglers"])
    return Coding(code=code, member=group.order.index(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """`batch` samples at a time, over all ranks; what is left over joins the last batch if it is
    too little for everybody."""

    samples: int
    batch: int
    size: int
    seed: int
    coding: Coding | None = None

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

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch)
        return whole + (rest >= self.size)

    def shares(self, epoch: int, rank: int, first: int = 0) -> Iterator[Share]:
        """This rank's shares of the epoch's batches, from the `first` on."""
        order = torch.randperm(self.samples, generator=self.generator(epoch))
        for index in range(first, len(self)):
            last = index == len(self) - 1
            stop = self.samples if last else (index + 1) * self.batch
            yield self._share(order[index * self.batch : stop], rank)

    def generator(self, *places: int) -> torch.Generator:
        """Another for each epoch, or whatever else is to have random numbers of its own."""
        seed = self.seed
        for place in places:
            seed = (seed * PRIME + place) % SEEDS
        return torch.Generator().manual_seed(seed)

    def _share(self, batch: torch.Tensor, rank: int) -> Share:
        if self.coding is None:
            own = _cut(batch, self.size)[rank].tolist()
            weight = self.size / len(batch)
            return Share(own, torch.full((len(own),), weight, dtype=torch.float64))
        row = self.coding.code.row(self.coding.member)
        blocks = [(w, block) for w, block in zip(row, _cut(batch, len(row)), strict=True) if w]
        weights = [weight / len(batch) for weight, block in blocks for _ in block]
        return Share(
            torch.cat([block for _, block in blocks]).tolist(),
            torch.tensor(weights, dtype=torch.float64),
        )


def _cut(batch: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    return torch.split(batch, split(len(batch), parts))
