"""Who meets whom over one period, what is kept apart and why, what to expect of the replicas.

In the picture racks are bands and steps are columns. Those who meet are dots joined by a line:
within a rack, or between racks. A window is a bar from the step at which it begins to the one at
which its result is there. What is slow is written in its colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import inf, sqrt
from statistics import median
from xml.etree import ElementTree as ET

from thalweg.catalog import Catalog
from thalweg.facts import Rate, Size, Workload
from thalweg.plan import Plan
from thalweg.predict.mixing import MixingSummary, mixing_summary, uplink_traffic
from thalweg.report.shapes import line, tip, words
from thalweg.schedules import AveragingGroup, ContendedLinks, Group
from thalweg.schedules.shuffle.contended_links import declared
from thalweg.steps import compile_rounds, cycle

MAX_SHOWN_TURNS = 16
MAX_MIXED_WORKERS = 128  # for more, matrices take long
MAX_NAMES_PER_LINE = 6  # in a line
ONE_VALUE = Workload.of_size(Size.parse("4B"))
NAMES, COLUMN, LANE, GAP, HEAD, FACT = 74, 44, 20, 12, 44, 18
SLOT, MARGIN = 11, 8  # between lines of one column, and to its left
GROUP_CHARACTER_PIXELS = 6.4  # width of a letter, about
GROUP_STYLE = """
.inside { stroke: #54aeff; fill: #54aeff; } .between { stroke: #1a7f37; fill: #1a7f37; }
.window { stroke: #bc4c00; fill: #bc4c00; }
.joins { stroke-width: 2.4; } .bar { stroke-width: 9; stroke-linecap: round; opacity: 0.45; }
.slow { fill: #bc4c00; font-weight: 600; } .column { stroke: #d0d7de; stroke-dasharray: 2 4; }
@media (prefers-color-scheme: dark) {
.inside { stroke: #388bfd; fill: #388bfd; } .between { stroke: #3fb950; fill: #3fb950; }
.window { stroke: #f0883e; fill: #f0883e; } .slow { fill: #f0883e; } .column { stroke: #30363d; }
}
"""
LEGEND = (
    ("inside", "meet within a rack"),
    ("between", "meet between racks"),
    ("window", "meet for several steps, and nobody else meanwhile"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContendedMember:
    """A rack or a host that is too slow to meet the others at every step."""

    kind: str  # rack or host
    name: str
    rate: Rate  # of its uplink or NIC, for one exchange
    usual: Rate
    wanted: int  # how many steps it needs for a pair
    steps: int  # how many it is given

    def __str__(self) -> str:
        """Why, and what is done about it; without its name, which others may share it with."""
        why = f"{'uplink' if self.kind == 'rack' else 'NIC'} {self.rate}, usual is {self.usual}"
        if self.steps == 1:
            return f"{why}; not kept apart all the same, or not everybody would mix"
        with_whom = "one of another rack" if self.kind == "rack" else "others of the rack"
        who = "one worker meets" if self.kind == "rack" else "meets"
        met = f"{who} {with_whom} by turns, {self.steps} steps each"
        less = f" ({self.wanted} would leave some alone too long)"
        return f"{why}; {met}{less if self.steps < self.wanted else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`turns`: the meetings that begin at the first steps of a period; none if it is always the
    same neighbours. `pairs`: racks don't meet all at once."""

    group: Group
    period: int
    turns: tuple[tuple[AveragingGroup, ...], ...]
    contended: tuple[ContendedMember, ...]
    pairs: bool
    mixing: MixingSummary | None  # None for many workers
    uplink_traffic: float | None  # bytes that leave the busiest rack a step, in units of the model

    @property
    def left_out(self) -> int:
        """Steps of the period that aren't shown."""
        return self.period - len(self.turns) if self.turns else 0

    def is_slow(self, kind: str, name: str) -> bool:
        return any((each.kind, each.name) == (kind, name) for each in self.contended)

    def facts(self) -> list[tuple[str, str]]:
        """A line each, and the name of the first of its kind."""
        lines = [] if self.mixing is None else _expected(self.mixing)
        if self.uplink_traffic is not None:
            busiest = (
                f"{self.uplink_traffic:.3g}x the model leaves the busiest rack a step, on average"
            )
            lines.append(("uplinks", busiest))
        alike: dict[str, list[str]] = {}
        for each in self.contended:
            alike.setdefault(str(each), []).append(each.name)
        kept = [f"{_few(members)}: {text}" for text, members in alike.items()]
        if self.pairs:
            kept.append("racks meet in pairs by turns: uplinks are too slow for all at once")
        names = ["kept apart", *[""] * len(kept)]
        return [*lines, *zip(names, kept, strict=False)]


def _few(members: list[str]) -> str:
    more = len(members) - MAX_NAMES_PER_LINE
    return ", ".join(members[:MAX_NAMES_PER_LINE]) + (f" and {more} more" if more > 0 else "")


def groups_of(plan: Plan, group: Group, catalog: Catalog) -> Groups | None:
    """None for plans whose replicas never differ."""
    if not plan.averages_parameters:
        return None
    plain = replace(plan, precision=None)
    topology = catalog.topologies[plan.topology.name]
    found = mixing_summary(plan, group, catalog) if group.size <= MAX_MIXED_WORKERS else None
    period = cycle(plain, group, catalog) if found is None else found.period
    by_turns = topology.groups is not None or not topology.mixes
    shown = range(min(period, MAX_SHOWN_TURNS)) if by_turns else ()
    kept = topology.keeps_apart(group) if topology.keeps_apart is not None else ContendedLinks()
    turns = tuple(
        tuple(
            AveragingGroup(round_.group, round_.lasts)
            for round_ in compile_rounds(plain, group, ONE_VALUE, step, catalog)
        )
        for step in shown
    )
    return Groups(
        group=group,
        period=period,
        turns=turns,
        contended=_apart(group, kept, turns) if topology.keeps_apart is not None else (),
        pairs=kept.pairs,
        mixing=found,
        uplink_traffic=None if found is None else uplink_traffic(plan, group, catalog, period),
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
    """The longest window of a host; in a small rack it may be shorter than it was to be."""
    return max(
        (
            averaging_group.lasts
            for averaging_groups in turns
            for averaging_group in averaging_groups
            if any(group.cluster.host(rank).name == host for rank in averaging_group.ranks)
        ),
        default=1,
    )


def _expected(found: MixingSummary) -> list[tuple[str, str]]:
    if not found.connected:
        return [("connected", "no: some never hear of some others, and drift apart without end")]
    steps = f"{found.period} steps" if found.period > 1 else "1 step"
    part = f", of which the first {found.looked_at} are" if found.looked_at < found.period else ""
    pause = found.longest_pause
    return [
        ("connected", "yes: what one learns reaches everybody"),
        ("contraction", _contraction(found)),
        ("spectral gap", f"{found.gap:.3f} over {steps}{part}; by singular values "
         f"{found.sigma_gap:.3f}"),
        (
            "expected drift",
            f"{sqrt(found.drift):.2f} of one step's noise (variance {found.drift:.2f}); before "
            f"averaging {sqrt(found.drift_before):.2f} ({found.drift_before:.2f})",
        ),
        ("longest pause", "nobody to meet" if pause is None else f"{pause} "
         f"{'step' if pause == 1 else 'steps'} from a worker's meeting to its next"),
    ]  # fmt: skip


def _contraction(found: MixingSummary) -> str:
    if found.contraction < 1e-6:
        after = found.steps_to_little
        return f"replicas are equal after {after} {'step' if after == 1 else 'steps'}"
    return (
        f"a step leaves {found.contraction:.3f} of what replicas differ by; a thousandth is left "
        f"after {found.steps_to_little} steps"
    )


@dataclass(frozen=True, slots=True)
class GroupsPicture:
    view: Groups

    @property
    def width(self) -> int:
        facts = max((len(text) for _, text in self.view.facts()), default=0)
        legend = 40 + sum(54 + round(GROUP_CHARACTER_PIXELS * len(text)) for _, text in LEGEND)
        columns = self._x(len(self.view.turns)) + 24
        return max(
            columns, 140 + round(GROUP_CHARACTER_PIXELS * facts), legend if self.view.turns else 0
        )

    @property
    def height(self) -> int:
        return self._table + FACT * len(self.view.facts()) + 16

    @property
    def _table(self) -> int:
        if not self.view.turns:
            return 8
        group = self.view.group
        return HEAD + LANE * group.size + GAP * len(group.racks) + 44

    def _x(self, step: int) -> int:
        """Where the column of a step begins."""
        group = self.view.group
        names = max(len(_name(self.view, rank)) for rank in group.ranks)
        seats = {rank: seat for seat, rank in enumerate(group.order)}
        slots = [slot for turn in self.view.turns for slot, _ in _slots(turn, seats)]
        column = max(COLUMN, 2 * MARGIN + SLOT * (1 + max(slots, default=0)))
        return NAMES + round(GROUP_CHARACTER_PIXELS * names) + 22 + column * step

    def draw(self, parent: ET.Element, top: int) -> None:
        ET.SubElement(parent, "style").text = GROUP_STYLE
        if self.view.turns:
            lanes = self._bands(parent, top)
            ends = [self._x(step) for step in range(len(self.view.turns) + 1)]
            for step, averaging_groups in enumerate(self.view.turns):
                for slot, averaging_group in _slots(averaging_groups, lanes):
                    x = ends[step] + MARGIN + SLOT * slot
                    until = ends[min(step + averaging_group.lasts, len(ends) - 1)]
                    drawn = self._draw_group(parent, averaging_group, lanes, x, until)
                    tip(drawn, _tip(step, averaging_group))
            self._legend(parent, top + self._table - 16)
        for number, (name, text) in enumerate(self.view.facts(), start=1):
            y = top + self._table + FACT * number - 8
            words(parent, 16, y, name, "faint")
            words(parent, 116, y, text)

    def _bands(self, parent: ET.Element, top: int) -> dict[int, int]:
        """Where the lane of each rank is."""
        steps, group = len(self.view.turns), self.view.group
        words(parent, 16, top + 18, "Who meets, over one period")
        if self.view.left_out:
            more = f"the first {steps} of {self.view.period} steps"
            words(parent, 16 + round(GROUP_CHARACTER_PIXELS * 28), top + 18, more, "faint")
        left = self._x(0)
        words(parent, left - 34, top + HEAD - 4, "step", "faint")
        lanes: dict[int, int] = {}
        y = top + HEAD + 4
        first = y
        for rack in group.racks:
            size = {"width": str(self._x(steps)), "height": str(LANE * len(rack))}
            ET.SubElement(parent, "rect", {"class": "rack", "x": "8", "y": str(y), **size})
            name = group.cluster.rack(rack[0]).name
            words(parent, 14, y + 15, name, "slow" if self.view.is_slow("rack", name) else "faint")
            for rank in rack:
                lanes[rank] = y + LANE // 2
                host = group.cluster.host(rank).name
                tint = "slow" if self.view.is_slow("host", host) else ""
                words(parent, NAMES, y + 15, _name(self.view, rank), tint)
                y += LANE
            y += GAP
        for step in range(steps):
            x = self._x(step)
            line(parent, x - 2, first, x - 2, y - GAP, "column")
            words(parent, x + MARGIN - 3, top + HEAD - 4, str(step), "faint")
        return lanes

    def _draw_group(
        self,
        parent: ET.Element,
        averaging_group: AveragingGroup,
        lanes: dict[int, int],
        x: int,
        until: int,
    ) -> ET.Element:
        heights = sorted(lanes[rank] for rank in averaging_group.ranks)
        drawn = ET.SubElement(parent, "g", {"class": self._kind(averaging_group)})
        line(drawn, x, heights[0], x, heights[-1], "joins")
        for y in heights:
            if averaging_group.lasts > 1:
                line(drawn, x, y, until - 10, y, "bar")
            ET.SubElement(drawn, "circle", {"cx": str(x), "cy": str(y), "r": "4"})
        return drawn

    def _kind(self, averaging_group: AveragingGroup) -> str:
        if averaging_group.lasts > 1:
            return "window"
        return (
            "between"
            if len(self.view.group.subgroup(averaging_group.ranks).racks) > 1
            else "inside"
        )

    def _legend(self, parent: ET.Element, y: int) -> None:
        x = 20
        there = {
            self._kind(averaging_group) for turn in self.view.turns for averaging_group in turn
        }
        for kind, meaning in LEGEND:
            if kind not in there:
                continue
            shown = ET.SubElement(parent, "g", {"class": kind})
            line(shown, x, y - 4, x + 18, y - 4, "bar" if kind == "window" else "joins")
            for end in (x, x + 18)[: 1 if kind == "window" else 2]:
                ET.SubElement(shown, "circle", {"cx": str(end), "cy": str(y - 4), "r": "4"})
            words(parent, x + 30, y, meaning, "faint")
            x += 54 + round(GROUP_CHARACTER_PIXELS * len(meaning))


def _name(view: Groups, rank: int) -> str:
    return f"rank {rank}, {view.group.cluster.host(rank).name}"


def _tip(step: int, averaging_group: AveragingGroup) -> str:
    ranks = " ".join(map(str, averaging_group.ranks))
    if averaging_group.lasts == 1:
        return f"step {step}: ranks {ranks}"
    return f"steps {step} to {step + averaging_group.lasts - 1}: ranks {ranks}"


def _slots(
    averaging_groups: tuple[AveragingGroup, ...], lanes: dict[int, int]
) -> Iterator[tuple[int, AveragingGroup]]:
    """Lines of one column side by side where they would run into each other, the longest last."""
    taken: list[list[tuple[int, int]]] = []

    def reach(averaging_group: AveragingGroup) -> tuple[int, int]:
        heights = [lanes[rank] for rank in averaging_group.ranks]
        return min(heights), max(heights)

    for averaging_group in sorted(
        averaging_groups, key=lambda each: reach(each)[1] - reach(each)[0]
    ):
        low, high = reach(averaging_group)
        for slot in count():
            if slot == len(taken):
                taken.append([])
            if all(high < other_low or low > other_high for other_low, other_high in taken[slot]):
                taken[slot].append((low, high))
                yield slot, averaging_group
                break
