"""All checks, by all workers of a run together: everybody tells its facts, calls everybody, sends
flows in turn; rank 0 gathers and judges.

A rank that doesn't come, or stops answering, is a finding as well. Nothing waits without an end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any

from thalweg.doctor import own
from thalweg.doctor.board import Board
from thalweg.doctor.environment import summary
from thalweg.doctor.finding import Finding, summed_up
from thalweg.doctor.leader import Leader, follow
from thalweg.doctor.listener import Clock, Listener
from thalweg.errors import RunError, ThalwegError
from thalweg.runtime import World
from thalweg.runtime.launch import find_seat

Progress = Callable[[int, int], None]


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
    seat = find_seat(os.environ)
    mine = own.look(seat)
    found: list[Finding] | None = mine.findings
    if seat.size > 1:
        try:
            found = _together(mine, timeout, progress, clock)
        except ThalwegError as error:
            own_ones = [finding.at(seat.rank, mine.facts.name) for finding in mine.findings]
            found = [_no_store(error), *own_ones]
    return Diagnosis(
        findings=summed_up([summary(mine.environment), *(found or ())]),
        environment=mine.environment,
        tells=found is not None,
        workers=seat.size,
        launcher=seat.launcher,
    )


def _no_store(error: ThalwegError) -> Finding:
    return Finding(check="store", verdict="fail", detail=error.problem, remedy=error.remedy)


def _together(
    mine: own.Own, timeout: float, progress: Progress, clock: Clock
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
            secret=world.protection.fingerprint if mine.secret_is_readable else None,
            findings=[finding.packed() for finding in mine.findings],
        )
        board = Board(world)
        board.put(f"facts/{world.rank}", facts.packed())
        if world.rank == 0:
            return Leader(board, facts, world.size, timeout, progress, clock).lead()
        return follow(board, facts, timeout, clock)
