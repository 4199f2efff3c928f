"""DS-Sync's table of meetings: what must hold for it whatever the cluster, and known traps."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clusters import groups as any_groups
from tests.examples import examples
from thalweg.facts import Cluster
from thalweg.schedules import ContendedLinks, Group, connected
from thalweg.schedules.shuffle.contended_links import MAX_WINDOW_STEPS
from thalweg.schedules.topologies import shuffle

PACES = st.sampled_from([2, 4, 8])
LOOKED_AT = 400  # steps, where a period is longer
Table = list[list[tuple[tuple[int, ...], int]]]


@st.composite
def contended(draw: st.DrawFn) -> Group:
    """Up to four racks of up to five, any racks and hosts slow, in pairs or not."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    cluster = Cluster.regular(sizes, interleaved=draw(st.booleans()))

    def some(names: list[str]) -> tuple[tuple[str, int], ...]:
        chosen = draw(st.dictionaries(st.sampled_from(names), PACES, max_size=4))
        return tuple(sorted(chosen.items()))

    several = len(sizes) > 1
    slow = ContendedLinks(
        racks=some([rack.name for rack in cluster.racks]) if several else (),
        hosts=some([host.name for host in cluster.hosts]) if cluster.workers > 1 else (),
        pairs=several and draw(st.booleans()),
    )
    return Group(tuple(range(cluster.workers)), cluster, slow)


def table(group: Group, first: int = 0, most: int = LOOKED_AT) -> Table:
    steps = range(first, first + min(shuffle.choose_table(group).period, most))
    return [[(m.ranks, m.lasts) for m in shuffle.groups(group, step)] for step in steps]


def pauses(group: Group, steps: Table) -> list[int]:
    """From each meeting of a rank to its next; the table begins anew at its end."""
    met: dict[int, list[int]] = {rank: [] for rank in group.ranks}
    for step, meetings in enumerate(steps):
        for ranks, _ in meetings:
            for rank in ranks:
                met[rank].append(step)
    return [
        later - earlier
        for own in met.values()
        for earlier, later in zip(own, [*own[1:], own[0] + len(steps)], strict=True)
    ]


def assert_sound(group: Group) -> None:
    period, steps = shuffle.choose_table(group).period, table(group)
    assert table(group, period) == steps
    busy = dict.fromkeys(group.ranks, -1)
    for step, meetings in enumerate(steps):
        for ranks, lasts in meetings:
            assert len(ranks) > 1
            assert step % lasts == 0
            for rank in ranks:
                assert busy[rank] < step, f"rank {rank} is in two meetings at step {step}"
                busy[rank] = step + lasts - 1
    if len(steps) < period:
        return  # the rest would have to be looked at too
    assert all(until < period for until in busy.values())
    assert connected(group.ranks, [[ranks for ranks, _ in meetings] for meetings in steps])
    if shuffle.choose_table(group).contention and group.size > 1:
        assert max(pauses(group, steps)) <= MAX_WINDOW_STEPS


@examples(60)
@given(contended())
def test_whatever_is_slow(group: Group) -> None:
    assert_sound(group)


@examples(25)
@given(any_groups(most=12))
def test_whatever_the_rates(group: Group) -> None:
    assert_sound(group)


def test_all_small_layouts_of_racks() -> None:
    """Up to four racks of up to five, nothing slow."""
    for racks in range(1, 5):
        for sizes in combinations_with_replacement(range(1, 6), racks):
            assert_sound(Group.everybody(Cluster.regular(sizes)))


def test_a_pause_at_the_end_of_a_period_counts() -> None:
    """Five steps to the end and four from the beginning are nine together."""
    slow = ContendedLinks(racks=(("rack1", 8),), hosts=(("host1", 4), ("host5", 4)), pairs=True)
    cluster = Cluster.regular([4, 3, 3])
    group = Group(tuple(range(10)), cluster, slow)
    assert_sound(group)
    assert shuffle.choose_table(group).contention == slow.at_most(4)


@pytest.mark.parametrize("racks", [2, 3, 4])
def test_racks_of_two_would_never_mix_without_whole_racks(racks: int) -> None:
    """The representatives leave one behind: first ones and second ones would never meet."""
    group = Group.everybody(Cluster.regular([2] * racks))
    steps = [[ranks for ranks, _ in meetings] for meetings in table(group)]
    inside = [(2 * rack, 2 * rack + 1) for rack in range(racks)]
    between = [[ranks for ranks in meetings if ranks not in inside] for meetings in steps]
    assert connected(group.ranks, steps)
    if racks != 3:  # three meet in pairs, and the rack that has a bye keeps both
        assert not connected(group.ranks, between)
        assert steps[1] == inside


def racks_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The racks of four that these are in."""
    return tuple(sorted({rank // 4 for rank in ranks}))


def test_pairs_of_racks_rotate() -> None:
    """Fixed pairs of more than two racks never mix."""
    group = Group.everybody(Cluster.regular([4] * 4, nic="1gbit", uplink="500mbit"))
    assert shuffle.choose_table(group).contention == ContendedLinks(pairs=True)
    steps = [[ranks for ranks, _ in meetings] for meetings in table(group)]
    assert len(steps) == 12
    met = {racks_of(ranks) for meetings in steps for ranks in meetings}
    assert met == {(0,), (1,), (2,), (3,), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    allowed = met - {(0, 2), (0, 3), (1, 2), (1, 3)}
    fixed = [[ranks for ranks in meetings if racks_of(ranks) in allowed] for meetings in steps]
    assert not connected(group.ranks, fixed)


def test_a_slow_rack_sends_an_envoy_to_another_by_turns() -> None:
    uplinks = ["250mbit", "1gbit", "1gbit", "1gbit"]
    group = Group.everybody(Cluster.regular([4] * 4, nic="1gbit", uplink=uplinks))
    steps = table(group)
    assert len(steps) == 48
    windows = [
        (step, sorted(ranks))
        for step, meetings in enumerate(steps)
        for ranks, lasts in meetings
        if lasts > 1
    ]
    assert [step for step, _ in windows] == list(range(0, 48, 4))
    assert {ranks[0] for _, ranks in windows} == {0, 1, 2, 3}  # its envoys
    assert {ranks[1] // 4 for _, ranks in windows} == {1, 2, 3}  # the racks they meet
    usual = [racks_of(ranks) for meetings in steps for ranks, lasts in meetings if lasts == 1]
    assert {racks for racks in usual if 0 in racks} == {(0,)}


def test_a_slow_host_meets_its_rack_by_turns_and_represents_nobody() -> None:
    nics = ["1gbit"] * 3 + ["250mbit"] + ["1gbit"] * 12
    group = Group.everybody(Cluster.regular([4] * 4, nic=nics, uplink="1gbit"))
    own = [(ranks, n) for meetings in table(group) for ranks, n in meetings if 3 in ranks]
    assert {n for _, n in own} == {4}
    assert {ranks for ranks, _ in own} == {(3, 0), (3, 1), (3, 2)}


@pytest.mark.parametrize("sizes", [[1], [2], [5], [1, 1], [1, 1, 1]])
def test_small_ones(sizes: list[int]) -> None:
    assert_sound(Group.everybody(Cluster.regular(sizes)))
