"""Small signed integers of 2 to 8 bits, row by row in whole bytes: two's complement, first element
in the lowest bits. Three classes pack the same bytes, each as fast as its width allows: `pack` from
int8 integers in adjoining rows, `unpack` to float32 in adjoining rows. Both may overwrite their
first argument.

Stochastic rounding to whole levels is floor(x + u), u uniform in [0, 1), so that E = x: it equals
rounding |x| in this manner and restoring the sign. u has 16 bits, and x is rounded to as many after
the point when they are added, so the expectation is right to 2^-17 of a level.
"""

from __future__ import annotations

import numpy as np
from numpy.random import BitGenerator

from thalweg.compress.codec import Array

FLOAT32_BITS_OF_128 = np.uint32(0x43000000)  # with k in the low bits, 128 + k / 2^16
INT8_SIGN_BIT = np.uint8(0x80)


def packing(bits: int, count: int, rows: int) -> Packing:
    """The packing of up to `rows` rows at once of `count` integers of `bits` bits each."""
    if bits == 8:
        return Bytes()
    if 8 % bits == 0 and count * bits % 8 == 0:
        return WholeFractions(bits)
    return Shifted(bits, count, rows)


def packed_nbytes(bits: int, count: int) -> int:
    return -(-count * bits // 8)


class Bytes:
    def pack(self, integers: Array, into: Array) -> None:
        into[...] = integers.view(np.uint8)

    def unpack(self, packed: Array, out: Array) -> None:
        out[...] = packed.view(np.int8)


class WholeFractions:
    """A packing of 2 or 4 bits: one multiplication moves those of a byte side by side, and a table
    has the values of each byte."""

    def __init__(self, bits: int) -> None:
        per_byte = 8 // bits
        top = 8 * (per_byte - 1)
        self._mask = np.uint8((1 << bits) - 1)
        self._wide = np.dtype(f"<u{per_byte}")
        self._gather = self._wide.type(
            sum(1 << (top - place * (8 - bits)) for place in range(per_byte))
        )
        self._top = self._wide.type(top)
        fields = np.arange(256)[:, None] >> (bits * np.arange(per_byte)) & self._mask
        negative = fields >> (bits - 1)
        self._values = (fields - (negative << bits)).astype(np.float32)

    def pack(self, integers: Array, into: Array) -> None:
        fields = integers.view(np.uint8)
        fields &= self._mask
        wide = fields.view(self._wide)
        wide *= self._gather
        wide >>= self._top
        into[...] = wide

    def unpack(self, packed: Array, out: Array, scale: float | None = None) -> None:
        values = self._values
        if scale is not None:
            with np.errstate(over="ignore"):  # in table entries that don't occur
                values = values * np.float32(scale)
        np.take(values, packed, axis=0, out=out.reshape(*packed.shape, -1), mode="clip")


class Shifted:
    """A packing of any width: eight integers, a byte each, are one word, in which neighbours are
    moved together in three steps: singles, pairs and fours. Unpacking is the reverse."""

    def __init__(self, bits: int, count: int, rows: int) -> None:
        self._bits, self._count, self._nbytes = bits, count, packed_nbytes(bits, count)
        words = -(-count // 8)
        self._words = np.zeros((rows, words), "<u8")
        self._moved = np.empty((rows, words), "<u8")
        self._compact = np.zeros((rows, words, bits), np.uint8)
        self._steps = [_step(bits * size, 8 * size) for size in (1, 2, 4)]

    def pack(self, integers: Array, into: Array) -> None:
        rows = len(into)
        words, moved, compact = self._words[:rows], self._moved[:rows], self._compact[:rows]
        fields = words.view(np.uint8)
        words[:, -1] = 0  # the padding of the last byte
        fields[:, : self._count] = integers.view(np.uint8)
        fields &= np.uint8((1 << self._bits) - 1)
        for distance, stays, apart, together in self._steps:
            np.bitwise_and(words, apart, out=moved)
            moved >>= distance
            moved &= together
            words &= stays
            words |= moved
        compact[...] = fields.reshape(rows, -1, 8)[..., : self._bits]
        into[...] = compact.reshape(rows, -1)[:, : self._nbytes]

    def unpack(self, packed: Array, out: Array) -> None:
        rows = len(packed)
        words, moved, compact = self._words[:rows], self._moved[:rows], self._compact[:rows]
        compact.reshape(rows, -1)[:, : self._nbytes] = packed
        fields = words.view(np.uint8)
        words[...] = 0
        fields.reshape(rows, -1, 8)[..., : self._bits] = compact
        for distance, stays, apart, _ in reversed(self._steps):
            np.left_shift(words, distance, out=moved)
            moved &= apart
            words &= stays
            words |= moved
        sign = np.uint8(1 << (self._bits - 1))
        fields ^= sign
        fields -= sign
        out[...] = fields.view(np.int8)[:, : self._count]


Packing = Bytes | WholeFractions | Shifted


def _step(width: int, spacing: int) -> tuple[np.uint64, ...]:
    """The shift and masks that move every second field of `width` bits next to the one before:
    distance, bits of the fields that stay, and of those that move, before and after."""
    field = (1 << width) - 1
    stays = sum(field << start for start in range(0, 64, 2 * spacing))
    apart, together = stays << spacing, stays << width
    return tuple(map(np.uint64, (spacing - width, stays, apart, together)))


class Rounding:
    """Stochastic rounding of up to `size` elements at once, which lie in [-127, 127]."""

    def __init__(self, size: int) -> None:
        self._shifts = np.empty(size, np.uint32)
        self._levels = np.empty(size, np.uint8)

    def levels(self, x: Array, random: BitGenerator) -> Array:
        """The rounded elements as int8, valid until the next call. `x` is overwritten."""
        shifts, levels = self._shifts[: x.size], self._levels[: x.size]
        drawn = random.random_raw(-(-x.size // 4)).view(np.uint16)[: x.size]
        np.bitwise_or(drawn, FLOAT32_BITS_OF_128, out=shifts)
        x += shifts.view(np.float32)
        levels[:] = x  # positive, so the cast is a floor
        levels ^= INT8_SIGN_BIT  # less 128
        return levels.view(np.int8)
