"""Sizes, rates, durations and counts as people write them: `25MB`, `200mbit`, `50ms`, `2.5M`.

Each is a number that knows its unit, and prints as it was written. Bytes take SI prefixes
(`25MB` is 25,000,000) or binary ones (`25MiB`). Rates are bits per second (`200mbit`, `10gbps`,
`10Gb/s`) or, with a capital B, bytes per second (`25MB/s`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Self

from thalweg.errors import UnitError

_NUMBER = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(?P<unit>[^\d\s].*?)?\s*")

_BYTES = {
    **{f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate(["", *"KMGT"])},
    "kB": Decimal(1000),
    **{f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZES = {**_BYTES, **{prefix: _BYTES[f"{prefix}B"] for prefix in "KMGT"}}  # 800K, as counts are
_BITS = {f"{prefix}bit": Decimal(1000) ** power for power, prefix in enumerate(["", *"kmgt"])}
_RATES = {
    **_BITS,
    **{f"{unit}/s": 8 * factor for unit, factor in _BYTES.items()},
}
_BITS_PER_SECOND = re.compile(r"([kmgtKMGT]?)(?:(?i:bits?)(?:/s|ps)?|b(?:/s|ps))\s*$")
_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
MAD_TO_DEVIATION = 1.4826  # standard deviation / median absolute deviation, if normal
_MAX_MAGNITUDE = Decimal(10) ** 18  # beyond any network, model or patience
_COUNTS = {
    unit: Decimal(1000) ** power
    for unit, power in {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "B": 3}.items()
}


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Bytes, as in `25MB` or `25MiB`; prints as it was written."""

    nbytes: int
    text: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `25MB` (25,000,000 bytes), `25MiB`, `100B`; UnitError if it is no size."""
        value = _number(text, _SIZES, "a size", "25MB")
        return cls(_whole(value, text, "a size is a whole number of bytes", "25MB"), text.strip())

    def __str__(self) -> str:
        return self.text or _shortest(Decimal(self.nbytes), _BYTES)


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Bits per second, as in `200mbit` or `25MB/s`; prints as it was written."""

    bits_per_second: float
    text: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `200mbit`, `10gbps`, `25MB/s`; UnitError if it is no rate."""
        value = _number(_BITS_PER_SECOND.sub(_in_bits, text), _RATES, "a rate", "200mbit", text)
        if value < 1:
            raise UnitError(f"a rate of {text.strip()!r} moves nothing", "give at least 1bit")
        return cls(float(value), text.strip())

    def seconds(self, nbytes: float) -> float:
        """How long this many bytes take."""
        return nbytes * 8 / self.bits_per_second

    def __str__(self) -> str:
        return self.text or _shortest(Decimal(repr(float(self.bits_per_second))), _BITS)


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """Seconds, as in `50ms` or `2min`; prints as it was written."""

    seconds: float
    text: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `100us`, `50ms`, `2s`, `1min`; UnitError if it is no duration."""
        written = text.replace("µs", "us").replace("μs", "us")  # micro sign, Greek mu
        return cls(float(_number(written, _SECONDS, "a duration", "50ms", text)), text.strip())

    def __str__(self) -> str:
        return self.text or _shortest(Decimal(repr(float(self.seconds))), _SECONDS)


@dataclass(frozen=True, slots=True, order=True)
class Count:
    value: int
    text: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        value = _number(text, _COUNTS, "a count", "2.5M")
        return cls(_whole(value, text, "a count is a whole number", "2.5M"), text.strip())

    def __str__(self) -> str:
        return self.text or _shortest(Decimal(self.value), _COUNTS)


def _number(
    text: str, units: Mapping[str, Decimal], what: str, example: str, written: str = ""
) -> Decimal:
    match = _NUMBER.fullmatch(text)
    unit = (match["unit"] or "") if match else ""
    if match is None or unit not in units:
        known = ", ".join(unit for unit in units if unit)
        shown = (written or text).strip()
        meant = [known for known in units if known.lower() == unit.lower()]
        hint = f"did you mean {match['number']}{meant[0]}? " if match and meant else ""
        remedy = f"{hint}write it like {example} (units: {known})"
        raise UnitError(f"{shown!r} is not {what}", remedy)
    number = Decimal(match["number"])
    if number.adjusted() > _MAX_MAGNITUDE.adjusted() or number * units[unit] > _MAX_MAGNITUDE:
        raise UnitError(f"{(written or text).strip()!r} is too large", f"write it like {example}")
    return number * units[unit]


def _in_bits(unit: re.Match[str]) -> str:
    return f"{unit[1].lower()}bit"


def _whole(value: Decimal, text: str, rule: str, example: str) -> int:
    if value != int(value):
        raise UnitError(f"{text.strip()!r} is not whole", f"{rule}, like {example}")
    return int(value)


def _shortest(value: Decimal, units: Mapping[str, Decimal]) -> str:
    """The spelling with the fewest characters that means exactly this value."""
    numbers = [((value / factor).normalize(), unit) for unit, factor in units.items()]
    exact = [f"{number:f}{unit}" for number, unit in numbers if number * units[unit] == value]
    return min(exact, key=len)


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form: `1 worker`, `8 workers`, `2 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def about(value: float, unit: str) -> str:
    """A figure to three digits, for tables: `about(12_345_678, "B")` is `12.3 MB`."""
    prefixes: tuple[tuple[float, str], ...] = ((1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
    if unit != "s":  # nobody says kiloseconds
        prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
    for factor, prefix in prefixes:
        if value >= factor * 0.9995:
            digits = ".0f" if value >= 1000 * factor else ".3g"
            return f"{value / factor:{digits}} {prefix}{unit}"
    return f"{value:.3g} {unit}"
