"""A cluster as a TOML file that a person can read and edit.

    latency = "100us"               # one small message between two hosts of a rack

    [[rack]]
    name = "a"
    uplink = "200mbit"              # or { out = "200mbit", in = "50mbit" }; absent: no bottleneck
    nic = "200mbit"                 # of each host of the rack that has no `nic` of its own
    latency = "0s"                  # added to a message that crosses the uplink
    hosts = [
        { name = "a0", ranks = [0] },
        { name = "a1", ranks = [1], nic = "50mbit", late = { probability = 0.05, delay = "2s" } },
    ]

`hosts = 4` or `hosts = ["a0", "a1"]` are short forms. If no host has `ranks`, each host has one,
numbered in the order of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from textwrap import wrap

from thalweg.errors import ClusterError
from thalweg.facts.cluster import (
    ASSUMED_LATENCY,
    ASSUMED_NIC,
    MAX_WORKERS,
    Cluster,
    Duplex,
    Host,
    Rack,
    StragglerDelay,
    assumptions,
)
from thalweg.facts.toml_reader import TomlTable, format_toml, load_toml, read_toml
from thalweg.facts.units import Duration

COMMENT_WIDTH = 96


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file that `thalweg probe` or a person wrote; ClusterError names the mistake
    in the file, and its place."""
    return read_toml(path, parse_cluster, ClusterError)


def parse_cluster(text: str) -> Cluster:
    """The cluster that the text of a cluster file describes; ClusterError if it has a mistake."""
    table = load_toml(text, "the file", ClusterError)
    table.only("latency", "rack")
    racks = table.data.get("rack")
    if not isinstance(racks, list) or not racks:
        raise ClusterError("no [[rack]] in the file", "add one with a name and its hosts")
    tables = [TomlTable(rack, f"rack {index}", ClusterError) for index, rack in enumerate(racks)]
    names = [rack.name("rack") for rack in tables]
    hosts = [_hosts(rack, name) for rack, name in zip(tables, names, strict=True)]
    numbered = ["ranks" in host for host in chain(*hosts)]
    if any(numbered) and not all(numbered):
        raise ClusterError("some hosts name their ranks and some don't", "do it for all or none")
    next_ranks = None if any(numbered) else count()
    return Cluster(
        racks=tuple(
            _rack(name, rack, own, next_ranks)
            for name, rack, own in zip(names, tables, hosts, strict=True)
        ),
        latency=table.duration("latency", ASSUMED_LATENCY),
        assumed=assumptions(
            nic=not all(
                "nic" in rack or all("nic" in host for host in own)
                for rack, own in zip(tables, hosts, strict=True)
            ),
            latency="latency" not in table,
        ),
    )


def format_cluster(cluster: Cluster, remarks: Sequence[str] = ()) -> str:
    """The text of a cluster file, with remarks as comments at its head."""
    lines = [
        "# A cluster: who is where, and how fast the links are. Edit it freely.",
        *(f"# {line}" for remark in remarks for line in wrap(remark, COMMENT_WIDTH)),
        f'latency = "{cluster.latency}"  # one small message between two hosts of a rack',
    ]
    for rack in cluster.racks:
        nics = [host.nic for host in rack.hosts]
        common = max(nics, key=nics.count)
        lines += ["", "[[rack]]", f'name = "{rack.name}"']
        if rack.uplink is not None:
            lines.append(f"uplink = {_format_duplex(rack.uplink)}")
        if rack.latency.seconds:
            lines.append(f'latency = "{rack.latency}"  # what crossing the uplink adds')
        lines += [f"nic = {_format_duplex(common)}", "hosts = ["]
        lines += [f"    {_format_host(host, common)}," for host in rack.hosts]
        lines.append("]")
    return "\n".join(lines) + "\n"


def _hosts(rack: TomlTable, name: str) -> list[TomlTable]:
    """The table of each host of a rack, whichever form `hosts` has."""
    if type(hosts := rack.data.get("hosts")) is int:
        if hosts > MAX_WORKERS:
            raise ClusterError(f"{hosts} hosts are too many", f"give at most {MAX_WORKERS}")
        rack.data["hosts"] = [f"{name}-{index}" for index in range(hosts)]
    entries = rack.array("hosts", 'hosts = 4 or hosts = ["a", "b"]')
    tables = ({"name": entry} if isinstance(entry, str) else entry for entry in entries)
    return [TomlTable(table, f"a host of {rack.where}", ClusterError) for table in tables]


def _rack(
    name: str, table: TomlTable, hosts: Sequence[TomlTable], next_ranks: count[int] | None
) -> Rack:
    table.only("name", "uplink", "nic", "latency", "hosts")
    nic = duplex(table, "nic") or Duplex.both(ASSUMED_NIC)
    return Rack(
        name=name,
        hosts=tuple(_host(host, nic, next_ranks) for host in hosts),
        uplink=duplex(table, "uplink"),
        latency=table.duration("latency", Duration(0.0)),
    )


def _host(table: TomlTable, nic: Duplex, next_ranks: count[int] | None) -> Host:
    """The host in a table; its rank is the next of `next_ranks`, unless the file has the ranks."""
    name = table.name("host")
    table.only("name", "ranks", "nic", "late")
    return Host(
        name=name,
        ranks=table.whole_numbers("ranks", 0, "ranks = [0]")
        if next_ranks is None
        else (next(next_ranks),),
        nic=duplex(table, "nic") or nic,
        late=straggler_delay(table.table("late")) if "late" in table else StragglerDelay(),
    )


def duplex(table: TomlTable, key: str) -> Duplex | None:
    """The rates under this key, `"200mbit"` or `{ out = "200mbit", in = "50mbit" }`."""
    if key not in table:
        return None
    if not isinstance(table.data[key], dict):
        return Duplex.both(table.rate(key))
    rates = table.table(key)
    rates.only("out", "in")
    if missing := [direction for direction in ("out", "in") if direction not in rates]:
        raise ClusterError(f"{rates.where} lacks {missing[0]!r}", "give both, out and in")
    return Duplex(rates.rate("out"), rates.rate("in"))


def straggler_delay(table: TomlTable) -> StragglerDelay:
    """The straggler delay in a table like `{ probability = 0.05, delay = "2s" }`."""
    table.only("probability", "delay")
    probability = table.data.get("probability", 0.0)
    if type(probability) not in (int, float) or not 0 <= probability <= 1:
        raise ClusterError(f"{table.where}: {probability!r} is no probability", "give 0 to 1")
    return StragglerDelay(probability=probability, delay=table.duration("delay", Duration(0.0)))


def _format_duplex(rates: Duplex) -> str:
    both = {"out": rates.out, "in": rates.into}
    return format_toml(rates.out if rates.out == rates.into else both)


def _format_host(host: Host, common: Duplex) -> str:
    parts = [f"name = {format_toml(host.name)}", f"ranks = {format_toml(list(host.ranks))}"]
    if host.nic != common:
        parts.append(f"nic = {_format_duplex(host.nic)}")
    if host.late != StragglerDelay():
        late = {"probability": host.late.probability, "delay": host.late.delay}
        parts.append(f"late = {format_toml(late)}")
    return f"{{ {', '.join(parts)} }}"
