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
from dataclasses import asdict, dataclass, replace
from time import monotonic, sleep, time
from typing import Any

from thalweg.doctor import bandwidth, limits, name_resolution, processor, reachability
from thalweg.doctor.environment import environment, secret_findings, summary, version_findings
from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, summed_up, warn
from thalweg.doctor.local_checks import local_checks
from thalweg.doctor.ping import PING_OK, PingResult, max_ping_seconds, peers_of, ping_all, send_flow
from thalweg.doctor.ping_server import Clock, PingServer
from thalweg.errors import RunError, ThalwegError
from thalweg.launch.rank_assignment import read_rank_assignment
from thalweg.members.world import World

Progress = Callable[[int, int], None]
LEADER_MARGIN_SECONDS = 10.0  # for rank 0 beyond its own deadlines
FLOWS_TIMEOUT_SECONDS = 60.0  # for all flows
FLOW_REPLY_TIMEOUT_SECONDS = 3.0
DOCTOR_OVER_ORDER = "over"
DOCTOR_LEAVE_TIMEOUT_SECONDS = 3.0  # for the others to read that it is over
MIN_STORE_POLL_SECONDS, MAX_STORE_POLL_SECONDS = 0.002, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings; `tells`: this rank reports them, like rank 0, or a rank that can't reach it."""

    findings: Sequence[Finding]
    environment: Mapping[str, Any]
    tells: bool
    workers: int

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Diagnosis:
        findings = [Finding.unpacked(packed) for packed in content["findings"]]
        return cls(**{**content, "findings": findings})


def examine(
    timeout: float, progress: Progress = lambda done, total: None, clock: Clock = time
) -> Diagnosis:
    """Check this worker, alone or with all others, which have `timeout` seconds to join."""
    assignment = read_rank_assignment(os.environ)
    mine, variables = local_checks(assignment)
    found: list[Finding] | None = mine.findings
    if assignment.size > 1:
        mine = replace(mine, findings=[one.at(mine.rank, mine.name) for one in mine.findings])
        try:
            found = _together(mine, variables, timeout, progress, clock)
        except ThalwegError as error:
            found = [fail("store", error.problem, error.remedy), *mine.findings]
    described = environment(assignment, os.environ)
    return Diagnosis(
        findings=summed_up([summary(described), *(found or ())]),
        environment=described,
        tells=found is not None,
        workers=assignment.size,
    )


def _together(
    mine: RankFacts,
    variables: Mapping[str, str],
    timeout: float,
    progress: Progress,
    clock: Clock,
) -> list[Finding] | None:
    """The findings of all ranks together; None if rank 0 reports them."""
    world = World.join(timeout, variables)
    has_secret = all(finding.check != "secret" for finding in mine.findings)  # a readable one
    try:
        server = PingServer(world.rank, world.address, clock)
    except OSError as error:
        raise RunError(
            f"rank {world.rank} can't listen at {world.address}: {error.strerror}",
            "name another interface: THALWEG_IFNAME",
        ) from None
    with server:
        secret = world.security.fingerprint if has_secret else None
        facts = replace(mine, port=server.port, token=server.token, secret=secret)
        exchange = StoreExchange(world)
        exchange.put(f"facts/{world.rank}", asdict(facts))
        if world.rank == 0:
            return Leader(exchange, world.size, timeout, progress, clock).lead()
        return follow(exchange, facts, timeout, clock)


class StoreExchange:
    """JSON values in the run's store; raises RunError if the store is lost."""

    def __init__(self, world: World) -> None:
        self._store_client = world.namespace("doctor").store_client

    def put(self, key: str, content: Any) -> None:
        self._store_client.call(lambda store: store.set(key, json.dumps(content)))

    def get(self, key: str, deadline: float) -> Any | None:
        """The value of this key; None if it isn't there by the deadline."""
        return self.gather([key], deadline).get(key)

    def gather(
        self,
        keys: Iterable[str],
        deadline: float,
        counted: Callable[[int], None] = lambda number: None,
    ) -> dict[str, Any]:
        """The values of these keys that are there by the deadline; earlier, if all are."""
        missing = list(keys)
        found: dict[str, Any] = {}
        pause = MIN_STORE_POLL_SECONDS
        while missing:
            texts = self._read(missing)
            found |= {key: json.loads(text) for key, text in texts.items()}
            missing = [key for key in missing if key not in found]
            counted(len(found))
            if not missing or monotonic() >= deadline:
                break
            pause = MIN_STORE_POLL_SECONDS if texts else min(2 * pause, MAX_STORE_POLL_SECONDS)
            sleep(min(pause, max(0.0, deadline - monotonic())))
        return found

    def _read(self, keys: Sequence[str]) -> dict[str, bytes]:
        return self._store_client.call(
            lambda store: {key: store.get(key) for key in keys if store.check([key])}
        )


def follow(
    exchange: StoreExchange, own: RankFacts, timeout: float, clock: Clock
) -> list[Finding] | None:
    """Follow rank 0's orders; None if it reports the findings, this rank's own if it is silent."""
    patience = timeout + LEADER_MARGIN_SECONDS
    roster = exchange.get("roster", monotonic() + patience)
    if roster is None:
        return [*own.findings, _no_leader(own, f"joined within {patience:g} s")]
    present = {facts.rank: facts for facts in map(RankFacts.unpacked, roster)}
    peers = [present[rank] for rank in peers_of(own.rank, list(present))]
    exchange.put(f"calls/{own.rank}", [asdict(ping) for ping in ping_all(own.rank, peers, clock)])
    silence = max_ping_seconds(len(peers)) + FLOWS_TIMEOUT_SECONDS + 3 * LEADER_MARGIN_SECONDS
    turn = 0
    while True:
        order = exchange.get(f"order/{own.rank}/{turn}", monotonic() + silence)
        if order is None:
            return [*own.findings, _no_leader(own, f"sent anything for {silence:g} s")]
        if order == DOCTOR_OVER_ORDER:
            exchange.put(f"left/{own.rank}", True)
            return None
        rate = send_flow(present[order["peer"]], order["seconds"], FLOW_REPLY_TIMEOUT_SECONDS)
        exchange.put(f"answer/{own.rank}/{turn}", {"rate": rate})
        turn += 1


def _no_leader(own: RankFacts, what: str) -> Finding:
    remedy = "look at the output of rank 0, and whether it was started"
    return _about_rank(0, f"hasn't {what}, as {own.label} sees it", remedy)


def _about_rank(rank: int, what: str, remedy: str) -> Finding:
    """The failure of a rank whose host is unknown."""
    return replace(fail("ranks", f"rank {rank} {what}", remedy), ranks=(rank,), names_them=True)


class Leader:
    """Rank 0, which orders pings and flows and judges their results."""

    def __init__(
        self, exchange: StoreExchange, size: int, timeout: float, progress: Progress, clock: Clock
    ) -> None:
        self._exchange = exchange
        self._size = size
        self._timeout = timeout
        self._progress = progress
        self._clock = clock
        self._orders: Counter[int] = Counter()  # number of orders to each rank
        self._rates: dict[bandwidth.Flow, float] = {}  # bits per second
        self._silent: list[bandwidth.Flow] = []  # flows without an answer

    def lead(self) -> list[Finding]:
        """The findings about all ranks."""
        ranks = self._gather_facts()
        pings, mute = self._gather_pings(ranks)
        first = [there[0] for there in by_host(ranks).values() if there[0].rank not in mute]
        round_trips = {(p.caller, p.peer): p.round_trip for p in pings if p.outcome == PING_OK}
        skipped = self._measure_flows(first, round_trips)
        findings = [
            *self._absent(ranks),
            *(_mute(facts) for facts in ranks if facts.rank in mute),
            *(finding for facts in ranks for finding in facts.findings),
            *name_resolution.traps(ranks),
            *reachability.unreachable(ranks, pings),
            *bandwidth.rate_findings(first, self._rates, self._silent),
            *reachability.clock_findings(ranks, pings),
            *version_findings(ranks),
            *secret_findings(ranks),
            *limits.buffers_for(ranks, self._rates, round_trips),
            *processor.threads(ranks),
        ]
        if skipped:
            detail = f"{skipped} flows weren't measured within {FLOWS_TIMEOUT_SECONDS:g} s"
            findings.append(
                warn("rates", detail, "measure with `thalweg probe`, which takes its time")
            )
        self._end(ranks)
        return findings

    def _gather_facts(self) -> list[RankFacts]:
        """The facts of all ranks that join in time, published for all of them."""
        keys = [f"facts/{rank}" for rank in range(self._size)]
        deadline = monotonic() + self._timeout
        found = self._exchange.gather(keys, deadline, lambda n: self._progress(n, 2 * self._size))
        ranks = [RankFacts.unpacked(found[key]) for key in keys if key in found]
        self._exchange.put("roster", list(map(asdict, ranks)))
        return ranks

    def _gather_pings(self, ranks: list[RankFacts]) -> tuple[list[PingResult], set[int]]:
        """The pings of all ranks, and the ranks that didn't report theirs."""
        known = {facts.rank: facts for facts in ranks}
        peers = [known[rank] for rank in peers_of(0, list(known))]
        pings = ping_all(0, peers, self._clock)
        keys = {f"calls/{rank}": rank for rank in known if rank != 0}
        deadline = monotonic() + max_ping_seconds(len(peers)) + LEADER_MARGIN_SECONDS
        reported = self._exchange.gather(keys, deadline)
        pings += [PingResult(**ping) for key in reported for ping in reported[key]]
        return pings, {rank for key, rank in keys.items() if key not in reported}

    def _measure_flows(
        self, ranks: list[RankFacts], round_trips: dict[bandwidth.Flow, float]
    ) -> int:
        """Measure flows between these ranks; the number of those for which there was no time."""
        known = {facts.rank: facts for facts in ranks}
        reachable = frozenset(flow for flow in round_trips if set(flow) <= known.keys())
        turns = bandwidth.turns(list(known), reachable)
        seconds = bandwidth.flow_seconds([round_trips[flow] for flow in reachable])
        deadline = monotonic() + FLOWS_TIMEOUT_SECONDS
        skipped = 0
        for number, turn in enumerate(turns):
            if monotonic() > deadline:
                skipped = sum(map(len, turns[number:]))
                break
            for flow, rate in self._flows_at_once(turn, seconds, known).items():
                if rate is None:
                    self._silent.append(flow)
                else:
                    self._rates[flow] = rate
            self._progress(self._size + number, self._size + len(turns))
        for flow in 2 * bandwidth.slow_flows(self._rates)[: bandwidth.MAX_REPEATED_FLOWS]:
            if flow in bandwidth.slow_flows(self._rates) and monotonic() < deadline:
                again = self._flows_at_once([flow], seconds, known)[flow]
                self._rates[flow] = max(self._rates[flow], again or 0.0)
        return skipped

    def _flows_at_once(
        self, turn: list[bandwidth.Flow], seconds: float, known: dict[int, RankFacts]
    ) -> dict[bandwidth.Flow, float | None]:
        """The rates of these flows in bits per second, None for those without an answer."""
        keys: dict[bandwidth.Flow, str] = {}
        for source, target in turn:
            if source != 0:
                place = f"{source}/{self._orders[source]}"
                self._orders[source] += 1
                keys[source, target] = f"answer/{place}"
                self._exchange.put(f"order/{place}", {"peer": target, "seconds": seconds})
        found = {
            flow: send_flow(known[flow[1]], seconds, FLOW_REPLY_TIMEOUT_SECONDS)
            for flow in turn
            if flow not in keys
        }
        deadline = monotonic() + seconds + 2 * FLOW_REPLY_TIMEOUT_SECONDS
        answers = self._exchange.gather(keys.values(), deadline)
        return found | {flow: answers.get(key, {}).get("rate") for flow, key in keys.items()}

    def _end(self, ranks: list[RankFacts]) -> None:
        """End it for all; the store may be in this process, so the others read it first."""
        others = [facts.rank for facts in ranks if facts.rank != 0]
        for rank in others:
            self._exchange.put(f"order/{rank}/{self._orders[rank]}", DOCTOR_OVER_ORDER)
        deadline = monotonic() + DOCTOR_LEAVE_TIMEOUT_SECONDS
        self._exchange.gather([f"left/{rank}" for rank in others], deadline)

    def _absent(self, ranks: list[RankFacts]) -> list[Finding]:
        present = {facts.rank for facts in ranks}
        absent = [rank for rank in range(self._size) if rank not in present]
        if not absent:
            hosts = len(by_host(ranks))
            return [ok("ranks", f"all {self._size} joined, on {hosts} host{'s' * (hosts > 1)}")]
        remedy = (
            "look at its output: was it started, with the same number of workers, and does its "
            "host reach MASTER_ADDR?"
        )
        return [
            _about_rank(rank, f"hasn't joined within {self._timeout:g} s", remedy)
            for rank in absent
        ]


def _mute(facts: RankFacts) -> Finding:
    return fail(
        "ranks",
        f"{facts.label} joined, and then stopped answering",
        "look at its output, and whether its host is busy or its process is stopped",
        [facts],
        named=True,
    )
