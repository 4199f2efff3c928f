"""`thalweg lab`: a cluster on this machine, to put one's own training script into."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from thalweg.cli.options import (
    LatencyOption,
    NicOption,
    OrderOption,
    UplinkOption,
    lab_cluster,
    with_bundles,
)
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.cli.run import RestartsOption, with_interpreter
from thalweg.errors import LabError, UsageError
from thalweg.facts import Rate, counted
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.facts import Link
    from thalweg.lab import Lab

app = typer.Typer(
    help="Clusters on this machine: a network namespace a host, links with real limits.",
    no_args_is_help=True,
)
DEFAULT_LAB_LAYOUT = "2x4"

LayoutArgument = Annotated[
    str,
    typer.Argument(metavar="RxH", help="Racks of hosts: 2x4, 5+3+4; or a cluster file."),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="LAB", help="Which lab; absent: the one made from this folder."),
]
WorkerOption = Annotated[
    str, typer.Option("--host", metavar="HOST", help="A rank that lives there, or a name.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """The options that say what the links of a new lab are like."""

    nic: NicOption = None
    uplink: UplinkOption = None
    latency: LatencyOption = None
    loss: Annotated[
        float, typer.Option(min=0, max=1, help="Share of packets that uplinks lose.")
    ] = 0.0
    rank_order: OrderOption = None

    def lab(self, layout: str, name: str | None) -> Lab:
        from thalweg.lab import Lab

        wanted = lab_cluster(layout, self.nic, self.uplink, self.rank_order, self.latency)
        return Lab.of(wanted, name=name, loss=self.loss, without_netem="go on")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSelection:
    """The options that name links of a lab."""

    rack: Annotated[
        str | None, typer.Option(metavar="RACK", help="Its uplink: a number from 0, or a name.")
    ] = None
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Its NIC: a rank that lives there, or a name."),
    ] = None
    direction: Annotated[
        str, typer.Option(metavar="out|in|both", help="Out of the host or rack, into it, or both.")
    ] = "both"

    def change(self, name: str | None, what: str, act: Callable[[Lab, list[Link]], None]) -> None:
        """Act on these links of a lab, and say what each is now."""
        from thalweg.lab.event import directions

        lab = _lab(name)
        links = lab.links.of(
            rack=None if self.rack is None else _numbered(self.rack),
            host=None if self.host is None else _numbered(self.host),
            directions=directions(self.direction),
        )
        act(lab, links)
        for link in links:
            console().print(f"{lab.name}: {link}: {what}")


@app.command()
@with_bundles
def up(
    *,
    layout: LayoutArgument = DEFAULT_LAB_LAYOUT,
    shape: LinkOptions,
    name: Annotated[str | None, typer.Option(metavar="LAB", help="What to call it.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Build a lab that stays until `thalweg lab down`.

    thalweg lab up 2x4 --nic 200mbit --uplink 50mbit

    Without any rate, NICs and uplinks have 200mbit.
    """
    lab = shape.lab(layout, name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is there goes
    with progress_bar("Building the lab") as bar:
        lab.up(owned=False, progress=bar.show)
    _tell(lab, "lab up", json_path)
    terminal = console(json_path)
    terminal.print(f"\nRun a script in it:  thalweg lab run --name {lab.name} -- python train.py")
    terminal.print(f"Look into a host:    ip netns exec {lab.wiring.host_of(0)} ip address")


@app.command(context_settings={"allow_interspersed_args": False})
@with_bundles
def run(
    *,
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND ...", help="A program or a .py file, and its arguments."),
    ],
    name: NameOption = None,
    layout: Annotated[
        str | None,
        typer.Option("--lab", metavar="RxH", help="In a lab that is there only for this."),
    ] = None,
    shape: LinkOptions,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Though a worker fails, let the others go on.")
    ] = False,
    restarts: RestartsOption = 0,
) -> None:
    """Run a script on every host of a lab, with their output side by side.

    thalweg lab run -- python train.py --lr 0.1

    Each worker has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME, and
    THALWEG_CLUSTER, the file that tells attach() of the racks. Meanwhile, in another terminal,
    degrade, cut and kill.
    """
    from thalweg.launch.supervisor import run_command

    command = with_interpreter(arguments)

    def go(lab: Lab) -> None:
        workers = lab.cluster.workers
        run_command(workers, command, place=lab.place, keep_going=keep_going, restarts=restarts)

    if layout is None:
        if shape != LinkOptions():
            raise UsageError("a lab that is up has its links", "give --lab too, or use degrade")
        go(_lab(name))
        return
    with shape.lab(layout, name) as lab:
        go(lab)


@app.command()
@with_bundles
def degrade(
    rate: Annotated[str, typer.Option(metavar="RATE", help="Like 50mbit.")],
    which: LinkSelection,
    name: NameOption = None,
) -> None:
    """Make an uplink or a NIC slower, or faster; `restore` puts it back."""
    which.change(name, f"now {rate}", lambda lab, links: lab.links.degrade(links, Rate.parse(rate)))


@app.command()
@with_bundles
def restore(which: LinkSelection, name: NameOption = None) -> None:
    """Put a link back as it was declared, whole and without others' flows; all links if none is
    named."""
    if which.rack is None and which.host is None:
        lab = _lab(name)
        lab.restore()
        console().print(f"{lab.name}: all links are as they were declared")
        return
    which.change(name, "as it was declared", lambda lab, links: lab.links.restore(links))


@app.command()
@with_bundles
def cut(which: LinkSelection, name: NameOption = None) -> None:
    """Let a link swallow what is sent into it, one way or both, without a word to anybody."""
    which.change(name, "cut", lambda lab, links: lab.links.cut(links))


@app.command()
@with_bundles
def heal(which: LinkSelection, name: NameOption = None) -> None:
    """Mend a link that was cut."""
    which.change(name, "healed", lambda lab, links: lab.links.heal(links))


@app.command()
@with_bundles
def flow(
    which: LinkSelection,
    flows: Annotated[int, typer.Option(min=1, help="TCP connections, each way.")] = 1,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="The most that each takes.")
    ] = None,
    name: NameOption = None,
) -> None:
    """Send competing TCP flows through a link, until `restore`."""
    most = None if rate is None else Rate.parse(rate)
    more = f"{flows} more flow{'s' if flows > 1 else ''}"
    which.change(
        name, more, lambda lab, links: lab.links.fill(links, flows=flows, rate=most, detached=True)
    )


@app.command()
def kill(host: WorkerOption, name: NameOption = None) -> None:
    """Kill every process on a host."""
    _signal(name, host, signal.SIGKILL, "killed")


@app.command()
def pause(host: WorkerOption, name: NameOption = None) -> None:
    """Stop every process on a host, as a machine that hangs does; `resume` lets them go on."""
    _signal(name, host, signal.SIGSTOP, "paused")


@app.command()
def resume(host: WorkerOption, name: NameOption = None) -> None:
    """Let the processes on a host go on."""
    _signal(name, host, signal.SIGCONT, "resumed")


@app.command()
def status(name: NameOption = None, json_path: JsonOption = None) -> None:
    """Hosts, addresses, rates, drops and who runs where."""
    _tell(_lab(name), "lab status", json_path)


@app.command()
def down(
    name: NameOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every lab of yours but those of running processes.")
    ] = False,
) -> None:
    """Take a lab down; what runs in it ends."""
    from thalweg.lab import Lab, registry

    if every and name is not None:
        raise UsageError("--all and --name both say which labs", "give one of them")
    if every:
        for record in registry.of_this_user():
            found, owner = record.name, record.owner
            if owner is not None and not record.abandoned():
                console().print(f"{found} stays: process {owner.pid} uses it; or --name {found}")
                continue
            try:
                Lab.find(found).down()
                console().print(f"{found} is down")
            except LabError:
                if found in registry.names():  # or it has just ended by itself
                    raise
        return
    lab = Lab.find(name)
    was, owner = lab.name, lab.record.owner
    if name is None and owner is not None:
        raise LabError(
            f"lab {was} belongs to process {owner[0]}, and ends with it",
            f"end that, or give --name {was}",
        )
    lab.down()
    console().print(f"{was} is down")


def _lab(name: str | None) -> Lab:
    from thalweg.lab import Lab

    return Lab.find(name)


def _numbered(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _signal(name: str | None, host: str, number: signal.Signals, done: str) -> None:
    lab = _lab(name)
    target = lab.host(_numbered(host)).name
    pids = lab.processes()[target]
    if not pids and os.geteuid() == 0:  # others don't see them
        raise LabError(f"nothing runs on {target}", "start something with `thalweg lab run`")
    if not pids:
        raise LabError(f"only root sees what runs on {target}", "run it with sudo")
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    console().print(f"{lab.name}: {counted(len(pids), 'process')} on {target} {done}")


def _tell(lab: Lab, command: str, json_path: str | None) -> None:
    hosts, uplinks = lab.status()
    terminal = console(json_path)
    terminal.print(_hosts_table(f"lab {lab.name}", hosts))
    terminal.print(_uplinks_table(uplinks))
    for note in lab.notes:
        terminal.print(note)
    settings = {"name": lab.name, "uplinks": uplinks, "notes": lab.notes}
    write_json(json_path, command, settings, hosts)


def _hosts_table(title: str, rows: list[dict[str, Any]]) -> Table:
    texts = ("host", "rack", "ranks", "address", "NIC out", "NIC in")
    table = table_of(*texts, ">drops", ">processes", title=title)
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


def _uplinks_table(rows: list[dict[str, Any]]) -> Table:
    table = table_of("uplink of", "out", "in", ">drops")
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
