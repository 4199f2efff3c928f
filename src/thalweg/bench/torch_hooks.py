"""Torch's own compression, for comparison: DDP's communication hooks on one bucket.

Over Gloo a second bucket makes the PowerSGD hook hang, and the quantisation hooks crash there, so
this is the way in which they can be run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thalweg.compress import Segment, arrange
from thalweg.facts import Tensor
from thalweg.plan import Choice

FIRST = 2  # iteration in which the PowerSGD hook compresses, at the earliest


class OneBucket:
    """What hooks ask of a `GradBucket`, which only DDP can make."""

    def __init__(self, buffer: torch.Tensor, segments: Sequence[Segment]) -> None:
        self._buffer = buffer
        self._gradients = [buffer[each.place].view(each.shape) for each in segments]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> OneBucket:
        arrangement = arrange(tensors)
        return cls(torch.empty(arrangement.elements), arrangement.exact)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients


def peer_of(choice: Choice) -> str | None:
    """What torch has for this compressor."""
    if choice.name == "powersgd":
        return f"torch's powersgd hook (rank={choice.arguments['rank']})"
    return f"torch's {choice.name} hook" if choice.name in ("fp16", "bf16") else None


def hook_of(choice: Choice) -> Callable[[OneBucket], Any]:
    """To be called with a bucket; waits for its result."""
    if choice.name == "powersgd":
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=choice.arguments["rank"],
            start_powerSGD_iter=FIRST,
        )
        powersgd: Any = powerSGD_hook
        return lambda bucket: powersgd(state, bucket).wait()
    hook: Any = getattr(default_hooks, f"{choice.name}_compress_hook")
    return lambda bucket: hook(None, bucket).wait()
