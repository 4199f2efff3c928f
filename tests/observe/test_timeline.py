"""All ranks on one clock: skewed ones, restarted ones, and those that never compared theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recorded import ERROR, Run
from thalweg.facts import Cluster
from thalweg.observe.records import ClockSample, EventRecord, Record, RunHeader, StepRecord
from thalweg.observe.timeline import Aligned, Timeline, cluster_of, timeline

SHORT = Run(ranks=4, steps=12)


def ends(run: Timeline, rank: int) -> list[float]:
    return [step.end for step in run.rank_timelines[rank].steps]


def apart(run: Timeline) -> float:
    """How far the ends of a step are from one another, at most."""
    by_rank = [ends(run, rank) for rank in run.rank_timelines]
    return max(max(step) - min(step) for step in zip(*by_rank, strict=True))


def test_clocks_that_are_seconds_apart_agree() -> None:
    records = SHORT.records()
    own = [next(r.end for r in records[rank] if isinstance(r, StepRecord)) for rank in (0, 1)]
    assert abs(own[0] - own[1]) > 7
    run = timeline(records)
    assert apart(run) < 1e-5
    assert run.remarks == ()
    assert [lane.error for lane in run.rank_timelines.values()] == [0.0, ERROR, ERROR, ERROR]
    assert run.steps == range(12)


def test_rounds_and_encodings_move_with_their_step() -> None:
    run = timeline(SHORT.records())
    for lane in run.rank_timelines.values():
        for step in lane.steps:
            inside = [each.started for each in step.rounds] + [e.began for e in step.encodings]
            assert all(step.begin <= moment <= step.end for moment in inside)
            came = [at - each.started for each in step.rounds for at in each.peers.values()]
            assert all(0 <= seconds < 0.2 for seconds in came)


@pytest.mark.parametrize("unknown", [{2}, {0}, {0, 1, 2, 3}])
def test_without_a_comparison_ranks_are_put_where_their_steps_end(unknown: set[int]) -> None:
    run = timeline(replace(SHORT, unknown=frozenset(unknown), drift=0.0).records())
    assert apart(run) < 1e-5
    assert {
        rank for rank in unknown if run.rank_timelines[rank].aligned is Aligned.STEPS
    } == unknown
    [remark] = run.remarks
    assert remark.startswith(f"rank{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown))}:")


def test_nothing_in_common() -> None:
    records = replace(SHORT, unknown=frozenset({3})).records()
    records[3] = [
        replace(r, step=r.step + 500) if isinstance(r, StepRecord) else r for r in records[3]
    ]
    run = timeline(records)
    assert run.rank_timelines[3].aligned is Aligned.NOT
    assert run.rank_timelines[3].steps[0].begin == pytest.approx(
        run.rank_timelines[0].steps[0].begin, abs=0.01
    )
    assert "no step in common" in run.remarks[-1]


def test_a_step_that_is_redone_counts_as_it_was_the_last_time() -> None:
    """Steps 8 to 11 were lost, and the run ended after 8 was done again."""
    records: list[Record] = [*SHORT.records()[0]]
    eighth = next(r for r in records if isinstance(r, StepRecord) and r.step == 8)
    later = {name: getattr(eighth, name) + 60 for name in ("begin", "first", "last", "averaged")}
    redone = replace(eighth, **later, optimized=eighth.optimized + 60, end=eighth.end + 60)
    run = timeline({0: [*records, redone]})
    steps = run.rank_timelines[0].steps
    assert [step.step for step in steps] == list(range(9))
    assert steps[-1].begin - steps[-2].end > 50


def test_a_rank_that_was_started_again_has_another_clock() -> None:
    """On another host, whose clock is far from the one before; the file goes on."""
    records = SHORT.records()
    moved = SHORT.records()[2]
    shift = 1e6

    def by_another(record: Record) -> Record:
        if isinstance(record, StepRecord):
            names = ("begin", "first", "last", "averaged", "optimized", "end")
            times = {name: getattr(record, name) + shift for name in names}
            return replace(record, **times, rounds=(), encodings=())
        if isinstance(record, ClockSample):
            return replace(record, at=record.at + shift, offset=record.offset - shift)
        assert isinstance(record, RunHeader)
        return replace(record, host="elsewhere", at=record.at + shift, members=(0, 1, 2))

    before = [r for r in moved if not isinstance(r, StepRecord) or r.step < 5]
    after = [by_another(r) for r in moved if not isinstance(r, StepRecord) or r.step >= 5]
    records[2] = [*before, *after]
    run = timeline(records)
    assert apart(run) < 1e-5
    assert run.rank_timelines[2].host == "elsewhere"
    assert run.member_spans == [(0, (0, 1, 2, 3)), (5, (0, 1, 2))]


def test_a_file_that_was_begun_anew_repeats_what_is_known() -> None:
    records = SHORT.records()
    opening, clock = records[1][:2]
    records[1] = [*records[1][:8], opening, clock, *records[1][8:]]
    run, usual = timeline(records), timeline(SHORT.records())
    assert run.rank_timelines[1] == usual.rank_timelines[1]


def test_another_plan_is_another_member_span() -> None:
    records = SHORT.records()
    records[1].append(EventRecord(at=0.0, step=6, topic="plan", text="now tree"))
    assert [step for step, _ in timeline(records).member_spans] == [0, 6]


def test_ranks_of_an_earlier_run_are_left_out_and_missing_ones_named() -> None:
    records = SHORT.records()
    del records[3]
    records[7] = replace(SHORT, ranks=8).records()[7]
    run = timeline(records)
    assert list(run.rank_timelines) == [0, 1, 2]
    assert run.remarks[0].startswith("rank 7: excluded")
    assert run.remarks[1].startswith("rank 3: no steps")


def test_the_cluster_as_the_ranks_tell_it() -> None:
    records = SHORT.records()
    del records[3]
    cluster = cluster_of(timeline(records))
    assert cluster.workers == 4
    assert [host.name for host in cluster.racks[0].hosts] == ["host0", "host1", "host of rank 3"]
    assert [rack.name for rack in cluster.racks] == ["rack0", "rack1"]
    assert cluster.assumed == Cluster.flat(4).assumed


def test_several_ranks_on_a_host() -> None:
    records = SHORT.records()
    for rank, found in records.items():
        found[0] = replace(found[0], host=f"node{rank // 2}")  # type: ignore[type-var]
    hosts = cluster_of(timeline(records)).hosts
    assert [(host.name, host.ranks) for host in hosts] == [("node0", (0, 1)), ("node1", (2, 3))]


def test_a_cut_has_both_ends() -> None:
    run = timeline(SHORT.records())
    assert run.cut(3, 5).steps == range(3, 6)
    assert run.cut(None, 2).steps == range(3)
    assert run.cut(10, None).steps == range(10, 12)
    assert not run.cut(99, None).steps


def test_no_records_at_all() -> None:
    assert not timeline({0: []}).steps
