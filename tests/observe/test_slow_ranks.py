from __future__ import annotations

from collections.abc import Callable
from random import Random

from thalweg.facts import Cluster
from thalweg.observe.records import StepReport
from thalweg.observe.slow_ranks import SlowRankDetector
from thalweg.observe.straggler import Straggler

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


def test_equal_ranks_have_no_stragglers() -> None:
    for seed in range(20):
        assert not any(names(watched(noisy(seed), 60)).values())


def test_a_single_long_step_makes_no_straggler() -> None:
    plain = noisy(1)
    found = watched(lambda r, s: plain(r, s) + (5.0 if (r, s) == (2, 30) else 0.0), 60)
    assert not any(names(found).values())


def test_a_slow_rank_is_found_and_resolved_within_a_few_steps() -> None:
    plain = noisy(2)
    found = names(watched(lambda r, s: plain(r, s) + 0.2 * (r == 5 and 20 <= s < 50), 80))
    assert [step for step in found if found[step] == {5}] == list(range(25, 54))
    assert not any(found[step] for step in (*range(25), *range(54, 80)))


def test_a_rank_that_is_slow_from_the_start_is_found() -> None:
    plain = noisy(3)
    found = watched(lambda r, s: plain(r, s) + 0.2 * (r == 0), 20)
    assert names(found)[19] == {0}
    [slow] = found[19]
    assert 0.2 < slow.seconds < 0.22  # what a step lost
    assert 0.5 < slow.share < 1.0


def test_of_two_ranks_the_slower_is_the_straggler() -> None:
    plain = noisy(4)
    found = watched(lambda r, s: plain(r, s) + 0.1 * (r == 1), 20, ranks=2)
    assert names(found)[19] == {1}


def test_several_may_be() -> None:
    plain = noisy(5)
    found = watched(lambda r, s: plain(r, s) + 0.3 * (r in (1, 6)), 20)
    assert names(found)[19] == {1, 6}


def test_an_occasional_straggler_is_found_if_the_others_are_none() -> None:
    def computing(rank: int, step: int) -> float:
        return 0.06 + (1.0 if rank == 3 and step % 9 == 0 else 0.0)

    found = watched(computing, 80)
    assert names(found)[79] == {3}
    assert found[79][0].steps < 0.2


def test_no_straggler_if_all_ranks_are_occasionally_slow() -> None:
    def computing(rank: int, step: int) -> float:
        return 0.06 + (1.0 if Random(f"{rank}/{step}").random() < 0.1 else 0.0)

    assert not any(names(watched(computing, 120)).values())


def test_noise_of_a_busy_machine_makes_no_straggler() -> None:
    """Steps that vary by as much as they take."""
    for seed in range(10):
        found = names(watched(noisy(seed, usual=0.005, noise=0.03), 60))
        assert not any(found.values())
