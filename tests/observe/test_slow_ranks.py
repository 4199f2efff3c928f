from __future__ import annotations

from collections.abc import Callable
from random import Random

from thalweg.facts import Cluster
from thalweg.observe import StepReport, Straggler
from thalweg.observe.slow_ranks import SlowRankDetector

Computing = Callable[[int, int], float]
"""Of a rank at a step."""


def watched(computing: Computing, steps: int, ranks: int = 8) -> dict[int, list[Straggler]]:
    """The slow ranks after each step; those of one step are given to the detector at the next."""
    detector = SlowRankDetector(Cluster.flat(ranks))
    named: dict[int, int] = {}
    found = {}
    for step in range(steps):
        longest = max(computing(rank, step) for rank in range(ranks))
        for rank in range(ranks):
            seconds = longest + 0.05
            detector.add(rank, StepReport(step, seconds, computing(rank, step), 0.0, 0.0, ()))
        found[step] = detector.slow(named)
        named = {slow.ranks[0]: slow.since for slow in found[step]}
    return found


def names(found: dict[int, list[Straggler]]) -> dict[int, set[int]]:
    return {step: {slow.ranks[0] for slow in slows} for step, slows in found.items()}


def noisy(seed: int, *, usual: float = 0.06, noise: float = 0.01) -> Computing:
    return lambda rank, step: usual + noise * Random(f"{seed}/{rank}/{step}").random()


def test_nobody_is_late_where_all_are_alike() -> None:
    for seed in range(20):
        assert not any(names(watched(noisy(seed), 60)).values())


def test_a_single_long_step_names_nobody() -> None:
    plain = noisy(1)
    found = watched(lambda r, s: plain(r, s) + (5.0 if (r, s) == (2, 30) else 0.0), 60)
    assert not any(names(found).values())


def test_who_becomes_slow_is_named_soon_and_let_off_soon() -> None:
    plain = noisy(2)
    found = names(watched(lambda r, s: plain(r, s) + 0.2 * (r == 5 and 20 <= s < 50), 80))
    assert [step for step in found if found[step] == {5}] == list(range(25, 54))
    assert not any(found[step] for step in (*range(25), *range(54, 80)))


def test_who_is_slow_from_the_start_too() -> None:
    plain = noisy(3)
    found = watched(lambda r, s: plain(r, s) + 0.2 * (r == 0), 20)
    assert names(found)[19] == {0}
    [slow] = found[19]
    assert 0.2 < slow.seconds < 0.22  # what a step lost
    assert 0.5 < slow.share < 1.0


def test_of_two_the_slower_is_late() -> None:
    plain = noisy(4)
    found = watched(lambda r, s: plain(r, s) + 0.1 * (r == 1), 20, ranks=2)
    assert names(found)[19] == {1}


def test_several_may_be() -> None:
    plain = noisy(5)
    found = watched(lambda r, s: plain(r, s) + 0.3 * (r in (1, 6)), 20)
    assert names(found)[19] == {1, 6}


def test_who_is_late_now_and_then_is_named_where_others_are_not() -> None:
    def computing(rank: int, step: int) -> float:
        return 0.06 + (1.0 if rank == 3 and step % 9 == 0 else 0.0)

    found = watched(computing, 80)
    assert names(found)[79] == {3}
    assert found[79][0].steps < 0.2


def test_where_all_are_late_now_and_then_nobody_is_named() -> None:
    def computing(rank: int, step: int) -> float:
        return 0.06 + (1.0 if Random(f"{rank}/{step}").random() < 0.1 else 0.0)

    assert not any(names(watched(computing, 120)).values())


def test_what_a_restless_machine_does_names_nobody() -> None:
    """Steps that vary by as much as they take."""
    for seed in range(10):
        found = names(watched(noisy(seed, usual=0.005, noise=0.03), 60))
        assert not any(found.values())
