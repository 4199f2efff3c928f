"""Scalars, as TensorBoard reads them back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.recorded import NBYTES, START, Run
from thalweg.errors import UsageError
from thalweg.observe.timeline import timeline
from thalweg.report.tensorboard import scalars, write_scalars

MEANT = Run(ranks=2, steps=6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_they_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = timeline(MEANT.records())
    write_scalars(tmp_path, run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0000", "rank-0001"]
    for rank, lane in run.rank_timelines.items():
        found = EventAccumulator(str(tmp_path / f"rank-{rank:04}"))
        found.Reload()
        expected = [dict(scalars(step)) for step in lane.steps]
        assert set(found.Tags()["scalars"]) == set(expected[0])
        for name in expected[0]:
            events = found.Scalars(name)
            assert [event.step for event in events] == list(range(6))
            assert [event.value for event in events] == pytest.approx(
                [values[name] for values in expected], rel=1e-5
            )
            assert [event.wall_time for event in events] == [step.end for step in lane.steps]
    assert START < lane.steps[0].end < START + 1  # by the run's clock, not the rank's
    rate = expected[3]["network/mbit_per_second"]
    assert rate == pytest.approx(8e-6 * NBYTES / expected[3]["step/seconds"])


def test_events_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "rank-0001").mkdir()
    (tmp_path / "rank-0001" / "events.out.tfevents.1.x").touch()
    with pytest.raises(UsageError, match="rank-0001 has events already; name another folder"):
        write_scalars(tmp_path, timeline(MEANT.records()))
    assert not (tmp_path / "rank-0000").exists()


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith(("tensorboard", "torch.utils.tensorb"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"need the package tensorboard; pip install 'thalweg\[t"):
        write_scalars(tmp_path, timeline(MEANT.records()))
