from __future__ import annotations

from thalweg.observe.peer_addresses import own_addresses, ranks_by_address


def test_addresses_lead_to_ranks() -> None:
    found = ranks_by_address({0: ["10.0.0.1", "10.1.0.1"], 1: ["10.0.0.2", "10.1.0.2"]})
    assert found == {"10.0.0.1": 0, "10.1.0.1": 0, "10.0.0.2": 1, "10.1.0.2": 1}


def test_ranks_of_a_host_are_one() -> None:
    addresses = {0: ["10.0.0.1"], 1: ["10.0.0.1"], 2: ["10.0.0.2"]}
    assert ranks_by_address(addresses) == {"10.0.0.1": 0, "10.0.0.2": 2}


def test_what_several_hosts_have_tells_nothing() -> None:
    """As bridges of containers; but what a rank is found at is its own."""
    addresses = {0: ["10.0.0.1", "172.17.0.1"], 1: ["10.0.0.2", "172.17.0.1"]}
    assert ranks_by_address(addresses) == {"10.0.0.1": 0, "10.0.0.2": 1}


def test_loopback_leads_nowhere() -> None:
    assert ranks_by_address({0: ["127.0.0.1", "::1"], 1: ["127.0.0.1", "::1"]}) == {}


def test_this_host_has_addresses() -> None:
    assert "127.0.0.1" in own_addresses()
