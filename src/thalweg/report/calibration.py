"""What a calibration found, as tables for people and rows for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from thalweg.facts import Cluster, Figure, Machine, Workload, about

CODEC = ("bucket", "encode", "decode", "gathered")
STEP = ("forward", "backward", "optimizer")


def rows(cluster: Cluster, machine: Machine, workload: Workload) -> list[dict[str, Any]]:
    """A row for each figure; `spread` is its relative standard deviation, where there is one."""
    links = [
        _row("link", str(link), Figure(rate.bits_per_second), "bit/s")
        for link, rate in cluster.rates().items()
    ]
    codecs = [
        _row("codec", f"{name}: {what}", getattr(cost, what), "s")
        for name, cost in machine.codecs.items()
        for what in CODEC
    ]
    costs = [
        _row("cost", what, Figure(getattr(workload.costs, what).seconds), "s") for what in STEP
    ]
    return [*links, *_roads(machine), *codecs, *costs]


def tables(cluster: Cluster, machine: Machine, workload: Workload) -> Iterator[Table]:
    links = Table("link", "out", "in", "late")
    for host in cluster.hosts:
        late = host.late
        said = f"{late.probability:.0%}, by {late.delay}" if late.probability else "never"
        links.add_row(host.name, str(host.nic.out), str(host.nic.into), said)
    for rack in cluster.racks:
        if rack.uplink is not None:
            links.add_row(f"{rack.name}'s uplink", str(rack.uplink.out), str(rack.uplink.into), "")
    yield links
    roads = Table("what it costs", "figure", "spread")
    for row in _roads(machine):
        roads.add_row(row["name"], _text(row["value"], row["unit"]), f"{row['spread']:.0%}")
    for what in STEP:
        roads.add_row(f"a step's {what}", str(getattr(workload.costs, what)), "")
    yield roads
    if machine.codecs:
        codecs = Table(
            "compressor", *(f"{CODEC[0]}", *(f"{each}, an element" for each in CODEC[1:]))
        )
        for name, cost in machine.codecs.items():
            codecs.add_row(name, *(about(getattr(cost, each).value, "s") for each in CODEC))
        yield codecs


def _roads(machine: Machine) -> list[dict[str, Any]]:
    figures = [
        (f"{name}: {what}", figure, unit)
        for name, road in (("ours", machine.ours), ("the backend", machine.native))
        for what, figure, unit in (
            ("a message", road.message, "s"),
            ("a byte", road.byte, "s"),
            *(
                (f"{flows} flow{'s' * (flows > 1)} on a link", share, "of it")
                for flows, share in road.crowding
            ),
        )
    ]
    figures.append(("a link, at once after a rest", Figure(machine.burst), "B"))
    return [_row("road", *each) for each in figures]


def _row(kind: str, name: str, figure: Figure, unit: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "value": figure.value,
        "spread": figure.spread,
        "unit": unit,
    }


def _text(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "of it" else about(value, unit)
