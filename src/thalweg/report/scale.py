"""Axes: the place of a value, ticks at round values, and labels that don't overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log10

ROUND = ((1, 2, 5), (1, 3), (1,))  # digits at which ticks may stand, densest first
WIDE = 20  # ratio of most to least from which on an axis is logarithmic


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis: values from `least` to `most` on pixels from `start` to `stop`. Values outside are
    drawn at the nearer end."""

    least: float
    most: float
    start: float
    stop: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        value = min(max(value, self.least), self.most)
        if self.logarithmic:
            share = log10(value / self.least) / log10(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self, most: int) -> list[float]:
        """Round values on the axis, at most `most` of them."""
        candidates = _logarithmic(self.least, self.most) if self.logarithmic else []
        for found in candidates:
            if 2 <= len(found) <= most:
                return found
        return _linear(self.least, self.most, most)


def scale_of(
    values: Iterable[float], *, start: float, stop: float, logarithmic: bool | None = None
) -> Scale:
    """An axis for all values that are finite and positive, logarithmic by default if they are far
    apart. It doesn't begin at zero."""
    found = [value for value in values if isfinite(value) and value > 0] or [1.0]
    least, most = min(found), max(found)
    if logarithmic is None:
        logarithmic = most / least > WIDE
    if most / least < 1.01:  # a single value stands in the middle
        least, most = least / 2, most * 2
    return Scale(least=least, most=most, start=start, stop=stop, logarithmic=logarithmic)


def spread(places: Sequence[float], gap: float, least: float, most: float) -> list[float]:
    """The places in their order, moved until they are at least `gap` apart; all of them stay within
    the bounds if these are wide enough."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [places[index] for index in order]
    for index in range(len(moved)):
        floor_ = moved[index - 1] + gap if index else least
        moved[index] = max(moved[index], floor_)
    for index in reversed(range(len(moved))):
        ceiling = moved[index + 1] - gap if index + 1 < len(moved) else most
        moved[index] = min(moved[index], ceiling)
    return [place for _, place in sorted(zip(order, moved, strict=True))]


def value_at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x` of the curve through these points, linear between them on logarithms."""
    for (x1, y1), (x2, y2) in pairwise(zip(xs, ys, strict=True)):
        if min(x1, x2) <= x <= max(x1, x2) and x1 != x2:
            return float(y1 * (y2 / y1) ** (log10(x / x1) / log10(x2 / x1)))
    return ys[0] if abs(x - xs[0]) < abs(x - xs[-1]) else ys[-1]


def _logarithmic(least: float, most: float) -> list[list[float]]:
    decades = range(floor(log10(least)), ceil(log10(most)) + 1)
    found = [[digit * 10.0**each for each in decades for digit in digits] for digits in ROUND]
    found += [[10.0**each for each in decades if each % every == 0] for every in (2, 3)]
    return [
        [value for value in values if least * 0.999 <= value <= most * 1.001] for values in found
    ]


def _linear(least: float, most: float, number: int) -> list[float]:
    """Multiples of the smallest round step with at most `number` of them between the two."""
    decade = 10.0 ** floor(log10((most - least) / (number + 1)))
    for step in (digit * decade for digit in (1, 2, 5, 10, 20, 50, 100)):
        first, last = ceil(least / step * 0.999), floor(most / step * 1.001)
        if last - first < number:
            return [index * step for index in range(first, last + 1)]
    return []
