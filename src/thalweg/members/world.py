"""The workers of a run, as one of them sees them: its rank, the store, and the transports.

`rank` and `size` are fixed at the start of the run. The ranks that train together now are
`members`; each membership epoch has its own namespace in the store.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from time import monotonic, sleep

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from thalweg.errors import LaunchError, RunError, ThalwegError
from thalweg.launch.launcher_variables import RankAssignment, read_rank_assignment
from thalweg.launch.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from thalweg.launch.store import open_store
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

MIN_STORE_POLL_SECONDS, MAX_STORE_POLL_SECONDS = 0.002, 0.1
SHORT_RECONNECT_SECONDS = 0.3  # for a connection to be restored, if members may change
log = logging.getLogger("thalweg")
INTERFACE_VARIABLES = ("THALWEG_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank's view of the run. `address` is this worker's; `store` is for this run alone."""

    rank: int
    size: int
    members: tuple[int, ...]
    store: Store
    store_client: StoreClient  # of the same store; its calls time out
    address: str
    timeout: float  # seconds
    name: str  # of this run, in the store
    namespaces: str = ""  # path of this world's namespace within the run's
    rank_assignment: RankAssignment | None = None  # None: another's store, which can't be reopened
    security: SecurityConfig = field(default_factory=SecurityConfig)  # of Thalweg's connections
    restarted: bool = False  # another process had this rank before
    membership: Membership | None = None  # None if members can't change

    @classmethod
    def join(cls, timeout: float, environment: Mapping[str, str] | None = None) -> World:
        """Join as part of torch's process group if there is one, else by the launcher's variables;
        alone without either. `timeout` limits the store's answers, in seconds."""
        variables = os.environ if environment is None else environment
        assignment = None if dist.is_initialized() else read_rank_assignment(variables)
        if assignment is None:
            store: Store = PrefixStore("thalweg", dist.distributed_c10d._get_default_store())
            rank, size = dist.get_rank(), dist.get_world_size()
            host = server_of(store)[0] or variables.get("MASTER_ADDR")
        else:
            store = open_store(assignment, timeout)
            rank, size, host = assignment.rank, assignment.size, assignment.address
        world = cls.of(store, rank, size, timeout=timeout, environment=variables, store_host=host)
        return replace(world, rank_assignment=assignment)

    @classmethod
    def of(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        store_host: str | None = None,
    ) -> World:
        """The world of one of `size` ranks that share this store. `store_host` is the address of
        the store's host, if the store itself doesn't have it."""
        variables = os.environ if environment is None else environment
        # Every rank attaches in the same order, so the n-th time is the same run for all.
        # A process that replaces a dead one counts from the start.
        process = _this_process()
        name = f"run/{store.add(f'runs/{rank}/{process}', 1)}"
        own_store = _prefixed(store, name, timeout)
        is_new = store.compare_set(f"seat/{rank}", "", process).decode() == process
        again = int(variables.get(RESTARTS_VARIABLE, "0")) > 0
        address = own_address(store_host or server_of(store)[0], variables)
        return cls(
            rank=rank,
            size=size,
            members=tuple(range(size)),
            store=own_store,
            store_client=StoreClient(own_store, rank),
            address=address,
            timeout=timeout,
            name=name,
            security=SecurityConfig(
                encrypted=wants_encryption(variables, address),
                secret=find_secret(variables),
                run=name,
                refused=RejectionCounter(rank),
            ),
            restarted=again or not is_new or own_store.add(RENDEZVOUS_KEY, 0) > 1,
        )

    def with_new_store(self) -> World:
        """The world with the store that was started to replace a lost one."""
        if self.rank_assignment is None:
            raise RunError(
                f"rank {self.rank} lost the store of torch's process group",
                "start the run again: it resumes from its last checkpoint",
            )
        store = open_store(self.rank_assignment, self.timeout)
        store.compare_set(f"seat/{self.rank}", "", _this_process())
        own_store = _prefixed(store, self.name, self.timeout)
        return replace(self, store=own_store, store_client=StoreClient(own_store, self.rank))

    def with_members(self, membership_epoch: MembershipEpoch) -> World:
        """The world of these members, with a namespace of the store."""
        world = self.namespace(f"formed/{membership_epoch.number}")
        return replace(world, members=membership_epoch.members)

    @property
    def membership_epoch(self) -> MembershipEpoch:
        """The current epoch; the first one if members can't change."""
        if self.membership is None:
            return MembershipEpoch.first(self.size)
        return self.membership.membership_epoch

    def transport(self) -> Transport:
        if self.size == 1:
            return MemoryNetwork([self.rank]).transport(self.rank)
        if self.rank == 0 and self.security.encrypted and self.security.secret is None:
            log.warning(
                "this job has no secret: any process that reaches its store can join it; set %s or "
                "%s to the same value on all workers",
                SECRET_VARIABLE,
                SECRET_FILE_VARIABLE,
            )
        opened = partial(TcpTransport, self.rank, self.store, self.address, security=self.security)
        if self.membership is None:
            return opened()
        return opened(
            grace=SHORT_RECONNECT_SECONDS, forgives=False, look=self.membership.raise_if_rendezvous
        )

    def best_effort_transport(self, queue: int) -> BestEffortTransport:
        """A transport for best-effort messages; `queue` limits those that wait for one peer."""
        return BestEffortTransport(
            self.rank, self.store, self.address, queue, self.security, self.name + self.namespaces
        )

    def namespace(self, name: str) -> World:
        """A view of this world in a namespace of the store."""
        store, path = PrefixStore(name, self.store), f"{self.namespaces}/{name}"
        client = StoreClient(store, self.rank)
        return replace(self, store=store, store_client=client, namespaces=path)

    def abort_flag(self) -> AbortFlag:
        return AbortFlag(self.store, self.rank, self.members)

    def wait_for(self, key: str, timeout: float, abort_flag: AbortFlag) -> bytes | None:
        """The value that another rank puts at `key`; None after `timeout`, PeerFailed if a rank
        fails first, Interrupted if a rendezvous is pending. A rank that fails after the value is
        there doesn't count, since all ranks should read the value."""
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

    def read(self, key: str, abort_flag: AbortFlag, late: ThalwegError) -> bytes:
        """The value that another rank puts at `key`; raises `late` after this world's timeout, and
        the errors of `wait_for`."""
        value = self.wait_for(key, self.timeout, abort_flag)
        if value is None:
            raise late
        return value

    def read_all(
        self, key: str, abort_flag: AbortFlag, late: Callable[[int], ThalwegError]
    ) -> dict[int, bytes]:
        """The values that all members put at this key and their rank, by rank; raises `late` of the
        first rank that hasn't put one after this world's timeout."""
        return {r: self.read(f"{key}/{r}", abort_flag, late(r)) for r in self.members}

    def put(self, key: str, value: str) -> None:
        self.store_client.call(lambda store: store.set(key, value))

    def remove(self, key: str) -> None:
        self.store_client.call(lambda store: store.delete_key(key))

    def leave(self, timeout: float, abort_flag: AbortFlag) -> bool:
        """Wait until all members leave; False after `timeout`, Interrupted if a rendezvous is
        pending. Also ends if a member has failed, or the store is lost."""
        deadline = monotonic() + timeout
        with suppress(RunError):
            count = self.store_client.call(lambda store: store.add("left", 1))
            while count < len(self.members) and abort_flag.poll() is None:
                if self.membership is not None:
                    self.membership.raise_if_rendezvous()
                if monotonic() >= deadline:
                    return False
                sleep(MAX_STORE_POLL_SECONDS / 10)
                count = self.store_client.call(lambda store: store.add("left", 0))
        return True

    def _has(self, key: str) -> bool:
        return self.store_client.call(lambda store: store.check([key]))

    def join_process_group(self) -> None:
        """Initialise torch's process group for the parts that need it, unless the script has."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=PrefixStore("c10d", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout),
            )


def _prefixed(store: Store, name: str, timeout: float) -> PrefixStore:
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=timeout))
    return prefixed


def _this_process() -> str:
    """The name of this process, unique over hosts and time."""
    return f"{socket.gethostname()}@{os.getpid()}@{psutil.Process().create_time()}"


def own_address(store_host: str | None, environment: Mapping[str, str]) -> str:
    """The address of this host on the configured interface, or on the route to the store."""
    for variable in INTERFACE_VARIABLES:
        if environment.get(variable):
            return _address_of(environment[variable].split(",")[0], variable)
    if store_host is None:
        return "127.0.0.1"
    with suppress(OSError):
        family, *_, target = socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # picks a route; nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(interface: str, variable: str) -> str:
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise LaunchError(
            f"{variable} names the interface {interface!r}, which this host doesn't have",
            f"use one of {', '.join(sorted(interfaces))}",
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[interface]:
            if entry.family == family:
                return str(entry.address).partition("%")[0]
    raise LaunchError(f"interface {interface!r} ({variable}) has no address", "name another")


def server_of(store: Store) -> tuple[str | None, int | None]:
    """The host and the port of the process that hosts a store; None if the store has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None), getattr(store, "port", None)
