"""Who reaches whom, out of everybody's calls: one line for a rank that nobody reaches, one for a
rank that reaches nobody, one for each other pair of hosts, with both ways in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thalweg.doctor.finding import Finding, RankFacts, by_host, concerning, together
from thalweg.doctor.ping import PING_OK, WRONG_PEER_TEXT, PingResult

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
"""By caller and peer."""


def unreachable(ranks: Sequence[RankFacts], pings: Sequence[PingResult]) -> list[Finding]:
    """All ordered pairs that failed."""
    outcomes = {(ping.caller, ping.peer): ping.outcome for ping in pings}
    broken = {pair: why for pair, why in outcomes.items() if why != PING_OK}
    if not broken:
        return [_fine(len(ranks), len(pings))]
    known = {facts.rank: facts for facts in ranks}
    found: list[Finding] = []
    explained: set[tuple[int, int]] = set()
    for facts in ranks:
        into = {pair for pair in outcomes if pair[1] == facts.rank}
        out = {pair for pair in outcomes if pair[0] == facts.rank}
        if len(into) > 1 and into <= broken.keys():
            found.append(_nobody_reaches(facts, {broken[pair] for pair in into}))
            explained |= into
        if len(out) > 1 and out <= broken.keys() and not out <= explained:
            found.append(_reaches_nobody(facts, {broken[pair] for pair in out}))
            explained |= out
    return found + _pairs(known, {p: w for p, w in broken.items() if p not in explained}, outcomes)


def _nobody_reaches(facts: RankFacts, why: set[str]) -> Finding:
    return Finding(
        check="reachability",
        verdict="fail",
        detail=f"nobody reaches {facts.label} at {_where(facts)}: {_words(why)}",
        remedy=f"{INTERFACE_REMEDY}; if that is the right one, {FIREWALL_REMEDY}",
        **concerning(facts, named=True),
    )


def _reaches_nobody(facts: RankFacts, why: set[str]) -> Finding:
    return Finding(
        check="reachability",
        verdict="fail",
        detail=f"{facts.label} reaches nobody: {_words(why)}",
        remedy=_remedy(why),
        **concerning(facts, named=True),
    )


def _pairs(known: Mapping[int, RankFacts], broken: Outcomes, outcomes: Outcomes) -> list[Finding]:
    """By two hosts, both ways in one line."""
    between: dict[frozenset[object], list[tuple[int, int]]] = {}
    for pair in broken:
        hosts = frozenset[object](known[rank].host for rank in pair)
        between.setdefault(hosts if len(hosts) == 2 else frozenset(pair), []).append(pair)
    found = []
    for pairs in between.values():
        ranks = sorted({rank for pair in pairs for rank in pair})
        one, other = _sides([known[rank] for rank in ranks])
        ways = (_way(one, other, broken, outcomes), _way(other, one, broken, outcomes))
        found.append(
            Finding(
                check="reachability",
                verdict="fail",
                detail="; ".join(ways),
                remedy=_remedy({broken[pair] for pair in pairs}),
                ranks=tuple(ranks),
                hosts=tuple(dict.fromkeys(known[rank].name for rank in ranks)),
                names_them=True,
            )
        )
    return found


def _sides(ranks: list[RankFacts]) -> tuple[list[RankFacts], list[RankFacts]]:
    """Of two hosts, or two ranks of one."""
    one, *other = by_host(ranks).values()
    return (one, other[0]) if other else (ranks[:1], ranks[1:])


def _way(
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
    return next(
        (REACHABILITY_REMEDIES[w] for w in REACHABILITY_REMEDIES if w in why),
        f"{FIREWALL_REMEDY}, or {INTERFACE_REMEDY}",
    )


def _fine(ranks: int, calls: int) -> Finding:
    all_pairs = ranks * (ranks - 1)
    told = f"all {calls} ordered pairs of ranks reach each other"
    if calls < all_pairs:
        told = f"{calls} of {all_pairs} ordered pairs of ranks were tried, and reach each other"
    return Finding(check="reachability", verdict="ok", detail=told)
