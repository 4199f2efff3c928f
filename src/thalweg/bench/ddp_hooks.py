"""DDP's own compression hooks, called on one bucket, for comparison.

Over Gloo a second bucket makes the PowerSGD hook hang, and the quantisation hooks crash there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thalweg.compress import Segment, arrange
from thalweg.facts import Tensor
from thalweg.plan import Choice

POWERSGD_START_ITERATION = 2  # the first iteration in which the PowerSGD hook can compress


class DdpHook:
    """A bucket and the DDP hook for its compressor: fp16, bf16 or powersgd.

    The hook sees the interface of `GradBucket`, of which only DDP can make a real one.
    """

    def __init__(self, choice: Choice, tensors: Sequence[Tensor]) -> None:
        arrangement = arrange(tensors)
        self.segments: Sequence[Segment] = arrangement.exact
        self._buffer = torch.empty(arrangement.elements)
        self._gradients = [
            self._buffer[segment.place].view(segment.shape) for segment in self.segments
        ]
        self._hook: Any = powerSGD_hook
        self._powersgd: PowerSGDState | None = None
        if choice.name == "powersgd":
            self._powersgd = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=choice.arguments["rank"],
                start_powerSGD_iter=POWERSGD_START_ITERATION,
            )
        else:
            self._hook = getattr(default_hooks, f"{choice.name}_compress_hook")

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def run(self) -> None:
        """Call the hook and wait for its result."""
        self._hook(self._powersgd, self).wait()

    def payload(self) -> float:
        """The bytes that a worker sends, known after the hook has compressed the bucket."""
        if self._powersgd is None:
            return 2.0 * len(self._buffer)
        return 4.0 * self._powersgd.total_numel_after_compression


def ddp_hook_text(choice: Choice) -> str | None:
    """The name of the DDP hook for this compressor; None if there is none."""
    if choice.name == "powersgd":
        return f"torch's powersgd hook (rank={choice.arguments['rank']})"
    return f"torch's {choice.name} hook" if choice.name in ("fp16", "bf16") else None


@contextmanager
def single_process_group() -> Iterator[None]:
    """A process group of this process alone; RuntimeError or ValueError if it can't be made."""
    before = sys.excepthook  # torch replaces it for good by one that names the rank
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        sys.excepthook = before
