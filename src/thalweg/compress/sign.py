"""SignSGD with majority vote (Bernstein et al., ICML 2018): one bit an element, d / 8 bytes.

Bits can't be added in a ring, but a shard can be voted on where it is gathered, and the vote is
one bit again: two-shot costs 2 (N-1)/N d / 8 bytes for any N. The vote is given the mean magnitude
of its tensor, so that the learning rate needn't change.

Votes are on packed bits, 64 elements a word, without unpacking them. Counting is bit-sliced: plane
k has bit k of all counts, so a word of each plane counts for 64 elements at once. A full adder
takes two more votes into a plane and carries into the next one:

    sum = a ^ b ^ c,   carry = (a & b) | ((a ^ b) & c)

which is about 5 N / 2 operations on a word of 64 elements, where unpacked bits take N for each
element (the population count of Harley and Seal).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import (
    CODEC_CHUNK_ELEMENTS,
    Array,
    Layout,
    ShardableCodec,
    pieces,
    raise_if_not_finite,
)
from thalweg.compress.compressor import WARMUP, Compressor, Payload, units
from thalweg.compress.kept import Combine, Kept
from thalweg.declarations import Parameter
from thalweg.facts import Tensor

SIGN_BIT = np.uint32(0x80000000)
SIGN_WORD_ELEMENTS = 64  # one word of bits
VOTE_CHUNK_WORDS = 1 << 12
EVEN_ELEMENT_BITS = np.uint64(0x5555555555555555)


class Signs:
    """The signs of vectors with these segments, each padded to whole bytes.

    A tensor v is encoded as a sign(v), a = mean|v|: of all multiples of its signs the one nearest
    to it. A sign is one bit, set where the float's sign bit isn't, so 0 is positive and -0 is not.
    """

    def __init__(self, segments: Sequence[Segment], extents: Sequence[tuple[int, int]]) -> None:
        self._segments = segments
        self._extents = extents
        self._flags = np.empty(CODEC_CHUNK_ELEMENTS, np.bool_)
        self._scratch = np.empty(CODEC_CHUNK_ELEMENTS, np.float32)
        self._ones = np.ones(CODEC_CHUNK_ELEMENTS, np.float32)
        every = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self.of_byte = every.astype(np.float32) * 2 - 1

    def encode(self, values: Array, packed: Array, means: Array) -> None:
        """Pack the signs, and set `means` to the mean magnitude of each segment; NotFinite if a
        value isn't finite."""
        for number, segment in enumerate(self._segments):
            total = 0.0
            for begin, end in pieces(*self._extents[number]):
                piece = values[begin:end]
                magnitudes = np.abs(piece, out=self._scratch[: len(piece)])
                with np.errstate(over="ignore"):  # too large a sum for a float32 is infinite
                    total += float(np.dot(magnitudes, self._ones[: len(piece)]))
                self.pack(piece, packed[begin // 8 : end // 8])
            if not isfinite(total):
                raise_if_not_finite(self._segments, values)
                total = float(np.abs(values[segment.place]).sum(dtype=np.float64))
            means[number] = total / segment.elements

    def pack(self, values: Array, packed: Array) -> None:
        """Pack the signs of at most CODEC_CHUNK_ELEMENTS elements."""
        flags = self._flags[: len(values)]
        np.greater_equal(values.view(np.int32), 0, out=flags)
        packed[:] = np.packbits(flags, bitorder="little")

    def unpack(self, packed: Array, scale: float, out: Array) -> None:
        """Set out to the signs in whole bytes, times the scale."""
        scaled = self.of_byte * np.float32(scale)
        np.take(scaled, packed, axis=0, out=out.reshape(-1, 8), mode="clip")

    def subtract(self, values: Array, scale: float) -> None:
        """Subtract scale * sign(values) from values, for a scale that isn't negative."""
        scale_bits = np.float32(scale).view(np.uint32)
        for begin, end in pieces(0, len(values)):
            piece, signed = values[begin:end], self._scratch[: end - begin]
            bits = signed.view(np.uint32)
            np.bitwise_and(piece.view(np.uint32), SIGN_BIT, out=bits)
            bits |= scale_bits
            piece -= signed


class VoteCounter:
    """A counter of the votes in up to `words` words of each voter at once."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._buffers: list[Array] = []
        self._one, self._casting = np.empty(words, np.uint64), np.empty(words, np.uint64)

    def majority(self, votes: Sequence[Array], into: Array, step: int) -> None:
        """Set each bit of `into` to that of most votes. Ties give a one for even and a zero for odd
        elements, or the reverse, at alternate steps, so that they favour neither."""
        voters = list(votes)
        if len(voters) % 2 == 0:
            casting = self._casting[: len(into)]
            casting.fill(~EVEN_ELEMENT_BITS if step % 2 else EVEN_ELEMENT_BITS)
            voters.append(casting)
        most = (len(voters) - 1) // 2  # the largest minority; count > most, from the lowest bit
        planes = self.counts(voters)
        into[...] = planes[0] if most & 1 == 0 else 0
        for k, plane in enumerate(planes[1:], 1):
            if most >> k & 1:
                into &= plane
            else:
                into |= plane

    def counts(self, votes: Sequence[Array]) -> list[Array]:
        """The planes of the counts, lowest first, valid until the next call."""
        words, buffers = len(votes[0]), self._next_buffers()
        one = self._one[:words]
        planes = []
        while votes:  # each is worth 2^k
            plane, carries = next(buffers)[:words], []
            plane[...] = votes[0]
            for first, second in zip(votes[1::2], votes[2::2], strict=False):
                carry = next(buffers)[:words]
                np.bitwise_xor(first, second, out=one)
                np.bitwise_and(one, plane, out=carry)
                plane ^= one
                np.bitwise_and(first, second, out=one)
                carry |= one
                carries.append(carry)
            if len(votes) % 2 == 0:
                carry = next(buffers)[:words]
                np.bitwise_and(plane, votes[-1], out=carry)
                plane ^= votes[-1]
                carries.append(carry)
            planes.append(plane)
            votes = carries
        return planes

    def _next_buffers(self) -> Iterator[Array]:
        """All buffers, one after the other, and new ones when these are used up."""
        yield from self._buffers
        while True:
            self._buffers.append(np.empty(self._words, np.uint64))
            yield self._buffers[-1]


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    words = sum(units(tensor, SIGN_WORD_ELEMENTS) for tensor in tensors)
    return [Payload("signs", words, 8), Payload("scales", len(tensors), 4, exact=True)]


class Sign(ShardableCodec):
    """A majority vote on the bits, or with feedback (`keep`) on sums with two residuals, that of a
    rank's payload and that of the vote (DoubleSqueeze, Tang et al., ICML 2019):

        e_i = v_i - (s / N) sign(v_i)
        m = s mean(sign(v_i)) + E,   vote = sign(m),   E = m - s vote

    so the sum of all results, all e_i and E is the sum of all gradients. The rank that votes on an
    element holds its E; where all do, each holds an N-th of it.
    """

    unit_nbytes = SIGN_WORD_ELEMENTS // 8

    def __init__(self, *layout: *Layout) -> None:
        super().__init__(*layout)
        self._signs = Signs(self.segments, self.extents)
        self._counter = VoteCounter(VOTE_CHUNK_WORDS)
        self.scales: Array = np.zeros(len(self.segments), np.float32)
        self.nbytes = self.length // 8
        self._unvoted = np.zeros(self.length, np.float32)  # takes no memory until it is written
        views = {s.name: self._unvoted[s.place] for s in self.segments}  # of this rank's shard
        self.state = {"vote": Kept(combine=Combine.OWN, arrays=views, residual=True)}
        self._scratch = np.empty(CODEC_CHUNK_ELEMENTS, np.float32)
        self._vote = np.empty(CODEC_CHUNK_ELEMENTS // SIGN_WORD_ELEMENTS, np.uint64)
        self._keep, self._step = False, 0

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        self._keep, self._step = keep, step
        self._signs.encode(values, payload, self.scales)

    def keep_residual(self, values: Array, ranks: int) -> None:
        if self._keep:
            for segment, scale in zip(self.segments, self.scales, strict=True):
                self._signs.subtract(values[segment.place], float(scale) / ranks)

    def reduce(
        self, shards: Sequence[Array], into: Array, first: int, step: int, rank: int
    ) -> None:
        words, given = into.view(np.uint64), [shard.view(np.uint64) for shard in shards]
        if not self._keep:
            for begin, end in pieces(0, len(words), VOTE_CHUNK_WORDS):
                votes = [shard[begin:end] for shard in given]
                self._counter.majority(votes, words[begin:end], step)
            return
        for scale, begin, end in self._parts(first, first + len(words)):
            here = slice(begin - first, end - first)
            self._carry_over([shard[here] for shard in given], scale, begin, words[here])

    def decode(self, payload: Array, out: Array) -> None:
        words = payload.view(np.uint64)
        for scale, begin, end in self._parts(0, len(words)):
            self._signs.unpack(words[begin:end].view(np.uint8), scale, out[_elements(begin, end)])
        self.clear_padding(out)

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        given = [payload.view(np.uint64) for payload in payloads]
        for scale, begin, end in self._parts(0, self.length // SIGN_WORD_ELEMENTS):
            votes, vote = [payload[begin:end] for payload in given], self._vote[: end - begin]
            if self._keep:
                unvoted = self._unvoted[_elements(begin, end)]
                unvoted *= len(votes)
                self._carry_over(votes, scale, begin, vote)
                unvoted /= len(votes)
            else:
                self._counter.majority(votes, vote, self._step)
            self._signs.unpack(vote.view(np.uint8), scale, out[_elements(begin, end)])
        self.clear_padding(out)

    def _parts(self, first: int, last: int) -> Iterator[tuple[float, int, int]]:
        """Pieces of the words from `first` to `last` that have one scale: it, begin and end."""
        for scale, (start, stop) in zip(self.scales, self.extents, strict=True):
            begin = max(first, start // SIGN_WORD_ELEMENTS)
            end = min(last, stop // SIGN_WORD_ELEMENTS)
            for piece in pieces(begin, end, CODEC_CHUNK_ELEMENTS // SIGN_WORD_ELEMENTS):
                yield float(scale), *piece

    def _carry_over(self, votes: Sequence[Array], scale: float, first: int, into: Array) -> None:
        """Vote on the words from `first` on, and keep the residual E. With c votes of N,
        s mean(sign) = (s / N) (2 c - N). The planes k < K of the counts, as signs, give
        2 c = 2^K - 1 + sum of 2^k sign_k."""
        wanted = self._unvoted[_elements(first, first + len(into))]
        part = self._scratch[: len(wanted)]
        planes, share = self._counter.counts(votes), scale / len(votes)
        wanted += np.float32(share * (2 ** len(planes) - 1 - len(votes)))
        for k, plane in enumerate(planes):
            self._signs.unpack(plane.view(np.uint8), share * 2**k, part)
            wanted += part
        self._signs.pack(wanted, into.view(np.uint8))
        self._signs.subtract(wanted, scale)


def _elements(begin: int, end: int) -> slice:
    """The elements whose signs are in these words."""
    return slice(begin * SIGN_WORD_ELEMENTS, end * SIGN_WORD_ELEMENTS)


COMPRESSOR = Compressor(
    name="sign",
    summary="one bit an element, and a majority vote",
    unit=lambda: SIGN_WORD_ELEMENTS,
    sizes=sizes,
    codec=Sign,
    summable=False,
    biased=True,
    elementwise=True,
    parameters={
        "feedback": Parameter(
            kind=bool, default=False, help="error feedback of ranks and votes; adds noise"
        ),
        "warmup": WARMUP,
    },
)
