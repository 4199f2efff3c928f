"""Large groups: moves are made rank by rank, and a check holds none of them."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.schedules.test_topologies import VARIANTS, build
from thalweg.facts import Cluster
from thalweg.schedules import Group, Move, check


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_makes_only_its_own_moves(variant: str) -> None:
    schedule = build(variant, Group.everybody(Cluster.flat(64)), 64_000)
    asked: list[int] = []

    def noted(rank: int) -> Iterator[Move]:
        asked.append(rank)
        return schedule.program(rank)

    list(replace(schedule, program=noted).moves(7))
    assert asked == [7]


def test_a_rank_of_a_large_ring_is_cheap() -> None:
    """100,000 ranks: one rank's first moves, without building the rest."""
    schedule = build("ring", Group.everybody(Cluster.flat(100_000)), 400_000)
    tracemalloc.start()
    moves = schedule.moves(50_000)
    first = [next(moves) for _ in range(4)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {move.peer for move in first} == {49_999, 50_001}
    assert peak < 100_000


def test_checking_holds_no_moves() -> None:
    schedule = build("ring", Group.everybody(Cluster.flat(128)), 128 * 100)
    tracemalloc.start()
    check(schedule)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    moves = 128 * 4 * 127
    assert peak < moves * 56, "less than one bare tuple for each move"


@pytest.mark.slow
def test_a_ring_of_1024_in_a_gigabyte() -> None:
    program = (
        "import resource\n"
        "from thalweg import Cluster, Group, check, parse_plan, compile_step, Workload, Size\n"
        "group = Group.everybody(Cluster.flat(1024))\n"
        "workload = Workload.of_size(Size.parse('25MB'))\n"
        "[ring] = compile_step(parse_plan('ring'), group, workload, 0).rounds\n"
        "check(ring.schedule)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 1e9  # from kilobytes
