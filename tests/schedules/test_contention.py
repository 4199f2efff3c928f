"""What is too slow to meet the others at every step, by the rates of its links."""

from __future__ import annotations

import pytest

from thalweg.facts import Cluster, parse_cluster
from thalweg.schedules import Contention, Group, Rates, judge
from thalweg.schedules.topologies import shuffle

FULL, HALF, QUARTER = "1gbit", "500mbit", "250mbit"


def group(
    *, slow_racks: int = 0, slow_hosts: int = 0, rate: str = QUARTER, racks: int = 4
) -> Group:
    """Racks of four; the first racks have slow uplinks, and the first rack's last hosts slow
    NICs."""
    nics = [rate if 4 - slow_hosts <= host < 4 else FULL for host in range(4 * racks)]
    uplinks = [rate if rack < slow_racks else FULL for rack in range(racks)]
    return Group.everybody(Cluster.regular([4] * racks, nic=nics, uplink=uplinks))


def paces(**steps: int) -> tuple[tuple[str, int], ...]:
    return tuple(steps.items())


ALL_RACKS = paces(rack0=4, rack1=4, rack2=4, rack3=4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (group(), Contention()),
        (group(slow_racks=1), Contention(racks=paces(rack0=4))),
        (group(slow_hosts=1), Contention(hosts=paces(host3=4))),
        (
            group(slow_racks=1, slow_hosts=1),
            Contention(racks=paces(rack0=4), hosts=paces(host3=4)),
        ),
        (group(slow_racks=4), Contention(racks=ALL_RACKS, pairs=True)),
        (group(slow_racks=1, rate=HALF), Contention(racks=paces(rack0=2))),
        (group(slow_hosts=1, rate=HALF), Contention(hosts=paces(host3=2))),
        (group(slow_racks=4, rate=HALF), Contention(pairs=True)),
        (group(slow_racks=4, rate="700mbit"), Contention(pairs=True)),
        (group(slow_racks=4, rate="950mbit"), Contention(pairs=False)),
        (group(slow_racks=2), Contention(racks=paces(rack0=4, rack1=4))),
        (group(slow_racks=1, rate="10mbit"), Contention(racks=paces(rack0=8))),
    ],
    ids=str,
)
def test_what_is_kept_apart(given: Group, expected: Contention) -> None:
    assert given.contended == expected
    assert shuffle.adopted(given) == expected


def test_computing_hides_what_travels() -> None:
    """At a quarter, all racks at once take 6 times what a byte does, pairs 4. A usual step takes
    1.33 and the computing, and may be exceeded by two thirds: 2 make room for pairs, 4 for all."""
    everybody = group(slow_racks=4)
    rates = Rates(
        nics={f"host{number}": 1.0 for number in range(16)},
        uplinks={f"rack{number}": 0.25 for number in range(4)},
    )
    assert judge(everybody, rates, busy=2.0).pairs
    assert not judge(everybody, rates, busy=2.0).racks
    assert judge(everybody, rates, busy=4.0) == Contention()
    assert str(judge(everybody, rates, busy=4.0)) == "nothing is slow"


def test_ranks_of_a_host_share_its_nic() -> None:
    one_host_of_four = """
[[rack]]
name = "a"
hosts = [{ name = "a0", ranks = [0, 1, 2, 3] }, { name = "a1", ranks = [4] },
         { name = "a2", ranks = [5] }, { name = "a3", ranks = [6] }]
"""
    everybody = Group.everybody(parse_cluster(one_host_of_four))
    assert dict(everybody.contended.hosts) == {"a0": 4}


def test_a_rack_alone_has_no_uplink_to_cross() -> None:
    assert Group.everybody(Cluster.regular([4], uplink="1mbit")).contended == Contention()


@pytest.mark.parametrize(("steps", "kept"), [(8, 8), (4, 4), (2, 2)])
def test_windows_can_be_made_shorter(steps: int, kept: int) -> None:
    slow = Contention(racks=(("a", 8),), hosts=(("b", 2),), pairs=True)
    assert slow.at_most(steps) == Contention(racks=(("a", kept),), hosts=(("b", 2),), pairs=True)
    assert slow.at_most(1) == Contention(pairs=True)
