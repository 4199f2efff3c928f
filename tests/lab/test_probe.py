"""Real networks, probed: racks whatever the rank numbers are, rates within 10 %, who is slow, and
what happens if a host goes away meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.errors import WorkerFailed
from thalweg.facts import Cluster, Duplex, Rate
from thalweg.lab import Lab
from thalweg.launch.worker_process import SendMessage
from thalweg.probing import ProbeResult, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("needs_lab")]


def probed(
    cluster: Cluster, name: str, events: list[dict[str, Any]] | None = None, timeout: float = 30.0
) -> ProbeResult:
    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return measure(timeout=timeout).packed()

    with Lab.of(cluster, name=name) as lab:
        results = lab.run(work, process_group=False, events=events or [], on_line=_quiet)
    assert all(result == results[0] for result in results)
    return ProbeResult.unpacked(results[0])


def _quiet(rank: int, stream: str, line: str) -> None:
    pass


def is_near(found: Rate, real: Rate) -> bool:
    """Of a link's rate 95.6 % are payload."""
    return 0.9 <= found.bits_per_second / real.bits_per_second <= 1.03


def racks(cluster: Cluster) -> list[tuple[int, ...]]:
    return sorted(tuple(sorted(rack.ranks)) for rack in cluster.racks)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("sizes", "nic", "uplink"),
    [
        ([4, 4], "100mbit", "100mbit"),
        ([4, 4], "200mbit", "200mbit"),
        ([5, 3, 4], "100mbit", "50mbit"),
        ([4, 4, 4, 4], "100mbit", "100mbit"),
    ],
)
def test_racks_and_rates(
    sizes: list[int], nic: str, uplink: str, interleaved: bool, name: str
) -> None:
    real = Cluster.regular(sizes, nic=nic, uplink=uplink, interleaved=interleaved)
    found = probed(real, name)
    print(found.reason, f"{found.seconds:.0f} s")
    assert racks(found.cluster) == racks(real)
    assert found.sureness == "sure"
    for host in found.cluster.hosts:
        for way in (host.nic.out, host.nic.into):
            assert is_near(way, Rate.parse(nic)), host
    for rack in found.cluster.racks:
        assert rack.uplink is not None
        assert is_near(rack.uplink.out, Rate.parse(uplink))
        assert is_near(rack.uplink.into, Rate.parse(uplink))
    ratio = Rate.parse(nic).bits_per_second / Rate.parse(uplink).bits_per_second
    factors = [uplink.oversubscription for uplink in found.uplinks]
    assert factors == [
        pytest.approx(ratio * len(rack.hosts), rel=0.1) for rack in found.cluster.racks
    ]


def test_slow_hosts_are_found_where_they_are(name: str) -> None:
    one_way = Duplex(Rate.parse("100mbit"), Rate.parse("30mbit"))
    nics = ["100mbit", "25mbit", "100mbit", "100mbit", "100mbit", "100mbit", one_way, "100mbit"]
    real = Cluster.regular([4, 4], nic=nics, uplink="100mbit")
    found = probed(real, name)
    assert racks(found.cluster) == racks(real)
    for host in real.hosts:
        measured = found.cluster.host(host.ranks[0])
        assert is_near(measured.nic.out, host.nic.out), measured
        assert is_near(measured.nic.into, host.nic.into), measured
    slow, slow_one_way = found.outliers
    assert slow.startswith("host1's NIC is ")
    assert slow_one_way.startswith("host6's NIC is ")
    assert "slower in than the others" in slow_one_way


def test_uplinks_that_do_not_limit_are_said_not_to(name: str) -> None:
    found = probed(Cluster.regular([2, 2], nic="100mbit"), name)
    assert found.sureness == "guess"
    assert "no two flows slow each other down" in found.reason
    assert [rack.uplink for rack in found.cluster.racks] == [None]


@pytest.mark.parametrize(
    ("event", "who"),
    [
        ({"action": "kill", "host": 3, "at": "5s"}, "rank 3 on host3"),
        ({"action": "cut", "host": 3, "at": "5s"}, "rank 3 on host3"),
        ({"action": "cut", "host": 0, "at": "5s"}, "rank 0 on host0"),
    ],
)
def test_who_goes_away_is_named(event: dict[str, Any], who: str, name: str) -> None:
    real = Cluster.regular([3, 3], nic="100mbit", uplink="100mbit")
    with pytest.raises(WorkerFailed, match=who):
        probed(real, name, [event], timeout=5.0)
