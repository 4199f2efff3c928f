"""A cluster emulated on one machine: hosts with addresses, NICs and racks, on real TCP.

with Lab(racks=2, hosts=4, nic="200mbit", uplink="50mbit") as lab:
    results = lab.run(work)
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

from thalweg.errors import LabError
from thalweg.facts import Cluster, Duration, Host, Rate, about
from thalweg.lab import registry
from thalweg.lab.addressing import HOST_DEVICE, SPINE_ADDRESS, Wiring
from thalweg.lab.event import AppliedEvent, Event, EventRunner, host_named
from thalweg.lab.fabric import Progress, build, has_netem
from thalweg.lab.links import LabLinks
from thalweg.lab.namespaces import enter, processes, refused, remove, set_host_identity
from thalweg.lab.registry import CLUSTER_FILE, HOSTS_FILE, LabRecord
from thalweg.lab.shaping import declared
from thalweg.launch.launcher_variables import CLUSTER_VARIABLE
from thalweg.launch.place import Place
from thalweg.launch.supervisor import SendMessage, ignore, print_prefixed, run_workers
from thalweg.launch.worker_group import OnLine, OnMessage
from thalweg.launch.worker_process import RESTARTS_VARIABLE, signals_blocked

TCP_CONGESTION_PATH = Path("/proc/sys/net/ipv4/tcp_congestion_control")
EventLike = Event | Mapping[str, Any]

MESSAGE_CORE_SECONDS = 50e-6  # processor time to send and receive a small message


class Lab:
    """A lab exists from `up()` to `down()`; `with` calls both.

    racks, hosts   number of racks, and of hosts per rack; a list if uneven, `hosts=[5, 3, 4]`
    nic, uplink    rates, one for all or a list; an uplink of None is never the bottleneck
    latency        added by an uplink, in each direction (needs netem in the kernel)
    loss           fraction of packets that uplinks lose (needs netem too)
    interleaved    assign ranks to racks in turn instead of rack by rack
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
                "give hosts for each rack, or leave out racks",
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
        """A lab that emulates this cluster."""
        lab = cls.__new__(cls)
        lab._plan(cluster, name, loss, without_netem)
        return lab

    @classmethod
    def find(cls, name: str | None = None) -> Self:
        """A lab that is up; without a name the only one that this user made from this folder."""
        name = registry.only_lab_name() if name is None else name
        record = registry.find(name)
        lab = cls.of(record.cluster, name=name, loss=record.loss, without_netem="go on")
        lab._record = record
        return lab

    def _plan(self, cluster: Cluster, name: str | None, loss: float, without_netem: str) -> None:
        if not 0 <= loss < 1:
            raise LabError(f"a link can't lose a fraction of {loss}", "give 0 to below 1")
        self.cluster = with_message_latency(cluster)
        self._name = name
        self._loss = loss
        self._without_netem = without_netem
        self.fired: list[AppliedEvent] = []  # by the last run
        self._record: LabRecord | None = None
        Wiring("lab" if name is None else name, cluster)  # raises if there are too few addresses
        declared(cluster, loss=loss, netem=True)  # raises if a rate is out of range

    # Up and down

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self, *, owned: bool = True, progress: Progress = lambda done, total: None) -> None:
        """Build the lab. An owned lab ends with this process at the latest."""
        if self._record is not None:
            raise LabError(f"lab {self.name!r} is up already", "use it, or take it down first")
        sweep()
        netem, notes = self._capabilities()
        with signals_blocked():
            self._record = registry.enrol(
                self._name, self.cluster, loss=self._loss, netem=netem, notes=notes
            )
        try:
            # Another process that takes it down waits for this lock.
            with registry.locked_record(self.name) as found:
                if found is None or found.id != self._record.id:
                    raise LabError(f"another process took lab {self.name!r} down", "make it again")
                build(self.wiring, self.links.declared_ports(), progress)
                if not owned:
                    self._record = registry.disown(self._record)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Kill every process in the lab, and remove all of it."""
        if self._record is None:
            return
        with signals_blocked():
            with suppress(LabError):  # another process took it down
                self.links.end_flows()
            with registry.locked_record(self._record.name) as found:
                if found is not None and found.id == self._record.id:
                    _remove(found.name)
            self._record = None

    def _capabilities(self) -> tuple[bool, list[str]]:
        """True if the lab uses netem, and notes for the user."""
        notes = [
            "rates by token buckets (TBF) on both ends of every link",
            f"TCP congestion control: {TCP_CONGESTION_PATH.read_text().strip()}",
            f"{len(self.cluster.hosts)} hosts share {cores()} cores: schedules assume "
            f"{about(self.cluster.latency.seconds, 's')} per message",
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

    # State

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
        return self.record.wiring

    @property
    def links(self) -> LabLinks:
        """The links of the lab, to degrade, cut and fill."""
        return LabLinks(self.record)

    @property
    def notes(self) -> list[str]:
        """Notes on the emulation, and on what this kernel can't emulate."""
        return self.record.notes

    @property
    def place(self) -> Place:
        return LabPlace(self.record)

    def processes(self) -> dict[str, list[int]]:
        """The process ids on each host, by its name, without competing flows."""
        flows = {pid for pids in self.record.state().flows.values() for pid in pids}
        found = processes([self.wiring.host(host) for host in self.wiring.hosts])
        return {
            host: [pid for pid in found.get(self.wiring.host(host), []) if pid not in flows]
            for host in self.wiring.hosts
        }

    def status(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows for hosts with their NICs, and for racks with their uplinks."""
        links, running = self.links.status(), self.processes()
        states: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
        for link, state in links.items():
            states[link.kind, link.owner][f"{link.kind}_{link.direction}"] = state
        hosts = [
            {
                "host": host.name,
                "rack": rack.name,
                "ranks": list(host.ranks),
                "address": self.wiring.hosts[host.name],
                **states["nic", host.name],
                "processes": len(running[host.name]),
            }
            for rack in self.cluster.racks
            for host in rack.hosts
        ]
        return hosts, [{"rack": r.name, **states["uplink", r.name]} for r in self.cluster.racks]

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
        """Run `function(rank, report, *arguments)` on every host, in a fork of this process, and
        return the results by rank, or raise the first error with its host.

        torch.distributed is initialized over Gloo, unless `process_group` is False. Lines that
        workers print are shown as they arrive; `report({...})` calls `on_message(rank, {...})` in
        this process, and a `"step"` in it is the rank's progress, for events at a step. Results
        are sent as JSON. The result of a worker that an event killed is None; a restarted one runs
        the function again, without a process group, since it can't enter that of the others. Links
        stay as events left them until `restore()`. `fired` has the events that were applied.
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

        runner = self.director(events)
        self.fired = runner.fired
        results = run_workers(
            self.cluster.workers,
            work,
            timeout=seconds,
            place=self.place,
            director=runner,
            on_message=on_message,
            on_line=on_line,
            debug=debug,
        )
        return [result.get("value") for result in results]

    def director(self, events: Iterable[EventLike]) -> EventRunner:
        """The supervisor hook that applies these events to a run at `place`."""
        return EventRunner(self, [Event.parse(event) for event in events])

    def host(self, called: int | str) -> Host:
        """The host of this rank, or with this name."""
        return host_named(self.cluster, called)

    def restore(self) -> None:
        """Restore the declared state of all links, and end competing flows."""
        self.links.restore(self.links.all())


def cores() -> int:
    return len(os.sched_getaffinity(0))


def with_message_latency(cluster: Cluster) -> Cluster:
    """The cluster with the latency of messages in a lab, unless it declares one. If there are more
    hosts than cores, hosts take turns: when all of them exchange messages, the cores handle one of
    every other host in between. With 84 hosts on 2 cores a schedule without this latency splits its
    messages far too finely."""
    hosts_per_core = len(cluster.hosts) / cores()
    if not cluster.latency_is_assumed or hosts_per_core <= 1:
        return cluster
    latency = cluster.latency.seconds + hosts_per_core * MESSAGE_CORE_SECONDS
    return replace(cluster, latency=Duration(latency))


def sweep() -> list[str]:
    """Remove the labs whose owner has ended, and return their names."""
    removed = []
    for name in registry.names():
        with registry.locked_record(name, wait=False) as record:
            if record is not None and record.abandoned():
                _remove(name)
                removed.append(name)
    registry.remove_leftovers()
    return removed


def _remove(name: str) -> None:
    """Remove a lab; the caller holds the lock of its record."""
    try:
        remove(name)
        registry.unregister(name)
    except OSError as error:
        raise refused(error) from None


class LabPlace(Place):
    """A lab as the place of workers: each on its host, the store on the spine."""

    def __init__(self, record: LabRecord) -> None:
        self._folder = record.folder
        self._wiring = record.wiring

    @property
    def address(self) -> str:
        return SPINE_ADDRESS

    def enter(self, rank: int | None) -> None:
        wiring = self._wiring
        name = "spine" if rank is None else wiring.cluster.host(rank).name
        enter(wiring.spine if rank is None else wiring.host(name))
        set_host_identity(name, self._folder / HOSTS_FILE)

    def environment(self, rank: int) -> Mapping[str, str]:
        ranks = self._wiring.cluster.host(rank).ranks
        return {
            "LOCAL_RANK": str(ranks.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GLOO_SOCKET_IFNAME": HOST_DEVICE,
            CLUSTER_VARIABLE: str(self._folder / CLUSTER_FILE),
            "RES_OPTIONS": "timeout:1 attempts:1",  # no name server is reachable from here
        }

    def label(self, rank: int) -> str:
        return f"rank {rank} on {self._wiring.cluster.host(rank).name}"
