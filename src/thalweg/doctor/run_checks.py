"""All checks, by all workers of a run together. Rank 0 waits for everybody's facts, has all call
each other, orders flows, and judges. The others call everybody, then send flows as they are told,
until it is over.

A rank that doesn't come, or stops answering, is a finding as well. Nothing waits without an end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import Any

from thalweg.doctor import bandwidth, limits, name_resolution, processor, reachability, versions
from thalweg.doctor.environment import summary
from thalweg.doctor.finding import Finding, RankFacts, by_host, concerning, summed_up
from thalweg.doctor.local_checks import LocalReport, local_report
from thalweg.doctor.ping import PING_OK, PingResult, max_ping_seconds, peers_of, ping_all, send_flow
from thalweg.doctor.ping_server import Clock, Listener
from thalweg.doctor.store_exchange import StoreExchange
from thalweg.errors import RunError, ThalwegError
from thalweg.facts import about
from thalweg.launch.rank_assignment import read_rank_assignment
from thalweg.members.world import World

Progress = Callable[[int, int], None]
LEADER_MARGIN_SECONDS = 10.0  # seconds for rank 0 beyond its own deadlines
FLOWS_TIMEOUT_SECONDS = 60.0  # seconds for all of them
FLOW_REPLY_TIMEOUT_SECONDS = 3.0  # seconds for a flow to be answered
DOCTOR_OVER_ORDER = "over"
DOCTOR_LEAVE_TIMEOUT_SECONDS = 3.0  # seconds for the others to hear that it is over
MAX_CLOCK_SKEW_SECONDS = 0.1  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`tells`: this rank has something to say, as rank 0 has, or whoever can't reach it."""

    findings: Sequence[Finding]
    environment: Mapping[str, Any]
    tells: bool
    workers: int
    launcher: str

    def packed(self) -> dict[str, Any]:
        return {
            "findings": [finding.packed() for finding in self.findings],
            "environment": dict(self.environment),
            "tells": self.tells,
            "workers": self.workers,
            "launcher": self.launcher,
        }

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Diagnosis:
        findings = [Finding.unpacked(packed) for packed in content["findings"]]
        return cls(**{**content, "findings": findings})


def examine(
    timeout: float, progress: Progress = lambda done, total: None, clock: Clock = time
) -> Diagnosis:
    """As one worker of a launcher's, or alone. `timeout` seconds for the others to come."""
    assignment = read_rank_assignment(os.environ)
    mine = local_report(assignment)
    found: list[Finding] | None = mine.findings
    if assignment.size > 1:
        try:
            found = _together(mine, timeout, progress, clock)
        except ThalwegError as error:
            own_ones = [finding.at(assignment.rank, mine.facts.name) for finding in mine.findings]
            found = [_no_store(error), *own_ones]
    return Diagnosis(
        findings=summed_up([summary(mine.environment), *(found or ())]),
        environment=mine.environment,
        tells=found is not None,
        workers=assignment.size,
        launcher=assignment.launcher,
    )


def _no_store(error: ThalwegError) -> Finding:
    return Finding(check="store", verdict="fail", detail=error.problem, remedy=error.remedy)


def _together(
    mine: LocalReport, timeout: float, progress: Progress, clock: Clock
) -> list[Finding] | None:
    """What is found; None if rank 0 tells it."""
    world = World.join(timeout, mine.variables)
    try:
        listener = Listener(world.rank, world.address, clock)
    except OSError as error:
        raise RunError(
            f"rank {world.rank} can't listen at {world.address}: {error.strerror}",
            "name another interface: THALWEG_IFNAME",
        ) from None
    with listener:
        facts = replace(
            mine.facts,
            port=listener.port,
            token=listener.token,
            secret=world.security.fingerprint if mine.secret_is_readable else None,
            findings=[finding.packed() for finding in mine.findings],
        )
        exchange = StoreExchange(world)
        exchange.put(f"facts/{world.rank}", facts.packed())
        if world.rank == 0:
            return Leader(exchange, facts, world.size, timeout, progress, clock).lead()
        return follow(exchange, facts, timeout, clock)


def follow(
    exchange: StoreExchange, own: RankFacts, timeout: float, clock: Clock
) -> list[Finding] | None:
    """None: rank 0 tells what was found."""
    roster = exchange.get("roster", monotonic() + timeout + LEADER_MARGIN_SECONDS)
    if roster is None:
        return [
            *own.own_findings(),
            _no_leader(own, f"come within {timeout + LEADER_MARGIN_SECONDS:g} s"),
        ]
    present = {facts.rank: facts for facts in map(RankFacts.unpacked, roster)}
    peers = [present[rank] for rank in peers_of(own.rank, list(present))]
    exchange.put(f"calls/{own.rank}", [ping.packed() for ping in ping_all(own.rank, peers, clock)])
    silence = max_ping_seconds(len(peers)) + FLOWS_TIMEOUT_SECONDS + 3 * LEADER_MARGIN_SECONDS
    turn = 0
    while True:
        order = exchange.get(f"order/{own.rank}/{turn}", monotonic() + silence)
        if order is None:
            return [
                *own.own_findings(),
                _no_leader(own, f"said anything for {silence:g} s"),
            ]
        if order == DOCTOR_OVER_ORDER:
            exchange.put(f"left/{own.rank}", True)
            return None
        rate = send_flow(present[order["peer"]], order["seconds"], FLOW_REPLY_TIMEOUT_SECONDS)
        exchange.put(f"answer/{own.rank}/{turn}", {"rate": rate})
        turn += 1


def _no_leader(own: RankFacts, what: str) -> Finding:
    return Finding(
        check="ranks",
        verdict="fail",
        detail=f"rank 0 hasn't {what}, says {own.label}",
        remedy="look at the output of rank 0, and whether it was started",
        ranks=(0,),
        names_them=True,
    )


class Leader:
    def __init__(
        self,
        exchange: StoreExchange,
        own: RankFacts,
        size: int,
        timeout: float,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._board = exchange
        self._own = own
        self._size = size
        self._timeout = timeout
        self._progress = progress
        self._clock = clock
        self._turns: Counter[int] = Counter()  # orders that each rank was given

    def lead(self) -> list[Finding]:
        """All that was found, about all ranks."""
        ranks = self._gather_facts()
        pings, mute = self._calls(ranks)
        speakers = [there[0] for there in by_host(ranks).values()]
        speakers = [facts for facts in speakers if facts.rank not in mute]
        trips = {(c.caller, c.peer): c.trip for c in pings if c.outcome == PING_OK}
        measured, silent, left_out = self._flows(speakers, trips)
        findings = [
            *self._absent(ranks),
            *(_mute(facts) for facts in ranks if facts.rank in mute),
            *(finding for facts in ranks for finding in facts.own_findings()),
            *name_resolution.traps(ranks),
            *reachability.unreachable(ranks, pings),
            *bandwidth.rate_findings(speakers, measured, silent),
            *skew(ranks, pings),
            *versions.version_findings(ranks),
            *versions.secrets(ranks),
            *limits.buffers_for(ranks, measured, trips),
            *processor.threads(ranks),
        ]
        if left_out:
            findings.append(_left_out(left_out))
        self._end(ranks)
        return findings

    def _gather_facts(self) -> list[RankFacts]:
        """Everybody who comes in time; all learn who that is."""
        keys = [f"facts/{rank}" for rank in range(self._size)]
        deadline = monotonic() + self._timeout
        found = self._board.gather(keys, deadline, lambda n: self._progress(n, 2 * self._size))
        ranks = [RankFacts.unpacked(found[key]) for key in keys if key in found]
        self._board.put("roster", [facts.packed() for facts in ranks])
        return ranks

    def _calls(self, ranks: list[RankFacts]) -> tuple[list[PingResult], set[int]]:
        """Everybody's, and who didn't tell theirs."""
        known = {facts.rank: facts for facts in ranks}
        peers = [known[rank] for rank in peers_of(0, list(known))]
        pings = ping_all(0, peers, self._clock)
        keys = {f"calls/{rank}": rank for rank in known if rank != 0}
        deadline = monotonic() + max_ping_seconds(len(peers)) + LEADER_MARGIN_SECONDS
        told = self._board.gather(keys, deadline)
        pings += [PingResult(**call) for key in told for call in told[key]]
        return pings, {rank for key, rank in keys.items() if key not in told}

    def _flows(
        self, speakers: list[RankFacts], trips: dict[bandwidth.Flow, float]
    ) -> tuple[dict[bandwidth.Flow, float], list[bandwidth.Flow], int]:
        """Rates in bits per second, flows that nobody told the rate of, how many there wasn't time
        for."""
        known = {facts.rank: facts for facts in speakers}
        ends = frozenset(flow for flow in trips if set(flow) <= known.keys())
        turns = bandwidth.turns(list(known), ends)
        seconds = bandwidth.seconds_of([trips[flow] for flow in ends])
        deadline = monotonic() + FLOWS_TIMEOUT_SECONDS
        measured: dict[bandwidth.Flow, float] = {}
        silent: list[bandwidth.Flow] = []
        left_out = 0
        for number, turn in enumerate(turns):
            if monotonic() > deadline:
                left_out = sum(map(len, turns[number:]))
                break
            self._turn(turn, seconds, known, measured, silent)
            self._progress(self._size + number, self._size + len(turns))
        for flow in 2 * bandwidth.slow_flows(measured)[: bandwidth.MAX_REPEATED_FLOWS]:
            if flow in bandwidth.slow_flows(measured) and monotonic() < deadline:
                again: dict[bandwidth.Flow, float] = {}
                self._turn([flow], seconds, known, again, [])
                measured[flow] = max(measured[flow], again.get(flow, 0.0))
        return measured, silent, left_out

    def _turn(
        self,
        turn: list[bandwidth.Flow],
        seconds: float,
        known: dict[int, RankFacts],
        measured: dict[bandwidth.Flow, float],
        silent: list[bandwidth.Flow],
    ) -> None:
        """These flows at once."""
        keys: dict[str, bandwidth.Flow] = {}
        own: bandwidth.Flow | None = None
        for flow in turn:
            if flow[0] == 0:
                own = flow
                continue
            number = self._turns[flow[0]]
            self._turns[flow[0]] += 1
            keys[f"answer/{flow[0]}/{number}"] = flow
            order = {"peer": flow[1], "seconds": seconds}
            self._board.put(f"order/{flow[0]}/{number}", order)
        found = {}
        if own is not None:
            found[own] = send_flow(known[own[1]], seconds, FLOW_REPLY_TIMEOUT_SECONDS)
        told = self._board.gather(keys, monotonic() + seconds + 2 * FLOW_REPLY_TIMEOUT_SECONDS)
        found |= {flow: told.get(key, {}).get("rate") for key, flow in keys.items()}
        for flow, rate in found.items():
            if rate is None:
                silent.append(flow)
            else:
                measured[flow] = rate

    def _end(self, ranks: list[RankFacts]) -> None:
        """The store may be this process's: the others are to hear it before."""
        others = [facts.rank for facts in ranks if facts.rank != 0]
        for rank in others:
            self._board.put(f"order/{rank}/{self._turns[rank]}", DOCTOR_OVER_ORDER)
        self._board.gather(
            [f"left/{rank}" for rank in others], monotonic() + DOCTOR_LEAVE_TIMEOUT_SECONDS
        )

    def _absent(self, ranks: list[RankFacts]) -> list[Finding]:
        here = {facts.rank for facts in ranks}
        absent = [rank for rank in range(self._size) if rank not in here]
        if not absent:
            hosts = len(by_host(ranks))
            detail = f"all {self._size} have come, on {hosts} host{'s' if hosts > 1 else ''}"
            return [Finding(check="ranks", verdict="ok", detail=detail)]
        return [
            Finding(
                check="ranks",
                verdict="fail",
                detail=f"rank {rank} hasn't come within {self._timeout:g} s",
                remedy="look at its output: was it started, with the same number of workers, and "
                "does its host reach MASTER_ADDR?",
                ranks=(rank,),
                names_them=True,
            )
            for rank in absent
        ]


def _mute(facts: RankFacts) -> Finding:
    return Finding(
        check="ranks",
        verdict="fail",
        detail=f"{facts.label} has come, and then doesn't answer",
        remedy="look at its output, and whether its host is busy or its process is stopped",
        **concerning(facts, named=True),
    )


def _left_out(flows: int) -> Finding:
    return Finding(
        check="rates",
        verdict="warn",
        detail=f"{flows} flows weren't measured within {FLOWS_TIMEOUT_SECONDS:g} s",
        remedy="measure with `thalweg probe`, which takes its time",
    )


def skew(ranks: Sequence[RankFacts], pings: Sequence[PingResult]) -> list[Finding]:
    """Of every host's clock against that of the first rank's: harmless to training, and logs then
    tell things in the wrong order. (Traces align themselves.)"""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [Finding(check="clocks", verdict="ok", detail="all ranks are on one host")]
    first, *others = hosts.values()
    found = []
    largest = 0.0
    for there in others:
        best = _shortest(first, there, pings)
        if best is None:
            continue
        ahead, doubt = best
        largest = max(largest, abs(ahead) + doubt)
        if abs(ahead) - doubt > MAX_CLOCK_SKEW_SECONDS:
            found.append(_off(there, first[0], ahead, doubt))
    within = f"within {about(largest, 's')} of {first[0].name}'s on all hosts that were reached"
    return found or [Finding(check="clocks", verdict="ok", detail=within)]


def _shortest(
    first: Sequence[RankFacts], there: Sequence[RankFacts], pings: Sequence[PingResult]
) -> tuple[float, float] | None:
    """How far `there` is ahead, and half of the shortest round trip, whoever called."""
    ours, theirs = ({facts.rank for facts in side} for side in (first, there))
    found = []
    for ping in pings:
        if ping.outcome == PING_OK and {ping.caller, ping.peer} <= ours | theirs:
            if ping.caller in ours and ping.peer in theirs:
                found.append((ping.trip, ping.ahead))
            elif ping.caller in theirs and ping.peer in ours:
                found.append((ping.trip, -ping.ahead))
    if not found:
        return None
    trip, ahead = min(found)
    return ahead, trip / 2


def _off(there: Sequence[RankFacts], first: RankFacts, ahead: float, doubt: float) -> Finding:
    way = "ahead of" if ahead > 0 else "behind"
    return Finding(
        check="clocks",
        verdict="warn",
        detail=f"the clock is {about(abs(ahead), 's')} {way} {first.name}'s (give or take "
        f"{about(doubt, 's')}): logs of the two can't be put in order",
        remedy=f"run an NTP client (chrony, systemd-timesyncd) on {there[0].name}",
        **concerning(*there),
    )
