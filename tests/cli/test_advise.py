"""`thalweg advise` as a user runs it: rows, their order, what-ifs, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import thalweg
from thalweg.facts import FittedValue, Machine, TransportCosts, format_machine, machine_path

MODEL = """
name = "mlp"
forward = "10ms"
backward = "20ms"
optimizer = "1ms"
tensors = [
    { name = "a", shape = [1024, 1024] },
    { name = "b", shape = [1024, 1024] },
]
"""  # 8.4 MB
CLUSTER = """
latency = "50us"
[[rack]]
name = "a"
nic = "1gbit"
uplink = "1gbit"
hosts = 2
[[rack]]
name = "b"
nic = "1gbit"
uplink = "1gbit"
hosts = 2
"""
FIELDS = {
    "sync", "seconds", "low", "high", "vs_ddp", "exact", "survives", "why", "promise", "steps",
    "reliable", "form", "compute", "encode", "decode", "transfer", "waiting",
}  # fmt: skip
PARTS = ("compute", "encode", "decode", "transfer", "waiting")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "model.toml").write_text(MODEL)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def advice(here: Path, *options: str, place: str = "--cluster cluster.toml") -> dict[str, Any]:
    given = ["advise", *place.split(), "--model", "model.toml", *options, "--json", "-"]
    done = thalweg(*given, cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def of_ddp(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in document["rows"] if r["sync"].startswith("ddp"))
    return found


def test_rows_are_in_order_and_add_up(here: Path) -> None:
    document = advice(here, "--allow", "eventual")
    rows = document["rows"]
    assert document["command"] == "advise"
    assert {frozenset(row) for row in rows} == {frozenset(FIELDS)}
    known = [row for row in rows if row["reliable"]]
    assert rows[: len(known)] == known
    costs = [row["seconds"] * row["steps"] for row in known]
    assert costs == sorted(costs)
    baseline = of_ddp(document)["seconds"]
    for row in rows:
        assert row["seconds"] == pytest.approx(sum(row[part] for part in PARTS))
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["vs_ddp"] == pytest.approx(baseline / row["seconds"])
        assert row["exact"] == (row["promise"] == "exact")
    assert {row["promise"] for row in rows} == {"exact", "lossy", "eventual"}
    assert document["settings"]["verdict"].startswith("Use ")
    assert document["settings"]["optimizer"] == "adamw"  # nothing says otherwise


def test_what_is_allowed(here: Path) -> None:
    assert all(row["exact"] for row in advice(here)["rows"])
    lossy = {row["promise"] for row in advice(here, "--allow", "lossy")["rows"]}
    assert lossy == {"exact", "lossy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what_if", "more"),
    [
        (("--bandwidth", "100mbit"), True),
        (("--bandwidth", "10gbit"), False),
        (("--members", "8"), True),
        (("--faster", "4"), False),
        (("--late", "0.05", "--delay", "2s"), True),
    ],
)
def test_what_if_moves_ddp_the_right_way(here: Path, what_if: tuple[str, ...], more: bool) -> None:
    as_it_is, otherwise = of_ddp(advice(here)), of_ddp(advice(here, *what_if))
    assert (otherwise["seconds"] > as_it_is["seconds"]) == more


def test_lateness_of_four_hosts_by_hand(here: Path) -> None:
    """One of four is late by 2 s in 1 - 0.95^4 of the steps, give or take what 400 draws miss."""
    late = of_ddp(advice(here, "--late", "0.05", "--delay", "2s"))
    assert late["waiting"] == pytest.approx(2 * (1 - 0.95**4), rel=0.25)


@pytest.mark.slow
def test_more_steps_move_a_class_down(here: Path) -> None:
    one, ten = (
        advice(here, "--allow", "lossy", "--extra-steps", f"lossy={share}")["rows"]
        for share in ("0%", "900%")
    )
    assert {row["steps"] for row in ten if not row["exact"]} == {10.0}
    assert not one[0]["exact"]
    assert ten[0]["exact"]


def test_the_table_says_what_to_do_and_what_was_assumed(here: Path) -> None:
    place = ["advise", "--lab", "2x2", "--nic", "100mbit", "--model", "model.toml"]
    done = thalweg(*place, "--allow", "lossy", "--top", "2", cwd=here)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Use ")
    assert "8.39 MB of gradients, 4 workers in 2 racks" in " ".join(lines[1:3])
    assert "Assumed: 100us latency;" in done.stdout
    assert "more: --top" in done.stdout


def test_why_not(here: Path) -> None:
    place = ["advise", "--workers", "2", "--model", "model.toml"]
    number = len(advice(here, place="--workers 2")["settings"]["left_out"])
    assert f"{number} plans are not ranked" in thalweg(*place, cwd=here).stdout
    printed = thalweg(*place, "--why-not", cwd=here).stdout.partition("Not ranked:\n")[2]
    assert "gc(stragglers=2): " in printed


def test_plain_ddp_is_the_answer_where_links_are_fast(here: Path) -> None:
    document = advice(here, place="--lab 1x4 --nic 400gbit")
    assert document["settings"]["verdict"].startswith("Keep DDP")
    assert document["settings"]["next_class"] is None


def test_what_another_class_would_gain() -> None:
    place = ["advise", "--lab", "1x8", "--nic", "10gbit", "--model", "resnet50", "--top", "1"]
    done = thalweg(*place)
    plain, hint, *_ = done.stdout.splitlines()
    assert plain.startswith("Keep DDP")
    assert hint.startswith("With --allow lossy: ring+")
    words = " ".join(done.stdout.split())  # lines are as long as fits
    assert "the optimizer is sgd; extra steps as measured with sgd on digits" in words


def test_classes_that_are_allowed_and_not_counted_are_told() -> None:
    place = ["advise", "--lab", "1x8", "--nic", "10gbit", "--model", "resnet50", "--top", "1"]
    printed = "Not counted: lossy plans, whose extra steps weren't measured under lion; give "
    unmeasured = [*place, "--optimizer", "lion", "--allow", "lossy"]
    words = " ".join(thalweg(*unmeasured).stdout.split())
    assert printed + "--extra-steps lossy=..%." in words
    for counted in ([*unmeasured, "--extra-steps", "lossy=0.5"], [*place, "--allow", "lossy"]):
        assert "Not counted" not in thalweg(*counted).stdout


def test_a_page(here: Path) -> None:
    place = ["--cluster", "cluster.toml", "--model", "model.toml", "--html", "out/advice.html"]
    done = thalweg("advise", *place, cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Page: out/advice.html" in done.stdout
    assert (here / "out" / "advice.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_a_hundred_thousand_workers(here: Path) -> None:
    document = advice(here, place="--lab 1000x100 --nic 10gbit --uplink 40gbit")
    assert {row["form"] for row in document["rows"]} == {"closed form"}
    assert "no closed form" in document["settings"]["left_out"]["gc(stragglers=1)"]
    assert document["settings"]["workers"] == 100_000


def test_a_known_model_on_a_known_network(here: Path) -> None:
    """Twice the samples take twice the time to compute; all but the optimizer's 0.8 ms."""
    place = ["advise", "--workers", "4", "--network", "10gbe", "--model", "resnet50", "--json", "-"]
    once, twice = (
        of_ddp(json.loads(thalweg(*place, "--batch", batch).stdout)) for batch in ("32", "64")
    )
    assert twice["compute"] == pytest.approx(2 * once["compute"], rel=0.02)
    assert twice["transfer"] < once["transfer"]


def test_a_machine_file_beside_the_cluster_file_is_used(here: Path) -> None:
    """Messages that cost 10 ms each to take in: the six of a ring of four don't all hide."""
    before = of_ddp(advice(here))["transfer"]
    costs = TransportCosts(message=FittedValue(0.01))
    machine_path(here / "cluster.toml").write_text(
        format_machine(Machine(ours=costs, native=costs))
    )
    document = advice(here)
    assert before + 0.02 < of_ddp(document)["transfer"] < before + 0.12
    assert "per-message overhead: 0 (not measured)" not in document["settings"]["assumed"]


PLACE = "--cluster cluster.toml --model model.toml"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--cluster nowhere.toml --model model.toml", "can't read nowhere.toml"),
        ("--cluster model.toml --model model.toml", "model.toml"),
        ("--cluster cluster.toml --model resnet", "did you mean resnet"),
        ("--cluster cluster.toml --workers 4 --model model.toml", "--workers and --cluster"),
        ("--model model.toml", "no workers are given"),
        (f"{PLACE} --allow exct", "did you mean exact?"),
        (f"{PLACE} --bandwidth 0mbit", "moves nothing"),
        (f"{PLACE} --members 0", "'--members' / '--what-if-workers': Input should be gre"),
        (f"{PLACE} --faster 0", "can't be 0 times as fast"),
        (f"{PLACE} --late 1.5 --delay 2s", "'--late': Input should be less than or equal to 1"),
        (f"{PLACE} --late 0.5", "give both"),
        (f"{PLACE} --optimizer adm", "there is no optimizer 'adm'"),
        (f"{PLACE} --extra-steps lossy", "write it like lossy=10%"),
        (f"{PLACE} --extra-steps lossless=10%", "no promise 'lossless'; give --extra-steps lossy="),
        (f"{PLACE} --extra-steps lossy=10", "would be 1000%; write lossy=10%"),
        (f"{PLACE} --extra-steps exact=30%", "exact plans need no extra steps; give --extra-steps"),
        (f"{PLACE} --machine nowhere.toml", "can't read nowhere.toml"),
        (f"{PLACE} --measured-only", "not measured: per-message overhead"),
        (f"{PLACE} --gpu v100", "--gpu and --batch have no assumed compute time"),
        ("--workers 4 --network 11gbe --model resnet50", "there is no network '11gbe'"),
        ("--lab 2x2 --network 10gbe --model resnet50", "--workers N alone"),
        ("--workers 4 --gpu b200 --model resnet50", "there is no GPU 'b200'"),
    ],
)
def test_mistakes_are_one_line(here: Path, options: str, said: str) -> None:
    done = thalweg("advise", *options.split(), cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
