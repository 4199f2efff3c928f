"""Seconds of one synchronisation under a plan, by the closed form of what it runs.

The rounds are those that would be run, and so are the groups, the chunks and the turns; only their
time comes from a formula. On even racks it is the form itself. Elsewhere (uneven racks, mixed
rates, several members on a host, a halving and doubling of no power of two) the busiest link's
seconds are counted on the schedule, link by link, and the form says what comes on top: its latency,
and the part of its transfer that doesn't overlap with the busiest link, in the same proportion.

Rounds of several groups at once take as long as the slowest; buckets follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from thalweg.catalog import Catalog, default_catalog
from thalweg.declarations import Value
from thalweg.facts import Workload
from thalweg.plan import Plan
from thalweg.predict.closed_form import topologies as forms
from thalweg.predict.closed_form.symbols import Cost, Symbols, is_even
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group, Traffic, together, traffic
from thalweg.steps import Round, compile_rounds, cycle

MAX_PERIOD_TURNS = 64  # looked at, of a period that may be thousands
ClosedForm = Callable[[Symbols], Cost]
CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "star": forms.star,
    "ring": forms.ring,
    "shuffle": forms.ring,  # its groups'
    "double_tree": forms.double_tree,
    "halving_doubling": forms.halving_doubling,
    "hierarchical": forms.hierarchical,
    "gossip": forms.gossip,
    "all_to_all": forms.all_to_all,
    "all_gather": forms.all_gather,
    "reduce": forms.chain,
    "broadcast": forms.chain,
}


def synchronisation_seconds(
    plan: Plan, group: Group, workload: Workload, catalog: Catalog | None = None
) -> float | None:
    """The mean over the turns of a period, each of a step at which all meet.

    None where nothing travels, and for plans without a closed form: `auto`, those that wait for
    nobody, and topologies that this file doesn't know.
    """
    catalog = catalog or default_catalog()
    if plan.topology.name == "auto" or waits_for_nobody(plan):
        return None
    every = plan.cadence.every
    turns = min(cycle(plan, group, catalog) // every, MAX_PERIOD_TURNS)
    meetings = [
        compile_rounds(plan, group, workload, turn * every + every - 1, catalog)
        for turn in range(turns)
    ]
    seconds = [_meeting_seconds(rounds, plan) for rounds in meetings]
    known = [s for s in seconds if s is not None]
    if len(known) < turns:
        return None
    return sum(known) / turns or None


def _meeting_seconds(rounds: Sequence[Round], plan: Plan) -> float | None:
    total = 0.0
    for _, at_once in groupby(rounds, key=lambda round_: round_.number):
        seconds = _seconds_at_once(list(at_once), plan)
        if seconds is None:
            return None
        total += seconds
    return total


def _seconds_at_once(rounds: Sequence[Round], plan: Plan) -> float | None:
    exact = all(_is_exact(round_) for round_ in rounds)
    slowest = 0.0 if exact else _busiest_seconds(rounds)  # groups may share a host's NIC
    for round_ in rounds:
        cost = _form(round_, plan)
        if cost is None:
            return None
        seconds = cost.seconds if exact else _on_these_links(cost, _busiest_seconds([round_]))
        slowest = max(slowest, seconds)
    return slowest


def _on_these_links(cost: Cost, busiest: float) -> float:
    """With the seconds of the real busiest link; nothing where everybody is on one host."""
    return cost.latency + cost.transfer * busiest / cost.busiest if busiest else 0.0


def _form(round_: Round, plan: Plan) -> Cost | None:
    """The closed form of what the round's schedule does, in its chunks."""
    group, name, arguments = round_.group, round_.schedule.name, plan.topology.arguments
    x = Symbols.of(group, round_.payload.nbytes)
    if name == "gossip" and arguments["graph"] == "exponential":
        turns = max(1, (x.N - 1).bit_length())
        return forms.gossip_exponential(x, 1 << round_.step // plan.cadence.every % turns)
    at_once = 1  # so many chunks travel side by side
    match name:
        case "all_gather":
            x = replace(x, S=sum(round_.schedule.sizes) * round_.payload.itemsize)
        case "ps":
            at_once = number(arguments["servers"], x.N)
        case "double_tree":
            at_once = 2
        case "hierarchical" if arguments.get("form") == "leader":
            at_once = x.C
        case "hierarchical":
            at_once = x.C * len({i / len(rack) for rack in group.racks for i in range(len(rack))})
    form = form_of(name, arguments, group)
    return form(replace(x, k=len(round_.schedule.sizes) // at_once)) if form else None


def form_of(name: str, arguments: Mapping[str, Value], group: Group) -> ClosedForm | None:
    """The closed form of a schedule of this name, made with these arguments."""
    match name:
        case "ps":
            servers = number(arguments["servers"], group.size)
            return lambda x: forms.ps(replace(x, P=servers))
        case "native":
            crossing = leaving(group, sorted(group.ranks))
            return lambda x: forms.ring(x, leaving=crossing)
        case "tree":
            return lambda x: forms.tree(x, number(arguments["fanout"], 2))
        case "hierarchical" if arguments.get("form") == "leader":
            return forms.hierarchical_by_leaders
        case "gossip" if arguments["graph"] == "exponential":
            return _exponential
    return CLOSED_FORMS.get(name)


def _exponential(x: Symbols) -> Cost:
    """The mean over the distances that take turns."""
    turns = [forms.gossip_exponential(x, 1 << turn) for turn in range((x.N - 1).bit_length())]
    return replace(
        turns[0],
        transfer=sum(turn.transfer for turn in turns) / len(turns),
        busiest=sum(turn.busiest for turn in turns) / len(turns),
    )


def leaving(group: Group, order: Sequence[int]) -> int:
    """How many members of a rack are followed, round the ring, by one of another; at most."""
    rack_of = {rank: number for number, rack in enumerate(group.racks) for rank in rack}
    following = dict(zip(order, (*order[1:], order[0]), strict=True))
    return max(
        sum(rack_of[following[rank]] != number for rank in rack)
        for number, rack in enumerate(group.racks)
    )


def _is_exact(round_: Round) -> bool:
    """Whether the form's bytes are the schedule's."""
    group = round_.group
    powers = all(n & (n - 1) == 0 for n in (len(group.racks), len(group.racks[0])))
    return is_even(group) and (powers or round_.schedule.name != "halving_doubling")


def _busiest_seconds(rounds: Sequence[Round]) -> float:
    """Of the link that takes longest for the bytes that these rounds put on it."""
    cluster, rates = rounds[0].group.cluster, rounds[0].group.cluster.rates()
    found: Traffic = together(traffic(round_.schedule, cluster) for round_ in rounds)
    return max(
        (rates[link].seconds(nbytes) for link, nbytes in found.links.items() if link in rates),
        default=0.0,
    )


def number(value: Value, otherwise: int) -> int:
    """An argument that may have been left to the topology."""
    return value if isinstance(value, int) else otherwise
