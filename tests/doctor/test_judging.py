"""From facts to findings, without a network: names, calls, rates, clocks, limits, versions."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import asdict
from threading import Event
from time import sleep
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doctor.patients import facts
from thalweg.doctor import Finding, addresses, limits, network
from thalweg.doctor.environment import shown, version_findings
from thalweg.doctor.finding import RankFacts, ranks_and_hosts, summed_up
from thalweg.doctor.limits import buffers_for, files_needed
from thalweg.doctor.network import clock_findings, unreachable
from thalweg.doctor.ping import PING_OK, PingResult, peers_of

GBIT = 1e9


# Names


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left, ended = Event(), Event()

    def hang(*arguments: Any, **more: Any) -> NoReturn:
        left.wait(20)
        ended.set()
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    found = addresses.addresses_of("nobody", 0.05)
    assert found.answers is None
    assert not ended.is_set()
    left.set()
    slow = addresses.lookups("nobody", "127.0.0.1", found)
    assert slow.verdict == "warn"
    assert "timed out after" in slow.detail
    assert "RES_OPTIONS" in slow.remedy


@pytest.mark.parametrize("resolved", [["127.0.1.1"], ["::1"], ["127.0.0.1", "::1"], []])
def test_loopback_names_fail_among_hosts_and_not_on_one(resolved: list[str]) -> None:
    here = facts(0, "a", resolved=resolved), facts(1, "a", resolved=resolved)
    assert [f.verdict for f in addresses.traps(here)] == ["ok"]
    found = addresses.traps([*here, facts(2, "b")])
    assert [(f.verdict, f.ranks, f.hosts) for f in found] == [("fail", (0, 1), ("a",))]


@pytest.mark.parametrize("resolved", [["10.0.0.1"], ["127.0.1.1", "10.0.0.1"], None])
def test_other_names_are_fine(resolved: list[str] | None) -> None:
    found = addresses.traps([facts(0, resolved=resolved), facts(1)])
    assert [f.verdict for f in found] == ["ok"]


def test_a_loopback_address_among_hosts() -> None:
    [found] = addresses.traps([facts(0, address="127.0.1.1"), facts(1)])
    assert (found.check, found.verdict, found.ranks) == ("meeting point", "fail", (0,))


# Calls


def calls(size: int, broken: dict[tuple[int, int], str]) -> list[PingResult]:
    return [
        PingResult(
            caller=one, peer=other, outcome=broken.get((one, other), PING_OK), round_trip=1e-4
        )
        for one in range(size)
        for other in range(size)
        if one != other
    ]


def test_two_hosts_that_do_not_reach_each_other_are_one_line_whatever_their_ranks() -> None:
    ranks = [facts(r, f"host{r // 2}") for r in range(6)]
    cut = {(a, b) for a in (0, 1) for b in (4, 5)}
    broken = dict.fromkeys(cut, "timed out") | {(b, a): "refused" for a, b in cut}
    [found] = unreachable(ranks, calls(6, broken))
    assert found.ranks == (0, 1, 4, 5)
    assert found.text == (
        "ranks 0, 1 on host0 can't reach ranks 4, 5 on host2 at 10.0.0.5 (eth0): timed out; "
        "ranks 4, 5 on host2 can't reach ranks 0, 1 on host0 at 10.0.0.1 (eth0): refused"
    )


def test_one_way_alone() -> None:
    [found] = unreachable([facts(0), facts(1)], calls(2, {(0, 1): "no route"}))
    assert found.text.endswith(": no route; the other way works")


def test_who_reaches_nobody_is_one_line() -> None:
    broken = {(2, other): "forbidden here" for other in (0, 1, 3)}
    [found] = unreachable([facts(r) for r in range(4)], calls(4, broken))
    assert found.text == "rank 2 on host2 reaches nobody: forbidden here"


@given(st.integers(2, 600), st.data())
def test_everybody_is_called_or_the_next_ones(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    peers = peers_of(rank, range(size))
    assert peers == [(rank + step) % size for step in range(1, size)][:256]


# Rates


@given(st.integers(1, 200))
def test_flows_are_few_and_everybody_sends_and_receives(hosts: int) -> None:
    everybody = frozenset((a, b) for a in range(hosts) for b in range(hosts) if a != b)
    turns = network.turns(range(hosts), everybody)
    flows = [flow for turn in turns for flow in turn]
    assert len(turns) <= network.MAX_FLOW_TURNS
    assert len(set(flows)) == len(flows)
    assert set(flows) <= everybody
    if hosts > 1:
        assert {one for one, _ in flows} == {other for _, other in flows} == set(range(hosts))
    if hosts <= 7:
        assert set(flows) == everybody
    for turn in turns:
        assert len({one for one, _ in turn}) == len(turn)


def measured(hosts: int, slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(a, b): slow.get((a, b), GBIT) for a in range(hosts) for b in range(hosts) if a != b}


def test_a_slow_host_is_named_not_its_pairs() -> None:
    slow = {(2, other): 0.1 * GBIT for other in range(5) if other != 2}
    [found] = network.rate_findings([facts(r) for r in range(5)], measured(5, slow), [])
    assert found.text == (
        "rank 2 on host2: flows get 100 Mbit/s out, 1 Gbit/s in; "
        "the median of all hosts is 1 Gbit/s"
    )


def test_of_three_hosts_a_slow_one_is_named_though_most_flows_are_slow() -> None:
    slow = {flow: 0.1 * GBIT for flow in measured(3, {}) if 2 in flow}
    [found] = network.rate_findings([facts(r) for r in range(3)], measured(3, slow), [])
    assert found.ranks == (2,)
    assert found.text.endswith("the median of all hosts is 1 Gbit/s")


def test_racks_with_narrow_uplinks_have_no_slow_hosts() -> None:
    across = {flow: 0.25 * GBIT for flow in measured(4, {}) if flow[0] // 2 != flow[1] // 2}
    [found] = network.rate_findings([facts(r) for r in range(4)], measured(4, across), [])
    assert found.verdict == "ok"


def test_a_slow_pair_is_named_both_ends() -> None:
    [found] = network.rate_findings(
        [facts(r) for r in range(4)], measured(4, {(1, 3): 0.4 * GBIT}), []
    )
    assert found.text.startswith("from rank 1 on host1 to rank 3 on host3: 400 Mbit/s")


def test_what_was_left_out_is_told_also_if_something_is_slow() -> None:
    flows = {(a, (a + 1) % 30): GBIT if a != 4 else GBIT / 5 for a in range(30)}
    slow, rest = network.rate_findings([facts(r) for r in range(30)], flows, [])
    assert slow.text.startswith("from rank 4 on host4 to rank 5 on host5: 200 Mbit/s")
    assert rest.text == (
        "30 of 870 ordered pairs of hosts, the others left out: median 1 Gbit/s, minimum 200 Mbit/s"
    )


def test_half_is_fast_enough() -> None:
    [found] = network.rate_findings(
        [facts(r) for r in range(4)], measured(4, {(1, 3): 0.5 * GBIT}), []
    )
    assert found.verdict == "ok"


def test_a_flow_that_does_not_arrive_where_small_messages_do() -> None:
    [found] = network.rate_findings([facts(0), facts(1)], {(1, 0): GBIT}, [(0, 1)])
    assert found.verdict == "fail"
    assert "MTU" in found.remedy


# Clocks, buffers, versions


@pytest.mark.parametrize(("ahead", "verdict"), [(0.3, "warn"), (-0.3, "warn"), (0.05, "ok")])
def test_clocks_by_whoever_called(ahead: float, verdict: str) -> None:
    there = PingResult(caller=0, peer=1, outcome=PING_OK, round_trip=0.02, ahead=ahead)
    back = PingResult(caller=1, peer=0, outcome=PING_OK, round_trip=0.01, ahead=-ahead)
    for heard in ([there], [back], [there, back]):
        [found] = clock_findings([facts(0), facts(1)], heard)
        assert found.verdict == verdict
    if verdict == "warn":
        assert ("ahead of" in found.text) == (ahead > 0)
        assert "give or take 5 ms" in found.text  # half of the shorter round trip


def test_a_round_trip_that_long_says_nothing() -> None:
    ping = PingResult(caller=0, peer=1, outcome=PING_OK, round_trip=1.0, ahead=0.5)
    assert [f.verdict for f in clock_findings([facts(0), facts(1)], [ping])] == ["ok"]


def test_buffers_against_the_bandwidth_delay_product() -> None:
    """10 Gbit/s over 10 ms is 12.5 MB."""
    small, large = {"tcp_rmem": 6_000_000, "tcp_wmem": 4_000_000}, {"tcp_rmem": 1 << 26}
    ranks = [facts(0, buffers=small), facts(1, buffers=large)]
    found = buffers_for(
        ranks, {(0, 1): 10 * GBIT, (1, 0): GBIT / 100}, {(0, 1): 0.01, (1, 0): 0.01}
    )
    assert [(f.verdict, f.ranks) for f in found] == [("warn", (0,))]
    assert "tcp_wmem allows 4 MB, and rate x round trip is 12.5 MB" in found[0].text
    assert int(found[0].remedy.rstrip("'").split()[-1]) >= 2 * 12.5e6


def test_files_grow_with_peers_and_the_stores_host_needs_more() -> None:
    assert files_needed(1) == 64
    assert files_needed(101) - files_needed(1) == 400
    assert files_needed(100, hosts_store=True) - files_needed(100) == 600


def test_patches_of_python_do_not_count() -> None:
    ranks = [facts(r, versions={"python": f"3.11.{r}"}) for r in range(3)]
    assert [f.verdict for f in version_findings(ranks)] == ["ok"]
    [found] = version_findings([*ranks, facts(3, versions={"python": "3.12.0"})])
    assert (found.verdict, found.ranks) == ("warn", (3,))


# A processor that announces what it hasn't


def test_a_product_that_kills_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> bool:
        os.kill(os.getpid(), signal.SIGILL)
        return True

    monkeypatch.setattr(limits, "product_is_right", die)
    found = limits.bfloat16()
    assert found.verdict == "fail"
    assert "dies of SIGILL" in found.detail
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in found.remedy


def test_a_product_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> bool:
        sleep(60)
        return True

    monkeypatch.setattr(limits, "product_is_right", hang)
    monkeypatch.setattr(limits, "CHILD_TIMEOUT_SECONDS", 0.1)
    assert "hangs" in limits.bfloat16().detail


def test_threads_of_all_workers_of_a_host_share_its_cores() -> None:
    ranks = [facts(r, f"host{r // 4}", cores=8, threads=4 if r < 4 else 2) for r in range(8)]
    [found] = limits.threads(ranks)
    assert (found.verdict, found.hosts, found.ranks) == ("warn", ("host0",), (0, 1, 2, 3))
    assert found.remedy == "set OMP_NUM_THREADS=2"


def test_workers_with_cores_of_their_own_do_not_share_them() -> None:
    ranks = [facts(r, "a", cores=4, threads=4, cpus=f"{15 << 4 * r:x}") for r in range(3)]
    assert [f.verdict for f in limits.threads(ranks)] == ["ok"]
    assert [f.verdict for f in limits.threads([*ranks, ranks[0]])] == ["warn"]


# Facts, findings


def test_facts_survive_another_version() -> None:
    mine = facts(3, versions={"thalweg": "1"})
    assert RankFacts.unpacked(asdict(mine)) == mine
    assert RankFacts.unpacked({"rank": 3, "from the future": 1}) == RankFacts(rank=3)


def test_the_same_on_several_ranks_is_one_line_and_the_worst_comes_first() -> None:
    fine = [Finding(check="disk", verdict="ok", detail=f"{r} GB").at(r, f"h{r}") for r in range(3)]
    bad = [Finding(check="lab", verdict="fail", detail="no", remedy="x").at(r, "a") for r in (2, 1)]
    first, second = summed_up([*fine, *bad])
    assert (first.text, first.ranks) == ("ranks 1, 2 on a: no", (1, 2))
    assert second.text == "rank 0 on h0: 0 GB (2 more ranks likewise)"
    assert (
        ranks_and_hosts(range(10), ["a", "b"])
        == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more on 2 hosts"
    )


def test_secrets_are_never_shown() -> None:
    variables = {"THALWEG_SECRET": "open sesame", "NCCL_TOKEN": "x", "RANK": "3", "HOME": "/root"}
    assert shown(variables) == {
        "NCCL_TOKEN": "(set, not shown)",
        "RANK": "3",
        "THALWEG_SECRET": "(set, not shown)",
    }
