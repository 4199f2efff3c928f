from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.bench.scenario import Scenario, Target, read_scenario
from thalweg.errors import ScenarioError
from thalweg.facts import Duplex, Duration, Rate, StragglerDelay

EXAMPLE = """
[lab]
hosts = [1, 3]
nic = ["100mbit", "200mbit", { out = "10mbit", in = "20mbit" }, "200mbit"]
uplink = ["50mbit", "40mbit"]
latency = ["0s", "5ms"]
rank_order = "interleaved"
loss = 0.01
[[lab.event]]
at_step = 20
action = "degrade"
rack = 1
rate = "5mbit"
[[lab.event]]
at = "10s"
action = "kill"
host = "host2"
[compute]
step = "50ms"
backward = 0.5
late = { probability = 0.05, delay = "2s" }
[workload]
name = "synthetic(params=1k)"
steps = 100
batch = 16
target = { metric = "loss", value = 0.5 }
evaluate_every = 5
[compare]
sync = ["ddp", "gc(stragglers=1)"]
repeats = 2
warmup = 10
"""
LEAST = """
[lab]
hosts = 2
[workload]
name = "synthetic(params=1k)"
steps = 40
[compare]
sync = ["ring"]
"""


def read(text: str, folder: Path) -> Scenario:
    path = folder / "some.toml"
    path.write_text(text)
    return read_scenario(path)


def test_everything_that_a_file_can_say(tmp_path: Path) -> None:
    scenario = read(EXAMPLE, tmp_path)
    cluster = scenario.cluster
    assert scenario.name == "some"
    assert [rack.ranks for rack in cluster.racks] == [(0,), (1, 2, 3)]
    assert cluster.host(2).nic == Duplex(Rate.parse("10mbit"), Rate.parse("20mbit"))
    assert [rack.uplink for rack in cluster.racks] == [Duplex.both("50mbit"), Duplex.both("40mbit")]
    assert [rack.latency for rack in cluster.racks] == [Duration(0.0), Duration(0.005)]
    assert scenario.loss == 0.01
    assert [str(event) for event in scenario.events] == [
        "step 20: degrade rack 1 at 5mbit",
        "10s: kill host host2",
    ]
    assert scenario.compute.backward == 0.5
    assert scenario.compute.late == StragglerDelay(probability=0.05, delay=Duration(2.0))
    assert (scenario.steps, scenario.batch, scenario.evaluate_every) == (100, 16, 5)
    assert scenario.target == Target(metric="loss", value=0.5)
    assert scenario.syncs == ("ddp", "gc(stragglers=1)")
    assert (scenario.repeats, scenario.warmup) == (2, 10)


def test_the_page_shows_a_scenario_that_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-do-i-compare-plans.md"
    shown = page.read_text().split("```toml\n")[1].split("```")[0]
    assert read(shown, tmp_path).syncs == ("ddp", "ring", "dssync", "gc(stragglers=1)")


def test_the_least_that_a_file_must_say(tmp_path: Path) -> None:
    scenario = read(LEAST, tmp_path)
    assert [rack.uplink for rack in scenario.cluster.racks] == [None]
    assert (scenario.events, scenario.target, scenario.loss) == ((), None, 0.0)
    assert (scenario.compute.step.seconds, scenario.compute.backward) == (0.0, 2 / 3)
    assert (scenario.repeats, scenario.warmup, scenario.batch) == (3, 15, None)


def test_a_cluster_file_next_to_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[[rack]]\nname = "a"\nhosts = ["x", "y"]\n')
    text = LEAST.replace("[lab]\nhosts = 2", '[cluster]\nfile = "cluster.toml"')
    event = '[[lab.event]]\nat_step = 3\naction = "pause"\nhost = "y"\n'
    scenario = read(text + event, tmp_path)
    assert [host.name for host in scenario.cluster.hosts] == ["x", "y"]
    assert scenario.events[0].host == "y"


def test_steps_that_count(tmp_path: Path) -> None:
    scenario = read(EXAMPLE, tmp_path)
    counted = scenario.counted([20, None, 60])
    assert counted == [*range(11, 21), *range(36, 61), *range(76, 101)]


def test_targets_are_reached_from_their_side() -> None:
    assert Target(metric="accuracy", value=0.9).reached_by(0.9)
    assert not Target(metric="accuracy", value=0.9).reached_by(0.89)
    assert Target(metric="loss", value=0.5).reached_by(0.4)
    assert not Target(metric="loss", value=0.5).reached_by(0.6)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("[lab]", "[lab", "not TOML"),
        ("[compute]", "[cmpute]", "the file has an unknown key 'cmpute'; it takes lab, cluster"),
        ("hosts = [1, 3]", "hosts = [1, 0]", "hosts of [lab] is no list of whole numbers from 1"),
        ("hosts = [1, 3]", "racks = 3\nhosts = [1, 3]", "hosts of [lab] lists 2 racks, and racks"),
        ("hosts = [1, 3]", "racks = 2", "hosts of [lab] is missing; give a whole number from 1"),
        ("hosts = [1, 3]", "racks = 0\nhosts = 2", "racks of [lab] is 0; give a whole number fro"),
        ("hosts = [1, 3]", "hosts = [1, 4]", "the hosts' NICs are 4, not 5; list 5, or give one"),
        ('"100mbit", ', '"100miles", ', "nic of [lab], entry 0: '100miles' is not a rate; write"),
        ('{ out = "10mbit", in', '{ out = "10mbit", on', "nic of [lab], entry 2 has an unknown"),
        ('uplink = ["50mbit", ', "uplink = [", "the uplinks are 1, not 2; list 2, or give one"),
        ('"0s", "5ms"', '"0s"', "the uplinks' latencies are 1, not 2; list 2, or give one"),
        ('"5ms"', '"soon"', "latency of [lab], entry 1: 'soon' is not a duration; write"),
        ('"interleaved"', '"random"', "[lab] has no rank_order 'random'; give rack or interleav"),
        ("loss = 0.01", "loss = 2", "loss of [lab] is 2; give a number from 0 to 1"),
        ("loss = 0.01", "lost = 1", "[lab] has an unknown key 'lost'; it takes racks, hosts"),
        ("rack = 1", "rack = 2", "step 20: degrade rack 2 at 5mbit: there is no rack 2; there"),
        ('host = "host2"', "host = 4", "10s: kill host 4: there is no host 4; give a"),
        ('host = "host2"', 'host = "h"', "10s: kill host h: there is no host 'h'; give a"),
        ('"degrade"', '"slow"', "[[lab.event]] 0 has no action 'slow'; give one of degrade"),
        ("at_step = 20", "at_step = 100", "step 100: degrade rack 1 at 5mbit: the scenario has o"),
        ("[[lab.event]]\nat = ", "[lab.event]\nat = ", "not TOML"),
        ("backward = 0.5", "backward = 2", "backward of [compute] is 2; give a number from 0"),
        ("probability = 0.05", "probability = 5", "late of [compute]: 5 is no probability; give"),
        ('step = "50ms"', "step = 50", "step of [compute]: '50' is not a duration; write"),
        ("name = ", "nmae = ", "[workload] has an unknown key 'nmae'; it takes name, steps"),
        ('"synthetic(params=1k)"', '"digitz"', "there is no job 'digitz'; there are"),
        ("steps = 100", "steps = 0", "steps of [workload] is 0; give a whole number from 1"),
        ("steps = 100", "", "steps of [workload] is missing; give a whole number from 1"),
        ("batch = 16", "batch = 3", "a batch of 3 has no sample for each of 4 workers; write b"),
        ('metric = "loss"', 'metric = "accuracy"', "the metric of synthetic(params=1k) is loss, n"),
        (", value = 0.5", "", "target of [workload] lacks 'value'; give the value to reach"),
        ("target =", "traget =", "[workload] has an unknown key 'traget'"),
        ("warmup = 10", "warmup = 100", "none of 100 steps is counted: 100 are warm-up, and 15"),
        ('["ddp", "gc(stragglers=1)"]', "[]", "sync of [compare] isn't a list of plans; write"),
        ('"ddp"', '"dpd"', "there is no plan 'dpd'"),
        ('"ddp"', '"gc+int8"', "gc+int8 is unsound: a code adds weighted messages, and int8 of"),
        ('"ddp"', '"gc(stragglers=4)"', "4 workers can't do without 4; use"),
        ('"ddp", ', '"gc(stragglers=1)", ', "gc(stragglers=1) is listed twice under [compare]; l"),
        ("repeats = 2", "repeats = 0", "repeats of [compare] is 0; give a whole number from 1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_their_place(
    old: str, new: str, line: str, tmp_path: Path
) -> None:
    assert old in EXAMPLE
    with pytest.raises(ScenarioError) as caught:
        read(EXAMPLE.replace(old, new, 1), tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'some.toml'}: {line}")
    assert "\n" not in str(caught.value)


def test_two_places_at_once(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"\[cluster\] and hosts of \[lab\] both describe the"):
        read(LEAST + '[cluster]\nfile = "c.toml"\n', tmp_path)
    with pytest.raises(ScenarioError, match=r"some.toml: can't read .*c.toml: No such file"):
        read(LEAST.replace("[lab]\nhosts = 2", '[cluster]\nfile = "c.toml"'), tmp_path)


def test_evaluations_without_a_target(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"evaluate_every of .* has no target; give"):
        read(LEAST.replace("steps = 40", "steps = 40\nevaluate_every = 5"), tmp_path)
