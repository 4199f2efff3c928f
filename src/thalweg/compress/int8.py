"""8-bit integers by blocks: q = round(g / s), s = max|g| / 127 of its block, d + 4 d / block bytes.

Scales differ between ranks, so payloads can't be added; a shard is decoded, added in float32 and
quantised once more for the all-gather (two-shot), never at each hop. Levels are rounded to nearest:
the error of an element is at most s / 2, each time.

A unit is a block: its integers, then s as float32. A block whose largest magnitude is below 2^-119
is sent as zeros, since s would be subnormal. QSGD has the same units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.random import BitGenerator

from thalweg.compress.bit_packing import packed_nbytes, packing
from thalweg.compress.codec import (
    CODEC_CHUNK_ELEMENTS,
    Array,
    Layout,
    ShardableCodec,
    pieces,
    raise_if_not_finite,
)
from thalweg.compress.compressor import WARMUP, Compressor, Payload, units
from thalweg.compress.generators import ENCODE_PURPOSE, REDUCE_PURPOSE, random_bits
from thalweg.declarations import Parameter
from thalweg.errors import NotFinite
from thalweg.facts import Tensor

MAGNITUDE_BIT_MASK = np.int32(0x7FFFFFFF)  # all bits of a float32 but its sign
MIN_BLOCK_SCALE = np.float32(2.0**-119)


def block_sizes(
    name: str, tensors: Sequence[Tensor], step: int, block: int, bits: int = 8
) -> list[Payload]:
    blocks = sum(units(tensor, block) for tensor in tensors)
    return [Payload(name, blocks, packed_nbytes(bits, block) + 4)]


block_quantizer = partial(
    Compressor,
    unit=lambda block, bits=8: block,
    summable=False,
    elementwise=True,
)


class Blocks(ShardableCodec):
    """A codec with a bias of less than half a level: residuals are needed only where parameters are
    averaged."""

    def __init__(self, *layout: *Layout, bits: int, block: int) -> None:
        super().__init__(*layout)
        self._at_once = min(max(1, CODEC_CHUNK_ELEMENTS // block), self.length // block)
        self._packing = packing(bits, block, self._at_once)
        self._unit = np.dtype([("levels", "u1", (packed_nbytes(bits, block),)), ("scale", "<f4")])
        self.unit_nbytes = self._unit.itemsize
        self.nbytes = self.length // block * self.unit_nbytes
        self._block = block
        self._levels = np.float32((1 << (bits - 1)) - 1)
        self._largest_scale = np.nextafter(np.finfo(np.float32).max / self._levels, np.float32(0))
        self._sum = np.empty((self._at_once, block), np.float32)
        self._scratch = np.empty((self._at_once, block), np.float32)

    @abstractmethod
    def _rounded(self, x: Array, random: BitGenerator) -> Array:
        """Round to whole levels as int8; `x` may be overwritten."""

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        random = random_bits(self.segments, ENCODE_PURPOSE, step, rank)
        blocks, units = values.reshape(-1, self._block), payload.view(self._unit)
        for begin, end in pieces(0, len(units), self._at_once):
            if not self._write(blocks[begin:end], units[begin:end], random):
                raise_if_not_finite(self.segments, values)
        if keep:
            for begin, end in pieces(0, len(units), self._at_once):
                part = self._scratch[: end - begin]
                self._read(units[begin:end], part)
                blocks[begin:end] -= part

    def reduce(
        self, shards: Sequence[Array], into: Array, first: int, step: int, rank: int
    ) -> None:
        random = random_bits(self.segments, REDUCE_PURPOSE, step, rank, first)
        units, given = into.view(self._unit), [shard.view(self._unit) for shard in shards]
        for begin, end in pieces(0, len(units), self._at_once):
            total = self._sum[: end - begin]
            self._add([shard[begin:end] for shard in given], total)
            if not self._write(total, units[begin:end], random):
                names = [segment.name for segment in self.segments]
                raise NotFinite(names, " when those of all ranks are added up")

    def decode(self, payload: Array, out: Array) -> None:
        self.add_up([payload], out)

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        blocks, given = out.reshape(-1, self._block), [p.view(self._unit) for p in payloads]
        for begin, end in pieces(0, len(blocks), self._at_once):
            self._add([payload[begin:end] for payload in given], blocks[begin:end])

    def _write(self, blocks: Array, units: Array, random: BitGenerator) -> bool:
        """Write blocks as units; False, and nothing is written, if a value isn't finite."""
        x = self._scratch[: len(blocks)]
        bits = x.view(np.int32)
        np.bitwise_and(blocks.view(np.int32), MAGNITUDE_BIT_MASK, out=bits)
        largest = bits.max(axis=1).view(np.float32)  # in the order of their bits; nan is the last
        if not np.isfinite(largest).all():
            return False
        zeros = largest < MIN_BLOCK_SCALE
        largest[zeros] = MIN_BLOCK_SCALE
        scales = np.minimum(largest / self._levels, self._largest_scale)
        factors = np.nextafter(self._levels / largest, np.float32(0))  # so that no |x| is above L
        scales[zeros] = factors[zeros] = 0
        np.multiply(blocks, factors[:, None], out=x)
        self._packing.pack(self._rounded(x, random), units["levels"])
        units["scale"] = scales
        return True

    def _add(self, shards: Sequence[Array], out: Array) -> None:
        self._read(shards[0], out)
        for shard in shards[1:]:
            part = self._scratch[: len(out)]
            self._read(shard, part)
            out += part

    def _read(self, units: Array, out: Array) -> None:
        self._packing.unpack(units["levels"], out)
        out *= units["scale"].astype(np.float32)[:, None]


class Int8(Blocks):
    def __init__(self, *layout: *Layout, block: int) -> None:
        super().__init__(*layout, bits=8, block=block)
        self._whole = np.empty(max(CODEC_CHUNK_ELEMENTS, block), np.int8)

    def _rounded(self, x: Array, random: BitGenerator) -> Array:
        whole = self._whole[: x.size].reshape(x.shape)
        whole[...] = np.rint(x, out=x)
        return whole


COMPRESSOR = block_quantizer(
    name="int8",
    summary="one byte an element, scaled by blocks",
    sizes=partial(block_sizes, "bytes and scales"),
    codec=Int8,
    parameters={
        "block": Parameter(kind=int, default=256, least=1, help="elements that share a scale"),
        "warmup": WARMUP,
    },
)
