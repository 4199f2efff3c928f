"""The picture of a measured cluster."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from tests.probing.test_survey import probed
from thalweg.facts import Cluster
from thalweg.report.cluster_svg import draw_cluster, outcome_text

SVG = "{http://www.w3.org/2000/svg}"


def test_racks_hosts_uplinks_and_what_is_slow() -> None:
    nics = ["100mbit"] * 8
    nics[5] = "25mbit"
    found = probed(Cluster.regular([4, 4], nic=nics, uplink="100mbit"))
    root = ET.fromstring(draw_cluster(found))
    classes = [str(rect.get("class")) for rect in root.iter(f"{SVG}rect")]
    assert classes.count("rack") == 2
    assert (classes.count("host"), classes.count("host slow")) == (7, 1)
    widths = [
        float(str(line.get("stroke-width")))
        for line in root.iter(f"{SVG}line")
        if "uplink" in str(line.get("class"))
    ]
    assert len(widths) == 2
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rack0", "rack1", "host5"} <= {*texts}
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)
    said = outcome_text(found, Path("a.toml"), Path("a.svg"))
    assert "host5's NIC is 4." in said
    assert "written: a.toml (for every --cluster), a.svg" in said


def test_one_rack_without_uplinks() -> None:
    root = ET.fromstring(draw_cluster(probed(Cluster.regular([3], nic="100mbit"))))
    assert not list(root.iter(f"{SVG}line"))
