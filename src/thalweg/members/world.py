"""All workers of a run as one of them sees them: who it is, the store, how to reach the others.

`rank` and `size` are its seat among those that were started. Who trains together now are `members`;
each formation of them has a part of the store to itself.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from time import monotonic, sleep

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from thalweg.errors import LaunchError, RunError
from thalweg.launch.rank_assignment import RankAssignment, open_store, read_rank_assignment
from thalweg.launch.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from thalweg.launch.worker_process import RESTARTS_VARIABLE
from thalweg.members.abort import AbortFlag
from thalweg.members.failure_detector import RENDEZVOUS_KEY
from thalweg.members.membership import Membership
from thalweg.members.membership_epoch import MembershipEpoch
from thalweg.transports import MemoryNetwork, TcpTransport, Transport
from thalweg.transports.best_effort import BestEffortTransport
from thalweg.transports.rejections import RejectionCounter
from thalweg.transports.security import SecurityConfig, wants_encryption
from thalweg.transports.store_client import StoreClient

MIN_STORE_POLL_SECONDS, MAX_STORE_POLL_SECONDS = (
    0.002,
    0.1,
)  # seconds between two looks at the store
SHORT_RECONNECT_SECONDS = 0.3  # seconds for a connection to come back, where members may change
log = logging.getLogger("thalweg")
INTERFACE_VARIABLES = ("THALWEG_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`address` is where the others find this worker; `store` is for this run alone."""

    rank: int
    size: int
    members: tuple[int, ...]
    store: Store
    store_client: StoreClient  # to the same store, and never hangs
    address: str
    timeout: float  # seconds
    name: str  # of this run, in the store
    namespaces: str = ""  # the part of its store that this one has to itself
    rank_assignment: RankAssignment | None  # None: the store is torch's process group's
    security: SecurityConfig = field(default_factory=SecurityConfig)  # of our own connections
    restarted: bool = False  # another process had this seat before
    membership: Membership | None = None  # None if members can't change

    @classmethod
    def join(cls, timeout: float, environment: Mapping[str, str] | None = None) -> World:
        """As part of torch's process group if there is one, else as the launcher's variables say;
        alone if there are none. `timeout` seconds for the store to answer; the environment is this
        process's unless another is given."""
        variables = os.environ if environment is None else environment
        assignment = None
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            store: Store = PrefixStore("thalweg", dist.distributed_c10d._get_default_store())
            meeting = _host_of(store) or variables.get("MASTER_ADDR")
        else:
            assignment = read_rank_assignment(variables)
            rank, size, meeting = assignment.rank, assignment.size, assignment.address
            store = open_store(assignment, timeout)
        # Every rank attaches in the same order, so the n-th time is the same run for all.
        # A process that takes a dead one's seat counts anew.
        process = _this_process()
        name = f"run/{store.add(f'runs/{rank}/{process}', 1)}"
        mine = _prefixed(store, name, timeout)
        is_new = store.compare_set(f"seat/{rank}", "", process).decode() == process
        again = int(variables.get(RESTARTS_VARIABLE, "0")) > 0
        address = own_address(meeting, variables)
        return cls(
            rank=rank,
            size=size,
            members=tuple(range(size)),
            store=mine,
            store_client=StoreClient(mine, rank),
            address=address,
            timeout=timeout,
            name=name,
            rank_assignment=assignment,
            security=SecurityConfig(
                encrypted=wants_encryption(variables, address),
                secret=find_secret(variables),
                run=name,
                refused=RejectionCounter(rank),
            ),
            restarted=again or not is_new or mine.add(RENDEZVOUS_KEY, 0) > 1,
        )

    def with_new_store(self) -> World:
        """At the store that was started in the place of one that is gone."""
        if self.rank_assignment is None:
            raise RunError(
                f"rank {self.rank} has lost the store of torch's process group",
                "start the run again: it goes on from its last checkpoint",
            )
        store = open_store(self.rank_assignment, self.timeout)
        store.compare_set(f"seat/{self.rank}", "", _this_process())
        mine = _prefixed(store, self.name, self.timeout)
        return replace(self, store=mine, store_client=StoreClient(mine, self.rank))

    def with_members(self, membership_epoch: MembershipEpoch) -> World:
        """With these members, and a part of the store to themselves."""
        return replace(
            self.namespace(f"formed/{membership_epoch.number}"), members=membership_epoch.members
        )

    def transport(self) -> Transport:
        if self.size == 1:
            return MemoryNetwork([self.rank]).transport(self.rank)
        self._warn_if_anybody_may_join()
        opened = partial(TcpTransport, self.rank, self.store, self.address, security=self.security)
        if self.membership is None:
            return opened()
        return opened(
            grace=SHORT_RECONNECT_SECONDS, forgives=False, look=self.membership.raise_if_rendezvous
        )

    def best_effort_transport(self, queue: int) -> BestEffortTransport:
        """For letters, which may be lost; so many may wait for one peer."""
        return BestEffortTransport(
            self.rank, self.store, self.address, queue, self.security, self.name + self.namespaces
        )

    def namespace(self, name: str) -> World:
        """The same, with a part of the store to itself."""
        store, rooms = PrefixStore(name, self.store), f"{self.namespaces}/{name}"
        return replace(
            self, store=store, store_client=StoreClient(store, self.rank), namespaces=rooms
        )

    def abort_flag(self) -> AbortFlag:
        return AbortFlag(self.store, self.rank, self.members)

    def wait_for(self, key: str, timeout: float, abort_flag: AbortFlag) -> bytes | None:
        """What another rank put into the store; None if it isn't there in time, PeerFailed if a
        rank gives up before it is, Interrupted if the members are to meet. Who gives up afterwards,
        because of what it says, isn't heard: all are to read the same."""
        deadline = monotonic() + timeout
        pause = MIN_STORE_POLL_SECONDS
        while not self._has(key):
            if self.membership is not None:
                self.membership.raise_if_rendezvous()
            abort = abort_flag.poll()
            if self._has(key):
                break
            if abort is not None:
                raise abort
            if monotonic() >= deadline:
                return None
            sleep(pause)
            pause = min(2 * pause, MAX_STORE_POLL_SECONDS)
        return self.store_client.call(lambda store: store.get(key))

    def put(self, key: str, value: str) -> None:
        self.store_client.call(lambda store: store.set(key, value))

    def remove(self, key: str) -> None:
        self.store_client.call(lambda store: store.delete_key(key))

    def leave(self, timeout: float, abort_flag: AbortFlag) -> bool:
        """Wait until all members part; False if that takes too long, Interrupted if they are to
        meet. Also ends if one has failed, or the store is gone."""
        deadline = monotonic() + timeout
        with suppress(RunError):
            parted = self.store_client.call(lambda store: store.add("parted", 1))
            while parted < len(self.members) and abort_flag.poll() is None:
                if self.membership is not None:
                    self.membership.raise_if_rendezvous()
                if monotonic() >= deadline:
                    return False
                sleep(MAX_STORE_POLL_SECONDS / 10)
                parted = self.store_client.call(lambda store: store.add("parted", 0))
        return True

    def _warn_if_anybody_may_join(self) -> None:
        if self.rank == 0 and self.security.encrypted and self.security.secret is None:
            log.warning(
                "this job has no secret: whoever reaches its store can join it; set %s, or %s, to "
                "the same on all workers",
                SECRET_VARIABLE,
                SECRET_FILE_VARIABLE,
            )

    def _has(self, key: str) -> bool:
        return self.store_client.call(lambda store: store.check([key]))

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


def _prefixed(store: Store, name: str, timeout: float) -> PrefixStore:
    mine = PrefixStore(name, store)
    mine.set_timeout(timedelta(seconds=timeout))
    return mine


def _this_process() -> str:
    """Its name among all that ever were."""
    return f"{socket.gethostname()}@{os.getpid()}@{psutil.Process().create_time()}"


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
