"""Links that change while a stream runs through them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.conftest import LabOf
from tests.lab.remains import named_remains, wait_until
from tests.lab.traffic import Post, Stream, pump, rate
from thalweg.errors import LabError
from thalweg.facts import Link, Rate
from thalweg.lab import Lab
from thalweg.launch.worker_process import fork

pytestmark = pytest.mark.usefixtures("needs_lab")
MBIT20 = Rate.parse("20mbit")
ATTEMPTS = 8


@pytest.fixture
def lab(lab_of: LabOf) -> Lab:
    return lab_of(racks=2, hosts=2, nic="100mbit", uplink="100mbit")


def rows(lab: Lab, links: list[Link]) -> list[dict[str, Any]]:
    found = lab.links.status()
    return [found[link] for link in links]


def row(lab: Lab, link: Link) -> dict[str, Any]:
    return rows(lab, [link])[0]


def gets(stream: Stream, low: float, high: float, *, skip: float = 0.4) -> bool:
    """Whether so many Mbit/s of payload arrive. This process drives both ends, and may be starved
    on a busy machine, so there are some attempts; a link of another rate fails all of them."""
    for _ in range(ATTEMPTS):
        mbit = rate(stream, skip=skip) / 1e6
        print(f"{mbit:.1f} Mbit/s, wanted {low:g} to {high:g}")
        if low < mbit < high:
            return True
    return False


ALL, FIFTH = (82.0, 110.0), (16.0, 22.0)  # of 100 Mbit/s


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Which links


def test_links_by_rank_and_by_name(lab: Lab) -> None:
    links = lab.links
    assert links.of(rack=1) == links.of(rack="rack1")
    assert links.of(rack=1) == [Link("uplink", "rack1", "out"), Link("uplink", "rack1", "in")]
    assert links.of(host=0) == links.of(host="host0")
    assert links.of(host=3, directions=("in",)) == [Link("nic", "host3", "in")]
    assert len(links.all()) == 2 * (2 + 4)


def test_links_that_are_not_there(lab: Lab) -> None:
    neither = "a link belongs to a rack or a host; give one of rack and host"
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"rack": 2}, "there is no rack 2; there are 2, numbered from 0"),
        ({"rack": "r0"}, "there is no rack 'r0'; there are 2, numbered from 0"),
        ({"host": 4}, "there is no host 4; give a rank from 0 to 3, or a name"),
        ({"host": ""}, "there is no host ''; give a rank from 0 to 3, or a name"),
        ({}, neither),
        ({"rack": 0, "host": 0}, neither),
    ]
    for which, message in mistakes:
        with pytest.raises(LabError) as caught:
            lab.links.of(**which)
        assert str(caught.value) == message


# Degraded


@pytest.mark.parametrize(
    "target",
    [pytest.param({"host": 0}, marks=pytest.mark.slow), {"rack": 0}],
    ids=["NIC", "uplink"],
)
def test_a_degraded_link_is_slower_until_it_is_restored(target: dict[str, int], lab: Lab) -> None:
    links = lab.links.of(**target)
    with Stream(lab, 0, 2) as stream:
        lab.links.degrade(links, MBIT20)
        assert gets(stream, *FIFTH)
        assert [row["rate"] for row in rows(lab, links)] == ["20mbit"] * 2
        assert [row["declared"] for row in rows(lab, links)] == ["100mbit"] * 2
        lab.links.restore(links)
        assert gets(stream, *ALL)
        assert [row["rate"] for row in rows(lab, links)] == ["100mbit"] * 2


def test_one_direction_alone_is_degraded(lab: Lab) -> None:
    with Stream(lab, 0, 1) as out, Stream(lab, 1, 0) as into:
        lab.links.degrade(lab.links.of(host=0, directions=("in",)), MBIT20)
        assert gets(into, *FIFTH)
        assert gets(out, *ALL)
    assert row(lab, Link("nic", "host0", "out"))["rate"] == "100mbit"
    assert row(lab, Link("nic", "host0", "in"))["rate"] == "20mbit"


@pytest.mark.slow
def test_an_uplink_that_never_was_the_bottleneck_becomes_one(name: str) -> None:
    with Lab(racks=2, hosts=1, nic="100mbit", name=name) as lab, Stream(lab, 0, 1) as stream:
        links = lab.links.of(rack=0)
        lab.links.degrade(links, MBIT20)
        assert gets(stream, *FIFTH)
        lab.links.restore(links)
        assert row(lab, links[0])["rate"] is None
        assert gets(stream, *ALL)


def test_a_rate_that_cannot_be_had_changes_nothing(lab: Lab) -> None:
    before = [r["rate"] for r in lab.links.status().values()]
    with pytest.raises(LabError, match=r"^the lab can't emulate a link of 1kbit; "):
        lab.links.degrade(lab.links.of(rack=0), Rate.parse("1kbit"))
    assert [r["rate"] for r in lab.links.status().values()] == before


# Cut


def test_a_cut_link_swallows_what_is_sent_into_it(lab: Lab) -> None:
    links = lab.links.of(host=0)
    with Post(lab, 0, 1) as post:
        assert post.arrives(0, 1)
        assert post.arrives(1, 0)
        lab.links.cut(links)
        assert not post.arrives(0, 1)
        assert not post.arrives(1, 0)
        for now in rows(lab, links):
            assert now["cut"]
            assert now["drops"] >= 3
        lab.links.heal(links)
        assert post.arrives(0, 1)
        assert post.arrives(1, 0)
        assert not any(r["cut"] for r in lab.links.status().values())


@pytest.mark.parametrize("target", [{"host": 0}, {"rack": 0}], ids=["NIC", "uplink"])
@pytest.mark.parametrize("way", ["out", "in"])
def test_cut_one_way_the_other_way_is_whole(way: Any, target: dict[str, int], lab: Lab) -> None:
    with Post(lab, 0, 2) as post, Post(lab, 1, 3) as neighbours:
        lab.links.cut(lab.links.of(**target, directions=(way,)))
        assert post.arrives(0, 2) == (way == "in")
        assert post.arrives(2, 0) == (way == "out")
        if "host" in target:
            assert neighbours.arrives(1, 3)
            assert neighbours.arrives(3, 1)


def test_a_stream_survives_a_cut_and_a_healed_link_is_still_degraded(lab: Lab) -> None:
    links = lab.links.of(rack=0)
    with Stream(lab, 0, 2) as stream:
        lab.links.degrade(links, MBIT20)
        lab.links.cut(links)
        lab.links.cut(links)  # a second time changes nothing
        pump([stream], until_after(0.5))  # what was beyond the cut already
        arrived = stream.received
        pump([stream], until_after(0.5))
        assert stream.received == arrived
        lab.links.heal(links)
        deadline = monotonic() + 60
        pump([stream], lambda: stream.received > arrived + 500_000 or monotonic() > deadline)
        assert gets(stream, *FIFTH)
        assert [row["rate"] for row in rows(lab, links)] == ["20mbit"] * 2
        lab.links.cut(links)
        lab.links.restore(links)  # heals, too
        assert [row["rate"] for row in rows(lab, links)] == ["100mbit"] * 2
        assert not any(r["cut"] for r in lab.links.status().values())


def until_after(seconds: float) -> Callable[[], bool]:
    end = monotonic() + seconds
    return lambda: monotonic() >= end


# Filled by others


@pytest.mark.parametrize(
    "target",
    [
        pytest.param({"host": 0, "directions": ("out",)}, marks=pytest.mark.slow),
        {"rack": 1, "directions": ("in",)},
    ],
    ids=["NIC", "uplink"],
)
def test_a_competing_flow_takes_a_share_until_the_link_is_restored(
    target: dict[str, Any], lab: Lab
) -> None:
    links = lab.links.of(**target)
    with Stream(lab, 0, 2) as stream:
        lab.links.fill(links)
        [pid] = lab.record.state().flows[str(links[0])]
        assert row(lab, links[0])["flows"] == 1
        assert gets(stream, 5, 77, skip=0.7)
        lab.links.restore(links)
        assert gone(pid)
        assert row(lab, links[0])["flows"] == 0
        assert gets(stream, *ALL)


@pytest.mark.slow
def test_a_flow_takes_no_more_than_its_rate(lab: Lab) -> None:
    links = lab.links.of(rack=0, directions=("out",))
    with Stream(lab, 0, 2) as stream:
        lab.links.fill(links, rate=MBIT20)
        assert gets(stream, 67, 87, skip=1.0)


def test_flows_in_both_directions_end_with_the_lab(name: str) -> None:
    with Lab(hosts=2, nic="50mbit", name=name) as lab:
        lab.links.fill(lab.links.of(host=1), flows=2)
        flows = lab.record.state().flows
        assert {link: len(pids) for link, pids in flows.items()} == {
            "nic of host1, out": 2,
            "nic of host1, in": 2,
        }
        pids = [pid for pids in flows.values() for pid in pids]
        assert not any(map(gone, pids))
    assert all(map(gone, pids))
    assert named_remains(name) == []


def test_a_flow_into_a_cut_link_waits_until_it_is_healed(lab: Lab) -> None:
    [link] = lab.links.of(host=1, directions=("in",))
    lab.links.cut([link])
    lab.links.fill([link])
    assert row(lab, link)["flows"] == 1
    assert row(lab, link)["sent_bytes"] == 0
    lab.links.heal([link])
    wait_until(lambda: row(lab, link)["sent_bytes"] >= 1_000_000)


# From another process


def elsewhere(work: Callable[[], None]) -> None:
    def be_child() -> Any:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)

    assert os.waitpid(fork(be_child), 0)[1] == 0


def test_another_process_finds_a_lab_and_changes_it(lab: Lab) -> None:
    links = lab.links.of(rack=0)
    lab.links.fill(links[:1])
    [pid] = lab.record.state().flows[str(links[0])]

    def degrade_and_cut() -> None:
        found = Lab.find(lab.name)
        assert found.cluster == lab.cluster
        found.links.degrade(found.links.of(host=0), MBIT20)
        found.links.cut(found.links.of(rack=0))

    def restore() -> None:
        Lab.find(lab.name).restore()

    elsewhere(degrade_and_cut)
    assert row(lab, Link("nic", "host0", "out"))["rate"] == "20mbit"
    assert all(row["cut"] for row in rows(lab, links))
    elsewhere(restore)
    assert {(r["rate"], r["cut"], r["flows"]) for r in lab.links.status().values()} == {
        ("100mbit", False, 0)
    }
    wait_until(lambda: gone(pid))


def test_a_detached_flow_outlives_who_started_it_and_any_other_does_not(lab: Lab) -> None:
    links = {detached: lab.links.of(host=int(detached), directions=("out",)) for detached in (0, 1)}

    def fill() -> None:
        for detached in (0, 1):
            Lab.find(lab.name).links.fill(links[detached], detached=bool(detached))

    elsewhere(fill)
    flows = lab.record.state().flows
    [ends], [stays] = flows[str(links[0][0])], flows[str(links[1][0])]
    wait_until(lambda: gone(ends))
    assert not gone(stays)
    lab.restore()
    wait_until(lambda: gone(stays))


def test_a_lab_that_another_process_took_down(name: str) -> None:
    with Lab(hosts=1, name=name) as lab:
        elsewhere(lambda: Lab.find(name).down())
        assert named_remains(name) == []
        with pytest.raises(LabError, match=f"^lab '{name}' isn't up; see `thalweg lab status`$"):
            lab.links.cut(lab.links.of(host=0))
