"""Who meets whom, in the terminal, as a picture and in words."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from tests.report.explain.test_svg import SVG, texts
from thalweg import Cluster, Group, Size, Workload
from thalweg.catalog import default_catalog
from thalweg.facts import read_cluster
from thalweg.report import Explanation, draw, explain, render

ROOT = Path(__file__).parents[3]
RACK = ["250mbit", "1gbit", "1gbit", "1gbit"]
HOST = ["1gbit"] * 3 + ["250mbit"] + ["1gbit"] * 12


def explained(
    plan: str,
    rack_sizes: list[int],
    uplink: str | list[str] = "1gbit",
    nic: str | list[str] = "1gbit",
) -> Explanation:
    catalog = default_catalog()
    group = Group.everybody(Cluster.regular(rack_sizes, nic=nic, uplink=uplink))
    workload = Workload.of_size(Size.parse("40B"))
    return explain(catalog.plan(plan), group, workload, 3, catalog)


def printed(explanation: Explanation, width: int = 120) -> list[str]:
    text = StringIO()
    console = Console(file=text, width=width)
    for piece in render(explanation, 1, width):
        console.print(piece)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def grid(explanation: Explanation, width: int = 120) -> dict[str, str]:
    lines = printed(explanation, width)
    rows = [line for line in lines if ", host" in line and "rank" in line]
    return {row.split(", ")[1].split()[0]: row.split(", ")[1].split(maxsplit=1)[1] for row in rows}


def test_same_letter_same_group() -> None:
    rows = grid(explained("dssync", [4] * 4, uplink="2gbit"))
    assert rows["host0"] == "A  b  b  b"
    assert rows["host5"] == "c  A  c  c"
    assert rows["host15"] == "e  e  e  A"


def test_racks_in_pairs() -> None:
    """Until each host has met one of each other rack."""
    rows = grid(explained("dssync", [4] * 4))
    assert rows["host0"] == "A  c  c  c  B  c  c  c  B  c  c  c"
    assert rows["host4"] == "B  d  d  d  A  d  d  d  B  d  d  d"
    assert rows["host8"] == "B  e  e  e  B  e  e  e  A  e  e  e"
    assert rows["host12"] == "A  f  f  f  A  f  f  f  A  f  f  f"


def test_a_short_period() -> None:
    assert grid(explained("dssync", [3, 3]))["host0"] == "A  b  b"


def test_a_window_is_a_line_over_its_steps() -> None:
    rows = grid(explained("dssync", [4] * 4, uplink=RACK))
    assert rows["host0"].startswith("A────────── c  c  c")
    assert rows["host12"].startswith("A────────── B")
    assert rows["host1"].startswith("c  c  c  c  A──────────")


def test_letters_of_windows_are_not_taken_by_others() -> None:
    explanation = explained("dssync", [4] * 4, uplink=RACK, nic=HOST)
    rows = grid(explanation)
    assert explanation.groups is not None
    at_step_1 = {row[3] for row in rows.values()} - {"─"}
    assert at_step_1 == set("Cdef")  # a and B are under way


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits(width: int) -> None:
    lines = printed(explained("dssync", [4] * 4, uplink=RACK), width)
    shown = max(4, min(16, (width - 30) // 3))
    assert f"... and {48 - shown} more steps." in lines
    assert all(len(line) <= width for line in lines)


def test_many_workers_are_listed() -> None:
    lines = printed(explained("dssync", [40, 40]))
    assert any(line.startswith("    0  {0 40}  {1 2 ... 39}") for line in lines)


def test_more_workers_than_are_worked_out() -> None:
    explanation = explained("dssync", [70, 70])
    assert explanation.groups is not None
    assert explanation.groups.mixing is None
    assert explanation.groups.facts() == []
    assert ET.fromstring(draw(explanation))


@pytest.mark.parametrize(
    ("plan", "shown"),
    [("local_sgd(every=4)", True), ("gossip", False), ("ring", False)],
)
def test_only_groups_that_change_are_drawn(plan: str, shown: bool) -> None:
    lines = printed(explained(plan, [2, 2]))
    assert ("Averaging groups of one period" in lines) == shown
    assert any(line.startswith("expected drift") for line in lines) == (plan != "ring")


def facts(explanation: Explanation) -> dict[str, str]:
    assert explanation.groups is not None
    return dict(explanation.groups.facts())


def test_what_to_expect_in_words() -> None:
    said = facts(explained("dssync", [4] * 4, uplink="2gbit"))
    assert said == {
        "connected": "yes: every update reaches all workers",
        "contraction": "factor 0.667 per step on the difference of replicas; a thousandth is left "
        "after 19 steps",
        "spectral gap": "0.802 over 4 steps; by singular values 0.704",
        "expected drift": "0.64 of one step's noise (variance 0.41); before averaging 1.16 (1.35)",
        "longest pause": "1 step between two groups of a worker",
        "uplinks": "1.5x the model size leaves the busiest rack per step, on average",
    }
    said = facts(explained("dssync", [4] * 4))
    assert said == {
        "connected": "yes: every update reaches all workers",
        "contraction": "factor 0.803 per step on the difference of replicas; a thousandth is left "
        "after 34 steps",
        "spectral gap": "0.928 over 12 steps; by singular values 0.892",
        "expected drift": "0.82 of one step's noise (variance 0.67); before averaging 1.27 (1.61)",
        "longest pause": "1 step between two groups of a worker",
        "uplinks": "1x the model size leaves the busiest rack per step, on average",
        "contended": "racks average in pairs by turns: uplinks are too slow for all at once",
    }
    said = facts(explained("local_sgd(every=4)", [4] * 4))
    assert said["contraction"] == "replicas are equal after 4 steps"


def test_why_something_is_kept_apart() -> None:
    explanation = explained("dssync", [4] * 4, uplink=RACK, nic=HOST)
    assert explanation.groups is not None
    assert [text for _, text in explanation.groups.facts()[-2:]] == [
        "rack0: uplink 250mbit (median 1gbit); averages one worker at a time with another rack, "
        "for 4 steps",
        "host3: NIC 250mbit (median 1gbit); averages within the rack, for 4 steps",
    ]
    slow_racks = explained("dssync", [4] * 4, uplink="250mbit")
    assert facts(slow_racks)["contended"].startswith("rack0, rack1, rack2, rack3: uplink 250mbit")
    pairs = facts(explained("dssync", [4] * 4, uplink="500mbit"))
    assert pairs["contended"] == (
        "racks average in pairs by turns: uplinks are too slow for all at once"
    )


def test_shorter_windows_than_it_needs_say_so() -> None:
    """The other of a rack of two would be away too long."""
    nics = ["1gbit"] * 2 + ["10mbit"] + ["1gbit"]
    said = facts(explained("dssync", [2, 2], nic=nics))["contended"]
    assert said == (
        "host2: NIC 10mbit (median 1gbit); averages within the rack, for 4 steps "
        "(8 would leave some workers alone too long)"
    )


def drawn(explanation: Explanation, kind: str) -> list[ET.Element]:
    root = ET.fromstring(draw(explanation))
    found = [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]
    return [group for group in found if group.find(f"{SVG}title") is not None]


def test_the_three_figures_of_the_paper() -> None:
    """Even racks with uplinks to spare, rack A's uplink contended, and a NIC in it as well."""
    even = explained("dssync", [4] * 4, uplink="2gbit")
    assert len(drawn(even, "between")) == 4
    assert len(drawn(even, "inside")) == 4 * 4
    assert not drawn(even, "window")
    pairs = explained("dssync", [4] * 4)
    assert len(drawn(pairs, "between")) == 12 * 2
    assert len(drawn(pairs, "inside")) == 12 * 4
    slow = explained("dssync", [4] * 4, uplink=RACK)
    assert len(drawn(slow, "window")) == 4  # of the first sixteen steps
    tips = [group.findtext(f"{SVG}title") for group in drawn(slow, "window")]
    assert tips[0] in ("steps 0 to 3: ranks 0 12", "steps 0 to 3: ranks 12 0")
    bars = [
        line for line in drawn(slow, "window")[0].iter(f"{SVG}line") if line.get("class") == "bar"
    ]
    assert len(bars) == 2
    both = explained("dssync", [4] * 4, uplink=RACK, nic=HOST)
    assert len(drawn(both, "window")) == 8
    root = ET.fromstring(draw(both))
    slow_words = {text.text for text in root.iter(f"{SVG}text") if text.get("class") == "slow"}
    assert slow_words == {"rack0", "rank 3, host3"}
    assert "the first 16 of 48 steps" in texts(root)


def test_lines_of_one_column_are_side_by_side() -> None:
    explanation = explained("dssync", [4] * 8, uplink="500mbit")
    columns: dict[str, list[tuple[int, int]]] = {}
    for kind in ("between", "inside"):
        for group in drawn(explanation, kind):
            [joins] = group.iter(f"{SVG}line")
            columns.setdefault(joins.attrib["x1"], []).append(
                (int(joins.attrib["y1"]), int(joins.attrib["y2"]))
            )
    for lines in columns.values():
        for (_, end), (begin, _) in zip(sorted(lines), sorted(lines)[1:], strict=False):
            assert end < begin


@pytest.mark.parametrize("name", ["even-racks", "slow-uplink", "slow-host"])
def test_the_pictures_of_the_documentation_are_these(name: str) -> None:
    """To draw them anew: thalweg explain dssync --bytes 4KB --cluster FILE --svg PICTURE."""
    catalog = default_catalog()
    group = Group.everybody(read_cluster(ROOT / "examples" / "clusters" / f"{name}.toml"))
    workload = Workload.of_size(Size.parse("4KB"))
    picture = draw(explain(catalog.plan("dssync"), group, workload, 0, catalog))
    assert picture == (ROOT / "docs" / "pictures" / f"dssync-{name}.svg").read_text()
