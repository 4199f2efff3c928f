"""torch's own DDP hooks, called as they are on our buckets, in a process group of one: all that
they compute is there, and nothing is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thalweg.bench.torch_hooks import FIRST, OneBucket
from thalweg.compress import arrange
from thalweg.facts import Bucket
from thalweg.probing.codec_trials import Gradients, Trial

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


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


class _Hooked(Trial):
    """Encoding and decoding are one call."""

    splits = False

    def __init__(self, hook: Hook, state: Any, gradients: Gradients, bucket: Bucket) -> None:
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


def fp16_hook(gradients: Gradients, bucket: Bucket) -> tuple[Trial, int]:
    trial = _Hooked(fp16_compress_hook, None, gradients, bucket)
    trial.payload = 2.0 * bucket.elements
    return trial, 0


def powersgd_hook(gradients: Gradients, bucket: Bucket, rank: int) -> tuple[Trial, int]:
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=FIRST)
    trial = _Hooked(powerSGD_hook, state, gradients, bucket)
    for step in range(FIRST + 1):
        trial.refill()
        trial.encode(step)
    trial.payload = 4.0 * state.total_numel_after_compression
    return trial, 0
