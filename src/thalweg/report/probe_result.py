"""A measured cluster as tables, hosts with their NICs and racks with their uplinks; and drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from thalweg.facts import Host, Rack, about, counted
from thalweg.probing.link_rates import Uplink
from thalweg.probing.result import ProbeResult
from thalweg.report.cluster_svg import cluster_document
from thalweg.report.tables import bits_text, seconds_text, table_of

UPLINK_COLUMNS: dict[str, Callable[[Uplink], str]] = {
    "uplink of": lambda uplink: uplink.rack,
    ">out": lambda uplink: _rate(uplink.out, uplink.out_full),
    ">in": lambda uplink: _rate(uplink.into, uplink.into_full),
    ">oversubscribed": lambda uplink: (
        "no" if uplink.oversubscription is None else f"{uplink.oversubscription:.1f}x"
    ),
}


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
    lines = [f"racks ({result.sureness}): {result.reason}"]
    lines += [*result.outliers, *result.contradictions, *result.notes]
    lines.append(
        f"{result.measurements} measurements over {result.transport}, {result.seconds:.0f} s"
    )
    lines.append(f"written: {file} (for every --cluster), {picture}")
    return "\n".join(lines)


def probe_title(result: ProbeResult) -> str:
    cluster = result.cluster
    return f"{counted(len(cluster.hosts), 'host')} in {counted(len(cluster.racks), 'rack')}"


def draw_cluster(result: ProbeResult) -> str:
    """The measured cluster as an SVG document, with outliers and contradictions below it."""
    remarks = {host: about(seconds, "s") for host, seconds in result.round_trips.items()}
    for uplink in result.uplinks:
        least = min(uplink.out, uplink.into)
        remarks[uplink.rack] = (
            f"at least {bits_text(least)}"
            if uplink.oversubscription is None
            else f"{uplink.oversubscription:.1f}x oversubscribed"
        )
    return cluster_document(
        result.cluster,
        title=probe_title(result),
        lead=f"racks ({result.sureness}): {result.reason}",
        remarks=remarks,
        notes=[*result.outliers, *result.contradictions],
    )


def _rate(bits_per_second: float, full: bool) -> str:
    return ("" if full else "at least ") + bits_text(bits_per_second)
