"""Real processes, really broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.histories import read
from thalweg.chaos.fault import FAULT_KINDS, LINK_FAULTS, FaultKind
from thalweg.chaos.history import Commit
from thalweg.chaos.run import ChaosConfig, ChaosResult, fault_rows, kind_rows, run_chaos
from thalweg.errors import UsageError
from thalweg.facts import Cluster
from thalweg.lab import Lab

BOUND = 20.0  # seconds: machines that run tests are busy
LOCAL = tuple(kind for kind in FAULT_KINDS if kind not in (*LINK_FAULTS, "disk", "corrupt"))
CLASSES = [
    "ring",
    "hierarchical+powersgd(rank=2)",
    "dssync+int8",
    "codedreduce(fanout=2, stragglers=1)",
    "asp",
    "lgc",
]


def put_through(
    tmp_path: Path,
    sync: str,
    kinds: tuple[FaultKind, ...],
    *,
    workers: int = 4,
    faults: int = 3,
    seed: int = 1,
    lab: Lab | None = None,
) -> ChaosResult:
    lines: list[str] = []
    outcome = run_chaos(
        ChaosConfig(sync=sync, seed=seed, faults=faults, kinds=kinds, recovery_limit=BOUND),
        Cluster.flat(workers) if lab is None else lab.cluster,
        lab,
        tmp_path,
        lambda done, note: None,
        lambda rank, stream, line: lines.append(f"[{rank}] {line}"),
    )
    print("\n".join(lines))
    return outcome


def test_a_run_that_is_broken_three_times(tmp_path: Path) -> None:
    outcome = put_through(tmp_path, "ring", ("kill", "restart", "pause"))
    assert outcome.violations == []
    assert len(outcome.fault_times) == 3
    history = read(outcome.history)
    assert history.commits == [e for e in history.events if isinstance(e, Commit)]
    assert {commit.rank for commit in history.commits} == {0, 1, 2, 3}
    rows = fault_rows([outcome])
    assert [row["fault"] for row in rows] == [0, 1, 2]
    assert sum(row["faults"] for row in kind_rows(rows)) == 3


def test_a_store_that_dies(tmp_path: Path) -> None:
    outcome = put_through(tmp_path, "ring", ("store",), faults=2, workers=3)
    assert outcome.violations == []


def test_links_need_a_lab(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be broken"):
        put_through(tmp_path, "ring", ("cut",))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sync", CLASSES)
def test_every_class_of_promise(tmp_path: Path, sync: str) -> None:
    outcome = put_through(tmp_path, sync, LOCAL, faults=12, seed=5, workers=5)
    assert outcome.violations == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_lab")
@pytest.mark.parametrize("sync", CLASSES)
def test_every_class_of_promise_in_the_lab(tmp_path: Path, sync: str) -> None:
    with Lab(racks=2, hosts=3, nic="200mbit", uplink="200mbit") as lab:
        outcome = put_through(tmp_path, sync, FAULT_KINDS, faults=12, seed=6, lab=lab)
    assert outcome.violations == []
