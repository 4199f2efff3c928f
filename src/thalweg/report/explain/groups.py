"""The averaging groups of one period, contended members, and the expected drift of the replicas.

In the picture racks are bands and steps are columns. The members of a group are dots joined by a
line: within a rack, or between racks. A window is a bar from its first step to the step of its
result. Slow members are written in their own colour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import inf, sqrt
from statistics import median
from xml.etree import ElementTree as ET

from thalweg.catalog import Catalog
from thalweg.facts import Rate, Size, Workload, counted, grouped
from thalweg.plan import Plan
from thalweg.predict.mixing import MixingSummary, mixing_of, mixing_summary, uplink_traffic
from thalweg.report.shapes import (
    LANE_NAME_PIXELS,
    RACK_GAP_PIXELS,
    add,
    dot,
    facts,
    lanes,
    legend,
    line,
    text_width,
    tip,
    words,
)
from thalweg.report.tables import fact_lines
from thalweg.schedules import AveragingGroup, ContendedLinks, Group
from thalweg.schedules.shuffle.contended_links import declared
from thalweg.steps import compile_step, cycle

MAX_SHOWN_TURNS = 16
MAX_MIXED_WORKERS = 128  # matrices of more take long
MAX_NAMES_PER_LINE = 6
ONE_VALUE = Workload.of_size(Size.parse("4B"))
COLUMN, HEAD = 44, 44
SLOT, MARGIN = 11, 8  # between lines of one column, and to its left
GROUP_STYLE = """
.inside { stroke: var(--c0); fill: var(--c0); } .between { stroke: var(--c2); fill: var(--c2); }
.window { stroke: var(--c1); fill: var(--c1); } .joins { stroke-width: 2.4; }
.bar { stroke-width: 9; stroke-linecap: round; opacity: 0.45; }
.column { stroke: var(--line); stroke-dasharray: 2 4; }
"""
LEGEND = {
    "inside": "group within a rack",
    "between": "group between racks",
    "window": "group for several steps, without others meanwhile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContendedMember:
    """A rack or a host that is too slow to average with others at every step."""

    kind: str  # rack or host
    name: str
    rate: Rate  # of its uplink or NIC, for one exchange
    usual: Rate
    wanted: int  # steps that a pair needs
    steps: int  # steps that a pair is given

    def __str__(self) -> str:
        """The cause and the remedy, without the name, since several members may share them."""
        link = "uplink" if self.kind == "rack" else "NIC"
        why = f"{link} {self.rate} (median {self.usual})"
        if self.steps == 1:
            return f"{why}; without a window all the same, or not all workers would mix"
        pairs = (
            "one worker at a time with another rack" if self.kind == "rack" else "within the rack"
        )
        less = f" ({self.wanted} would leave some workers alone too long)"
        return (
            f"{why}; averages {pairs}, for {self.steps} steps"
            f"{less if self.steps < self.wanted else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The averaging groups of one period. `turns` are those that begin at its first steps, none if
    neighbours never change; `pairs` is true if racks average two at a time."""

    group: Group
    period: int
    turns: tuple[tuple[AveragingGroup, ...], ...]
    contended: tuple[ContendedMember, ...]
    pairs: bool
    mixing: MixingSummary | None  # None for many workers
    uplink_traffic: float | None  # bytes that leave the busiest rack per step, over the model size

    @property
    def left_out(self) -> int:
        """The number of steps of the period that aren't shown."""
        return self.period - len(self.turns) if self.turns else 0

    @property
    def slow(self) -> set[str]:
        """The names of contended racks, and the labels of the ranks of contended hosts."""
        names = {member.name for member in self.contended}
        ranks = self.group.ranks
        hosts = [rank for rank in ranks if self.group.cluster.host(rank).name in names]
        return names | {rank_label(self.group, rank) for rank in hosts}

    def facts(self) -> list[tuple[str, str]]:
        """Lines of text, each with the name of its kind where a new kind begins."""
        kinds = {} if self.mixing is None else {n: [t] for n, t in _expected(self.mixing).items()}
        if self.uplink_traffic is not None:
            times = f"{self.uplink_traffic:.3g}x the model size"
            kinds["uplinks"] = [f"{times} leaves the busiest rack per step, on average"]
        alike = grouped((str(member), member.name) for member in self.contended)
        kinds["contended"] = [f"{_few(members)}: {text}" for text, members in alike.items()]
        if self.pairs:
            kinds["contended"].append(
                "racks average in pairs by turns: uplinks are too slow for all at once"
            )
        return fact_lines(kinds)


def kind_of(group: AveragingGroup) -> str:
    """The kind of a group, by which it is coloured: a key of `LEGEND`."""
    if group.lasts > 1:
        return "window"
    return "between" if len(group.group.racks) > 1 else "inside"


def rank_label(group: Group, rank: int) -> str:
    return f"rank {rank}, {group.cluster.host(rank).name}"


def labelled_racks(group: Group) -> dict[str, dict[int, str]]:
    """The labels of the ranks of each rack, by its name."""
    return {
        group.cluster.rack(rack[0]).name: {rank: rank_label(group, rank) for rank in rack}
        for rack in group.racks
    }


def _few(members: list[str]) -> str:
    more = len(members) - MAX_NAMES_PER_LINE
    return ", ".join(members[:MAX_NAMES_PER_LINE]) + (f" and {more} more" if more > 0 else "")


def groups_of(plan: Plan, group: Group, catalog: Catalog) -> Groups | None:
    """The averaging groups of a plan; None for plans whose replicas never differ."""
    if not plan.averages_parameters:
        return None
    plain = replace(plan, precision=None)
    topology = catalog.topologies[plan.topology.name]
    small = group.size <= MAX_MIXED_WORKERS
    summary = mixing_summary(mixing_of(plan, group, catalog)) if small else None
    period = cycle(plain, group, catalog) if summary is None else summary.period
    by_turns = topology.groups is not None or not topology.mixes
    shown = range(min(period, MAX_SHOWN_TURNS)) if by_turns else ()
    kept = topology.keeps_apart(group) if topology.keeps_apart is not None else ContendedLinks()
    turns = tuple(
        tuple(
            AveragingGroup(round_.group, chain.lasts)
            for chain in compile_step(plain, group, ONE_VALUE, step, catalog).chains
            for round_ in chain.rounds
        )
        for step in shown
    )
    return Groups(
        group=group,
        period=period,
        turns=turns,
        contended=_apart(group, kept, turns) if topology.keeps_apart is not None else (),
        pairs=kept.pairs,
        mixing=summary,
        uplink_traffic=None if summary is None else uplink_traffic(plan, group, catalog, period),
    )


def _apart(
    group: Group, kept: ContendedLinks, turns: tuple[tuple[AveragingGroup, ...], ...]
) -> tuple[ContendedMember, ...]:
    rates, wanted = declared(group), group.contended
    usual_nic = median(rates.nics.values())
    crossing = {
        name: min(rates.uplinks.get(name, inf), usual_nic)
        for name in (group.cluster.rack(rack[0]).name for rack in group.racks)
    }
    usual_crossing, given = median(crossing.values()), dict(kept.racks)
    racks = [
        ContendedMember(
            kind="rack",
            name=name,
            rate=Rate(8 * crossing[name]),
            usual=Rate(8 * max(usual_crossing, usual_nic * (crossing[name] >= usual_crossing))),
            wanted=steps,
            steps=given.get(name, 1),
        )
        for name, steps in wanted.racks
    ]
    hosts = [
        ContendedMember(
            kind="host",
            name=name,
            rate=Rate(8 * rates.nics[name]),
            usual=Rate(8 * usual_nic),
            wanted=steps,
            steps=_longest(group, name, turns),
        )
        for name, steps in wanted.hosts
    ]
    return (*racks, *hosts)


def _longest(group: Group, host: str, turns: tuple[tuple[AveragingGroup, ...], ...]) -> int:
    """The longest window of a host; in a small rack it may be shorter than wanted."""
    return max(
        (
            each.lasts
            for turn in turns
            for each in turn
            if any(group.cluster.host(rank).name == host for rank in each.ranks)
        ),
        default=1,
    )


def _expected(summary: MixingSummary) -> dict[str, str]:
    if not summary.connected:
        return {
            "connected": "no: some workers never mix, and their replicas drift apart without bound"
        }
    steps = counted(summary.period, "step")
    part = (
        f", of which the first {summary.looked_at} are"
        if summary.looked_at < summary.period
        else ""
    )
    pause = summary.longest_pause
    return {
        "connected": "yes: every update reaches all workers",
        "contraction": _contraction(summary),
        "spectral gap": f"{summary.gap:.3f} over {steps}{part}; by singular values "
        f"{summary.sigma_gap:.3f}",
        "expected drift": f"{sqrt(summary.drift):.2f} of one step's noise (variance "
        f"{summary.drift:.2f}); before averaging {sqrt(summary.drift_before):.2f} "
        f"({summary.drift_before:.2f})",
        "longest pause": "no groups"
        if pause is None
        else f"{counted(pause, 'step')} between two groups of a worker",
    }


def _contraction(summary: MixingSummary) -> str:
    if summary.contraction < 1e-6:
        return f"replicas are equal after {counted(summary.steps_to_little or 0, 'step')}"
    return (
        f"factor {summary.contraction:.3f} per step on the difference of replicas; a thousandth is "
        f"left after {summary.steps_to_little} steps"
    )


def draw_groups(parent: ET.Element, view: Groups, top: int) -> int:
    """Draw the groups, with the facts below them; returns the end of the picture."""
    add(parent, "style", GROUP_STYLE)
    bottom = _draw_turns(parent, view, top) if view.turns else top
    return facts(parent, bottom, view.facts())


def _draw_turns(parent: ET.Element, view: Groups, top: int) -> int:
    steps, slow, racks = len(view.turns), view.slow, labelled_racks(view.group)
    words(parent, 16, top + 18, "Averaging groups of one period")
    if view.left_out:
        words(parent, 220, top + 18, f"the first {steps} of {view.period} steps", "faint")
    rows = {rank: row for row, rank in enumerate(view.group.order)}
    columns = [list(_slots(turn, rows)) for turn in view.turns]
    slots = max((slot for column in columns for slot, _ in column), default=0)
    labels = [label for ranks in racks.values() for label in ranks.values()]
    left = LANE_NAME_PIXELS + max(map(text_width, labels)) + 22
    xs = [left + max(COLUMN, 2 * MARGIN + SLOT * (1 + slots)) * step for step in range(steps + 1)]
    middles, y = lanes(parent, racks, top + HEAD + 4, xs[-1], slow)
    words(parent, left - 34, top + HEAD - 4, "step", "faint")
    for step, (x, column) in enumerate(zip(xs, columns, strict=False)):
        line(parent, x - 2, top + HEAD + 4, x - 2, y - RACK_GAP_PIXELS, "column")
        words(parent, x + MARGIN - 3, top + HEAD - 4, str(step), "faint")
        for slot, group in column:
            until = min(step + group.lasts, steps)
            heights = sorted(middles[rank] for rank in group.ranks)
            drawn = _draw_group(
                parent, kind_of(group), heights, x + MARGIN + SLOT * slot, xs[until] - 10
            )
            last = step + group.lasts - 1
            when = f"step {step}" if last == step else f"steps {step} to {last}"
            tip(drawn, f"{when}: ranks {' '.join(map(str, group.ranks))}")
    there = {kind_of(group) for turn in view.turns for group in turn}
    entries = [(f"joins {kind}", meaning) for kind, meaning in LEGEND.items() if kind in there]
    legend(parent, y + 24, entries)
    return y + 32


def _draw_group(
    parent: ET.Element, kind: str, heights: list[int], x: int, until: int
) -> ET.Element:
    drawn = add(parent, "g", name=kind)
    line(drawn, x, heights[0], x, heights[-1], "joins")
    for y in heights:
        if kind == "window":
            line(drawn, x, y, until, y, "bar")
        dot(drawn, x, y, 4, "")
    return drawn


def _slots(
    turn: tuple[AveragingGroup, ...], rows: Mapping[int, int]
) -> Iterator[tuple[int, AveragingGroup]]:
    """The lines of one column, side by side where they would overlap, the longest last."""
    taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    spans = [(sorted(rows[rank] for rank in group.ranks), group) for group in turn]
    for (low, *_, high), group in sorted(spans, key=lambda span: span[0][-1] - span[0][0]):
        slot = next(n for n in count() if all(high < a or low > b for a, b in taken[n]))
        taken[slot].append((low, high))
        yield slot, group
