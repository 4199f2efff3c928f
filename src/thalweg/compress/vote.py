"""Majority votes on packed bits, 64 elements a word, without unpacking them.

Counting is bit-sliced: plane k has bit k of all counts, so a word of each plane counts for 64
elements at once. A full adder takes two more votes into a plane and carries into the next one:

    sum = a ^ b ^ c,   carry = (a & b) | ((a ^ b) & c)

which is about 5 N / 2 operations on a word of 64 elements, where unpacked bits take N for each
element (the population count of Harley and Seal).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thalweg.compress.codec import Array

EVEN = np.uint64(0x5555555555555555)  # elements


class Tally:
    """Of up to `words` words of each voter at once."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._planes: list[Array] = []
        self._carries: list[tuple[Array, Array]] = []  # into each plane: one that waits, one more
        self._waiting: list[Array | None] = []
        self._used = 0
        self._one, self._both, self._casting = (np.empty(words, np.uint64) for _ in range(3))

    def majority(self, votes: Sequence[Array], into: Array, step: int) -> None:
        """A bit of `into` is what most votes have. Ties go one way for even elements and the other
        way for odd ones, by turns, so that they favour neither."""
        voters = list(votes)
        if len(voters) % 2 == 0:
            casting = self._casting[: len(into)]
            casting.fill(~EVEN if step % 2 else EVEN)
            voters.append(casting)
        most = (len(voters) - 1) // 2  # that a minority can be; count > most, from the lowest bit
        planes = self.counts(voters)
        into[...] = planes[0] if most & 1 == 0 else 0
        for k, plane in enumerate(planes[1:], 1):
            if most >> k & 1:
                into &= plane
            else:
                into |= plane

    def counts(self, votes: Sequence[Array]) -> list[Array]:
        """The planes, lowest first, until the next call."""
        words = len(votes[0])
        self._used = 0
        first = self._room(0)[:words]
        first[...] = votes[0]
        for vote in (first, *votes[1:]):
            self._count(0, vote)
        k = 0
        while k < self._used:
            waiting = self._waiting[k]
            if waiting is not None:
                plane, carry = self._planes[k][:words], self._room(k + 1)[:words]
                np.bitwise_and(plane, waiting, out=carry)
                plane ^= waiting
                self._count(k + 1, carry)
            k += 1
        return [plane[:words] for plane in self._planes[: self._used]]

    def _count(self, k: int, vote: Array) -> None:
        """One that is worth 2^k. The first is the plane already; then two are added at a time."""
        if k == self._used:
            self._used += 1
            self._waiting[k] = None
            return
        waiting = self._waiting[k]
        if waiting is None:
            self._waiting[k] = vote
            return
        words = len(vote)
        plane, carry = self._planes[k][:words], self._room(k + 1)[:words]
        one, both = self._one[:words], self._both[:words]
        np.bitwise_xor(vote, waiting, out=one)
        np.bitwise_and(vote, waiting, out=both)
        np.bitwise_and(one, plane, out=carry)
        carry |= both
        plane ^= one
        self._waiting[k] = None
        self._count(k + 1, carry)

    def _room(self, k: int) -> Array:
        """For what is to be counted next in plane k."""
        if k == len(self._planes):
            plane, first, second = (np.empty(self._words, np.uint64) for _ in range(3))
            self._planes.append(plane)
            self._carries.append((first, second))
            self._waiting.append(None)
        if k == self._used:
            return self._planes[k]
        return self._carries[k][0 if self._waiting[k] is None else 1]
