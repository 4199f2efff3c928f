"""The cost of compressing a model's gradients, and the links on which that pays.

Each method encodes and decodes all buckets of the model as one of N workers does: in one process,
by one thread, in processor time, which other work on the machine doesn't change. Buckets are
measured one by one, so a large model needs no more memory than a few of its buckets. Baselines
(`compress_baselines.py`) are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import default_collate

from thalweg.bench.compress_baselines import CompressionBaseline, Trial, compression_baselines
from thalweg.bench.compress_costs import PayloadPattern, derived_metrics, exchange_of
from thalweg.bench.run_everywhere import NotedProgress
from thalweg.catalog import default_catalog
from thalweg.facts import Bucket, Workload
from thalweg.plan import Choice, Settings
from thalweg.predict.ddp_step import DdpStep, SentPayload
from thalweg.probing.codec_trials import Gradients, least_seconds, timed_codec_of
from thalweg.workloads.job import Job

TIMED_BACKWARD_COUNT = 5  # the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressBenchResult:
    rows: list[dict[str, Any]]
    dense: DdpStep
    notes: list[str]


def bench_compress(
    workload: Workload,
    methods: Mapping[str, Choice],
    *,
    workers: int,
    repeats: int,
    backward: float,
    progress: NotedProgress,
) -> CompressBenchResult:
    """The rows of the methods, each under its text as written, and of the baselines."""
    buckets = workload.buckets(Settings().bucket)
    dense = DdpStep.uncompressed(backward, [bucket.nbytes for bucket in buckets], workers)
    gradients = Gradients()
    rows: list[dict[str, Any]] = []
    with _one_thread(), compression_baselines(workers) as (baselines, notes):
        entries = [*(_entry(*method, workers) for method in methods.items()), *baselines]
        for number, entry in enumerate(entries):
            progress(number, len(entries), entry.name)
            trials = (entry.trial(gradients, bucket) for bucket in buckets)
            rows.append(_row(entry, trials, dense, backward, repeats, peer=number >= len(methods)))
        progress(len(entries), len(entries), "")
    return CompressBenchResult(rows=rows, dense=dense, notes=notes)


def backward_seconds(job: Job, workers: int) -> float:
    """The least processor time of one worker's backward pass on this machine, by one thread."""
    model = job.model()
    batch = default_collate([job.data[i] for i in range(max(1, job.batch // workers))])
    seconds = []
    with _one_thread():
        for _ in range(TIMED_BACKWARD_COUNT):
            loss = job.losses(model, batch).mean()
            began = process_time()
            torch.autograd.backward(loss)
            seconds.append(process_time() - began)
    return min(seconds)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch and numpy to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _entry(text: str, method: Choice, workers: int) -> CompressionBaseline:
    exchange = exchange_of(method, workers)

    def trial(gradients: Gradients, bucket: Bucket) -> Trial:
        codec, rest = timed_codec_of(
            default_catalog().compressors[method.name],
            method.arguments,
            bucket.tensors,
            workers,
            gradients,
            two_shot=exchange is PayloadPattern.TWO_SHOT,
        )
        return codec, rest * bucket.itemsize

    return CompressionBaseline(text, exchange, trial)


def _row(
    entry: CompressionBaseline,
    trials: Iterable[Trial],
    dense: DdpStep,
    backward: float,
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
    seconds = encode + decode
    sent = (entry.exchange.sent(payload), SentPayload(exact))
    step = DdpStep(backward=backward, codec=seconds, exposed=sent, workers=dense.workers)
    return {
        "method": entry.name,
        "peer": peer,
        "exchange": entry.exchange.value,
        "encode_ms": 1e3 * encode,
        "decode_ms": 1e3 * decode if splits else None,
        "total_ms": 1e3 * seconds,
        **derived_metrics(dense, step),
    }
