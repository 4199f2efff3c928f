"""A trace of eight real ranks, read by the perfetto package, beside what they have recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import thalweg
from tests.lab.lateness import observed
from tests.report.test_trace import parsed
from thalweg.lab import Lab
from thalweg.records import Step
from thalweg.records.journal import read_records

CLOSE = 0.02
STEPS = 30
COUNTED = ("compute", "wait")  # the tracks whose slices make a step


@pytest.mark.usefixtures("needs_lab")
@pytest.mark.parametrize("sync", ["ring+fp16", "dssync"])
def test_tracks_agree_with_the_recorded_steps(sync: str, tmp_path: Path) -> None:
    with Lab(racks=2, hosts=4, nic="200mbit", uplink="200mbit") as lab:
        observed(lab, sync, "500k", [], STEPS, records=str(tmp_path / "records"))
    done = thalweg("report", "records", "--trace", "run.pftrace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    slices, _, _ = parsed(tmp_path / "run.pftrace")
    apart = []
    for rank, records in read_records(tmp_path / "records").items():
        ours = [each for each in slices if each[0] == f"rank {rank} on host{rank}"]
        steps = {int(name.split()[1]): (s, e) for _, t, name, s, e in ours if t == "steps"}
        recorded = {record.step: record for record in records if isinstance(record, Step)}
        assert steps.keys() == recorded.keys() >= set(range(STEPS - 1))
        for number, (start, end) in steps.items():
            parts = sum(e - s for _, t, _, s, e in ours if t in COUNTED and start <= s < end)
            seconds = recorded[number].seconds
            apart += [abs(found / 1e6 - seconds) / seconds for found in (parts, end - start)]
    print(f"{sync}: at most {max(apart):.4%} apart in {len(apart)} comparisons")
    assert max(apart) < CLOSE
