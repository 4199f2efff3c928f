"""A sound history passes every check, and each check finds what was doctored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.histories import (
    BATCH,
    DIED,
    KILL,
    LAST,
    checksum,
    digest,
    doctored,
    history_of,
    is_commit,
    sound,
    without,
)
from thalweg.chaos.checks import liveness, membership_epochs, replica_state, step_order
from thalweg.chaos.checks.invariants import named, violations
from thalweg.chaos.exact_job import CHECKPOINT_PERIOD_STEPS
from thalweg.chaos.fault import Fault
from thalweg.chaos.history import (
    Commit,
    Ended,
    Healed,
    History,
    Lost,
    Named,
    Record,
    Recovered,
    Refused,
    Saved,
    Starved,
    Struck,
    Violation,
)
from thalweg.chaos.recovery_times import fault_times
from thalweg.facts import Cluster

CLUSTER = Cluster.flat(3)
DIGESTS = {step: digest(step) for step in range(1, LAST + 1)}
CHECKSUMS = {step: checksum(step) for step in range(1, LAST + 1)}
BOUND = 2.0  # seconds


def all_of(history: History, sync: str = "ring") -> list[Violation]:
    return violations(
        history,
        fault_times(history, CLUSTER),
        sync=sync,
        batch=BATCH,
        expected=iter([(DIGESTS[step], CHECKSUMS[step]) for step in DIGESTS]),
        recovery_limit=BOUND,
    )


@pytest.mark.parametrize(
    "sync", ["ring", "ring+powersgd(rank=2)", "dssync+int8", "codedreduce(fanout=2, stragglers=1)"]
)
def test_nothing_is_found_where_all_is_well(sync: str) -> None:
    assert all_of(sound(), sync) == []


def test_a_history_that_is_full_fails_the_run() -> None:
    history = sound()
    history.is_full = True
    [found] = all_of(history)
    assert (found.check, found.text.startswith("records after the first 2000000")) == (
        "history",
        True,
    )


# Members


def alone(formation: int, members: tuple[int, ...], *steps: int) -> History:
    """Rank 1 wasn't killed, and commits these steps too, each just after rank 2."""
    events: list[Record] = []
    for event in sound().events:
        lived = isinstance(event, Commit | Ended | Named) and event.rank == 1
        events.append(replace(event, life=0) if lived else event)
        if isinstance(event, Commit) and event.rank == 2 and event.step in steps:
            own = {"rank": 1, "life": 0, "time": event.time + 0.001}
            events.append(replace(event, formation=formation, members=members, **own))
    return history_of(events, replace(KILL, kind="pause"))


def found_in(history: History, under_way: int = 1) -> list[str]:
    return [
        violation.text
        for violation in named("members", membership_epochs.one_epoch_at_a_time(history, under_way))
    ]


def test_two_groups_call_themselves_the_same_epoch() -> None:
    history = alone(2, (1,), 5, 6, 7, 8)
    assert found_in(history) == ["membership epoch 2 consists of ranks 0, 2 and also of rank 1"]
    assert "members" in {violation.check for violation in all_of(history)}


def test_two_groups_go_on_that_have_no_member_in_common() -> None:
    """Rank 1 alone is epoch 3, and all together are epoch 4."""
    events = alone(3, (1,), 5, 6, 7, 8).events
    moved = [replace(e, formation=4) if isinstance(e, Commit) and e.step > 8 else e for e in events]
    apart, *left_out = found_in(history_of(moved))
    assert apart == ("membership epochs 2 (ranks 0, 2) and 3 (rank 1) have no member in common")
    assert left_out == [
        f"rank {rank} commits step {step} in membership epoch 2 after its eviction"
        for rank, step in ((0, 7), (2, 7))
    ]


def test_one_that_is_no_member_commits() -> None:
    [found] = found_in(doctored(is_commit(2, 3), rank=3))
    assert found == "rank 3 commits in membership epoch 1 and isn't a member"


def test_a_process_returns_to_an_earlier_epoch() -> None:
    back, came = found_in(doctored(is_commit(2, 7), formation=1, members=(0, 1, 2)))
    assert back == "rank 2 returns from membership epoch 2 to 1 at step 7"
    assert came == "rank 2 commits step 7 in membership epoch 1 after it had joined epoch 2"


@pytest.mark.parametrize(("under_way", "beyond"), [(1, ["6"]), (2, ["7"]), (4, [])])
def test_what_was_under_way_may_be_ended_by_one_that_is_left_out(
    under_way: int, beyond: list[str]
) -> None:
    history = alone(1, (0, 1, 2), 5, 6, 7, 8)
    text = "rank 1 commits step {} in membership epoch 1 after its eviction"
    assert found_in(history, under_way) == [text.format(step) for step in beyond]


@pytest.mark.parametrize(
    ("sync", "steps"),
    [("ring", 1), ("local_sgd(every=3)", 3), ("gc(stragglers=1)", 4), ("dssync", 4)],
)
def test_how_much_that_is_follows_from_the_plan(sync: str, steps: int) -> None:
    for more in (0, 1) if steps < 4 else (0,):
        history = alone(1, (0, 1, 2), *range(5, 5 + steps + more))
        checks = [violation.check for violation in all_of(history, sync)]
        assert checks.count("members") == more


def test_a_process_whose_rank_was_given_to_another_goes_on() -> None:
    events = [replace(e, process=7) if isinstance(e, Commit) else e for e in sound().events]
    second = [replace(e, process=8) if is_commit(2, 6)(e) else e for e in events]
    assert found_in(history_of(second)) == [
        f"rank 2 commits step {step} in a process that was replaced" for step in range(7, LAST + 1)
    ]
    again = [replace(e, process=8) if is_commit(2, LAST)(e) else e for e in events]
    assert found_in(history_of(again)) == []


# Replicas


def test_one_replica_differs() -> None:
    found = named("equal", replica_state.equal(doctored(is_commit(2, 6), digest="other")))
    assert [f.text for f in found] == [
        "after step 6 of membership epoch 2: rank 0 after-6, rank 2 other"
    ]


def test_the_last_replicas_differ() -> None:
    changed = doctored(lambda e: isinstance(e, Ended) and e.rank == 2, digest="other")
    [found] = named("equal", replica_state.equal(changed))
    assert "at the end" in found.text


def test_all_replicas_are_equally_wrong() -> None:
    wrong = doctored(lambda e: isinstance(e, Commit) and e.step >= 6, digest="other")
    found = named("foretold", replica_state.as_expected(wrong, DIGESTS))
    assert {(f.check, f.text.split(" of membership epoch")[0]) for f in found} == {
        ("foretold", "rank 0 holds other after step 6"),
        ("foretold", "rank 2 holds other after step 6"),
        ("foretold", "rank 1 holds other after step 9"),
    }


def test_a_step_that_was_redone_by_others_is_no_violation_under_a_lossy_plan() -> None:
    """Rank 1 had committed step 5 of membership epoch 1 and was cut off; the others redid it."""
    events = list(sound().events)
    before = next(e for e in events if is_commit(1, DIED)(e))
    assert isinstance(before, Commit)
    at = events.index(before) + 1
    events.insert(at, replace(before, step=DIED + 1, digest="its own", time=before.time + 0.3))
    assert named("equal", replica_state.equal(history_of(events))) == []
    assert named("foretold", replica_state.as_expected(history_of(events), DIGESTS))


def test_the_mean_moves() -> None:
    [found] = named(
        "mean", replica_state.mean_preserved(doctored(is_commit(0, 3), after=(3.5, -1.0)))
    )
    assert "after step 3 of membership epoch 1" in found.text


@pytest.mark.parametrize("how", [{"began_in": 1}, {"interrupted": True}])
def test_an_averaging_that_was_interrupted_may_move_the_mean(how: dict[str, Any]) -> None:
    changed = doctored(is_commit(0, 5), after=(3.5, -1.0), **how)
    assert named("mean", replica_state.mean_preserved(changed)) == []


def test_a_replica_runs_away() -> None:
    events = [
        replace(e, after=(e.after[0] + e.rank * (1000.0 if e.step == 7 else 0.1), e.after[1]))
        if isinstance(e, Commit)
        else e
        for e in sound().events
    ]
    [found] = named("drift", replica_state.close(history_of(events)))
    assert "after step 7" in found.text


def test_replicas_that_are_mostly_equal_may_differ_by_what_their_own_steps_do() -> None:
    """As under gossip: four meet in two steps, and three never all at once."""
    events = [
        replace(e, after=e.before) if isinstance(e, Commit) and e.step == 3 else e
        for e in sound().events
    ]
    assert named("drift", replica_state.close(history_of(events))) == []


# Steps


def test_a_step_is_lost() -> None:
    [found] = named("steps", step_order.in_order(without(is_commit(0, 3))))
    assert found.text.startswith("rank 0 skipped steps between 2 (membership epoch 1) and 4")


def test_under_a_code_steps_may_come_from_others() -> None:
    assert named("steps", step_order.in_order(without(is_commit(0, 3)), jumps=True)) == []


def test_a_step_is_applied_twice() -> None:
    events = list(sound().events)
    again = next(e for e in events if is_commit(0, 3)(e))
    events.insert(events.index(again) + 1, again)
    [found] = named("steps", step_order.in_order(history_of(events)))
    assert "rank 0 repeated steps between 3" in found.text


def test_who_goes_back_must_have_been_let_in() -> None:
    """Rank 2 takes step 8 again in epoch 3, and nothing says that it joined."""
    changed = doctored(is_commit(2, 9), step=8)
    found = named("steps", step_order.in_order(changed))
    assert found
    assert "rank 2 repeated" in found[0].text


def test_samples_are_missing() -> None:
    [found] = named(
        "samples", step_order.batches_whole(doctored(is_commit(2, 6), samples=2), BATCH, CHECKSUMS)
    )
    assert "read 5 samples at step 6" in found.text


def test_samples_are_others() -> None:
    found = named(
        "samples", step_order.batches_whole(doctored(is_commit(2, 6), checksum=1), BATCH, CHECKSUMS)
    )
    assert [f.check for f in found] == ["samples"]


def test_samples_that_were_lost_with_a_rank_that_left_must_be_reported() -> None:
    changed = doctored(is_commit(2, DIED + 1), samples=2)
    assert named("samples", step_order.batches_whole(changed, BATCH, CHECKSUMS))
    reported = [replace(e, lost=1) if isinstance(e, Named) else e for e in changed.events]
    assert named("samples", step_order.batches_whole(history_of(reported), BATCH, CHECKSUMS)) == []
    later = doctored(is_commit(2, DIED + 2), samples=2)
    reported = [replace(e, lost=1) if isinstance(e, Named) else e for e in later.events]
    assert named("samples", step_order.batches_whole(history_of(reported), BATCH, CHECKSUMS))


def test_a_batch_that_not_all_ranks_reported_isnt_checked() -> None:
    assert (
        named("samples", step_order.batches_whole(without(is_commit(2, 6)), BATCH, CHECKSUMS)) == []
    )


# Promptness


def test_how_long_a_fault_was_felt() -> None:
    [each] = fault_times(sound(), CLUSTER)
    assert each.detected == pytest.approx(0.7)
    assert each.stall_seconds == pytest.approx(6.0 - 4.5, abs=0.01)
    assert each.rejoin_seconds == pytest.approx(10.0 - 9.1, abs=0.01)


def test_the_others_go_on_late() -> None:
    found = named("progress", liveness.progress(fault_times(sound(), CLUSTER), recovery_limit=1.0))
    assert [f.text for f in found] == [
        "fault 0: kill rank 1 for 4 s: the other ranks stalled for 1.5 s"
    ]


def test_it_is_back_late() -> None:
    early = doctored(lambda e: isinstance(e, Healed), time=5.5)
    found = named("progress", liveness.progress(fault_times(early, CLUSTER), recovery_limit=BOUND))
    assert [f.text for f in found] == [
        "fault 0: kill rank 1 for 4 s: rank 1 rejoined 4.5 s after it ended"
    ]


def test_one_that_was_left_out_stays_away_by_itself() -> None:
    late = [replace(e, time=5.5) if isinstance(e, Healed) else e for e in sound().events]
    reported = [
        replace(e, reason="rank 1 is not reached by others") if isinstance(e, Named) else e
        for e in late
    ]
    assert named(
        "progress", liveness.progress(fault_times(history_of(late), CLUSTER), recovery_limit=BOUND)
    )
    assert (
        named(
            "progress",
            liveness.progress(fault_times(history_of(reported), CLUSTER), recovery_limit=BOUND),
        )
        == []
    )


def test_it_is_never_well_again() -> None:
    lost = without(lambda e: isinstance(e, Recovered))
    found = named("progress", liveness.progress(fault_times(lost, CLUSTER), recovery_limit=100.0))
    assert [f.fault for f in found] == [0]


def test_nobody_names_the_culprit() -> None:
    silent = without(lambda e: isinstance(e, Named))
    [found] = named("culprit", liveness.causes_reported(silent, fault_times(silent, CLUSTER)))
    assert found.text == "fault 0: kill rank 1 for 4 s: no rank reported rank 1"


def test_another_is_named() -> None:
    wrong = doctored(lambda e: isinstance(e, Named) and e.formation == 2, left=(2,))
    found = named("culprit", liveness.causes_reported(wrong, fault_times(wrong, CLUSTER)))
    assert any("reported rank 2" in f.text and "but no fault had hit" in f.text for f in found)


def test_somebody_is_named_long_after() -> None:
    events = sound().events
    late = next(e for e in events if isinstance(e, Named) and e.left)
    events.append(replace(late, noticed=19.0, time=19.1))
    found = named(
        "culprit",
        liveness.causes_reported(history_of(events), fault_times(history_of(events), CLUSTER)),
    )
    assert ["but no fault had hit" in f.text for f in found] == [True]


def test_a_machine_that_let_nobody_run_is_a_cause() -> None:
    events = sound().events
    late = next(e for e in events if isinstance(e, Named) and e.left)
    events.append(replace(late, noticed=19.0, time=19.1, left=(2,)))
    assert named(
        "culprit",
        liveness.causes_reported(history_of(events), fault_times(history_of(events), CLUSTER)),
    )
    events.append(Starved(time=18.9, rank=2, seconds=1.2))
    assert (
        named(
            "culprit",
            liveness.causes_reported(history_of(events), fault_times(history_of(events), CLUSTER)),
        )
        == []
    )


def test_a_moments_absence_may_pass_unnoticed_under_a_code() -> None:
    fault = replace(KILL, hold=0.1)
    silent = [e for e in sound().events if not isinstance(e, Named)]
    history = history_of(silent, fault)
    assert named("culprit", liveness.causes_reported(history, fault_times(history, CLUSTER)))
    assert (
        named(
            "culprit",
            liveness.causes_reported(history, fault_times(history, CLUSTER), missed=False),
        )
        == []
    )


# Checkpoints

FULL = Fault(number=0, kind="disk", after=0.1, hold=4.0)
NO_ROOM = "can't write checkpoint c/step-00000020: No space left on device; make room there"


def disk_history(*reported: Refused | Saved) -> History:
    """In which a checkpoint is due while the disk is full."""
    first = next(e for e in sound().events if isinstance(e, Commit))
    steps = range(CHECKPOINT_PERIOD_STEPS + 2)
    commits = [replace(first, time=3.0 + 4.0 * n / len(steps), step=1 + n) for n in steps]
    marks = [Struck(time=3.0, fault=0), Healed(time=7.0, fault=0), Recovered(time=8.0, fault=0)]
    return history_of([*commits, *marks, *reported], FULL)


def problems_in(history: History) -> list[str]:
    return [
        found.text
        for found in named(
            "checkpoints", liveness.checkpoints(history, fault_times(history, CLUSTER))
        )
    ]


def test_a_full_disk_is_reported() -> None:
    refused = Refused(time=4.0, rank=0, text=NO_ROOM)
    saved = Saved(time=9.0, rank=0, step=40)
    assert problems_in(disk_history(refused, saved)) == []
    assert "no rank reported" in problems_in(disk_history(saved))[0]
    seldom = [e for e in disk_history(saved).events if not isinstance(e, Commit) or e.step % 2]
    assert problems_in(history_of(seldom, FULL)) == []  # none was due
    early = Saved(time=1.0, rank=0, step=20)
    assert "no checkpoint was written afterwards" in problems_in(disk_history(refused, early))[0]


def test_a_damaged_checkpoint_is_refused() -> None:
    flipped = Fault(number=0, kind="corrupt", after=0.1)
    commits = [e for e in sound().events if isinstance(e, Commit)]
    marks = [Struck(time=3.0, fault=0), Healed(time=3.0, fault=0), Recovered(time=4.0, fault=0)]
    named = Refused(time=3.0, fault=0, text="checkpoint c/step-00000020 is damaged: ...")
    assert problems_in(history_of([*commits, *marks, named], flipped)) == []
    taken = replace(named, text="it was read without an error")
    assert "wasn't rejected" in problems_in(history_of([*commits, *marks, taken], flipped))[0]


# All together


def test_a_lost_run_is_a_violation() -> None:
    history = sound()
    history.add(Lost(time=21.0, reason="rank 2 ended; look"))
    assert [str(found) for found in all_of(history)] == ["lost: rank 2 ended; look"]


def test_each_promise_has_its_checks() -> None:
    apart = doctored(lambda e: isinstance(e, Commit) and e.rank == 2, digest="other")
    checks = {
        sync: {found.check for found in all_of(apart, sync)}
        for sync in ("ring", "ring+powersgd(rank=2)", "dssync")
    }
    assert checks == {
        "ring": {"equal", "foretold"},
        "ring+powersgd(rank=2)": {"equal"},
        "dssync": set(),
    }
