from __future__ import annotations

from io import StringIO
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from thalweg.studies.stragglers.tables import draw_stragglers, table_of


def row(scheme: str, mean: float | None, **other: Any) -> dict[str, Any]:
    failed = mean is None
    times = {f"p{p}": None if mean is None else mean * p / 50 for p in (5, 50, 95, 99)}
    return {
        "scheme": scheme,
        "stragglers": {"gc": 21, "cr": 1}.get(scheme, 0),
        "bytes": 200_000,
        "late": 0.05,
        "delay": 2.0,
        "compute": 0.0,
        "way": "held",
        "bound": 0.03,
        "mean": mean,
        **times,
        "exact": not failed,
        "wrong": None if failed else 0,
        "iterations": 10,
        "load": 0.25,
        "beyond": 1,
        "waits": 0.2,
        "seconds": [],
        "error": "it broke" if failed else None,
        "cr_speedup": 25.0,
        "mean_vs_none_late": 1.1,
        "p95_vs_none_late": 1.0,
        **other,
    }


FOUR = [row("umw", 3.0), row("gc", 1.2), row("rar", None), row("cr", 0.12)]
TABLES = {
    "held": FOUR,
    "delays": [{**each, "delay": delay} for delay in (0.0, 2.0) for each in FOUR],
    "compute": [{**each, "compute": compute} for compute in (0.0, 0.2) for each in FOUR],
    "pauses": [
        {**each, "stronger_cr_speedup": 30.0} for each in [*FOUR, row("cr", 0.1, stragglers=3)]
    ],
    "surface": [
        {**each, "bytes": nbytes, "late": late}
        for nbytes in (40_000, 200_000)
        for late in (0.02, 0.1)
        for each in FOUR
    ],
}


def printed(name: str) -> list[list[str]]:
    text = StringIO()
    Console(file=text, width=120).print(table_of(name, TABLES[name]))
    return [line.split() for line in text.getvalue().splitlines()]


def test_every_scheme_has_its_figures_its_links_and_its_verdict() -> None:
    [title, headings, umw, gc, rar, cr] = printed("held")
    assert " ".join(title).endswith("200 kB, 0.05 of the workers straggle, delay 2 s, compute 0 s")
    assert headings[-5:] == ["added", "wait", "cr", "speed-up", "exact"]
    assert umw[:4] == ["umw", "0.250", "3", "s"]
    assert umw[-7:] == ["30", "ms", "1", "200", "ms", "25x", "yes"]
    assert gc[:2] == ["gc", "S=21"]
    assert (rar[1], rar[-1]) == ("failed", "failed")
    assert cr[-1] == "yes"


def test_a_wrong_gradient_is_said_loudly() -> None:
    text = StringIO()
    wrong = row("cr", 0.12, exact=False, wrong=3)
    Console(file=text, width=120).print(table_of("held", [wrong]))
    assert "3 WRONG" in text.getvalue()


@pytest.mark.parametrize(
    ("name", "heading"),
    [("delays", "slowdown"), ("compute", "compute"), ("pauses", "s=3"), ("surface", "rar")],
)
def test_other_tables_fit_a_page(name: str, heading: str) -> None:
    lines = printed(name)
    assert any(heading in line for line in lines[1:3])
    assert not any("…" in word for line in lines for word in line)


def test_a_panel_for_every_table() -> None:
    for tables in (TABLES, {"held": FOUR}, {"surface": TABLES["surface"]}):
        root = ET.fromstring(draw_stragglers("84 workers", tables))
        ids = [element.get("id") or "" for element in root.iter()]
        panels = len(tables) + 2 * ("surface" in tables)
        assert sum(text.startswith("axes_") for text in ids) == panels


def test_a_failed_row_has_no_bar() -> None:
    assert ET.fromstring(draw_stragglers("failed", {"held": [row("cr", None)]}))
