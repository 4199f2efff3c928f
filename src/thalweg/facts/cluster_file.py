"""A cluster as a TOML file that a person can read and edit.

    latency = "100us"               # one small message between two hosts of a rack

    [[rack]]
    name = "a"
    uplink = "200mbit"              # or { out = "200mbit", in = "50mbit" }; absent: no bottleneck
    nic = "200mbit"                 # of its hosts, unless they say otherwise
    latency = "0s"                  # what crossing the uplink adds
    hosts = [
        { name = "a0", ranks = [0] },
        { name = "a1", ranks = [1], nic = "50mbit", late = { probability = 0.05, delay = "2s" } },
    ]

`hosts = 4` or `hosts = ["a0", "a1"]` serve where there is nothing more to say; ranks then follow
the order of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from textwrap import wrap
from typing import Any

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
from thalweg.facts.toml_reader import TomlTable, load_toml, read_toml
from thalweg.facts.units import Duration

COMMENT_WIDTH = 96


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a file that `thalweg probe` or a person wrote; ClusterError names what is
    wrong with it, and where."""
    return read_toml(path, parse_cluster, ClusterError)


def parse_cluster(text: str) -> Cluster:
    table = load_toml(text, "the file", ClusterError)
    table.only("latency", "rack")
    racks = table.data.get("rack")
    if not isinstance(racks, list) or not racks:
        raise ClusterError("no [[rack]] in the file", "add one with a name and its hosts")
    tables = [TomlTable(rack, f"rack {index}", ClusterError) for index, rack in enumerate(racks)]
    numbers = None if _numbers_its_ranks(tables) else count()
    return Cluster(
        racks=tuple(_rack(rack, numbers) for rack in tables),
        latency=table.duration("latency", ASSUMED_LATENCY),
        assumed=assumptions(
            nic=not all(_declares_nics(rack) for rack in tables), latency="latency" not in table
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
        usual = max(nics, key=nics.count)
        lines += ["", "[[rack]]", f'name = "{rack.name}"']
        if rack.uplink is not None:
            lines.append(f"uplink = {_format_duplex(rack.uplink)}")
        if rack.latency.seconds:
            lines.append(f'latency = "{rack.latency}"  # what crossing the uplink adds')
        lines += [f"nic = {_format_duplex(usual)}", "hosts = ["]
        lines += [f"    {_format_host(host, usual)}," for host in rack.hosts]
        lines.append("]")
    return "\n".join(lines) + "\n"


def _hosts(rack: TomlTable) -> list[Any]:
    hosts = rack.data.get("hosts", [])
    if type(hosts) is int:
        if hosts > MAX_WORKERS:
            raise ClusterError(f"{hosts} hosts are too many", f"give at most {MAX_WORKERS}")
        return [f"{rack.data.get('name')}-{index}" for index in range(hosts)]
    if not isinstance(hosts, list):
        raise ClusterError(
            f"hosts of {rack.where} is no list", 'write hosts = 4 or hosts = ["a", "b"]'
        )
    return hosts


def _numbers_its_ranks(racks: list[TomlTable]) -> bool:
    """True if the file numbers the ranks; ClusterError if it does so for some hosts only."""
    entries = [host for rack in racks for host in _hosts(rack)]
    numbered = [isinstance(host, dict) and "ranks" in host for host in entries]
    if any(numbered) and not all(numbered):
        raise ClusterError("some hosts name their ranks and some don't", "do it for all or none")
    return any(numbered)


def _declares_nics(rack: TomlTable) -> bool:
    return "nic" in rack or all(isinstance(h, dict) and "nic" in h for h in _hosts(rack))


def _rack(table: TomlTable, numbers: count[int] | None) -> Rack:
    table.only("name", "uplink", "nic", "latency", "hosts")
    name = table.name()
    table.where = f"rack {name}"
    nic = duplex(table, "nic") or Duplex.both(ASSUMED_NIC)
    return Rack(
        name=name,
        hosts=tuple(_host(host, table.where, nic, numbers) for host in _hosts(table)),
        uplink=duplex(table, "uplink"),
        latency=table.duration("latency", Duration(0.0)),
    )


def _host(entry: Any, rack: str, nic: Duplex, numbers: count[int] | None) -> Host:
    data = {"name": entry} if isinstance(entry, str) else entry
    table = TomlTable(data, f"a host of {rack}", ClusterError)
    name = table.name()
    table.where = f"host {name}"
    table.only("name", "ranks", "nic", "late")
    return Host(
        name=name,
        ranks=(next(numbers),) if numbers else table.whole_numbers("ranks", 0, "ranks = [0]"),
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
    for direction in ("out", "in"):
        if direction not in rates:
            raise ClusterError(f"{rates.where} lacks {direction!r}", "give both, out and in")
    return Duplex(rates.rate("out"), rates.rate("in"))


def straggler_delay(table: TomlTable) -> StragglerDelay:
    """The straggler delay in a table like `{ probability = 0.05, delay = "2s" }`."""
    table.only("probability", "delay")
    probability = table.data.get("probability", 0.0)
    if type(probability) not in (int, float) or not 0 <= probability <= 1:
        raise ClusterError(f"{table.where}: {probability!r} is no probability", "give 0 to 1")
    return StragglerDelay(probability=probability, delay=table.duration("delay", Duration(0.0)))


def _format_duplex(rates: Duplex) -> str:
    if rates.out == rates.into:
        return f'"{rates.out}"'
    return f'{{ out = "{rates.out}", in = "{rates.into}" }}'


def _format_host(host: Host, usual: Duplex) -> str:
    parts = [f'name = "{host.name}"', f"ranks = {list(host.ranks)}"]
    if host.nic != usual:
        parts.append(f"nic = {_format_duplex(host.nic)}")
    if host.late != StragglerDelay():
        late = f'probability = {host.late.probability}, delay = "{host.late.delay}"'
        parts.append(f"late = {{ {late} }}")
    return f"{{ {', '.join(parts)} }}"
