"""Names and addresses, which need no namespaces."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from thalweg.errors import LabError
from thalweg.facts import Cluster, Host, Link, Rack
from thalweg.lab.addressing import (
    FAR_MAC,
    GATEWAY,
    MAX_HOSTS_PER_RACK,
    MAX_LAB_RACKS,
    NEAR_MAC,
    SPINE_ADDRESS,
    Port,
    Wiring,
    prefix,
)


def wired(*rack_sizes: int, interleaved: bool = False) -> Wiring:
    return Wiring("lab1", Cluster.regular(rack_sizes, interleaved=interleaved))


@pytest.mark.parametrize("rack_sizes", [[1], [3, 1, 2], [MAX_HOSTS_PER_RACK], [1] * MAX_LAB_RACKS])
def test_every_address_is_there_once(rack_sizes: list[int]) -> None:
    wiring = wired(*rack_sizes)
    racks = [c.near.address for (kind, _), c in wiring.cables.items() if kind == "uplink"]
    assert len(racks) == len(rack_sizes)
    addresses = [*wiring.hosts.values(), *racks, SPINE_ADDRESS, GATEWAY]
    assert len({ip_address(address) for address in addresses}) == len(addresses)


def test_the_most_that_can_be_wired() -> None:
    wiring = wired(*[MAX_HOSTS_PER_RACK] * MAX_LAB_RACKS)
    assert len(wiring.hosts) == 255 * 254
    addresses = {*wiring.hosts.values(), SPINE_ADDRESS}
    assert len(addresses) == 255 * 254 + 1
    assert all(map(ip_address, addresses))


@pytest.mark.parametrize(
    ("rack_sizes", "problem"),
    [
        ([MAX_HOSTS_PER_RACK + 1], "1 racks of up to 255 hosts"),
        ([1] * (MAX_LAB_RACKS + 1), "256 racks of up to 1 hosts"),
    ],
)
def test_more_than_there_are_addresses(rack_sizes: list[int], problem: str) -> None:
    with pytest.raises(LabError) as caught:
        wired(*rack_sizes)
    assert str(caught.value) == (
        f"a lab has too few addresses for {problem}; use at most 255 racks, and 254 hosts in each"
    )


@pytest.mark.parametrize("lab", ["", "Lab", "a.b", "a/b", "-a", "ä", "a b", "a" * 33, "a\n"])
def test_what_is_no_name_for_a_lab(lab: str) -> None:
    with pytest.raises(LabError) as caught:
        Wiring(lab, Cluster.flat(1))
    assert str(caught.value) == (
        f"{lab!r} is not a name for a lab; use up to 32 lower-case letters, digits, _ and -"
    )


@pytest.mark.parametrize("lab", ["a", "0", "lab_1-x", "a" * 32])
def test_names_for_a_lab(lab: str) -> None:
    assert Wiring(lab, Cluster.flat(1)).host("host0") == f"thalweg.{lab}.host0"


def test_a_namespace_for_each_and_each_begins_with_the_labs_name() -> None:
    wiring = wired(2, 3)
    names = wiring.namespaces()
    assert len(set(names)) == len(names) == 1 + 2 + 5
    assert all(name.startswith(prefix("lab1")) for name in names)
    assert not any(name.startswith((prefix("lab"), prefix("lab11"))) for name in names)


def test_whatever_racks_and_hosts_are_called_namespaces_differ() -> None:
    names = ("spine", "rack0", "host0", "localhost")
    racks = [
        Rack(name=name, hosts=(Host(name=name, ranks=(rank,)),)) for rank, name in enumerate(names)
    ]
    wiring = Wiring("lab1", Cluster(racks=tuple(racks)))
    assert len(set(wiring.namespaces())) == 1 + 4 + 4
    table = [line.split() for line in wiring.host_table().splitlines()]
    assert ["10.84.0.1", "spine"] in table
    assert ["10.84.255.1", "@spine"] in table


def test_the_host_of_a_rank() -> None:
    wiring = wired(2, 2, interleaved=True)
    assert [wiring.host_of(rank) for rank in range(4)] == [
        f"thalweg.lab1.host{rank}" for rank in range(4)
    ]
    assert [wiring.hosts[f"host{rank}"] for rank in range(4)] == [
        "10.84.0.1",
        "10.84.1.1",
        "10.84.0.2",
        "10.84.1.2",
    ]


def test_the_host_table_has_everybody() -> None:
    wiring = wired(2, 1)
    lines = [line.split() for line in wiring.host_table().splitlines()]
    assert lines[0] == ["127.0.0.1", "localhost"]
    found = {name: address for address, name in lines if ":" not in address}
    assert found == {
        "localhost": "127.0.0.1",
        "spine": SPINE_ADDRESS,
        "host0": "10.84.0.1",
        "host1": "10.84.0.2",
        "host2": "10.84.1.1",
    }
    mapped = {name: address for address, name in lines if ":" in address}
    assert mapped == {n: f"::ffff:{a}" for n, a in found.items() if n != "localhost"}


def test_each_direction_of_a_link_is_shaped_where_it_leaves() -> None:
    wiring = wired(2, 2)
    host, rack = Port("thalweg.lab1.host3", "eth0", "10.84.1.2"), wiring.rack(1)
    host_side = Port(rack, "h1", "10.85.1.1")
    assert wiring.ends(Link("nic", "host3", "out")) == (host, host_side)
    assert wiring.ends(Link("nic", "host3", "in")) == (host_side, host)
    up, spine = Port(rack, "up", "10.85.1.1"), Port(wiring.spine, "r1", SPINE_ADDRESS)
    assert wiring.ends(Link("uplink", "rack1", "out")) == (up, spine)
    assert wiring.ends(Link("uplink", "rack1", "in")) == (spine, up)


def test_two_ports_for_every_cable_and_none_twice() -> None:
    wiring = wired(3, 1, 2)
    cables = wiring.cables.values()
    assert len(cables) == 3 + 6
    ports = [port for cable in cables for port in (cable.near, cable.far)]
    assert len(set(ports)) == len(ports)
    assert all(len(port.device) <= 15 for port in ports)  # as the kernel wants it
    links = [*wiring.cluster.rates(), *(Link("uplink", f"rack{n}", "out") for n in range(3))]
    assert {port for link in links for port in wiring.ends(link)} <= set(ports)
    assert NEAR_MAC != FAR_MAC


def test_a_rack_reaches_its_hosts_and_the_spine_every_rack() -> None:
    wiring = wired(2, 2)
    for rack in wiring.cluster.racks:
        behind = ip_network(wiring.cables["uplink", rack.name].behind)
        for host in rack.hosts:
            address = ip_address(wiring.hosts[host.name])
            assert address in behind
            assert ip_network(wiring.cables["nic", host.name].behind) == ip_network(address)
        assert ip_address(SPINE_ADDRESS) not in behind
