"""Whole probes of simulated networks: the cluster, its file, outliers and contradictions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.probing.simulated import Simulated
from thalweg.facts import Cluster, Host, Rack, Rate, StragglerDelay, parse_cluster
from thalweg.probing.coordinator import HostInfo
from thalweg.probing.result import ProbeResult, names_of
from thalweg.probing.survey import survey

MBIT = 1e6


def probed(cluster: Cluster, declared: Cluster | None = None, hop: float = 0.0) -> ProbeResult:
    return survey(Simulated(cluster, hop=hop), declared, 0.0)


def test_a_cluster_comes_out_as_it_is() -> None:
    nics = ["100mbit"] * 12
    nics[4] = "25mbit"
    real = Cluster.regular([5, 3, 4], nic=nics, uplink="100mbit", interleaved=True)
    found = probed(real)
    assert [rack.ranks for rack in found.cluster.racks] == [rack.ranks for rack in real.racks]
    assert [rack.name for rack in found.cluster.racks] == ["rack0", "rack1", "rack2"]
    for host in real.hosts:
        measured = found.cluster.host(host.ranks[0])
        assert measured.name == host.name
        assert measured.nic.out.bits_per_second == pytest.approx(
            host.nic.out.bits_per_second, rel=0.03
        )
    factors = [uplink.oversubscription for uplink in found.uplinks]
    assert factors == [pytest.approx(f, rel=0.06) for f in (4.25, 3.0, 4.0)]
    assert found.sureness == "sure"
    slow = real.racks[0].hosts[4].name
    [outlier] = found.outliers
    assert outlier.startswith(f"{slow}'s NIC is 4.")
    assert "x slower than the others" in outlier


def test_all_ranks_hold_the_same_and_the_file_is_it() -> None:
    found = probed(Cluster.regular([3, 3], nic="100mbit", uplink="50mbit"))
    sent = json.loads(json.dumps(found.packed()))
    assert ProbeResult.unpacked(sent) == ProbeResult.unpacked(found.packed()) == found
    text = found.file()
    assert parse_cluster(text) == found.cluster
    assert "# Racks (sure): hosts of a rack slow" in text


def test_rows() -> None:
    found = probed(Cluster.regular([2, 2], nic="100mbit", uplink="100mbit"))
    rows = found.rows()
    assert [row["kind"] for row in rows] == ["host"] * 4 + ["uplink"] * 2
    for row in rows[:4]:
        assert row["nic_mbps"] == min(row["nic_out_mbps"], row["nic_in_mbps"])
        assert row["nic_mbps"] == pytest.approx(100, rel=0.05)
        assert 100 <= row["rtt_us"] <= 120
    for row in rows[4:]:
        assert row["out_mbps"] == pytest.approx(100, rel=0.05)
        assert row["oversubscription"] == pytest.approx(2, rel=0.05)


def test_two_sites_are_told_by_latency() -> None:
    found = probed(Cluster.regular([3, 2], nic="100mbit"), hop=10e-3)
    assert [rack.ranks for rack in found.cluster.racks] == [(0, 1, 2), (3, 4)]
    assert "round trips across racks" in found.reason
    assert [rack.uplink for rack in found.cluster.racks] == [None, None]
    assert "no uplink is a bottleneck: racks don't matter for rates" in found.notes
    across = found.cluster.seconds_between(0, 3)
    assert across == pytest.approx((1e-4 + 10e-3) / 2, rel=0.1)


def test_where_nothing_tells_it_says_so() -> None:
    found = probed(Cluster.regular([4], nic="100mbit"))
    assert (len(found.cluster.racks), found.sureness) == (1, "guess")
    assert "neither latency nor rates tell hosts apart" in found.reason
    assert found.uplinks == ()


def test_declared_racks_are_kept_and_what_contradicts_them_is_told() -> None:
    real = Cluster.regular([4, 4], nic="100mbit", uplink="100mbit")
    delay = StragglerDelay(probability=0.1)
    wrong = Cluster.regular([4, 4], nic="200mbit", uplink="100mbit", interleaved=True)
    first = replace(wrong.racks[0], name="left", hosts=_late(wrong.racks[0], delay))
    declared = replace(wrong, racks=(first, *wrong.racks[1:]))
    found = probed(real, declared)
    assert [rack.name for rack in found.cluster.racks] == ["left", "rack1"]
    assert found.cluster.racks[0].ranks == (0, 2, 4, 6)
    assert found.cluster.host(0).late == delay
    assert found.sureness == "declared"
    assert "contradicted by rates" in found.reason
    text = "\n".join(found.contradictions)
    assert "host0 and host4 are declared in left, but by rates they don't share an uplink" in text
    assert "host0 and host1 are declared in different racks, but by rates they share" in text
    assert "host3's NIC is declared 200mbit out, but" in text
    assert "pairs of hosts more" in text


def _late(rack: Rack, delay: StragglerDelay) -> tuple[Host, ...]:
    return tuple(replace(host, late=delay) for host in rack.hosts)


def test_declared_racks_that_are_right_are_confirmed() -> None:
    real = Cluster.regular([3, 3, 3], nic="100mbit", uplink="100mbit")
    found = probed(real, real)
    assert found.contradictions == ()
    assert found.reason == "as declared, and confirmed by rates"


def test_one_host_has_nothing_to_measure() -> None:
    ranks = (0, 1, 2)
    cluster = Cluster(racks=(Rack(name="r", hosts=(Host(name="box", ranks=ranks),)),))
    found = probed(cluster)
    assert not found.measured
    assert found.cluster.latency.seconds == pytest.approx(1e-5)
    assert found.cluster.hosts[0].ranks == ranks
    assert found.rows()[0]["nic_mbps"] is None
    assert "all workers are on one host" in found.notes[0]


def test_names_are_unique_and_fit_a_file() -> None:
    def named(*names: str) -> list[str]:
        hosts = [
            HostInfo(name=name, machine="m", cores=1, ranks=(rank,))
            for rank, name in enumerate(names)
        ]
        return names_of(hosts, None)

    assert named("a", "b") == ["a", "b"]
    assert named("a", "a", "b c") == ["a-0", "a-1", "b-c"]
    assert named("a", "a", "a-1") == ["host0", "host1", "host2"]
    assert named("..", "b") == ["host", "b"]


def test_rates_are_written_with_three_digits() -> None:
    found = probed(Cluster.regular([2], nic=Rate(123_456_789.0)))
    assert all(len(str(host.nic.out).rstrip("mbit")) <= 4 for host in found.cluster.hosts)
