"""`thalweg explain` as a user runs it: a real process, its output, its exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.cli.command import thalweg


def test_it_draws_the_moves_and_says_the_cost() -> None:
    done = thalweg("explain", "ring", "--workers", "3", "--bytes", "12KB")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["1", "+1<2", "+2<0", "+0<1"] in lines
    assert ["4", "=1<2", "=2<0", "=0<1"] in lines
    assert "promise                exact: the exact mean" in done.stdout
    assert "4 sequential moves" in done.stdout
    assert ["0", "host0", "rack0", "16", "kB", "1.33x", "16", "kB", "1.33x", "4"] in lines


@pytest.mark.parametrize(
    "plan",
    [
        "ddp", "umw", "ps", "ring", "tree(fanout=3)", "double_tree", "halving_doubling",
        "hierarchical", "hierarchical(form=leader)", "gc(stragglers=1)", "dssync",
        "local_sgd(every=1)", "local_sgd(every=2)", "hierarchical+powersgd(rank=4)", "ring+int8",
        "dssync+int8", "ring+topk(ratio=0.01) @ bucket=1MB", "gc(stragglers=2, code=cyclic)",
        "codedreduce", "codedreduce(fanout=2, stragglers=1, root=separate)",
        "gc(stragglers=1, code=cyclic_mds)+fp16", "lgc", "lgc(k=3)+fp16", "asp",
    ],
)  # fmt: skip
def test_every_kind_of_plan(plan: str, tmp_path: Path) -> None:
    place = ["--lab", "2x4", "--nic", "200mbit", "--uplink", "50mbit", "--bytes", "2MB"]
    done = thalweg("explain", plan, *place, "--svg", "d.svg", "--json", "d.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert plan in done.stdout
    assert ET.parse(tmp_path / "d.svg").getroot().tag.endswith("svg")
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["command"] == "explain"
    assert document["settings"]["sync"] == plan


def test_json_on_standard_output_is_alone_there() -> None:
    done = thalweg("explain", "hierarchical", "--lab", "2x4", "--bytes", "10MB", "--json", "-")
    document = json.loads(done.stdout)
    assert set(document) == {"command", "version", "settings", "rows"}
    [row] = document["rows"]
    assert row["schedule"] == "hierarchical"
    assert row["group"] == list(range(8))
    assert row["sequential_moves"] == 8
    sent = document["settings"]["sent"].values()
    assert max(sent) == pytest.approx(17_500_000, rel=1e-4)  # 2(N-1)/N, to a few elements
    links = document["settings"]["links"]
    assert links["uplink of rack0, out"] == pytest.approx(10_000_000, rel=1e-4)
    outgoing = sum(move["from"] == 0 for move in row["moves"])
    assert outgoing == sum(move["to"] == 0 for move in row["moves"])


def test_a_cluster_file_and_a_workload_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        '[[rack]]\nname = "a"\nuplink = "1gbit"\nhosts = 2\n[[rack]]\nname = "b"\nhosts = 1\n'
    )
    (tmp_path / "m.toml").write_text('name = "m"\ntensors = [{ name = "w", shape = [9, 1000] }]\n')
    done = thalweg("explain", "ring", "--cluster", "c.toml", "--model", "m.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "uplink of a, out" in done.stdout
    assert "36 kB" in done.stdout


def test_groups_over_one_period() -> None:
    done = thalweg("explain", "dssync", "--lab", "2x3", "--bytes", "1MB")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["rack0", "rank", "0,", "host0", "A", "b", "b"] in lines
    assert ["rank", "5,", "host5", "c", "c", "A"] in lines
    assert ["connected", "yes:", "every", "update", "reaches", "all", "workers"] in lines


def test_mixing_is_in_the_settings(tmp_path: Path) -> None:
    clusters = Path(__file__).parent.parent.parent / "examples" / "clusters"
    place = ["--cluster", str(clusters / "slow-host.toml"), "--bytes", "4KB", "--json", "-"]
    settings = json.loads(thalweg("explain", "dssync", *place, cwd=tmp_path).stdout)["settings"]
    assert settings["period"] == 240
    assert settings["turns"][0][:3] == [[4, 0], [1, 15], [5, 10, 16]]
    assert settings["lasts"][0][:3] == [4, 4, 1]
    mixing = settings["mixing"]
    assert mixing["connected"]
    assert mixing["longest_pause"] == 4
    assert mixing["drift_before"] == pytest.approx(mixing["drift"] + 0.95)
    assert [(each["kind"], each["name"], each["steps"]) for each in mixing["kept_apart"]] == [
        ("rack", "A", 4),
        ("host", "A5", 4),
    ]
    assert {each["bits_per_second"] for each in mixing["kept_apart"]} == {250e6}
    ring = json.loads(thalweg("explain", "ring", *place, cwd=tmp_path).stdout)["settings"]
    assert "mixing" not in ring
    assert (ring["period"], ring["turns"], ring["lasts"]) == (1, [], [])


def test_many_workers_are_summed_up() -> None:
    done = thalweg("explain", "tree", "--workers", "40", "--bytes", "4KB")
    assert done.returncode == 0
    assert "The three ranks that send most and least, of 40." in done.stdout


def test_one_worker() -> None:
    done = thalweg("explain", "ring", "--workers", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 sequential moves" in done.stdout


CONTRADICTION = (
    '[[rack]]\nname = "a"\nhosts = [{ name = "x", ranks = [0] }, { name = "y", ranks = [0] }]\n'
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ring(", "--workers", "4"], "can't read the plan 'ring(' at character 6"),
        (["rong", "--workers", "4"], "there is no plan 'rong'; there are"),
        (["ring+zip", "--workers", "4"], "there is no compressor 'zip'; there are"),
        (["gc+int8", "--workers", "4"], "gc+int8 is unsound: a code adds weighted messages"),
        (["ring @ bucket=4MBit", "--workers", "4"], "bucket of @: '4MBit' is not a size; write"),
        (["ring", "--lab", "2x4", "--nic", "200mpps"], "'200mpps' is not a rate; write it like"),
        (["ring", "--lab", "2by4"], "'2by4' is not a layout of racks; write it like 2x4"),
        (["ring", "--lab", "2x2", "--rank-order", "odd"], "'odd' is not one of 'rack'"),
        (["ring", "--workers", "4", "--bytes", "lots"], "'lots' is not a size; write it like 25MB"),
        (["ring", "--workers", "4", "--nic", "1gbit"], "describe a lab of racks; give"),
        (["ring", "--workers", "0"], "Invalid value for '--workers'"),
        (["ring", "--workers", "four"], "Invalid value for '--workers'"),
        (["ring"], "no workers are given; give exactly one of --workers, --cluster and"),
        (["ring", "--workers", "2", "--lab", "2x2"], "--workers and --lab are given together"),
        (["ring", "--workers", "4", "--bytes", ""], "'' is not a size; write it like 25MB"),
        (["ring", "--lab", "2x2", "--nic", ""], "'' is not a rate; write it like"),
        (["ring", "--workers", "4", "--rank-order", "rack"], "describe a lab of racks; give"),
        (["ring", "--workers", "4", "--svg", "-"], "--svg needs a file, not standard output; give"),
        (["ring", "--workers", "300", "--svg", "x"], "300 workers are too many for a draw"),
        (["ring", "--lab", "1000000x1000000"], "workers are too many; give at most"),
        (["gc", "--workers", "1"], "can't do without 1"),
        (["ring", "--cluster", "none.toml"], "can't read none.toml: No such file or directory"),
        (["ring", "--cluster", "bad.toml"], "bad.toml: rank 0 is on x and on y; give every rank"),
        (["ring", "--workers", "4", "--frobnicate"], "No such option"),
        (["ps(servers=5)", "--workers", "4"], "ps has 5 servers but only 4 workers; give"),
        (["gc(stragglers=4)", "--workers", "4"], "can't do without 4"),
        (["auto", "--workers", "20"], "auto has no rounds before it has chosen; name a plan"),
        (["lgc(k=5)", "--workers", "4"], "k=5 is more than the 4 workers; use k=4 or less"),
        (["gc", "--workers", "8", "--batch", "2"], "a batch of 2 has no sample for worker"),
        (["ring", "--workers", "8", "--batch", "64"], "ring has no code that distributes samples"),
        ([], "Missing argument"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text(CONTRADICTION)
    done = thalweg("explain", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("thalweg: ")
    assert message in line
    assert ";" in line


@pytest.mark.parametrize("option", ["--json", "--svg"])
def test_a_file_that_cannot_be_written(option: str) -> None:
    done = thalweg("explain", "ring", "--workers", "2", option, "/proc/none/x")
    assert done.returncode == 2
    assert done.stderr.startswith("thalweg: can't write /proc/none/x: No such file or directory; ")
    assert len(done.stderr.splitlines()) == 1


def test_a_traceback_only_for_those_who_ask() -> None:
    done = thalweg("explain", "rong", "--workers", "4", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def at_seats(workers: int, *seats: int) -> list[int]:
    """Who has these seats of a coded tree, layer by layer; rank 0, with the root, has the last."""
    return [(seat + 1) % workers for seat in seats]


def teams_of_two(workers: int, first: int, last: int) -> str:
    """Neighbours from one seat to another, as wide as if all ranks had two digits."""
    seats = at_seats(workers, *range(first, last + 1))
    pairs = zip(seats[::2], seats[1::2], strict=True)
    text = " | ".join(f"{one} {other}" for one, other in pairs)
    return text.ljust(len(" | ".join(["10 10"] * (len(seats) // 2))))


def listed(ranks: list[int]) -> str:
    return " ".join(map(str, ranks))


def test_a_coded_tree_shows_who_computes_what() -> None:
    done = thalweg("explain", "codedreduce(fanout=4, stragglers=1)", "--workers", "20")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "root, in the process of rank 0: needs one of each of 2 teams" in lines
    assert f"│   └── {teams_of_two(20, 8, 11)}  1/3 to 1/2" in lines
    assert f"└── {teams_of_two(20, 16, 19)}  5/6 to 1" in lines
    assert "any 1 under every parent, 5 in all" in lines
    assert any("1/6 of the batch per worker, 3.33 times the 1/20" in line for line in lines)
    on_time = listed(at_seats(20, 0, 2, 4, 8, 12, 16))
    assert any(f"14 of 20 at best, if {on_time} are on time" in line for line in lines)
    assert f"smallest blocking set  2 stragglers, like {listed(at_seats(20, 0, 1))}" in lines
    assert "the process of rank 0 alone: it has the root" in lines


@pytest.mark.parametrize(
    ("plan", "workers", "where", "traffic"),
    [
        (
            "codedreduce(fanout=4, stragglers=1)", 4 + 4**2,
            "in the process of rank 0, which as a leaf also answers rank 4",
            f"sends {4 + 1}x the model size (4x down, 1x up) and receives 4x",
        ),
        (
            "codedreduce(fanout=3, stragglers=1, code=cyclic)", 3 + 3**2,
            "in the process of rank 0, which as a leaf also answers rank 3",
            f"sends {3 + 1}x the model size (3x down, 1x up) and receives 3x",
        ),
        (
            "gc(stragglers=1)", 6,
            "in the process of rank 0, which answers it too, without a message",
            f"sends {6 - 1}x the model size and receives {6 - 1}x",
        ),
        (
            "codedreduce(fanout=2, stragglers=1, root=separate)", 1 + 2 + 2**2,
            "rank 0, which computes nothing",
            "sends 2x the model size and receives 2x",
        ),
    ],
)  # fmt: skip
def test_where_the_root_is_and_what_its_process_carries(
    plan: str, workers: int, where: str, traffic: str
) -> None:
    done = thalweg("explain", plan, "--workers", str(workers), "--bytes", "4KB")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    at = lines.index(f"root                   {where}")
    assert lines[at + 1] == f"                       its process {traffic}"


def test_large_trees_fit_on_a_screen() -> None:
    replicas = thalweg("explain", "codedreduce(fanout=4, stragglers=1)", "--workers", "84")
    assert f"── {teams_of_two(84, 76, 83)}  13/14 to 1" in replicas.stdout
    weighted = "codedreduce(fanout=4, stragglers=1, code=cyclic)"
    for plan in (weighted, "gc(stragglers=1, code=cyclic_mds)", "gc(stragglers=1)"):
        done = thalweg("explain", plan, "--workers", "84", "--bytes", "1KB")
        assert done.returncode == 0
        assert sum("── " in line for line in done.stdout.splitlines()) <= 20


def test_a_batch_numbers_the_samples() -> None:
    plan = "codedreduce(fanout=3, stragglers=1, code=cyclic)"
    done = thalweg("explain", plan, "--workers", "12", "--batch", "15")
    work = re.findall(r"── (\d+)(?: \+ any 2 of 3)? +(\S.*)", done.stdout)
    assert [int(rank) for rank, _ in work] == at_seats(12, 0, 3, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11)
    without_weights = [re.sub(r" x[-.\d]+", "", parts) for _, parts in work]
    assert without_weights[:4] == ["0-1, 5-6", "2-3, 4, 7", "4, 7, 8-9", "2-3, 8-9"]


def test_every_worker_and_its_weights_are_in_the_rows() -> None:
    plan = "codedreduce(fanout=3, stragglers=1, code=cyclic)"
    place = ["--workers", "12", "--batch", "15", "--json", "-"]
    document = json.loads(thalweg("explain", plan, *place).stdout)
    workers = {row["rank"]: row for row in document["rows"] if row["kind"] == "worker"}
    assert sorted(workers) == list(range(12))
    assert {row["load"] for row in workers.values()} == {"4/15"}
    tops, leaves = at_seats(12, 0, 1, 2), at_seats(12, *range(3, 12))
    assert [(part["from"], part["to"]) for part in workers[tops[0]]["parts"]] == [
        ("0", "2/15"), ("1/3", "7/15")
    ]  # fmt: skip
    assert [(part["from"], part["to"]) for part in workers[tops[0]]["samples"]] == [(0, 2), (5, 7)]
    for number, leaf in enumerate(leaves):
        team = leaves[number // 3 * 3 :][:3]
        assert (workers[leaf]["answers"], workers[leaf]["team"]) == (tops[number // 3], team)
    code = document["settings"]["code"]
    assert code["layers"] == [tops, leaves]
    assert (code["root"], code["root_computes"], code["root_answers"]) == (0, True, tops[-1])
    size = document["settings"]["bytes"]
    assert code["root_traffic"] == {"down": 3 * size, "up": size, "received": 3 * size}
    assert document["settings"]["sent"]["0"] == (3 + 1) * size
    assert document["settings"]["received"]["0"] == 3 * size
    assert code["tolerance"]["under_every_parent"] == 4
    assert code["tolerance"]["at_best"] == 6
    assert code["redundancy"] == pytest.approx(3.2)
    [round_] = [row for row in document["rows"] if row["kind"] == "round"]
    assert round_["schedule"] == "coded tree"


def test_measured_lateness_says_how_often_a_step_waits(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        '[[rack]]\nname = "a"\nhosts = [{ name = "x", ranks = [0] }, '
        '{ name = "y", ranks = [1, 2, 3], late = { probability = 0.1, delay = "2s" } }]\n'
    )
    done = thalweg("explain", "gc(stragglers=1)", "--cluster", "c.toml", cwd=tmp_path)
    assert (
        "steps that wait        1 % of the steps, if each worker straggles at 0 to 10 %"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("asp(staleness=2)", "a worker more than 2 steps ahead of the slowest"),
        ("lgc(k=3)", "the fastest 3 of 20 make the step"),
    ],
)
def test_plans_without_rounds_say_who_sends_what(plan: str, words: str) -> None:
    done = thalweg("explain", plan, "--workers", "20", "--bytes", "1KB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "choices                topology" in done.stdout
    assert "promise                lossy" in done.stdout
    assert words in done.stdout
    document = json.loads(
        thalweg("explain", plan, "--workers", "20", "--bytes", "1KB", "--json", "-").stdout
    )
    assert document["settings"]["mailbox"]["up_bytes"] == 1000
    assert document["settings"]["received"]["0"] == 19 * 1000
    assert [row["answers"] for row in document["rows"]] == [None, *[0] * 19]


@pytest.mark.parametrize("plan", ["auto", "gc(stragglers=4)", "lgc(k=9)"])
def test_a_plan_that_has_no_rounds_here_is_refused_before_it_promises_anything(plan: str) -> None:
    done = thalweg("explain", plan, "--workers", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_groups_that_are_one_group_say_so() -> None:
    remark = "has one group here: all 4 workers are in one rack"
    assert remark in thalweg("explain", "dssync", "--workers", "4").stdout
    assert remark not in thalweg("explain", "dssync", "--lab", "2x2").stdout


def test_a_step_at_which_nothing_travels() -> None:
    by_default = thalweg("explain", "local_sgd(every=4)", "--workers", "4", "--bytes", "1KB")
    assert "step 3)" in by_default.stdout
    done = thalweg("explain", "local_sgd(every=4)", "--workers", "4", "--step", "0")
    assert done.returncode == 0
    assert "No communication at step 0; try --step 3." in done.stdout


def test_a_compressor_that_costs_more_than_it_saves_is_seen() -> None:
    place = ["--lab", "2x16", "--nic", "1gbit", "--uplink", "50mbit", "--json", "-"]
    settings = json.loads(thalweg("explain", "hierarchical+int8", *place).stdout)["settings"]
    assert settings["slowest_link_seconds"] > 2 * settings["uncompressed_seconds"]


def test_an_empty_model(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('name = "m"\ntensors = [{ name = "w", shape = [0, 5] }]\n')
    done = thalweg("explain", "ring", "--workers", "3", "--model", "m.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk() -> None:
    command = (
        f"{sys.executable} -c 'from thalweg.cli.main import run; run()' explain ring --workers 3"
    )
    for arguments in ("", "--json -"):
        done = subprocess.run(
            ["bash", "-c", f"{command} {arguments} > /dev/full"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("thalweg: can't write the output: No space left on device; ")
        assert len(done.stderr.splitlines()) == 1


def test_no_standard_output_at_all() -> None:
    command = (
        f"{sys.executable} -c 'from thalweg.cli.main import run; run()' explain ring --workers 3"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c() -> None:
    command = [sys.executable, "-c", "from thalweg.cli.main import run; run()"]
    process = subprocess.Popen(
        [*command, "explain", "ring", "--workers", "1024"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # it has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "thalweg: interrupted; nothing was left running\n"


def test_version_and_help() -> None:
    import thalweg as package

    assert thalweg("--version").stdout == f"thalweg {package.__version__}\n"
    assert "explain" in thalweg("--help").stdout
    assert thalweg().stdout == thalweg("--help").stdout
    nonsense = thalweg("nonsense")
    assert nonsense.returncode == 2
    assert nonsense.stderr == "thalweg: No such command 'nonsense'; see `thalweg --help`\n"


@pytest.mark.parametrize("json_too", ["", "--json -"])
def test_a_reader_that_goes_away_is_not_told_about_it(json_too: str) -> None:
    explain = "-c 'from thalweg.cli.main import run; run()' explain ring --workers 8 --beats 0"
    command = f"{sys.executable} {explain} {json_too} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
