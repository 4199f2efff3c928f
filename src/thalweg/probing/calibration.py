"""Calibration: the rates of the links, what messages, bytes and crowds cost, and the compressors,
measured by all ranks of a run together in a few seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import combinations
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.errors import NotFitted, RunError
from thalweg.facts import (
    Cluster,
    CodecCost,
    Machine,
    Tensor,
    format_cluster,
    format_machine,
    parse_cluster,
    parse_machine,
)
from thalweg.launch.rank_assignment import ONE_RACK_ASSUMPTION
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.plan import Choice, Settings
from thalweg.predict.calibration_trials import (
    MAX_SMALL_TRIAL_BYTES,
    TRIAL_ITEM_BYTES,
    NetworkTrial,
    in_buckets,
    min_trial_seconds,
    schedules,
    wanted_trials,
)
from thalweg.predict.fitting import fit
from thalweg.probing.cluster_builder import cluster_of, names_of
from thalweg.probing.codec_costs import measure_codecs
from thalweg.probing.coordinator import Counted, Effort, HostInfo, ProbeCoordinator, run_coordinated
from thalweg.probing.nics import measure_nics
from thalweg.probing.survey import NetworkOfHosts, declared_racks, in_one_rack, survey
from thalweg.probing.uplinks import measure_uplinks
from thalweg.probing.worker import PROBE_LEADER_RANK
from thalweg.schedules import Group

DEFAULT_BUCKET_SIZE = Settings().bucket
FITTED_KEY = "fitted"  # in the store
Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and of how much (0: not known)."""
QUICK_EFFORT = Effort(pings=40, short=0.15, long=0.2)
NIC_PARTNERS_PER_HOST = 2  # of each host
MAX_UPLINK_FILL_COUNT = 3  # times at most, each way of an uplink
PINGED_HOSTS_PER_RACK = 3  # hosts of each rack, by its first
MIN_REPETITIONS, MAX_REPETITIONS = 3, 5  # repetitions
TRIALS_BUDGET_SECONDS = 6.0  # seconds for all of them, at the links' rates
TINY_TRIALS_IN_A_ROW_COUNT = 8  # of tiny ones
TRIAL_WARMUP_BYTES = 1 << 16  # bytes
LINK_RECOVERY_SECONDS = 0.03  # seconds in which links recover what they carry at once
# Seconds at most for the backend, and less than the engine's for who waits there.
BACKEND_TIMEOUT_SECONDS = 60.0
Run = Callable[[int], None]
"""So many times in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """`cluster` has the latency that messages have in use; `surveyed` is the one that the trials'
    schedules were made for."""

    cluster: Cluster
    machine: Machine
    surveyed: Cluster
    trials: tuple[NetworkTrial, ...]


def calibrate(
    world: World,
    abort_flag: AbortFlag,
    engine: Engine,
    declared: Cluster | None,
    *,
    tensors: Sequence[Tensor] = (),
    codecs: Sequence[Choice] = (),
    native: bool = False,
    name: str = "calibration",
    clock: RoundCounter | None = None,
    progress: Progress = lambda what, done, total: None,
) -> CalibrationResult:
    """The same on all ranks, which call this together, at a moment at which nothing else is sent.

    declared   its racks are kept; a whole probe finds them if it is None
    codecs     compressors that are tried on such `tensors`
    native     try the backend's own all-reduce too, where Gloo connects
    name       of a part of the store that nothing else uses: another one each time
    clock      numbers the rounds, on an engine that trains

    Raises NotFitted on all ranks if what was measured makes no sense together.
    """
    namespace = world.namespace(name)
    surveyed = quick_survey(
        namespace, abort_flag, declared, counted=lambda done: progress("links", done, 0)
    )
    collectives = Collectives(Group.everybody(surveyed), engine, clock or RoundCounter())
    trials = run_trials(
        namespace,
        collectives,
        surveyed,
        native=native,
        typical=min(DEFAULT_BUCKET_SIZE.nbytes, sum(tensor.nbytes for tensor in tensors)) or None,
        progress=lambda done, total: progress("trials", done, total),
    )
    progress("compressors", 0, len(codecs))
    costs = measure_codecs(collectives, codecs, tensors)
    progress("compressors", len(codecs), len(codecs))
    if world.rank == PROBE_LEADER_RANK:  # one is enough, and then all have the same to the last bit
        namespace.put(FITTED_KEY, json.dumps(_fitted(surveyed, trials, costs)))
    said = namespace.wait_for(FITTED_KEY, namespace.timeout, abort_flag)
    if said is None:
        raise RunError(
            f"rank {PROBE_LEADER_RANK} hasn't fitted what was measured", "allow more time"
        )
    found = json.loads(said)
    if "problem" in found:
        raise NotFitted(found["problem"], "measure again, when less else runs there")
    return CalibrationResult(
        cluster=parse_cluster(found["cluster"]),
        machine=parse_machine(found["machine"]),
        surveyed=surveyed,
        trials=tuple(trials),
    )


def _fitted(
    surveyed: Cluster, trials: Sequence[NetworkTrial], codecs: Mapping[str, CodecCost]
) -> dict[str, str]:
    """As files, or the problem: nobody else would know of one, and all wait for this."""
    try:
        found = fit(surveyed, trials)
        machine = replace(found.machine, codecs=codecs)
        return {"cluster": format_cluster(found.cluster), "machine": format_machine(machine)}
    except Exception as error:
        return {"problem": f"what was measured can't be fitted ({type(error).__name__}: {error})"}


def quick_survey(
    namespace: World,
    abort_flag: AbortFlag,
    declared: Cluster | None,
    *,
    counted: Counted = lambda done: None,
) -> Cluster:
    """The declared racks with the rates that their links have now; the same on all ranks, which
    call this together, each in a namespace of the same name (`World.namespace`) that nothing else
    uses: so it serves in the middle of a run too, where nothing is sent meanwhile. Without declared
    racks it is a whole probe."""
    effort = Effort() if declared is None else QUICK_EFFORT

    def survey_links(conductor: ProbeCoordinator) -> str:
        return format_cluster(survey_quickly(conductor, declared))

    return parse_cluster(run_coordinated(namespace, abort_flag, effort, survey_links, counted))


def survey_quickly(network: NetworkOfHosts, declared: Cluster | None) -> Cluster:
    """On rank 0. What isn't declared as it stands is found out by a whole probe; where one rack is
    only assumed, its hosts are those that are there.

    A probe takes most of its time to find out who shares a rack. Where that is known, each host
    sends to two partners of its rack and takes in from two, and each uplink is filled two or three
    times each way, for a fifth of a second each (the first may have had a slow start: if two
    differ, the median of three counts). Who looks slow is tried with others, as in a probe, so one
    slow NIC or uplink is found and nobody else is blamed.
    """
    if declared is not None and ONE_RACK_ASSUMPTION in declared.assumed:
        declared = in_one_rack(network.host_infos)
    racks = None if declared is None else racks_of(network.host_infos, declared)
    if network.size == 1 or declared is None or racks is None:
        return survey(network, declared, monotonic()).cluster
    nics = measure_nics(network, racks, NIC_PARTNERS_PER_HOST)
    uplinks = measure_uplinks(network, racks, nics, MAX_UPLINK_FILL_COUNT)
    names = names_of(network.host_infos, declared)
    trips = _round_trips(network, racks)
    return cluster_of(network.host_infos, names, racks, nics, uplinks, trips, declared)


def racks_of(hosts: Sequence[HostInfo], declared: Cluster) -> list[frozenset[int]] | None:
    """The hosts of each declared rack, by number; None if a host isn't as it is declared."""
    if any({*host.ranks} != {*declared.host(host.ranks[0]).ranks} for host in hosts):
        return None
    return declared_racks(declared, [host.ranks[0] for host in hosts])


def _round_trips(
    network: NetworkOfHosts, racks: Sequence[frozenset[int]]
) -> dict[tuple[int, int], float]:
    """Of a few hosts of each rack, and between the racks' first hosts."""
    within = [
        (min(rack), host) for rack in racks for host in sorted(rack)[1 : 1 + PINGED_HOSTS_PER_RACK]
    ]
    across = combinations(sorted(min(rack) for rack in racks), 2)
    return {pair: network.round_trip(*pair) for pair in (*within, *across)}


def run_trials(
    namespace: World,
    collectives: Collectives,
    cluster: Cluster,
    *,
    native: bool = False,
    typical: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[NetworkTrial]:
    """The same on all ranks, which call this together while nothing else is sent, in a room that
    nothing else uses. `native`: of the backend's own all-reduce too, where that can be had.
    `typical` are the bytes that rounds will have, if known. `progress` is called with how many
    trials are done, and of how many.

    These are trials of the network by the engine that will train: how long schedules take that span
    what plans do (`predict.trial`). Before each repetition all ranks meet, so that they start
    together. Clocks of different hosts can't be compared, so a repetition takes as long as the
    slowest rank's own clock says, from its meeting to its end. What is over in a few milliseconds
    is run several times in a row, since meeting isn't exact. Trials take turns, so that what
    disturbs a machine for a while doesn't meet all repetitions of one of them.

    The backend is tried in a group of its own, which leaves the script's alone. Where Gloo doesn't
    connect all ranks, or the script's group isn't one of Gloo, it isn't tried.
    """
    if namespace.size == 1:
        return []
    gloo = _gloo(namespace, collectives) if native else None
    plan = list(wanted_trials(cluster, backend=gloo is not None, typical=typical))
    repeats = _repeats(cluster, plan)
    prepared = [_prepared(collectives, gloo, cluster, kind, nbytes) for kind, nbytes in plan]
    seconds: list[float] = []
    for repeat in range(repeats):
        for number, run in enumerate(prepared):
            progress(repeat * len(plan) + number, repeats * len(plan))
            times = TINY_TRIALS_IN_A_ROW_COUNT if plan[number][1] <= MAX_SMALL_TRIAL_BYTES else 1
            seconds.append(_seconds(collectives, run, times))
    progress(repeats * len(plan), repeats * len(plan))
    slowest = [float(second) for second in collectives.all_gather(seconds).max(axis=0)]
    return [
        NetworkTrial(kind, nbytes, tuple(slowest[number :: len(plan)]))
        for number, (kind, nbytes) in enumerate(plan)
    ]


def _repeats(cluster: Cluster, plan: Sequence[tuple[str, int]]) -> int:
    once = sum(min_trial_seconds(kind, cluster, nbytes) for kind, nbytes in plan)
    return (
        MAX_REPETITIONS
        if once * MAX_REPETITIONS <= TRIALS_BUDGET_SECONDS
        else max(MIN_REPETITIONS, int(TRIALS_BUDGET_SECONDS / once))
    )


def _gloo(namespace: World, collectives: Collectives) -> Any:
    """A group of all ranks; None on all of them if one isn't connected."""
    if dist.is_initialized() and "cpu:gloo" not in dist.get_backend_config():
        return None
    gloo = _connected(namespace)
    return gloo if collectives.all_gather([gloo is not None]).all() else None


def _connected(namespace: World) -> Any:
    patience = timedelta(seconds=min(BACKEND_TIMEOUT_SECONDS, namespace.timeout / 2))
    try:
        gloo: Any = ProcessGroupGloo(
            PrefixStore("gloo", namespace.store), namespace.rank, namespace.size, patience
        )
        _all_reduce(gloo, [torch.zeros(1)], 1)
    except RuntimeError:
        return None
    return gloo


def _prepared(collectives: Collectives, gloo: Any, cluster: Cluster, kind: str, nbytes: int) -> Run:
    """Such a trial, once its connections are there."""
    _trial(collectives, gloo, cluster, kind, min(nbytes, TRIAL_WARMUP_BYTES))(1)
    return _trial(collectives, gloo, cluster, kind, nbytes)


def _trial(collectives: Collectives, gloo: Any, cluster: Cluster, kind: str, nbytes: int) -> Run:
    if kind == "native":
        parts = in_buckets(max(1, nbytes // TRIAL_ITEM_BYTES))
        return partial(_all_reduce, gloo, [torch.zeros(elements) for elements in parts])
    own = [each for each in schedules(kind, cluster, nbytes) if collectives.rank in each.ranks]
    if not own:
        return collectives.skip_rounds
    [schedule] = own
    return partial(
        collectives.run, collectives.program(schedule), np.zeros(schedule.elements, np.float32)
    )


def _seconds(collectives: Collectives, run: Run, times: int) -> float:
    """By this rank's clock, after all have met."""
    sleep(LINK_RECOVERY_SECONDS)
    collectives.barrier()
    start = perf_counter()
    run(times)
    return (perf_counter() - start) / times


def _all_reduce(gloo: Any, tensors: Sequence[torch.Tensor], times: int) -> None:
    for _ in range(times):
        works = [gloo.allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
