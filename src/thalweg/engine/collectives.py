"""Collectives between steps, on the run's engine: barrier, broadcast, mean, gather and scatter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from thalweg.engine.arithmetic import NUMPY, Arithmetic, arithmetic_of, as_array
from thalweg.engine.digest import digest
from thalweg.engine.engine import Engine
from thalweg.engine.execute import RankProgram, Task
from thalweg.errors import FIRST_ROUND_BETWEEN_STEPS, PeerFailed, PeerLate, RunError
from thalweg.facts import Size
from thalweg.schedules import Group, Schedule, broadcast, check
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.topologies.star import star
from thalweg.transports import Array

BROADCAST_CHUNK_BYTES = Size.parse("8MB")
COLLECTIVE_TIMEOUT_REMEDY = "call run.consensus and run.save on every rank"
SEE_OUTPUT_REMEDY = "look at the output of that rank"


class RoundCounter:
    """The current step and the numbers of its rounds; all ranks count alike.

    Collectives between steps have numbers of their own, so that a rank that calls one alone never
    gets the messages of a training round."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._next_round = 0
        self.shared = 0  # rounds between the last step and this one, so far

    def claim_between(self) -> int:
        """The number of the next round between steps."""
        self.shared += 1
        return FIRST_ROUND_BETWEEN_STEPS + self.shared - 1

    def claim(self, rounds: int) -> int:
        """The number of the first of `rounds` rounds of this step."""
        first = self._next_round
        self._next_round += rounds
        return first

    def tick(self) -> None:
        self.go_to(self.step + 1)

    def go_to(self, step: int) -> None:
        """Continue with this step; its rounds, and those before it, are numbered from 0."""
        self.step = step
        self._next_round = self.shared = 0


class Collectives:
    """The collectives of one group; every member calls the same ones in the same order.

    `remedy` is what the error advises if a member doesn't take part. Calibration measures by
    `barrier`, `all_gather` and `run`, which raise the engine's errors as they are."""

    def __init__(
        self,
        group: Group,
        engine: Engine,
        clock: RoundCounter,
        remedy: str = COLLECTIVE_TIMEOUT_REMEDY,
    ) -> None:
        self.rank = engine.rank
        self._remedy = remedy
        self._group = group
        self._engine = engine
        self._clock = clock

    def barrier(self) -> None:
        """Return when all members have called this."""
        self.run(self.program(star(self._group, 1, 4, 0, root=None)), np.zeros(1, np.float32))

    def all_gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """The values of every member, one row each in the order of ranks, on all members."""
        table = np.zeros((self._group.size, len(values)))
        table[self._group.ranks.index(self.rank)] = values
        vector = table.reshape(-1)
        if len(vector):
            self.run(self.program(ring(self._group, len(vector), vector.itemsize, 0)), vector)
        return table

    def program(self, schedule: Schedule) -> RankProgram:
        return RankProgram.of(schedule, self.rank)

    def run(self, program: RankProgram, vector: Array, times: int = 1) -> None:
        """Run this program on this vector `times` times."""
        self._engine.run([self._task(program, vector) for _ in range(times)])

    def skip_rounds(self, times: int = 1) -> None:
        """Count the rounds of other members, in which this rank takes no part."""
        for _ in range(times):
            self._clock.claim_between()

    @torch.no_grad()
    def broadcast(
        self, root: int, tensors: Iterable[torch.Tensor], among: Group | None = None
    ) -> None:
        """Overwrite these tensors, of any type, with those of `root`.

        Within the group `among`, if one is given; other ranks only count its rounds."""
        group = among or self._group
        for together in _batches(tensors):
            if self.rank not in group.ranks:
                self.skip_rounds()
                continue
            raw = [tensor.detach().cpu().contiguous().view(-1) for tensor in together]
            buffer = torch.cat([part.view(torch.uint8) for part in raw])
            self._run(broadcast(group, len(buffer), 1, root), buffer)
            received = torch.split(buffer, [part.nbytes for part in raw])
            for tensor, part, own in zip(together, received, raw, strict=True):
                tensor.copy_(part.clone().view(own.dtype).view(tensor.shape))

    @torch.no_grad()
    def all_reduce_mean(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these floating-point tensors with their mean over all members.

        Two-byte types are summed in float32, so that equal tensors stay equal."""
        listed = list(tensors)
        for wide in (False, True):
            dtype = torch.float64 if wide else torch.float32
            for together in _batches(t for t in listed if (t.dtype is torch.float64) is wide):
                buffer = torch.cat([t.detach().cpu().reshape(-1).to(dtype) for t in together])
                buffer.mul_(1 / self._group.size)
                self._run(ring(self._group, len(buffer), buffer.itemsize, 0), buffer)
                means = torch.split(buffer, [tensor.numel() for tensor in together])
                for tensor, mean in zip(together, means, strict=True):
                    tensor.copy_(mean.view(tensor.shape))

    def all_reduce_mean_of_differing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Average the tensors that differ between members; equal ones keep their bits.

        A sum of N times x/N may differ from x."""
        listed = list(tensors)
        if not listed:
            return
        digests = torch.tensor([digest([tensor]) for tensor in listed], dtype=torch.int64)
        total = digests.clone()
        self._run(ring(self._group, len(total), total.itemsize, 0), total)
        equal = (total == digests * self._group.size).tolist()  # modulo 2^64
        self.all_reduce_mean(tensor for tensor, same in zip(listed, equal, strict=True) if not same)

    @torch.no_grad()
    def gather(self, root: int, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of every member, in the order of ranks, on `root`; elsewhere this rank's
        alone. They have the same shapes on all members."""
        gathered = [list(tensors)] * self._group.size
        for place, rank in enumerate(self._group.ranks):
            if rank != root:
                copies = list(tensors)
                if self.rank == root:
                    copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
                self.broadcast(rank, copies, self._group.subgroup((rank, root)))
                gathered[place] = copies
        return gathered

    @torch.no_grad()
    def scatter(self, root: int, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Overwrite the tensors at each member's place in `parts` with those of `root`."""
        for place, rank in enumerate(self._group.ranks):
            if rank != root:
                self.broadcast(root, parts[place], self._group.subgroup((root, rank)))

    def _run(self, schedule: Schedule, buffer: torch.Tensor) -> None:
        check(schedule)
        try:
            arithmetic = arithmetic_of(buffer.dtype)
            self._engine.run([self._task(self.program(schedule), as_array(buffer), arithmetic)])
        except (PeerLate, PeerFailed) as error:
            raise RunError(
                f"a collective between steps failed on rank {self.rank}: {error.problem}",
                self._remedy,
            ) from None

    def _task(self, program: RankProgram, vector: Array, arithmetic: Arithmetic = NUMPY) -> Task:
        return Task(
            program=program,
            vector=vector,
            step=self._clock.step,
            round_number=self._clock.claim_between(),
            arithmetic=arithmetic,
        )


def _batches(tensors: Iterable[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """The tensors that aren't empty, in batches of a few megabytes."""
    together: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            together.append(tensor)
        if sum(t.nbytes for t in together) >= BROADCAST_CHUNK_BYTES.nbytes:
            yield together
            together = []
    if together:
        yield together
