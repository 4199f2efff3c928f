"""Episodes of stragglers with their costs, and the time breakdown of each rank."""

from __future__ import annotations

import pytest

from tests.recorded import (
    AVERAGING,
    BACKWARD,
    BUCKETS,
    ENCODING,
    FORWARD,
    NBYTES,
    OPTIMIZER,
    SETTLED,
    Run,
)
from thalweg.errors import ClusterError
from thalweg.facts import Cluster
from thalweg.observe.records import EventRecord
from thalweg.observe.run_report import RunReport, run_report
from thalweg.observe.straggler import StragglerKind
from thalweg.observe.timeline import timeline

COMPUTING = FORWARD + BACKWARD + OPTIMIZER


def of(run: Run) -> RunReport:
    return run_report(timeline(run.records()))


def test_a_healthy_run_has_no_stragglers() -> None:
    found = of(Run())
    assert found.stragglers == ()
    assert [each.rank for each in found.accounts] == list(range(8))
    for each in found.accounts:
        assert each.steps == 39  # the first sets things up
        assert each.computing == pytest.approx(COMPUTING, abs=0.002)
        assert each.waiting == pytest.approx(SETTLED)
        assert each.encoding == pytest.approx(BUCKETS * ENCODING, rel=0.01)
        assert each.nbytes == NBYTES
        assert each.computing + each.exposed + each.waiting == pytest.approx(each.seconds)
        # Two buckets one after the other, the first half-way through backward.
        assert each.exposed == pytest.approx(2 * AVERAGING - BACKWARD / 2, abs=0.002)


def test_a_rank_that_computes_slowly_is_named_with_both_ends() -> None:
    found = of(Run(slow={3: 3.0}, steps=100, since=20, until=60))
    [late] = found.stragglers
    assert (late.kind, late.who, late.ranks) == (StragglerKind.COMPUTE, ("3",), (3,))
    assert (late.first, late.last, late.ended, late.steps) == (20, 60, True, 1.0)
    assert late.seconds == pytest.approx(2 * COMPUTING, rel=0.03)
    assert late.total == pytest.approx(41 * 2 * COMPUTING, rel=0.03)
    assert late.when == "from step 20 to 60"


def test_a_slow_nic_is_named_until_the_end() -> None:
    [late] = of(Run(thin={5: 0.25})).stragglers
    assert (late.kind, late.who) == (StragglerKind.NIC, ("host5",))
    assert (late.first, late.ended) == (10, False)
    assert late.when == "from step 10 to the end"


def test_reports_that_a_new_plan_interrupts_are_one_episode() -> None:
    records = Run(slow={3: 3.0}, steps=100).records()
    records[0].append(EventRecord(at=0.0, step=50, topic="plan", text="now tree"))
    [late] = run_report(timeline(records)).stragglers
    assert (late.first, late.last) == (10, 99)


def test_stragglers_of_a_part_are_detected_in_the_whole_run() -> None:
    run = timeline(Run(slow={3: 3.0}, steps=60, until=40).records())
    found = run_report(run, first=30, last=33)
    assert [each.steps for each in found.accounts] == [4] * 8
    assert [each.first for each in found.stragglers] == [10]
    assert run_report(run, first=45, last=50).stragglers == ()


def test_notes_of_all_ranks_are_one() -> None:
    records = Run(steps=5).records()
    for rank in (2, 1):
        records[rank].append(EventRecord(at=9e9, step=3, topic="hang", text="rank 0 hangs"))
    records[1].append(EventRecord(at=9e9, step=3, topic="late", text="reported by episodes"))
    found = run_report(timeline(records)).notes
    assert [str(note) for note in found] == [
        "step 4: incident: it is over (rank 0)",
        "step 3: hang: rank 0 hangs (ranks 1, 2)",
    ]


def test_a_cluster_that_doesnt_have_all_ranks_is_refused() -> None:
    with pytest.raises(ClusterError, match="no rank 4"):
        run_report(timeline(Run(steps=3).records()), cluster=Cluster.flat(4))
