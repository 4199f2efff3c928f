"""Small signed integers of 2 to 8 bits, row by row in whole bytes: two's complement, first element
in the lowest bits.
"""

from __future__ import annotations

import numpy as np

from thalweg.compress.codec import Array


class Packing:
    """Rows of `count` integers of so many `bits`.

    Where whole integers fill a byte (2 and 4 bits), one multiplication moves those of a byte side by
    side, and a table has the values of each byte; other widths go through a matrix of single bits.
    """

    def __init__(self, bits: int, count: int) -> None:
        self.nbytes = -(-count * bits // 8)
        self._bits, self._count = bits, count
        per_byte = 8 // bits
        self._whole = 8 % bits == 0 and count % per_byte == 0
        self._wide = np.dtype(f"<u{per_byte}") if self._whole else np.dtype(np.uint8)
        top = 8 * (per_byte - 1)
        self._gather = sum(1 << (top - i * (8 - bits)) for i in range(per_byte))
        self._top = top
        codes = np.arange(256 if self._whole else 1 << bits)
        fields = codes[:, None] >> (bits * np.arange(per_byte if self._whole else 1))
        fields &= (1 << bits) - 1
        self._values = np.where(fields >> (bits - 1), fields - (1 << bits), fields).astype(
            np.float32
        )

    def pack(self, integers: Array, into: Array) -> None:
        """int8, in adjoining rows, which are overwritten."""
        fields = integers.view(np.uint8)
        if self._bits == 8:
            into[...] = fields
            return
        fields &= np.uint8((1 << self._bits) - 1)
        if self._whole:
            wide = fields.view(self._wide)
            wide *= self._wide.type(self._gather)
            wide >>= self._wide.type(self._top)
            into[...] = wide
        else:
            single = np.unpackbits(fields[..., None], axis=2, count=self._bits, bitorder="little")
            into[...] = np.packbits(single.reshape(len(into), -1), axis=1, bitorder="little")

    def unpack(self, packed: Array, out: Array, scale: float = 1.0) -> None:
        """To float32, in adjoining rows, times `scale`."""
        if self._bits == 8:
            out[...] = packed.view(np.int8)
            if scale != 1.0:
                out *= np.float32(scale)
            return
        values = self._values if scale == 1.0 else self._values * np.float32(scale)
        if self._whole:
            into = out.reshape(*packed.shape, -1)
            np.take(values, packed, axis=0, out=into, mode="clip")
        else:
            every = self._count * self._bits
            single = np.unpackbits(packed, axis=1, count=every, bitorder="little")
            single = single.reshape(-1, self._count, self._bits)
            fields = np.packbits(single, axis=2, bitorder="little")[..., 0]
            np.take(values[:, 0], fields, out=out, mode="clip")
