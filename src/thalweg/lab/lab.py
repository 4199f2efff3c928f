"""A cluster on one machine: every host with an address, a NIC and a rack of its own, on real TCP.

with Lab(racks=2, hosts=4, nic="200mbit", uplink="50mbit") as lab:
    results = lab.run(work)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

from pyroute2.netlink.exceptions import NetlinkError

from thalweg.errors import LabError
from thalweg.facts import Cluster, Duration, Host, Link, Rate, about
from thalweg.lab import packet_faults, registry
from thalweg.lab.addressing import HOST_DEVICE, SPINE_ADDRESS, Wiring
from thalweg.lab.event import Event, host_named
from thalweg.lab.event_runner import AppliedEvent, EventRunner
from thalweg.lab.fabric import Progress, Sockets, build, has_netem
from thalweg.lab.links import LabLinks
from thalweg.lab.namespaces import enter, processes, refused, remove, set_host_identity
from thalweg.lab.registry import LabRecord
from thalweg.lab.shaping import declared
from thalweg.launch.place import Place
from thalweg.launch.rank_assignment import CLUSTER_VARIABLE
from thalweg.launch.supervisor import SendMessage, ignore, print_prefixed, run_workers
from thalweg.launch.worker_group import OnLine, OnMessage
from thalweg.launch.worker_process import RESTARTS_VARIABLE, signals_blocked

TCP_CONGESTION_PATH = Path("/proc/sys/net/ipv4/tcp_congestion_control")
EventLike = Event | Mapping[str, Any]

# Seconds of a core for a small message, sent and received, with waking up.
MESSAGE_CORE_SECONDS = 50e-6


class Lab:
    """Not there before `up()`, and gone after `down()`; `with` does both.

    racks, hosts   so many racks of so many hosts; uneven ones as a list, `hosts=[5, 3, 4]`
    nic, uplink    rates, one for all or a list; an uplink of None is never the bottleneck
    latency        what crossing an uplink adds, each way (needs netem in the kernel)
    loss           the share of packets that uplinks lose (needs netem too)
    interleaved    ranks go round the racks instead of rack by rack
    without_netem  refuse a lab with latency or loss if the kernel has no netem, or go on without
    """

    def __init__(
        self,
        racks: int | None = None,
        hosts: int | Sequence[int] = 4,
        nic: Rate | str | Sequence[Rate | str] = "200mbit",
        uplink: Rate | str | Sequence[Rate | str] | None = None,
        *,
        latency: Duration | str | None = None,
        interleaved: bool = False,
        loss: float = 0.0,
        name: str | None = None,
        without_netem: Literal["refuse", "go on"] = "refuse",
    ) -> None:
        sizes = [hosts] * (1 if racks is None else racks) if isinstance(hosts, int) else list(hosts)
        if racks is not None and len(sizes) != racks:
            raise LabError(
                f"{racks} racks, but hosts for {len(sizes)}",
                "give hosts for each, or leave racks out",
            )
        cluster = Cluster.regular(
            sizes,
            nic=nic,
            uplink=uplink,
            uplink_latency=Duration.parse(latency) if isinstance(latency, str) else latency,
            interleaved=interleaved,
        )
        self._plan(cluster, name, loss, without_netem)

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        *,
        name: str | None = None,
        loss: float = 0.0,
        without_netem: Literal["refuse", "go on"] = "refuse",
    ) -> Self:
        """This cluster, as it is declared."""
        lab = cls.__new__(cls)
        lab._plan(cluster, name, loss, without_netem)
        return lab

    @classmethod
    def find(cls, name: str | None = None) -> Self:
        """One that is up; without a name the only one that this user made from this folder."""
        name = registry.only_lab_name() if name is None else name
        record = registry.find(name)
        lab = cls.of(record.cluster, name=name, loss=record.loss, without_netem="go on")
        lab._record = record
        return lab

    def _plan(self, cluster: Cluster, name: str | None, loss: float, without_netem: str) -> None:
        if not 0 <= loss < 1:
            raise LabError(f"a link can't lose a share of {loss}", "give 0 to below 1")
        self.cluster = sharing_cores(cluster)
        self._name = name
        self._loss = loss
        self._without_netem = without_netem
        self.fired: list[AppliedEvent] = []  # events of the last run, and when they came
        self._record: LabRecord | None = None
        Wiring("lab" if name is None else name, cluster)  # refuses what can't be wired
        declared(cluster, loss=loss, netem=True)  # and shaped

    # Up and down

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self, *, owned: bool = True, progress: Progress = lambda done, total: None) -> None:
        """Build it. An owned lab ends with this process at the latest."""
        if self._record is not None:
            raise LabError(f"lab {self.name!r} is up already", "use it, or take it down first")
        sweep()
        netem, notes = self._what_is_possible()
        with signals_blocked():
            self._record = registry.enrol(
                self._name, self.cluster, loss=self._loss, netem=netem, notes=notes
            )
        try:
            with registry.locked_record(
                self.name
            ) as there:  # who takes it down waits until it is built
                if there is None or there.id != self._record.id:
                    raise LabError(f"another process took lab {self.name!r} down", "make it anew")
                build(self.wiring, self.links.declared_ports(), progress)
                if not owned:
                    self._record = registry.disown(self._record)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Every process in it ends, and nothing of it is left."""
        if self._record is None:
            return
        with signals_blocked():
            with suppress(LabError):  # another process took it down
                self.links.end_flows()
            with registry.locked_record(self._record.name) as there:
                if there is not None and there.id == self._record.id:
                    _remove(there.name)
            self._record = None

    def _what_is_possible(self) -> tuple[bool, list[str]]:
        """Whether netem is used, and what to tell."""
        notes = [
            "rates by token buckets (TBF) on both ends of every link",
            f"TCP congestion control: {TCP_CONGESTION_PATH.read_text().strip()}",
            f"{len(self.cluster.hosts)} hosts share {cores()} cores: schedules reckon with "
            f"{about(self.cluster.latency.seconds, 's')} a message",
        ]
        wanted = declared(self.cluster, loss=self._loss, netem=True).values()
        if not any(shape.needs_netem for shape in wanted):
            return False, notes
        if has_netem():
            return True, [*notes, "latency and loss of uplinks by netem"]
        if self._without_netem == "refuse":
            raise LabError(
                "this kernel has no netem, so links can't have latency or loss",
                "load sch_netem, leave them out, or go on without them (without_netem='go on')",
            )
        return False, [*notes, "NO latency or loss on uplinks: this kernel has no netem"]

    # What is there

    @property
    def record(self) -> LabRecord:
        if self._record is None:
            raise LabError("the lab isn't up", "use it in a `with`, or call up() first")
        return self._record

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.name, self.cluster)

    @property
    def links(self) -> LabLinks:
        """To degrade, cut and fill them."""
        return LabLinks(self.record, self.wiring)

    @property
    def notes(self) -> list[str]:
        """What the lab is made of here, and what was asked for and can't be had."""
        return self.record.notes

    @property
    def place(self) -> Place:
        return LabPlace(self.record, self.wiring)

    def processes(self) -> dict[str, list[int]]:
        """Who runs on each host, by its name; competing flows are the network's."""
        flows = {pid for pids in self.record.state().flows.values() for pid in pids}
        found = processes([self.wiring.host(host) for host in self.wiring.hosts])
        return {
            host: [pid for pid in found.get(self.wiring.host(host), []) if pid not in flows]
            for host in self.wiring.hosts
        }

    def status(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A row for each host with its NIC, and one for each rack with its uplink."""
        links, running = self.links.status(), self.processes()
        hosts = [
            {
                "host": host.name,
                "rack": rack.name,
                "ranks": list(host.ranks),
                "address": self.wiring.address(host.name),
                "nic_out": links[Link("nic", host.name, "out")],
                "nic_in": links[Link("nic", host.name, "in")],
                "processes": len(running[host.name]),
            }
            for rack in self.cluster.racks
            for host in rack.hosts
        ]
        racks = [
            {
                "rack": rack.name,
                "uplink_out": links[Link("uplink", rack.name, "out")],
                "uplink_in": links[Link("uplink", rack.name, "in")],
            }
            for rack in self.cluster.racks
        ]
        return hosts, racks

    # Work and events

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        events: Iterable[EventLike] = (),
        timeout: str = "1h",
        process_group: bool = True,
        on_message: OnMessage = ignore,
        on_line: OnLine = print_prefixed,
        debug: bool | None = None,
    ) -> list[Any]:
        """Run `function(rank, report, *arguments)` on every host, in a fork of this process; what
        each returned, by rank, or the first error with its host.

        torch.distributed is set up over Gloo, unless `process_group` is False. Lines that workers
        print are shown as they come; `report({...})` calls `on_message(rank, {...})` here, and with
        a `"step"` in it tells how far the rank is, for events at a step. What a worker returns
        travels as JSON. One that an event killed has returned None; one that was restarted runs
        the function anew, without a process group: the others' can't be entered again. What events
        did to links stays: `restore()` undoes it. `fired` tells afterwards which of them came.
        """
        seconds = Duration.parse(timeout).seconds

        def work(rank: int, report: SendMessage) -> dict[str, Any]:
            import torch.distributed as dist

            grouped = process_group and os.environ[RESTARTS_VARIABLE] == "0"
            if grouped:
                dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
            value = function(rank, report, *arguments)
            if grouped and dist.is_initialized():
                dist.destroy_process_group()
            return {"value": value}

        director = self.director(events)
        self.fired = director.fired
        results = run_workers(
            self.cluster.workers,
            work,
            timeout=seconds,
            place=self.place,
            director=director,
            on_message=on_message,
            on_line=on_line,
            debug=debug,
        )
        return [result.get("value") for result in results]

    def director(self, events: Iterable[EventLike]) -> EventRunner:
        """Makes these events happen to a run at `place`."""
        return EventRunner(self, [Event.parse(event) for event in events])

    def host(self, called: int | str) -> Host:
        """By a rank that lives there, or its name."""
        return host_named(self.cluster, called)

    def add_blackhole(self, rank: int, peer: int) -> None:
        """What the one's host sends to the other's, and nothing else. A route in the sender's own
        namespace does it: connections that are there stay, and hear nothing."""
        with Sockets() as sockets:
            sockets[self.wiring.host_of(rank)].route("add", **self._black_hole(peer))

    def remove_blackhole(self, rank: int, peer: int) -> None:
        with Sockets() as sockets, suppress(NetlinkError):
            sockets[self.wiring.host_of(rank)].route("del", **self._black_hole(peer))

    def _black_hole(self, peer: int) -> dict[str, str]:
        address = self.wiring.address(self.cluster.host(peer).name)
        return {"dst": f"{address}/32", "type": "blackhole"}

    def garble(self, rank: int) -> None:
        """Some bytes of what its host sends to others, from now on."""
        packet_faults.begin(self.wiring, rank)

    def ungarble(self, rank: int) -> None:
        packet_faults.end(self.wiring, rank)

    def restore(self) -> None:
        """All links as they were declared, and no flows."""
        self.links.restore(self.links.all())


def cores() -> int:
    return len(os.sched_getaffinity(0))


def sharing_cores(cluster: Cluster) -> Cluster:
    """The cluster with what a message costs here, where nobody has said it. If there are more hosts
    than cores, each waits for its turn: when all exchange messages at once, as they do, the cores
    handle one of every host in between. With 84 hosts on 2 cores a schedule that doesn't know it
    cuts its messages far too fine."""
    crowd = len(cluster.hosts) / cores()
    if not cluster.latency_is_assumed or crowd <= 1:
        return cluster
    each = cluster.latency.seconds + crowd * MESSAGE_CORE_SECONDS
    return replace(cluster, latency=Duration(each))


def sweep() -> list[str]:
    """Remove labs whose owner is gone; their names."""
    gone = []
    for name in registry.names():
        with registry.locked_record(name, wait=False) as there:
            if there is not None and there.abandoned():
                _remove(name)
                gone.append(name)
    registry.remove_leftovers()
    return gone


def _remove(name: str) -> None:
    """Who does this has the lab in hand."""
    try:
        remove(name)
        registry.unregister(name)
    except OSError as error:
        raise refused(error) from None


class LabPlace(Place):
    """A lab as a place for workers: each on its host, the store on the spine."""

    def __init__(self, record: LabRecord, wiring: Wiring) -> None:
        self._record = record
        self._wiring = wiring

    @property
    def address(self) -> str:
        return SPINE_ADDRESS

    def enter(self, rank: int | None) -> None:
        wiring = self._wiring
        name = "spine" if rank is None else wiring.cluster.host(rank).name
        enter(wiring.spine if rank is None else wiring.host(name))
        set_host_identity(name, self._record.hosts_file)

    def environment(self, rank: int) -> Mapping[str, str]:
        ranks = self._wiring.cluster.host(rank).ranks
        return {
            "LOCAL_RANK": str(ranks.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GLOO_SOCKET_IFNAME": HOST_DEVICE,
            CLUSTER_VARIABLE: str(self._record.cluster_file),
            "RES_OPTIONS": "timeout:1 attempts:1",  # no name server is reachable from here
        }

    def label(self, rank: int) -> str:
        return f"rank {rank} on {self._wiring.cluster.host(rank).name}"
