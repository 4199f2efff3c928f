from __future__ import annotations

from itertools import pairwise
from math import inf
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.report.chart import LineChart, Mark, Scale, add_chart, scale_of, spread

POSITIVE = st.floats(1e-6, 1e12)


def test_a_straight_scale_is_in_proportion_and_a_logarithmic_one_by_factors() -> None:
    straight = Scale(least=100, most=300, start=0, stop=200)
    assert [straight.at(value) for value in (100, 150, 300, 1000)] == [0, 50, 200, 200]
    factors = Scale(least=1, most=100, start=200, stop=0, logarithmic=True)
    assert [factors.at(value) for value in (0, 1, 10, 100)] == [200, 200, 100, 0]


def test_ticks_are_round() -> None:
    assert Scale(least=177, most=610, start=0, stop=1).ticks(3) == [200, 400, 600]
    decades = Scale(least=1e7, most=1e11, start=0, stop=1, logarithmic=True)
    assert decades.ticks(5) == pytest.approx([1e7, 1e8, 1e9, 1e10, 1e11])
    assert decades.ticks(3) == pytest.approx([1e8, 1e10])


@given(values=st.lists(POSITIVE, min_size=1), most=st.integers(2, 9))
def test_no_more_ticks_than_asked_for_and_all_on_the_scale(values: list[float], most: int) -> None:
    scale = scale_of(values, start=0, stop=100)
    ticks = scale.ticks(most)
    assert 1 <= len(ticks) <= most
    assert all(scale.least * 0.99 <= tick <= scale.most * 1.01 for tick in ticks)
    assert all(0 <= scale.at(value) <= 100 for value in values)


def test_what_is_endless_does_not_stretch_the_scale() -> None:
    scale = scale_of([1.0, 2.0, inf], start=0, stop=10)
    assert (scale.least, scale.most, scale.at(inf)) == (1, 2, 10)


@given(places=st.lists(st.floats(0, 100), max_size=6))
def test_labels_keep_apart_in_their_order(places: list[float]) -> None:
    moved = spread(places, 15, 0, 100)
    order = sorted(range(len(places)), key=lambda index: places[index])
    assert all(moved[b] - moved[a] >= 15 - 1e-9 for a, b in pairwise(order))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in moved)


def test_labels_that_are_apart_stay() -> None:
    assert spread([80, 10, 40], 15, 0, 100) == [80, 10, 40]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_mark_is_on_its_curve(logarithmic: bool) -> None:
    xs = (1.0, 100.0) if logarithmic else (0.0, 99.0)
    chart = LineChart(
        title="",
        x_title="",
        x_text=str,
        xs=xs,
        curves={"plan": (10.0, 0.1)},
        marks=[Mark(at=10.0 if logarithmic else 49.5, text="half-way", curve="plan")],
        size=(736, 380),
        logarithmic=logarithmic,
    )
    page = ET.Element("div")
    add_chart(page, chart)
    for drawing in page:
        line = next(drawing.iter("polyline")).attrib["points"].split()
        (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line)
        [point] = [e for e in drawing.iter("circle") if e.get("class") == "point"]
        assert float(point.attrib["cx"]) == pytest.approx((x1 + x2) / 2, abs=0.2)
        assert float(point.attrib["cy"]) == pytest.approx((y1 + y2) / 2, abs=0.2)
