from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.clusters import clusters
from thalweg.errors import ClusterError
from thalweg.facts import (
    Cluster,
    Duplex,
    Duration,
    Link,
    Rate,
    StragglerDelay,
    format_cluster,
    parse_cluster,
    rack_sizes,
    read_cluster,
)

EXAMPLE = """
latency = "50us"
[[rack]]
name = "a"
uplink = { out = "200mbit", in = "50mbit" }
nic = "1gbit"
hosts = [
    { name = "a0", ranks = [1] },
    { name = "a1", ranks = [0, 3], nic = "100mbit", late = { probability = 0.05, delay = "2s" } },
]
[[rack]]
name = "b"
latency = "5ms"
hosts = [{ name = "b0", ranks = [2] }]
"""


def test_a_file_says_who_is_where() -> None:
    cluster = parse_cluster(EXAMPLE)
    assert cluster.workers == 4
    assert [cluster.host(rank).name for rank in range(4)] == ["a1", "a0", "b0", "a1"]
    assert [cluster.rack(rank).name for rank in range(4)] == ["a", "a", "b", "a"]
    assert cluster.host(0).late == StragglerDelay(probability=0.05, delay=Duration(2))
    rates = cluster.rates()
    assert rates[Link("nic", "a1", "out")] == Rate.parse("100mbit")
    assert rates[Link("uplink", "a", "in")] == Rate.parse("50mbit")
    assert Link("uplink", "b", "in") not in rates


def test_paths() -> None:
    cluster = parse_cluster(EXAMPLE)
    assert cluster.path(0, 3) == ()
    assert cluster.path(0, 1) == (Link("nic", "a1", "out"), Link("nic", "a0", "in"))
    assert cluster.path(1, 2) == (
        Link("nic", "a0", "out"),
        Link("uplink", "a", "out"),
        Link("uplink", "b", "in"),
        Link("nic", "b0", "in"),
    )
    assert cluster.seconds_between(0, 1) == pytest.approx(50e-6)
    assert cluster.seconds_between(0, 2) == pytest.approx(5.05e-3)


@given(clusters())
def test_what_is_written_is_read_again(cluster: Cluster) -> None:
    assert parse_cluster(format_cluster(cluster)) == cluster


def test_lateness_survives_the_file() -> None:
    cluster = parse_cluster(EXAMPLE)
    assert parse_cluster(format_cluster(cluster)) == cluster


def test_short_forms() -> None:
    cluster = parse_cluster(
        '[[rack]]\nname = "a"\nhosts = 2\n[[rack]]\nname = "b"\nhosts = ["x"]\n'
    )
    assert [host.name for host in cluster.hosts] == ["a-0", "a-1", "x"]
    assert [host.ranks for host in cluster.hosts] == [(0,), (1,), (2,)]


def test_interleaved_ranks_go_round_the_racks() -> None:
    cluster = Cluster.regular([3, 1], interleaved=True)
    assert [rack.ranks for rack in cluster.racks] == [(0, 2, 3), (1,)]


def test_hosts_and_racks_that_differ() -> None:
    slow = Duplex(Rate.parse("50mbit"), Rate.parse("10mbit"))
    cluster = Cluster.regular(
        [1, 2],
        nic=["1gbit", slow, Rate.parse("200mbit")],
        uplink=["100mbit", slow],
        uplink_latency=[Duration(0.0), Duration(0.02)],
        interleaved=True,
    )
    assert [rack.ranks for rack in cluster.racks] == [(0,), (1, 2)]
    assert [cluster.host(rank).nic for rank in range(3)] == [
        Duplex.both("1gbit"),
        slow,
        Duplex.both("200mbit"),
    ]
    assert [rack.uplink for rack in cluster.racks] == [Duplex.both("100mbit"), slow]
    assert cluster.seconds_between(0, 1) == pytest.approx(0.0201)
    assert parse_cluster(format_cluster(cluster)) == cluster


def test_nics_follow_the_racks_and_not_the_ranks() -> None:
    cluster = Cluster.regular([2, 2], nic=["1gbit", "1gbit", "1gbit", "1mbit"], interleaved=True)
    assert cluster.racks[1].hosts[1].nic == cluster.host(3).nic == Duplex.both("1mbit")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"nic": ["1gbit"] * 3}, "the hosts' NICs are 3, not 4; list 4, or give one"),
        ({"uplink": ["1gbit"]}, "the uplinks are 1, not 2; list 2, or give one"),
        ({"uplink_latency": []}, "the uplinks' latencies are 0, not 2; list 2, or give one"),
    ],
)
def test_lists_of_a_wrong_length(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.regular([2, 2], **given)
    assert str(caught.value) == line


def test_what_nobody_said_is_assumed_and_listed() -> None:
    assert parse_cluster(EXAMPLE).assumed == ("1gbit NICs",)
    assert Cluster.flat(3).assumed == ("1gbit NICs", "100us latency")
    assert Cluster.regular([2], nic="1gbit", latency=Duration(0)).assumed == ()


RACK = '[[rack]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no [[rack]] in the file; add one"),
        ("rack = 3", "no [[rack]] in the file; add one"),
        ("[[rack]", "not TOML"),
        ("x = " + "9" * 5000, "not TOML"),
        ("x = " + "[" * 5000, "not TOML"),
        (RACK + "hosts = 999999999", "999999999 hosts are too many; give at most"),
        ("[[rack]]\nhosts = 2", "rack 0 has no usable name (None); write name"),
        (RACK, "rack 'a' has no hosts; add one"),
        (RACK + "hosts = 0", "rack 'a' has no hosts; add one"),
        (RACK + 'hosts = "x"', "hosts of rack a is no list; write hosts = 4"),
        (RACK + "hosts = [3]", "a host of rack a is no table; write"),
        (RACK + 'hosts = ["x", "x"]', "two hosts are called 'x'; rename"),
        (RACK + "hosts = 1\n" + RACK + 'hosts = ["x"]', "two racks are called 'a'; rename"),
        (RACK + "hosts = 2\nuplnk = 3", "rack a has an unknown key 'uplnk'; it takes name, uplink"),
        (RACK + 'hosts = 2\nnic = "200mpps"', "nic of rack a: '200mpps' is not a rate; write"),
        (RACK + "hosts = 2\nnic = 200", "nic of rack a: '200' is not a rate; write"),
        (RACK + 'hosts = 2\nuplink = { out = "1gbit" }', "uplink of rack a lacks 'in'; give both"),
        (
            RACK + 'hosts = 2\nlatency = "1 lightyear"',
            "latency of rack a: '1 lightyear' is not a d",
        ),
        (RACK + 'hosts = [{ name = "x", ranks = [1] }]', "no host has rank 0, though there are 1"),
        (RACK + 'hosts = [{ name = "x", ranks = [0, 2] }]', "no host has rank 1"),
        (RACK + 'hosts = [{ name = "x", ranks = 0 }]', "ranks of host x is no list of whole num"),
        (
            RACK + 'hosts = [{ name = "x", ranks = [0] }, { name = "y", ranks = [0] }]',
            "rank 0 is on x and on y; give every rank to one host",
        ),
        (
            RACK + 'hosts = [{ name = "x", ranks = [0] }, "y"]',
            "some hosts name their ranks and some don't; do it for all or none",
        ),
        (
            RACK + 'hosts = [{ name = "x", late = { probability = 2 } }]',
            "late of host x: 2 is no probability; give 0 to 1",
        ),
    ],
)
def test_a_file_that_contradicts_itself(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"can't read .*none\.toml: No such file"):
        read_cluster(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="binary is not text"):
        read_cluster(tmp_path / "binary")


def test_more_workers_than_anybody_has() -> None:
    with pytest.raises(ClusterError, match="workers are too many; give at most"):
        Cluster.regular(rack_sizes("1000000x1000000"))


@pytest.mark.parametrize(("text", "sizes"), [("2x4", [4, 4]), ("5+3+4", [5, 3, 4]), ("7", [7])])
def test_layouts(text: str, sizes: list[int]) -> None:
    assert rack_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "2x", "0x4", "2x0", "3+", "a+b", "-1x3", "2x4x3"])
def test_bad_layouts(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a layout of racks; write it like 2x4 or 5"):
        rack_sizes(text)


def test_busy_links_are_those_with_a_rate() -> None:
    cluster = Cluster.regular([1, 1], nic=["100mbit", "50mbit"])
    path = cluster.path(0, 1)
    busy = cluster.busy_seconds(dict.fromkeys(path, 1_250_000.0))
    assert busy == {path[0]: 0.1, path[-1]: 0.2}  # uplinks without a rate are no bottleneck


def test_other_rates_of_the_links() -> None:
    """Its own change nothing; an uplink without one is no bottleneck, and a NIC keeps its own."""
    cluster = Cluster.regular([2, 1], nic=["100mbit", "90mbit", "50mbit"], uplink="200mbit")
    assert cluster.with_rates(cluster.rates()) == cluster
    doubled = {link: Rate(2 * rate.bits_per_second) for link, rate in cluster.rates().items()}
    assert cluster.with_rates(doubled).rates() == doubled
    nics = {link: rate for link, rate in doubled.items() if link.owner == cluster.hosts[1].name}
    found = cluster.with_rates(nics)
    assert [rack.uplink for rack in found.racks] == [None, None]
    assert [host.nic.out.bits_per_second for host in found.hosts] == [100e6, 180e6, 50e6]


def test_other_hosts() -> None:
    cluster = Cluster.regular([2, 1], nic="100mbit")
    late = StragglerDelay(probability=0.5, delay=Duration(1.0))
    found = cluster.with_hosts(lambda host: replace(host, late=late))
    assert [host.late for host in found.hosts] == [late] * 3
    assert [host.name for host in found.hosts] == [host.name for host in cluster.hosts]
