"""A plan: five choices, and their text form.

    preset(argument=value, ...) + compressor(argument=value, ...) @ setting=value, ...

`ring`, `hierarchical+powersgd(rank=4)`, `ring+fp16 @ bucket=4MB, overlap=true`. The text is kept
as written but for white space and capitals in names, so parsing and printing gives the same text.
`Catalog.plan` resolves the names and turns a text into a `Plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self

from thalweg.declarations import Value
from thalweg.errors import PlanError
from thalweg.facts import Size

PLAN_EXAMPLE = "write it like ring+fp16 or codedreduce(fanout=4, stragglers=1) @ bucket=4MB"
TRANSPORT = "tcp"  # the only transport
WORD_PATTERN = "[A-Za-z0-9_.%/-]+"
_TOKEN = re.compile(rf"(?P<word>{WORD_PATTERN})|(?P<mark>[+@(),=])|(?P<unknown>\S)")


@dataclass(frozen=True, slots=True)
class Call:
    """A name and its arguments as written."""

    name: str
    arguments: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value}" for name, value in self.arguments)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanText:
    """The parsed text of a plan, with unresolved names."""

    preset: Call
    compressor: Call | None = None
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        reader = _Reader(text)
        preset = reader.call("a plan")
        compressor = reader.call("a compressor") if reader.took("+") else None
        settings = reader.pairs("a setting") if reader.took("@") else ()
        reader.end()
        return cls(preset=preset, compressor=compressor, settings=settings)

    def __str__(self) -> str:
        text = f"{self.preset}+{self.compressor}" if self.compressor else str(self.preset)
        settings = ", ".join(f"{name}={value}" for name, value in self.settings)
        return f"{text} @ {settings}" if settings else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The interval of synchronisation, and the age of its result."""

    every: int = 1  # steps
    inside: bool = False  # racks synchronise among themselves at the other steps
    delay: int = 0  # steps until the result is applied
    staleness: int | None = None  # asynchronous: the largest lag in steps; None: synchronous

    @property
    def two_levels(self) -> bool:
        """True if averages in racks are applied at once, and those of all racks later."""
        return self.inside and self.delay > 0

    def __str__(self) -> str:
        if self.staleness is not None:
            return f"asynchronous, at most {self.staleness} steps stale"
        text = "every step" if self.every == 1 else f"every {self.every} steps"
        if self.inside:
            text += ", inside the racks in between"
        return text + (f", applied {self.delay} late" if self.delay else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """A part of the catalog with the values of all its parameters."""

    name: str
    values: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Value]) -> Self:
        return cls(name, tuple(arguments.items()))

    @property
    def arguments(self) -> dict[str, Value]:
        return dict(self.values)

    def __str__(self) -> str:
        given = tuple((name, _text(value)) for name, value in self.values if value is not None)
        return str(Call(self.name, given))


GRADIENTS = Choice("gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that change a plan's speed but not its result."""

    bucket: Size = Size.parse("25MB")
    transport: str | None = None  # as written; there is only one
    overlap: bool | None = None  # compress during backward; None: whichever is faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A synchronisation strategy: topology, what is averaged, cadence, redundancy, compression."""

    text: PlanText = field(compare=False)
    topology: Choice
    what: Choice = GRADIENTS
    cadence: Cadence = Cadence()
    redundancy: Choice | None = None
    precision: Choice | None = None
    settings: Settings = Settings()

    def __str__(self) -> str:
        return str(self.text)

    @property
    def averages_parameters(self) -> bool:
        """True if each rank takes a local step, so replicas differ."""
        return self.what != GRADIENTS

    @property
    def averaged(self) -> str:
        """The averaged tensors, in words."""
        if not self.averages_parameters:
            return "gradients"
        state = " and optimizer state" if self.averages_optimizer_state else ""
        return f"parameters{state} after a local step"

    @property
    def averages_optimizer_state(self) -> bool:
        """True if the optimizer's state is averaged along with the parameters."""
        return self.what.arguments.get("optimizer") == "averaged"


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Reader:
    """A parser of plan texts whose errors name the position and the reason."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str | None, str, int]] = []
        for match in _TOKEN.finditer(text):
            self.place = match.start()
            if match.lastgroup == "unknown":
                self._wrong(f"{match[0]!r} has no meaning here")
            self.tokens.append((match.lastgroup, match[0], self.place))
        self.tokens.append(("end", "", len(text)))

    def took(self, mark: str) -> bool:
        if self.tokens[0][:2] == ("mark", mark):
            self.tokens.pop(0)
            return True
        self.place = self.tokens[0][2]
        return False

    def word(self, what: str) -> str:
        kind, token, self.place = self.tokens[0]
        if kind != "word":
            self._wrong(f"{what} is missing" + (f" before {token!r}" if token else ""))
        self.tokens.pop(0)
        return token

    def call(self, what: str) -> Call:
        name = self.word(what).lower()  # people write DDP and PowerSGD
        if not self.took("(") or self.took(")"):
            return Call(name)
        arguments = self.pairs("an argument")
        if not self.took(")"):
            self._wrong(f"the bracket after {name} isn't closed")
        return Call(name, arguments)

    def pairs(self, what: str) -> tuple[tuple[str, str], ...]:
        pairs: dict[str, str] = {}
        while True:
            name = self.word(what)
            if not self.took("="):
                self._wrong(f"{what} {name!r} has no value; arguments are written name=value")
            if name in pairs:
                self._wrong(f"{name} is given twice")
            pairs[name] = self.word(f"the value of {name}")
            if not self.took(","):
                return tuple(pairs.items())

    def end(self) -> None:
        kind, token, self.place = self.tokens[0]
        if kind != "end":
            self._wrong(f"{token!r} is not expected")

    def _wrong(self, why: str) -> NoReturn:
        raise PlanError(
            f"can't read the plan {self.text!r} at character {self.place + 1}: {why}", PLAN_EXAMPLE
        )
