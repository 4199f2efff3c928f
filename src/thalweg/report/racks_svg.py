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
MOST_HOSTS = 64  # in a cluster whose racks are all drawn
MOST_ROWS = 8  # in a rack whose hosts are all drawn
MOST_TILES = 12
WIDTH, TOP, HEAD, ROW = 164, 58, 30, 42
CABLE, WIDEST, THINNEST = 24, 14.0, 2.0
LETTER = 7.2  # pixels, at most on average
SLOW = 0.75  # of what is usual


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A box in a rack: one host, or several that are alike."""

    name: str
    rates: str = ""
    remarks: str = ""
    told: str
    slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """A rack, or several that are alike."""

    name: str
    rows: Sequence[_Row]
    uplink: Duplex | None
    told: str


def add_cluster(parent: ET.Element, cluster: Cluster) -> None:
    figure = add(parent, "figure")
    found = _tiles(cluster)
    box = add(figure, "div", name="racks")
    uplinks = [tile.uplink for tile in found if tile.uplink is not None]
    fastest = max((_least(uplink) for uplink in uplinks), default=1.0)
    for tile in found[:MOST_TILES]:
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
    if tiles > MOST_TILES:
        yield f"{tiles - MOST_TILES} more kinds of racks are not drawn."
    if cluster.latency_is_assumed:
        yield f"Latency within a rack: {cluster.latency}, assumed."
    else:
        yield f"Latency within a rack: {about(cluster.latency.seconds, 's')}."


def _links(cluster: Cluster) -> Iterable[Duplex]:
    yield from (host.nic for host in cluster.hosts)
    yield from (rack.uplink for rack in cluster.racks if rack.uplink is not None)


def _tiles(cluster: Cluster) -> list[_Tile]:
    usual = median(_least(host.nic) for host in cluster.hosts)
    if len(cluster.hosts) <= MOST_HOSTS:
        return [_tile([rack], usual) for rack in cluster.racks]
    groups = _alike(
        cluster.racks, lambda rack: (rack.uplink, tuple(Counter(map(_kind, rack.hosts)).items()))
    )
    return [_tile(racks, usual) for racks in groups]


def _tile(racks: Sequence[Rack], usual: float) -> _Tile:
    rack = racks[0]
    if len(racks) == 1 and len(rack.hosts) <= MOST_ROWS:
        groups: list[list[Host]] = [[host] for host in rack.hosts]
    else:
        groups = sorted(_alike(rack.hosts, _kind), key=lambda hosts: _least(hosts[0].nic))
    rows = [_row(hosts, usual, named=len(racks) == 1) for hosts in groups]
    if len(rows) > MOST_ROWS:
        left = sum(len(hosts) for hosts in groups[MOST_ROWS - 1 :])
        more = _Row(name=f"{left} more hosts", told=f"{left} more hosts")
        rows = [*rows[: MOST_ROWS - 1], more]
    names = ", ".join(each.name for each in racks[:MOST_TILES])
    return _Tile(
        name=rack.name if len(racks) == 1 else f"{len(racks)} such racks",
        rows=rows,
        uplink=rack.uplink,
        told=names + (", ..." if len(racks) > MOST_TILES else ""),
    )


def _row(hosts: Sequence[Host], usual: float, *, named: bool) -> _Row:
    host = hosts[0]
    slow = _least(host.nic) < SLOW * usual
    late = f"late {host.late.probability:.0%}" if host.late.probability else ""
    ranks = ", ".join(str(rank) for rank in host.ranks)
    alone = len(hosts) == 1 and named
    name = host.name if alone else f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
    rates = duplex_text(host.nic)
    remarks = [word for word in ("slow" if slow else "", late) if word]
    told = f"{name}: NIC {rates}" + (f"; ranks {ranks}" if alone else "")
    return _Row(
        name=name,
        rates=rates,
        remarks=", ".join(remarks),
        told="; ".join([told, *remarks]),
        slow=slow,
    )


def _draw_tile(parent: ET.Element, tile: _Tile, fastest: float, *, spine: bool) -> None:
    top = TOP if spine else 2
    height = top + HEAD + ROW * len(tile.rows) + 8
    rates = "" if tile.uplink is None else duplex_text(tile.uplink)
    title = f"{tile.told}, uplink {rates or 'never the bottleneck'}"
    drawn = picture(parent, WIDTH, height, title, desc="; ".join(row.told for row in tile.rows))
    if spine:
        line(drawn, 0, 4, WIDTH, 4, "spine")
        cable = line(drawn, CABLE, 6, CABLE, top, "uplink" if tile.uplink else "uplink free")
        share = 0.0 if tile.uplink is None else _least(tile.uplink) / fastest
        cable.set("stroke-width", f"{max(THINNEST, WIDEST * share):.1f}")
        words(drawn, CABLE + 14, 34, rates, "faint")
    _box(drawn, 4, top, WIDTH - 8, height - top - 2, "rack")
    words(drawn, 12, top + 20, _fitting(tile.name, WIDTH - 24), "letter")
    for number, row in enumerate(tile.rows):
        y = top + HEAD + ROW * number
        name = "slow" if row.slow else ""
        tip(_box(drawn, 10, y, WIDTH - 20, ROW - 5, f"host {name}".strip()), row.told)
        room = WIDTH - 34 - LETTER * (len(row.remarks) + 1 if row.remarks else 0)
        words(drawn, 17, y + 15, _fitting(row.name, room), name)
        words(drawn, WIDTH - 17, y + 15, row.remarks, f"end {name}".strip())
        words(drawn, 17, y + 30, row.rates, name or "faint")


def _box(root: ET.Element, x: int, y: int, width: int, height: int, name: str) -> ET.Element:
    place = {"x": str(x), "y": str(y), "width": str(width), "height": str(height), "rx": "5"}
    return add(root, "rect", name=name, **place)


def _fitting(text: str, width: float) -> str:
    room = int(width / LETTER)
    return text if len(text) <= room else text[: room - 1] + "…"


def _least(rates: Duplex) -> float:
    return min(rates.out, rates.into).bits_per_second


def _kind(host: Host) -> Hashable:
    return host.nic, host.late.probability


def _alike(items: Sequence[T], kind: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return list(groups.values())
