"""A rank that isn't rank 0: calls everybody, then sends flows as it is told, until it is over."""

from __future__ import annotations

from time import monotonic

from thalweg.doctor.board import Board
from thalweg.doctor.calling import call_all, longest_calls, peers_of, send_flow
from thalweg.doctor.facts import Facts
from thalweg.doctor.finding import Finding
from thalweg.doctor.listener import Clock

MARGIN = 10.0  # seconds for rank 0 beyond its own deadlines
LONGEST_FLOWS = 60.0  # seconds for all of them
PATIENCE = 3.0  # seconds for a flow to be answered
OVER = "over"


def follow(board: Board, own: Facts, timeout: float, clock: Clock) -> list[Finding] | None:
    """None: rank 0 tells what was found."""
    roster = board.get("roster", monotonic() + timeout + MARGIN)
    if roster is None:
        return [*own.own_findings(), _no_leader(own, f"come within {timeout + MARGIN:g} s")]
    present = {facts.rank: facts for facts in map(Facts.unpacked, roster)}
    peers = [present[rank] for rank in peers_of(own.rank, list(present))]
    board.put(f"calls/{own.rank}", [call.packed() for call in call_all(own.rank, peers, clock)])
    silence = longest_calls(len(peers)) + LONGEST_FLOWS + 3 * MARGIN
    turn = 0
    while True:
        order = board.get(f"order/{own.rank}/{turn}", monotonic() + silence)
        if order is None:
            return [
                *own.own_findings(),
                _no_leader(own, f"said anything for {silence:g} s"),
            ]
        if order == OVER:
            board.put(f"left/{own.rank}", True)
            return None
        rate = send_flow(present[order["peer"]], order["seconds"], PATIENCE)
        board.put(f"answer/{own.rank}/{turn}", {"rate": rate})
        turn += 1


def _no_leader(own: Facts, what: str) -> Finding:
    return Finding(
        check="ranks",
        verdict="fail",
        detail=f"rank 0 hasn't {what}, says {own.called}",
        remedy="look at the output of rank 0, and whether it was started",
        ranks=(0,),
        names_them=True,
    )
