"""The cost of a compressor while all ranks of a machine use it.

Every rank times the work of one worker on a bucket (`codec_trials`), in wall-clock time, after a
barrier: so ranks that share cores compete for them, as they will in training. Two bucket sizes
separate the cost of a bucket from that of its elements; where payloads are gathered, two numbers of
payloads give the cost of each:

    sum, two-shot  bucket + elements (encode + decode)
    gathered       bucket + elements (encode + payloads x gathered), and for codecs that are always
                   gathered also elements x decode

Least squares over the timings, each row relative to itself, so that small buckets count as much as
large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import fmean
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from thalweg.catalog import default_catalog
from thalweg.compress import Compressor
from thalweg.engine.collectives import Collectives
from thalweg.facts import MAD_TO_DEVIATION, CodecCost, FittedValue, Tensor
from thalweg.plan import Choice
from thalweg.probing.codec_trials import Gradients, TimedCodec, timed_codec_of, timed_period

MAX_CODEC_BUCKET_ELEMENTS = 1 << 18
SMALL_BUCKET_FACTOR = 8  # of the large to the small bucket
FEW_PAYLOADS_COUNT, MANY_PAYLOADS_COUNT = 2, 4
CODEC_TIMING_SECONDS = 0.02
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A timed case: the tensors of a bucket, and the number of payloads that are decoded."""

    tensors: tuple[Tensor, ...]
    payloads: int
    gathered: bool
    always: bool  # the codec is gathered in every topology

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)


def measure_codecs(
    collectives: Collectives, choices: Sequence[Choice], tensors: Sequence[Tensor]
) -> dict[str, CodecCost]:
    """The costs of these compressors for such tensors, by the text of the choice.

    All ranks call this together and get the same costs. A compressor that takes none of the tensors
    is left out."""
    gradients, costs = Gradients(), {}
    for choice in choices:
        compressor = default_catalog().compressors[choice.name]
        setups, seconds = [], list[float]()
        for setup in setups_of(compressor, choice, tensors):
            trial, _ = timed_codec_of(
                compressor,
                choice.arguments,
                setup.tensors,
                setup.payloads,
                gradients,
                two_shot=not setup.gathered,
            )
            if trial is not None:
                setups.append(setup)
                seconds += _seconds(collectives, trial)
        if setups:
            table = collectives.all_gather(seconds).reshape(-1, len(setups), 2)
            costs[str(choice)] = cost_of(setups, table)
    return costs


def setups_of(compressor: Compressor, choice: Choice, tensors: Sequence[Tensor]) -> Iterator[Setup]:
    taken, _ = compressor.divide(tensors, **choice.arguments)
    large = sample(taken, MAX_CODEC_BUCKET_ELEMENTS)
    small = sample(taken, sum(tensor.elements for tensor in large) // SMALL_BUCKET_FACTOR)
    for bucket in (small, large):
        if not bucket:
            continue
        sharded = compressor.summable or compressor.elementwise
        whole = Setup(
            tensors=bucket, payloads=MANY_PAYLOADS_COUNT, gathered=False, always=not sharded
        )
        if sharded:
            yield whole
        if not compressor.summable:
            yield replace(whole, gathered=True)
            yield replace(whole, gathered=True, payloads=FEW_PAYLOADS_COUNT)


def sample(tensors: Sequence[Tensor], limit: int) -> tuple[Tensor, ...]:
    """Tensors of at most `limit` elements, last layer first; a tensor that is too large is cut to
    the rows that fit."""
    taken: list[Tensor] = []
    for tensor in reversed(tensors):
        row = prod(tensor.shape[1:])
        rows = min(tensor.shape[0], limit // row) if tensor.shape and row else 0
        if rows:
            taken.append(replace(tensor, shape=(rows, *tensor.shape[1:])))
            limit -= rows * row
    return tuple(taken)


def _seconds(collectives: Collectives, trial: TimedCodec) -> list[float]:
    """The seconds to encode and to decode in a step: the mean over a while, since ranks that share
    a core take turns on it that are longer than a step."""
    timed_period(trial, 0, perf_counter)  # warms up
    collectives.barrier()
    end = perf_counter() + CODEC_TIMING_SECONDS
    periods = [timed_period(trial, 1, perf_counter)]
    while perf_counter() < end:
        periods.append(timed_period(trial, len(periods) + 1, perf_counter))
    return [fmean(each) for each in zip(*periods, strict=True)]


def cost_of(setups: Sequence[Setup], seconds: Seconds) -> CodecCost:
    """The cost that fits the median over ranks of `seconds` (by rank, setup, encode or decode)."""
    middle = np.median(seconds, axis=0)
    deviation = np.median(np.abs(seconds - middle), axis=0)
    spread = float(MAD_TO_DEVIATION * np.median(deviation / middle.clip(1e-9)))
    elements = np.array([float(setup.elements) for setup in setups])
    decoded = np.array([not setup.gathered or setup.always for setup in setups])
    payloads = np.array([setup.payloads * setup.gathered for setup in setups])
    ones = np.ones(len(setups))
    before, encode = _solve([ones, elements], middle[:, 0])
    after, decode, gathered = _solve([ones, elements * decoded, elements * payloads], middle[:, 1])
    return CodecCost(
        bucket=FittedValue(before + after, spread),
        encode=FittedValue(encode, spread),
        decode=FittedValue(decode, spread),
        gathered=FittedValue(gathered, spread),
    )


def _solve(columns: Sequence[Seconds], seconds: Seconds) -> list[float]:
    """The factors of the columns; a column whose factor would be negative is dropped, with 0."""
    rows = np.stack(columns, axis=1) / seconds.clip(1e-9)[:, None]
    used = [column for column in range(len(columns)) if rows[:, column].any()]
    while True:
        scale = np.abs(rows[:, used]).max(axis=0)
        costs = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if not used or costs.min() >= 0:
            break
        used.pop(int(costs.argmin()))
    factors = np.zeros(len(columns))
    factors[used] = costs
    return [float(factor) for factor in factors]
