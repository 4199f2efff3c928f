from __future__ import annotations

import pytest

from thalweg.doctor.addresses import Interface, choice, holder, judge, list_interfaces, unusable

LOOPBACK = Interface(name="lo", addresses=("127.0.0.1", "::1"), up=True, mbps=0)
SLOW = Interface(name="eth0", addresses=("10.0.0.5",), up=True, mbps=1000)
FAST = Interface(name="ib0", addresses=("10.9.0.5",), up=True, mbps=100_000)
BRIDGE = Interface(name="docker0", addresses=("172.17.0.1",), up=True, mbps=10_000)
ON_THE_ROUTE = choice("10.0.0.1", {})


@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        (LOOPBACK, "loopback"),
        (Interface(name="eth1", addresses=("10.0.1.5",), up=False, mbps=0), "down"),
        (Interface(name="eth1", addresses=(), up=True, mbps=0), "no address"),
        (
            Interface(name="eth1", addresses=("169.254.3.4", "fe80::1"), up=True, mbps=0),
            "link-local",
        ),
        (BRIDGE, "for containers"),
        (Interface(name="veth12ab", addresses=("10.1.0.1",), up=True, mbps=0), "for containers"),
        (FAST, "not on the route"),
    ],
)
def test_every_other_has_its_reason(interface: Interface, reason: str) -> None:
    assert reason in ON_THE_ROUTE or unusable(interface).startswith(reason)
    text = judge("10.0.0.5", ON_THE_ROUTE, [SLOW, interface]).detail
    assert text.startswith(
        "eth0 10.0.0.5 (1 Gbit/s): on the route to 10.0.0.1, the rendezvous address; not "
    )
    assert f"{interface.name} ({reason}" in text


def test_the_named_one_is_why() -> None:
    named = choice("10.0.0.1", {"GLOO_SOCKET_IFNAME": "eth0"})
    text = judge("10.0.0.5", named, [SLOW, FAST]).detail
    assert "GLOO_SOCKET_IFNAME names it; not ib0 (not named)" in text


def test_a_much_faster_one_is_pointed_at() -> None:
    found = judge("10.0.0.5", ON_THE_ROUTE, [LOOPBACK, SLOW, FAST])
    assert found.verdict == "warn"
    assert "ib0 10.9.0.5 is faster (100 Gbit/s)" in found.detail
    assert found.remedy.startswith("set THALWEG_IFNAME=ib0")


@pytest.mark.parametrize("others", [[LOOPBACK, BRIDGE], [LOOPBACK], []])
def test_nobody_is_sent_to_a_bridge(others: list[Interface]) -> None:
    assert judge("10.0.0.5", ON_THE_ROUTE, [SLOW, *others]).verdict == "ok"


def test_a_bridge_that_was_chosen_is_a_warning() -> None:
    found = judge("172.17.0.1", ON_THE_ROUTE, [LOOPBACK, SLOW, BRIDGE])
    assert found.verdict == "warn"
    assert "THALWEG_IFNAME" in found.remedy


def test_all_of_127_is_loopback() -> None:
    assert holder("127.0.1.1", [SLOW, LOOPBACK]) == LOOPBACK
    assert holder("10.0.0.6", [SLOW, LOOPBACK]) is None


def test_this_hosts_own_are_seen() -> None:
    assert "127.0.0.1" in {
        address for interface in list_interfaces() for address in interface.addresses
    }
