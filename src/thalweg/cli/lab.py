"""`thalweg lab`: a cluster emulated on this machine, for training scripts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import LinkOptions, RestartsOption, with_bundles
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.cli.run import with_interpreter
from thalweg.errors import LabError, UsageError
from thalweg.facts import Rate, counted
from thalweg.report.tables import Columns, table_of

if TYPE_CHECKING:
    from thalweg.facts import Link
    from thalweg.lab import Lab

app = typer.Typer(
    help="Clusters on this machine: one network namespace per host, links with real limits.",
    no_args_is_help=True,
)
DEFAULT_LAB_LAYOUT = "2x4"

HOST_COLUMNS: Columns = {
    "host": itemgetter("host"),
    "rack": itemgetter("rack"),
    "ranks": lambda row: ", ".join(map(str, row["ranks"])),
    "address": itemgetter("address"),
    "NIC out": lambda row: _rate(row["nic_out"]),
    "NIC in": lambda row: _rate(row["nic_in"]),
    ">drops": lambda row: str(row["nic_out"]["drops"] + row["nic_in"]["drops"]),
    ">processes": lambda row: str(row["processes"]),
}
UPLINK_COLUMNS: Columns = {
    "uplink of": itemgetter("rack"),
    "out": lambda row: _rate(row["uplink_out"]),
    "in": lambda row: _rate(row["uplink_in"]),
    ">drops": lambda row: str(row["uplink_out"]["drops"] + row["uplink_in"]["drops"]),
}

LayoutArgument = Annotated[
    str,
    typer.Argument(metavar="RxH", help="Racks of hosts: 2x4, 5+3+4; or a cluster file."),
]
NameOption = Annotated[
    str | None,
    typer.Option(metavar="LAB", help="Which lab; by default the one made from this folder."),
]
WorkerOption = Annotated[
    str, typer.Option("--host", metavar="HOST", help="The rank of a worker on it, or a name.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions(LinkOptions):
    """The options that describe the links of a new lab."""

    loss: Annotated[
        float, typer.Option(min=0, max=1, help="Share of packets that uplinks lose.")
    ] = 0.0

    def lab(self, layout: str, name: str | None) -> Lab:
        from thalweg.lab import Lab

        cluster = self.lab_cluster_of(layout)
        return Lab.of(cluster, name=name, loss=self.loss, without_netem="go on")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSelection:
    """The options that name links of a lab."""

    rack: Annotated[
        str | None,
        typer.Option(metavar="RACK", help="A rack's uplink: a number from 0, or a name."),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="A host's NIC: the rank of a worker on it, or a name."),
    ] = None
    direction: Annotated[
        str, typer.Option(metavar="out|in|both", help="Out of the host or rack, into it, or both.")
    ] = "both"

    def change(self, name: str | None, what: str, act: Callable[[Lab, list[Link]], None]) -> None:
        """Act on these links of a lab, and print the new state of each."""
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
    shape: LabOptions,
    name: Annotated[str | None, typer.Option(metavar="LAB", help="Name of the lab.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Build a lab that stays until `thalweg lab down`.

    thalweg lab up 2x4 --nic 200mbit --uplink 50mbit

    Without any rate, NICs and uplinks have 200mbit.
    """
    lab = shape.lab(layout, name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: removes the lab
    with progress_bar("Building the lab") as bar:
        lab.up(owned=False, progress=bar.show)
    _print(lab, "lab up", json_path)
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
        typer.Option("--lab", metavar="RxH", help="In a temporary lab."),
    ] = None,
    shape: LabOptions,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Though a worker fails, let the others go on.")
    ] = False,
    restarts: RestartsOption = 0,
) -> None:
    """Run a script on every host of a lab, with their output side by side.

    thalweg lab run -- python train.py --lr 0.1

    Each worker has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME, and
    THALWEG_CLUSTER, the cluster file for attach(). Meanwhile, use degrade, cut and kill in another
    terminal.
    """
    from thalweg.launch.supervisor import run_command

    command = with_interpreter(arguments)

    def go(lab: Lab) -> None:
        workers = lab.cluster.workers
        run_command(workers, command, place=lab.place, keep_going=keep_going, restarts=restarts)

    if layout is None:
        if shape != LabOptions():
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
    """Restore a link as it was declared, without cuts or competing flows; by default all links."""
    if which.rack is None and which.host is None:
        lab = _lab(name)
        lab.restore()
        console().print(f"{lab.name}: all links are as they were declared")
        return
    which.change(name, "as it was declared", lambda lab, links: lab.links.restore(links))


@app.command()
@with_bundles
def cut(which: LinkSelection, name: NameOption = None) -> None:
    """Drop all packets on a link, in one direction or both, without closing connections."""
    which.change(name, "cut", lambda lab, links: lab.links.cut(links))


@app.command()
@with_bundles
def heal(which: LinkSelection, name: NameOption = None) -> None:
    """Restore a link that was cut."""
    which.change(name, "healed", lambda lab, links: lab.links.heal(links))


@app.command()
@with_bundles
def flow(
    which: LinkSelection,
    flows: Annotated[int, typer.Option(min=1, help="TCP connections in each direction.")] = 1,
    rate: Annotated[str | None, typer.Option(metavar="RATE", help="Rate limit of each.")] = None,
    name: NameOption = None,
) -> None:
    """Send competing TCP flows through a link, until `restore`."""
    most = None if rate is None else Rate.parse(rate)
    which.change(
        name,
        f"{flows} more {'flow' if flows == 1 else 'flows'}",
        lambda lab, links: lab.links.fill(links, flows=flows, rate=most, detached=True),
    )


@app.command()
def kill(host: WorkerOption, name: NameOption = None) -> None:
    """Kill every process on a host."""
    _signal(name, host, signal.SIGKILL, "killed")


@app.command()
def pause(host: WorkerOption, name: NameOption = None) -> None:
    """Stop every process on a host, as on a machine that hangs; `resume` continues them."""
    _signal(name, host, signal.SIGSTOP, "paused")


@app.command()
def resume(host: WorkerOption, name: NameOption = None) -> None:
    """Continue the processes on a host."""
    _signal(name, host, signal.SIGCONT, "resumed")


@app.command()
def status(name: NameOption = None, json_path: JsonOption = None) -> None:
    """Show hosts, addresses, rates, drops and processes."""
    _print(_lab(name), "lab status", json_path)


@app.command()
def down(
    name: NameOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every lab of yours but those of running processes.")
    ] = False,
) -> None:
    """Remove a lab; the processes in it end."""
    from thalweg.lab import Lab, registry

    if every and name is not None:
        raise UsageError("--all and --name are both given", "give one of them")
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


def _print(lab: Lab, command: str, json_path: str | None) -> None:
    hosts, uplinks = lab.status()
    terminal = console(json_path)
    terminal.print(table_of(hosts, HOST_COLUMNS, title=f"lab {lab.name}"))
    terminal.print(table_of(uplinks, UPLINK_COLUMNS))
    for note in lab.notes:
        terminal.print(note)
    settings = {"name": lab.name, "uplinks": uplinks, "notes": lab.notes}
    write_json(json_path, command, settings, hosts)


def _rate(direction: dict[str, Any]) -> str:
    """The state of one direction of a link."""
    words = [direction["rate"] or "no limit"]
    if direction["cut"]:
        words = ["CUT"]
    elif direction["rate"] != direction["declared"]:
        words.append(f"(of {direction['declared'] or 'no limit'})")
    if direction["flows"]:
        words.append(f"+{direction['flows']} flows")
    return " ".join(words)
