"""Gradients are counted as often as asp and lgc promise; and if not, the checks find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.histories import KILL, history_of
from thalweg.chaos.checks import gradient_counts
from thalweg.chaos.checks.invariants import named
from thalweg.chaos.history import Commit, Ended, Named, Record, Recovered, Sent, Struck
from thalweg.chaos.recovery_times import fault_times
from thalweg.facts import Cluster

RANKS, STALENESS = (0, 1, 2), 2
CLUSTER = Cluster.flat(3)


def commit(now: float, rank: int, step: int, counted: tuple[float, ...], **other: Any) -> Commit:
    return Commit(
        time=now,
        rank=rank,
        step=step,
        **{"life": 0, "formation": 1, "began_in": 1, "members": RANKS, **other},
        digest="",
        samples=2,
        checksum=0,
        counted=counted,
    )


def asynchronous() -> list[Record]:
    """Three ranks take four steps each; rank 2 is a step behind."""
    events: list[Record] = []
    counted = [0.0, 0.0, 0.0]
    for round_number in range(5):
        for rank in RANKS:
            step = round_number - (rank == 2)
            if not 0 <= step < 4:
                continue
            now = 10.0 * round_number + rank
            events.append(Sent(time=now, rank=rank, step=step))
            counted[rank] += 1
            events.append(commit(now + 0.5, rank, step + 1, tuple(counted)))
    return [*events, *(Ended(time=90.0, rank=r, life=0, step=4, digest="a") for r in RANKS)]


def changed(
    events: list[Record], rank: int, step: int, change: Callable[[Commit], Commit]
) -> list[Record]:
    """From this commit of this rank on."""

    def is_meant(event: Record) -> bool:
        return isinstance(event, Commit) and event.rank == rank and event.step >= step

    assert any(map(is_meant, events))
    return [change(e) if isinstance(e, Commit) and is_meant(e) else e for e in events]


def more(rank: int, by: float) -> Callable[[Commit], Commit]:
    def change(event: Commit) -> Commit:
        counted = list(event.counted)
        counted[rank] += by
        return replace(event, counted=tuple(counted))

    return change


def once(events: list[Record]) -> list[str]:
    return [found.text for found in named("counted", gradient_counts.once_each(history_of(events)))]


def test_nothing_is_found_where_each_gradient_counts_once() -> None:
    assert once(asynchronous()) == []
    history = history_of(asynchronous())
    assert (
        named(
            "counted",
            gradient_counts.within_bounds(history, fault_times(history, CLUSTER), STALENESS),
        )
        == []
    )


def test_a_gradient_is_applied_twice() -> None:
    found = once(changed(asynchronous(), 1, 3, more(1, 1.0)))
    assert "one gradient was sent since step 2, and it counts 2 times" in found[0] + found[1]
    assert any("4 gradients of rank 1 are applied, but 3 were sent" in text for text in found)


def test_another_holds_more_than_was_sent() -> None:
    found = once(changed(asynchronous(), 0, 4, more(2, 2.0)))
    assert found == [
        "rank 0 after step 4 of membership epoch 1: 4 gradients of rank 2 are applied, but 2 were "
        "sent"
    ]


def test_an_acknowledged_gradient_is_lost() -> None:
    found = once(changed(asynchronous(), 1, 3, more(1, -1.0)))
    assert "since step 2, and it counts 0 times" in found[0]


def test_who_comes_in_again_may_have_lost_some() -> None:
    def later(event: Commit) -> Commit:
        return replace(more(1, -1.0)(event), formation=2)

    events = changed(asynchronous(), 1, 3, later)
    assert once(events)
    joined = Named(
        time=0.0,
        noticed=0.0,
        rank=0,
        life=0,
        step=2,
        formation=2,
        left=(),
        joined=(1,),
        reason="",
    )
    assert once([*events, joined]) == []


def test_what_one_had_seen_is_gone_in_the_same_membership_epoch() -> None:
    found = once(changed(asynchronous(), 0, 3, more(1, -2.0)))
    assert "gradients applied at step 2 are lost" in found[0]


def test_ranks_end_with_different_parameters() -> None:
    events = [replace(e, digest=str(e.rank)) if isinstance(e, Ended) else e for e in asynchronous()]
    assert "after the final consensus" in once(events)[0]


def test_one_gets_too_far_ahead() -> None:
    ahead = changed(asynchronous(), 0, 3, lambda event: replace(event, step=event.step + 2))
    history = history_of(ahead)
    found = named(
        "counted", gradient_counts.within_bounds(history, fault_times(history, CLUSTER), STALENESS)
    )
    assert (
        "rank 0 after step 5 of membership epoch 1: rank 1 has sent 2 gradients, more"
        in found[0].text
    )
    assert (
        "rank 0 after step 5 of membership epoch 1: rank 2 has sent 1 gradients, more"
        in found[1].text
    )
    marks = [Struck(time=1.0, fault=0), Recovered(time=80.0, fault=0)]
    history = history_of([*ahead, *marks], KILL)  # it is out
    assert (
        named(
            "counted",
            gradient_counts.within_bounds(history, fault_times(history, CLUSTER), STALENESS),
        )
        == []
    )


# lgc: four ranks, of which three are waited for

FOUR = (0, 1, 2, 3)
NOW = 4 / 3  # what each of three gradients counts
Weights = Mapping[int, float]
STEPS: list[Weights] = [  # who counts how often, step by step
    {0: NOW, 1: NOW, 2: NOW},
    {0: NOW - 1 / 3, 1: -1 / 3, 2: NOW - 1 / 3, 3: NOW + 1.0},  # rank 3 comes late
    {0: NOW, 1: NOW, 3: NOW},  # and rank 1 never
    {0: 1.0 - 1 / 3, 1: 1.0 - 1 / 3, 2: 1.0 + 1.0, 3: 1.0 - 1 / 3},  # all at once, and rank 2 late
    {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0},
]


def compensated(steps: list[Weights]) -> list[Record]:
    events: list[Record] = []
    counted = [0.0] * 4
    for step, weights in enumerate([{}, *steps]):
        counted = [count + weights.get(rank, 0.0) for rank, count in enumerate(counted)]
        for rank in FOUR:
            events.append(commit(step + 0.5, rank, step, tuple(counted), members=FOUR))
            events.append(Sent(time=float(step), rank=rank, step=step))
    return events


def late(events: list[Record]) -> list[str]:
    history = history_of(events)
    return [
        found.text
        for found in named(
            "counted", gradient_counts.counted_now_or_next_step(history, lambda ranks: 3)
        )
    ]


def with_step(number: int, **changes: float) -> list[Weights]:
    """What ranks count in a step, beside what they should."""
    ranks = {int(name[1:]): by for name, by in changes.items()}
    step = {rank: STEPS[number].get(rank, 0.0) + ranks.get(rank, 0.0) for rank in FOUR}
    return [*STEPS[:number], step, *STEPS[number + 1 :]]


def test_nothing_is_found_where_all_count_now_late_or_never() -> None:
    assert late(compensated(STEPS)) == []


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(with_step(1, r3=1.0), id="the late one twice"),
        pytest.param(with_step(1, r3=-1.0), id="subtracted, and nobody late"),
        pytest.param(with_step(1, r0=1 / 3, r1=1 / 3, r2=1 / 3), id="late, and nothing subtracted"),
        pytest.param(with_step(2, r0=1.0 - 1 / 3, r2=-1 / 3, r3=-1 / 3), id="used, and late too"),
        pytest.param(with_step(2, r0=-NOW), id="one of three lost"),
        pytest.param(with_step(2, r2=NOW), id="four, each as one of three"),
        pytest.param(with_step(4, r2=-1.0), id="one of four lost"),
    ],
)
def test_what_does_not_add_up_is_found(steps: list[Weights]) -> None:
    [found, *_] = late(compensated(steps))
    assert "which no set of first and late ranks explains" in found


def test_what_was_never_computed_may_not_count() -> None:
    for rank, step in ((2, 0), (3, 0), (2, 2)):  # now, late, and late
        events = [
            event
            for event in compensated(STEPS)
            if not (isinstance(event, Sent) and (event.rank, event.step) == (rank, step))
        ]
        assert len(late(events)) == 1
    events = [
        e for e in compensated(STEPS) if not isinstance(e, Sent) or (e.rank, e.step) != (1, 1)
    ]
    assert late(events) == []  # it wasn't counted
