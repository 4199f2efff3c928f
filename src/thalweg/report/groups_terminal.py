"""Groups over one period as a terminal shows them: a line for each worker, a column for each step.

In a column, those with the same letter meet: a capital between racks, a small one inside a rack. A
letter that lasts several steps is followed by a line until the result is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_lowercase

from rich.console import Group as Block
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from thalweg.report.groups import Groups
from thalweg.schedules import Meeting

MOST_LINES = 64
CELL, LABELS = 3, 30  # characters
FEW = 16  # ranks that are listed
BETWEEN, INSIDE, LASTING = "bold yellow", "blue", "magenta"


def groups_table(view: Groups, width: int) -> RenderableType:
    title = Text("\nWho meets, over one period", style="bold")
    many = view.group.size > MOST_LINES
    shown = min(len(view.turns), max(4, (width - LABELS) // CELL))
    picture = _listed(view) if many else _grid(view, shown)
    left_out = view.left_out + (0 if many else len(view.turns[shown:]))
    notes = [f"... and {left_out} more steps."] if left_out else []
    if not many:
        notes.append("Those with the same letter at a step meet; a capital: of several racks.")
        if any(meeting.lasts > 1 for turn in view.turns for meeting in turn):
            notes.append("A line: it takes so many steps, and they meet nobody else meanwhile.")
    return Block(title, picture, *(Text(note, style="dim") for note in notes))


def groups_facts(view: Groups) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, text in view.facts():
        grid.add_row(name, text)
    return Block("", grid)


def _grid(view: Groups, shown: int) -> RenderableType:
    cells = _cells(view, shown)
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    header = "".join(str(step).ljust(CELL) for step in range(shown))
    table.add_row("", Text("step", style="bold"), Text(header, style="bold"))
    for rack in view.group.racks:
        name = view.group.cluster.rack(rack[0]).name
        for rank in rack:
            host = view.group.cluster.host(rank).name
            table.add_row(
                Text(name if rank == rack[0] else "", style=_tint(view, "rack", name)),
                Text(f"rank {rank}, {host}", style=_tint(view, "host", host)),
                Text.assemble(*(cells.get((rank, step), ".".ljust(CELL)) for step in range(shown))),
            )
    return table


def _tint(view: Groups, kind: str, name: str) -> str:
    return LASTING if view.is_slow(kind, name) else ""


def _cells(view: Groups, shown: int) -> dict[tuple[int, int], Text]:
    """By rank and step."""
    cells: dict[tuple[int, int], Text] = {}
    until: dict[str, int] = {}  # letters that a longer meeting has
    for step, meetings in enumerate(view.turns[:shown]):
        for letter, meeting in _lettered(view, meetings, {x for x in until if until[x] > step}):
            until[letter.lower()] = step + meeting.lasts
            between = letter.isupper()
            style = LASTING if meeting.lasts > 1 else BETWEEN if between else INSIDE
            line = letter + "─" * (CELL * meeting.lasts - 2) + " "
            for rank in meeting.ranks:
                for more in range(meeting.lasts):
                    part = line if meeting.lasts > 1 else letter
                    text = part[CELL * more : CELL * (more + 1)].ljust(CELL)
                    cells[rank, step + more] = Text(text, style=style)
    return cells


def _lettered(
    view: Groups, meetings: tuple[Meeting, ...], taken: set[str]
) -> Iterator[tuple[str, Meeting]]:
    free = (letter for letter in ascii_lowercase * 3 if letter not in taken)
    for meeting in meetings:
        several = len(view.group.subgroup(meeting.ranks).racks) > 1
        letter = next(free, "z")
        yield letter.upper() if several else letter, meeting


def _listed(view: Groups) -> RenderableType:
    table = Table(box=None)
    table.add_column("step", justify="right")
    table.add_column("groups")
    for step, meetings in enumerate(view.turns):
        table.add_row(str(step), "  ".join(map(_braced, meetings)))
    return table


def _braced(meeting: Meeting) -> str:
    ranks = meeting.ranks
    listed = " ".join(map(str, ranks))
    if len(ranks) > FEW:
        listed = f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
    return "{" + listed + "}" + (f" for {meeting.lasts} steps" if meeting.lasts > 1 else "")
