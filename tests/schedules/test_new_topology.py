"""Adding a topology: one file, nothing else touched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import thalweg.schedules.topologies
from tests.running import run, whole_numbers
from thalweg import Cluster, Group, Size, Workload, check, compile_rounds
from thalweg.catalog import Catalog, default_catalog
from thalweg.errors import PlanError
from thalweg.report import draw, explain

FILE = '''
"""A chain: the sum goes down the line and the result comes back."""

from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import singles
from thalweg.schedules.programs import down, in_turn, up
from thalweg.schedules.trees import heap, over


def caterpillar(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    line = over(group.order, heap(1))
    spans = singles(0, 1)
    program = in_turn(up(line, spans), down(line, spans))
    return all_reduce("caterpillar", group, [elements], itemsize, program)


TOPOLOGY = Topology(name="caterpillar", summary="down the line and back", build=caterpillar)
'''


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """What there is once that file lies among the topologies."""
    (tmp_path / "caterpillar.py").write_text(FILE)
    folders = [*thalweg.schedules.topologies.__path__, str(tmp_path)]
    monkeypatch.setattr(thalweg.schedules.topologies, "__path__", folders)
    yield default_catalog.__wrapped__()
    sys.modules.pop("thalweg.schedules.topologies.caterpillar", None)


def test_a_file_is_enough(catalog: Catalog) -> None:
    assert "caterpillar" not in default_catalog().topologies
    plan = catalog.plan("caterpillar+powersgd(rank=2) @ bucket=1MB")
    group = Group.everybody(Cluster.regular([3, 2], interleaved=True))
    workload = Workload.of_size(Size.parse("5MB"))
    compiled = compile_rounds(plan, group, workload, 0, catalog)
    for round_ in compiled:
        check(round_.schedule)
        inputs = whole_numbers(round_.schedule)
        for result in run(round_.schedule, inputs).values():
            np.testing.assert_array_equal(result, np.sum(list(inputs.values()), axis=0))
    explanation = explain(plan, group, workload, 0, catalog)
    assert explanation.scenes[0].sequential_moves == 2 * 4
    assert "caterpillar" in draw(explanation)


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
    assert len(path.read_text().splitlines()) < 130
