"""Findings from all pings: which ranks reach each other, and how far their clocks differ.

One line for a rank that nobody reaches, one for a rank that reaches nobody, one for each other pair
of hosts, with both directions in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, together, warn
from thalweg.doctor.ping import PING_OK, WRONG_PEER_TEXT, PingResult
from thalweg.facts import about

MAX_CLOCK_SKEW_SECONDS = 0.1
FIREWALL_REMEDY = "let all TCP ports through between these hosts"
INTERFACE_REMEDY = (
    "name an interface that all hosts share: THALWEG_IFNAME, and GLOO_SOCKET_IFNAME for torch"
)
REACHABILITY_REMEDIES = {
    "timed out": f"{FIREWALL_REMEDY}; if none is closed, {INTERFACE_REMEDY}",
    "refused": f"{FIREWALL_REMEDY} (it rejects), and see that no other host has the same address",
    "no route": INTERFACE_REMEDY,
    "forbidden here": "look at the firewall of the host that calls (nft list ruleset)",
    WRONG_PEER_TEXT: f"{INTERFACE_REMEDY}: addresses of bridges are often the same on all hosts",
}
Outcomes = Mapping[tuple[int, int], str]
"""The outcome of each ping, by caller and peer."""


def unreachable(ranks: Sequence[RankFacts], pings: Sequence[PingResult]) -> list[Finding]:
    """Findings on the ordered pairs whose pings failed; one that all is well, if none did."""
    outcomes = {(ping.caller, ping.peer): ping.outcome for ping in pings}
    broken = {pair: why for pair, why in outcomes.items() if why != PING_OK}
    if not broken:
        tried, all_pairs = len(pings), len(ranks) * (len(ranks) - 1)
        detail = f"all {tried} ordered pairs of ranks reach each other"
        if tried < all_pairs:
            which = f"{tried} of {all_pairs} ordered pairs of ranks"
            detail = f"{which} were tried, and reach each other"
        return [ok("reachability", detail)]
    known = {facts.rank: facts for facts in ranks}
    found: list[Finding] = []
    explained: set[tuple[int, int]] = set()
    for facts in ranks:
        into = {pair for pair in outcomes if pair[1] == facts.rank}
        out = {pair for pair in outcomes if pair[0] == facts.rank}
        if len(into) > 1 and into <= broken.keys():
            why = _words({broken[pair] for pair in into})
            detail = f"nobody reaches {facts.label} at {_where(facts)}: {why}"
            remedy = f"{INTERFACE_REMEDY}; if that is the right one, {FIREWALL_REMEDY}"
            found.append(fail("reachability", detail, remedy, [facts], named=True))
            explained |= into
        if len(out) > 1 and out <= broken.keys() and not out <= explained:
            reasons = {broken[pair] for pair in out}
            detail = f"{facts.label} reaches nobody: {_words(reasons)}"
            found.append(fail("reachability", detail, _remedy(reasons), [facts], named=True))
            explained |= out
    return found + _pairs(known, {p: w for p, w in broken.items() if p not in explained}, outcomes)


def _pairs(known: Mapping[int, RankFacts], broken: Outcomes, outcomes: Outcomes) -> list[Finding]:
    """One finding for each two hosts, with both directions in it."""
    between: dict[frozenset[object], list[tuple[int, int]]] = {}
    for pair in broken:
        hosts = frozenset[object](known[rank].host for rank in pair)
        between.setdefault(hosts if len(hosts) == 2 else frozenset(pair), []).append(pair)
    found = []
    for pairs in between.values():
        ranks = [known[rank] for rank in sorted({rank for pair in pairs for rank in pair})]
        sides = [*by_host(ranks).values()]  # of two hosts, or of one
        one, other = sides if len(sides) == 2 else (ranks[:1], ranks[1:])
        both = (_direction(*ends, broken, outcomes) for ends in ((one, other), (other, one)))
        remedy = _remedy({broken[pair] for pair in pairs})
        found.append(fail("reachability", "; ".join(both), remedy, ranks, named=True))
    return found


def _direction(
    callers: Sequence[RankFacts], peers: Sequence[RankFacts], broken: Outcomes, outcomes: Outcomes
) -> str:
    pairs = [(one.rank, other.rank) for one in callers for other in peers]
    why = {broken[pair] for pair in pairs if pair in broken}
    if why:
        there = f"{together(peers)} at {_where(peers[0])}"
        return f"{together(callers)} can't reach {there}: {_words(why)}"
    answered = any(outcomes.get(pair) == PING_OK for pair in pairs)
    return f"the other way {'works' if answered else 'nobody has tried'}"


def _where(facts: RankFacts) -> str:
    return f"{facts.address} ({facts.interface})" if facts.interface else facts.address


def _words(why: set[str]) -> str:
    return " or ".join(sorted(why))


def _remedy(why: set[str]) -> str:
    known = [remedy for outcome, remedy in REACHABILITY_REMEDIES.items() if outcome in why]
    return known[0] if known else f"{FIREWALL_REMEDY}, or {INTERFACE_REMEDY}"


def clock_findings(ranks: Sequence[RankFacts], pings: Sequence[PingResult]) -> list[Finding]:
    """The skew of every host's clock against that of the first rank's host.

    Training doesn't depend on it, and traces align themselves; comparing logs does."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [ok("clocks", "all ranks are on one host")]
    first, *others = hosts.values()
    found = []
    largest = 0.0
    for there in others:
        best = _offset(first, there, pings)
        if best is None:
            continue
        ahead, error = best
        largest = max(largest, abs(ahead) + error)
        if abs(ahead) - error > MAX_CLOCK_SKEW_SECONDS:
            direction = "ahead of" if ahead > 0 else "behind"
            detail = (
                f"the clock is {about(abs(ahead), 's')} {direction} {first[0].name}'s (give or "
                f"take {about(error, 's')}): logs of the two can't be put in order"
            )
            remedy = f"run an NTP client (chrony, systemd-timesyncd) on {there[0].name}"
            found.append(warn("clocks", detail, remedy, there))
    within = f"within {about(largest, 's')} of {first[0].name}'s on all hosts that were reached"
    return found or [ok("clocks", within)]


def _offset(
    first: Sequence[RankFacts], there: Sequence[RankFacts], pings: Sequence[PingResult]
) -> tuple[float, float] | None:
    """The seconds by which the clock of `there` is ahead, and their error: half of the shortest
    round trip. None without a ping between the two hosts."""
    ours, theirs = ({facts.rank for facts in side} for side in (first, there))
    found = []
    for ping in pings:
        if ping.outcome == PING_OK and ping.caller in ours and ping.peer in theirs:
            found.append((ping.round_trip, ping.ahead))
        elif ping.outcome == PING_OK and ping.caller in theirs and ping.peer in ours:
            found.append((ping.round_trip, -ping.ahead))
    if not found:
        return None
    round_trip, ahead = min(found)
    return ahead, round_trip / 2
