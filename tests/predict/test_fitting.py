"""Trials made by simulating known figures: the fit finds these figures again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from thalweg.facts import (
    Cluster,
    Duration,
    FittedValue,
    Host,
    Machine,
    Rack,
    Situation,
    Size,
    TransportCosts,
    Workload,
)
from thalweg.predict.fitting import (
    MAX_SMALL_TRIAL_BYTES,
    NetworkTrial,
    concurrent_flows,
    fit,
    schedules,
    slowdown_trial_kinds,
    wanted_trials,
)
from thalweg.predict.flow_simulator import FlowSimulator
from thalweg.schedules import Schedule

FLAT = Cluster.regular([8], nic="100mbit", latency=Duration(60e-6))
RACKS = Cluster.regular([4, 4], nic="100mbit", uplink="50mbit", latency=Duration(60e-6))
LATENCY = 150e-6  # in use; what is declared is what pings take at best
MESSAGE = 120e-6
BURST = 128 * 1024.0


def situation(cluster: Cluster) -> Situation:
    return Situation(cluster=cluster, workload=Workload.of_size(Size.parse("1MB")))


def road_of(cluster: Cluster) -> TransportCosts:
    """A share for each number of flows that its trials have."""
    shares = {1: 0.97, 2: 0.9, 4: 0.85, 7: 0.75, 16: 0.6}
    large = {
        kind
        for kind, nbytes in wanted_trials(cluster, backend=False)
        if nbytes > MAX_SMALL_TRIAL_BYTES
    }
    kinds = large - {*slowdown_trial_kinds()}
    crowds = sorted({concurrent_flows(kind, cluster) for kind in kinds})
    return TransportCosts(
        message=FittedValue(MESSAGE),
        crowding=tuple((flows, FittedValue(shares[flows])) for flows in crowds),
    )


def made(cluster: Cluster, machine: Machine, latency: float) -> Iterator[NetworkTrial]:
    """What trials would take if the simulation were the truth."""
    truth = replace(cluster, latency=Duration(latency))
    for kind, nbytes in wanted_trials(cluster, backend=True):
        costs = machine.native if kind == "native" else machine.ours
        flows = FlowSimulator(truth, costs, machine.burst)
        yield NetworkTrial(kind, nbytes, (seconds_of(flows, schedules(kind, cluster, nbytes)),) * 5)


def seconds_of(flows: FlowSimulator, together: Sequence[Schedule]) -> float:
    ends: list[float] = []
    for schedule in together:
        exchange = flows.exchange(schedule)
        for rank in schedule.ranks:
            exchange.start(rank, lambda: ends.append(flows.now))
    flows.run()
    return max(ends)


def machine_of(cluster: Cluster) -> Machine:
    native = TransportCosts(message=FittedValue(300e-6), crowding=((1, FittedValue(0.95)),))
    return Machine(ours=road_of(cluster), native=native, burst=BURST)


def assert_near(found: Machine, real: Machine, rel: float) -> None:
    for ours, theirs in ((found.ours, real.ours), (found.native, real.native)):
        assert ours.message.value == pytest.approx(theirs.message.value, rel=rel)
        assert ours.byte.value == pytest.approx(theirs.byte.value, rel=rel)
        assert [flows for flows, _ in ours.crowding] == [flows for flows, _ in theirs.crowding]
        for (_, share), (_, wanted_share) in zip(ours.crowding, theirs.crowding, strict=True):
            assert share.value == pytest.approx(wanted_share.value, rel=rel)


@pytest.mark.parametrize("cluster", [FLAT, RACKS], ids=["flat", "racks"])
def test_known_figures_are_found_again(cluster: Cluster) -> None:
    real = machine_of(cluster)
    found = fit(situation(cluster), list(made(cluster, real, LATENCY)))
    assert found.cluster.latency.seconds == pytest.approx(LATENCY, rel=0.02)
    assert_near(found.machine, real, 0.02)
    assert found.machine.burst == pytest.approx(BURST, rel=0.1)
    assert found.machine.assumed == ()


@pytest.mark.parametrize("cluster", [FLAT, RACKS], ids=["flat", "racks"])
def test_outliers_and_noise(cluster: Cluster) -> None:
    """One repetition of five takes three times as long, all are off by half a percent."""
    draw, real = Random(3), machine_of(cluster)
    noisy = []
    for trial in made(cluster, real, LATENCY):
        seconds = [s * (1 + draw.gauss(0, 0.005)) for s in trial.seconds]
        seconds[draw.randrange(5)] *= 3
        noisy.append(replace(trial, seconds=tuple(seconds)))
    found = fit(situation(cluster), noisy)
    assert_near(found.machine, real, 0.05)
    assert all(share.spread < 0.05 for _, share in found.machine.ours.crowding)


def test_ranks_of_one_host() -> None:
    host = Host(name="alone", ranks=(0, 1, 2, 3))
    cluster = Cluster(racks=(Rack(name="r", hosts=(host,)),), latency=Duration(20e-6))
    real = Machine(
        ours=TransportCosts(message=FittedValue(50e-6), byte=FittedValue(2e-9)),
        native=TransportCosts(message=FittedValue(80e-6), byte=FittedValue(1e-9)),
    )
    found = fit(situation(cluster), list(made(cluster, real, 40e-6)))
    assert_near(found.machine, real, 0.02)
    assert found.machine.burst == 0.0


def test_what_a_topology_takes_longer_is_its_drag() -> None:
    real = machine_of(FLAT)
    trials = [
        replace(trial, seconds=tuple(1.5 * s for s in trial.seconds))
        if trial.kind == "halving_doubling"
        else trial
        for trial in made(FLAT, real, LATENCY)
    ]
    drag = {name: figure.value for name, figure in fit(situation(FLAT), trials).machine.ours.drag}
    assert drag == {
        "halving_doubling": pytest.approx(1.5, rel=0.03),
        "double_tree": pytest.approx(1.0, rel=0.03),
        "star": pytest.approx(1.0, rel=0.03),
    }


def test_nothing_was_tried() -> None:
    found = fit(situation(FLAT), [])
    assert found.cluster == FLAT
    assert found.machine == Machine()
    assert found.machine.assumed == ("messages that cost nothing", "a backend that costs nothing")


def test_spread_is_that_of_the_repetitions() -> None:
    """Deviations of 0.1, 0 and 0.1 of a median of 1: the MAD is 0.1, and a normal distribution with
    that MAD has a standard deviation of 0.1 / 0.6745."""
    trials = [
        replace(trial, seconds=tuple(factor * trial.seconds[0] for factor in (0.9, 1, 1.1)))
        for trial in made(FLAT, machine_of(FLAT), LATENCY)
    ]
    spreads = [share.spread for _, share in fit(situation(FLAT), trials).machine.ours.crowding]
    assert spreads == [pytest.approx(0.1 / 0.6745, rel=1e-3)] * 3


def test_crowds() -> None:
    """Of 4 hosts behind an uplink of half a NIC's rate: all to all crosses it 4 x 4 times."""
    assert [concurrent_flows(kind, FLAT) for kind in ("ring", "gossip", "ps")] == [1, 2, 7]
    assert [concurrent_flows(kind, RACKS) for kind in ("ring", "gossip", "hierarchical", "ps")] == [
        1,
        2,
        4,
        16,
    ]
