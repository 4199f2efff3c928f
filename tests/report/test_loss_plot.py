from __future__ import annotations

from xml.etree import ElementTree as ET

from thalweg.report.plots import TrainingCurve, draw_trainings


def curve(sync: str, events: dict[str, int]) -> TrainingCurve:
    return TrainingCurve(
        sync=sync,
        losses=[3.0, 2.0, 1.0],
        seconds=[0.5, 1.0, 0.5],
        quartiles=[0.4, 0.5, 0.9],
        events=events,
    )


def test_time_is_what_the_steps_took_together() -> None:
    assert curve("ring", {}).times == [0.5, 1.5, 2.0]


def test_events_are_marked_on_every_line() -> None:
    cut = {"step 2: cut rack 0": 2}
    text = draw_trainings("two racks", [curve("ring", cut), curve("ddp", cut)], over_time=True)
    ids = {element.get("id") for element in ET.fromstring(text).iter()}
    assert {"ring: step 2: cut rack 0", "ddp: step 2: cut rack 0"} <= ids


def test_nothing_to_draw_is_a_picture_too() -> None:
    assert ET.fromstring(draw_trainings("all failed", [], over_time=True)).tag.endswith("svg")
