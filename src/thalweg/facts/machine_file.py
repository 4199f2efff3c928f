"""The costs of messages, bytes and codecs as a TOML file beside the cluster's.

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
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from thalweg.errors import ClusterError
from thalweg.facts.machine import CodecCost, FittedValue, Machine, TransportCosts
from thalweg.facts.toml_reader import TomlTable, format_toml, load_toml, read_toml

MAX_COST_VALUE = 1e12
_CODEC_COST_FIELDS = tuple(field.name for field in fields(CodecCost))


def machine_path(cluster: Path) -> Path:
    """The machine file beside a cluster's file: `cluster.toml` has `cluster.machine.toml`."""
    return cluster.with_suffix(".machine.toml")


def read_machine(path: Path) -> Machine:
    return read_toml(path, parse_machine, ClusterError)


def parse_machine(text: str) -> Machine:
    table = load_toml(text, "the file", ClusterError)
    table.only("burst", "contention", "ours", "native", "codec", "assumed")
    return Machine(
        ours=_transport(table, "ours"),
        native=_transport(table, "native"),
        burst=table.number("burst", 0, MAX_COST_VALUE, 0.0),
        contention=table.number("contention", 0, MAX_COST_VALUE, 1.0),
        codecs=dict(map(_codec, table.tables("codec", "[[codec]]", "a codec"))),
        assumed=tuple(str(name) for name in table.array("assumed", 'assumed = ["..."]')),
    )


def format_machine(machine: Machine, remarks: Sequence[str] = ()) -> str:
    """The text of a machine file, with remarks as comments at its head."""
    lines = [
        "# What messages, bytes and codecs cost on these machines. Edit it freely.",
        *(f"# {remark}" for remark in remarks),
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
