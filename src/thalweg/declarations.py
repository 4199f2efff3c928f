"""The types with which parts of a plan declare their parameters and promises.

Topologies, codes and compressors each declare themselves in their own module, without torch or a
network; the catalog collects them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.errors import PlanError, UnitError
from thalweg.facts import Count, Size

Value = int | float | bool | str | Size | Count | None


class Promise(Enum):
    """The consistency of a step's result, strongest first."""

    EXACT = "exact"
    LOSSY = "lossy"
    EVENTUAL = "eventual"


class Code(Protocol):
    """A gradient code for the children of one parent: child i sends the sum of n blocks of data
    weighted by row i, and the sums of enough children decode to the plain sum of all blocks.

    `decode` returns each child's weight in that sum, or None while too few have arrived. `teams`
    are the sizes of the teams of children that send the same block; empty if every child's differs.
    """

    def __hash__(self) -> int: ...

    @property
    def members(self) -> int: ...

    @property
    def stragglers(self) -> int: ...

    @property
    def teams(self) -> tuple[int, ...]: ...

    def row(self, member: int) -> NDArray[np.float64]: ...

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A plan that advice tries: the text of a plan without compressor and settings, and when."""

    text: str
    several_racks: bool = False  # on clusters of several racks only
    straggler: bool = False  # where one member is a straggler more than the others only
    compressed: bool = False  # also with each compressor
    alone: bool = True  # without a compressor; False if it makes no plan without one
    place: int = 50  # among plans that take the same time, the lowest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument in a plan's text. A default of None means that Thalweg chooses; a string without
    choices is checked where it is used."""

    kind: type[int] | type[float] | type[bool] | type[str] | type[Size] | type[Count]
    default: Value
    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Value:
        """The value of a text; PlanError if it isn't valid."""
        value = self._parse(text)
        if isinstance(value, str) and self.choices and value not in self.choices:
            raise PlanError(f"{text} is not a choice", f"use {listed(self.choices, 'or')}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.least is not None and value < self.least:
                raise PlanError(f"{text} is too small", f"give at least {self.least:g}")
            if self.most is not None and value > self.most:
                raise PlanError(f"{text} is too large", f"give at most {self.most:g}")
        return value

    def _parse(self, text: str) -> Value:
        try:
            if self.kind is bool:
                return {"true": True, "false": False}[text.lower()]
            if issubclass(self.kind, Size | Count):
                return self.kind.parse(text)
            value = self.kind(text)
            if isinstance(value, float) and not isfinite(value):
                raise ValueError
            return value
        except UnitError as error:
            raise PlanError(error.problem, error.remedy) from None
        except (ValueError, KeyError):
            names = {int: "a whole number", float: "a number", bool: "true or false"}
            kind = names[self.kind]
            raise PlanError(f"{text!r} is not {kind}", f"write {kind}") from None


def fill_defaults(
    owner: str, written: Iterable[tuple[str, str]], parameters: Mapping[str, Parameter]
) -> dict[str, Value]:
    """The value of every parameter, as written or by default; PlanError for invalid ones."""
    values = {name: parameter.default for name, parameter in parameters.items()}
    for name, text in written:
        if name not in parameters:
            takes = f"it takes {listed(parameters)}" if parameters else "it takes none"
            raise PlanError(f"{owner} has no argument {name!r}", takes + nearest(name, parameters))
        try:
            values[name] = parameters[name].read(text)
        except PlanError as error:
            raise PlanError(f"{name} of {owner}: {error.problem}", error.remedy) from None
    return values


def listed(names: Iterable[str], last: str = "and") -> str:
    """The names as a text like `a, b and c`."""
    *first, final = list(names) or [""]
    return f"{', '.join(first)} {last} {final}" if first else final


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the most similar name, to append to a message."""
    close = get_close_matches(name.lower(), list(names), n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""
