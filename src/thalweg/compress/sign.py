"""SignSGD with majority vote (Bernstein et al., ICML 2018): one bit an element, d / 8 bytes.

Bits can't be added on the way, but a shard can be voted on where it is gathered, and the vote is
one bit again: two-shot costs 2 (N-1)/N d / 8 bytes for any N. The vote is given the mean magnitude
of its tensor, so that the learning rate needn't change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import Array, Elementwise, Slots
from thalweg.compress.compressor import WARMUP, Compressor, Payload, pays, units
from thalweg.compress.feedback import AT_ONCE
from thalweg.compress.kernels import Kernels
from thalweg.compress.pieces import extents, pieces
from thalweg.compress.signs import Signs
from thalweg.compress.vote import Tally
from thalweg.declarations import Parameter
from thalweg.facts import Tensor

UNIT = 64  # elements: one word of bits
WORDS = 1 << 12  # that are voted on at once


def takes(tensor: Tensor) -> bool:
    return pays(tensor, 8 * units(tensor, UNIT) + 4)


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    words = sum(units(tensor, UNIT) for tensor in tensors)
    return [Payload("signs", words, 8), Payload("scales", len(tensors), 4, exact=True)]


class Sign(Elementwise):
    """Without feedback, the vote is the majority of the bits. With it (`keep`) there are two
    residuals, of what a rank sent and of what was voted (DoubleSqueeze, Tang et al., ICML 2019):

        e_i = v_i - (s / N) sign(v_i)
        m = s mean(sign(v_i)) + E,   vote = sign(m),   E = m - s vote

    so the sum of all results, all e_i and E is the sum of all gradients. Who votes on an element
    holds its E; where all do, each holds an N-th of it.
    """

    unit_nbytes = UNIT // 8

    def __init__(self, segments: Sequence[Segment], length: int, kernels: Kernels) -> None:
        super().__init__(segments, length, kernels)
        self._extents = extents(segments, length)
        self._signs = Signs(segments, length)
        self._tally = Tally(WORDS)
        self._scales = np.zeros(len(segments), np.float32)
        self._unvoted = np.zeros(length, np.float32)  # takes no memory until it is written
        self._scratch = np.empty(AT_ONCE, np.float32)
        self._vote = np.empty(AT_ONCE // UNIT, np.uint64)
        self._keep, self._step = False, 0

    @property
    def nbytes(self) -> int:
        return self.length // 8

    @property
    def scales(self) -> Array:
        return self._scales

    @property
    def slots(self) -> Slots:
        return {"vote": {segment.name: self._unvoted[segment.place] for segment in self.segments}}

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        self._keep, self._step = keep, step
        self._signs.encode(values, payload, self._scales)

    def settle(self, values: Array, ranks: int) -> None:
        if self._keep:
            for segment, scale in zip(self.segments, self._scales, strict=True):
                self._signs.subtract(values[segment.place], float(scale) / ranks)

    def reduce(
        self, shards: Sequence[Array], into: Array, first: int, step: int, rank: int
    ) -> None:
        words, given = into.view(np.uint64), [shard.view(np.uint64) for shard in shards]
        if not self._keep:
            for begin, end in pieces(0, len(words), WORDS):
                votes = [shard[begin:end] for shard in given]
                self._tally.majority(votes, words[begin:end], step)
            return
        for scale, begin, end in self._parts(first, first + len(words)):
            here = slice(begin - first, end - first)
            self._carry_over([shard[here] for shard in given], scale, begin, words[here])

    def decode(self, payload: Array, out: Array) -> None:
        words = payload.view(np.uint64)
        for scale, begin, end in self._parts(0, len(words)):
            self._signs.unpack(
                words[begin:end].view(np.uint8), scale, out[begin * UNIT : end * UNIT]
            )
        self._clear_filling(out)

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        given = [payload.view(np.uint64) for payload in payloads]
        for scale, begin, end in self._parts(0, self.length // UNIT):
            votes, vote = [payload[begin:end] for payload in given], self._vote[: end - begin]
            if self._keep:
                unvoted = self._unvoted[begin * UNIT : end * UNIT]
                unvoted *= len(votes)
                self._carry_over(votes, scale, begin, vote)
                unvoted /= len(votes)
            else:
                self._tally.majority(votes, vote, self._step)
            self._signs.unpack(vote.view(np.uint8), scale, out[begin * UNIT : end * UNIT])
        self._clear_filling(out)

    def _parts(self, first: int, last: int) -> Iterator[tuple[float, int, int]]:
        """Words with one scale."""
        for scale, (start, stop) in zip(self._scales, self._extents, strict=True):
            begin, end = max(first, start // UNIT), min(last, stop // UNIT)
            for piece in pieces(begin, end, AT_ONCE // UNIT):
                yield float(scale), *piece

    def _carry_over(self, votes: Sequence[Array], scale: float, first: int, into: Array) -> None:
        """With c votes of N, s mean(sign) = (s / N) (2 c - N). The planes k < K of the counts, as
        signs, give 2 c = 2^K - 1 + sum of 2^k sign_k."""
        elements = slice(first * UNIT, (first + len(into)) * UNIT)
        wanted, part = self._unvoted[elements], self._scratch[: len(into) * UNIT]
        planes, share = self._tally.counts(votes), scale / len(votes)
        wanted += np.float32(share * (2 ** len(planes) - 1 - len(votes)))
        for k, plane in enumerate(planes):
            self._signs.unpack(plane.view(np.uint8), share * 2**k, part)
            wanted += part
        self._signs.pack(wanted, into.view(np.uint8))
        self._signs.subtract(wanted, scale)

    def _clear_filling(self, out: Array) -> None:
        for segment, (_, stop) in zip(self.segments, self._extents, strict=True):
            out[segment.place.stop : stop] = 0


COMPRESSOR = Compressor(
    name="sign",
    summary="one bit an element, and a majority vote",
    takes=takes,
    unit=lambda: UNIT,
    sizes=sizes,
    codec=Sign,
    summable=False,
    biased=True,
    elementwise=True,
    parameters={
        "feedback": Parameter(
            kind=bool, default=False, help="keep what ranks and votes leave out; adds noise"
        ),
        "warmup": WARMUP,
    },
)
