"""What plans cost in closed form: one synchronisation, and a whole step.

*Synchronisation*: its rounds are those that would be run, with their groups, chunks and turns; only
their time comes from a formula. On even racks it is the closed form itself. Elsewhere (uneven
racks, mixed rates, several members on a host, halving and doubling of no power of two) the seconds
of the busiest link are counted on the schedule, link by link, and the form adds its latency, and
the part of its transfer that doesn't overlap with the busiest link, in the same proportion. Rounds
of several groups at once take as long as the slowest; buckets follow one another.

*Step*, for clusters that are too large to simulate: nothing is compiled and no link is counted, so
100,000 workers take as long as a hundred. Uneven clusters are taken for even ones with their
largest rack, slowest NIC and slowest uplink. Each bucket's exchange takes the seconds of its
topology's form, in the optimal number of chunks; buckets follow one another on the links: bucket b
begins when it is ready and b-1 has ended, so the last one is exposed.

    T = forward + max{ backward, end of the last bucket } + encode + decode + optimizer

Encoding and decoding add to backward, as on one device. Stragglers cost the expected maximum of
their delays, as if all ranks waited for all, less what a topology does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt

from thalweg.catalog import Catalog, default_catalog
from thalweg.compress import Compressor, Payload
from thalweg.errors import PlanError
from thalweg.facts import (
    Cluster,
    CodecCost,
    Duration,
    Machine,
    StragglerDelay,
    TransportCosts,
    Workload,
)
from thalweg.plan import Plan
from thalweg.predict.estimate import Breakdown
from thalweg.predict.step_simulator import codec_cost
from thalweg.predict.straggler_recurrence import expected_latest
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group, together, traffic
from thalweg.schedules.closed_form import ClosedForm, Cost, Symbols, is_even
from thalweg.schedules.collectives import (
    COLLECTIVE_FORMS,
    all_gather_cost,
    all_to_all_cost,
    chain_cost,
)
from thalweg.schedules.topology import COMPRESS_BETWEEN
from thalweg.steps import MAX_CHAINS_IN_FLIGHT, Round, compile_step, cycle, warm_up

MAX_PERIOD_TURNS = 64  # turns that are averaged, of a period that may be thousands


def synchronisation_seconds(
    plan: Plan, group: Group, workload: Workload, catalog: Catalog | None = None
) -> float | None:
    """The mean over the turns of a period, each of a step at which all ranks synchronise.

    None if nothing is sent, and for plans without a closed form: plans that have no topology yet or
    wait for nobody, and topologies that declare none.
    """
    catalog = catalog or default_catalog()
    if plan.topology.name not in catalog.topologies or waits_for_nobody(plan):
        return None
    every, total = plan.cadence.every, 0.0
    turns = min(cycle(plan, group, catalog) // every, MAX_PERIOD_TURNS)
    for turn in range(turns):
        step = compile_step(plan, group, workload, turn * every + every - 1, catalog)
        for _, rounds in step.concurrent:
            seconds = _concurrent_seconds(rounds, plan, turn, catalog)
            if seconds is None:
                return None
            total += seconds
    return total / turns or None


def _concurrent_seconds(
    rounds: Sequence[Round], plan: Plan, turn: int, catalog: Catalog
) -> float | None:
    costs = [cost for round_ in rounds if (cost := _cost(round_, plan, turn, catalog)) is not None]
    if len(costs) < len(rounds):
        return None
    if all(cost.exact and is_even(r.group) for cost, r in zip(costs, rounds, strict=True)):
        return max(cost.seconds for cost in costs)
    slowest = _busiest_seconds(rounds)  # groups may share a host's NIC
    for cost, round_ in zip(costs, rounds, strict=True):
        if busiest := _busiest_seconds([round_]):  # 0 if all members are on one host
            slowest = max(slowest, cost.latency + cost.transfer * busiest / cost.busiest)
    return slowest


def _cost(round_: Round, plan: Plan, turn: int, catalog: Catalog) -> Cost | None:
    """The cost of a round by the form of its schedule, which may be another topology's than the
    plan's; None without a form."""
    schedule, nbytes = round_.schedule, round_.payload.nbytes
    if schedule.name == "all_gather":
        nbytes = sum(schedule.sizes) * round_.payload.itemsize
    x = Symbols.of(round_.group, nbytes)
    if schedule.name in COLLECTIVE_FORMS:
        return COLLECTIVE_FORMS[schedule.name](replace(x, k=len(schedule.sizes)))
    own = catalog.topologies[plan.topology.name]
    topology = catalog.topologies.get(schedule.name, own)
    if topology.form is None:
        return None
    arguments = plan.topology.arguments if topology is own else topology.defaults
    chunks = len(schedule.sizes) // topology.lanes(round_.group, **arguments)
    return topology.form(replace(x, k=chunks, turn=turn), **arguments)


def _busiest_seconds(rounds: Sequence[Round]) -> float:
    """The longest time that a link needs for the bytes of these rounds."""
    cluster = rounds[0].group.cluster
    crossed = together(traffic(round_.schedule, cluster) for round_ in rounds)
    return max(cluster.busy_seconds(crossed.links).values(), default=0.0)


def closed_form_breakdown(
    plan: Plan,
    group: Group,
    workload: Workload,
    transport: TransportCosts,
    machine: Machine,
    catalog: Catalog,
) -> Breakdown:
    """The breakdown of a step; PlanError for plans without a closed form."""
    cadence, costs = plan.cadence, workload.costs
    topology, arguments = catalog.topologies[plan.topology.name], plan.topology.arguments
    needs_simulation = (
        plan.redundancy is not None or cadence.staleness is not None or cadence.two_levels
    )
    if topology.form is None or needs_simulation:
        raise PlanError(
            f"{plan} has no closed form, and {group.size} workers are too many to simulate",
            "predict it for fewer workers",
        )
    x = _symbols(group, transport)
    rack, leaders = replace(x, N=x.G, C=1), replace(x, N=x.C, G=1)
    between = arguments.get("compress") == COMPRESS_BETWEEN and x.C > 1
    scopes = (leaders,) if between else topology.scopes(x)
    form = partial(topology.form, **arguments)
    codec, _ = codec_cost(plan.precision, machine)
    compressor = catalog.compressors[plan.precision.name] if plan.precision else None
    concurrent = [_exchange(scope, form, plan, compressor, codec) for scope in scopes]
    in_racks = _exchange(rack, form, plan, compressor, codec)
    chain = chain_cost(replace(rack, S=1.0))
    total = end = encode = decode = early = 0.0
    for bucket in workload.buckets(plan.settings.bucket):
        payloads = [Payload("values", bucket.elements, bucket.itemsize, exact=True)]
        if compressor is not None and plan.precision is not None:
            payloads = compressor.payloads(
                bucket.tensors, warm_up(plan), **plan.precision.arguments
            )
        exchanges = [[exchange(each) for exchange in concurrent] for each in payloads]
        seconds = sum(max(seconds for seconds, _ in each) for each in exchanges)
        if between:
            seconds += 2 * _seconds(chain, bucket.nbytes)
        if cadence.inside:  # at the other steps
            seconds += (cadence.every - 1) * sum(in_racks(each)[0] for each in payloads)
        if bucket.index < MAX_CHAINS_IN_FLIGHT:
            early += sum(each.nbytes for each in payloads)
        total += seconds
        end = max(end, bucket.ready_seconds) + seconds
        encode += codec.bucket.value + codec.encode.value * bucket.elements
        decode += max(each for scope in exchanges for _, each in scope) * bucket.elements
    compute = costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds
    if plan.averages_parameters:
        hidden = cadence.delay * compute  # by the steps until the result is applied
        exposed = max(0.0, total - hidden) / cadence.every
    else:
        exposed = max(0.0, end - costs.backward.seconds)
    every = 1 if cadence.inside else cadence.every  # racks compress in between, too
    filled = 0.0  # seconds of a straggler's delay, in which the others exchange first buckets
    if topology.before_straggler is not None:
        filled = _seconds(topology.before_straggler(replace(x, S=1.0), **arguments), early)
    delays = shown_delays(
        plan, group, group.cluster, catalog, lambda _, delay: max(0.0, delay - filled)
    )
    return Breakdown(
        compute=compute,
        encode=encode / every,
        decode=decode / every,
        transfer=exposed,
        waiting=expected_latest(delays),
    )


def shown_delays(
    plan: Plan,
    group: Group,
    cluster: Cluster,
    catalog: Catalog,
    shown: Callable[[int, float], float],
) -> list[StragglerDelay]:
    """The delays of all ranks on this cluster; of the straggler that the topology expects, the part
    that `shown` makes of its rank and its seconds."""
    late = {rank: cluster.host(rank).late for rank in group.ranks}
    expected = catalog.topologies[plan.topology.name].straggler
    if expected is not None:
        rank = expected(group, **plan.topology.arguments)
        seconds = shown(rank, late[rank].delay.seconds)
        late[rank] = replace(late[rank], delay=Duration(seconds))
    return list(late.values())


def _seconds(of_byte: Cost, nbytes: float) -> float:
    """The seconds of a form from those of one byte: affine in bytes, but for the number of chunks
    where they overlap, which grows with their square root."""
    exposed, chunks = of_byte.transfer - of_byte.busiest, 1.0
    if of_byte.each > 0:
        chunks = max(1.0, sqrt(exposed * nbytes / of_byte.each))
    latency = of_byte.latency + (chunks - 1) * of_byte.each
    return latency + nbytes * (of_byte.busiest + exposed / chunks)


def _exchange(
    x: Symbols, form: ClosedForm, plan: Plan, compressor: Compressor | None, codec: CodecCost
) -> Callable[[Payload], tuple[float, float]]:
    """A function from a payload to the seconds in which a group exchanges it, and those per element
    to decode the result; `form` is that of the group's all-reduce."""
    forms = (form, all_gather_cost, all_to_all_cost)
    reduce, gather, scatter = (each(replace(x, S=1.0)) for each in forms)

    def exchange(payload: Payload) -> tuple[float, float]:
        nbytes = payload.nbytes
        if payload.exact or compressor is None or compressor.summable:
            return _seconds(reduce, nbytes), codec.decode.value
        gathered = _seconds(gather, x.N * nbytes)
        two_shots = _seconds(scatter, nbytes) + _seconds(gather, nbytes)
        is_sharded = compressor.elementwise and not plan.averages_parameters
        if is_sharded and two_shots < gathered:
            return two_shots, codec.decoding_shards
        return gathered, codec.decoding(x.N, always=not compressor.elementwise)

    return exchange


def _symbols(group: Group, costs: TransportCosts) -> Symbols:
    """The symbols with the rates that one flow reaches, and the per-message cost in alpha."""
    x, share = Symbols.of(group, 1.0), costs.bandwidth_share(1)
    return replace(
        x,
        alpha=x.alpha + costs.message.value,
        beta1=max(x.beta1 / share, costs.byte.value),
        beta2=x.beta2 / share,
    )
