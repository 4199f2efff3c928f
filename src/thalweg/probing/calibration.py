"""Calibration: all ranks of a run together measure, in a few seconds, the rates of the links, the
costs of messages, bytes and concurrent flows, and the compressors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
    Situation,
    Workload,
    format_cluster,
    format_machine,
    parse_cluster,
    parse_machine,
)
from thalweg.launch.launcher_variables import ONE_RACK_ASSUMPTION
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.plan import Choice, Settings
from thalweg.predict.fitting import (
    MAX_SMALL_TRIAL_BYTES,
    TRIAL_ITEM_BYTES,
    NetworkTrial,
    fit,
    in_buckets,
    min_trial_seconds,
    schedules,
    wanted_trials,
)
from thalweg.probing.codec_costs import measure_codecs
from thalweg.probing.coordinator import (
    PROBE_LEADER_RANK,
    Counted,
    Effort,
    ProbeCoordinator,
    run_coordinated,
)
from thalweg.probing.link_rates import measure_nics, measure_uplinks
from thalweg.probing.result import cluster_of, names_of
from thalweg.probing.survey import declared_racks, in_one_rack, survey
from thalweg.schedules import Group

FITTED_KEY = "fitted"  # in the store
Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and of how much (0: unknown)."""
QUICK_EFFORT = Effort(pings=40, short=0.15, long=0.2)
NIC_PARTNERS_PER_HOST = 2
MAX_UPLINK_FILL_COUNT = 3  # for each direction of an uplink
PINGED_HOSTS_PER_RACK = 3  # by the rack's first host
MIN_REPETITIONS, MAX_REPETITIONS = 3, 5
TRIALS_BUDGET_SECONDS = 6.0  # for all trials, at the links' rates
TINY_TRIALS_IN_A_ROW_COUNT = 8
TRIAL_WARMUP_BYTES = 1 << 16
LINK_RECOVERY_SECONDS = 0.03  # in which shaped links regain their burst allowance
BACKEND_TIMEOUT_SECONDS = 60.0  # at most; less than the engine's timeout of waiting ranks
Run = Callable[[int], None]
"""Runs a trial this many times in a row."""


def calibrate(
    world: World,
    abort_flag: AbortFlag,
    engine: Engine,
    declared: Cluster | None,
    workload: Workload,
    *,
    codecs: Sequence[Choice] = (),
    native: bool = False,
    name: str = "calibration",
    clock: RoundCounter | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Situation:
    """Measure the situation of a workload; all ranks call this together and get the same result.

    Nothing else may be sent meanwhile. The latency is that of messages in use.

    declared   the cluster whose racks are kept; if it is None, a whole probe finds them
    codecs     compressors to time on the workload's tensors
    native     time the backend's own all-reduce too, where Gloo connects
    name       a namespace of the store that nothing else uses: another one each time
    clock      numbers the rounds, on an engine that trains

    Raises NotFitted on all ranks if no machine fits the measurements.
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
        typical=min(Settings().bucket.nbytes, workload.nbytes) or None,
        progress=lambda done, total: progress("trials", done, total),
    )
    progress("compressors", 0, len(codecs))
    costs = measure_codecs(collectives, codecs, workload.tensors)
    progress("compressors", len(codecs), len(codecs))
    situation = Situation(cluster=surveyed, workload=workload, declared=declared)
    if world.rank == PROBE_LEADER_RANK:  # so that all ranks have the same, to the last bit
        namespace.put(FITTED_KEY, json.dumps(_fitted(situation, trials, costs)))
    waited = f"within {namespace.timeout:g} s"
    late = RunError(
        f"rank {PROBE_LEADER_RANK} hasn't fitted the measurements {waited}", "allow more time"
    )
    found = json.loads(namespace.read(FITTED_KEY, abort_flag, late))
    if "problem" in found:
        raise NotFitted(found["problem"], "measure again, when less else runs there")
    cluster, machine = parse_cluster(found["cluster"]), parse_machine(found["machine"])
    return replace(situation, cluster=cluster, machine=machine)


def _fitted(
    surveyed: Situation, trials: Sequence[NetworkTrial], codecs: Mapping[str, CodecCost]
) -> dict[str, str]:
    """The fitted cluster and machine as files, or the problem, for the ranks that wait for it."""
    try:
        fitted = fit(surveyed, trials)
        machine = replace(fitted.machine, codecs=codecs)
        return {"cluster": format_cluster(fitted.cluster), "machine": format_machine(machine)}
    except Exception as error:
        return {"problem": f"what was measured can't be fitted ({type(error).__name__}: {error})"}


def quick_survey(
    namespace: World,
    abort_flag: AbortFlag,
    declared: Cluster | None,
    *,
    counted: Counted = lambda done: None,
) -> Cluster:
    """The declared racks with the rates that their links have now; without them, a whole probe.

    All ranks call this together and get the same cluster, each in a namespace of the same name
    (`World.namespace`) that nothing else uses. So it also works during a run, while nothing else is
    sent."""
    effort = Effort() if declared is None else QUICK_EFFORT

    def survey_links(coordinator: ProbeCoordinator) -> str:
        return format_cluster(survey_quickly(coordinator, declared))

    return parse_cluster(run_coordinated(namespace, abort_flag, effort, survey_links, counted))


def survey_quickly(network: ProbeCoordinator, declared: Cluster | None) -> Cluster:
    """Measure the links of declared racks on rank 0; a whole probe if a host isn't as declared.

    Where one rack is only assumed, its hosts are those that are present.

    A probe spends most of its time on which hosts share a rack. Where that is known, each host
    sends to two partners of its rack and receives from two, and each uplink is filled two or three
    times in each direction, for 0.2 s each (the first may have had a slow start: if two differ, the
    median of three counts). A host that looks slow is measured with others, as in a probe, so a
    slow NIC or uplink isn't mistaken for another.
    """
    hosts = network.host_infos
    if declared is not None and ONE_RACK_ASSUMPTION in declared.assumed:
        declared = in_one_rack(hosts)
    if (
        network.size == 1
        or declared is None
        or any({*host.ranks} != {*declared.host(host.ranks[0]).ranks} for host in hosts)
    ):
        return survey(network, declared, monotonic()).cluster
    racks = declared_racks(declared, [host.ranks[0] for host in hosts])
    nics = measure_nics(network, racks, NIC_PARTNERS_PER_HOST)
    uplinks = measure_uplinks(network, racks, nics, MAX_UPLINK_FILL_COUNT)
    pairs = list(combinations(sorted(map(min, racks)), 2))  # the racks' first hosts
    for rack in racks:
        pairs += [(min(rack), host) for host in sorted(rack)[1 : 1 + PINGED_HOSTS_PER_RACK]]
    round_trips = {pair: network.round_trip(*pair) for pair in pairs}
    names = names_of(hosts, declared)
    return cluster_of(hosts, names, racks, nics, uplinks, round_trips, declared)


def run_trials(
    namespace: World,
    collectives: Collectives,
    cluster: Cluster,
    *,
    native: bool = False,
    typical: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[NetworkTrial]:
    """Time schedules that span what plans do (`predict.fitting`), on the engine.

    All ranks call this together and get the same trials, in a namespace that nothing else uses,
    while nothing else is sent. `native` adds the backend's own all-reduce, `typical` is the size of
    a round in bytes, if known; `progress` is called with the number of trials done, and of all.

    A barrier precedes each repetition. Clocks of different hosts can't be compared, so a repetition
    takes as long as on the slowest rank by its own clock, from the barrier to the end. A trial of a
    few milliseconds is run several times in a row, since barriers aren't exact. Trials alternate,
    so that a disturbance doesn't affect all repetitions of one of them.

    The backend is timed in a group of its own, which leaves the script's alone; not at all, if Gloo
    doesn't connect all ranks, or the script's group uses another backend.
    """
    if namespace.size == 1:
        return []
    gloo = _gloo(namespace, collectives) if native else None
    wanted = list(wanted_trials(cluster, backend=gloo is not None, typical=typical))
    once = sum(min_trial_seconds(kind, cluster, nbytes) for kind, nbytes in wanted)
    affordable = int(TRIALS_BUDGET_SECONDS / max(once, 1e-9))
    repetitions = min(MAX_REPETITIONS, max(MIN_REPETITIONS, affordable))
    total = len(wanted) * repetitions
    for kind, nbytes in wanted:  # establish the connections
        _trial(collectives, gloo, cluster, kind, min(nbytes, TRIAL_WARMUP_BYTES))(1)
    runs = [_trial(collectives, gloo, cluster, kind, nbytes) for kind, nbytes in wanted]
    seconds: list[float] = []
    for done in range(total):
        progress(done, total)
        _, nbytes = wanted[done % len(wanted)]
        times = TINY_TRIALS_IN_A_ROW_COUNT if nbytes <= MAX_SMALL_TRIAL_BYTES else 1
        sleep(LINK_RECOVERY_SECONDS)
        collectives.barrier()
        start = perf_counter()
        runs[done % len(wanted)](times)
        seconds.append((perf_counter() - start) / times)
    progress(total, total)
    slowest = [float(second) for second in collectives.all_gather(seconds).max(axis=0)]
    return [
        NetworkTrial(kind, nbytes, tuple(slowest[number :: len(wanted)]))
        for number, (kind, nbytes) in enumerate(wanted)
    ]


def _gloo(namespace: World, collectives: Collectives) -> Any:
    """A Gloo group of all ranks; None on all of them if one can't connect."""
    if dist.is_initialized() and "cpu:gloo" not in dist.get_backend_config():
        return None
    patience = timedelta(seconds=min(BACKEND_TIMEOUT_SECONDS, namespace.timeout / 2))
    gloo: Any = None
    with suppress(RuntimeError):
        group = ProcessGroupGloo(
            PrefixStore("gloo", namespace.store), namespace.rank, namespace.size, patience
        )
        _all_reduce(group, [torch.zeros(1)], 1)
        gloo = group
    return gloo if collectives.all_gather([gloo is not None]).all() else None


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


def _all_reduce(gloo: Any, tensors: Sequence[torch.Tensor], times: int) -> None:
    for _ in range(times):
        works = [gloo.allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
