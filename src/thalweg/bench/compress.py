"""What compressing a model's gradients costs, and on which links that pays.

Each method encodes and decodes all buckets of the model as one of N workers does: in one process,
by one thread, in processor time, which other work on the machine doesn't change. Buckets are
measured one by one, so a large model needs no more memory than a few of its buckets.

Beside our own methods stand those that people use today (`compress_peers.py`), in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import process_time
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.utils.data import default_collate

from thalweg.bench.compress_baselines import CompressionBaseline, compression_baselines
from thalweg.bench.compress_costs import CompressionCost, Method, PayloadPattern, at_all_speeds
from thalweg.facts import Bucket, Workload
from thalweg.plan import Settings
from thalweg.predict.closed_form.ddp_step import UncompressedStep
from thalweg.probing.codec_trials import Gradients, TimedCodec, least_seconds, timed_codec_of
from thalweg.workloads.job import Batch, Job

TIMED_BACKWARD_COUNT = 5  # of which the fastest counts
Progress = Callable[[int, int, str], None]
"""Called with how many methods are done, of how many, and which comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressBenchResult:
    rows: list[dict[str, Any]]
    dense: UncompressedStep
    notes: list[str]


def bench_compress(
    workload: Workload,
    methods: Sequence[Method],
    *,
    workers: int,
    repeats: int,
    backward: float,
    progress: Progress,
) -> CompressBenchResult:
    buckets = workload.buckets(Settings().bucket)
    dense = UncompressedStep(
        buckets=[bucket.nbytes for bucket in buckets], workers=workers, compute=backward
    )
    gradients = Gradients()
    rows: list[dict[str, Any]] = []
    with _one_thread(), compression_baselines(workers) as (rivals, notes):
        own = [_as_peer(each, workers) for each in methods]
        entries = [*own, *rivals]
        for number, entry in enumerate(entries):
            progress(number, len(entries), entry.name)
            trials = (entry.trial(gradients, bucket) for bucket in buckets)
            measured = _row(entry, trials, dense, repeats, peer=number >= len(own))
            rows.append(measured)
        progress(len(entries), len(entries), "")
    return CompressBenchResult(rows=rows, dense=dense, notes=notes)


def backward_seconds(job: Job, workers: int) -> float:
    """The processor time that one worker's backward takes here, by one thread: the least of some,
    as with encoding and decoding."""
    model = job.model()
    samples = [job.data[i] for i in range(max(1, job.batch // workers))]
    with _one_thread():
        return min(
            _backward(job, model, default_collate(samples)) for _ in range(TIMED_BACKWARD_COUNT)
        )


def _backward(job: Job, model: nn.Module, batch: Batch) -> float:
    loss = job.losses(model, batch).mean()
    began = process_time()
    torch.autograd.backward(loss)
    return process_time() - began


@contextmanager
def _one_thread() -> Iterator[None]:
    """For torch and for numpy's products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _as_peer(each: Method, workers: int) -> CompressionBaseline:
    return CompressionBaseline(each.text, each.exchange(workers), partial(_trial, each, workers))


def _trial(
    each: Method, workers: int, gradients: Gradients, bucket: Bucket
) -> tuple[TimedCodec | None, int]:
    """And the bytes that go as they are."""
    trial, rest = timed_codec_of(
        each.compressor,
        each.arguments,
        bucket.tensors,
        workers,
        gradients,
        two_shot=each.exchange(workers) is PayloadPattern.TWO_SHOT,
    )
    return trial, rest * bucket.itemsize


def _row(
    entry: CompressionBaseline,
    trials: Iterable[tuple[TimedCodec | None, int]],
    dense: UncompressedStep,
    repeats: int,
    *,
    peer: bool,
) -> dict[str, Any]:
    encode = decode = payload = exact = 0.0
    splits = True
    for trial, rest in trials:
        exact += rest
        if trial is not None:
            encoding, decoding = least_seconds(trial, repeats)
            encode += encoding
            decode += decoding if trial.splits else 0.0
            payload += trial.payload
            exact += trial.exact
            splits = splits and trial.splits
    cost = CompressionCost(
        dense=dense,
        exchange=entry.exchange,
        payload=payload,
        exact=exact,
        seconds=encode + decode,
    )
    return {
        "method": entry.name,
        "peer": peer,
        "exchange": entry.exchange.value,
        "encode_ms": 1e3 * encode,
        "decode_ms": 1e3 * decode if splits else None,
        "total_ms": 1e3 * (encode + decode),
        **derived_metrics(cost),
    }


def derived_metrics(cost: CompressionCost) -> dict[str, Any]:
    """Of a row, all that follows from what was measured. `pays` is against DDP."""
    below = cost.pays_below
    return {
        "payload_bytes": round(cost.payload + cost.exact),
        "ratio": cost.ratio,
        "wire_bytes": round(cost.wire),
        "breakeven_gbps": None if cost.breakeven is None else cost.breakeven / 1e9,
        "pays": {0.0: "never", inf: "always"}.get(below, "below"),
        "pays_below_gbps": below / 1e9 if 0 < below < inf else None,
        "step_seconds": at_all_speeds(cost.step),
    }
