"""`thalweg calibrate` as a user runs it, on local workers."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split

import pytest

from tests.cli.command import thalweg
from thalweg.facts import machine_path, read_cluster, read_machine, read_workload


@pytest.mark.slow
def test_files_and_rows(tmp_path: Path) -> None:
    done = thalweg(
        *split("calibrate --workload digits --workers 3 --compressor fp16 --compressor topk"),
        *split("--out found --json rows.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Thalweg transport: per message" in done.stdout
    cluster = read_cluster(tmp_path / "found/cluster.toml")
    machine = read_machine(machine_path(tmp_path / "found/cluster.toml"))
    workload = read_workload(tmp_path / "found/digits.toml")
    assert cluster.workers == 3
    assert machine.ours.message.value > 0
    assert machine.ours.byte.value > 0  # all on one host: no link limits them
    assert [name.partition("(")[0] for name in machine.codecs] == ["fp16", "topk"]
    assert workload.costs.backward.seconds > 0
    assert all(tensor.ready is not None for tensor in workload.tensors)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["kind"] for row in rows} == {"link", "road", "codec", "cost"}


def test_mistakes_are_said_before_anything_is_started(tmp_path: Path) -> None:
    done = thalweg(*split("calibrate --workload nonsense --workers 2"), cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no job 'nonsense'" in done.stderr
