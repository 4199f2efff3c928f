"""All workers of a run as one of them sees them: who it is, the store, how to reach the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from time import monotonic, sleep

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from thalweg.errors import LaunchError, RunError
from thalweg.runtime.alarm import Alarm
from thalweg.runtime.forked import RESTARTS_VARIABLE
from thalweg.runtime.launch import find_seat, open_store
from thalweg.transports import C10dTransport, MemoryNetwork, Transport, ZeroMqTransport
from thalweg.transports.line import Line

SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks at the store
INTERFACE_VARIABLES = ("THALWEG_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`address` is where the others find this worker; `store` is for this run alone."""

    rank: int
    size: int
    store: Store
    line: Line  # to the same store, and never hangs
    address: str
    timeout: float  # seconds

    @classmethod
    def join(cls, timeout: float) -> World:
        """As part of torch's process group if there is one, else as the launcher's variables say;
        alone if there are none. `timeout` seconds for the store to answer."""
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            store: Store = PrefixStore("thalweg", dist.distributed_c10d._get_default_store())
            meeting = _host_of(store) or os.environ.get("MASTER_ADDR")
        else:
            seat = find_seat(os.environ)
            rank, size, meeting = seat.rank, seat.size, seat.address
            store = open_store(seat, timeout)
        # Every rank attaches in the same order, so the n-th time is the same run for all.
        # One that was restarted counts anew.
        restarts = os.environ.get(RESTARTS_VARIABLE, "0")
        number = store.add(f"runs/{rank}/{restarts}", 1)
        mine = PrefixStore(f"run/{number}", store)
        mine.set_timeout(timedelta(seconds=timeout))
        return cls(
            rank=rank,
            size=size,
            store=mine,
            line=Line(mine, rank),
            address=own_address(meeting, os.environ),
            timeout=timeout,
        )

    def transport(self, name: str) -> Transport:
        if self.size == 1:
            return MemoryNetwork([self.rank]).transport(self.rank)
        if name == "c10d":
            self.join_process_group()
            patience = timedelta(seconds=self.timeout)
            return C10dTransport(dist.new_group(timeout=patience, backend=_backend_for_cpu()))
        return ZeroMqTransport(self.rank, self.store, self.address)

    def room(self, name: str) -> World:
        """The same, with a part of the store to itself."""
        store = PrefixStore(name, self.store)
        return replace(self, store=store, line=Line(store, self.rank))

    def alarm(self) -> Alarm:
        return Alarm(self.store, self.rank, self.size)

    def wait_for(self, key: str, timeout: float, alarm: Alarm) -> bytes | None:
        """What another rank put into the store; None if it isn't there in time, PeerFailed if a
        rank gives up before it is. Who gives up afterwards, because of what it says, isn't heard:
        all are to read the same."""
        deadline = monotonic() + timeout
        pause = SHORTEST_PAUSE
        while not self._has(key):
            heard = alarm.heard()
            if self._has(key):
                break
            if heard is not None:
                raise heard
            if monotonic() >= deadline:
                return None
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self.line.ask(lambda store: store.get(key))

    def put(self, key: str, value: str) -> None:
        self.line.ask(lambda store: store.set(key, value))

    def remove(self, key: str) -> None:
        self.line.ask(lambda store: store.delete_key(key))

    def part(self, timeout: float, alarm: Alarm) -> bool:
        """Wait until all ranks part; False if that takes too long. Also ends if one has failed, or
        the store is gone."""
        deadline = monotonic() + timeout
        with suppress(RunError):
            parted = self.line.ask(lambda store: store.add("parted", 1))
            while parted < self.size and alarm.heard() is None:
                if monotonic() >= deadline:
                    return False
                sleep(LONGEST_PAUSE / 10)
                parted = self.line.ask(lambda store: store.add("parted", 0))
        return True

    def _has(self, key: str) -> bool:
        return self.line.ask(lambda store: store.check([key]))

    def join_process_group(self) -> None:
        """Torch's own, for what needs it and if the script hasn't done so."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=PrefixStore("c10d", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout),
            )


def own_address(meeting: str | None, environment: Mapping[str, str]) -> str:
    """This host's address on the interface that is named, or on the way to where all meet."""
    for variable in INTERFACE_VARIABLES:
        if environment.get(variable):
            return _address_of(environment[variable].split(",")[0], variable)
    if meeting is None:
        return "127.0.0.1"
    with suppress(OSError):
        family, _, _, _, there = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # picks a route; nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(interface: str, variable: str) -> str:
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise LaunchError(
            f"{variable} names the interface {interface!r}, which isn't here",
            f"use one of {', '.join(sorted(interfaces))}",
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in interfaces[interface]:
            if found.family == family:
                return str(found.address).partition("%")[0]
    raise LaunchError(f"interface {interface!r} ({variable}) has no address", "name another")


def _host_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def _backend_for_cpu() -> str | None:
    """The group's own backend where it moves CPU memory; None: torch's default for the group."""
    return "gloo" if dist.get_backend() == "nccl" else None
