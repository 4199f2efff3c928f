"""How fast short flows between hosts are, and who is slow.

With few hosts every ordered pair has a flow, one after the other. With more, everybody sends to the
next one round a circle, and to the one opposite; with many, to the next one alone, several at a
time.

A flow is slow if it has less than half of the median, a host if its best flow has less than half of
the median of the hosts' best: of three hosts with a slow one, most flows are slow. What is slow is
measured again, alone, twice at most, and the best figure counts: hosts are busy at times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median, median_high
from typing import Any

from thalweg.doctor.finding import Finding, RankFacts, concerning
from thalweg.facts import about

Flow = tuple[int, int]
"""The ranks that send and receive, each the first of its host."""
MAX_FLOW_TURNS = 42  # one flow after the other: all pairs of up to 7 hosts
DOCTOR_SLOW_RATE_RATIO = 0.5  # of the usual rate: what is less is slow
MAX_REPEATED_FLOWS = 8
MAX_RATE_FINDINGS = 4
MIN_SHORT_FLOW_SECONDS, MAX_SHORT_FLOW_SECONDS = 0.25, 1.0
RTTS_PER_FLOW_COUNT = 20


def seconds_of(trips: Sequence[float]) -> float:
    """A flow lasts longer where TCP takes longer to get going."""
    return min(
        MAX_SHORT_FLOW_SECONDS,
        max(MIN_SHORT_FLOW_SECONDS, RTTS_PER_FLOW_COUNT * max(trips, default=0.0)),
    )


def turns(speakers: Sequence[int], works: frozenset[Flow]) -> list[list[Flow]]:
    """Which flows to measure, those of a turn at once. Only pairs that reach each other."""
    number = len(speakers)
    circles = [
        [(speakers[i], speakers[(i + shift) % number]) for i in range(number)]
        for shift in range(1, number)
    ]
    flows = [flow for circle in circles for flow in circle if flow in works]
    if len(flows) <= MAX_FLOW_TURNS:
        return [[flow] for flow in flows]
    nearest, opposite = ([flow for flow in circles[i] if flow in works] for i in (0, number // 2))
    flows = nearest + (opposite if 2 * number <= MAX_FLOW_TURNS else [])
    if len(flows) <= MAX_FLOW_TURNS:
        return [[flow] for flow in flows]
    at_once = -(-len(flows) // MAX_FLOW_TURNS)
    step = -(-len(flows) // at_once)  # those of a turn are far apart in the circle
    return [list(islice(flows, start, None, step)) for start in range(step)]


def slow_flows(rates: Mapping[Flow, float]) -> list[Flow]:
    best = _best_of_hosts(rates)
    hosts = {rank for rank, rate in best.items() if rate < DOCTOR_SLOW_RATE_RATIO * _usual(best)}
    return [
        f
        for f, rate in rates.items()
        if rate < DOCTOR_SLOW_RATE_RATIO * _usual(rates) or hosts & set(f)
    ]


def _usual(rates: Mapping[Any, float]) -> float:
    return median_high(rates.values()) if rates else 0.0


def _best_of_hosts(rates: Mapping[Flow, float]) -> dict[int, float]:
    hosts = {rank for flow in rates for rank in flow}
    return {host: max(rate for flow, rate in rates.items() if host in flow) for host in hosts}


def rate_findings(
    speakers: Sequence[RankFacts], rates: Mapping[Flow, float], silent: Sequence[Flow]
) -> list[Finding]:
    """`silent` are flows that nobody told the rate of."""
    known = {facts.rank: facts for facts in speakers}
    found = [_silent(known, flow) for flow in silent[:MAX_RATE_FINDINGS]]
    behind = slow_flows(rates)
    usual = _usual(rates)
    hosts = [rank for rank in known if _is_slow_host(rank, rates, behind)]
    for rank in hosts:
        found.append(_slow_host(known[rank], rates, _usual(_best_of_hosts(rates))))
    pairs = [flow for flow in behind if not set(flow) & set(hosts)]
    if len(pairs) > MAX_RATE_FINDINGS:
        found.append(_many(known, pairs, rates, usual))
    else:
        found += [_slow_pair(known, flow, rates[flow], usual) for flow in pairs]
    if not found and not rates:
        why = "there is one host" if len(known) == 1 else "no two hosts reach each other"
        return [Finding(check="rates", verdict="ok", detail=f"nothing to measure: {why}")]
    if not found:
        detail = f"{_which(len(known), rates)}: {_bits(usual)} usually, "
        detail += f"{_bits(min(rates.values()))} at least"
        return [Finding(check="rates", verdict="ok", detail=detail)]
    if len(rates) + len(silent) < len(known) * (len(known) - 1):
        detail = f"{_which(len(known), rates)}: {_bits(usual)} usually"
        found.append(Finding(check="rates", verdict="ok", detail=detail))
    return found


def _is_slow_host(rank: int, rates: Mapping[Flow, float], behind: Sequence[Flow]) -> bool:
    """All that it sends, or all that it receives, where that is more than one pair."""
    for end in (0, 1):
        own = [flow for flow in rates if flow[end] == rank]
        if len(own) > 1 and all(flow in behind for flow in own):
            return True
    own = [flow for flow in rates if rank in flow]
    return len(rates) > 2 and len(own) == 2 and all(flow in behind for flow in own)


def _slow_host(facts: RankFacts, rates: Mapping[Flow, float], usual: float) -> Finding:
    ways = []
    for end, way in ((0, "out"), (1, "in")):
        own = [rate for flow, rate in rates.items() if flow[end] == facts.rank]
        if own:
            ways.append(f"{_bits(median(own))} {way}")
    return Finding(
        check="rates",
        verdict="warn",
        detail=f"flows get {', '.join(ways)}, where {_bits(usual)} is usual",
        remedy="look at its cable, its NIC's negotiated speed (ethtool), its rack's uplink and who "
        "else uses them; `thalweg probe` tells them apart",
        **concerning(facts),
    )


def _slow_pair(known: Mapping[int, RankFacts], flow: Flow, rate: float, usual: float) -> Finding:
    one, other = known[flow[0]], known[flow[1]]
    return Finding(
        check="rates",
        verdict="warn",
        detail=f"from {one.label} to {other.label}: {_bits(rate)}, where {_bits(usual)} is usual",
        remedy="look at what is between these two; `thalweg probe` finds narrow uplinks",
        ranks=flow,
        hosts=(one.name, other.name),
        names_them=True,
    )


def _many(
    known: Mapping[int, RankFacts], pairs: Sequence[Flow], rates: Mapping[Flow, float], usual: float
) -> Finding:
    worst = min(pairs, key=lambda flow: rates[flow])
    ends = f"from {known[worst[0]].label} to {known[worst[1]].label}"
    return Finding(
        check="rates",
        verdict="warn",
        detail=f"{len(pairs)} of {len(rates)} pairs get less than half of the usual "
        f"{_bits(usual)}, the slowest {ends}: {_bits(rates[worst])}",
        remedy="uplinks between racks are narrower than NICs, probably: `thalweg probe` finds "
        "them, and plans that know them cross them less",
        ranks=tuple(sorted({rank for flow in pairs for rank in flow})),
        hosts=tuple(sorted({known[rank].name for flow in pairs for rank in flow})),
        names_them=True,
    )


def _silent(known: Mapping[int, RankFacts], flow: Flow) -> Finding:
    one, other = known[flow[0]], known[flow[1]]
    return Finding(
        check="rates",
        verdict="fail",
        detail=f"from {one.label} to {other.label}: small messages pass, and a flow doesn't arrive",
        remedy="look whether large packets are dropped on the way (ping -M do -s 1472): lower the "
        "MTU, or let ICMP through",
        ranks=flow,
        hosts=(one.name, other.name),
        names_them=True,
    )


def _which(hosts: int, rates: Mapping[Flow, float]) -> str:
    pairs = hosts * (hosts - 1)
    if len(rates) == pairs:
        return "all ordered pairs of hosts"
    return f"{len(rates)} of {pairs} ordered pairs of hosts, the others left out"


def _bits(rate: float) -> str:
    return about(rate, "bit/s")
