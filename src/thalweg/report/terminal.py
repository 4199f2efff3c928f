"""An explanation as a terminal shows it: moves beat by beat, and tables of what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group as Block
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from thalweg.catalog import Guarantee
from thalweg.facts import Workload, about
from thalweg.plan import Plan
from thalweg.report.coded_terminal import coded_tree
from thalweg.report.explanation import MOST_WORKERS_DRAWN, Explanation, Scene, among, first_step
from thalweg.report.groups_terminal import groups_facts, groups_table
from thalweg.report.mailbox import Mailbox
from thalweg.schedules import Arrow, Group, Kind, Message

SIGNS = {Kind.ADD: "+", Kind.COPY: "=", Kind.QUORUM: "*"}
STYLES = {Kind.ADD: "blue", Kind.COPY: "green", Kind.QUORUM: "yellow"}
MOST_ROUNDS = 40  # rows of their table
BEAT_WIDTH, CELL_WIDTH = 6, 9
FEW = 16  # ranks that still get a column or a row of their own


def render(explanation: Explanation, most_beats: int, width: int) -> Iterator[RenderableType]:
    """What follows the heading, top to bottom; at most so many beats of each drawing."""
    if explanation.groups is not None:
        if explanation.groups.turns:
            yield groups_table(explanation.groups, width)
        yield groups_facts(explanation.groups)
    if explanation.coded is not None:
        yield coded_tree(explanation.coded)
    if explanation.mailbox is not None:
        yield _story(explanation.mailbox)
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


def heading(
    plan: Plan, guarantee: Guarantee, group: Group, workload: Workload, step: int
) -> RenderableType:
    """The five choices that a plan stands for, and what it promises."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_row("plan", f"{plan}   ({among(group)}, {about(workload.nbytes, 'B')}, step {step})")
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
    if group.cluster.assumed:
        assumed = " and ".join(group.cluster.assumed)
        grid.add_row("assumed", f"{assumed} (say yours with --cluster)")
    return grid


def _story(found: Mailbox) -> RenderableType:
    title = Text("\nWho sends what to whom", style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for name, text in found.story:
        grid.add_row(name, text)
    return Block(title, grid)


def _drawing(scene: Scene, most_beats: int, width: int) -> RenderableType:
    title = Text(f"\n{scene.title}", style="bold")
    ranks = [rank for rack in scene.seats for rank in rack]
    shown = scene.beats[:most_beats] if most_beats else scene.beats
    few = len(ranks) <= FEW and BEAT_WIDTH + CELL_WIDTH * len(ranks) <= width
    picture = _columns(scene, shown) if few else _lines(shown)
    notes = [
        "What each rank receives: +3<0 adds chunk 3 from rank 0, = copies, * decodes."
        if few
        else "0>1:+3 is chunk 3 from rank 0 to rank 1, which adds it; = copies, * decodes."
    ]
    left = len(scene.beats) - len(shown)
    if left:
        notes.insert(0, f"... {left} more beats (--beats 0 shows all).")
    return Block(title, picture, Text("\n".join(notes), style="dim"))


def _columns(scene: Scene, shown: tuple[tuple[Arrow, ...], ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("beat", justify="right")
    for number, rack in enumerate(scene.seats):
        for rank in rack:
            tint = "" if number % 2 == 0 else "cyan"
            table.add_column(Text(f"rank {rank}", style=tint), justify="center", no_wrap=True)
    for beat, arrows in enumerate(shown, start=1):
        cells = {arrow.message.target: _cell(arrow) for arrow in arrows}
        row = [cells.get(rank, Text(".", style="dim")) for rack in scene.seats for rank in rack]
        table.add_row(str(beat), *row)
    return table


def _lines(shown: tuple[tuple[Arrow, ...], ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 1))
    table.add_column("beat", justify="right")
    table.add_column("messages")
    for beat, arrows in enumerate(shown, start=1):
        parts = [_way(arrow.message, arrow.kind) for arrow in arrows[:FEW]]
        more = f"  and {len(arrows) - FEW} more" if len(arrows) > FEW else ""
        table.add_row(str(beat), "  ".join(parts) + more)
    return table


def _cell(arrow: Arrow) -> Text:
    text = f"{SIGNS[arrow.kind]}{_span(arrow.message)}<{arrow.message.source}"
    return Text(text, style=STYLES[arrow.kind])


def _way(message: Message, kind: Kind) -> str:
    return f"{message.source}>{message.target}:{SIGNS[kind]}{_span(message)}"


def _span(message: Message) -> str:
    last = message.stop - 1
    return str(message.start) if last == message.start else f"{message.start}-{last}"


def _rounds(explanation: Explanation) -> RenderableType:
    table = Table(
        title="Rounds of this step", title_justify="left", caption_justify="left", box=None
    )
    table.add_column("bucket", justify="right")
    table.add_column("payload")
    table.add_column("schedule")
    table.add_column("groups")
    for heading in ("bytes", "chunks", "sequential moves", "beats"):
        table.add_column(heading, justify="right")
    if len(explanation.scenes) > MOST_ROUNDS:
        table.caption = f"The first {MOST_ROUNDS} of {len(explanation.scenes)}."
    for scene in explanation.scenes[:MOST_ROUNDS]:
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
            "?" if scene.sequential_moves is None else str(len(scene.beats)),
        )
    return Block("", table)


def _ranks(explanation: Explanation) -> RenderableType:
    traffic, data = explanation.traffic, max(explanation.workload.nbytes, 1)
    table = Table(title="Bytes per rank", title_justify="left", caption_justify="left", box=None)
    for heading in ("rank", "host", "rack"):
        table.add_column(heading)
    for heading in ("sends", "of the data", "receives", "of the data", "messages"):
        table.add_column(heading, justify="right")
    order = list(explanation.group.order)
    if len(order) > FEW:
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
    table = Table(title="Bytes per link", title_justify="left", caption_justify="left", box=None)
    table.add_column("link")
    for heading in ("bytes", "of the data", "rate", "at least"):
        table.add_column(heading, justify="right")
    for link in [*sorted(uplinks[:FEW]), *nics[:2]]:
        nbytes, rate = traffic.links[link], rates.get(link)
        table.add_row(
            str(link),
            about(nbytes, "B"),
            f"{nbytes / max(explanation.workload.nbytes, 1):.3g}x",
            str(rate) if rate else "no limit",
            about(rate.seconds(nbytes), "s") if rate else "",
        )
    left_out = [f"{len(nics)} NIC directions"] if len(nics) > 2 else []
    left_out += [f"{len(uplinks)} uplink directions"] if len(uplinks) > FEW else []
    if left_out:
        table.caption = f"The busiest of {' and of '.join(left_out)}."
    return Block("", table)


def _closing(explanation: Explanation) -> RenderableType:
    promises = dict.fromkeys(s.rounds[0].schedule.after.text for s in explanation.scenes)
    lines = ["", f"Checked: {', then '.join(promises)}."]
    if explanation.mailbox is not None:
        lines[1:] = [
            "Bytes are those of one step of every worker. There are no common rounds to check."
        ]
    elif explanation.sequential_moves is None:
        lines.append(f"Moves are drawn and counted for up to {MOST_WORKERS_DRAWN} workers.")
    else:
        lines.append(
            f"{explanation.sequential_moves} sequential moves: the longest way of a chunk, whose "
            "every move waits for the one before.\n"
            f"{sum(len(scene.beats) for scene in explanation.scenes)} beats: in each, everybody "
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
    if len(ranks) <= FEW:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
