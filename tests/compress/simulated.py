"""Ranks in one process: their codecs, and what an exchange does with the payloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thalweg.catalog import default_catalog
from thalweg.compress.arrangement import Arrangement, Segment
from thalweg.compress.codec import Array, Codec, Feedback, GatheredCodec, SummableCodec
from thalweg.compress.compressor import Compressor
from thalweg.facts import Tensor

Make = Callable[[], Codec]


class NumpyKernels:
    def narrow(self, source: Array, target: Array) -> None:
        if target.dtype == np.float16:
            with np.errstate(over="ignore"):  # to infinity, which is found where it is looked for
                target[:] = source
            return
        bits = source.view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
        rounded[np.isnan(source)] = 0x7FC0
        target[:] = rounded.astype(np.uint16).view(np.int16)

    def widen(self, source: Array, target: Array) -> None:
        if source.dtype == np.float16:
            target[:] = source
        else:
            bits = source.view(np.uint16).astype(np.uint32) << np.uint32(16)
            target[:] = bits.view(np.float32)

    def product(self, left: Array, right: Array, out: Array, *, subtract: bool = False) -> None:
        if subtract:
            out -= left @ right
        else:
            np.matmul(left, right, out=out)


NUMPY_KERNELS = NumpyKernels()


def compressor(name: str) -> Compressor:
    return default_catalog().compressors[name]


def lay_out(shapes: Sequence[tuple[int, ...]]) -> Arrangement:
    """All of them compressed, whether that saves bytes or not."""
    segments, start = [], 0
    for i, shape in enumerate(shapes):
        segments.append(Segment(f"t{i}", shape, start))
        start += segments[-1].elements
    return Arrangement(compressed=tuple(segments), exact=(), length=start, rest=0)


def tensors(arrangement: Arrangement) -> list[Tensor]:
    return [Tensor(name=s.name, shape=s.shape) for s in arrangement.compressed]


def maker(name: str, arrangement: Arrangement, **arguments: Any) -> Make:
    """Makes this compressor's codec for one rank."""
    made = compressor(name).codec
    return lambda: made(arrangement.compressed, arrangement.length, NUMPY_KERNELS, **arguments)


def exchange(
    codecs: Sequence[Codec], vectors: Sequence[Array], step: int, *, keep: bool
) -> list[Array]:
    """One step of all ranks: the result of each. `vectors` are changed as each codec says."""
    outs = [np.full(len(vector), np.nan, np.float32) for vector in vectors]
    if isinstance(codecs[0], GatheredCodec):
        payloads = []
        for rank, (codec, vector) in enumerate(zip(codecs, vectors, strict=True)):
            assert isinstance(codec, GatheredCodec)
            payload = np.empty(codec.nbytes, np.uint8)
            codec.encode(vector, payload, step, rank, keep=keep)
            payloads.append(payload)
        for codec, out in zip(codecs, outs, strict=True):
            assert isinstance(codec, GatheredCodec)
            codec.add_up(payloads, out)
        return outs
    running = []
    for codec, vector, out in zip(codecs, vectors, outs, strict=True):
        assert isinstance(codec, SummableCodec)
        running.append(codec.rounds(vector, out, step, keep=keep))
    for sent in zip(*running, strict=True):
        total = np.sum(sent, axis=0)
        for payload in sent:
            payload[:] = total
    return outs


class Ranks:
    """Several ranks with feedback, over several steps."""

    def __init__(self, make: Make, count: int) -> None:
        self.codecs = [make() for _ in range(count)]
        self.feedback = [Feedback(codec) for codec in self.codecs]
        self.step = 0

    def reduce(self, gradients: Sequence[Array]) -> Array:
        """The result, which must be the same on all ranks."""
        values = [f.add(g) for f, g in zip(self.feedback, gradients, strict=True)]
        outs = exchange(self.codecs, values, self.step, keep=True)
        self.step += 1
        for out in outs[1:]:
            np.testing.assert_array_equal(out, outs[0])
        return outs[0]

    @property
    def left(self) -> Array:
        """What all ranks still keep."""
        total = np.zeros(len(self.feedback[0].residual))
        for feedback in self.feedback:
            total += feedback.residual
        return total
