"""What is too slow to meet the others at every step, by the rates of its links."""

from __future__ import annotations

import pytest

from thalweg.facts import Cluster, parse_cluster
from thalweg.schedules import ContendedLinks, Group, Rates, contended_links
from thalweg.schedules.topologies import shuffle

FULL, HALF, QUARTER = "1gbit", "500mbit", "250mbit"


def group(
    *,
    slow_racks: int = 0,
    slow_hosts: int = 0,
    rate: str = QUARTER,
    uplink: str = FULL,
    racks: int = 4,
) -> Group:
    """Racks of four; the first racks have slow uplinks, and the first rack's last hosts slow
    NICs."""
    nics = [rate if 4 - slow_hosts <= host < 4 else FULL for host in range(4 * racks)]
    uplinks = [rate if rack < slow_racks else uplink for rack in range(racks)]
    return Group.everybody(Cluster.regular([4] * racks, nic=nics, uplink=uplinks))


def paces(**steps: int) -> tuple[tuple[str, int], ...]:
    return tuple(steps.items())


ALL_RACKS = paces(rack0=4, rack1=4, rack2=4, rack3=4)
PAIRS = ContendedLinks(pairs=True)


CASES = {
    "nothing": (group(), PAIRS),
    "rack": (group(slow_racks=1), ContendedLinks(racks=paces(rack0=4))),
    "two racks": (group(slow_racks=2), ContendedLinks(racks=paces(rack0=4, rack1=4))),
    "all racks": (group(slow_racks=4), ContendedLinks(racks=ALL_RACKS)),
    "host": (group(slow_hosts=1), ContendedLinks(hosts=paces(host3=4), pairs=True)),
    "host, fast uplinks": (
        group(slow_hosts=1, uplink="2gbit"),
        ContendedLinks(hosts=paces(host3=4)),
    ),
    "rack and host": (
        group(slow_racks=1, slow_hosts=1),
        ContendedLinks(racks=paces(rack0=4), hosts=paces(host3=4)),
    ),
    "rack at half": (group(slow_racks=1, rate=HALF), ContendedLinks(racks=paces(rack0=2))),
    "host at half": (
        group(slow_hosts=1, rate=HALF),
        ContendedLinks(hosts=paces(host3=2), pairs=True),
    ),
    "rack at a hundredth": (
        group(slow_racks=1, rate="10mbit"),
        ContendedLinks(racks=paces(rack0=8)),
    ),
    "uplinks at 0.5": (group(uplink=HALF), PAIRS),
    "uplinks at 0.7": (group(uplink="700mbit"), PAIRS),
    "uplinks at 0.95": (group(uplink="950mbit"), PAIRS),
    "uplinks at 1.1": (group(uplink="1100mbit"), PAIRS),
    "uplinks at 1.2": (group(uplink="1200mbit"), ContendedLinks()),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_what_is_kept_apart(given: Group, expected: ContendedLinks) -> None:
    """Four representatives at once put 1.5 S on an uplink; three who stay in a rack take 1.33 S /
    NIC. So four meet all together from an uplink of 1.5/1.33 = 1.125 of the NIC's rate on; three
    racks, the others of a slow one, take 1.33 S as well, two take S, and none nothing."""
    assert given.contended == expected
    assert shuffle.choose_table(given).contention == expected


@pytest.mark.parametrize(
    ("racks", "members", "pairs"),
    [
        (2, 4, False),  # 1.00 against 1.33
        (3, 4, False),  # 1.33 against 1.33
        (4, 4, True),  # 1.50 against 1.33
        (4, 5, False),  # 1.50 against 1.50
        (5, 6, False),  # 1.60 against 1.60
        (8, 8, True),  # 1.75 against 1.71
        (2, 2, False),  # 1.00 against 1.00, a pair's
        (3, 2, True),  # 1.33 against 1.00
    ],
)
def test_as_many_racks_as_stay_in_one_meet_all_together(
    racks: int, members: int, pairs: bool
) -> None:
    """With uplinks of the NICs' rate, 2(C-1)/C against 2(G-2)/(G-1): pairs if C > G-1, and C > 2.
    Uplinks that nobody has declared are never busy."""
    sizes = [members] * racks
    known = Group.everybody(Cluster.regular(sizes, nic=FULL, uplink=FULL))
    assert known.contended == ContendedLinks(pairs=pairs)
    assert Group.everybody(Cluster.regular(sizes, nic=FULL)).contended == ContendedLinks()


def rates(uplink: float) -> Rates:
    """Of four racks of four, in parts of a NIC's."""
    return Rates(
        nics={f"host{number}": 1.0 for number in range(16)},
        uplinks={f"rack{number}": uplink for number in range(4)},
    )


@pytest.mark.parametrize(
    ("uplink", "adopted", "together", "split"),
    [
        (FULL, None, 1.13, 1.12),
        (FULL, ContendedLinks(), 1.13, 1.12),
        (FULL, PAIRS, 1.33, 1.32),
        ("2gbit", ContendedLinks(), 0.81, 0.8),
        ("2gbit", PAIRS, 0.94, 0.93),
    ],
    ids=["new", "was in pairs", "in pairs", "all together", "no longer"],
)
def test_a_table_is_not_changed_for_a_small_gain(
    uplink: str, adopted: ContendedLinks | None, together: float, split: float
) -> None:
    """At the rate r of the NICs' all at once take 1.5/r, which is 1.125/r of a usual step. A new
    table has them in pairs for more than 1 of it (r < 1.125). If uplinks are declared to be no
    faster than NICs, it stays so unless it is at most 0.85 (r < 1.324). If they are, only more than
    1.4 leads to pairs (r < 0.804), and no more than 1.2 back (r >= 0.9375)."""
    everybody = Group.everybody(Cluster.regular([4] * 4, nic=FULL, uplink=uplink))
    assert contended_links(everybody, rates(together), adopted=adopted) == ContendedLinks()
    assert contended_links(everybody, rates(split), adopted=adopted) == PAIRS


def test_computing_hides_what_travels() -> None:
    """At a quarter, all racks at once take 6 times what a byte does, pairs 4. A usual step takes
    1.33 and the computing. Pairs may exceed it by two thirds: 1 leaves room for 3.89, 2 for 5.56.
    All at once may not exceed it at all: 4 leave 5.33, 5 leave 6.33."""
    everybody = group(slow_racks=4)
    assert contended_links(everybody, rates(0.25), busy=1.0) == ContendedLinks(
        racks=paces(rack0=2, rack1=2, rack2=2, rack3=2)
    )
    assert contended_links(everybody, rates(0.25), busy=2.0) == PAIRS
    assert contended_links(everybody, rates(0.25), busy=4.0) == PAIRS
    assert contended_links(everybody, rates(0.25), busy=5.0) == ContendedLinks()
    assert str(contended_links(everybody, rates(0.25), busy=5.0)) == "nothing is slow"


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
    assert Group.everybody(Cluster.regular([4], uplink="1mbit")).contended == ContendedLinks()


@pytest.mark.parametrize(("steps", "kept"), [(8, 8), (4, 4), (2, 2)])
def test_windows_can_be_made_shorter(steps: int, kept: int) -> None:
    slow = ContendedLinks(racks=(("a", 8),), hosts=(("b", 2),), pairs=True)
    assert slow.at_most(steps) == ContendedLinks(
        racks=(("a", kept),), hosts=(("b", 2),), pairs=True
    )
    assert slow.at_most(1) == ContendedLinks(pairs=True)
