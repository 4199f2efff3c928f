"""On clusters whose links are known, with flows that share them fairly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.observe.steps import flows_of
from thalweg.facts import Cluster, Link
from thalweg.observe.slow_links import Owner, SlowLinkDetector
from thalweg.observe.straggler import Straggler

MBIT = 1e6 / 8
NBYTES = 4_000_000
Pairs = Callable[[Cluster, int], list[tuple[int, int]]]
"""Who sends to whom at a step."""


def ring(cluster: Cluster, step: int) -> list[tuple[int, int]]:
    order = [rank for rack in cluster.racks for rank in rack.ranks]
    return list(zip(order, [*order[1:], order[0]], strict=True))


def hierarchical(cluster: Cluster, step: int) -> list[tuple[int, int]]:
    """Inside each rack to its first and back, and round the first of the racks."""
    leaders = [rack.ranks[0] for rack in cluster.racks]
    inside = [
        pair
        for rack in cluster.racks
        for rank in rack.ranks[1:]
        for pair in ((rank, rack.ranks[0]), (rack.ranks[0], rank))
    ]
    return [*inside, *zip(leaders, [*leaders[1:], leaders[0]], strict=True)]


def pairs(cluster: Cluster, step: int) -> list[tuple[int, int]]:
    """Drawn anew at every step."""
    ranks = list(range(cluster.workers))
    Random(step).shuffle(ranks)
    couples = list(zip(ranks[::2], ranks[1::2], strict=False))
    return [*couples, *((b, a) for a, b in couples)]


PATTERNS: list[Pairs] = [ring, hierarchical, pairs]
SHAPES = [[2, 2, 2, 2], [3, 3, 3], [4, 2, 3]]


def watched(
    cluster: Cluster,
    pattern: Pairs,
    slow: Sequence[tuple[Owner, float, int, int]],
    steps: int,
    *,
    seed: int = 0,
    noise: float = 0.2,
    known: Cluster | None = None,
    store: Callable[[int], dict[int, float]] = lambda step: {},
) -> dict[int, list[Straggler]]:
    """Each link gives its rate, or this share of it from one step to another, with noise."""
    links = SlowLinkDetector(known or cluster)
    found = {}
    for step in range(steps):
        draw = Random(f"{seed}/{step}")
        rates = {}
        for link, rate in cluster.rates().items():
            factor = 1 - noise * draw.random()
            for owner, share, first, last in slow:
                if (link.kind, link.owner) == owner and first <= step < last:
                    factor *= share
            rates[link] = rate.bits_per_second / 8 * factor
        flows = flows_of(pattern(cluster, step), NBYTES, cluster, rates)
        links.add(step, [(source, flow) for source, some in flows.items() for flow in some])
        found[step] = links.slow_links(store(step))
    return found


def named(found: Sequence[Straggler]) -> list[tuple[Owner, ...]]:
    return [tuple((one.kind.value, name) for name in one.who) for one in found]


def lab(shape: Sequence[int]) -> Cluster:
    return Cluster.regular(shape, nic="200mbit", uplink="200mbit")


def unlooked_at(shape: Sequence[int]) -> Cluster:
    """As far as it is known before anybody has measured anything."""
    return Cluster.regular(shape)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, [4, 4]], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_healthy_cluster_has_no_slow_links(
    pattern: Pairs, shape: list[int], declared: bool
) -> None:
    cluster = lab(shape)
    known = cluster if declared else unlooked_at(shape)
    for seed in range(3):
        assert not any(watched(cluster, pattern, [], 40, seed=seed, known=known).values())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_thin_uplinks_that_are_all_alike_are_not_slow(pattern: Pairs) -> None:
    cluster = Cluster.regular([4, 4, 4], nic="200mbit", uplink="50mbit")
    assert not any(watched(cluster, pattern, [], 40).values())


@pytest.mark.parametrize(
    ("pattern", "declared"),
    [*((pattern, True) for pattern in PATTERNS), (ring, False)],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_slow_link_is_found_and_resolved(
    pattern: Pairs, shape: list[int], declared: bool
) -> None:
    cluster = lab(shape)
    known = cluster if declared else unlooked_at(shape)
    owners: list[Owner] = [("nic", host.name) for host in cluster.hosts]
    owners += [("uplink", rack.name) for rack in cluster.racks]
    factor = 0.1  # less than is left of an uplink that four share
    for owner in owners:
        found = watched(cluster, pattern, [(owner, factor, 20, 60)], 100, known=known)
        assert not any(found[step] for step in range(20))
        assert named(found[40]) == [(owner,)], owner
        assert not any(found[step] for step in range(90, 100))


@given(st.data())
def test_any_owner_any_factor(data: st.DataObject) -> None:
    cluster = lab(data.draw(st.sampled_from(SHAPES)))
    owner = data.draw(
        st.sampled_from(
            [
                *(("nic", host.name) for host in cluster.hosts),
                *(("uplink", rack.name) for rack in cluster.racks),
            ]
        )
    )
    factor = data.draw(st.floats(0.02, 0.15))
    pattern = data.draw(st.sampled_from(PATTERNS))
    seed = data.draw(st.integers(0, 99))
    found = watched(cluster, pattern, [(owner, factor, 0, 99)], 30, seed=seed, noise=0.1)
    assert named(found[29]) == [(owner,)]


def test_from_the_start_between_two_racks_by_what_is_declared() -> None:
    """Nothing tells which of the two uplinks it is, but the way to the store."""
    cluster = lab([4, 4])
    slow = [(("uplink", "rack1"), 0.25, 0, 99)]
    both = (("uplink", "rack0"), ("uplink", "rack1"))
    assert named(watched(cluster, ring, slow, 20)[19]) == [both]
    queue = {rank: 0.03 if rank >= 4 else 0.002 for rank in range(8)}
    found = watched(cluster, ring, slow, 20, store=lambda step: queue)
    assert named(found[19]) == [(("uplink", "rack1"),)]


def test_a_later_change_is_found_by_earlier_rates() -> None:
    cluster = lab([4, 4])
    slow = [(("uplink", "rack1"), 0.2, 30, 99)]
    found = watched(cluster, ring, slow, 50, known=unlooked_at([4, 4]))
    assert named(found[49]) == [(("uplink", "rack0"), ("uplink", "rack1"))]


def test_the_uplink_that_more_share_is_not_slow() -> None:
    """Five hosts' flows go through one, and one host's through the other."""
    cluster = lab([5, 1, 3])
    assert not any(watched(cluster, pairs, [], 60).values())


def test_two_at_once() -> None:
    cluster = lab([2, 2, 2, 2])
    slow = [(("nic", "host1"), 0.2, 10, 99), (("nic", "host5"), 0.2, 10, 99)]
    found = watched(cluster, ring, slow, 30)
    assert set(named(found[29])) == {
        (("nic", "host1"),),
        (("nic", "host5"),),
    }


def test_small_messages_tell_nothing() -> None:
    links = SlowLinkDetector(lab([2, 2]))
    cluster = lab([2, 2])
    rates = dict.fromkeys(cluster.rates(), 200 * MBIT)
    rates[Link("nic", "host1", "out")] = 1 * MBIT
    for step in range(20):
        flows = flows_of(ring(cluster, step), 10_000, cluster, rates)
        links.add(step, [(s, flow) for s, some in flows.items() for flow in some])
    assert links.slow_links({}) == []
