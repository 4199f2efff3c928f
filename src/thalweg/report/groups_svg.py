"""Groups over one period as a picture: racks are bands, steps are columns.

Those who meet are dots joined by a line: within a rack, or between racks. A window is a bar from
the step at which it begins to the one at which its result is there. What is slow is written in its
colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from xml.etree import ElementTree as ET

from thalweg.report.groups import Groups
from thalweg.report.shapes import line, tip, words
from thalweg.schedules import Meeting

NAMES, COLUMN, LANE, GAP, HEAD, FACT = 74, 44, 20, 12, 44, 18
SLOT, MARGIN = 11, 8  # between lines of one column, and to its left
LETTER = 6.4  # width of a letter, about
STYLE = """
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


@dataclass(frozen=True, slots=True)
class GroupsPicture:
    view: Groups

    @property
    def width(self) -> int:
        facts = max((len(text) for _, text in self.view.facts()), default=0)
        legend = 40 + sum(54 + round(LETTER * len(text)) for _, text in LEGEND)
        columns = self._x(len(self.view.turns)) + 24
        return max(columns, 140 + round(LETTER * facts), legend if self.view.turns else 0)

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
        return NAMES + round(LETTER * names) + 22 + column * step

    def draw(self, parent: ET.Element, top: int) -> None:
        ET.SubElement(parent, "style").text = STYLE
        if self.view.turns:
            lanes = self._bands(parent, top)
            ends = [self._x(step) for step in range(len(self.view.turns) + 1)]
            for step, meetings in enumerate(self.view.turns):
                for slot, meeting in _slots(meetings, lanes):
                    x = ends[step] + MARGIN + SLOT * slot
                    until = ends[min(step + meeting.lasts, len(ends) - 1)]
                    drawn = self._meeting(parent, meeting, lanes, x, until)
                    tip(drawn, _tip(step, meeting))
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
            words(parent, 16 + round(LETTER * 28), top + 18, more, "faint")
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

    def _meeting(
        self, parent: ET.Element, meeting: Meeting, lanes: dict[int, int], x: int, until: int
    ) -> ET.Element:
        heights = sorted(lanes[rank] for rank in meeting.ranks)
        drawn = ET.SubElement(parent, "g", {"class": self._kind(meeting)})
        line(drawn, x, heights[0], x, heights[-1], "joins")
        for y in heights:
            if meeting.lasts > 1:
                line(drawn, x, y, until - 10, y, "bar")
            ET.SubElement(drawn, "circle", {"cx": str(x), "cy": str(y), "r": "4"})
        return drawn

    def _kind(self, meeting: Meeting) -> str:
        if meeting.lasts > 1:
            return "window"
        return "between" if len(self.view.group.subgroup(meeting.ranks).racks) > 1 else "inside"

    def _legend(self, parent: ET.Element, y: int) -> None:
        x = 20
        there = {self._kind(meeting) for turn in self.view.turns for meeting in turn}
        for kind, meaning in LEGEND:
            if kind not in there:
                continue
            shown = ET.SubElement(parent, "g", {"class": kind})
            line(shown, x, y - 4, x + 18, y - 4, "bar" if kind == "window" else "joins")
            for end in (x, x + 18)[: 1 if kind == "window" else 2]:
                ET.SubElement(shown, "circle", {"cx": str(end), "cy": str(y - 4), "r": "4"})
            words(parent, x + 30, y, meaning, "faint")
            x += 54 + round(LETTER * len(meaning))


def _name(view: Groups, rank: int) -> str:
    return f"rank {rank}, {view.group.cluster.host(rank).name}"


def _tip(step: int, meeting: Meeting) -> str:
    ranks = " ".join(map(str, meeting.ranks))
    if meeting.lasts == 1:
        return f"step {step}: ranks {ranks}"
    return f"steps {step} to {step + meeting.lasts - 1}: ranks {ranks}"


def _slots(meetings: tuple[Meeting, ...], lanes: dict[int, int]) -> Iterator[tuple[int, Meeting]]:
    """Lines of one column side by side where they would run into each other, the longest last."""
    taken: list[list[tuple[int, int]]] = []

    def reach(meeting: Meeting) -> tuple[int, int]:
        heights = [lanes[rank] for rank in meeting.ranks]
        return min(heights), max(heights)

    for meeting in sorted(meetings, key=lambda each: reach(each)[1] - reach(each)[0]):
        low, high = reach(meeting)
        for slot in count():
            if slot == len(taken):
                taken.append([])
            if all(high < other_low or low > other_high for other_low, other_high in taken[slot]):
                taken[slot].append((low, high))
                yield slot, meeting
                break
