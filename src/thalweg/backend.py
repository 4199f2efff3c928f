"""The backend `thalweg` of torch.distributed: `init_process_group("thalweg")`.

It runs all-reduces (SUM and AVG of float32, float64, float16 and bfloat16 on the CPU) by the
schedules of an exact plan, through one engine for each process group. Everything else is Gloo's: a
group of Gloo stands behind each of ours.

    DDP, FSDP, script ──> ThalwegProcessGroup ── all-reduce ──> AllReducer ──> engine
                                             └── the rest ────> Gloo

A group opens its connections with its first all-reduce, in which all of its ranks take part. The
plan is `auto(allow=exact)` by default: before the first large all-reduce the ranks of the job
measure their links, and each all-reduce takes the schedule that suits its size (`tuned`). A program
is compiled and checked once for each size.

The rounds are numbered alike on all ranks because they issue the all-reduces of a group in the same
order. A callback of a future would issue its own at any moment, so there they are refused.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, local
from time import sleep
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._compile import _disable_dynamo

from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.engine.arithmetic import arithmetic_of, as_array
from thalweg.engine.collectives import SEE_OUTPUT_REMEDY
from thalweg.engine.engine import Engine
from thalweg.engine.execute import RankProgram, Task
from thalweg.errors import PlanError, RunError, ThalwegError, UsageError
from thalweg.facts import Cluster, Size, counted, format_cluster, parse_cluster, read_cluster
from thalweg.launch.launcher_variables import CLUSTER_VARIABLE
from thalweg.members.world import World, own_address, server_of
from thalweg.plan import Plan
from thalweg.probing.calibration import quick_survey
from thalweg.probing.coordinator import host_description
from thalweg.schedules import Group, check
from thalweg.training.auto.request import allowed, is_auto
from thalweg.training.consistency_check import host_names
from thalweg.training.shutdown import show_log_lines
from thalweg.transports.security import wants_encryption

PLAN_VARIABLE, PROTECT_VARIABLE = "THALWEG_PLAN", "THALWEG_PROTECT"
MEASURED_FROM = Size.parse("1MB")  # an all-reduce of this size is worth a survey before
MIN_MEASURED_HOSTS = 3  # among fewer there is no choice to make
MAX_MEASURED_HOSTS = 24  # measuring more takes too long: describe the cluster
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PROGRAM_CACHE_ENTRIES = 1024
EXIT_GRACE_SECONDS = 0.2  # Gloo's threads abort a process that ends while they still run
FORWARDED = (  # calls that torch makes from C++ on a group in Python; all others are Gloo's too
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "alltoall"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall_base"),
    *("_allgather_base", "_reduce_scatter_base", "barrier", "broadcast", "gather", "scatter"),
    *("allreduce_coalesced", "monitored_barrier", "recv", "recv_anysource", "send", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced",),
)
AUTO_PLAN = "tuned"  # of `auto`
log = logging.getLogger("thalweg")
_open: WeakSet[AllReducer] = WeakSet()
_thread = local()  # `runs_callbacks`: True in the threads that complete futures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The facts that groups share: the host of each rank, and the cluster in the file that
    THALWEG_CLUSTER names on the first rank. If there is no such file, it is written there."""

    hosts: Mapping[int, str]
    cluster: Cluster | None
    survey_file: Path | None

    @classmethod
    def of(cls, store: Any, rank: int, members: Sequence[int]) -> _Job:
        """The job of these members, which come here together; `rank` is a place among them."""
        named, file, text = os.environ.get(CLUSTER_VARIABLE), None, ""
        if named and rank == 0:
            file = Path(named)
            text = format_cluster(read_cluster(file)) if file.exists() else ""
        own = host_description()
        store.set(f"host/{rank}", json.dumps([own[key] for key in ("name", "machine", "stack")]))
        if rank == 0:
            store.set("cluster", text)
        names = host_names(store.get(f"host/{place}").decode() for place in range(len(members)))
        text = store.get("cluster").decode()
        return cls(
            hosts=dict(zip(members, names, strict=True)),
            cluster=parse_cluster(text) if text else None,
            survey_file=file,
        )


_jobs: list[_Job] = []  # the one that this process takes part in, if its own group is Thalweg's


class ThalwegProcessGroup(dist.ProcessGroup):
    """A process group whose all-reduces are Thalweg's. `given` is the `pg_options` of the script:
    a plan, its text, or a mapping with `plan` and `cluster`."""

    def __init__(self, options: Any, given: Any = None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # missing in torch's stubs
        # A second group of the same name, after `destroy_process_group`, gets a store of its own.
        generation = (options.store.add("generations", 1) - 1) // size
        store = PrefixStore(f"generation/{generation}", options.store)
        plan, cluster = _options(given)
        _refuse_unprotected(store)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        self._inner = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self._inner):
            group._register_backend(torch.device("cpu"), kind, self._gloo)
            group._set_default_backend(kind)
        members = tuple(options.global_ranks_in_group)
        self._is_whole = is_whole = not members  # the job's own group, which torch makes first
        if is_whole:
            show_log_lines()
            members = tuple(range(size))
            _jobs[:] = [_Job.of(store, rank, members)]
        # Beside a group of another backend this group is a job of its own.
        job = _jobs[0] if _jobs else _Job.of(store, rank, members)
        cluster = cluster or job.cluster
        self._reducer = AllReducer(
            PrefixStore("thalweg", store),
            rank,
            [job.hosts[member] for member in members],
            options.timeout.total_seconds(),
            plan=plan,
            cluster=cluster and _part_of(cluster, members),
            measures=is_whole and is_auto(plan),
            survey_file=job.survey_file,
        )

    @_disable_dynamo
    def allreduce(  # type: ignore[override]  # torch overloads it
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        options = dist.AllreduceOptions() if opts is None else opts
        average = options.reduceOp == dist.ReduceOp.AVG
        if len(tensors) == 1 and (average or options.reduceOp == dist.ReduceOp.SUM):
            [tensor] = tensors
            if self._reducer.takes(tensor):
                return self._reducer.start(tensor, average=average)
        return self._inner.allreduce(tensors, options)

    def shutdown(self) -> None:
        if self._is_whole:
            _jobs.clear()
        self._reducer.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        self._reducer.close()
        self._gloo.abort()


def _forwarding(name: str) -> Callable[..., Any]:
    """A method that calls Gloo from Python. Without it torch's own fallback would hold Python's
    lock while it waits for Gloo's threads, which need the lock."""

    @_disable_dynamo
    def forward(self: ThalwegProcessGroup, *args: Any, **options: Any) -> Any:
        return getattr(self._inner, name)(*args, **options)

    return forward


for _name in FORWARDED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ThalwegProcessGroup, _name, _forwarding(_name))


class AllReducer:
    """The all-reduces of one group, whose ranks are on these hosts. With `measures` they measure
    the links before the first large one, where there is a choice to make, and write the cluster
    into `survey_file`."""

    def __init__(
        self,
        store: Any,
        rank: int,
        hosts: Sequence[str],
        timeout: float,
        *,
        plan: Plan,
        cluster: Cluster | None,
        measures: bool,
        survey_file: Path | None,
    ) -> None:
        self.count = 0  # of the all-reduces issued
        self.group = Group.everybody(cluster or Cluster.of_hosts(hosts))
        self._store = store
        self._rank = rank
        self._size = len(hosts)
        self._hosts = len(set(hosts))
        self._timeout = timeout
        self._plan = plan
        self._is_ours = self._size > 1 and not default_catalog().is_native(plan)
        self._survey_file = survey_file
        self._measures = (
            cluster is None and measures and MIN_MEASURED_HOSTS <= self._hosts <= MAX_MEASURED_HOSTS
        )
        self._programs: dict[tuple[int, int], RankProgram] = {}
        self._engine: Engine | None = None
        self._last: Future[None] | None = None  # the all-reduce that was started last
        self._lock = Lock()
        self._closed = False

    def takes(self, tensor: torch.Tensor) -> bool:
        """True if this tensor is all-reduced here, and not by Gloo."""
        return (
            self._is_ours
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.dtype in DTYPES
            and tensor.numel() > 0
        )

    def start(self, tensor: torch.Tensor, *, average: bool) -> AllReduceWork:
        """Start the all-reduce of a tensor, in place."""
        if getattr(_thread, "runs_callbacks", False):
            raise UsageError(
                "an all-reduce was issued by a callback of another's future, at another moment on "
                "each rank",
                'issue it in the script; for PowerSGD use thalweg.attach(plan="ring+powersgd")',
            )
        own = tensor.detach()
        flat = own.contiguous().view(-1)
        with self._lock:
            engine = self._opened()
            if self._measures and tensor.nbytes >= MEASURED_FROM.nbytes:
                self._measure(engine)
            self.count += 1
            vector = as_array(flat)
            task = Task(
                program=self._program(len(vector), vector.itemsize),
                vector=vector,
                step=self.count,
                round_number=0,
                arithmetic=arithmetic_of(flat.dtype),
            )
            divisor = self._size if average else 1
            is_copy = flat.data_ptr() != own.data_ptr()
            chain = _with_result(task, flat, divisor, own) if average or is_copy else task
            self._last = engine.submit(chain)
            return AllReduceWork(self, self.count, tensor, self._last)

    def wait(self, work: AllReduceWork) -> None:
        """Wait for an all-reduce; RunError names it if it has failed."""
        assert self._engine is not None
        try:
            self._engine.wait([work.sent])
        except ThalwegError as error:
            raise work.failure(error) from error

    def when_over(self, call: Callable[[], None]) -> None:
        """Call this in the thread of the callbacks, in the order of these calls."""
        try:
            self._callbacks.submit(call)
        except RuntimeError:  # the group is closed
            call()

    def close(self) -> None:
        """Close the connections, if this process has opened them. The other ranks learn of an
        all-reduce that is still under way: they would wait for this rank until their timeout."""
        was_closed, self._closed = self._closed, True
        if was_closed or self._engine is None or self._process != os.getpid():
            return
        if self._last is not None and not self._last.done():
            self._abort_flag.publish(
                f"rank {self._rank} ended while all-reduce {self.count} was under way"
            )
        self._engine.close()
        self._callbacks.shutdown(wait=False)

    def _opened(self) -> Engine:
        """The engine, which the group's first all-reduce opens. No rank waits for another here, as
        they may issue the all-reduces of several groups in different orders."""
        if self._closed:
            raise UsageError("the process group is destroyed", "initialise another")
        if self._engine is None:
            self._process = os.getpid()
            self._world = World.of(self._store, self._rank, self._size, timeout=self._timeout)
            self._abort_flag = self._world.abort_flag()
            self._callbacks = ThreadPoolExecutor(1, "thalweg-callbacks", _run_callbacks)
            self._engine = Engine(self._world.transport(), self._abort_flag, self._timeout)
            _open.add(self)
            if self._rank == 0:
                log.info("%s", self._start_line())
        return self._engine

    def _measure(self, engine: Engine) -> None:
        """Measure the links between the ranks, which all come here at the same all-reduce."""
        if self._last is not None:
            engine.wait([self._last])
        cluster = quick_survey(self._world.namespace("survey"), self._abort_flag, None)
        self.group, self._measures = Group.everybody(cluster), False
        self._programs.clear()
        if self._rank == 0:
            hosts, racks = counted(self._hosts, "host"), counted(len(cluster.racks), "rack")
            log.info("measured the links of %s in %s", hosts, racks)
            if self._survey_file is not None:
                try:
                    self._survey_file.write_text(format_cluster(cluster))
                except OSError as error:
                    log.warning("can't write %s: %s", self._survey_file, error.strerror)

    def _program(self, elements: int, itemsize: int) -> RankProgram:
        """The moves of this rank in an all-reduce of this size, which are checked once."""
        program = self._programs.get((elements, itemsize))
        if program is None:
            if len(self._programs) >= PROGRAM_CACHE_ENTRIES:
                self._programs.clear()
            plan = parse_plan(AUTO_PLAN) if is_auto(self._plan) else self._plan
            topology = default_catalog().topologies[plan.topology.name]
            schedule = topology.build(self.group, elements, itemsize, 0, **plan.topology.arguments)
            check(schedule)
            program = RankProgram.of(schedule, self._rank)
            self._programs[elements, itemsize] = program
        return program

    def _start_line(self) -> str:
        security = self._world.security
        ours = "TCP, encrypted" if security.encrypted else "TCP, not encrypted"
        rest = "neither authenticated nor encrypted" if security.encrypted else "not encrypted"
        return (
            f"backend thalweg, plan {self._plan}: {counted(self._size, 'worker')} on "
            f"{counted(self._hosts, 'host')}; all-reduces over {ours}; other collectives by "
            f"Gloo, {rest}; thalweg.attach() adds compression, codes, and recovery from failures"
        )


class AllReduceWork(dist.Work):
    """An all-reduce that was started: DDP waits for its future, scripts for the work itself."""

    def __init__(
        self,
        reducer: AllReducer,
        number: int,
        tensor: torch.Tensor,
        sent: Future[None],
    ) -> None:
        super().__init__()
        self.sent = sent
        self._reducer = reducer
        self._number = number
        self._tensor = tensor

    def failure(self, error: BaseException) -> RunError:
        """The error with the name of this all-reduce."""
        kind = str(self._tensor.dtype).removeprefix("torch.")
        what = f"all-reduce {self._number} of {self._tensor.numel()} x {kind} failed"
        if isinstance(error, ThalwegError):
            return RunError(f"{what}: {error.problem}", error.remedy or SEE_OUTPUT_REMEDY)
        return RunError(f"{what}: {type(error).__name__}: {error}", SEE_OUTPUT_REMEDY)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the result. Rounds have a deadline, the timeout of the group."""
        self._reducer.wait(self)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors, for DDP and its hooks."""
        found: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            error = self.sent.exception()  # waits for the end
            if error is None:
                found.set_result([self._tensor])
            else:
                found.set_exception(self.failure(error))

        self._reducer.when_over(complete)
        return found.then(lambda done: done.value())  # which raises the error, if it is one

    def is_completed(self) -> bool:
        return self.sent.done()

    def is_success(self) -> bool:
        return self.sent.done() and self.sent.exception() is None

    def exception(self) -> BaseException | None:
        return self.sent.exception() if self.sent.done() else None

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]


def _run_callbacks() -> None:
    _thread.runs_callbacks = True


def _with_result(
    task: Task, flat: torch.Tensor, divisor: int, target: torch.Tensor
) -> Iterator[Sequence[Task]]:
    """The chain that divides the sum, as Gloo does, and writes it to a tensor that isn't
    contiguous."""
    yield [task]
    with torch.no_grad():
        if divisor > 1:
            flat.div_(divisor)
        if flat.data_ptr() != target.data_ptr():
            target.copy_(flat.view(target.shape))


def _options(given: Any) -> tuple[Plan, Cluster | None]:
    """The plan and the cluster that the script or the environment names. PlanError for a plan that
    isn't exact, or whose all-reduces need more than a tensor."""
    named = dict(given) if isinstance(given, Mapping) else {"plan": given}
    if unknown := named.keys() - {"plan", "cluster"}:
        raise UsageError(f"pg_options has {sorted(unknown)[0]!r}", 'give "plan" and "cluster"')
    text = named.get("plan") or os.environ.get(PLAN_VARIABLE) or "auto(allow=exact)"
    plan = text if isinstance(text, Plan) else parse_plan(str(text))
    is_exact = (allowed(plan) if is_auto(plan) else default_catalog().guarantee(plan).promise) is (
        Promise.EXACT
    )
    if not is_exact or plan.redundancy is not None or plan.averages_parameters:
        raise PlanError(
            f"the backend thalweg can't run {plan}: an all-reduce alone carries exact plans",
            f'use thalweg.attach(model, optimizer, plan="{plan}")',
        )
    cluster = named.get("cluster")
    if cluster is not None and not isinstance(cluster, Cluster):
        cluster = read_cluster(Path(cluster))
    return plan, cluster


def _refuse_unprotected(store: Any) -> None:
    """Raise UsageError if everything has to be protected, and other hosts take part."""
    if os.environ.get(PROTECT_VARIABLE) != "required":
        return
    if wants_encryption(os.environ, own_address(server_of(store)[0], os.environ)):
        raise UsageError(
            f"{PROTECT_VARIABLE}=required, and Gloo's part of the backend is neither authenticated "
            "nor encrypted",
            "use thalweg.attach(), whose connections all are, or leave the variable out",
        )


def _part_of(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    """The hosts of these ranks, which are numbered from 0 in their order."""
    places = {rank: place for place, rank in enumerate(ranks)}
    racks = []
    for rack in cluster.racks:
        hosts = [
            replace(host, ranks=tuple(places[rank] for rank in host.ranks if rank in places))
            for host in rack.hosts
        ]
        if present := tuple(host for host in hosts if host.ranks):
            racks.append(replace(rack, hosts=present))
    return replace(cluster, racks=tuple(racks))


@atexit.register
def _close_all() -> None:
    """Close the groups that the script hasn't destroyed, and let Gloo's threads end."""
    for reducer in list(_open):
        with suppress(ThalwegError):
            reducer.close()
    sleep(EXIT_GRACE_SECONDS)
