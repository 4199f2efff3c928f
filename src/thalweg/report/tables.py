"""Tables as a terminal shows them: without lines, and what is said of them at the left."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def table_of(*headings: str, title: str | None = None) -> Table:
    """A table without rows yet. The columns whose headings begin with > stand to the right."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=None)
    for text in headings:
        right = text.startswith(">")
        table.add_column(text.removeprefix(">"), justify="right" if right else "left")
    return table


def named(lines: Iterable[tuple[str, str]]) -> Table:
    """A line for each text, after its name."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, text in lines:
        grid.add_row(name, text)
    return grid
