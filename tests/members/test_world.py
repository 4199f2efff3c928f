from __future__ import annotations

import pytest
import torch.distributed as dist

from thalweg.errors import PeerFailed, PeerLost
from thalweg.members.world import World


def late(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} is late", "wait longer")


@pytest.fixture
def worlds() -> list[World]:
    """The same run as three ranks see it, without their processes."""
    store = dist.HashStore()
    return [World.of(store, rank, 3, timeout=0.05) for rank in range(3)]


def test_the_values_of_all_members_are_read_by_rank(worlds: list[World]) -> None:
    for world in reversed(worlds):
        world.put(f"names/{world.rank}", f"the {world.rank}th")
    found = worlds[1].read_all("names", worlds[1].abort_flag(), late)
    assert list(found.items()) == [(0, b"the 0th"), (1, b"the 1th"), (2, b"the 2th")]


def test_the_first_member_that_is_late_is_named(worlds: list[World]) -> None:
    worlds[0].put("names/0", "first")
    with pytest.raises(PeerLost, match="rank 1 is late"):
        worlds[0].read_all("names", worlds[0].abort_flag(), late)


def test_a_failed_rank_is_not_waited_for(worlds: list[World]) -> None:
    worlds[2].abort_flag().publish("no more memory")
    with pytest.raises(PeerFailed, match="no more memory"):
        worlds[0].read("names/1", worlds[0].abort_flag(), late(1))
