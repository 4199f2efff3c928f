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
    arrows = [arrow for scene in explanation.scenes for beat in scene.slots for arrow in beat]
    assert len(tips) == len(arrows) == 4 * 6
    assert "slot 1: chunk 3 from 0 to 1, adds" in tips


def test_ranks_and_racks_are_named() -> None:
    root = ET.fromstring(draw(explained("hierarchical", [2, 3])))
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"rack0", "rack1", "rank 0", "rank 4"} <= words


def test_long_schedules_are_drawn_until_the_first_chunk_has_arrived() -> None:
    explanation = explained("hierarchical", [4, 4], "10MB")
    root = ET.fromstring(draw(explanation))
    assert len(explanation.scenes[0].slots) > 100
    assert int(root.attrib["width"]) < 2600
    copies = [
        line for line in root.iter(f"{SVG}line") if line.attrib["class"] == "arrow COPY first"
    ]
    heads = {line.attrib["y2"] for line in copies}
    assert len(heads) == 7  # everybody but the one that finished the sum


def test_nothing_to_draw_is_a_picture_too() -> None:
    ET.fromstring(draw(explained("local_sgd(every=2)", [3])))
    ET.fromstring(draw(explained("ring", [1])))


def texts(root: ET.Element) -> set[str | None]:
    return {text.text for text in root.iter(f"{SVG}text")}


def bars(root: ET.Element) -> list[ET.Element]:
    return [r for r in root.iter(f"{SVG}rect") if r.attrib["class"] in {"one", "plus", "minus"}]


def test_a_coded_tree_has_a_bar_for_every_part() -> None:
    explanation = explained("codedreduce(fanout=3, stragglers=1, code=cyclic)", [12])
    root = ET.fromstring(draw(explanation))
    view = explanation.coded
    assert view is not None
    parts = [part for rank in range(12) for part in view.parts(rank)]
    assert len(bars(root)) == len(parts)
    assert {"weight 1", "another weight", "a negative weight"} <= texts(root)
    weights = {f"{part.weight:.3g}" for part in parts} - {"1"}
    assert weights <= texts(root)
    assert {"root, in rank 0", "rank 0, has the root", "rank 3"} <= texts(root)
    [tip] = [t.text or "" for t in root.iter(f"{SVG}title") if "has the root" in (t.text or "")]
    assert tip.startswith("rank 0 computes ")
    assert tip.endswith(", and answers rank 3")
    assert "its process sends 4x the model size (3x down, 1x up) and receives 3x" in texts(root)
    assert "any 1" in texts(root)


def test_replicas_have_the_same_bars_and_a_bracket() -> None:
    root = ET.fromstring(draw(explained("codedreduce(fanout=4, stragglers=1)", [20])))
    brackets = [path for path in root.iter(f"{SVG}path") if path.attrib["class"] == "bracket"]
    assert len(brackets) == 5 * 2  # teams of five parents
    places = [(bar.attrib["x"], bar.attrib["width"]) for bar in bars(root)]
    assert sorted(places.count(place) for place in set(places)) == [2, 2, 4, 4, 4, 4]


def test_a_root_that_computes_nothing_is_named() -> None:
    root = ET.fromstring(draw(explained("gc(stragglers=1, root=separate)", [5])))
    assert "root, rank 0" in texts(root)


def test_without_rounds_it_is_a_star() -> None:
    root = ET.fromstring(draw(explained("lgc(k=3)", [5])))
    ups = [line for line in root.iter(f"{SVG}line") if line.attrib["class"] == "up"]
    assert len(ups) == 4 + 1  # and the legend
    assert any("the fastest 3 of 5" in (text or "") for text in texts(root))
