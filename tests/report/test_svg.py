from __future__ import annotations

from xml.etree import ElementTree as ET

from thalweg import Cluster, Group, Size, Workload
from thalweg.catalog import default_catalog
from thalweg.report import Explanation, draw, explain

SVG = "{http://www.w3.org/2000/svg}"


def explained(text: str, rack_sizes: list[int], size: str = "40B") -> Explanation:
    catalog = default_catalog()
    group = Group.everybody(Cluster.regular(rack_sizes))
    return explain(catalog.plan(text), group, Workload.of_size(Size.parse(size)), 0, catalog)


def test_every_message_is_an_arrow_with_a_tip() -> None:
    explanation = explained("ring", [2, 2])
    root = ET.fromstring(draw(explanation))
    tips = [title.text or "" for title in root.iter(f"{SVG}title")]
    arrows = [arrow for scene in explanation.scenes for beat in scene.beats for arrow in beat]
    assert len(tips) == len(arrows) == 4 * 6
    assert "beat 1: chunk 3 from 0 to 1, adds" in tips


def test_ranks_and_racks_are_named() -> None:
    root = ET.fromstring(draw(explained("hierarchical", [2, 3])))
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"rack0", "rack1", "rank 0", "rank 4"} <= words


def test_long_schedules_are_drawn_until_the_first_chunk_has_arrived() -> None:
    explanation = explained("hierarchical", [4, 4], "10MB")
    root = ET.fromstring(draw(explanation))
    assert len(explanation.scenes[0].beats) > 100
    assert int(root.attrib["width"]) < 2600
    copies = [
        line for line in root.iter(f"{SVG}line") if line.attrib["class"] == "arrow COPY first"
    ]
    heads = {line.attrib["y2"] for line in copies}
    assert len(heads) == 7  # everybody but the one that finished the sum


def test_nothing_to_draw_is_a_picture_too() -> None:
    ET.fromstring(draw(explained("local_sgd(every=2)", [3])))
    ET.fromstring(draw(explained("ring", [1])))
