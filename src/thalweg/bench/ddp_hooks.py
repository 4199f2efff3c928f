"""Torch's own compression, for comparison: DDP's communication hooks on one bucket.

Over Gloo a second bucket makes the PowerSGD hook hang, and the quantisation hooks crash there, so
this is the way in which they can be run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thalweg.compress import Segment, arrange
from thalweg.facts import Bucket, Tensor
from thalweg.plan import Choice
from thalweg.probing.codec_trials import Gradients, TimedCodec

POWERSGD_START_ITERATION = 2  # iteration in which the PowerSGD hook compresses, at the earliest
CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


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


def ddp_hook_text(choice: Choice) -> str | None:
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
            start_powerSGD_iter=POWERSGD_START_ITERATION,
        )
        powersgd: Any = powerSGD_hook
        return lambda bucket: powersgd(state, bucket).wait()
    hook: Any = getattr(default_hooks, f"{choice.name}_compress_hook")
    return lambda bucket: hook(None, bucket).wait()


@contextmanager
def alone_in_a_group() -> Iterator[None]:
    """RuntimeError or ValueError where there can't be one."""
    before = sys.excepthook  # which torch replaces by one that names the rank, for good
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        sys.excepthook = before


class _Hooked(TimedCodec):
    """One of DDP's hooks, called as it is on our buckets, in a process group of one: all that it
    computes is there, and nothing is sent. Encoding and decoding are one call."""

    splits = False

    def __init__(self, hook: CommHook, state: Any, gradients: Gradients, bucket: Bucket) -> None:
        arrangement = arrange(bucket.tensors)
        values = gradients.of(arrangement.exact, arrangement.rest)
        self._fresh = torch.from_numpy(values)
        self._buffer = self._fresh.clone()
        self._bucket = cast(GradBucket, OneBucket(self._buffer, arrangement.exact))
        self._hook, self._state = hook, state

    def refill(self) -> None:
        self._buffer.copy_(self._fresh)

    def encode(self, step: int) -> None:
        self._hook(self._state, self._bucket).wait()

    def decode(self, step: int) -> None:
        pass


def fp16_hook(gradients: Gradients, bucket: Bucket) -> tuple[TimedCodec, int]:
    trial = _Hooked(default_hooks.fp16_compress_hook, None, gradients, bucket)
    trial.payload = 2.0 * bucket.elements
    return trial, 0


def powersgd_hook(gradients: Gradients, bucket: Bucket, rank: int) -> tuple[TimedCodec, int]:
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START_ITERATION
    )
    trial = _Hooked(powerSGD_hook, state, gradients, bucket)
    for step in range(POWERSGD_START_ITERATION + 1):
        trial.refill()
        trial.encode(step)
    trial.payload = 4.0 * state.total_numel_after_compression
    return trial, 0
