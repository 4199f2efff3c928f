"""Where a value is drawn: a stretch of an axis, its ticks, and labels that keep out of each other's
way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log10

ROUND = ((1, 2, 5), (1, 3), (1,))  # digits at which ticks may stand, densest first
WIDE = 20  # from so many times between least and most on, logarithms show more


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from `least` to `most` on pixels from `start` to `stop`; what lies outside is drawn at
    the nearer end."""

    least: float
    most: float
    start: float
    stop: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        value = min(max(value, self.least), self.most)
        if self.logarithmic:
            way = log10(value / self.least) / log10(self.most / self.least)
        else:
            way = (value - self.least) / (self.most - self.least)
        return round(self.start + way * (self.stop - self.start), 1)

    def ticks(self, most: int) -> list[float]:
        """Round values, at most so many."""
        candidates = _logarithmic(self.least, self.most) if self.logarithmic else []
        for found in candidates:
            if 2 <= len(found) <= most:
                return found
        return _linear(self.least, self.most, most)


def scale_of(
    values: Iterable[float], *, start: float, stop: float, logarithmic: bool | None = None
) -> Scale:
    """One that holds all values that are finite and positive; by logarithms if they are so far
    apart that nothing else shows the small ones. It doesn't begin at zero."""
    found = [value for value in values if isfinite(value) and value > 0] or [1.0]
    least, most = min(found), max(found)
    if logarithmic is None:
        logarithmic = most / least > WIDE
    if most / least < 1.01:  # a single value stands in the middle
        least, most = least / 2, most * 2
    return Scale(least=least, most=most, start=start, stop=stop, logarithmic=logarithmic)


def spread(places: Sequence[float], gap: float, least: float, most: float) -> list[float]:
    """The places, in their order and at least `gap` apart: each as near to where it was as the ones
    before it leave it, and all within the bounds if there is room."""
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
    """Of the curve through these points, between two of which it is straight on logarithms."""
    for (x1, y1), (x2, y2) in pairwise(zip(xs, ys, strict=True)):
        if min(x1, x2) <= x <= max(x1, x2) and x1 != x2:
            way = log10(x / x1) / log10(x2 / x1)
            return float(y1 * (y2 / y1) ** way)
    return ys[0] if abs(x - xs[0]) < abs(x - xs[-1]) else ys[-1]


def _logarithmic(least: float, most: float) -> list[list[float]]:
    decades = range(floor(log10(least)), ceil(log10(most)) + 1)
    steps = [at_digits(least, most, digits) for digits in ROUND]
    powers = [[10.0**decade for decade in decades if decade % every == 0] for every in (2, 3)]
    return steps + [_between(least, most, each) for each in powers]


def at_digits(least: float, most: float, digits: Sequence[int]) -> list[float]:
    """Powers of ten times each of these digits, between the two."""
    decades = range(floor(log10(least)), ceil(log10(most)) + 1)
    return _between(least, most, [digit * 10.0**decade for decade in decades for digit in digits])


def _between(least: float, most: float, values: Iterable[float]) -> list[float]:
    return [value for value in values if least * 0.999 <= value <= most * 1.001]


def _linear(least: float, most: float, number: int) -> list[float]:
    """Multiples of the smallest round step of which no more are between the two."""
    decade = 10.0 ** floor(log10((most - least) / (number + 1)))
    for step in (digit * decade for digit in (1, 2, 5, 10, 20, 50, 100)):
        first, last = ceil(least / step * 0.999), floor(most / step * 1.001)
        if last - first < number:
            return [index * step for index in range(first, last + 1)]
    return []
