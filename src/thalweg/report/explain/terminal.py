"""An explanation for the terminal: moves by time slot, and tables of their cost.

The groups of one period have a line for each worker and a column for each step. In a column, the
workers with the same letter are a group: a capital between racks, a small one within a rack. A
letter of a group that lasts several steps is followed by a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from string import ascii_lowercase

from rich.console import Group as Block
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from thalweg.catalog import Guarantee
from thalweg.facts import Link, Workload, about
from thalweg.plan import Plan
from thalweg.report.explain.coded_plan import ranks_text
from thalweg.report.explain.coded_plan_terminal import coded_tree
from thalweg.report.explain.groups import Groups, kind_of, labelled_racks
from thalweg.report.explain.step_view import (
    MAX_DRAWN_WORKERS,
    Explanation,
    Scene,
    first_step,
    members_text,
)
from thalweg.report.tables import named, range_text, table_of
from thalweg.schedules import Arrow, AveragingGroup, Group, MoveKind

SIGNS = {MoveKind.ADD: "+", MoveKind.COPY: "=", MoveKind.QUORUM: "*"}
STYLES = {MoveKind.ADD: "blue", MoveKind.COPY: "green", MoveKind.QUORUM: "yellow"}
MAX_ROUND_ROWS = 40
SLOT_WIDTH, CELL_WIDTH = 6, 9
MAX_RANK_COLUMNS = 16  # and rows
MAX_GROUP_LINES = 64
CELL, LABELS = 3, 30  # characters
CONTENDED = "magenta"
GROUP_STYLES = {"inside": "blue", "between": "bold yellow", "window": CONTENDED}


def render(explanation: Explanation, most_slots: int, width: int) -> Iterator[RenderableType]:
    """The parts below the heading, top to bottom, with at most so many time slots; 0: all."""
    if explanation.groups is not None:
        if explanation.groups.turns:
            yield groups_table(explanation.groups, width)
        yield Block("", named(explanation.groups.facts()))
    if explanation.coded is not None:
        yield coded_tree(explanation.coded)
    if explanation.async_plan is not None:
        yield Block(Text("\nMessages", style="bold"), named(explanation.async_plan.story.items()))
    elif not explanation.scenes:
        usual = first_step(explanation.plan)
        yield Text(f"\nNo communication at step {explanation.step}; try --step {usual}.")
        return
    else:
        first = [scene for scene in explanation.scenes if scene.bucket == 0]
        for scene in first:
            if scene.sequential_moves is not None:
                yield _drawing(scene, most_slots, width)
        if len(first) < len(explanation.scenes):
            yield Text("\nThe other buckets likewise.")
        yield _rounds(explanation)
    yield _ranks(explanation)
    yield _links(explanation)
    yield _closing(explanation)


def plan_title(
    plan: Plan, guarantee: Guarantee, group: Group, workload: Workload, step: int
) -> RenderableType:
    """The five choices of a plan, and its promise."""
    size = about(workload.nbytes, "B")
    choices = [
        f"topology {plan.topology}",
        f"averages {plan.averaged}",
        str(plan.cadence),
        f"redundancy {plan.redundancy or 'none'}",
        f"precision {plan.precision or 'none'}",
    ]
    lines = [
        ("plan", f"{plan}   ({members_text(group)}, {size}, step {step})"),
        ("choices", " | ".join(choices)),
        ("promise", f"{guarantee.promise.value}: {guarantee.result}"),
        ("if a worker straggles", guarantee.late),
        ("if a worker fails", guarantee.dead),
    ]
    if not guarantee.protected:
        lines.append(("traffic", "torch's own connections: neither authenticated nor encrypted"))
    if group.cluster.assumed:
        assumed = " and ".join(group.cluster.assumed)
        lines.append(("assumed", f"{assumed} (give yours with --cluster)"))
    return named(lines)


def _drawing(scene: Scene, most_slots: int, width: int) -> RenderableType:
    title = Text(f"\n{scene.title}", style="bold")
    ranks = [rank for rack in scene.ranks_by_rack for rank in rack]
    shown = scene.slots[:most_slots] if most_slots else scene.slots
    few = len(ranks) <= MAX_RANK_COLUMNS and SLOT_WIDTH + CELL_WIDTH * len(ranks) <= width
    picture = _columns(scene, shown) if few else _lines(shown)
    notes = [
        "What each rank receives: +3<0 adds chunk 3 from rank 0, = copies, * decodes."
        if few
        else "0>1:+3 is chunk 3 from rank 0 to rank 1, which adds it; = copies, * decodes."
    ]
    left = len(scene.slots) - len(shown)
    if left:
        notes.insert(0, f"... {left} more slots (--slots 0 shows all).")
    return Block(title, picture, Text("\n".join(notes), style="dim"))


def _columns(scene: Scene, shown: tuple[tuple[Arrow, ...], ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("slot", justify="right")
    for number, rack in enumerate(scene.ranks_by_rack):
        for rank in rack:
            tint = "" if number % 2 == 0 else "cyan"
            table.add_column(Text(f"rank {rank}", style=tint), justify="center", no_wrap=True)
    for slot, arrows in enumerate(shown, start=1):
        cells = {arrow.message.target: _cell(arrow) for arrow in arrows}
        idle = Text(".", style="dim")
        row = (cells.get(rank, idle) for rack in scene.ranks_by_rack for rank in rack)
        table.add_row(str(slot), *row)
    return table


def _lines(shown: tuple[tuple[Arrow, ...], ...]) -> RenderableType:
    columns: dict[str, Callable[[tuple[int, tuple[Arrow, ...]]], str]] = {
        ">slot": lambda row: str(row[0]),
        "messages": lambda row: _moves_text(row[1]),
    }
    return table_of(enumerate(shown, start=1), columns)


def _moves_text(arrows: tuple[Arrow, ...]) -> str:
    parts = [
        f"{message.source}>{message.target}:{SIGNS[kind]}{range_text(message.start, message.stop)}"
        for message, kind in arrows[:MAX_RANK_COLUMNS]
    ]
    left = len(arrows) - len(parts)
    return "  ".join(parts) + (f"  and {left} more" if left else "")


def _cell(arrow: Arrow) -> Text:
    message, kind = arrow
    text = f"{SIGNS[kind]}{range_text(message.start, message.stop)}<{message.source}"
    return Text(text, style=STYLES[kind])


def _rounds(explanation: Explanation) -> RenderableType:
    number = len(explanation.scenes)
    table = table_of(
        explanation.scenes[:MAX_ROUND_ROWS],
        {
            ">bucket": lambda scene: str(scene.bucket),
            "payload": lambda scene: scene.rounds[0].payload.name,
            "schedule": lambda scene: scene.rounds[0].schedule.name,
            "groups": _groups_text,
            ">bytes": lambda scene: about(scene.rounds[0].payload.nbytes, "B"),
            ">chunks": lambda scene: str(len(scene.rounds[0].schedule.sizes)),
            ">sequential moves": lambda scene: _known(scene, scene.sequential_moves),
            ">slots": lambda scene: _known(scene, len(scene.slots)),
        },
        title="Rounds of this step",
        caption=f"The first {MAX_ROUND_ROWS} of {number}." if number > MAX_ROUND_ROWS else None,
    )
    return Block("", table)


def _known(scene: Scene, number: int | None) -> str:
    return "?" if scene.sequential_moves is None else str(number)


def _groups_text(scene: Scene) -> str:
    groups = ["{" + ranks_text(round_.group.order) + "}" for round_ in scene.rounds]
    more = f"  and {len(groups) - 4} more" if len(groups) > 4 else ""
    return "  ".join(groups[:4]) + more


def _ranks(explanation: Explanation) -> RenderableType:
    traffic, data = explanation.traffic, max(explanation.workload.nbytes, 1)
    cluster, order, caption = explanation.group.cluster, list(explanation.group.order), None
    if len(order) > MAX_RANK_COLUMNS:
        order = sorted(order, key=lambda rank: (-traffic.sent.get(rank, 0), rank))
        order = [*order[:3], *order[-3:]]
        caption = f"The three ranks that send most and least, of {explanation.group.size}."
    columns: dict[str, Callable[[int], str]] = {
        "rank": str,
        "host": lambda rank: cluster.host(rank).name,
        "rack": lambda rank: cluster.rack(rank).name,
        ">sends": lambda rank: about(traffic.sent.get(rank, 0), "B"),
        ">x model size": lambda rank: f"{traffic.sent.get(rank, 0) / data:.3g}x",
        ">receives": lambda rank: about(traffic.received.get(rank, 0), "B"),
        "> x model size": lambda rank: f"{traffic.received.get(rank, 0) / data:.3g}x",
        ">messages": lambda rank: str(traffic.messages.get(rank, 0)),
    }
    return Block("", table_of(order, columns, title="Bytes per rank", caption=caption))


def _links(explanation: Explanation) -> RenderableType:
    traffic, rates = explanation.traffic, explanation.group.cluster.rates()
    data = max(explanation.workload.nbytes, 1)
    by_bytes = sorted(traffic.links, key=lambda link: -traffic.links[link])
    uplinks = [link for link in by_bytes if link.kind == "uplink"]
    nics = [link for link in by_bytes if link.kind == "nic"]
    left_out = [f"{len(nics)} NIC directions"] if len(nics) > 2 else []
    left_out += [f"{len(uplinks)} uplink directions"] if len(uplinks) > MAX_RANK_COLUMNS else []
    columns: dict[str, Callable[[Link], str]] = {
        "link": str,
        ">bytes": lambda link: about(traffic.links[link], "B"),
        ">x model size": lambda link: f"{traffic.links[link] / data:.3g}x",
        ">rate": lambda link: str(rates.get(link, "no limit")),
        ">minimum time": lambda link: (
            about(rates[link].seconds(traffic.links[link]), "s") if link in rates else ""
        ),
    }
    table = table_of(
        [*sorted(uplinks[:MAX_RANK_COLUMNS]), *nics[:2]],
        columns,
        title="Bytes per link",
        caption=f"The busiest of {' and of '.join(left_out)}." if left_out else None,
    )
    return Block("", table)


def _closing(explanation: Explanation) -> RenderableType:
    promises = dict.fromkeys(s.rounds[0].schedule.after.text for s in explanation.scenes)
    lines = ["", f"Checked: {', then '.join(promises)}."]
    if explanation.async_plan is not None:
        lines[1] = "Bytes are those of one step of every worker. There are no rounds to check."
    elif explanation.sequential_moves is None:
        lines.append(f"Moves are drawn and counted for up to {MAX_DRAWN_WORKERS} workers.")
    else:
        lines.append(
            f"{explanation.sequential_moves} sequential moves: the longest chain of moves, each of "
            "which waits for the one before.\n"
            f"{sum(len(scene.slots) for scene in explanation.scenes)} slots: in each, a rank sends "
            "at most one message and receives at most one."
        )
    slowest = explanation.slowest_link()
    if slowest is not None:
        plain = explanation.uncompressed_seconds
        compared = f"; uncompressed {about(plain, 's')}" if plain is not None else ""
        lines.append(
            f"The slowest link, {slowest[0]}, needs {about(slowest[1], 's')} for its bytes alone"
            f"{compared}."
        )
    return Text("\n".join(lines))


def groups_table(view: Groups, width: int) -> RenderableType:
    title = Text("\nAveraging groups of one period", style="bold")
    many = view.group.size > MAX_GROUP_LINES
    shown = min(len(view.turns), max(4, (width - LABELS) // CELL))
    picture = _groups_listed(view) if many else _grid(view, shown)
    left_out = view.left_out + (0 if many else len(view.turns[shown:]))
    notes = [f"... and {left_out} more steps."] if left_out else []
    if not many:
        notes.append("The same letter at a step is a group; a capital: of several racks.")
        if any(group.lasts > 1 for turn in view.turns for group in turn):
            notes.append("A line: the group lasts several steps, without others meanwhile.")
    return Block(title, picture, *(Text(note, style="dim") for note in notes))


def _grid(view: Groups, shown: int) -> RenderableType:
    cells, slow = _cells(view, shown), view.slow
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    header = "".join(str(step).ljust(CELL) for step in range(shown))
    table.add_row("", Text("step", style="bold"), Text(header, style="bold"))
    for rack, labels in labelled_racks(view.group).items():
        for number, (rank, label) in enumerate(labels.items()):
            table.add_row(
                Text("" if number else rack, style=CONTENDED if rack in slow else ""),
                Text(label, style=CONTENDED if label in slow else ""),
                Text.assemble(*(cells.get((rank, step), ".".ljust(CELL)) for step in range(shown))),
            )
    return table


def _cells(view: Groups, shown: int) -> dict[tuple[int, int], Text]:
    """The letters of the grid, by rank and step."""
    cells: dict[tuple[int, int], Text] = {}
    until: dict[str, int] = {}  # the end of the group of each letter
    for step, turn in enumerate(view.turns[:shown]):
        taken = {letter for letter in until if until[letter] > step}
        free = (letter for letter in ascii_lowercase * 3 if letter not in taken)
        for group in turn:
            letter = next(free, "z")
            until[letter] = step + group.lasts
            style = GROUP_STYLES[kind_of(group)]
            line = letter.upper() if len(group.group.racks) > 1 else letter
            if group.lasts > 1:
                line += "─" * (CELL * group.lasts - 2)
            for rank in group.ranks:
                for more in range(group.lasts):
                    text = line[CELL * more : CELL * (more + 1)].ljust(CELL)
                    cells[rank, step + more] = Text(text, style=style)
    return cells


def _groups_listed(view: Groups) -> RenderableType:
    columns: dict[str, Callable[[tuple[int, tuple[AveragingGroup, ...]]], str]] = {
        ">step": lambda row: str(row[0]),
        "groups": lambda row: "  ".join(map(_braced, row[1])),
    }
    return table_of(enumerate(view.turns), columns)


def _braced(group: AveragingGroup) -> str:
    lasts = f" for {group.lasts} steps" if group.lasts > 1 else ""
    return "{" + ranks_text(group.ranks) + "}" + lasts
