"""A measured cluster as tables: hosts with their NICs, racks with their uplinks; and as a picture:
racks under a spine, hosts in their racks.

An uplink is as wide as its rate (the widest is the fastest one); one that never was the bottleneck
is dashed. What is slower than its like stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.table import Table

from thalweg.facts import Host, Rack, about
from thalweg.probing.result import ProbeResult, UplinkFound
from thalweg.report.shapes import line, tip, words
from thalweg.report.tables import table_of

LEFT, RACK, GAP = 20, 224, 24
CABLE = 40  # from the left of a rack to its uplink
CLUSTER_CHARACTER_PIXELS = 6.6  # pixels, on average
SPINE, TOP = 84, 170  # where the spine is, and where racks begin
HOST, HEAD = 44, 30
WIDEST, THINNEST = 18.0, 2.0
CLUSTER_STYLE = """
svg { background: #ffffff; font: 12px system-ui, sans-serif; }
text { fill: #1b1f24; } .faint { fill: #57606a; } .title { font-size: 15px; font-weight: 600; }
.rack { fill: #f6f8fa; stroke: #d0d7de; } .host { fill: #ffffff; stroke: #d0d7de; }
.spine { stroke: #57606a; stroke-width: 6; stroke-linecap: round; }
.uplink { stroke: #0969da; } .free { stroke-dasharray: 5 4; }
.slow.host { stroke: #bc4c00; stroke-width: 2; } text.slow { fill: #bc4c00; }
.slow.uplink { stroke: #bc4c00; }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; } text { fill: #e6edf3; } .faint { fill: #8d96a0; }
.rack { fill: #161b22; stroke: #30363d; } .host { fill: #0d1117; stroke: #30363d; }
.spine { stroke: #8d96a0; } .uplink { stroke: #58a6ff; }
.slow.host { stroke: #f0883e; } text.slow { fill: #f0883e; } .slow.uplink { stroke: #f0883e; }
}
"""


def tables(found: ProbeResult) -> list[Table]:
    return [_hosts(found)] + ([_uplinks(found)] if found.uplinks else [])


def outcome_text(found: ProbeResult, file: Path, picture: Path) -> str:
    lines = [f"racks ({found.sureness}): {found.reason}"]
    lines += [*found.outliers, *found.contradictions, *found.notes]
    lines.append(f"{found.measurements} measurements over {found.transport}, {found.seconds:.0f} s")
    lines.append(f"written: {file} (for every --cluster), {picture}")
    return "\n".join(lines)


def probe_title(found: ProbeResult) -> str:
    numbers = (len(found.cluster.hosts), "host"), (len(found.cluster.racks), "rack")
    return " in ".join(f"{number} {what}{'s' if number > 1 else ''}" for number, what in numbers)


def _hosts(found: ProbeResult) -> Table:
    figures = (">NIC out", ">NIC in", ">round trip")
    table = table_of("host", "rack", "ranks", *figures, title=probe_title(found))
    for rack in found.cluster.racks:
        for host in rack.hosts:
            seconds = found.round_trips.get(host.name)
            table.add_row(
                host.name,
                rack.name,
                ", ".join(map(str, host.ranks)),
                _bits(host.nic.out.bits_per_second) if found.measured else "",
                _bits(host.nic.into.bits_per_second) if found.measured else "",
                "" if seconds is None else about(seconds, "s"),
            )
    return table


def _uplinks(found: ProbeResult) -> Table:
    table = table_of("uplink of", ">out", ">in", ">oversubscribed")
    for uplink in found.uplinks:
        factor = uplink.oversubscription
        table.add_row(
            uplink.rack,
            *direction_texts(uplink),
            "no" if factor is None else f"{factor:.1f}x",
        )
    return table


def direction_texts(uplink: UplinkFound) -> tuple[str, str]:
    """Its rates out and in, in words."""
    out, into = (
        ("" if full else "at least ") + _bits(rate)
        for rate, full in ((uplink.out, uplink.out_full), (uplink.into, uplink.into_full))
    )
    return out, into


def _bits(rate: float) -> str:
    return about(rate, "bit/s")


def draw_cluster(found: ProbeResult) -> str:
    """As an SVG document."""
    racks = found.cluster.racks
    remarks = [*found.outliers, *found.contradictions]
    below = TOP + HEAD + HOST * max(len(rack.hosts) for rack in racks) + 36
    told = f"racks ({found.sureness}): {found.reason}"
    longest = max(len(text) for text in (told, *remarks))
    width = max(
        2 * LEFT + len(racks) * (RACK + GAP) - GAP, 32 + int(CLUSTER_CHARACTER_PIXELS * longest)
    )
    height = below + 18 * len(remarks) + 10
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    ET.SubElement(root, "style").text = CLUSTER_STYLE
    words(root, 16, 26, probe_title(found), "title")
    words(root, 16, 46, told, "faint")
    if len(racks) > 1:
        end = LEFT + (len(racks) - 1) * (RACK + GAP) + CABLE
        line(root, LEFT + CABLE, SPINE, end, SPINE, "spine")
    _draw_uplinks(root, racks, found.uplinks, found.outliers)
    for index, rack in enumerate(racks):
        _draw_rack(root, rack, LEFT + index * (RACK + GAP), found)
    for index, remark in enumerate(remarks):
        words(root, 16, below + 18 * index, remark, "slow")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _draw_uplinks(
    root: ET.Element,
    racks: Sequence[Rack],
    uplinks: Sequence[UplinkFound],
    outliers: Sequence[str],
) -> None:
    by_rack = {uplink.rack: uplink for uplink in uplinks}
    fastest = max((max(uplink.out, uplink.into) for uplink in uplinks), default=1.0)
    for index, rack in enumerate(racks):
        uplink = by_rack.get(rack.name)
        if uplink is None:
            continue
        x = LEFT + index * (RACK + GAP) + CABLE
        limits = uplink.out_full or uplink.into_full
        slow = _is_named(f"{rack.name}'s uplink", outliers)
        name = "uplink" + ("" if limits else " free") + (" slow" if slow else "")
        drawn = line(root, x, SPINE, x, TOP, name)
        share = min(uplink.out, uplink.into) / fastest
        drawn.set("stroke-width", f"{max(THINNEST, WIDEST * share):.1f}")
        out, into = direction_texts(uplink)
        factor = uplink.oversubscription
        tip(drawn, f"uplink of {rack.name}: {out} out, {into} in")
        words(root, x + 14, SPINE + 26, f"out {out}", "faint")
        words(root, x + 14, SPINE + 42, f"in {into}", "faint")
        if factor is not None:
            words(root, x + 14, SPINE + 58, f"{factor:.1f}x oversubscribed", "slow" if slow else "")


def _draw_rack(root: ET.Element, rack: Rack, left: int, found: ProbeResult) -> None:
    height = HEAD + HOST * len(rack.hosts) + 4
    _box(root, left, TOP, RACK, height, "rack")
    words(root, left + 10, TOP + 20, rack.name)
    for slot, host in enumerate(rack.hosts):
        top = TOP + HEAD + HOST * slot
        slow = _is_named(f"{host.name}'s NIC", found.outliers)
        box = _box(root, left + 8, top, RACK - 16, HOST - 6, "host slow" if slow else "host")
        ranks = ", ".join(map(str, host.ranks))
        tip(box, f"{host.name}: rank{'s' if len(host.ranks) > 1 else ''} {ranks}")
        words(root, left + 16, top + 16, host.name, "slow" if slow else "")
        seconds = found.round_trips.get(host.name)
        if seconds is not None:
            words(root, left + RACK - 70, top + 16, about(seconds, "s"), "faint")
        if found.measured:
            words(root, left + 16, top + 31, _nic(host), "slow" if slow else "faint")


def _nic(host: Host) -> str:
    out, into = (about(rate.bits_per_second, "bit/s") for rate in (host.nic.out, host.nic.into))
    return f"{out} out, {into} in"


def _box(root: ET.Element, x: int, y: int, width: int, height: int, name: str) -> ET.Element:
    corners = {"x": str(x), "y": str(y), "width": str(width), "height": str(height), "rx": "6"}
    return ET.SubElement(root, "rect", {"class": name, **corners})


def _is_named(what: str, outliers: Sequence[str]) -> bool:
    return any(text.startswith(what) for text in outliers)
