"""One bucket under one codec on one of N workers: the work that training would do, to be timed.

Without a network, this rank's values stand for the sum over all ranks. Payloads of the others are
made beforehand from gradients of their own, so that decoding N of them touches different elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import process_time

import numpy as np

from thalweg.compress import (
    Codec,
    Compressor,
    Feedback,
    GatheredCodec,
    Segment,
    ShardableCodec,
    SummableCodec,
    arrange,
)
from thalweg.compress.codec import Array, aligned
from thalweg.compress.compressor import own_arguments
from thalweg.declarations import Value
from thalweg.engine.arithmetic import TORCH_KERNELS
from thalweg.facts import Tensor
from thalweg.schedules.chunks import split

NOISE_ELEMENTS = 1 << 20  # random values, repeated as often as a bucket needs
TYPICAL_GRADIENT_ELEMENT = 1e-3  # standard deviation


class TimedCodec(ABC):
    """The work of one worker on one bucket in one step.

    `payload` and `exact` are the bytes that it sends per step, the mean over a period; `exact` are
    uncompressed values that are summed."""

    period = 1
    payload = 0.0
    exact = 0.0
    splits = True  # encoding and decoding are timed separately

    @abstractmethod
    def refill(self) -> None:
        """Write a new gradient where backward would."""

    @abstractmethod
    def encode(self, step: int) -> None: ...

    @abstractmethod
    def decode(self, step: int) -> None: ...


def timed_period(trial: TimedCodec, number: int, clock: Callable[[], float]) -> tuple[float, float]:
    """The seconds to encode and to decode in a step, the mean over the `number`-th period."""
    encode, decode = 0.0, 0.0
    for step in range(number * trial.period, (number + 1) * trial.period):
        trial.refill()
        start = clock()
        trial.encode(step)
        encoded = clock()
        trial.decode(step)
        encode, decode = encode + encoded - start, decode + clock() - encoded
    return encode / trial.period, decode / trial.period


def least_seconds(trial: TimedCodec, repeats: int) -> tuple[float, float]:
    """The processor seconds to encode and to decode in a step: the least of `repeats` periods,
    after one to warm up."""
    periods = [timed_period(trial, number, process_time) for number in range(repeats + 1)]
    encoding, decoding = zip(*periods[1:], strict=True)
    return min(encoding), min(decoding)


class Gradients:
    """Gaussian gradients, different on every rank and the same in every step."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._noise = TYPICAL_GRADIENT_ELEMENT * random.standard_normal(NOISE_ELEMENTS, np.float32)

    def of(self, segments: Sequence[Segment], length: int, rank: int = 0) -> Array:
        """The gradient of these segments, with zeros where tensors are padded."""
        values = np.zeros(length, np.float32)
        for number, segment in enumerate(segments):
            shifted = np.roll(self._noise, 7919 * (rank + 1) + 104_729 * number)
            values[segment.place] = np.resize(shifted, segment.elements)
        return values


class TimedFeedbackCodec(TimedCodec):
    """A codec with error feedback, if its compressor keeps residuals."""

    def __init__(self, codec: Codec, gradient: Array, keep: bool) -> None:
        self.fresh = gradient
        self.gradient = aligned(len(gradient), np.float32)  # like a bucket
        self.gradient[:] = gradient
        self.keep = keep
        self.feedback = Feedback(codec) if keep else None

    def refill(self) -> None:
        np.copyto(self.gradient, self.fresh)

    def values(self) -> Array:
        """The values to encode: the gradient and the residual."""
        return self.gradient if self.feedback is None else self.feedback.add(self.gradient)


class TimedSummedCodec(TimedFeedbackCodec):
    """A codec whose vectors are summed: encoding ends with the last vector."""

    def __init__(self, codec: SummableCodec, gradient: Array, keep: bool, period: int) -> None:
        super().__init__(codec, gradient, keep)
        self.codec = codec
        self.period = period
        self._running: Iterator[Array] = iter(())
        self._rounds = []  # the number of vectors in each step of a period
        for step in range(period):
            sums = [vector.nbytes for vector in self._run(step)]
            self._rounds.append(len(sums))
            self.payload += sum(sums) / period
            self.refill()

    def _run(self, step: int) -> Iterator[Array]:
        return self.codec.rounds(self.values(), self.gradient, step, keep=self.keep)

    def encode(self, step: int) -> None:
        self._running = self._run(step)
        for _ in range(self._rounds[step % self.period]):
            next(self._running)

    def decode(self, step: int) -> None:
        for _ in self._running:
            raise AssertionError(f"{type(self.codec).__name__} has more rounds than before")


class TimedGatheredCodec(TimedFeedbackCodec):
    def __init__(
        self, codec: GatheredCodec, gradient: Array, keep: bool, others: Iterable[Array]
    ) -> None:
        super().__init__(codec, gradient, keep)
        self.codec = codec
        self.payloads = [np.zeros(codec.nbytes, np.uint8)]
        for rank, other in enumerate(others, start=1):
            self.payloads.append(np.zeros(codec.nbytes, np.uint8))
            codec.encode(other, self.payloads[rank], 0, rank, keep=False)
        self.payload = float(codec.nbytes)
        self.exact = 0.0 if codec.scales is None else float(codec.scales.nbytes)

    def encode(self, step: int) -> None:
        values = self.values()
        self.codec.encode(values, self.payloads[0], step, 0, keep=self.keep)
        if self.keep:
            self.codec.keep_residual(values, len(self.payloads))

    def decode(self, step: int) -> None:
        self.codec.add_up(self.payloads, self.gradient)


class TimedTwoShotCodec(TimedGatheredCodec):
    """A codec that reduces the first shard of all payloads, and decodes the shards of all ranks."""

    codec: ShardableCodec

    def __init__(
        self, codec: ShardableCodec, gradient: Array, keep: bool, others: Iterable[Array]
    ) -> None:
        super().__init__(codec, gradient, keep, others)
        ranks = len(self.payloads)
        self.reduced = np.zeros(codec.nbytes, np.uint8)
        codec.encode(gradient.copy(), self.payloads[0], 0, 0, keep=False)
        first = 0
        for rank, units in enumerate(split(codec.nbytes // codec.unit_nbytes, ranks)):
            self._reduce(first, units, 0, rank)
            first += units
        self.own = split(codec.nbytes // codec.unit_nbytes, ranks)[0]

    def _reduce(self, first: int, units: int, step: int, rank: int) -> None:
        part = slice(first * self.codec.unit_nbytes, (first + units) * self.codec.unit_nbytes)
        shards = [payload[part] for payload in self.payloads]
        self.codec.reduce(shards, self.reduced[part], first, step, rank)

    def decode(self, step: int) -> None:
        self._reduce(0, self.own, step, 0)
        self.codec.decode(self.reduced, self.gradient)


def timed_codec_of(
    compressor: Compressor,
    arguments: Mapping[str, Value],
    tensors: Sequence[Tensor],
    workers: int,
    gradients: Gradients,
    *,
    two_shot: bool,
) -> tuple[TimedCodec | None, int]:
    """The codec of a bucket of these tensors (None if it compresses none), and the number of
    elements that are sent uncompressed."""
    arrangement = arrange(tensors, compressor, arguments)
    segments, length = arrangement.compressed, arrangement.length
    if not segments:
        return None, arrangement.rest
    codec = compressor.codec(segments, length, TORCH_KERNELS, **own_arguments(arguments))
    gradient, keep = gradients.of(segments, length), compressor.keeps(arguments)
    if isinstance(codec, SummableCodec):
        return TimedSummedCodec(codec, gradient, keep, compressor.period), arrangement.rest
    others = (gradients.of(segments, length, rank) for rank in range(1, workers))
    if isinstance(codec, ShardableCodec) and two_shot:
        return TimedTwoShotCodec(codec, gradient, keep, others), arrangement.rest
    return TimedGatheredCodec(codec, gradient, keep, others), arrangement.rest
