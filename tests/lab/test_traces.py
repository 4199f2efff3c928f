"""A trace of four real ranks, read by the perfetto package, beside what they have recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import thalweg
from tests.conftest import LabOf
from tests.lab.stragglers import observed
from tests.report.test_trace import parsed
from thalweg.observe.journal import read_records
from thalweg.observe.records import StepRecord

CLOSE = 0.02
STEPS = 20
COUNTED = ("compute", "exposed communication")  # the tracks whose slices make a step


@pytest.mark.parametrize("sync", ["ring+fp16", "dssync"])
def test_tracks_agree_with_the_recorded_steps(sync: str, lab_of: LabOf, tmp_path: Path) -> None:
    lab = lab_of(racks=2, hosts=2, nic="200mbit", uplink="200mbit")
    observed(lab, sync, "500k", [], STEPS, records=str(tmp_path / "records"))
    done = thalweg("report", "records", "--trace", "run.pftrace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    slices, _, _ = parsed(tmp_path / "run.pftrace")
    apart = []
    for rank, records in read_records(tmp_path / "records").items():
        ours = [each for each in slices if each[0] == f"rank {rank} on host{rank}"]
        steps = {int(name.split()[1]): (s, e) for _, t, name, s, e in ours if t == "steps"}
        recorded = {record.step: record for record in records if isinstance(record, StepRecord)}
        assert steps.keys() == recorded.keys() >= set(range(STEPS - 1))
        for number, (start, end) in steps.items():
            parts = sum(e - s for _, t, _, s, e in ours if t in COUNTED and start <= s < end)
            seconds = recorded[number].seconds
            apart += [abs(found / 1e6 - seconds) / seconds for found in (parts, end - start)]
    print(f"{sync}: at most {max(apart):.4%} apart in {len(apart)} comparisons")
    assert max(apart) < CLOSE
