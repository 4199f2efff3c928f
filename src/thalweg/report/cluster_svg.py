"""The drawing of a cluster: a tile for each rack, side by side under a spine, in a page or alone.

The width of an uplink is its rate; a dashed one is never the bottleneck. Similar hosts of a large
rack are one box, and so are similar racks of a large cluster. A measured cluster is drawn with what
was found, and printed as tables: hosts with their NICs, and racks with their uplinks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar
from xml.etree import ElementTree as ET

from rich.table import Table

from thalweg.facts import Cluster, Duplex, Host, Rack, about, counted, grouped
from thalweg.report.page import picture
from thalweg.report.shapes import (
    CLUSTER_STYLE,
    add,
    box,
    document,
    document_text,
    line,
    tip,
    words,
)
from thalweg.report.tables import bits_text, seconds_text, table_of

if TYPE_CHECKING:
    from thalweg.probing.link_rates import Uplink
    from thalweg.probing.result import ProbeResult

T = TypeVar("T")
MAX_DRAWN_HOSTS = 64  # in a cluster whose racks are all drawn
MAX_TILE_ROWS = 8  # in a rack whose hosts are all drawn
MAX_TILES = 12
COLUMNS = 6  # tiles side by side in a document
TILE, TOP, HEAD, ROW, LINE = 164, 58, 30, 42, 15
CABLE, WIDEST, THINNEST = 24, 14.0, 2.0
TILE_CHARACTER_PIXELS = 7.2  # upper bound of the average
SLOW_DRAWN_RATIO = 0.75  # of the median
UPLINK_COLUMNS: dict[str, Callable[[Uplink], str]] = {
    "uplink of": lambda uplink: uplink.rack,
    ">out": lambda uplink: _rate(uplink.out, uplink.out_full),
    ">in": lambda uplink: _rate(uplink.into, uplink.into_full),
    ">oversubscribed": lambda uplink: (
        "no" if uplink.oversubscription is None else f"{uplink.oversubscription:.1f}x"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A box in a rack: one host, or several similar ones."""

    name: str
    rates: str
    remarks: str
    description: str
    slow: bool

    @property
    def height(self) -> int:
        return ROW + (LINE if self.remarks else 0)


def add_cluster(parent: ET.Element, cluster: Cluster) -> None:
    figure = add(parent, "figure")
    add(figure, "figcaption", " ".join(draw_tiles(add(figure, "div", name="racks"), cluster)))


def draw_tiles(
    parent: ET.Element, cluster: Cluster, remarks: Mapping[str, str] | None = None
) -> list[str]:
    """Draw the racks as pictures side by side; returns the sentences of the caption."""
    median_nic = median(_least(host.nic) for host in cluster.hosts)
    tiles = _tiles(cluster, median_nic)
    fastest = max(map(_uplink_bits, tiles)) or 1.0
    for racks in tiles[:MAX_TILES]:
        wide = max(THINNEST, WIDEST * _uplink_bits(racks) / fastest)
        spine = wide if len(cluster.racks) > 1 else None
        _draw_tile(parent, racks, median_nic, remarks or {}, spine)
    return list(_caption(cluster, len(tiles)))


def cluster_text(cluster: Cluster) -> str:
    hosts, racks = counted(len(cluster.hosts), "host"), counted(len(cluster.racks), "rack")
    return f"{counted(cluster.workers, 'worker')} on {hosts} in {racks}"


def duplex_text(rates: Duplex) -> str:
    """One rate if both directions have it; else both, with arrows up for out and down for in."""
    out, into = (about(rate.bits_per_second, "bit/s") for rate in (rates.out, rates.into))
    if out == into:
        return out
    up, down = (text.removesuffix("bit/s").replace(" ", "") for text in (out, into))
    return f"↑{up} ↓{down} bit/s"


def _caption(cluster: Cluster, tiles: int) -> Iterable[str]:
    nics = [host.nic for host in cluster.hosts]
    uplinks = [rack.uplink for rack in cluster.racks if rack.uplink is not None]
    if any("↑" in duplex_text(each) for each in (*nics, *uplinks)):
        yield "↑ is out of the host or rack, ↓ into it."
    if any(rack.uplink is None for rack in cluster.racks) and len(cluster.racks) > 1:
        yield "A dashed uplink is never the bottleneck."
    if tiles > MAX_TILES:
        yield f"{tiles - MAX_TILES} more kinds of racks are not drawn."
    if len(cluster.hosts) > MAX_DRAWN_HOSTS:
        yield "Hosts of similar speed are one box; racks with equal numbers of each are one rack."
    assumed = ", assumed" if cluster.latency_is_assumed else ""
    yield f"Latency within a rack: {about(cluster.latency.seconds, 's')}{assumed}."


def _tiles(cluster: Cluster, median_nic: float) -> list[list[Rack]]:
    """The racks of each tile: in large clusters those with equal numbers of hosts of each kind."""
    if len(cluster.hosts) <= MAX_DRAWN_HOSTS:
        return [[rack] for rack in cluster.racks]
    uplinks = [_least(rack.uplink) for rack in cluster.racks if rack.uplink is not None]
    median_uplink = median(uplinks) if uplinks else 1.0

    def kind(rack: Rack) -> Hashable:
        hosts = Counter(_kind(host, median_nic) for host in rack.hosts)
        speed = None if rack.uplink is None else _speed(rack.uplink, median_uplink)
        return speed, frozenset(hosts.items())

    return _alike(cluster.racks, kind)


def _uplink_bits(racks: Sequence[Rack]) -> float:
    """The lowest rate of these uplinks; 0 if they are never the bottleneck."""
    return min((_least(rack.uplink) for rack in racks if rack.uplink is not None), default=0.0)


def _row(hosts: Sequence[Host], median_nic: float, racks: int, remarks: Mapping[str, str]) -> _Row:
    """The box of similar hosts, whose number is the same in each of `racks` racks."""
    host, number = hosts[0], len(hosts) // racks
    alone = len(hosts) == 1
    name = host.name if alone else counted(number, "host")
    late = f"straggles {host.late.probability:.0%}" if host.late.probability else ""
    remark = remarks.get(host.name, "") if alone else ""
    parts = [word for word in (_speed(host.nic, median_nic), late, remark) if word]
    ranks = f"ranks {', '.join(str(rank) for rank in host.ranks)}" if alone else ""
    rates = _rates([each.nic for each in hosts])
    return _Row(
        name=name,
        rates=rates,
        remarks=", ".join(parts),
        description="; ".join(filter(None, [f"{name}: NIC {rates}", ranks, *parts])),
        slow="slow" in parts,
    )


def _rates(links: Sequence[Duplex]) -> str:
    """The rates of similar links; empty if there are none."""
    texts = dict.fromkeys(duplex_text(link) for link in links)
    if len(texts) > 1:
        return f"from {about(min(_least(link) for link in links), 'bit/s')}"
    return "".join(texts)


def _draw_tile(
    parent: ET.Element,
    racks: Sequence[Rack],
    median_nic: float,
    remarks: Mapping[str, str],
    cable: float | None,
) -> None:
    """Draw one rack, or several similar ones; `cable` is the width of the uplink, if there is a
    spine."""
    hosts = [host for rack in racks for host in rack.hosts]
    if len(racks) == 1 and len(hosts) <= MAX_TILE_ROWS:
        groups = [[host] for host in hosts]
    else:
        groups = _alike(hosts, lambda host: _kind(host, median_nic))
        groups.sort(key=lambda group: _least(group[0].nic))
    rows = [_row(group, median_nic, len(racks), remarks) for group in groups]
    uplink = _rates([rack.uplink for rack in racks if rack.uplink is not None])
    names = ", ".join(rack.name for rack in racks[:MAX_TILES])
    more = ", ..." if len(racks) > MAX_TILES else ""
    top = 2 if cable is None else TOP
    height = top + HEAD + sum(row.height for row in rows) + 8
    title = f"{names}{more}, uplink {uplink or 'never the bottleneck'}"
    drawn = picture(parent, TILE, height, title, desc="; ".join(row.description for row in rows))
    if cable is not None:
        line(drawn, 0, 4, TILE, 4, "spine")
        drawn_cable = line(drawn, CABLE, 6, CABLE, top, "uplink" if uplink else "uplink free")
        drawn_cable.set("stroke-width", f"{cable:.1f}")
        remark = remarks.get(racks[0].name, "") if len(racks) == 1 else ""
        words(drawn, CABLE + 14, 34, uplink, "faint")
        words(drawn, CABLE + 14, 34 + LINE, _fitting(remark, TILE - CABLE - 14), "faint")
    box(drawn, 4, top, TILE - 8, height - top - 2, "rack")
    name = names if len(racks) == 1 else f"{len(racks)} such racks"
    words(drawn, 12, top + 20, _fitting(name, TILE - 24), "letter")
    y = top + HEAD
    for row in rows:
        slow = "slow" if row.slow else ""
        tip(box(drawn, 10, y, TILE - 20, row.height - 5, f"host {slow}".strip()), row.description)
        for number, text in enumerate((row.name, row.rates, row.remarks), start=1):
            shade = slow or ("faint" if number > 1 else "")
            words(drawn, 17, y + LINE * number, _fitting(text, TILE - 34), shade)
        y += row.height


def _fitting(text: str, width: float) -> str:
    room = int(width / TILE_CHARACTER_PIXELS)
    return text if len(text) <= room else text[: room - 1] + "…"


def _least(rates: Duplex) -> float:
    return min(rates.out, rates.into).bits_per_second


def _speed(rates: Duplex, median_nic: float) -> str:
    """The word slow or fast, compared with the median; else empty."""
    if _least(rates) < SLOW_DRAWN_RATIO * median_nic:
        return "slow"
    return "fast" if SLOW_DRAWN_RATIO * _least(rates) > median_nic else ""


def _kind(host: Host, median_nic: float) -> Hashable:
    """The kind of a host: measured rates always differ a little, so only slow and fast count."""
    return _speed(host.nic, median_nic), round(host.late.probability, 1)


def _alike(items: Sequence[T], kind: Callable[[T], Hashable]) -> list[list[T]]:
    return list(grouped((kind(item), item) for item in items).values())


def tables(result: ProbeResult) -> list[Table]:
    hosts = [(rack, host) for rack in result.cluster.racks for host in rack.hosts]
    columns: dict[str, Callable[[tuple[Rack, Host]], str]] = {
        "host": lambda row: row[1].name,
        "rack": lambda row: row[0].name,
        "ranks": lambda row: ", ".join(map(str, row[1].ranks)),
        ">NIC out": lambda row: bits_text(row[1].nic.out.bits_per_second) * result.measured,
        ">NIC in": lambda row: bits_text(row[1].nic.into.bits_per_second) * result.measured,
        ">round trip": lambda row: seconds_text(result.round_trips.get(row[1].name)),
    }
    made = [table_of(hosts, columns, title=probe_title(result))]
    return [*made, table_of(result.uplinks, UPLINK_COLUMNS)] if result.uplinks else made


def outcome_text(result: ProbeResult, file: Path, picture: Path) -> str:
    lines = [
        f"racks ({result.sureness}): {result.reason}",
        *result.outliers,
        *result.contradictions,
        *result.notes,
        f"{result.measurements} measurements over {result.transport}, {result.seconds:.0f} s",
        f"written: {file} (for every --cluster), {picture}",
    ]
    return "\n".join(lines)


def probe_title(result: ProbeResult) -> str:
    cluster = result.cluster
    return f"{counted(len(cluster.hosts), 'host')} in {counted(len(cluster.racks), 'rack')}"


def draw_cluster(result: ProbeResult) -> str:
    """The measured cluster as an SVG document, with remarks on hosts and uplinks, and outliers and
    contradictions below it."""
    remarks = {host: about(seconds, "s") for host, seconds in result.round_trips.items()}
    for uplink in result.uplinks:
        least = min(uplink.out, uplink.into)
        remarks[uplink.rack] = (
            f"at least {bits_text(least)}"
            if uplink.oversubscription is None
            else f"{uplink.oversubscription:.1f}x oversubscribed"
        )
    notes = [*result.outliers, *result.contradictions]
    tiles = ET.Element("g")
    below = [*draw_tiles(tiles, result.cluster, remarks), *notes]
    y, rows = 60, [tiles[start : start + COLUMNS] for start in range(0, len(tiles), COLUMNS)]
    for row in rows:
        for index, tile in enumerate(row):
            tile.attrib.update({"x": str(16 + TILE * index), "y": str(y)})
        y += max(int(tile.attrib["height"]) for tile in row) + 16
    lead = f"racks ({result.sureness}): {result.reason}"
    root = document(CLUSTER_STYLE, title=probe_title(result), lead=lead)
    root.append(tiles)
    for index, text in enumerate(below, start=1):
        words(root, 16, y + LINE * index, text, "slow" if text in notes else "faint")
    return document_text(root)


def _rate(bits_per_second: float, full: bool) -> str:
    return ("" if full else "at least ") + bits_text(bits_per_second)
