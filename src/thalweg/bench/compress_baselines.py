"""What people compress with today, measured beside our methods in the same run: torch's hooks, and
what papers' scripts do: `torch.topk` on every tensor; signs as whole bytes, or packed but unpacked
to floats to be counted; PowerSGD with its factors as the paper writes them, n x r and m x r; bare
casts to half precision. They allocate as scripts do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from thalweg.bench.compress_costs import PayloadPattern
from thalweg.bench.ddp_hooks import alone_in_a_group, fp16_hook, powersgd_hook
from thalweg.catalog import default_catalog
from thalweg.compress import Arrangement, arrange
from thalweg.compress.codec import Array
from thalweg.compress.compressor import as_matrix, kept_elements
from thalweg.facts import Bucket
from thalweg.probing.codec_trials import Gradients, TimedCodec

DIVISION_NOTE = (
    "torch's hooks are one call, which also divides by the number of workers; it isn't known which "
    "part of it is decoding"
)
BASELINE_POWERSGD_RANK, BASELINE_TOPK_RATIO = 4, 0.01  # our defaults too


def on_our_tensors(
    workers: int,
    compressor: str,
    kind: Callable[[Arrangement, Iterator[Array]], TimedCodec],
    gradients: Gradients,
    bucket: Bucket,
) -> tuple[TimedCodec | None, int]:
    """On the tensors that our compressor of this name takes."""
    declared = default_catalog().compressors[compressor]
    arguments = {name: each.default for name, each in declared.parameters.items()}
    arrangement = arrange(bucket.tensors, declared, arguments)
    rest = arrangement.rest * bucket.itemsize
    if not arrangement.compressed:
        return None, rest
    segments, length = arrangement.compressed, arrangement.length
    by_rank = (gradients.of(segments, length, rank) for rank in range(workers))
    return kind(arrangement, by_rank), rest


class _Scripted(TimedCodec):
    """`gradient` is where backward leaves it and the result goes; tensors are views of it."""

    def __init__(self, arrangement: Arrangement, by_rank: Iterator[Array]) -> None:
        self.segments = arrangement.compressed
        self.fresh = torch.from_numpy(next(by_rank))
        self.gradient = self.fresh.clone()
        self.ready(map(torch.from_numpy, by_rank))

    def ready(self, others: Iterator[torch.Tensor]) -> None:
        """What is there before the first step, with what the other ranks sent."""

    def refill(self) -> None:
        self.gradient.copy_(self.fresh)

    def tensors(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values[segment.place] for segment in self.segments]


class Casts(_Scripted):
    """Nothing but the two."""

    def ready(self, others: Iterator[torch.Tensor]) -> None:
        self.half = torch.empty(len(self.gradient), dtype=torch.float16)
        self.payload = 2.0 * len(self.half)

    def encode(self, step: int) -> None:
        self.half.copy_(self.gradient)

    def decode(self, step: int) -> None:
        self.gradient.copy_(self.half)


class ScriptTopK(_Scripted):
    def ready(self, others: Iterator[torch.Tensor]) -> None:
        self.payload = 8.0 * sum(
            kept_elements(segment.elements, BASELINE_TOPK_RATIO) for segment in self.segments
        )
        self.residual = torch.zeros_like(self.gradient)
        self.payloads = [
            self._largest(self.tensors(each)) for each in chain([self.gradient], others)
        ]

    def _largest(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for tensor in tensors:
            places = (
                tensor.abs()
                .topk(kept_elements(len(tensor), BASELINE_TOPK_RATIO), sorted=False)
                .indices
            )
            found.append((tensor[places], places.to(torch.int32)))
        return found

    def encode(self, step: int) -> None:
        self.residual += self.gradient
        tensors = self.tensors(self.residual)
        self.payloads[0] = self._largest(tensors)
        for tensor, (_, places) in zip(tensors, self.payloads[0], strict=True):
            tensor[places] = 0

    def decode(self, step: int) -> None:
        self.gradient.zero_()
        out = self.tensors(self.gradient)
        for payload in self.payloads:
            for tensor, (values, places) in zip(out, payload, strict=True):
                tensor.index_add_(0, places, values)


class ByteSigns(_Scripted):
    def ready(self, others: Iterator[torch.Tensor]) -> None:
        self.payload = float(len(self.gradient))
        self.payloads = [self._signs(each) for each in chain([self.gradient], others)]

    def _signs(self, values: torch.Tensor) -> torch.Tensor:
        return (values >= 0).to(torch.uint8)

    def encode(self, step: int) -> None:
        self.payloads[0] = self._signs(self.gradient)

    def decode(self, step: int) -> None:
        votes = torch.zeros_like(self.gradient)
        for payload in self.payloads:
            votes += payload.to(torch.float32) * 2 - 1
        self.gradient.copy_(votes.sign())


class FloatSigns(_Scripted):
    def ready(self, others: Iterator[torch.Tensor]) -> None:
        self.payload = len(self.gradient) / 8
        self.payloads = [self._bits(each) for each in chain([self.gradient], others)]

    def _bits(self, values: torch.Tensor) -> Array:
        bits: Array = np.packbits(values.numpy() >= 0)
        return bits

    def encode(self, step: int) -> None:
        self.payloads[0] = self._bits(self.gradient)

    def decode(self, step: int) -> None:
        votes = torch.zeros_like(self.gradient)
        for payload in self.payloads:
            bits = torch.from_numpy(np.unpackbits(payload, count=len(votes)))
            votes += bits.to(torch.float32) * 2 - 1
        self.gradient.copy_(votes.sign())


class ScriptPowerSGD(_Scripted):
    def ready(self, others: Iterator[torch.Tensor]) -> None:
        self.residual = torch.zeros_like(self.gradient)
        self.shapes = [as_matrix(segment.shape) for segment in self.segments]
        ranks = [min(BASELINE_POWERSGD_RANK, *shape) for shape in self.shapes]
        random = torch.Generator().manual_seed(0)  # its own: the user's stays
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
        for number, matrix in enumerate(matrices):  # all are summed before the first goes on
            self.left[number] = torch.linalg.qr(self.left[number]).Q
            self.right[number] = matrix.T @ self.left[number]

    def decode(self, step: int) -> None:
        for number, matrix in enumerate(self._matrices(self.gradient)):
            torch.mm(self.left[number], self.right[number].T, out=matrix)
        self.residual -= self.gradient


@dataclass(frozen=True, slots=True)
class CompressionBaseline:
    """`trial` also says how many bytes of a bucket go as they are."""

    name: str
    exchange: PayloadPattern
    trial: Callable[[Gradients, Bucket], tuple[TimedCodec | None, int]]


@contextmanager
def compression_baselines(workers: int) -> Iterator[tuple[list[CompressionBaseline], list[str]]]:
    """Those that can run here, and a note on each that can't."""
    found = _scripts(workers)
    notes = [DIVISION_NOTE]
    with ExitStack() as stack:
        try:
            stack.enter_context(alone_in_a_group())
            found = [*_hooks(), *found]
        except (RuntimeError, ValueError) as reason:
            said = str(reason).splitlines()[0]
            notes = [f"torch's hooks are left out: no process group to be had here ({said})"]
        yield found, notes


def _hooks() -> list[CompressionBaseline]:
    powersgd = partial(powersgd_hook, rank=BASELINE_POWERSGD_RANK)
    return [
        CompressionBaseline("torch fp16 hook", PayloadPattern.SUM, fp16_hook),
        CompressionBaseline(
            f"torch powersgd hook (rank={BASELINE_POWERSGD_RANK})", PayloadPattern.SUM, powersgd
        ),
    ]


def _scripts(workers: int) -> list[CompressionBaseline]:
    on_ours = partial(partial, on_our_tensors, workers)
    gathered = PayloadPattern.ALL_GATHER
    return [
        CompressionBaseline("bare fp16 casts", PayloadPattern.SUM, on_ours("fp16", Casts)),
        CompressionBaseline(
            f"torch.topk ({100 * BASELINE_TOPK_RATIO:g} %)", gathered, on_ours("topk", ScriptTopK)
        ),
        CompressionBaseline("uint8 signs", gathered, on_ours("sign", ByteSigns)),
        CompressionBaseline("signs unpacked to floats", gathered, on_ours("sign", FloatSigns)),
        CompressionBaseline(
            "powersgd, straightforward products",
            PayloadPattern.SUM,
            on_ours("powersgd", ScriptPowerSGD),
        ),
    ]
