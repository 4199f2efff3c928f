"""Compression as it is used elsewhere, measured in the same run as our methods.

These are torch's DDP hooks, and the methods of published scripts: `torch.topk` on every tensor;
signs as whole bytes, or packed but unpacked to floats to be counted; PowerSGD with its factors as
the paper writes them, n x r and m x r; bare casts to half precision. The scripts' methods allocate
memory as the scripts do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from thalweg.bench.compress_costs import PayloadPattern
from thalweg.bench.ddp_hooks import (
    POWERSGD_START_ITERATION,
    DdpHook,
    single_process_group,
)
from thalweg.catalog import default_catalog
from thalweg.compress import Arrangement, arrange
from thalweg.compress.codec import Array
from thalweg.compress.compressor import as_matrix, kept_elements
from thalweg.facts import Bucket
from thalweg.plan import Choice
from thalweg.probing.codec_trials import Gradients, TimedCodec

DIVISION_NOTE = (
    "torch's hooks encode, divide by the number of workers and decode in one call: their decoding "
    "time is included in encoding"
)
BASELINE_POWERSGD_RANK, BASELINE_TOPK_RATIO = 4, 0.01  # our defaults too
Trial = tuple[TimedCodec | None, int]
"""One bucket under a codec, None if nothing is compressed; and the bytes sent uncompressed."""


@dataclass(frozen=True, slots=True)
class CompressionBaseline:
    """A compression method, with a function that prepares one bucket for timing."""

    name: str
    exchange: PayloadPattern
    trial: Callable[[Gradients, Bucket], Trial]


class _TimedHook(TimedCodec):
    """A DDP hook in a process group of one: it computes everything and sends nothing."""

    splits = False

    def __init__(self, choice: Choice, gradients: Gradients, bucket: Bucket) -> None:
        self._hook = DdpHook(choice, bucket.tensors)
        self._fresh = torch.from_numpy(gradients.of(self._hook.segments, bucket.elements))
        for step in range(POWERSGD_START_ITERATION + 1):
            self.refill()
            self.encode(step)
        self.payload = self._hook.payload()

    def refill(self) -> None:
        self._hook.buffer().copy_(self._fresh)

    def encode(self, step: int) -> None:
        self._hook.run()

    def decode(self, step: int) -> None:
        pass


class _Scripted(TimedCodec):
    """A published script's method; tensors are views of `gradient`, which also gets the result."""

    def __init__(self, arrangement: Arrangement, by_rank: Iterator[Array]) -> None:
        self.segments = arrangement.compressed
        self.fresh = torch.from_numpy(next(by_rank))
        self.gradient = self.fresh.clone()
        self.prepare(map(torch.from_numpy, by_rank))

    @abstractmethod
    def prepare(self, others: Iterator[torch.Tensor]) -> None:
        """Make the state before the first step, and the payloads of the other ranks."""

    def refill(self) -> None:
        self.gradient.copy_(self.fresh)

    def tensors(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values[segment.place] for segment in self.segments]


class Casts(_Scripted):
    """Casts to half precision and back."""

    def prepare(self, others: Iterator[torch.Tensor]) -> None:
        self.half = torch.empty(len(self.gradient), dtype=torch.float16)
        self.payload = 2.0 * len(self.half)

    def encode(self, step: int) -> None:
        self.half.copy_(self.gradient)

    def decode(self, step: int) -> None:
        self.gradient.copy_(self.half)


class ScriptTopK(_Scripted):
    """`torch.topk` on every tensor, with error feedback."""

    def prepare(self, others: Iterator[torch.Tensor]) -> None:
        self.residual = torch.zeros_like(self.gradient)
        everyone = chain([self.gradient], others)
        self.payloads = [[_largest(tensor) for tensor in self.tensors(each)] for each in everyone]
        self.payload = 8.0 * sum(len(values) for values, _ in self.payloads[0])

    def encode(self, step: int) -> None:
        self.residual += self.gradient
        tensors = self.tensors(self.residual)
        self.payloads[0] = [_largest(tensor) for tensor in tensors]
        for tensor, (_, places) in zip(tensors, self.payloads[0], strict=True):
            tensor[places] = 0

    def decode(self, step: int) -> None:
        self.gradient.zero_()
        out = self.tensors(self.gradient)
        for payload in self.payloads:
            for tensor, (values, places) in zip(out, payload, strict=True):
                tensor.index_add_(0, places, values)


def _largest(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest elements of a tensor and their places."""
    kept = kept_elements(len(tensor), BASELINE_TOPK_RATIO)
    places = tensor.abs().topk(kept, sorted=False).indices
    return tensor[places], places.to(torch.int32)


class ByteSigns(_Scripted):
    """Signs sent as whole bytes, with a majority vote."""

    elements_per_byte = 1

    def prepare(self, others: Iterator[torch.Tensor]) -> None:
        self.payload = len(self.gradient) / self.elements_per_byte
        self.payloads = [self._signs(each) for each in chain([self.gradient], others)]

    def _signs(self, values: torch.Tensor) -> torch.Tensor:
        return (values >= 0).to(torch.uint8)

    def _bits(self, signs: torch.Tensor) -> torch.Tensor:
        return signs

    def encode(self, step: int) -> None:
        self.payloads[0] = self._signs(self.gradient)

    def decode(self, step: int) -> None:
        votes = torch.zeros_like(self.gradient)
        for payload in self.payloads:
            votes += self._bits(payload).to(torch.float32) * 2 - 1
        self.gradient.copy_(votes.sign())


class FloatSigns(ByteSigns):
    """Signs sent as bits that are unpacked to floats."""

    elements_per_byte = 8

    def _signs(self, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    def _bits(self, signs: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.unpackbits(signs.numpy(), count=len(self.gradient)))


class ScriptPowerSGD(_Scripted):
    """PowerSGD with the products as the paper writes them, with error feedback."""

    def prepare(self, others: Iterator[torch.Tensor]) -> None:
        self.residual = torch.zeros_like(self.gradient)
        self.shapes = [as_matrix(segment.shape) for segment in self.segments]
        ranks = [min(BASELINE_POWERSGD_RANK, *shape) for shape in self.shapes]
        random = torch.Generator().manual_seed(0)  # leaves the user's generator alone
        self.right = [
            torch.randn(columns, rank, generator=random)
            for (_, columns), rank in zip(self.shapes, ranks, strict=True)
        ]
        self.left = [
            torch.empty(rows, rank) for (rows, _), rank in zip(self.shapes, ranks, strict=True)
        ]
        self.payload = 4.0 * sum(factor.numel() for factor in [*self.left, *self.right])

    def _matrices(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(self.tensors(values), self.shapes, strict=True)
        return [tensor.view(shape) for tensor, shape in parts]

    def encode(self, step: int) -> None:
        self.residual += self.gradient
        matrices = self._matrices(self.residual)
        for number, matrix in enumerate(matrices):
            self.left[number] = matrix @ self.right[number]
        for number, matrix in enumerate(matrices):  # all left factors are summed first
            self.left[number] = torch.linalg.qr(self.left[number]).Q
            self.right[number] = matrix.T @ self.left[number]

    def decode(self, step: int) -> None:
        for number, matrix in enumerate(self._matrices(self.gradient)):
            torch.mm(self.left[number], self.right[number].T, out=matrix)
        self.residual -= self.gradient


SCRIPTS: Sequence[tuple[str, PayloadPattern, str, type[_Scripted]]] = (
    ("bare fp16 casts", PayloadPattern.SUM, "fp16", Casts),
    (
        f"torch.topk ({100 * BASELINE_TOPK_RATIO:g} %)",
        PayloadPattern.ALL_GATHER,
        "topk",
        ScriptTopK,
    ),
    ("uint8 signs", PayloadPattern.ALL_GATHER, "sign", ByteSigns),
    ("signs unpacked to floats", PayloadPattern.ALL_GATHER, "sign", FloatSigns),
    ("powersgd, straightforward products", PayloadPattern.SUM, "powersgd", ScriptPowerSGD),
)
"""The name of each script's method, its exchange, and our compressor for the same tensors."""


@contextmanager
def compression_baselines(workers: int) -> Iterator[tuple[list[CompressionBaseline], list[str]]]:
    """The baselines that can run here, and notes on them."""
    found = [
        CompressionBaseline(name, exchange, partial(_on_our_tensors, workers, compressor, codec))
        for name, exchange, compressor, codec in SCRIPTS
    ]
    with ExitStack() as stack:
        try:
            stack.enter_context(single_process_group())
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            notes = [f"torch's hooks are left out: making a process group failed ({reason})"]
        else:
            notes = [DIVISION_NOTE]
            rank = BASELINE_POWERSGD_RANK
            found = [
                _hook("torch fp16 hook", Choice("fp16")),
                _hook(f"torch powersgd hook (rank={rank})", Choice("powersgd", (("rank", rank),))),
                *found,
            ]
        yield found, notes


def _hook(name: str, choice: Choice) -> CompressionBaseline:
    def trial(gradients: Gradients, bucket: Bucket) -> Trial:
        return _TimedHook(choice, gradients, bucket), 0

    return CompressionBaseline(name, PayloadPattern.SUM, trial)


def _on_our_tensors(
    workers: int,
    compressor: str,
    codec: Callable[[Arrangement, Iterator[Array]], TimedCodec],
    gradients: Gradients,
    bucket: Bucket,
) -> Trial:
    """The script's method on the tensors that our compressor of this name compresses."""
    declared = default_catalog().compressors[compressor]
    arguments = {name: parameter.default for name, parameter in declared.parameters.items()}
    arrangement = arrange(bucket.tensors, declared, arguments)
    rest = arrangement.rest * bucket.itemsize
    segments, length = arrangement.compressed, arrangement.length
    if not segments:
        return None, rest
    by_rank = (gradients.of(segments, length, rank) for rank in range(workers))
    return codec(arrangement, by_rank), rest
