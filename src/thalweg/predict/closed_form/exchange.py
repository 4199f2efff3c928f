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
from thalweg.predict.closed_form.symbols import Symbols, is_even
from thalweg.predict.closed_form.topologies import form_of
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group, together, traffic
from thalweg.steps import Round, compile_step, cycle

MAX_PERIOD_TURNS = 64  # turns that are averaged, of a period that may be thousands


def synchronisation_seconds(
    plan: Plan, group: Group, workload: Workload, catalog: Catalog | None = None
) -> float | None:
    """The mean over the turns of a period, each of a step at which all ranks synchronise.

    None if nothing is sent, and for plans without a closed form: `auto`, plans that wait for
    nobody, and topologies that `form_of` doesn't know.
    """
    catalog = catalog or default_catalog()
    if plan.topology.name == "auto" or waits_for_nobody(plan):
        return None
    every, total = plan.cadence.every, 0.0
    turns = min(cycle(plan, group, catalog) // every, MAX_PERIOD_TURNS)
    for turn in range(turns):
        step = compile_step(plan, group, workload, turn * every + every - 1, catalog)
        for _, rounds in step.concurrent:
            seconds = _concurrent_seconds(rounds, plan, turn)
            if seconds is None:
                return None
            total += seconds
    return total / turns or None


def _concurrent_seconds(rounds: Sequence[Round], plan: Plan, turn: int) -> float | None:
    exact = all(map(_is_exact, rounds))
    slowest = 0.0 if exact else _busiest_seconds(rounds)  # groups may share a host's NIC
    for round_ in rounds:
        schedule, nbytes = round_.schedule, round_.payload.nbytes
        if schedule.name == "all_gather":
            nbytes = sum(schedule.sizes) * round_.payload.itemsize
        form, lanes = form_of(schedule.name, plan.topology.arguments, round_.group, turn)
        if form is None:
            return None
        x = Symbols.of(round_.group, nbytes)
        cost = form(replace(x, k=len(schedule.sizes) // lanes))
        if exact:
            slowest = max(slowest, cost.seconds)
        elif busiest := _busiest_seconds([round_]):  # 0 if all members are on one host
            slowest = max(slowest, cost.latency + cost.transfer * busiest / cost.busiest)
    return slowest


def _is_exact(round_: Round) -> bool:
    """True if the form's bytes are the schedule's."""
    group = round_.group
    powers = all(n & (n - 1) == 0 for n in (len(group.racks), len(group.racks[0])))
    return is_even(group) and (powers or round_.schedule.name != "halving_doubling")


def _busiest_seconds(rounds: Sequence[Round]) -> float:
    """The longest time that a link needs for the bytes of these rounds."""
    cluster, rates = rounds[0].group.cluster, rounds[0].group.cluster.rates()
    links = together(traffic(round_.schedule, cluster) for round_ in rounds).links
    return max((rates[link].seconds(n) for link, n in links.items() if link in rates), default=0.0)
