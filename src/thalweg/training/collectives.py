"""Collectives between steps: broadcast, mean all-reduce, gather and scatter over the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from thalweg.engine.arithmetic import arithmetic_of
from thalweg.engine.engine import Engine, Task
from thalweg.engine.execute import RankProgram
from thalweg.errors import PeerFailed, PeerLate, RunError
from thalweg.facts import Size
from thalweg.schedules import Group, Schedule, broadcast, check
from thalweg.schedules.topologies.ring import ring
from thalweg.training.buckets import as_array
from thalweg.training.compiled_steps import RoundCounter
from thalweg.training.digest import digest

BROADCAST_CHUNK_BYTES = Size.parse("8MB")
COLLECTIVE_TIMEOUT_REMEDY = "call run.consensus and run.save on every rank"
SEE_OUTPUT_REMEDY = "look at the output of that rank"


class Collectives:
    """The collectives of a group. `remedy` is part of the error if a rank doesn't take part."""

    def __init__(
        self,
        group: Group,
        engine: Engine,
        clock: RoundCounter,
        remedy: str = COLLECTIVE_TIMEOUT_REMEDY,
    ) -> None:
        self._remedy = remedy
        self._group = group
        self._engine = engine
        self._clock = clock

    @torch.no_grad()
    def broadcast(
        self,
        root: int,
        tensors: Iterable[torch.Tensor],
        among: Group | None = None,
        *,
        idle: bool = False,
    ) -> None:
        """Overwrite these tensors, of any type, with those of `root`: in the group `among`, or on
        all ranks. An `idle` rank only counts the rounds."""
        for together in _batches(tensors):
            if idle:
                self._clock.claim_between()
                continue
            raw = [tensor.detach().cpu().contiguous().view(-1) for tensor in together]
            buffer = torch.cat([part.view(torch.uint8) for part in raw])
            schedule = broadcast(among or self._group, len(buffer), 1, root)
            self._run(schedule, buffer)
            start = 0
            for tensor, part in zip(together, raw, strict=True):
                nbytes = part.nbytes
                taken = buffer[start : start + nbytes].clone().view(part.dtype)
                tensor.copy_(taken.view(tensor.shape))
                start += nbytes

    @torch.no_grad()
    def all_reduce_mean(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these floating-point tensors with their mean over all ranks. Types of two bytes
        are summed in float32, so that equal ones stay equal."""
        listed = list(tensors)
        for wide in (False, True):
            dtype = torch.float64 if wide else torch.float32
            for together in _batches(t for t in listed if (t.dtype is torch.float64) is wide):
                buffer = torch.cat([t.detach().cpu().reshape(-1).to(dtype) for t in together])
                schedule = ring(self._group, len(buffer), buffer.itemsize, 0)
                buffer.mul_(1 / self._group.size)
                self._run(schedule, buffer)
                start = 0
                for tensor in together:
                    tensor.copy_(buffer[start : start + tensor.numel()].view(tensor.shape))
                    start += tensor.numel()

    @torch.no_grad()
    def gather(self, root: int, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of every member, of these shapes, on `root`; elsewhere this rank's alone."""
        held = [list(tensors)] * self._group.size
        for place, rank in enumerate(self._group.ranks):
            if rank != root:
                own = self._engine.rank == root
                copies = [torch.empty_like(t, device="cpu") for t in tensors] if own else tensors
                self._send_to_one(rank, root, copies)
                held[place] = list(copies)
        return held

    @torch.no_grad()
    def scatter(self, root: int, held: Sequence[Sequence[torch.Tensor]]) -> None:
        """Write the tensors at each rank's index in `held` on `root` to that rank's."""
        for place, rank in enumerate(self._group.ranks):
            if rank != root:
                self._send_to_one(root, rank, held[place])

    def _send_to_one(self, source: int, target: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors from one rank to another. All ranks count the rounds."""
        ranks = source, target
        self.broadcast(
            source, tensors, self._group.subgroup(ranks), idle=self._engine.rank not in ranks
        )

    def all_reduce_mean_of_differing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Average only the tensors that differ between ranks: equal ones keep their bits, which a
        sum of N times x/N may not."""
        listed = list(tensors)
        if not listed:
            return
        digests = torch.tensor([digest([tensor]) for tensor in listed], dtype=torch.int64)
        total = digests.clone()
        self._run(ring(self._group, len(total), total.itemsize, 0), total)
        equal = (total == digests * self._group.size).tolist()  # modulo 2^64
        self.all_reduce_mean(tensor for tensor, same in zip(listed, equal, strict=True) if not same)

    def _run(self, schedule: Schedule, buffer: torch.Tensor) -> None:
        check(schedule)
        task = Task(
            program=RankProgram.of(schedule, self._engine.rank),
            vector=as_array(buffer),
            step=self._clock.step,
            round_number=self._clock.claim_between(),
            arithmetic=arithmetic_of(buffer.dtype),
        )
        try:
            self._engine.run([task])
        except (PeerLate, PeerFailed) as error:
            problem = f"a collective between steps failed: {error.problem}"
            raise RunError(problem, self._remedy) from None


def _batches(tensors: Iterable[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """The tensors in batches of a few megabytes."""
    together: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            together.append(tensor)
        if sum(t.nbytes for t in together) >= BROADCAST_CHUNK_BYTES.nbytes:
            yield together
            together = []
    if together:
        yield together
