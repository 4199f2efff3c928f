"""A lab as tables: hosts with their NICs, racks with their uplinks."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def hosts_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("host", "rack", "ranks", "address", "NIC out", "NIC in"):
        table.add_column(heading)
    for heading in ("drops", "processes"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["host"],
            row["rack"],
            ", ".join(map(str, row["ranks"])),
            row["address"],
            _rate(row["nic_out"]),
            _rate(row["nic_in"]),
            str(row["nic_out"]["drops"] + row["nic_in"]["drops"]),
            str(row["processes"]),
        )
    return table


def uplinks_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for heading in ("uplink of", "out", "in"):
        table.add_column(heading)
    table.add_column("drops", justify="right")
    for row in rows:
        drops = row["uplink_out"]["drops"] + row["uplink_in"]["drops"]
        table.add_row(row["rack"], _rate(row["uplink_out"]), _rate(row["uplink_in"]), str(drops))
    return table


def _rate(way: dict[str, Any]) -> str:
    """One direction of a link, in a few words."""
    words = [way["rate"] or "no limit"]
    if way["cut"]:
        words = ["CUT"]
    elif way["rate"] != way["declared"]:
        words.append(f"(of {way['declared'] or 'no limit'})")
    if way["flows"]:
        words.append(f"+{way['flows']} flows")
    return " ".join(words)
