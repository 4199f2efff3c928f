"""Findings on the network between ranks: reachability and clocks from all pings, rates from short
flows between hosts.

**Reachability**: one finding for a rank that nobody reaches, one for a rank that reaches nobody,
one for each other pair of hosts, with both directions in it.

**Clocks**: one finding for each host whose clock differs from that of the first rank's host.

**Rates**: hosts are put in a circle, and flows are measured in turns (`turns`):

    hosts      flows                                               flows in a turn
    up to 7    every ordered pair                                  one
    up to 21   each host to the next one and to the one opposite   one
    up to 42   each host to the next one                           one
    more       each host to the next one                           as many as 42 turns need

A flow is slow if its rate is below half of the median flow, or if it begins or ends at a host whose
best flow is below half of the median of the hosts' best: of three hosts with a slow one, most flows
are slow, so the median flow is. Slow flows are measured again, alone, twice at most, and the best
rate counts: hosts are busy at times. A slow host is one finding instead of one for each flow.

The probe measures NICs and uplinks, between ranks that all reach each other; here every pair is a
finding of its own, and flows pass over plain TCP, so that they also run where a rank is missing,
unreachable or rejected for its secret. The rate of a flow is the probe's (`probing.flow.rate_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import median, median_high
from typing import Any

from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, together, warn
from thalweg.doctor.ping import PING_OK, WRONG_PEER_TEXT, PingResult
from thalweg.facts import about, grouped

MAX_CLOCK_SKEW_SECONDS = 0.1
FIREWALL_REMEDY = "let all TCP ports through between these hosts"
INTERFACE_REMEDY = (
    "name an interface that all hosts share: THALWEG_IFNAME, and GLOO_SOCKET_IFNAME for torch"
)
UNREACHED_REMEDY = f"{INTERFACE_REMEDY}; if that is the right one, {FIREWALL_REMEDY}"
REACHABILITY_REMEDIES = {
    "timed out": f"{FIREWALL_REMEDY}; if none is closed, {INTERFACE_REMEDY}",
    "refused": f"{FIREWALL_REMEDY} (it rejects), and see that no other host has the same address",
    "no route": INTERFACE_REMEDY,
    "forbidden here": "look at the firewall of the host that calls (nft list ruleset)",
    WRONG_PEER_TEXT: f"{INTERFACE_REMEDY}: addresses of bridges are often the same on all hosts",
}
Outcomes = Mapping[tuple[int, int], str]
"""The outcome of each ping, by caller and peer."""
Flow = tuple[int, int]
"""The ranks that send and receive, each the first of its host."""
MAX_FLOW_TURNS = 42
DOCTOR_SLOW_RATE_RATIO = 0.5  # of the median
MAX_REPEATED_FLOWS = 8
MAX_RATE_FINDINGS = 4
MIN_SHORT_FLOW_SECONDS, MAX_SHORT_FLOW_SECONDS = 0.25, 1.0
RTTS_PER_FLOW_COUNT = 20
SLOW_HOST_REMEDY = (
    "look at its cable, its NIC's negotiated speed (ethtool), its rack's uplink and who else uses "
    "them; `thalweg probe` tells them apart"
)
SLOW_PAIR_REMEDY = "look at what is between these two; `thalweg probe` finds narrow uplinks"
SLOW_PAIRS_REMEDY = (
    "uplinks between racks are narrower than NICs, probably: `thalweg probe` finds them, and plans "
    "that know them cross them less"
)
LOST_FLOW_TEXTS = (
    "small messages pass, and a flow doesn't arrive",
    "look whether large packets are dropped on the way (ping -M do -s 1472): lower the MTU, or let "
    "ICMP through",
)


def unreachable(ranks: Sequence[RankFacts], pings: Sequence[PingResult]) -> list[Finding]:
    """Findings on the ordered pairs whose pings failed; one that all is well, if none did."""
    outcomes = {(ping.caller, ping.peer): ping.outcome for ping in pings}
    broken = {pair: outcome for pair, outcome in outcomes.items() if outcome != PING_OK}
    if not broken:
        tried, all_pairs = len(pings), len(ranks) * (len(ranks) - 1)
        which = f"all {tried} ordered pairs of ranks"
        if tried < all_pairs:
            which = f"{tried} of {all_pairs} ordered pairs of ranks were tried, and"
        return [ok("reachability", f"{which} reach each other")]
    known = {facts.rank: facts for facts in ranks}
    findings: list[Finding] = []
    explained: set[tuple[int, int]] = set()
    for facts in ranks:
        for into, what in (
            (True, f"nobody reaches {facts.label} at {_where(facts)}"),
            (False, f"{facts.label} reaches nobody"),
        ):
            pairs = {pair for pair in outcomes if pair[into] == facts.rank}
            if len(pairs) > 1 and pairs <= broken.keys() and (into or not pairs <= explained):
                failures = {broken[pair] for pair in pairs}
                remedy = UNREACHED_REMEDY if into else _remedy(failures)
                detail = f"{what}: {_words(failures)}"
                findings.append(fail("reachability", detail, remedy, [facts], named=True))
                explained |= pairs
    return findings + _pairs(known, [pair for pair in broken if pair not in explained], outcomes)


def _pairs(
    known: Mapping[int, RankFacts], broken: Sequence[tuple[int, int]], outcomes: Outcomes
) -> list[Finding]:
    """One finding for each two hosts, with both directions in it."""

    def place(pair: tuple[int, int]) -> frozenset[object]:
        """Both hosts of the pair, or both ranks on one host."""
        hosts = frozenset[object](known[rank].host for rank in pair)
        return hosts if len(hosts) == 2 else frozenset(pair)

    findings = []
    for pairs in grouped((place(pair), pair) for pair in broken).values():
        ranks = [known[rank] for rank in sorted({rank for pair in pairs for rank in pair})]
        sides = [*by_host(ranks).values()]  # of two hosts, or of one
        one, other = sides if len(sides) == 2 else (ranks[:1], ranks[1:])
        both = (_direction(*ends, outcomes) for ends in ((one, other), (other, one)))
        remedy = _remedy({outcomes[pair] for pair in pairs})
        findings.append(fail("reachability", "; ".join(both), remedy, ranks, named=True))
    return findings


def _direction(callers: Sequence[RankFacts], peers: Sequence[RankFacts], outcomes: Outcomes) -> str:
    pairs = ((one.rank, other.rank) for one in callers for other in peers)
    found = {outcomes[pair] for pair in pairs if pair in outcomes}
    failures = found - {PING_OK}
    if failures:
        there = f"{together(peers)} at {_where(peers[0])}"
        return f"{together(callers)} can't reach {there}: {_words(failures)}"
    return f"the other way {'works' if found else 'nobody has tried'}"


def _where(facts: RankFacts) -> str:
    return f"{facts.address} ({facts.interface})" if facts.interface else facts.address


def _words(failures: set[str]) -> str:
    return " or ".join(sorted(failures))


def _remedy(failures: set[str]) -> str:
    known = [remedy for outcome, remedy in REACHABILITY_REMEDIES.items() if outcome in failures]
    return known[0] if known else f"{FIREWALL_REMEDY}, or {INTERFACE_REMEDY}"


def clock_findings(ranks: Sequence[RankFacts], pings: Sequence[PingResult]) -> list[Finding]:
    """The skew of every host's clock against that of the first rank's host: that of the shortest
    round trip between them, with an error of half of it.

    Training doesn't depend on it, and traces align themselves; comparing logs does."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [ok("clocks", "all ranks are on one host")]
    first = ranks[0]
    host_of = {facts.rank: facts.host for facts in ranks}
    samples = grouped(
        (host_of[other], (ping.round_trip, sign * ping.ahead))
        for ping in pings
        for one, other, sign in ((ping.caller, ping.peer, 1), (ping.peer, ping.caller, -1))
        if ping.outcome == PING_OK and host_of[one] == first.host != host_of[other]
    )
    findings = []
    largest = 0.0
    for host in filter(samples.get, hosts):
        round_trip, ahead = min(samples[host])
        error = round_trip / 2
        largest = max(largest, abs(ahead) + error)
        if abs(ahead) - error > MAX_CLOCK_SKEW_SECONDS:
            direction = "ahead of" if ahead > 0 else "behind"
            detail = (
                f"the clock is {about(abs(ahead), 's')} {direction} {first.name}'s (give or "
                f"take {about(error, 's')}): logs of the two can't be put in order"
            )
            remedy = f"run an NTP client (chrony, systemd-timesyncd) on {hosts[host][0].name}"
            findings.append(warn("clocks", detail, remedy, hosts[host]))
    within = f"within {about(largest, 's')} of {first.name}'s on all hosts that were reached"
    return findings or [ok("clocks", within)]


def flow_seconds(round_trips: Sequence[float]) -> float:
    """The duration of a flow: longer where round trips are long and TCP starts slowly."""
    wanted = RTTS_PER_FLOW_COUNT * max(round_trips, default=0.0)
    return min(MAX_SHORT_FLOW_SECONDS, max(MIN_SHORT_FLOW_SECONDS, wanted))


def turns(ranks: Sequence[int], reachable: frozenset[Flow]) -> list[list[Flow]]:
    """The flows to measure, those of a turn at once; only reachable pairs have one."""
    number = len(ranks)
    circles = [
        [(ranks[i], ranks[(i + shift) % number]) for i in range(number)]
        for shift in range(1, number)
    ]
    flows = [flow for circle in circles for flow in circle if flow in reachable]
    if len(flows) > MAX_FLOW_TURNS:
        chosen = circles[0] + (circles[number // 2] if 2 * number <= MAX_FLOW_TURNS else [])
        flows = [flow for flow in chosen if flow in reachable]
    if not flows:
        return []
    at_once = -(-len(flows) // MAX_FLOW_TURNS)
    step = -(-len(flows) // at_once)  # so flows of a turn are far apart in the circle
    return [list(islice(flows, start, None, step)) for start in range(step)]


def slow_flows(rates: Mapping[Flow, float]) -> list[Flow]:
    """The flows whose rates are below half of the median, and all flows of hosts whose best flows
    are below half of the median of the hosts' best."""
    best, least = _best_of_hosts(rates), DOCTOR_SLOW_RATE_RATIO * _median(rates)
    hosts = {rank for rank, rate in best.items() if rate < DOCTOR_SLOW_RATE_RATIO * _median(best)}
    return [flow for flow, rate in rates.items() if rate < least or hosts & set(flow)]


def _median(rates: Mapping[Any, float]) -> float:
    return median_high(rates.values()) if rates else 0.0


def _best_of_hosts(rates: Mapping[Flow, float]) -> dict[int, float]:
    hosts = {rank for flow in rates for rank in flow}
    return {host: max(rate for flow, rate in rates.items() if host in flow) for host in hosts}


def rate_findings(
    ranks: Sequence[RankFacts], rates: Mapping[Flow, float], silent: Sequence[Flow]
) -> list[Finding]:
    """Findings on the rates of flows between hosts; `silent` flows were never answered."""
    known = {facts.rank: facts for facts in ranks}
    slow, middle = slow_flows(rates), _median(rates)
    hosts = [rank for rank in known if _is_slow_host(rank, rates, slow)]
    pairs = [flow for flow in slow if not {*flow} & {*hosts}]
    findings = [
        *(_about_flow(fail, known, flow, *LOST_FLOW_TEXTS) for flow in silent[:MAX_RATE_FINDINGS]),
        *(_slow_host(known[rank], rates, _median(_best_of_hosts(rates))) for rank in hosts),
    ]
    if len(pairs) <= MAX_RATE_FINDINGS:
        for flow in pairs:
            detail = f"{_bits(rates[flow])}; the median of all pairs is {_bits(middle)}"
            findings.append(_about_flow(warn, known, flow, detail, SLOW_PAIR_REMEDY))
    else:
        worst = min(pairs, key=lambda flow: rates[flow])
        detail = (
            f"{len(pairs)} of {len(rates)} pairs get less than half of the median {_bits(middle)}, "
            f"the slowest {_ends(known, worst)}: {_bits(rates[worst])}"
        )
        affected = [known[rank] for rank in sorted({rank for flow in pairs for rank in flow})]
        findings.append(warn("rates", detail, SLOW_PAIRS_REMEDY, affected, named=True))
    if not findings and not rates:
        reason = "there is one host" if len(known) == 1 else "no two hosts reach each other"
        return [ok("rates", f"nothing to measure: {reason}")]
    all_pairs = len(known) * (len(known) - 1)
    which = "all ordered pairs of hosts"
    if len(rates) < all_pairs:
        which = f"{len(rates)} of {all_pairs} ordered pairs of hosts, the others left out"
    if not findings or len(rates) + len(silent) < all_pairs:
        least = _bits(min(rates.values(), default=0.0))
        findings.append(ok("rates", f"{which}: median {_bits(middle)}, minimum {least}"))
    return findings


def _is_slow_host(rank: int, rates: Mapping[Flow, float], slow: Sequence[Flow]) -> bool:
    """True if several flows out of this host, or several into it, were measured and all are slow.
    In a large circle a host has one flow out and one in, and both have to be slow; the two flows
    between two hosts alone don't show which of the hosts is slow."""
    out, into = ([flow for flow in rates if flow[end] == rank] for end in (0, 1))
    evidence = [flows for flows in (out, into) if len(flows) > 1]
    if len(rates) > 2 and len(out + into) == 2:
        evidence.append(out + into)
    return any({*flows} <= {*slow} for flows in evidence)


def _slow_host(facts: RankFacts, rates: Mapping[Flow, float], middle: float) -> Finding:
    out, into = ([rates[flow] for flow in rates if flow[end] == facts.rank] for end in (0, 1))
    medians = [f"{_bits(median(own))} {way}" for own, way in ((out, "out"), (into, "in")) if own]
    detail = f"flows get {', '.join(medians)}; the median of all hosts is {_bits(middle)}"
    return warn("rates", detail, SLOW_HOST_REMEDY, [facts])


def _about_flow(
    verdict: Callable[..., Finding],
    known: Mapping[int, RankFacts],
    flow: Flow,
    detail: str,
    remedy: str,
) -> Finding:
    """A finding on this flow and its two ends."""
    ends = [known[rank] for rank in flow]
    return verdict("rates", f"{_ends(known, flow)}: {detail}", remedy, ends, named=True)


def _ends(known: Mapping[int, RankFacts], flow: Flow) -> str:
    return f"from {known[flow[0]].label} to {known[flow[1]].label}"


def _bits(rate: float) -> str:
    return about(rate, "bit/s")
