"""A measured cluster as tables: hosts with their NICs, racks with their uplinks."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from thalweg.facts import about
from thalweg.report.measured import Measured, MeasuredUplink


def tables(found: Measured) -> list[Table]:
    return [_hosts(found)] + ([_uplinks(found)] if found.uplinks else [])


def outcome_text(found: Measured, file: Path, picture: Path) -> str:
    lines = [f"racks ({found.sureness}): {found.reason}"]
    lines += [*found.outliers, *found.contradictions, *found.notes]
    lines.append(f"{found.measurements} measurements over {found.transport}, {found.seconds:.0f} s")
    lines.append(f"written: {file} (for every --cluster), {picture}")
    return "\n".join(lines)


def heading(found: Measured) -> str:
    numbers = (len(found.cluster.hosts), "host"), (len(found.cluster.racks), "rack")
    return " in ".join(f"{number} {what}{'s' if number > 1 else ''}" for number, what in numbers)


def _hosts(found: Measured) -> Table:
    title = heading(found)
    table = Table(title=title, title_justify="left", box=None)
    for name in ("host", "rack", "ranks"):
        table.add_column(name)
    for name in ("NIC out", "NIC in", "round trip"):
        table.add_column(name, justify="right")
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


def _uplinks(found: Measured) -> Table:
    table = Table(box=None)
    table.add_column("uplink of")
    for name in ("out", "in", "oversubscribed"):
        table.add_column(name, justify="right")
    for uplink in found.uplinks:
        factor = uplink.oversubscription
        table.add_row(
            uplink.rack,
            *way_texts(uplink),
            "no" if factor is None else f"{factor:.1f}x",
        )
    return table


def way_texts(uplink: MeasuredUplink) -> tuple[str, str]:
    """Its rates out and in, in words."""
    out, into = (
        ("" if full else "at least ") + _bits(rate)
        for rate, full in ((uplink.out, uplink.out_full), (uplink.into, uplink.into_full))
    )
    return out, into


def _bits(rate: float) -> str:
    return about(rate, "bit/s")
