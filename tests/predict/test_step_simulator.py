"""Steps on simulated links against sums by hand: what overlaps, and what is exposed."""

from dataclasses import replace

import pytest

from thalweg import Cluster, Situation, Size, Workload, parse_plan, predict
from thalweg.facts import (
    FREE_MACHINE,
    CodecCost,
    Costs,
    Duration,
    FittedValue,
    Machine,
    StragglerDelay,
    Tensor,
)
from thalweg.predict.closed_form import synchronisation_seconds
from thalweg.schedules import Group

MBYTE = 1_000_000  # a layer's gradient
LAYER = MBYTE / 12_500_000  # seconds on 100 Mbit/s
FORWARD, BACKWARD, OPTIMIZER = 0.1, 0.4, 0.02
COMPUTE = FORWARD + BACKWARD + OPTIMIZER


def hosts(number: int, rate: str = "100mbit") -> Cluster:
    return Cluster.regular([number], nic=rate, latency=Duration(0.0))


def layers(number: int) -> Workload:
    """Equal ones, which backward finishes at equal intervals."""
    tensors = tuple(Tensor(name=f"t{i}", shape=(250, 1000)) for i in range(number))
    costs = Costs(
        forward=Duration(FORWARD), backward=Duration(BACKWARD), optimizer=Duration(OPTIMIZER)
    )
    return Workload(name="layers", tensors=tensors, costs=costs)


def seconds(
    sync: str, cluster: Cluster, workload: Workload, machine: Machine = FREE_MACHINE
) -> float:
    situation = Situation(cluster=cluster, workload=workload, machine=machine)
    return predict(sync, situation).seconds


def test_one_bucket_is_exposed_whole() -> None:
    exchange = 2 * 3 / 4 * 4 * LAYER
    assert seconds("ring", hosts(4), layers(4)) == pytest.approx(COMPUTE + exchange)


def test_of_many_buckets_only_the_last_is_exposed() -> None:
    """Two hosts send a whole layer each way: 0.08 s, while backward takes 0.1 s a layer."""
    assert seconds("ring @ bucket=1MB", hosts(2), layers(4)) == pytest.approx(COMPUTE + LAYER)


def test_buckets_queue_where_links_are_slower_than_backward() -> None:
    """At half the rate a layer takes 0.16 s; the first is ready after 0.1 s, and from then on the
    link never rests."""
    expected = FORWARD + 0.1 + 4 * 2 * LAYER + OPTIMIZER
    assert seconds("ring @ bucket=1MB", hosts(2, "50mbit"), layers(4)) == pytest.approx(expected)


def test_the_backend_closes_its_first_bucket_at_a_mebibyte() -> None:
    """Two layers of 0.9 MB exceed it together; the other two follow in one bucket."""
    small = tuple(Tensor(name=f"t{i}", shape=(225, 1000)) for i in range(4))
    workload = replace(layers(4), tensors=small)
    expected = COMPUTE + 2 * 0.9 * LAYER  # the second bucket, after backward
    assert seconds("ddp", hosts(2), workload) == pytest.approx(expected)


def test_parameters_are_averaged_after_the_step_and_less_often() -> None:
    exchange = 2 * 3 / 4 * 4 * LAYER
    every_fourth = seconds("local_sgd(every=4)", hosts(4), layers(4))
    assert every_fourth == pytest.approx(COMPUTE + exchange / 4)


def test_a_result_that_is_applied_late_travels_while_the_next_step_is_computed() -> None:
    exchange = 2 * 3 / 4 * 4 * LAYER  # 0.48 s, less than computing
    late = seconds("local_sgd(every=1, delay=1)", hosts(4), layers(4))
    assert exchange < COMPUTE
    assert late == pytest.approx(COMPUTE)


def test_a_late_result_that_takes_longer_than_a_step_sets_the_pace() -> None:
    exchange = 2 * 3 / 4 * 4 * LAYER * 2
    late = seconds("local_sgd(every=1, delay=1)", hosts(4, "50mbit"), layers(4))
    assert late == pytest.approx(exchange)


def test_a_codec_comes_on_top() -> None:
    costs = CodecCost(bucket=FittedValue(0.01), encode=FittedValue(1e-8), decode=FittedValue(2e-8))
    machine = Machine(codecs={"fp16(warmup=0)": costs, "fp16": costs})
    exchange = 2 * 3 / 4 * 2 * LAYER  # half of 4 MB
    situation = Situation(cluster=hosts(4), workload=layers(4), machine=machine)
    estimate = predict("ring+fp16", situation)
    assert estimate.parts.encode == pytest.approx(0.01 + 0.01)
    assert estimate.parts.decode == pytest.approx(0.02)
    assert estimate.seconds == pytest.approx(COMPUTE + 0.04 + exchange)


def test_what_a_codec_takes_while_backward_runs_backward_loses() -> None:
    costs = CodecCost(encode=FittedValue(1e-7))  # 25 ms a layer
    overlapped = "ring+fp16 @ bucket=1MB, overlap=true"
    contended = Machine(codecs={"fp16": costs}, contention=1.0)
    alone = Machine(codecs={"fp16": costs}, contention=0.0)
    expected = COMPUTE + 0.025 + LAYER / 2
    assert seconds(overlapped, hosts(2), layers(4), alone) == pytest.approx(expected)
    lost = 3 * 0.025  # of the three layers that are encoded before backward ends
    assert seconds(overlapped, hosts(2), layers(4), contended) == pytest.approx(expected + lost)


def test_where_it_is_left_open_the_better_way_counts() -> None:
    machine = Machine(codecs={"fp16": CodecCost(encode=FittedValue(1e-7))}, contention=2.0)
    ways = [
        seconds(f"ring+fp16 @ bucket=1MB{way}", hosts(2), layers(4), machine)
        for way in ("", ", overlap=true", ", overlap=false")
    ]
    assert ways[0] == min(ways)
    assert ways[1] != ways[2]


def test_a_slow_group_holds_up_only_those_who_meet_it() -> None:
    """Host 7 has a tenth of the others' rate. A ring waits for its NIC at every step; under dssync
    most hosts don't meet it at most steps."""
    nics = ["100mbit"] * 7 + ["10mbit"]
    cluster = Cluster.regular([4, 4], nic=nics, latency=Duration(0.0))
    ring = seconds("ring", cluster, layers(4))
    shuffled = seconds("dssync", cluster, layers(4))
    pair_of_the_slow = 4 * MBYTE / 1_250_000
    assert ring == pytest.approx(COMPUTE + 2 * 7 / 8 * pair_of_the_slow)
    assert shuffled < ring / 2


def test_a_code_computes_more_and_waits_less() -> None:
    delay = StragglerDelay(probability=0.05, delay=Duration(5.0))
    cluster = hosts(6, "10gbit")
    racks = tuple(
        replace(rack, hosts=tuple(replace(host, late=delay) for host in rack.hosts))
        for rack in cluster.racks
    )
    cluster = replace(cluster, racks=racks)
    situation = Situation(cluster=cluster, workload=layers(1))
    plain = predict("ring", situation)
    coded = predict("gc(stragglers=1)", situation)
    expected_maximum = 5.0 * (1 - 0.95**6)
    assert plain.parts.waiting == pytest.approx(expected_maximum, rel=0.15)
    assert coded.parts.compute == pytest.approx(2 * (FORWARD + BACKWARD) + OPTIMIZER, rel=1e-3)
    assert coded.parts.waiting < plain.parts.waiting / 2


def test_the_closed_form_of_a_step_is_the_replay_where_both_exist() -> None:
    cluster, workload = hosts(8), layers(6)
    situation = Situation(cluster=cluster, workload=workload)
    for sync in ("ring", "ring @ bucket=1MB", "local_sgd(every=4)"):
        form = predict(sync, situation, by_form=True)
        assert form.form != predict(sync, situation).form
        assert seconds(sync, cluster, workload) == pytest.approx(form.seconds, rel=1e-3)


def test_nothing_is_faster_than_its_exchange_alone_if_nothing_overlaps() -> None:
    cluster = Cluster.regular([3, 3], nic="100mbit", uplink="50mbit", latency=Duration(1e-4))
    workload = Workload.of_size(Size.parse("3MB"))
    for sync in ("ring", "hierarchical", "halving_doubling", "double_tree", "ps", "gossip"):
        plan = predict(sync, Situation(cluster=cluster, workload=workload))
        form = synchronisation_seconds(parse_plan(sync), Group.everybody(cluster), workload)
        assert form is not None
        assert plan.seconds == pytest.approx(form, rel=0.35), sync
