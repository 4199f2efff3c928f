"""Parts of other packages: the one in the documentation is installed and used like our own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cli.test_advise import CLUSTER, MODEL
from tests.predict.closed_form.test_topologies import assert_same_bytes, even
from tests.training.workers import TIMEOUT, on_ranks, one_value, values
from thalweg import Group, Size, Workload
from thalweg.catalog import Catalog, default_catalog
from thalweg.cli import main
from thalweg.errors import PlanError
from thalweg.facts import Cluster
from thalweg.predict import Symbols, synchronisation_seconds
from thalweg.schedules import timeline
from thalweg.training import attach

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"chain": "a-topology", "everyother": "a-compressor", "mirrored": "a-code"}
PLANS = ("chain(pieces=2)", "ring+everyother(warmup=2)", "gc(stragglers=1, code=mirrored)")
Install = Callable[[str, str], Catalog]


def block(page: str, language: str) -> str:
    text = (DOCS / f"how-do-i-add-{page}.md").read_text()
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


def install(folder: Path, name: str, modules: dict[str, str], points: dict[str, Any]) -> None:
    """What pip makes of a package, as far as others see it: its modules and its metadata."""
    package, metadata = folder / name, folder / f"{name}-1.0.dist-info"
    for made in (package, metadata):
        made.mkdir(parents=True)
    for module, text in {"__init__": "", **modules}.items():
        (package / f"{module}.py").write_text(text)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    )
    lines = [
        line
        for group, entries in points.items()
        for line in (f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install_ours(folder: Path) -> None:
    project = tomllib.loads(block("a-topology", "toml"))["project"]
    modules = {name: block(page, "python") for name, page in PAGES.items()}
    install(folder, project["name"].replace("-", "_"), modules, project["entry-points"])


@pytest.fixture
def installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package of this name with one topology of this text; the catalog that has it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}

    def one(name: str, text: str) -> Catalog:
        points = {"thalweg.topologies": {"line": f"{name}.part:TOPOLOGY"}}
        install(tmp_path, name, {"part": text}, points)
        default_catalog.cache_clear()
        return default_catalog()

    yield one
    for module in {*sys.modules} - before:
        del sys.modules[module]
    default_catalog.cache_clear()


@pytest.fixture
def catalog(tmp_path: Path, installing: Install) -> Catalog:
    install_ours(tmp_path)
    default_catalog.cache_clear()
    return default_catalog()


def line_topology(name: str) -> str:
    return f'''
from dataclasses import replace
from thalweg.schedules.topologies.ring import TOPOLOGY as RING

TOPOLOGY = replace(RING, name="{name}")
'''


def test_they_are_listed_with_their_package(
    catalog: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    main.app(["plans", "--json", "-"], standalone_mode=False)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    kinds = {"chain": "plan", "everyother": "compressor", "mirrored": "code"}
    for name, kind in kinds.items():
        assert (rows[name]["kind"], rows[name]["origin"]) == (kind, "my-parts 1.0")
    assert rows["ring"]["origin"] == rows["fractional"]["origin"] == "thalweg"
    main.app(["plans"], standalone_mode=False)
    assert "(from my-parts 1.0)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("plan", PLANS)
def test_they_are_explained(
    catalog: Catalog, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main.app(["explain", plan, "--workers", "3", "--bytes", "1MB"], standalone_mode=False)
    assert "Checked" in capsys.readouterr().out


def test_they_are_advised(
    catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("cluster", CLUSTER), ("model", MODEL)):
        (tmp_path / f"{name}.toml").write_text(text)
    where = ("--cluster", str(tmp_path / "cluster.toml"), "--model", str(tmp_path / "model.toml"))
    main.app(["advise", *where, "--allow", "lossy", "--json", "-"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)["rows"]
    ranked = {row["sync"].partition(" @")[0] for row in rows}
    assert {
        "chain(pieces=16)",
        "ring+everyother",
        "chain(pieces=16)+everyother",
        "gc(stragglers=1, code=mirrored)",
    } <= ranked


@pytest.mark.parametrize(("racks", "members"), [(1, 2), (1, 5), (2, 3), (4, 2), (3, 1)])
def test_the_form_of_the_page_is_that_of_its_schedule(
    catalog: Catalog, racks: int, members: int
) -> None:
    group, topology = even(racks, members), catalog.topologies["chain"]
    schedule = topology.build(group, 4000, 4, 0, pieces=4)
    assert topology.form is not None
    form = topology.form(Symbols.of(group, 16_000), pieces=4)
    assert_same_bytes(form, schedule, group)
    assert form.moves == timeline(schedule).sequential_moves
    everybody = Group.everybody(Cluster.regular([members] * racks, nic="1gbit", uplink="1gbit"))
    workload = Workload.of_size(Size.parse("1MB"))
    assert synchronisation_seconds(catalog.plan("chain"), everybody, workload, catalog)


def test_ranks_compare_the_packages_of_a_plan(catalog: Catalog) -> None:
    assert {catalog.packages(catalog.plan(plan)) for plan in PLANS} == {"my-parts 1.0"}
    assert catalog.packages(catalog.plan("ring+fp16")) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import no_such_module", "loading bad_parts.part:TOPOLOGY failed: ModuleNotFoundError"),
        ("TOPOLOGY = 3", "its type is int, not Topology"),
        (line_topology("Long Name"), "its name 'Long Name' is not a lower-case word"),
        (
            line_topology("line") + 'TOPOLOGY = replace(TOPOLOGY, parameters={"a": 1})',
            "the type of its argument a is int, not Parameter",
        ),
        (
            line_topology("line") + 'TOPOLOGY = replace(TOPOLOGY, variants=("line",))',
            "the type of its variant 'line' is str, not Variant",
        ),
    ],
)
def test_what_cannot_be_used_is_left_out_with_a_reason(
    text: str, problem: str, installing: Install, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = installing("bad_parts", text)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"the topology line can't be used: {problem}")
    assert "(bad-parts 1.0); repair that package or uninstall it" in warning
    assert str(catalog.plan("ring")) == "ring"
    with pytest.raises(PlanError, match=re.escape(problem)):
        catalog.plan("line")


@pytest.mark.parametrize("taken", ["ring", "gc", "fp16"])
def test_a_name_of_ours_is_not_taken(
    taken: str, installing: Install, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = installing("other_parts", line_topology(taken))
    assert "thalweg has a part of this name, too (other-parts 1.0)" in caplog.text
    assert catalog.origin("plan", "ring") == "thalweg"
    assert str(catalog.plan("ring+fp16")) == "ring+fp16"
    assert str(catalog.plan("gc(stragglers=1)")) == "gc(stragglers=1)"


def test_of_two_packages_with_one_name_the_first_keeps_it(
    installing: Install, caplog: pytest.LogCaptureFixture
) -> None:
    installing("first_parts", line_topology("line"))
    catalog = installing("second_parts", line_topology("line"))
    assert "first-parts 1.0 has a part of this name, too (second-parts 1.0)" in caplog.text
    assert catalog.origin("topology", "line") == "first-parts 1.0"
    assert str(catalog.plan("line").topology) == "line"


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process that finds what is installed by itself, as do the workers that it starts."""
    return subprocess.run(
        [sys.executable, "-m", "thalweg", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_ranks_train_under_them(catalog: Catalog) -> None:
    """The chain to the exact mean, and the compressor to the same parameters on all ranks."""

    def work(rank: int, plan: str) -> dict[str, Any]:
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        attached = attach(model, optimizer, sync=plan, timeout=TIMEOUT)
        (model(torch.ones(1, 64)) * -3.0 * rank).sum().backward()
        optimizer.step()
        attached.close()
        return {"values": values(model)}

    assert {*one_value(on_ranks(3, partial(work, plan="chain")), "values")} == {3.0}
    compressed = one_value(on_ranks(3, partial(work, plan="ring+everyother")), "values")
    assert {*compressed} == {0.0, 3.0}


@pytest.mark.slow
def test_workers_train_under_them(tmp_path: Path) -> None:
    """All ranks end alike, and as under DDP where the plan is exact."""
    install_ours(tmp_path)
    done = command(
        *("verify", *PLANS, "--workers", "3", "--steps", "6", "--model", "digits"),
        *("--variant", "plain", "--json", "-"),
        folder=tmp_path,
    )
    rows = json.loads(done.stdout)["rows"]
    assert [row["sync"] for row in rows] == [*PLANS], done.stderr
    for row in rows:
        assert row["identical"], row
        assert row["promise"] == "lossy" or row["ok"], row
    assert {row["promise"] for row in rows} == {"exact", "lossy"}


SCRIPT = """
import os, sys
if os.environ["RANK"] == "1":
    sys.path[:] = [entry for entry in sys.path if entry != {folder!r}]
import torch
from thalweg import attach
model = torch.nn.Linear(2, 1)
attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="chain", timeout=20)
"""


def test_a_worker_that_lacks_the_package_says_so(tmp_path: Path) -> None:
    install_ours(tmp_path / "installed")
    script = tmp_path / "installed" / "train.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path / "installed")))
    done = command("run", "--workers", "2", str(script), folder=tmp_path / "installed")
    assert done.returncode != 0
    assert "rank 1: there is no plan 'chain'" in done.stderr
    assert "if another package brings it, install that on this host" in done.stderr
