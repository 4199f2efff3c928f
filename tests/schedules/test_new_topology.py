"""Adding a topology: one file, nothing else touched. The file is that of the page that says how."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thalweg.schedules.topologies
from tests.running import run, whole_numbers
from tests.training.workers import TIMEOUT, on_ranks, one_value, values
from thalweg import Cluster, Group, Size, Workload, check, compile_step
from thalweg.catalog import Catalog, default_catalog
from thalweg.cli import main
from thalweg.errors import PlanError, ScheduleError
from thalweg.report import draw, explain
from thalweg.training import attach

PAGE = (Path(__file__).parents[2] / "docs" / "how-do-i-add-a-topology.md").read_text()
[FILE] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
DRAWN, REFUSED = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@contextmanager
def among_the_topologies(text: str, folder: Path) -> Iterator[Catalog]:
    """What there is once a file of this text lies there."""
    (folder / "chain.py").write_text(text)
    folders = thalweg.schedules.topologies.__path__
    folders.append(str(folder))
    invalidate_caches()
    default_catalog.cache_clear()
    try:
        yield default_catalog()
    finally:
        folders.remove(str(folder))
        sys.modules.pop("thalweg.schedules.topologies.chain", None)
        default_catalog.cache_clear()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with among_the_topologies(FILE, tmp_path) as found:
        yield found
    assert "chain" not in default_catalog().topologies


def test_a_file_is_enough(catalog: Catalog) -> None:
    plan = catalog.plan("chain(pieces=3)+powersgd(rank=2) @ bucket=1MB")
    group = Group.everybody(Cluster.regular([3, 2], interleaved=True))
    workload = Workload.of_size(Size.parse("5MB"))
    compiled = compile_step(plan, group, workload, 0, catalog)
    for round_ in compiled.rounds:
        check(round_.schedule)
        inputs = whole_numbers(round_.schedule)
        for result in run(round_.schedule, inputs).values():
            np.testing.assert_array_equal(result, np.sum(list(inputs.values()), axis=0))
    explanation = explain(plan, group, workload, 0, catalog)
    assert explanation.scenes[0].sequential_moves == 2 * 4
    assert "chain" in draw(explanation)


def test_it_is_drawn_as_the_page_shows(
    catalog: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    main.app(
        ["explain", "chain(pieces=2)", "--workers", "3", "--bytes", "1KB"], standalone_mode=False
    )
    lines = iter([line.split() for line in capsys.readouterr().out.splitlines()])
    for line in DRAWN.splitlines():
        assert line == "..." or line.split() in lines, line


def test_half_of_it_is_refused_as_the_page_shows(tmp_path: Path) -> None:
    before, _, rest = FILE.partition("        for chunk in range(pieces):  # and come back\n")
    _, end, after = rest.partition('    return all_reduce("chain"')
    with among_the_topologies(before + end + after, tmp_path) as catalog:
        schedule = catalog.topologies["chain"].build(
            Group.everybody(Cluster.flat(3)), 8, 4, 0, pieces=2
        )
        with pytest.raises(ScheduleError) as refused:
            check(schedule)
    assert REFUSED.strip() in str(refused.value)


def test_it_trains(catalog: Catalog) -> None:
    """On real ranks, to the mean of their gradients."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        attached = attach(model, optimizer, plan="chain(pieces=2)", timeout=TIMEOUT)
        (model(torch.ones(1, 2)) * -3.0 * rank).sum().backward()
        optimizer.step()
        attached.close()
        return {"values": values(model)}

    assert one_value(on_ranks(3, work), "values") == [3.0, 3.0]


def test_a_topology_may_be_added_to_a_catalog_in_a_program() -> None:
    ring = default_catalog().topologies["ring"]
    larger = default_catalog().with_topology(replace(ring, name="my_ring"))
    assert str(larger.plan("my_ring+fp16").topology) == "my_ring"


def test_a_name_that_is_taken_is_refused() -> None:
    ring = default_catalog().topologies["ring"]
    with pytest.raises(PlanError, match="2 parts are called 'gc'; rename"):
        default_catalog().with_topology(replace(ring, name="gc"))


FILES = sorted(Path(thalweg.schedules.topologies.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ours_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 200
