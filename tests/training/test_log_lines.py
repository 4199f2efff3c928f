"""What attach() logs: one line at the start, one for each change, one for a refusal."""

from __future__ import annotations

import socket
from pathlib import Path
from subprocess import CompletedProcess

from tests.cli.command import thalweg
from thalweg.facts import Cluster
from thalweg.training.consistency_check import host_names

SCRIPT = """
import sys, warnings
import torch, thalweg
from torch import nn
from torch.utils.data import TensorDataset

warnings.simplefilter("always")
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(960, 4))
run = thalweg.attach(model, optimizer, plan=sys.argv[1], data=data, batch=12)
if run.rank == 0:
    print(run.report().table(), flush=True)
for (x,) in run.batches(0):
    loss = run.mean(model(x).square().sum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # this line
    if run.step == 1 and run.rank == 1 and len(sys.argv) > 2:
        run.switch(sys.argv[2])
"""


def run(folder: Path, *arguments: str) -> CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return thalweg("run", "--workers", "2", "train.py", *arguments, cwd=folder)


def test_a_run_tells_what_it_is_and_every_change_of_plan(tmp_path: Path) -> None:
    done = run(tmp_path, "gc(stragglers=1)", "tree")
    start, *others = [line for line in done.stderr.splitlines() if "[thalweg]" in line]
    assert "plan gc(stragglers=1): 2 workers on 1 host, over TCP, not encrypted" in start
    assert "if a worker dies: no rank waits for it" in start
    assert [line.endswith("tree (requested with run.switch)") for line in others] == [True]
    assert f" {socket.gethostname()} " in done.stdout
    number = SCRIPT.splitlines().index("    optimizer.step()  # this line") + 1
    assert f"train.py:{number}: UserWarning: batch norm" in done.stderr


def test_a_refusal_is_logged_once(tmp_path: Path) -> None:
    done = run(tmp_path, "nonesuch")
    [line] = done.stderr.splitlines()
    assert line.startswith("thalweg: every rank: there is no plan 'nonesuch'")
    assert done.returncode == 1


def test_a_group_plan_without_groups_says_so(tmp_path: Path) -> None:
    assert "dssync has one group here" in run(tmp_path, "dssync").stderr


def test_hosts_are_known_by_their_names_and_distinguished() -> None:
    published = ['["a", "m1", "n1"]', '["b", "m2", "n1"]', '["a", "m1", "n1"]', '["a", "m3", "n1"]']
    assert host_names(published) == ["a", "b", "a", "a-2"]
    cluster = Cluster.of_hosts(host_names(published))
    assert [cluster.host(rank).name for rank in range(4)] == ["a", "b", "a", "a-2"]
    assert cluster.path(0, 2) == ()
