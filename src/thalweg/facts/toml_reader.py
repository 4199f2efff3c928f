"""Reading a TOML file so that every mistake in it is named with its place and its remedy."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from thalweg.errors import UnitError, UsageError
from thalweg.facts.units import Duration, Rate

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*")


class TomlTable:
    """A TOML table; errors in it are raised as `error` and name the table as `where`."""

    def __init__(self, data: Any, where: str, error: type[UsageError]) -> None:
        if not isinstance(data, dict):
            raise error(f"{where} is no table", 'write it like { name = "..." }')
        self.data: dict[str, Any] = data
        self.where = where
        self.error = error

    def only(self, *known: str) -> None:
        for key in sorted(self.data.keys() - set(known)):
            raise self.error(
                f"{self.where} has an unknown key {key!r}", f"it takes {', '.join(known)}"
            )

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def table(self, key: str) -> TomlTable:
        return TomlTable(self.data[key], f"{key} of {self.where}", self.error)

    def tables(self, key: str, example: str, where: str | None = None) -> list[TomlTable]:
        """The tables in an array, named after `where`, or after the array and this table."""
        name = where or f"{key} of {self.where}"
        return [TomlTable(entry, name, self.error) for entry in self.array(key, example)]

    def array(self, key: str, example: str) -> list[Any]:
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise self.error(f"{key} of {self.where} is no list", f"write {example}")
        return value

    def name(self, kind: str = "") -> str:
        """The table's name; if it is of some kind, later errors give both."""
        value = self.data.get("name")
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.error(
                f"{self.where} has no usable name ({value!r})",
                'write name = "..." with letters, digits, ".", "_", ":" or "-"',
            )
        self.where = f"{kind} {value}" if kind else self.where
        return value

    def rate(self, key: str) -> Rate:
        return self._quantity(key, Rate.parse)

    def duration(self, key: str, default: Duration) -> Duration:
        return self._quantity(key, Duration.parse) if key in self else default

    def text(self, key: str, example: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{key} of {self.where} is no text", f"write {key} = {example}")
        return value

    def number(self, key: str, low: float, high: float, default: float) -> float:
        value = self.data.get(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.error(
                f"{key} of {self.where} is {value!r}", f"give a number from {low:g} to {high:g}"
            )
        return float(value)

    def whole(self, key: str, least: int, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if type(value) is not int or value < least:
            shown = "missing" if value is None else repr(value)
            raise self.error(
                f"{key} of {self.where} is {shown}", f"give a whole number from {least}"
            )
        return value

    def whole_numbers(self, key: str, least: int, example: str) -> tuple[int, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(type(n) is int and n >= least for n in value):
            raise self.error(
                f"{key} of {self.where} is no list of whole numbers from {least}",
                f"write {example}",
            )
        return tuple(value)

    def _quantity(self, key: str, parse: Callable[[str], T]) -> T:
        value = self.data[key]
        try:
            return parse(value if isinstance(value, str) else repr(value))
        except UnitError as error:
            raise self.error(f"{key} of {self.where}: {error.problem}", error.remedy) from None


def format_toml(value: object) -> str:
    """The text of a value: a table inline, a list or a number as in Python, a string for others."""
    if isinstance(value, Mapping):
        pairs = (f"{key} = {format_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    return repr(value) if isinstance(value, int | float | list) else json.dumps(str(value))


def read_toml(path: Path, parse: Callable[[str], T], error: type[UsageError]) -> T:
    """Parse a file; whatever is wrong with it is raised as `error`, with the file's name."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise error(f"{path} is not text", "name a TOML file") from None
    except OSError as reason:
        raise error(f"can't read {path}: {reason.strerror}", "name a TOML file") from None
    try:
        return parse(text)
    except UsageError as wrong:
        raise error(f"{path}: {wrong.problem}", wrong.remedy) from None


def load_toml(text: str, error: type[UsageError]) -> TomlTable:
    try:
        return TomlTable(tomllib.loads(text), "the file", error)
    except RecursionError:
        raise error("not TOML: brackets are nested too deeply", "correct the file") from None
    except ValueError as reason:  # a TOMLDecodeError, or a number of thousands of digits
        raise error(f"not TOML: {reason}", "correct that line") from None
