"""A cluster in a page: one tile a rack, under a spine, as many side by side as the page has room.

An uplink is as wide as its rate; a dashed one is never the bottleneck. Hosts of a large rack that
are alike are one box, and so are the racks of a large cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar
from xml.etree import ElementTree as ET

from thalweg.facts import Cluster, Duplex, Host, Rack, about
from thalweg.report.page import add, picture
from thalweg.report.shapes import line, tip, words

T = TypeVar("T")
MAX_DRAWN_HOSTS = 64  # in a cluster whose racks are all drawn
MAX_TILE_ROWS = 8  # in a rack whose hosts are all drawn
MAX_TILES = 12
TILE_WIDTH_PIXELS, TOP, HEAD, ROW, LINE = 164, 58, 30, 42, 15
CABLE, WIDEST, THINNEST = 24, 14.0, 2.0
TILE_CHARACTER_PIXELS = 7.2  # pixels, at most on average
SLOW_DRAWN_RATIO = 0.75  # of what is usual


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A box in a rack: one host, or several that are alike."""

    name: str
    rates: str
    remarks: str
    description: str
    slow: bool

    @property
    def height(self) -> int:
        return ROW + (LINE if self.remarks else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """A rack, or several that are alike."""

    name: str
    rows: Sequence[_Row]
    uplink: str  # its rates; empty: never the bottleneck
    bits: float  # its slower direction's, a second
    description: str


def add_cluster(parent: ET.Element, cluster: Cluster) -> None:
    figure = add(parent, "figure")
    found = _tiles(cluster)
    box = add(figure, "div", name="racks")
    fastest = max(tile.bits for tile in found) or 1.0
    for tile in found[:MAX_TILES]:
        _draw_tile(box, tile, fastest, spine=len(cluster.racks) > 1)
    add(figure, "figcaption", " ".join(_caption(cluster, len(found))))


def cluster_text(cluster: Cluster) -> str:
    numbers = (
        (cluster.workers, "worker"),
        (len(cluster.hosts), "host"),
        (len(cluster.racks), "rack"),
    )
    workers, hosts, racks = (f"{number} {what}{'s' * (number > 1)}" for number, what in numbers)
    return f"{workers} on {hosts} in {racks}"


def duplex_text(rates: Duplex) -> str:
    """One rate if both directions have it; otherwise out is up and in is down."""
    out, into = (about(rate.bits_per_second, "bit/s") for rate in (rates.out, rates.into))
    if out == into:
        return out
    (up, its_unit), (down, unit) = out.split(), into.split()
    if its_unit == unit:
        return f"↑{up} ↓{down} {unit}"
    prefixes = [text.removesuffix("bit/s") for text in (its_unit, unit)]
    return f"↑{up}{prefixes[0]} ↓{down}{prefixes[1]} bit/s"


def _caption(cluster: Cluster, tiles: int) -> Iterable[str]:
    if any("↑" in duplex_text(each) for each in _links(cluster)):
        yield "↑ is out of the host or rack, ↓ into it."
    if any(rack.uplink is None for rack in cluster.racks) and len(cluster.racks) > 1:
        yield "A dashed uplink is never the bottleneck."
    if tiles > MAX_TILES:
        yield f"{tiles - MAX_TILES} more kinds of racks are not drawn."
    if len(cluster.hosts) > MAX_DRAWN_HOSTS:
        yield "Hosts that are about as fast are one box; racks with as many of each are one rack."
    assumed = ", assumed" if cluster.latency_is_assumed else ""
    yield f"Latency within a rack: {about(cluster.latency.seconds, 's')}{assumed}."


def _links(cluster: Cluster) -> Iterable[Duplex]:
    yield from (host.nic for host in cluster.hosts)
    yield from (rack.uplink for rack in cluster.racks if rack.uplink is not None)


def _tiles(cluster: Cluster) -> list[_Tile]:
    usual = median(_least(host.nic) for host in cluster.hosts)
    if len(cluster.hosts) <= MAX_DRAWN_HOSTS:
        return [_tile([rack], usual) for rack in cluster.racks]
    uplinks = [_least(rack.uplink) for rack in cluster.racks if rack.uplink is not None]
    usual_uplink = median(uplinks) if uplinks else 1.0

    def kind(rack: Rack) -> Hashable:
        hosts = Counter(_kind(host, usual) for host in rack.hosts)
        speed = None if rack.uplink is None else _speed(rack.uplink, usual_uplink)
        return speed, frozenset(hosts.items())

    return [_tile(racks, usual) for racks in _alike(cluster.racks, kind)]


def _tile(racks: Sequence[Rack], usual: float) -> _Tile:
    """Of one rack, or of several with as many hosts of each kind."""
    hosts = [host for rack in racks for host in rack.hosts]
    if len(racks) == 1 and len(hosts) <= MAX_TILE_ROWS:
        groups = [[host] for host in hosts]
    else:
        groups = _alike(hosts, lambda host: _kind(host, usual))
        groups.sort(key=lambda group: _least(group[0].nic))
    rows = [_row(group, usual, len(racks)) for group in groups]
    names = ", ".join(rack.name for rack in racks[:MAX_TILES])
    return _Tile(
        name=names if len(racks) == 1 else f"{len(racks)} such racks",
        rows=rows,
        uplink=_rates([rack.uplink for rack in racks if rack.uplink is not None]),
        bits=min((_least(rack.uplink) for rack in racks if rack.uplink is not None), default=0.0),
        description=names + (", ..." if len(racks) > MAX_TILES else ""),
    )


def _row(hosts: Sequence[Host], usual: float, racks: int) -> _Row:
    """Of hosts that are alike, evenly from so many racks."""
    host, number = hosts[0], len(hosts) // racks
    alone = len(hosts) == 1
    name = host.name if alone else f"{number} host{'s' * (number > 1)}"
    late = f"late {host.late.probability:.0%}" if host.late.probability else ""
    remarks = [word for word in (_speed(host.nic, usual), late) if word]
    ranks = f"ranks {', '.join(str(rank) for rank in host.ranks)}" if alone else ""
    rates = _rates([each.nic for each in hosts])
    return _Row(
        name=name,
        rates=rates,
        remarks=", ".join(remarks),
        description="; ".join(filter(None, [f"{name}: NIC {rates}", ranks, *remarks])),
        slow="slow" in remarks,
    )


def _rates(links: Sequence[Duplex]) -> str:
    """Of links that are alike; nothing if there are none."""
    texts = dict.fromkeys(duplex_text(link) for link in links)
    if len(texts) > 1:
        return f"from {about(min(_least(link) for link in links), 'bit/s')}"
    return "".join(texts)


def _draw_tile(parent: ET.Element, tile: _Tile, fastest: float, *, spine: bool) -> None:
    top = TOP if spine else 2
    height = top + HEAD + sum(row.height for row in tile.rows) + 8
    title = f"{tile.description}, uplink {tile.uplink or 'never the bottleneck'}"
    drawn = picture(
        parent,
        TILE_WIDTH_PIXELS,
        height,
        title,
        desc="; ".join(row.description for row in tile.rows),
    )
    if spine:
        line(drawn, 0, 4, TILE_WIDTH_PIXELS, 4, "spine")
        cable = line(drawn, CABLE, 6, CABLE, top, "uplink" if tile.uplink else "uplink free")
        cable.set("stroke-width", f"{max(THINNEST, WIDEST * tile.bits / fastest):.1f}")
        words(drawn, CABLE + 14, 34, tile.uplink, "faint")
    _box(drawn, 4, top, TILE_WIDTH_PIXELS - 8, height - top - 2, "rack")
    words(drawn, 12, top + 20, _fitting(tile.name, TILE_WIDTH_PIXELS - 24), "letter")
    y = top + HEAD
    for row in tile.rows:
        name = "slow" if row.slow else ""
        tip(
            _box(drawn, 10, y, TILE_WIDTH_PIXELS - 20, row.height - 5, f"host {name}".strip()),
            row.description,
        )
        for number, text in enumerate((row.name, row.rates, row.remarks), start=1):
            shade = name or ("faint" if number > 1 else "")
            words(drawn, 17, y + LINE * number, _fitting(text, TILE_WIDTH_PIXELS - 34), shade)
        y += row.height


def _box(root: ET.Element, x: int, y: int, width: int, height: int, name: str) -> ET.Element:
    place = {"x": str(x), "y": str(y), "width": str(width), "height": str(height), "rx": "5"}
    return add(root, "rect", name=name, **place)


def _fitting(text: str, width: float) -> str:
    room = int(width / TILE_CHARACTER_PIXELS)
    return text if len(text) <= room else text[: room - 1] + "…"


def _least(rates: Duplex) -> float:
    return min(rates.out, rates.into).bits_per_second


def _speed(rates: Duplex, usual: float) -> str:
    """In a word, if it isn't what is usual."""
    if _least(rates) < SLOW_DRAWN_RATIO * usual:
        return "slow"
    return "fast" if SLOW_DRAWN_RATIO * _least(rates) > usual else ""


def _kind(host: Host, usual: float) -> Hashable:
    """Measured rates always differ a little: hosts are alike if both are slow, fast or neither."""
    return _speed(host.nic, usual), round(host.late.probability, 1)


def _alike(items: Sequence[T], kind: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return list(groups.values())
