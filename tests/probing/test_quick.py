"""Quick surveys of simulated networks whose racks are known: rates, who is slow, and how little is
measured."""

from __future__ import annotations

import pytest

from tests.probing.simulated import Simulated
from thalweg.facts import Cluster, Duplex, Host, Rack
from thalweg.launch.launcher_variables import find_cluster
from thalweg.probing.calibration import survey_quickly
from thalweg.probing.survey import survey

SLOW = 5


def network() -> Simulated:
    nics = ["100mbit"] * 16
    nics[SLOW] = "25mbit"
    uplinks = ["100mbit", "100mbit", "30mbit", "100mbit"]
    return Simulated(Cluster.regular([4] * 4, nic=nics, uplink=uplinks), at_once=8)


def assert_near(found: Duplex | None, real: Duplex | None) -> None:
    assert found is not None
    assert real is not None
    for way in ("out", "into"):
        rate, wanted = getattr(found, way), getattr(real, way)
        assert rate.bits_per_second == pytest.approx(wanted.bits_per_second, rel=0.05)


def test_rates_and_who_is_slow() -> None:
    simulated = network()
    declared = Cluster.regular([4] * 4)  # racks, and rates that nobody knows
    found = survey_quickly(simulated, declared)
    for host, real in zip(found.hosts, simulated.cluster.hosts, strict=True):
        assert (host.name, host.ranks) == (real.name, real.ranks)
        assert_near(host.nic, real.nic)
    for rack, real_rack in zip(found.racks, simulated.cluster.racks, strict=True):
        assert_near(rack.uplink, real_rack.uplink)


def test_it_measures_a_fraction_of_a_probe() -> None:
    quick, whole = network(), network()
    survey_quickly(quick, Cluster.regular([4] * 4))
    survey(whole, None, 0.0)
    assert quick.tests * 0.2 <= 6.0  # seconds
    assert quick.tests + quick.pings < (whole.tests + whole.pings) / 2


def test_without_racks_it_is_a_whole_probe() -> None:
    plain = Simulated(Cluster.regular([4] * 4, nic="100mbit", uplink="100mbit"))
    found = survey_quickly(plain, None)
    assert [rack.ranks for rack in found.racks] == [
        tuple(range(first, first + 4)) for first in (0, 4, 8, 12)
    ]


def test_hosts_that_are_not_as_declared_are_probed() -> None:
    """Two hosts of two ranks are declared; there are four."""
    simulated = Simulated(Cluster.regular([2, 2], nic="100mbit", uplink="50mbit"))
    pairs = [Host(name=f"h{first}", ranks=(first, first + 1)) for first in (0, 2)]
    declared = Cluster(racks=tuple(Rack(name=f"r{h.name}", hosts=(h,)) for h in pairs))
    assert len(survey_quickly(simulated, declared).hosts) == 4


def test_where_nothing_is_declared_the_hosts_that_are_there_are_one_rack() -> None:
    """Eight ranks are assumed on hosts of their own; there are four hosts of two."""
    hosts = [Host(name=f"h{n}", ranks=(2 * n, 2 * n + 1)) for n in range(4)]
    real = Cluster(racks=(Rack(name="r", hosts=tuple(hosts)),))
    quick, whole = Simulated(real), Simulated(real)
    found = survey_quickly(quick, find_cluster(None, 8, {}))
    survey(whole, None, 0.0)
    [rack] = found.racks
    assert [host.ranks for host in rack.hosts] == [host.ranks for host in hosts]
    for host, real_host in zip(rack.hosts, hosts, strict=True):
        assert_near(host.nic, real_host.nic)
    assert quick.tests + quick.pings < (whole.tests + whole.pings) / 2


def test_one_host_has_no_links() -> None:
    host = Host(name="alone", ranks=(0, 1, 2))
    cluster = Cluster(racks=(Rack(name="r", hosts=(host,)),))
    simulated = Simulated(cluster)
    assert survey_quickly(simulated, cluster).hosts == (host,)
    assert simulated.tests == 0
