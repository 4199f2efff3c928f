"""When the leader changes the table, and when it doesn't."""

from __future__ import annotations

from thalweg.facts import Cluster
from thalweg.schedules import ContendedLinks, Group
from thalweg.schedules.topologies import shuffle
from thalweg.training.contention_monitor import (
    COOLDOWN_STEPS,
    ContentionPolicy,
    RateSample,
)

USUAL = 12.5e6
EVEN = Group.everybody(Cluster.regular([4] * 4))
APART = ContendedLinks(racks=(("rack0", 4),))


class SimulatedRun:
    """A run as its leader sees it; whatever it proposes is taken up at the next multiple of 8."""

    def __init__(self) -> None:
        self.policy = ContentionPolicy(EVEN)
        self.group = EVEN
        self.step = 0
        self.proposed: ContendedLinks | None = None
        self.changes: list[tuple[int, ContendedLinks, str]] = []

    def run(self, steps: int, rack0: float = 1.0) -> None:
        """So many steps, with this part of the usual rate through rack 0's uplink."""
        for _ in range(steps):
            if self.proposed is not None and self.step % 8 == 0:
                self.group = Group(EVEN.ranks, EVEN.cluster, self.proposed)
                self.policy.adopt(self.proposed, self.step)
                self.proposed = None
            for averaging_group in shuffle.groups(self.group, self.step):
                order = averaging_group.group.order[:: -1 if self.step % 2 else 1]
                for i, target in enumerate(order):
                    source = order[i - 1]
                    crosses = (source < 4) != (target < 4)
                    rate = USUAL * (rack0 if crosses else 1.0)
                    self.policy.see([RateSample(self.step, source, target, rate)])
            wanted = self.policy.decide(self.step, 0.0)
            if wanted is not None:
                self.proposed, reason = wanted
                self.changes.append((self.step, *wanted))
                assert reason
            self.step += 1


def test_nothing_changes_while_nothing_is_slow() -> None:
    """A ring of four through 0.95 of the rate takes 1.5/0.95 of a pair, 1.18 of a usual step."""
    run = SimulatedRun()
    run.run(100, rack0=0.95)
    assert run.changes == []


def test_an_uplink_that_is_always_busy_leads_to_pairs() -> None:
    """A ring of four through 0.8 of the rate takes 1.5/0.8 of a pair, 1.41 of a usual step: too
    much for all at once, too little to keep the rack apart."""
    run = SimulatedRun()
    run.run(100, rack0=0.8)
    [(step, contention, reason)] = run.changes
    assert contention == ContendedLinks(pairs=True)
    assert step == COOLDOWN_STEPS
    assert reason == "an exchange between racks takes much longer than inside them"


def test_one_slow_step_is_no_reason() -> None:
    run = SimulatedRun()
    run.run(20)
    for _ in range(10):
        run.run(1, rack0=0.2)
        run.run(3)
    assert run.changes == []


def test_a_slow_rack_is_kept_apart_and_let_back() -> None:
    run = SimulatedRun()
    run.run(20)
    run.run(40, rack0=0.25)
    [(step, contention, reason)] = run.changes
    assert contention == APART
    assert step <= 25
    assert "rack0 at 25 Mbit/s (median 100 Mbit/s)" in reason
    run.run(80)
    [_, (back, nothing, _)] = run.changes
    assert not nothing
    assert back > 60


def test_what_has_become_slow_again_stays_apart_for_longer() -> None:
    run = SimulatedRun()
    run.run(16)
    pauses = []
    for _ in range(4):
        run.run(16, rack0=0.25)
        before = run.step
        while not run.changes or run.changes[-1][1]:
            run.run(1)
        run.run(9)
        pauses.append(run.step - before)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 3 * COOLDOWN_STEPS


def test_half_recovered_is_still_slow() -> None:
    run = SimulatedRun()
    run.run(16)
    run.run(16, rack0=0.25)
    run.run(120, rack0=0.7)  # more than what makes a rack slow, less than what makes it well
    assert [contention.racks != () for _, contention, _ in run.changes].count(False) == 0


def test_steps_that_compute_for_long_need_no_windows() -> None:
    policy = ContentionPolicy(EVEN)
    for step in range(8):
        for averaging_group in shuffle.groups(EVEN, step):
            order = averaging_group.group.order[:: -1 if step % 2 else 1]
            for i, target in enumerate(order):
                crosses = (order[i - 1] < 4) != (target < 4)
                policy.see([RateSample(step, order[i - 1], target, USUAL / (4 if crosses else 1))])
    hidden = policy.decide(8, busy=10 / USUAL)  # ten times what a pair takes
    assert hidden is None


def test_racks_that_meet_in_pairs_meet_all_together_again() -> None:
    run = SimulatedRun()
    run.run(40, rack0=0.75)
    assert [change.pairs for _, change, _ in run.changes] == [True]
    run.run(60)
    assert [change.pairs for _, change, _ in run.changes] == [True, False]


def test_a_rack_that_is_kept_apart_splits_nobody_else() -> None:
    run = SimulatedRun()
    run.run(16)
    run.run(16, rack0=0.25)
    run.run(80, rack0=0.7)
    assert not any(change.pairs for _, change, _ in run.changes)


def test_an_evaluation_between_two_steps_changes_nothing() -> None:
    """Computing for ten times as long would let rack 0 meet the others at every step."""
    run = SimulatedRun()
    run.run(16)
    run.run(60, rack0=0.25)
    assert [change for _, change, _ in run.changes] == [APART]
    assert run.policy.decide(run.step, 10 / USUAL) is None
    run.run(40, rack0=0.25)
    assert [change for _, change, _ in run.changes] == [APART]


def test_what_was_proposed_too_early_is_withdrawn() -> None:
    run = SimulatedRun()
    run.run(12)
    run.run(5, rack0=0.25)  # proposed, and not yet taken up
    assert run.proposed == APART
    run.run(7)
    assert run.changes[-1][1] == ContendedLinks()


def test_a_rack_that_was_not_seen_yet_is_no_reason_to_fail() -> None:
    policy = ContentionPolicy(EVEN)
    for step in range(3):
        for source in EVEN.ranks:
            for target in EVEN.ranks:
                crosses = source // 4 != target // 4
                if not crosses or 3 not in (source // 4, target // 4):
                    policy.see([RateSample(step, source, target, USUAL / (8 if crosses else 1))])
    wanted = policy.decide(3, 0.0)
    assert wanted is not None
    assert "rack3 at an unknown rate" in wanted[1]
