"""`thalweg lab`: clusters emulated on this machine, in which training scripts run."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any

import typer

from thalweg import lab as labs
from thalweg.cli.options import (
    LinkOptions,
    Output,
    RestartsOption,
    option,
    progress_bar,
    with_bundles,
)
from thalweg.cli.train import with_interpreter
from thalweg.errors import LabError, UsageError
from thalweg.facts import Rate, counted
from thalweg.lab.event import directions
from thalweg.launch.supervisor import run_command
from thalweg.report.tables import Columns, table_of

app = typer.Typer(
    help="Emulate clusters on this machine: one network namespace per host, links with limits.",
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
    str | None, option("The lab; default: the one made from this folder.", "LAB", "--name")
]
WorkerOption = Annotated[str, option("A rank on the host, or a name.", "HOST", "--host")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions(LinkOptions):
    """The options that describe the links of a new lab."""

    loss: Annotated[float, option("Fraction of packets that uplinks lose.", min=0, max=1)] = 0.0

    def lab(self, layout: str, name: str | None) -> labs.Lab:
        return labs.Lab.of(
            self.lab_cluster_of(layout), name=name, loss=self.loss, without_netem="go on"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSelection:
    """The options that select links of a lab."""

    rack: Annotated[str | None, option("A rack's uplink: a number from 0, or a name.", "RACK")] = (
        None
    )
    host: Annotated[
        str | None, option("A host's NIC: the rank of a worker on it, or a name.", "HOST")
    ] = None
    direction: Annotated[
        str, option("Out of the host or rack, into it, or both.", "out|in|both")
    ] = "both"

    def change(self, name: str | None, done: str, action: str, **options: Any) -> None:
        """Call this method of the lab's links, and print what was done to each of them."""
        lab = labs.Lab.find(name)
        links = lab.links.of(
            rack=None if self.rack is None else _number_or_name(self.rack),
            host=None if self.host is None else _number_or_name(self.host),
            directions=directions(self.direction),
        )
        getattr(lab.links, action)(links, **options)
        for link in links:
            Output().print(f"{lab.name}: {link}: {done}")


@app.command()
@with_bundles
def up(
    *,
    layout: LayoutArgument = DEFAULT_LAB_LAYOUT,
    shape: LabOptions,
    name: Annotated[str | None, option("Name of the lab.", "LAB")] = None,
    output: Output,
) -> None:
    """Build a lab that stays up until `thalweg lab down`.

    thalweg lab up 2x4 --nic 200mbit --uplink 50mbit

    NICs and uplinks have 200mbit by default.
    """
    lab = shape.lab(layout, name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: removes what is built
    with progress_bar("Building the lab") as show:
        lab.up(owned=False, progress=show)
    _print_status(lab, "lab up", output)
    output.print(
        f"\nRun a script in it:  thalweg lab run --name {lab.name} -- python train.py",
        f"Inspect a host:      ip netns exec {lab.wiring.host_of(0)} ip address",
    )


@app.command(context_settings={"allow_interspersed_args": False})
@with_bundles
def run(
    *,
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND ...", help="A program or a .py file, and its arguments."),
    ],
    name: NameOption = None,
    layout: Annotated[str | None, option("Build a lab for this run alone.", "RxH", "--lab")] = None,
    shape: LabOptions,
    keep_going: Annotated[
        bool, option("Let the others continue if a worker fails.", None, "--keep-going")
    ] = False,
    restarts: RestartsOption = 0,
) -> None:
    """Run a script on every host of a lab, with interleaved output.

    thalweg lab run -- python train.py --lr 0.1

    Each worker has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME, and
    THALWEG_CLUSTER, the cluster file that attach() reads. Meanwhile, use degrade, cut and kill in
    another terminal.
    """
    command = with_interpreter(arguments)
    if layout is None and shape != LabOptions():
        raise UsageError("the links of a lab that is up are given", "give --lab, or use degrade")
    with nullcontext(labs.Lab.find(name)) if layout is None else shape.lab(layout, name) as lab:
        workers = lab.cluster.workers
        run_command(workers, command, place=lab.place, keep_going=keep_going, restarts=restarts)


@app.command()
@with_bundles
def degrade(
    rate: Annotated[str, option("Like 50mbit.", "RATE")],
    which: LinkSelection,
    name: NameOption = None,
) -> None:
    """Change the rate of an uplink or a NIC; `restore` puts it back."""
    which.change(name, f"now {rate}", "degrade", rate=Rate.parse(rate))


@app.command()
@with_bundles
def restore(which: LinkSelection, name: NameOption = None) -> None:
    """Restore the declared state of a link, without competing flows; of all links by default."""
    if which.rack is not None or which.host is not None:
        which.change(name, "as declared", "restore")
        return
    lab = labs.Lab.find(name)
    lab.restore()
    Output().print(f"{lab.name}: all links are as declared")


def _link_command(action: str, done: str, summary: str) -> None:
    def command(which: LinkSelection, name: NameOption = None) -> None:
        which.change(name, done, action)

    app.command(action, help=summary)(with_bundles(command))


_link_command(
    "cut",
    "cut",
    "Drop all packets on a link, in one direction or both, without closing connections.",
)
_link_command("heal", "healed", "Repair a link that was cut.")


@app.command()
@with_bundles
def flow(
    which: LinkSelection,
    flows: Annotated[int, option("TCP connections per direction.", min=1)] = 1,
    rate: Annotated[str | None, option("The limit of each connection.", "RATE")] = None,
    name: NameOption = None,
) -> None:
    """Send competing TCP flows through a link, until `restore`."""
    limit = None if rate is None else Rate.parse(rate)
    which.change(name, counted(flows, "more flow"), "fill", flows=flows, rate=limit, detached=True)


def _host_command(action: str, number: signal.Signals, done: str, summary: str) -> None:
    def command(host: WorkerOption, name: NameOption = None) -> None:
        lab = labs.Lab.find(name)
        target = lab.host(_number_or_name(host)).name
        pids = lab.processes()[target]
        if not pids and os.geteuid() == 0:
            raise LabError(f"no process runs on {target}", "start one with `thalweg lab run`")
        if not pids:
            raise LabError(f"only root sees the processes on {target}", "run it with sudo")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        Output().print(f"{lab.name}: {counted(len(pids), 'process')} on {target} {done}")

    app.command(action, help=summary)(command)


_host_command("kill", signal.SIGKILL, "killed", "Kill every process on a host.")
_host_command("pause", signal.SIGSTOP, "paused", "Stop every process on a host, as if it hung.")
_host_command("resume", signal.SIGCONT, "resumed", "Resume the paused processes on a host.")


@app.command()
@with_bundles
def status(*, name: NameOption = None, output: Output) -> None:
    """Show the hosts of a lab: addresses, rates, drops and processes."""
    _print_status(labs.Lab.find(name), "lab status", output)


@app.command()
def down(
    name: NameOption = None,
    every: Annotated[
        bool, option("Every lab of yours but those of running processes.", None, "--all")
    ] = False,
) -> None:
    """Take a lab down, and end the processes in it."""
    from thalweg.lab import registry

    if every and name is not None:
        raise UsageError("--all and --name can't be used together", "give one of them")
    if every:
        for record in registry.of_this_user():
            found, owner = record.name, record.owner
            if owner is not None and not record.abandoned():
                Output().print(f"{found} stays: process {owner.pid} uses it; or --name {found}")
                continue
            try:
                labs.Lab.find(found).down()
                Output().print(f"{found} is down")
            except LabError:
                if found in registry.names():  # otherwise its owner has just ended
                    raise
        return
    lab = labs.Lab.find(name)
    found, owner = lab.name, lab.record.owner
    if name is None and owner is not None:
        raise LabError(
            f"lab {found} belongs to process {owner.pid} and ends with it",
            f"end that process, or give --name {found}",
        )
    lab.down()
    Output().print(f"{found} is down")


def _number_or_name(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _print_status(lab: labs.Lab, command: str, output: Output) -> None:
    hosts, uplinks = lab.status()
    table = table_of(hosts, HOST_COLUMNS, title=f"lab {lab.name}")
    output.print(table, table_of(uplinks, UPLINK_COLUMNS), *lab.notes)
    output.write_json(command, hosts, name=lab.name, uplinks=uplinks, notes=lab.notes)


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
