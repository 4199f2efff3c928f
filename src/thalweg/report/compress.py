"""What compressors cost and on which links they pay, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from thalweg.facts import about

Row = Mapping[str, Any]
HEADINGS = (
    "encode",
    "decode",
    "payload",
    "ratio",
    "sent",
    "break-even",
    "ddp beaten below",
)
FIGURES = (
    "encode, decode: processor time of one thread; payload: what a worker has to tell; sent: by "
    "each worker",
    "break-even: it pays on slower links than this if nothing is hidden behind backward; ddp "
    "beaten below: the same where ddp hides what it can",
)


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """Our methods, and then those that others use."""
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("method")
    table.add_column("exchange")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    own = [row for row in rows if not row["peer"]]
    peers = [row for row in rows if row["peer"]]
    for row in own:
        table.add_row(*_cells(row))
    if own and peers:
        table.add_row()
    for row in peers:
        table.add_row(*_cells(row), style="dim")
    return table


def _cells(row: Row) -> list[str]:
    together = row["decode_ms"] is None
    return [
        row["method"],
        row["exchange"],
        _milliseconds(row["encode_ms"]),
        "with it" if together else _milliseconds(row["decode_ms"]),
        about(row["payload_bytes"], "B"),
        f"{row['ratio']:.3g}x",
        about(row["wire_bytes"], "B"),
        "" if row["breakeven_gbps"] is None else _speed(row["breakeven_gbps"]),
        _speed(row["pays_below_gbps"]) if row["pays"] == "below" else row["pays"],
    ]


def _milliseconds(value: float) -> str:
    return about(value / 1e3, "s")


def _speed(gbps: float) -> str:
    return about(1e9 * gbps, "bit/s")
