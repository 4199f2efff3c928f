"""Clusters, machines and workloads as TOML files that a person can read and edit.

*A cluster*:

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

*A machine*: the costs of messages, bytes and codecs, in a file beside the cluster's.

    burst = 131072                  # bytes that a link carries at once after a rest
    contention = 1.0                # of a codec's seconds, what backward loses while both run

    [ours]                          # and [native], the backend's own collectives
    message = { seconds = 1.2e-4, spread = 0.1 }    # it keeps its receiver busy, besides its bytes
    byte = { seconds = 0.0 }                        # that a rank sends or takes in
    crowding = [                                    # so many flows get this share of a link
        { flows = 1, share = 0.97, spread = 0.01 },
        { flows = 7, share = 0.8 },
    ]
    drag = [{ schedule = "halving_doubling", times = 1.2 }]    # as long as that explains

    [[codec]]
    name = "powersgd(rank=4)"
    bucket = { seconds = 2e-4 }     # whatever its size
    encode = { seconds = 3e-9 }     # for each element; so are the others
    decode = { seconds = 2e-9 }
    gathered = { seconds = 0.0 }    # of each payload, where payloads are gathered

All may be left out; `spread` is a standard deviation relative to its figure.

*A workload*:

    name = "mlp"
    forward = "10ms"                # seconds of one step on one worker; all may be left out
    backward = "20ms"
    optimizer = "1ms"
    tensors = [
        { name = "in.weight", shape = [512, 784] },
        { name = "in.bias", shape = [512], dtype = "float32", ready = "20ms" },
    ]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

from thalweg.errors import ClusterError, WorkloadError
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
from thalweg.facts.machine import CodecCost, FittedValue, Machine, TransportCosts
from thalweg.facts.toml_reader import TomlTable, format_toml, load_toml, read_toml
from thalweg.facts.units import Duration
from thalweg.facts.workload import Costs, Tensor, Workload

COMMENT_WIDTH = 96
MAX_COST_VALUE = 1e12
_CODEC_COST_FIELDS = tuple(field.name for field in fields(CodecCost))
_STEP_COST_FIELDS = ("forward", "backward", "optimizer")


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file that `thalweg probe` or a person wrote; ClusterError names the mistake
    in the file, and its place."""
    return read_toml(path, parse_cluster, ClusterError)


def parse_cluster(text: str) -> Cluster:
    """The cluster that the text of a cluster file describes; ClusterError if it has a mistake."""
    table = load_toml(text, ClusterError)
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
    if not any(numbered):
        for rank, host in enumerate(chain(*hosts)):
            host.data["ranks"] = [rank]
    return Cluster(
        racks=tuple(map(_rack, names, tables, hosts)),
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
            lines.append(f"uplink = {format_toml(_toml_duplex(rack.uplink))}")
        if rack.latency.seconds:
            lines.append(f'latency = "{rack.latency}"  # what crossing the uplink adds')
        lines += [f"nic = {format_toml(_toml_duplex(common))}", "hosts = ["]
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


def _rack(name: str, table: TomlTable, hosts: Sequence[TomlTable]) -> Rack:
    table.only("name", "uplink", "nic", "latency", "hosts")
    nic = duplex(table, "nic") or Duplex.both(ASSUMED_NIC)
    return Rack(
        name=name,
        hosts=tuple(_host(host, nic) for host in hosts),
        uplink=duplex(table, "uplink"),
        latency=table.duration("latency", Duration(0.0)),
    )


def _host(table: TomlTable, nic: Duplex) -> Host:
    name = table.name("host")
    table.only("name", "ranks", "nic", "late")
    return Host(
        name=name,
        ranks=table.whole_numbers("ranks", 0, "ranks = [0]"),
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


def _toml_duplex(rates: Duplex) -> object:
    return rates.out if rates.out == rates.into else {"out": rates.out, "in": rates.into}


def _format_host(host: Host, common: Duplex) -> str:
    nic = {} if host.nic == common else {"nic": _toml_duplex(host.nic)}
    late = {"probability": host.late.probability, "delay": host.late.delay}
    delayed = {} if host.late == StragglerDelay() else {"late": late}
    return format_toml({"name": host.name, "ranks": list(host.ranks), **nic, **delayed})


def machine_path(cluster: Path) -> Path:
    """The machine file beside a cluster's file: `cluster.toml` has `cluster.machine.toml`."""
    return cluster.with_suffix(".machine.toml")


def read_machine(path: Path) -> Machine:
    return read_toml(path, parse_machine, ClusterError)


def parse_machine(text: str) -> Machine:
    table = load_toml(text, ClusterError)
    table.only("burst", "contention", "ours", "native", "codec", "assumed")
    return Machine(
        ours=_transport(table, "ours"),
        native=_transport(table, "native"),
        burst=table.number("burst", 0, MAX_COST_VALUE, 0.0),
        contention=table.number("contention", 0, MAX_COST_VALUE, 1.0),
        codecs=dict(map(_codec, table.tables("codec", "[[codec]]", "a codec"))),
        assumed=tuple(str(name) for name in table.array("assumed", 'assumed = ["..."]')),
    )


def format_machine(machine: Machine) -> str:
    """The text of a machine file."""
    lines = [
        "# What messages, bytes and codecs cost on these machines. Edit it freely.",
        f"burst = {machine.burst!r}  # bytes that a link carries at once after a rest",
    ]
    if machine.contention != 1:
        lines.append(f"contention = {machine.contention!r}")
    if machine.assumed:
        lines.append(f"assumed = {json.dumps(machine.assumed)}")
    for name, costs in (("ours", machine.ours), ("native", machine.native)):
        lines += [
            "",
            f"[{name}]",
            f"message = {_format(costs.message)}  # it keeps its receiver busy, besides its bytes",
            f"byte = {_format(costs.byte)}  # that a rank sends or takes in",
            "crowding = [  # so many flows get this share of a link",
            *(f"    {_format(share, 'share', flows=n)}," for n, share in costs.crowding),
            "]",
        ]
        if costs.drag:
            drag = (_format(times, "times", schedule=name) for name, times in costs.drag)
            lines += ["drag = [", *(f"    {entry}," for entry in drag), "]"]
    for name, cost in machine.codecs.items():
        lines += ["", "[[codec]]", f"name = {json.dumps(name)}"]
        lines += [f"{key} = {_format(getattr(cost, key))}" for key in _CODEC_COST_FIELDS]
    return "\n".join(lines) + "\n"


def _transport(table: TomlTable, key: str) -> TransportCosts:
    if key not in table:
        return TransportCosts()
    costs = table.table(key)
    costs.only("message", "byte", "crowding", "drag")
    return TransportCosts(
        message=_figure(costs, "message"),
        byte=_figure(costs, "byte"),
        crowding=_crowding(costs) or TransportCosts().crowding,
        drag=tuple(_drag(costs)),
    )


def _crowding(costs: TomlTable) -> tuple[tuple[int, FittedValue], ...]:
    shares: list[tuple[int, FittedValue]] = []
    for table in costs.tables("crowding", "crowding = [{ flows = 1, share = 0.97 }]"):
        table.only("flows", "share", "spread")
        flows = table.whole("flows", 1)
        if shares and flows <= shares[-1][0]:
            raise ClusterError(f"{table.where} has {flows} flows out of order", "go from few up")
        if table.number("share", 0, MAX_COST_VALUE, 0.0) == 0:
            raise ClusterError(f"{table.where} leaves {flows} flows nothing", "give a share")
        shares.append((flows, _valued(table, "share")))
    return tuple(shares)


def _drag(costs: TomlTable) -> Iterator[tuple[str, FittedValue]]:
    example = 'drag = [{ schedule = "halving_doubling", times = 1.2 }]'
    for table in costs.tables("drag", example):
        table.only("schedule", "times", "spread")
        if table.number("times", 0, MAX_COST_VALUE, 0.0) == 0:
            raise ClusterError(f"{table.where} takes no time", f"write {example}")
        yield table.text("schedule", '"halving_doubling"'), _valued(table, "times")


def _codec(table: TomlTable) -> tuple[str, CodecCost]:
    name = table.text("name", '"powersgd(rank=4)"')
    table.where = f"codec {name}"
    table.only("name", *_CODEC_COST_FIELDS)
    return name, CodecCost(**{cost: _figure(table, cost) for cost in _CODEC_COST_FIELDS})


def _figure(table: TomlTable, key: str) -> FittedValue:
    if key not in table:
        return FittedValue(0.0)
    inner = table.table(key)
    inner.only("seconds", "spread")
    return _valued(inner, "seconds")


def _valued(table: TomlTable, key: str) -> FittedValue:
    return FittedValue(
        table.number(key, 0, MAX_COST_VALUE, 0.0), table.number("spread", 0, MAX_COST_VALUE, 0.0)
    )


def _format(figure: FittedValue, key: str = "seconds", **others: object) -> str:
    spread = {"spread": figure.spread} if figure.spread else {}
    return format_toml({**others, key: figure.value, **spread})


def read_workload(path: Path) -> Workload:
    """Read a workload from a file that `thalweg calibrate` or a person wrote; WorkloadError names
    what is wrong with it, and where."""
    return read_toml(path, parse_workload, WorkloadError)


def parse_workload(text: str) -> Workload:
    table = load_toml(text, WorkloadError)
    table.only("name", *_STEP_COST_FIELDS, "tensors")
    tensors = table.data.get("tensors")
    if not isinstance(tensors, list):
        raise WorkloadError("the file has no list of tensors", "add tensors = [ ... ]")
    return Workload(
        name=table.name(),
        tensors=tuple(_tensor(tensor) for tensor in tensors),
        costs=Costs(**{cost: table.duration(cost, Duration(0.0)) for cost in _STEP_COST_FIELDS}),
    )


def format_workload(workload: Workload) -> str:
    lines = [f'name = "{workload.name}"']
    for cost in _STEP_COST_FIELDS:
        duration: Duration = getattr(workload.costs, cost)
        if duration.seconds:
            lines.append(f'{cost} = "{duration}"')
    lines += ["tensors = [", *(f"    {_format_tensor(t)}," for t in workload.tensors), "]"]
    return "\n".join(lines) + "\n"


def _tensor(entry: Any) -> Tensor:
    table = TomlTable(entry, "a tensor", WorkloadError)
    name = table.name("tensor")
    table.only("name", "shape", "dtype", "ready")
    return Tensor(
        name=name,
        shape=table.whole_numbers("shape", 0, "shape = [512, 784]"),
        dtype=str(table.data.get("dtype", "float32")),
        ready=table.duration("ready", Duration(0.0)) if "ready" in table else None,
    )


def _format_tensor(tensor: Tensor) -> str:
    dtype = {} if tensor.dtype == "float32" else {"dtype": tensor.dtype}
    ready = {} if tensor.ready is None else {"ready": tensor.ready}
    return format_toml({"name": tensor.name, "shape": list(tensor.shape), **dtype, **ready})
