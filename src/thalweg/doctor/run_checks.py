"""All checks, by all workers of a run together.

Rank 0 waits for the facts of all ranks, lets all ping each other, orders flows, and judges. The
others ping all ranks, then send flows as ordered, until rank 0 ends it. Messages are keys of the
run's own store.

A rank that doesn't join, or stops answering, is a finding as well. Every wait has a deadline.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from time import monotonic, sleep
from typing import Any

from thalweg.doctor import addresses, limits, network
from thalweg.doctor.environment import environment, secret_findings, summary, version_findings
from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, summed_up, warn
from thalweg.doctor.local_checks import local_checks
from thalweg.doctor.ping import (
    PING_OK,
    PingResult,
    PingServer,
    max_ping_seconds,
    peers_of,
    ping_all,
    send_flow,
)
from thalweg.errors import RunError, ThalwegError
from thalweg.facts import counted
from thalweg.launch.launcher_variables import read_rank_assignment
from thalweg.members.world import MAX_STORE_POLL_SECONDS, MIN_STORE_POLL_SECONDS, World
from thalweg.transports.store_client import Store

Progress = Callable[[int, int], None]
LEADER_MARGIN_SECONDS = 10.0  # for rank 0 beyond its own deadlines
FLOWS_TIMEOUT_SECONDS = 60.0  # for all flows
FLOW_REPLY_TIMEOUT_SECONDS = 3.0
PING_ORDER, DOCTOR_OVER_ORDER = "ping", "over"
DOCTOR_LEAVE_TIMEOUT_SECONDS = 3.0  # for the others to read that it is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings; `reports`: this rank reports them, as rank 0, or as one that can't reach it."""

    findings: Sequence[Finding]
    environment: Mapping[str, Any]
    reports: bool
    workers: int

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Diagnosis:
        findings = [Finding.unpacked(packed) for packed in content["findings"]]
        return cls(**{**content, "findings": findings})


def examine(timeout: float, progress: Progress = lambda done, total: None) -> Diagnosis:
    """Check this worker, alone or with all others, which have `timeout` seconds to join."""
    assignment = read_rank_assignment(os.environ)
    mine, variables = local_checks(assignment)
    findings: list[Finding] | None = mine.findings
    if assignment.size > 1:
        mine = replace(mine, findings=[one.at(mine.rank, mine.name) for one in mine.findings])
        try:
            findings = _together(mine, variables, timeout, progress)
        except ThalwegError as error:
            findings = [fail("store", error.problem, error.remedy), *mine.findings]
    described = environment(assignment, os.environ)
    return Diagnosis(
        findings=summed_up([summary(described), *(findings or ())]),
        environment=described,
        reports=findings is not None,
        workers=assignment.size,
    )


def _together(
    mine: RankFacts, variables: Mapping[str, str], timeout: float, progress: Progress
) -> list[Finding] | None:
    """The findings of all ranks together; None if rank 0 reports them."""
    world = World.join(timeout, variables)
    has_secret = all(finding.check != "secret" for finding in mine.findings)  # a readable one
    try:
        server = PingServer(world.rank, world.address)
    except OSError as error:
        raise RunError(
            f"rank {world.rank} can't listen at {world.address}: {error.strerror}",
            "name another interface: THALWEG_IFNAME",
        ) from None
    with server:
        secret = world.security.fingerprint if has_secret else None
        facts = replace(mine, port=server.port, token=server.token, secret=secret)
        exchange = world.namespace("doctor")
        exchange.put(f"facts/{world.rank}", json.dumps(asdict(facts)))
        if world.rank == 0:
            return Leader(exchange=exchange, timeout=timeout, progress=progress).lead()
        return follow(exchange, facts, timeout)


def _read(store: Store, keys: Sequence[str]) -> dict[str, Any]:
    return {key: json.loads(store.get(key)) for key in keys if store.check([key])}


def gather(
    world: World,
    keys: Iterable[str],
    seconds: float,
    progress: Callable[[int], None] = lambda number: None,
) -> dict[str, Any]:
    """The JSON values of these keys that are in the store within `seconds`; earlier, if all are."""
    deadline, pause = monotonic() + seconds, MIN_STORE_POLL_SECONDS
    missing, values = list(keys), dict[str, Any]()
    while True:
        new = world.store_client.call(partial(_read, keys=missing))
        values |= new
        missing = [key for key in missing if key not in values]
        progress(len(values))
        if not missing or monotonic() >= deadline:
            return values
        pause = MIN_STORE_POLL_SECONDS if new else min(2 * pause, MAX_STORE_POLL_SECONDS / 2)
        sleep(min(pause, max(0.0, deadline - monotonic())))


def follow(exchange: World, own: RankFacts, timeout: float) -> list[Finding] | None:
    """Follow rank 0's orders; None if it reports the findings, this rank's own if it is silent."""
    patience = timeout + LEADER_MARGIN_SECONDS
    roster = gather(exchange, ["roster"], patience).get("roster")
    if roster is None:
        return _no_leader(own, f"joined within {patience:g} s")
    known = {facts.rank: facts for facts in map(RankFacts.unpacked, roster)}
    silence = max_ping_seconds(len(known)) + FLOWS_TIMEOUT_SECONDS + 3 * LEADER_MARGIN_SECONDS
    for number in count():
        key = f"order/{own.rank}/{number}"
        order = gather(exchange, [key], silence).get(key)
        if order is None:
            break
        answer = _obey(order, own.rank, known)
        exchange.put(f"answer/{own.rank}/{number}", json.dumps(answer))
        if order == DOCTOR_OVER_ORDER:
            return None
    return _no_leader(own, f"sent anything for {silence:g} s")


def _obey(order: Any, rank: int, known: Mapping[int, RankFacts]) -> Any:
    """Ping all ranks, or send a flow; the answer is None if the flow has none."""
    if order == PING_ORDER:
        peers = [known[peer] for peer in peers_of(rank, list(known))]
        return [asdict(ping) for ping in ping_all(rank, peers)]
    if order == DOCTOR_OVER_ORDER:
        return True
    return send_flow(known[order["peer"]], order["seconds"], FLOW_REPLY_TIMEOUT_SECONDS)


def _no_leader(own: RankFacts, what: str) -> list[Finding]:
    remedy = "look at the output of rank 0, and whether it was started"
    return [*own.findings, _about_rank(0, f"hasn't {what}, as {own.label} sees it", remedy)]


def _about_rank(rank: int, what: str, remedy: str) -> Finding:
    """The failure of a rank whose host is unknown."""
    return replace(fail("ranks", f"rank {rank} {what}", remedy), ranks=(rank,), names_them=True)


@dataclass(slots=True, kw_only=True)
class Leader:
    """Rank 0, which orders pings and flows and judges their results."""

    exchange: World
    timeout: float
    progress: Progress
    known: dict[int, RankFacts] = field(default_factory=dict)  # ranks that joined in time
    order_counts: Counter[int] = field(default_factory=Counter)

    def lead(self) -> list[Finding]:
        """The findings about all ranks."""
        self._gather_facts()
        ranks = list(self.known.values())
        seconds = max_ping_seconds(len(ranks)) + LEADER_MARGIN_SECONDS
        answers = self._order(dict.fromkeys(self.known, PING_ORDER), seconds)
        pings = [PingResult(**ping) for answer in answers.values() for ping in answer]
        mute = [facts for facts in ranks if facts.rank not in answers]
        first = [there[0] for there in by_host(ranks).values() if there[0] not in mute]
        round_trips = {(p.caller, p.peer): p.round_trip for p in pings if p.outcome == PING_OK}
        rates, silent, skipped = self._measure_flows([facts.rank for facts in first], round_trips)
        findings = [
            *self._absent(),
            *(
                fail(
                    "ranks",
                    f"{facts.label} joined, and then stopped answering",
                    "look at its output, and whether its host is busy or its process is stopped",
                    [facts],
                    named=True,
                )
                for facts in mute
            ),
            *(finding for facts in ranks for finding in facts.findings),
            *addresses.traps(ranks),
            *network.unreachable(ranks, pings),
            *network.rate_findings(first, rates, silent),
            *network.clock_findings(ranks, pings),
            *version_findings(ranks),
            *secret_findings(ranks),
            *limits.buffers_for(ranks, rates, round_trips),
            *limits.threads(ranks),
        ]
        if skipped:
            detail = f"{skipped} flows weren't measured within {FLOWS_TIMEOUT_SECONDS:g} s"
            remedy = "measure with `thalweg probe`, which takes its time"
            findings.append(warn("rates", detail, remedy))
        # The store may be in this process, so the others read the order before it ends.
        self._order(dict.fromkeys(self.known, DOCTOR_OVER_ORDER), DOCTOR_LEAVE_TIMEOUT_SECONDS)
        return findings

    def _gather_facts(self) -> None:
        """The facts of all ranks that join in time, published for all of them."""
        keys = [f"facts/{rank}" for rank in range(self.exchange.size)]
        packed = gather(
            self.exchange, keys, self.timeout, lambda n: self.progress(n, 2 * self.exchange.size)
        )
        ranks = [RankFacts.unpacked(packed[key]) for key in keys if key in packed]
        self.known = {facts.rank: facts for facts in ranks}
        self.exchange.put("roster", json.dumps(list(map(asdict, ranks))))

    def _order(self, orders: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        """Send an order to each of these ranks, and return the answers within `seconds`."""
        keys: dict[str, int] = {}
        for rank in orders.keys() - {0}:
            place = f"{rank}/{self.order_counts[rank]}"
            self.order_counts[rank] += 1
            keys[f"answer/{place}"] = rank
            self.exchange.put(f"order/{place}", json.dumps(orders[rank]))
        own = {0: _obey(orders[0], 0, self.known)} if 0 in orders else {}
        answers = gather(self.exchange, keys, seconds)
        return own | {keys[key]: answer for key, answer in answers.items()}

    def _measure_flows(
        self, ranks: Sequence[int], round_trips: Mapping[network.Flow, float]
    ) -> tuple[dict[network.Flow, float], list[network.Flow], int]:
        """The rates of flows between these ranks in bits per second, the flows that weren't
        answered, and the number of those for which there was no time."""
        reachable = frozenset(flow for flow in round_trips if {*flow} <= {*ranks})
        turns = network.turns(ranks, reachable)
        seconds = network.flow_seconds([round_trips[flow] for flow in reachable])
        deadline = monotonic() + FLOWS_TIMEOUT_SECONDS
        measured: dict[network.Flow, float | None] = {}
        for number, turn in enumerate(turns):
            if monotonic() <= deadline:
                measured |= self._rates(turn, seconds)
                self.progress(self.exchange.size + number, self.exchange.size + len(turns))
        rates = {flow: rate for flow, rate in measured.items() if rate is not None}
        for flow in 2 * network.slow_flows(rates)[: network.MAX_REPEATED_FLOWS]:
            if flow in network.slow_flows(rates) and monotonic() < deadline:
                rates[flow] = max(rates[flow], self._rates([flow], seconds)[flow] or 0.0)
        silent = [flow for flow in measured if flow not in rates]
        return rates, silent, sum(map(len, turns)) - len(measured)

    def _rates(
        self, flows: Sequence[network.Flow], seconds: float
    ) -> dict[network.Flow, float | None]:
        """The rates of concurrent flows, None for those without an answer."""
        orders = {source: {"peer": target, "seconds": seconds} for source, target in flows}
        answers = self._order(orders, seconds + 2 * FLOW_REPLY_TIMEOUT_SECONDS)
        return {flow: answers.get(flow[0]) for flow in flows}

    def _absent(self) -> list[Finding]:
        remedy = (
            "look at its output: was it started, with the same number of workers, and does its "
            "host reach MASTER_ADDR?"
        )
        what = f"hasn't joined within {self.timeout:g} s"
        absent = [rank for rank in range(self.exchange.size) if rank not in self.known]
        hosts = counted(len(by_host([*self.known.values()])), "host")
        fine = [] if absent else [ok("ranks", f"all {self.exchange.size} joined, on {hosts}")]
        return fine + [_about_rank(rank, what, remedy) for rank in absent]
