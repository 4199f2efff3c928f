"""The seconds of one synchronisation under a plan, from the closed form of each of its rounds.

The rounds are those that would be run, with their groups, chunks and turns; only their time comes
from a formula. On even racks it is the closed form itself. Elsewhere (uneven racks, mixed rates,
several members on a host, halving and doubling of no power of two) the seconds of the busiest link
are counted on the schedule, link by link, and the form adds its latency, and the part of its
transfer that doesn't overlap with the busiest link, in the same proportion.

Rounds of several groups at once take as long as the slowest; buckets follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thalweg.catalog import Catalog, default_catalog
from thalweg.facts import Workload
from thalweg.plan import Plan
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group, together, traffic
from thalweg.schedules.closed_form import Cost, Symbols, is_even
from thalweg.schedules.collectives import COLLECTIVE_FORMS
from thalweg.steps import Round, compile_step, cycle

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
    cluster, rates = rounds[0].group.cluster, rounds[0].group.cluster.rates()
    links = together(traffic(round_.schedule, cluster) for round_ in rounds).links
    return max((rates[link].seconds(n) for link, n in links.items() if link in rates), default=0.0)
