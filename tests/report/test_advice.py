"""The page of an advice: what is in it, that it is escaped, and that it needs nothing beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version

import pytest

from tests.report.advices import CODED, LONG, PARTS, advice, advised, measurements
from thalweg.facts import Cluster
from thalweg.predict.estimate import Advice, Breakdown, Outcome
from thalweg.report.advice import advice_page, between, times

VOID = {"meta", "wbr"}
NASTY = """</title><script>alert("x")</script>&'"""


class Page(HTMLParser):
    """Tags with their attributes, the text inside each kind of tag, and whether all were closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def number(self, tag: str, name: str = "") -> int:
        classes = [attrs.get("class", "").split() for found, attrs in self.tags if found == tag]
        return sum(not name or name in each for each in classes)


def shown(found: Advice, measured: list[Outcome] | None = None) -> Page:
    page = Page(advice_page(found, measured or []))
    assert page.open == []
    return page


def many(number: int) -> Advice:
    ranking = [advised("ring", Breakdown(compute=1 + index)) for index in range(number - 1)]
    ddp = advised("ddp", Breakdown(compute=1000))
    return replace(advice(), ranking=(*ranking, ddp))


def test_the_sections_come_in_the_order_of_a_readers_questions() -> None:
    assert shown(advice(), measurements()).texts["h2"] == [
        "Best plan",
        "Ranking",
        "Step time breakdown",
        "Time against bandwidth",
        "The cluster",
        "Predicted and measured step times",
        "Assumptions",
        "Plans not ranked",
        "Use it",
    ]


def test_the_head_says_what_to_do() -> None:
    page = shown(advice())
    assert page.texts["h1"] == ["Plan advice for resnet50"]
    assert advice().verdict in page.texts["p"]
    assert page.texts["dd"] == ["190 ms", "2.95x", "177 to 207 ms"]  # 560 / 190, -7%, +9%
    assert page.texts["pre"] == [f'run = thalweg.attach(model, optimizer, plan="{LONG}")']
    assert page.texts["footer"] == [f"Made by thalweg {version('thalweg')}."]


def test_every_plan_has_a_row_with_its_figures() -> None:
    page = shown(advice())
    rows = page.texts["tr"]
    for number, (sync, parts) in enumerate(PARTS.items(), start=1):
        [row] = [row for row in rows if row.startswith(f"{number}{sync}")]
        assert f"{1000 * parts.seconds:.3g} ms" in row
        assert f"{0.560 / parts.seconds:.2f}x" in row
    assert page.number("circle", "mean") == len(PARTS)
    assert "needs 1.05 times the steps" in page.texts["main"][0]


def test_bars_are_as_long_as_their_parts() -> None:
    bars = [attrs for tag, attrs in shown(advice()).tags if tag == "rect" and "data-part" in attrs][
        5:
    ]  # after the legend
    lengths = [(bar["data-part"], float(bar["width"].rstrip("%"))) for bar in bars]
    expected = [
        (part, 100 * seconds / 0.560)
        for parts in PARTS.values()
        for part in ("compute", "encode", "decode", "transfer", "waiting")
        if (seconds := getattr(parts, part)) > 0
    ]
    assert [part for part, _ in lengths] == [part for part, _ in expected]
    assert [n for _, n in lengths] == pytest.approx([n for _, n in expected], abs=1e-3)


def test_the_sweep_marks_where_we_are_and_where_plans_change_places() -> None:
    page = shown(advice())
    assert page.number("polyline", "curve") == 2 * 4  # once for wide pages, once for narrow ones
    assert page.number("circle", "badge") == 2 * 3
    assert page.texts["text"].count("now: 500 Mbit/s") == 2
    # 0.227 - 0.140 = 0.087 s less of compute pay for 0.415 - 0.093 = 0.322 s at 1 Gbit/s
    assert f"1 3.7 Gbit/s: below it {CODED} is faster, above it ddp." in page.texts["li"]


def test_without_a_sweep_and_without_measurements() -> None:
    headings = shown(advice(swept=False)).texts["h2"]
    assert "Time against bandwidth" not in headings
    assert "Predicted and measured step times" not in headings


def test_a_rate_outside_the_sweep_is_not_marked() -> None:
    found = advice(cluster=Cluster.regular([2], nic="1mbit"))
    assert not [text for text in shown(found).texts["text"] if text.startswith("now")]


def test_measured_beside_predicted() -> None:
    page = shown(advice(), measurements())
    [coded] = [row for row in page.texts["tr"] if row.startswith(CODED) and "371 ms" in row]
    assert coded.endswith("-14%no")  # 320 / 371 - 1, and 371 is above 1.09 * 320
    assert "2 of 3 within their interval" in page.texts["main"][0]
    assert page.number("path", "measured") == 3


def test_it_needs_nothing_from_elsewhere() -> None:
    text = advice_page(advice(), measurements())
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "image", "use"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "xlink:href"} & attrs.keys()]
    assert "http" not in text
    assert "@import" not in text
    assert {*re.findall(r"url\((.)", text)} == {"#"}


def test_texts_are_escaped() -> None:
    best = replace(advice().best, why=NASTY, survives=NASTY)
    cluster, workload = advice().situation.cluster, advice().situation.workload
    host = replace(cluster.racks[0].hosts[0], name=NASTY)
    rack = replace(cluster.racks[0], name=NASTY, hosts=(host, *cluster.racks[0].hosts[1:]))
    found = replace(
        advice(
            workload=replace(workload, name=NASTY),
            cluster=replace(cluster, racks=(rack, *cluster.racks[1:])),
        ),
        ranking=(best, *advice().ranking[1:]),
        verdict=NASTY,
        assumed=(NASTY,),
        left_out={NASTY: NASTY},
    )
    page = shown(found, [replace(measurements()[0], sync=NASTY)])
    assert page.number("script") == 0
    assert NASTY in page.texts["h1"][0]
    assert NASTY in page.texts["title"][0]
    assert NASTY in page.texts["li"]


def test_drawings_are_described() -> None:
    page = shown(advice(), measurements())
    assert dict(page.tags)["html"] == {"lang": "en"}
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for attrs in drawings)


def test_a_long_ranking_is_folded() -> None:
    page = shown(many(100))
    assert "75 more plans" in page.texts["summary"]
    text = advice_page(many(100))
    assert text.index("75 more plans") > text.index(">25<")
    assert text.index("75 more plans") < text.index(">26<")
    assert text.count('role="img" aria-label="ring: ') == 10  # bars: the best ten
    assert text.count('role="img" aria-label="ddp: ') == 1  # and the baseline


@pytest.mark.parametrize(("racks", "boxes"), [([40] * 25, 1), ([1000], 1), ([3, 70], 3 + 1)])
def test_a_large_cluster_is_summed_up(racks: list[int], boxes: int) -> None:
    page = shown(advice(cluster=Cluster.regular(racks, nic="10gbit", uplink="40gbit")))
    assert page.number("rect", "host") == boxes
    if len(racks) == 25:
        assert "25 such racks" in page.texts["text"]
    assert f"{max(racks)} hosts" in page.texts["text"]


def test_measured_rates_that_differ_a_little_are_alike() -> None:
    nics = [f"{1000 + index}mbit" for index in range(100)]
    nics[0] = nics[50] = "500mbit"
    cluster = Cluster.regular([50, 50], nic=nics, uplink=["2gbit", "2.1gbit"])
    texts = shown(advice(cluster=cluster)).texts["text"]
    assert {"2 such racks", "1 host", "500 Mbit/s", "49 hosts", "from 2 Gbit/s"} <= {*texts}
    assert "from 1 Gbit/s" in texts


def test_both_directions_and_slow_hosts() -> None:
    page = shown(advice())
    assert page.number("rect", "slow") == 1  # host6
    assert page.number("rect", "host") == 16
    assert page.number("line", "uplink") == 4


def test_nothing_assumed_and_nothing_left_out() -> None:
    found = advice().situation
    cluster, machine = replace(found.cluster, assumed=()), replace(found.machine, assumed=())
    bare = replace(advice(cluster=cluster, machine=machine), assumed=(), left_out={})
    page = shown(bare)
    assert "Plans not ranked" not in page.texts["h2"]
    assert "None: all values were measured or declared." in page.texts["p"]


def test_the_baseline_may_be_the_best() -> None:
    ddp = advised("ddp", PARTS["ddp"])
    page = shown(replace(advice(), ranking=(ddp,)))
    assert page.texts["dd"][1] == "ddp"


def test_numbers_in_words() -> None:
    assert [times(value) for value in (0.00123, 0.5, 1.8349, 12.34)] == [
        "0.00123x",
        "0.50x",
        "1.83x",
        "12.3x",
    ]
    assert between(0.0801, 0.0915) == "80.1 to 91.5 ms"
    assert between(0.9, 1.1) == "900 ms to 1.1 s"
