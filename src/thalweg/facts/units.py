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
from typing import ClassVar, Self

from thalweg.errors import UnitError

_NUMBER = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(?P<unit>[^\d\s].*?)?\s*")

_BYTES = {
    **{f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate(["", *"KMGT"])},
    "kB": Decimal(1000),
    **{f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZES = {**_BYTES, **{prefix: _BYTES[f"{prefix}B"] for prefix in "KMGT"}}  # 800K, as counts are
_BITS = {f"{prefix}bit": Decimal(1000) ** power for power, prefix in enumerate(["", *"kmgt"])}
_RATES = {**_BITS, **{f"{unit}/s": 8 * factor for unit, factor in _BYTES.items()}}
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
_MAX_MAGNITUDE = Decimal(10) ** 18  # beyond any network, model or timeout
_COUNTS = {
    unit: Decimal(1000) ** power
    for unit, power in {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "B": 3}.items()
}


class Quantity:
    """A number that knows its unit; subclasses are dataclasses of the number and its text."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    text: str
    _noun: ClassVar[str]
    _example: ClassVar[str]
    _units: ClassVar[Mapping[str, Decimal]]
    _printed_units: ClassVar[Mapping[str, Decimal]]
    _whole: ClassVar[str] = ""  # the rule that the number must be whole, where there is one

    def __init__(self, amount: float, text: str = "") -> None: ...

    @classmethod
    def parse(cls, text: str) -> Self:
        """The quantity that a text like `25MB`, `200mbit` or `50ms` stands for; UnitError if the
        text isn't one of this kind."""
        shown = text.strip()
        match = _NUMBER.fullmatch(cls._normalised(text))
        unit = (match["unit"] or "") if match else ""
        if match is None or unit not in cls._units:
            known = ", ".join(unit for unit in cls._units if unit)
            meant = [known for known in cls._units if known.lower() == unit.lower()]
            hint = f"did you mean {match['number']}{meant[0]}? " if match and meant else ""
            remedy = f"{hint}write it like {cls._example} (units: {known})"
            raise UnitError(f"{shown!r} is not {cls._noun}", remedy)
        number, factor = Decimal(match["number"]), cls._units[unit]
        if number.adjusted() > _MAX_MAGNITUDE.adjusted() or number * factor > _MAX_MAGNITUDE:
            raise UnitError(f"{shown!r} is too large", f"write it like {cls._example}")
        value = number * factor
        if cls._whole and value != int(value):
            raise UnitError(f"{shown!r} is not whole", f"{cls._whole}, like {cls._example}")
        return cls(int(value) if cls._whole else float(value), shown)

    @classmethod
    def _normalised(cls, text: str) -> str:
        """The text with other spellings of a unit replaced by the one in `_units`."""
        return text

    def __str__(self) -> str:
        """The text as written, or the shortest spelling that means exactly this amount."""
        amount = getattr(self, self.__match_args__[0])
        value = Decimal(amount if isinstance(amount, int) else repr(float(amount)))
        units = self._printed_units
        numbers = [((value / factor).normalize(), unit) for unit, factor in units.items()]
        exact = (f"{number:f}{unit}" for number, unit in numbers if number * units[unit] == value)
        return self.text or min(exact, key=len)


@dataclass(frozen=True, slots=True, order=True)
class Size(Quantity):
    """Bytes; `Size.parse` reads `25MB`, `25MiB` or `100B`. A size prints as it was written."""

    nbytes: int
    text: str = field(default="", compare=False, repr=False)
    _noun, _example, _units, _printed_units = "a size", "25MB", _SIZES, _BYTES
    _whole = "a size is a whole number of bytes"


@dataclass(frozen=True, slots=True, order=True)
class Rate(Quantity):
    """Bits per second; `Rate.parse` reads `200mbit`, `10gbps` or `25MB/s`. A rate prints as it was
    written."""

    bits_per_second: float
    text: str = field(default="", compare=False, repr=False)
    _noun, _example, _units, _printed_units = "a rate", "200mbit", _RATES, _BITS

    def __post_init__(self) -> None:
        if self.text and self.bits_per_second < 1:
            raise UnitError(f"a rate of {self.text!r} moves nothing", "give at least 1bit")

    @classmethod
    def _normalised(cls, text: str) -> str:
        return _BITS_PER_SECOND.sub(lambda unit: f"{unit[1].lower()}bit", text)

    def seconds(self, nbytes: float) -> float:
        """The time that this many bytes take at this rate."""
        return nbytes * 8 / self.bits_per_second


@dataclass(frozen=True, slots=True, order=True)
class Duration(Quantity):
    """Seconds; `Duration.parse` reads `100us`, `50ms`, `2s` or `1min`. A duration prints as it was
    written."""

    seconds: float
    text: str = field(default="", compare=False, repr=False)
    _noun, _example, _units, _printed_units = "a duration", "50ms", _SECONDS, _SECONDS

    @classmethod
    def _normalised(cls, text: str) -> str:
        return text.replace("µs", "us").replace("μs", "us")  # micro sign, Greek mu


@dataclass(frozen=True, slots=True, order=True)
class Count(Quantity):
    value: int
    text: str = field(default="", compare=False, repr=False)
    _noun, _example, _units, _printed_units = "a count", "2.5M", _COUNTS, _COUNTS
    _whole = "a count is a whole number"


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
