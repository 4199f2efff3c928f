"""An explanation as a terminal shows it: moves beat by beat, and tables of what they cost.

Groups over one period have a line for each worker and a column for each step. In a column, those
with the same letter meet: a capital between racks, a small one inside a rack. A letter that lasts
several steps is followed by a line until the result is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_lowercase

from rich.console import Group as Block
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from thalweg.catalog import Guarantee
from thalweg.facts import Workload, about
from thalweg.plan import Plan
from thalweg.report.explain.async_plan import AsyncPlanView
from thalweg.report.explain.coded_plan_terminal import coded_tree
from thalweg.report.explain.groups import Groups
from thalweg.report.explain.step_view import (
    MAX_DRAWN_WORKERS,
    Explanation,
    Scene,
    first_step,
    members_text,
)
from thalweg.report.tables import named, table_of
from thalweg.schedules import Arrow, AveragingGroup, Group, Message, MoveKind

SIGNS = {MoveKind.ADD: "+", MoveKind.COPY: "=", MoveKind.QUORUM: "*"}
STYLES = {MoveKind.ADD: "blue", MoveKind.COPY: "green", MoveKind.QUORUM: "yellow"}
MAX_ROUND_ROWS = 40  # rows of their table
BEAT_WIDTH, CELL_WIDTH = 6, 9
MAX_RANK_COLUMNS = 16  # ranks that still get a column or a row of their own
MAX_GROUP_LINES = 64
CELL, LABELS = 3, 30  # characters
BETWEEN, INSIDE, LASTING = "bold yellow", "blue", "magenta"


def render(explanation: Explanation, most_beats: int, width: int) -> Iterator[RenderableType]:
    """What follows the heading, top to bottom; at most so many beats of each drawing."""
    if explanation.groups is not None:
        if explanation.groups.turns:
            yield groups_table(explanation.groups, width)
        yield Block("", named(explanation.groups.facts()))
    if explanation.coded is not None:
        yield coded_tree(explanation.coded)
    if explanation.async_plan is not None:
        yield _story(explanation.async_plan)
        yield _ranks(explanation)
        yield _links(explanation)
        yield _closing(explanation)
        return
    if not explanation.scenes:
        usual = first_step(explanation.plan)
        yield Text(f"\nNothing travels at step {explanation.step}; try --step {usual}.")
        return
    first = [scene for scene in explanation.scenes if scene.rounds[0].bucket == 0]
    for scene in first:
        if scene.sequential_moves is not None:
            yield _drawing(scene, most_beats, width)
    if len(first) < len(explanation.scenes):
        yield Text("\nThe other buckets likewise.")
    yield _rounds(explanation)
    yield _ranks(explanation)
    yield _links(explanation)
    yield _closing(explanation)


def plan_title(
    plan: Plan, guarantee: Guarantee, group: Group, workload: Workload, step: int
) -> RenderableType:
    """The five choices that a plan stands for, and what it promises."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_row(
        "plan", f"{plan}   ({members_text(group)}, {about(workload.nbytes, 'B')}, step {step})"
    )
    choices = [
        f"topology {plan.topology}",
        f"averages {plan.what.value}",
        str(plan.cadence),
        f"redundancy {plan.redundancy or 'none'}",
        f"precision {plan.precision or 'none'}",
    ]
    grid.add_row("choices", " | ".join(choices))
    grid.add_row("promise", f"{guarantee.promise.value}: {guarantee.result}")
    grid.add_row("if one is late", guarantee.late)
    grid.add_row("if one is dead", guarantee.dead)
    if not guarantee.protected:
        grid.add_row("traffic", "torch's own connections: neither authenticated nor encrypted")
    if group.cluster.assumed:
        assumed = " and ".join(group.cluster.assumed)
        grid.add_row("assumed", f"{assumed} (say yours with --cluster)")
    return grid


def _story(found: AsyncPlanView) -> RenderableType:
    title = Text("\nWho sends what to whom", style="bold")
    return Block(title, named(found.story))


def _drawing(scene: Scene, most_beats: int, width: int) -> RenderableType:
    title = Text(f"\n{scene.title}", style="bold")
    ranks = [rank for rack in scene.ranks_by_rack for rank in rack]
    shown = scene.slots[:most_beats] if most_beats else scene.slots
    few = len(ranks) <= MAX_RANK_COLUMNS and BEAT_WIDTH + CELL_WIDTH * len(ranks) <= width
    picture = _columns(scene, shown) if few else _lines(shown)
    notes = [
        "What each rank receives: +3<0 adds chunk 3 from rank 0, = copies, * decodes."
        if few
        else "0>1:+3 is chunk 3 from rank 0 to rank 1, which adds it; = copies, * decodes."
    ]
    left = len(scene.slots) - len(shown)
    if left:
        notes.insert(0, f"... {left} more beats (--beats 0 shows all).")
    return Block(title, picture, Text("\n".join(notes), style="dim"))


def _columns(scene: Scene, shown: tuple[tuple[Arrow, ...], ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("beat", justify="right")
    for number, rack in enumerate(scene.ranks_by_rack):
        for rank in rack:
            tint = "" if number % 2 == 0 else "cyan"
            table.add_column(Text(f"rank {rank}", style=tint), justify="center", no_wrap=True)
    for beat, arrows in enumerate(shown, start=1):
        cells = {arrow.message.target: _cell(arrow) for arrow in arrows}
        row = [
            cells.get(rank, Text(".", style="dim")) for rack in scene.ranks_by_rack for rank in rack
        ]
        table.add_row(str(beat), *row)
    return table


def _lines(shown: tuple[tuple[Arrow, ...], ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 1))
    table.add_column("beat", justify="right")
    table.add_column("messages")
    for beat, arrows in enumerate(shown, start=1):
        parts = [_way(arrow.message, arrow.kind) for arrow in arrows[:MAX_RANK_COLUMNS]]
        more = (
            f"  and {len(arrows) - MAX_RANK_COLUMNS} more" if len(arrows) > MAX_RANK_COLUMNS else ""
        )
        table.add_row(str(beat), "  ".join(parts) + more)
    return table


def _cell(arrow: Arrow) -> Text:
    text = f"{SIGNS[arrow.kind]}{_span(arrow.message)}<{arrow.message.source}"
    return Text(text, style=STYLES[arrow.kind])


def _way(message: Message, kind: MoveKind) -> str:
    return f"{message.source}>{message.target}:{SIGNS[kind]}{_span(message)}"


def _span(message: Message) -> str:
    last = message.stop - 1
    return str(message.start) if last == message.start else f"{message.start}-{last}"


def _rounds(explanation: Explanation) -> RenderableType:
    figures = (">bytes", ">chunks", ">sequential moves", ">beats")
    exchanges = (">bucket", "payload", "schedule", "groups")
    table = table_of(*exchanges, *figures, title="Rounds of this step")
    if len(explanation.scenes) > MAX_ROUND_ROWS:
        table.caption = f"The first {MAX_ROUND_ROWS} of {len(explanation.scenes)}."
    for scene in explanation.scenes[:MAX_ROUND_ROWS]:
        first = scene.rounds[0]
        groups = [round_.group.order for round_ in scene.rounds]
        table.add_row(
            str(first.bucket),
            first.payload.name,
            first.schedule.name,
            "  ".join("{" + _listed(ranks) + "}" for ranks in groups[:4])
            + (f"  and {len(groups) - 4} more" if len(groups) > 4 else ""),
            about(first.payload.nbytes, "B"),
            str(len(first.schedule.sizes)),
            "?" if scene.sequential_moves is None else str(scene.sequential_moves),
            "?" if scene.sequential_moves is None else str(len(scene.slots)),
        )
    return Block("", table)


def _ranks(explanation: Explanation) -> RenderableType:
    traffic, data = explanation.traffic, max(explanation.workload.nbytes, 1)
    figures = (">sends", ">of the data", ">receives", ">of the data", ">messages")
    table = table_of("rank", "host", "rack", *figures, title="Bytes per rank")
    order = list(explanation.group.order)
    if len(order) > MAX_RANK_COLUMNS:
        order = sorted(order, key=lambda rank: (-traffic.sent.get(rank, 0), rank))
        order = [*order[:3], *order[-3:]]
        table.caption = (
            f"The three that send most and the three that send least, of {explanation.group.size}."
        )
    for rank in order:
        sent, received = traffic.sent.get(rank, 0), traffic.received.get(rank, 0)
        table.add_row(
            str(rank),
            explanation.group.cluster.host(rank).name,
            explanation.group.cluster.rack(rank).name,
            about(sent, "B"),
            f"{sent / data:.3g}x",
            about(received, "B"),
            f"{received / data:.3g}x",
            str(traffic.messages.get(rank, 0)),
        )
    return Block("", table)


def _links(explanation: Explanation) -> RenderableType:
    traffic, rates = explanation.traffic, explanation.group.cluster.rates()
    by_bytes = sorted(traffic.links, key=lambda link: -traffic.links[link])
    uplinks = [link for link in by_bytes if link.kind == "uplink"]
    nics = [link for link in by_bytes if link.kind == "nic"]
    figures = (">bytes", ">of the data", ">rate", ">at least")
    table = table_of("link", *figures, title="Bytes per link")
    for link in [*sorted(uplinks[:MAX_RANK_COLUMNS]), *nics[:2]]:
        nbytes, rate = traffic.links[link], rates.get(link)
        table.add_row(
            str(link),
            about(nbytes, "B"),
            f"{nbytes / max(explanation.workload.nbytes, 1):.3g}x",
            str(rate) if rate else "no limit",
            about(rate.seconds(nbytes), "s") if rate else "",
        )
    left_out = [f"{len(nics)} NIC directions"] if len(nics) > 2 else []
    left_out += [f"{len(uplinks)} uplink directions"] if len(uplinks) > MAX_RANK_COLUMNS else []
    if left_out:
        table.caption = f"The busiest of {' and of '.join(left_out)}."
    return Block("", table)


def _closing(explanation: Explanation) -> RenderableType:
    promises = dict.fromkeys(s.rounds[0].schedule.after.text for s in explanation.scenes)
    lines = ["", f"Checked: {', then '.join(promises)}."]
    if explanation.async_plan is not None:
        lines[1:] = [
            "Bytes are those of one step of every worker. There are no common rounds to check."
        ]
    elif explanation.sequential_moves is None:
        lines.append(f"Moves are drawn and counted for up to {MAX_DRAWN_WORKERS} workers.")
    else:
        lines.append(
            f"{explanation.sequential_moves} sequential moves: the longest way of a chunk, whose "
            "every move waits for the one before.\n"
            f"{sum(len(scene.slots) for scene in explanation.scenes)} beats: in each, everybody "
            "sends at most one message and receives at most one."
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


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= MAX_RANK_COLUMNS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def groups_table(view: Groups, width: int) -> RenderableType:
    title = Text("\nWho meets, over one period", style="bold")
    many = view.group.size > MAX_GROUP_LINES
    shown = min(len(view.turns), max(4, (width - LABELS) // CELL))
    picture = _groups_listed(view) if many else _grid(view, shown)
    left_out = view.left_out + (0 if many else len(view.turns[shown:]))
    notes = [f"... and {left_out} more steps."] if left_out else []
    if not many:
        notes.append("Those with the same letter at a step meet; a capital: of several racks.")
        if any(averaging_group.lasts > 1 for turn in view.turns for averaging_group in turn):
            notes.append("A line: it takes so many steps, and they meet nobody else meanwhile.")
    return Block(title, picture, *(Text(note, style="dim") for note in notes))


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
    for step, averaging_groups in enumerate(view.turns[:shown]):
        for letter, averaging_group in _lettered(
            view, averaging_groups, {x for x in until if until[x] > step}
        ):
            until[letter.lower()] = step + averaging_group.lasts
            between = letter.isupper()
            style = LASTING if averaging_group.lasts > 1 else BETWEEN if between else INSIDE
            line = letter + "─" * (CELL * averaging_group.lasts - 2) + " "
            for rank in averaging_group.ranks:
                for more in range(averaging_group.lasts):
                    part = line if averaging_group.lasts > 1 else letter
                    text = part[CELL * more : CELL * (more + 1)].ljust(CELL)
                    cells[rank, step + more] = Text(text, style=style)
    return cells


def _lettered(
    view: Groups, averaging_groups: tuple[AveragingGroup, ...], taken: set[str]
) -> Iterator[tuple[str, AveragingGroup]]:
    free = (letter for letter in ascii_lowercase * 3 if letter not in taken)
    for averaging_group in averaging_groups:
        several = len(view.group.subgroup(averaging_group.ranks).racks) > 1
        letter = next(free, "z")
        yield letter.upper() if several else letter, averaging_group


def _groups_listed(view: Groups) -> RenderableType:
    table = table_of(">step", "groups")
    for step, averaging_groups in enumerate(view.turns):
        table.add_row(str(step), "  ".join(map(_braced, averaging_groups)))
    return table


def _braced(averaging_group: AveragingGroup) -> str:
    lasts = f" for {averaging_group.lasts} steps" if averaging_group.lasts > 1 else ""
    return "{" + _listed(averaging_group.ranks) + "}" + lasts
