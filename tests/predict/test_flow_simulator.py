"""Schedules replayed on links: small cases worked out by hand, and bounds that hold for all."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clusters import groups
from tests.examples import examples
from tests.running import tree_schedule
from tests.schedules.test_topologies import VARIANTS, build
from thalweg.codes import TREE_ROOT, Allocation, CodedTree, allocate
from thalweg.codes.fractional import FractionalRepetition
from thalweg.errors import ScheduleError
from thalweg.facts import Cluster, Duplex, Duration, Host, Rack, Rate
from thalweg.facts.machine import FittedValue, TransportCosts
from thalweg.predict.flow_simulator import FlowSimulator, simulate
from thalweg.schedules import Condition, Group, Move, MoveKind, Schedule, all_to_all, order, traffic

MB = 1_000_000
NO_LATENCY = Duration(0.0)


def schedule_of(moves: Mapping[int, Sequence[Move]], *megabytes: float) -> Schedule:
    nothing = Condition("nothing", lambda _rank, _chunk: None)
    return Schedule(
        name="by hand",
        ranks=tuple(moves),
        sizes=tuple(int(size * MB) for size in megabytes),
        itemsize=1,
        program=lambda rank: iter(moves[rank]),
        before=nothing,
        after=nothing,
    )


def letters(*ways: tuple[int, int, float]) -> Schedule:
    """Source, target and megabytes of messages that wait for nothing."""
    moves: dict[int, list[Move]] = {rank: [] for way in ways for rank in way[:2]}
    for chunk, (source, target, _) in enumerate(ways):
        moves[source].append(Move(MoveKind.SEND, target, chunk, chunk + 1))
        moves[target].append(Move(MoveKind.COPY, source, chunk, chunk + 1))
    return schedule_of(moves, *(size for _, _, size in ways))


def begin(flows: FlowSimulator, schedule: Schedule, when: float = 0.0) -> dict[int, float]:
    """All ranks at a time; fills in when they end."""
    ends: dict[int, float] = {}

    def ended(rank: int) -> None:
        ends[rank] = flows.now

    exchange = flows.exchange(schedule)
    for rank in schedule.ranks:
        flows.at(when, partial(exchange.start, rank, partial(ended, rank)))
    return ends


def one_host(ranks: int) -> Cluster:
    host = Host(name="alone", ranks=tuple(range(ranks)))
    return Cluster(racks=(Rack(name="rack", hosts=(host,)),), latency=NO_LATENCY)


def test_two_flows_through_one_uplink_get_half_each() -> None:
    cluster = Cluster.regular(
        [2, 2],
        nic="1gbit",
        uplink="100mbit",
        latency=Duration(0.001),
        uplink_latency=Duration(0.003),
    )
    ends = simulate(letters((0, 2, 1.25), (1, 3, 1.25)), cluster)
    assert ends == pytest.approx({0: 0.2, 1: 0.2, 2: 0.207, 3: 0.207})


def test_three_flows_of_which_one_gets_what_another_leaves() -> None:
    """Into 2 go 10 MB/s, out of 1 go 30. At first 0 and 1 send 5 MB/s each into 2, which leaves
    25 from 1 to 3. After 1 s the first has sent its 5 MB; 1 has 10 into 2, and 20 to 3. After half
    a second more the second has sent its 10 MB, and the third has 15 of 50 MB left, at 30."""
    fast, slow = Rate.parse("1gbit"), Rate.parse("10MB/s")
    nics: list[Rate | Duplex] = [fast, Duplex(Rate.parse("30MB/s"), fast), Duplex(fast, slow), fast]
    flows = FlowSimulator(Cluster.regular([4], nic=nics, latency=NO_LATENCY))
    ends = [begin(flows, letters(way)) for way in [(0, 2, 5), (1, 2, 10), (1, 3, 50)]]
    flows.run()
    assert [ends[0][2], ends[1][2], ends[2][3]] == pytest.approx([1.0, 1.5, 2.0])


def test_messages_to_one_follow_one_another_and_to_several_share() -> None:
    cluster = Cluster.regular([3], nic="1MB/s", latency=NO_LATENCY)
    flows = FlowSimulator(cluster)
    first, second = (begin(flows, letters((0, 1, 1))) for _ in range(2))
    flows.run()
    assert [first[1], second[1]] == pytest.approx([1.0, 2.0])
    assert simulate(letters((0, 1, 1), (0, 2, 1)), cluster)[1] == pytest.approx(2.0)


def test_a_late_rank_holds_up_who_waits_for_it() -> None:
    """What it waits for is there when it starts; its own part is over when all has left."""
    cluster = Cluster.regular([2], nic="1MB/s", latency=Duration(0.25))
    ends = simulate(letters((0, 1, 1), (1, 0, 2)), cluster, starts={1: 5.0})
    assert ends == pytest.approx({0: 7.25, 1: 7.0})


def test_a_receiver_handles_one_message_at_a_time() -> None:
    cluster = Cluster.regular([4], latency=Duration(0.5))
    schedule = letters(*((source, 0, 1e-6) for source in (1, 2, 3)))
    ends = simulate(schedule, cluster, TransportCosts(message=FittedValue(2.0)))
    assert ends[0] == pytest.approx(6.5, abs=1e-6)


def test_ranks_of_one_host_have_their_hands_alone() -> None:
    schedule = letters((0, 1, 1), (0, 2, 1))
    assert set(simulate(schedule, one_host(3)).values()) == {0.0}
    ends = simulate(schedule, one_host(3), TransportCosts(byte=FittedValue(1e-6)))
    assert ends == pytest.approx({0: 2.0, 1: 2.0, 2: 2.0})


def test_a_link_carries_a_burst_at_once_and_then_its_rate() -> None:
    """Of 5 MB, 3 at once and 2 at 1 MB/s. After 1.5 s of rest, 1.5 of 2 MB at once."""
    flows = FlowSimulator(Cluster.regular([2], nic="1MB/s", latency=NO_LATENCY), burst=3 * MB)
    first = begin(flows, letters((0, 1, 5)))
    second = begin(flows, letters((0, 1, 2)), when=3.5)
    flows.run()
    assert [first[1], second[1]] == pytest.approx([2.0, 4.0])


def test_tokens_run_down_while_something_else_limits() -> None:
    """Hands carry 4 MB/s, so the link's 3 MB of tokens go at 3 MB/s: 4 MB in a second."""
    cluster = Cluster.regular([2], nic="1MB/s", latency=NO_LATENCY)
    costs = TransportCosts(byte=FittedValue(0.25e-6))
    assert simulate(letters((0, 1, 5)), cluster, costs, burst=3 * MB)[1] == pytest.approx(2.0)


def test_two_flows_share_what_is_left_of_the_tokens() -> None:
    """Out of 0 its hand moves 2 MB/s, of which the link takes one from its 4 MB of tokens, for one
    flow or for two: dry after 4 s. The first has sent 2 + 3 of 6 MB by then, the second, which came
    after a second, 3 of 4 MB; the rest goes at half a MB/s each."""
    cluster = Cluster.regular([3], nic="1MB/s", latency=NO_LATENCY)
    flows = FlowSimulator(cluster, TransportCosts(byte=FittedValue(0.5e-6)), burst=4 * MB)
    first, second = begin(flows, letters((0, 1, 6))), begin(flows, letters((0, 2, 4)), when=1.0)
    flows.run()
    assert [first[1], second[2]] == pytest.approx([6.0, 6.0])


def test_a_quorum_ends_without_who_is_late() -> None:
    """Of 1 to 4, which compute the same by twos, one may be late, and finds the result when it
    comes. Three times 8 kB go into the root's NIC, and four times out of it, at 64 us each."""
    leaves: dict[int, tuple[int, ...]] = dict.fromkeys((1, 2, 3, 4), ())
    code = FractionalRepetition(4, 1)
    schedule = tree_schedule(
        allocate(CodedTree({TREE_ROOT: tuple(leaves), **leaves}, {TREE_ROOT: code}), 0), 1000
    )
    cluster = Cluster.regular([5], nic="1gbit", latency=Duration(0.01))
    for late in leaves:
        ends = simulate(schedule, cluster, starts={late: 10.0})
        assert ends.pop(late) == 10.0
        assert ends.pop(0) == pytest.approx(0.01 + 7 * 64e-6)
        assert list(ends.values()) == pytest.approx([0.02 + 7 * 64e-6] * 3)


def coded_tree_of_six() -> Allocation:
    either = FractionalRepetition(2, 1)
    children = {TREE_ROOT: (0, 1), 0: (2, 3), 1: (4, 5)}
    leaves: dict[int, tuple[int, ...]] = dict.fromkeys((2, 3, 4, 5), ())
    return allocate(CodedTree({**children, **leaves}, dict.fromkeys(children, either)), 0)


def test_who_is_late_passes_results_on_and_the_root_overtakes_its_own_worker() -> None:
    schedule = tree_schedule(coded_tree_of_six(), 1000)
    cluster = Cluster.regular([6], latency=Duration(0.01))
    for late in ({1}, {0}, {1, 2, 4}, {1, 4, 5}, {0, 2, 3}):
        ends = simulate(schedule, cluster, starts=dict.fromkeys(late, 10.0))
        assert {rank for rank, end in ends.items() if end == 10.0} == late
        assert all(end < 0.1 for rank, end in ends.items() if rank not in late)


def test_a_wait_in_a_circle_is_refused() -> None:
    circle = {
        rank: [Move(MoveKind.COPY, 1 - rank, 0, 1), Move(MoveKind.SEND, 1 - rank, 0, 1)]
        for rank in (0, 1)
    }
    with pytest.raises(ScheduleError, match="rank 0 waits for a message that is never sent"):
        simulate(schedule_of(circle, 1), Cluster.flat(2))


def test_who_never_starts_is_no_mistake() -> None:
    flows = FlowSimulator(Cluster.flat(2))
    exchange = flows.exchange(letters((0, 1, 1)))
    exchange.start(1, lambda: None)
    flows.run()
    assert flows.now == 0.0


class Counting(FlowSimulator):
    """Bytes that have arrived, by source and target."""

    delivered: Counter[tuple[int, int]]

    def post(
        self,
        source: int,
        target: int,
        nbytes: int,
        arrived: Callable[[int], None],
        number: int,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        def counted(number: int) -> None:
            self.delivered[source, target] += nbytes
            arrived(number)

        super().post(source, target, nbytes, counted, number, left)


def longest_chain(schedule: Schedule, cluster: Cluster) -> float:
    """Seconds if bytes cost nothing: along the moves, however often they have to be gone through
    until each has the time of what it waits for."""
    orders = {rank: order(schedule.moves(rank)) for rank in schedule.ranks}
    done: dict[tuple[int, int], float] = {}
    waits = {(r, i): n for r, o in orders.items() for i, n in enumerate(o.waits)}
    ready = deque(key for key, number in waits.items() if not number)
    begins = dict.fromkeys(waits, 0.0)
    sent: dict[tuple[int, int, int, int], deque[float]] = {}
    while ready:
        rank, index = ready.popleft()
        move = orders[rank].moves[index]
        end = begins[rank, index]
        if move.kind is MoveKind.SEND:
            arrives = end + cluster.seconds_between(rank, move.peer)
            sent.setdefault((rank, move.peer, *move[2:4]), deque()).append(arrives)
        else:
            come = sent.get((move.peer, rank, *move[2:4]))
            if not come:
                ready.append((rank, index))
                continue
            end = max(end, come.popleft())
        done[rank, index] = end
        for later in orders[rank].frees[index]:
            begins[rank, later] = max(begins[rank, later], end)
            waits[rank, later] -= 1
            if not waits[rank, later]:
                ready.append((rank, later))
    return max(done.values(), default=0.0)


@pytest.mark.parametrize("variant", VARIANTS)
@examples(20)
@given(group=groups(12), elements=st.integers(0, 20_000), burst=st.sampled_from([0.0, 5e3]))
def test_no_faster_than_links_and_latencies_allow(
    variant: str, group: Group, elements: int, burst: float
) -> None:
    schedule = build(variant, group, elements)
    flows = Counting(group.cluster, burst=burst)
    flows.delivered = Counter()
    ends = begin(flows, schedule)
    flows.run()
    assert set(ends) == set(schedule.ranks)
    load, rates = traffic(schedule, group.cluster), group.cluster.rates()
    slowest = max(
        (
            rates[link].seconds(max(0.0, n - burst))
            for link, n in load.links.items()
            if link in rates
        ),
        default=0.0,
    )
    assert flows.now >= max(slowest, longest_chain(schedule, group.cluster)) * (1 - 1e-9)
    assert flows.delivered.total() == sum(load.sent.values())
    assert max(ends.values()) <= flows.now


@pytest.mark.parametrize("variant", VARIANTS)
@examples(10)
@given(elements=st.integers(0, 20_000))
def test_where_bytes_cost_nothing_latencies_add_up(variant: str, elements: int) -> None:
    cluster = Cluster.regular(
        [2, 3, 2],
        nic=Rate(1e30),
        latency=Duration(0.5),
        uplink_latency=[Duration(0.1), Duration(0.2), Duration(0.4)],
    )
    schedule = build(variant, Group.everybody(cluster), elements)
    found = max(simulate(schedule, cluster).values())
    assert found == pytest.approx(longest_chain(schedule, cluster))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_burst_of_next_to_nothing_changes_next_to_nothing(variant: str) -> None:
    nics = ["1gbit", "700mbit", "200mbit", "1gbit", "400mbit"]
    cluster = Cluster.regular([3, 2], nic=nics, uplink=["300mbit", "500mbit"])
    schedule = build(variant, Group.everybody(cluster), 50_000)
    costs = TransportCosts(byte=FittedValue(1e-9))
    plain = simulate(schedule, cluster, costs)
    bursting = simulate(schedule, cluster, costs, burst=0.1)
    assert bursting == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("uneven", [False, True])
def test_all_to_all(uneven: bool) -> None:
    """The slowest NIC is never idle."""
    nics = [f"{100 + 7 * i * uneven}mbit" for i in range(32)]
    cluster = Cluster.regular([32], nic=nics, latency=Duration(0.01))
    schedule = all_to_all(Group.everybody(cluster), 32_000, 4)
    assert max(simulate(schedule, cluster).values()) == pytest.approx(0.01 + 31 * 4000 * 8 / 100e6)
