"""Tables for the terminal, without lines and with title and caption at the left.

Headings that begin with > belong to columns that are aligned to the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.table import Table

from thalweg.facts import about

T = TypeVar("T")
Columns = Mapping[str, Callable[[Mapping[str, Any]], RenderableType]]  # of rows as in JSON


def table_of(
    rows: Iterable[T],
    columns: Mapping[str, Callable[[T], RenderableType]],
    *,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """A table with a line for each row; a column maps its heading to the text of a row's cell."""
    table = blank_table(*columns, title=title)
    table.caption = caption
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def blank_table(*headings: str, title: str | None = None) -> Table:
    """A table without rows yet."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=None)
    for text in headings:
        right = text.startswith(">")
        table.add_column(text.removeprefix(">"), justify="right" if right else "left")
    return table


def named(lines: Iterable[tuple[str, str]]) -> Table:
    """A grid with a line for each text, after its name."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, text in lines:
        grid.add_row(name, text)
    return grid


def fact_lines(kinds: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """The lines of all kinds, each with the name of its kind where a new kind begins."""
    return [
        ("" if number else name, line)
        for name, lines in kinds.items()
        for number, line in enumerate(lines)
    ]


def range_text(start: int, stop: int) -> str:
    """The numbers from `start` up to but not including `stop`, like 3-5, or the only one."""
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def seconds_text(seconds: float | None) -> str:
    """The duration with its unit; empty if there is none."""
    return "" if seconds is None else about(seconds, "s")


def bits_text(bits_per_second: float) -> str:
    return about(bits_per_second, "bit/s")
