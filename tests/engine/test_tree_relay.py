"""Coded trees over loopback: who is late holds nobody up, who is gone costs no step, and what can't
be made good is said."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from time import monotonic, sleep

import numpy as np
import pytest

from tests.codes.trees import planted
from tests.engine.trees import ELEMENTS, PATIENCE, Ranks, at_once, ranks
from tests.running import DOUBLE, tree_schedule
from thalweg.codes import TREE_ROOT, Allocation
from thalweg.engine import arrivals, tree_relay
from thalweg.engine.tree_relay import join_tree, sources
from thalweg.errors import PeerFailed, PeerLost, RunError, TransportClosed
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_group import WorkerGroup
from thalweg.members.world import World
from thalweg.transports.best_effort import BestEffortMessage, MessageKind

#     root, with 0
#    0            1
#  2 3 6        4   5
SEVEN = planted("fractional", 7, 2, 1)
STAR = planted("fractional", 7, 7, 1)


def wait_until(so: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE
    while not so():
        assert monotonic() < deadline, "it never came"
        sleep(0.005)


def test_the_tree_of_these_tests() -> None:
    assert SEVEN.tree.children[TREE_ROOT] == (0, 1)
    assert SEVEN.tree.children[0] == (2, 3, 6)
    assert SEVEN.tree.children[1] == (4, 5)
    assert sources(SEVEN, 5) == [1, 0]
    assert sources(SEVEN, 0) == []


@pytest.mark.parametrize("allocation", [SEVEN, STAR])
def test_everybody_gets_the_exact_sum(allocation: Allocation) -> None:
    with ranks(allocation) as seven:
        for step in range(20):
            seven.contribute(step, *range(7))
            seven.assert_result(step)
            assert all(one.newest == step + 1 for one in seven.relays.values())


@pytest.mark.parametrize("late", [(6,), (1,), (0,), (0, 3), (0, 2, 3, 6), (1, 4, 5)])
def test_who_is_late_holds_nobody_up(late: tuple[int, ...]) -> None:
    """Also the root's own worker, and all below another; and they find all results waiting."""
    steps = 10
    prompt = [rank for rank in range(7) if rank not in late]
    with ranks(SEVEN) as seven:
        for step in range(steps):
            seven.contribute(step, *prompt)
            seven.assert_result(step, *prompt)
        for step in range(steps):
            seven.contribute(step, *late)  # too late: of no use, and no harm
            seven.assert_result(step, *late)
        seven.contribute(steps, *range(7))
        seven.assert_result(steps)


def test_beyond_the_tolerance_the_root_waits_for_one_more() -> None:
    with ranks(STAR) as seven:
        team = [rank for rank in range(7) if STAR.weights[rank] == STAR.weights[6]]
        prompt = [rank for rank in range(7) if rank not in team]
        seven.contribute(0, *prompt)
        assert seven.relays[0].result(0, seconds=0.2) is None
        assert not seven.relays[0].has(0)
        seven.contribute(0, team[0])
        seven.assert_result(0)


def test_beyond_raise_ends_the_run_and_names_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.3)
    with ranks(STAR, beyond="raise") as seven:
        team = [rank for rank in range(7) if STAR.weights[rank] == STAR.weights[6]]
        seven.contribute(0, *(rank for rank in range(7) if rank not in team))
        named = (
            f"waits for ranks {', '.join(map(str, team))}, more stragglers than the code tolerates"
        )
        with pytest.raises(RunError, match=rf"step 0 takes longer than 0.3 s: .* {named}"):
            seven.relays[0].result(0)
        with pytest.raises(PeerFailed, match=r"rank 0 aborted: step 0 takes longer than 0.3 s"):
            seven.relays[3].result(0)


def test_beyond_raise_counts_from_the_first_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's own, if nobody else's comes."""
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.3)
    with ranks(STAR, beyond="raise") as seven:
        seven.contribute(0, 0)
        with pytest.raises(RunError, match=r"the root waits for ranks 2, 3, 4, 5, more"):
            seven.relays[0].result(0)


def test_beyond_partial_takes_what_is_there_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer is late: half of the cells, scaled up. The next step is exact again."""
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.2)
    with ranks(SEVEN, beyond="partial") as seven:
        seven.contribute(0, 0, 1)
        for one in seven.relays.values():
            results = one.result(0)
            assert results is not None
            assert (results.covered, SEVEN.cells) == (1, 2)
            np.testing.assert_array_equal(np.concatenate(results.arrays), 2 * seven.inputs[0])
        seven.contribute(1, 0, 2)
        seven.assert_result(1)


def test_beyond_partial_waits_while_the_root_has_seen_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step begins for it with the first sign of it: an evaluation in between is no lateness."""
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.1)
    with ranks(SEVEN, beyond="partial") as seven:
        seven.contribute(0, 4)
        assert seven.relays[5].result(0, seconds=0.5) is None
        seven.contribute(0, 0)
        results = seven.relays[5].result(0)
        assert results is not None
        assert results.covered == 1
        np.testing.assert_array_equal(np.concatenate(results.arrays), 2 * seven.inputs[0])


def test_who_has_no_parent_any_more_follows_the_next() -> None:
    """1 goes, and 4 and 5 get their results from the root, until it is back, elsewhere."""
    with ranks(SEVEN) as seven:
        seven.contribute(0, *range(7))
        seven.assert_result(0)
        gone = seven.relays.pop(1)
        gone.close()
        wait_until(lambda: seven.lost(0) == [1])
        wait_until(lambda: seven.relays[0]._node.followers == {4, 5})
        for step in range(1, 5):
            seven.contribute(step, 0, 2, 3, 4, 5, 6)
            seven.assert_result(step)
        back = seven.join(1)
        wait_until(lambda: seven.lost(0) == [])
        seven.contribute(5, *range(7))
        seven.assert_result(5)
        wait_until(lambda: not seven.relays[0]._node.followers)
        assert back.newest == 6
        seven.contribute(6, 1, 4, 5)  # it is of use again: nobody else computes
        seven.assert_result(6)


def test_a_leaf_that_comes_back_gets_results_again() -> None:
    with ranks(SEVEN) as seven:
        seven.contribute(0, *range(7))
        seven.assert_result(0)
        seven.relays.pop(5).close()
        wait_until(lambda: seven.lost(1) == [5])
        for step in (1, 2):
            seven.contribute(step, 0, 1, 2, 3, 4, 6)
            seven.assert_result(step)
        seven.join(5)
        wait_until(lambda: seven.lost(1) == [])
        seven.contribute(3, 1, 5)
        seven.assert_result(3)
        assert seven.relays[5].result_expired(2)


def test_without_its_root_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a grace, in which it might come back."""
    monkeypatch.setattr(tree_relay, "ROOT_RECONNECT_SECONDS", 0.5)
    with ranks(SEVEN) as seven:
        seven.contribute(0, *range(7))
        seven.assert_result(0)
        seven.relays.pop(0).close()
        began = monotonic()
        with pytest.raises(PeerLost, match="the root of the coded tree, rank 0, failed"):
            seven.relays[1].result(1)
        assert monotonic() - began >= 0.4
        assert seven.relays[2]._abort_flag.poll() is None  # one alone may have lost its own link
        seven.relays.pop(1).close()  # as its process ends
        for rank in (2, 3, 6, 4, 5):
            with pytest.raises(
                (PeerLost, PeerFailed), match="the root of the coded tree, rank 0, failed"
            ):
                seven.relays[rank].result(1)


def test_a_state_is_given_by_who_has_it() -> None:
    """The parent doesn't look; the next one who is asked does."""
    with ranks(SEVEN) as seven:
        state = np.arange(1000, dtype=np.uint8)

        def give() -> None:
            wait_until(seven.relays[0].state_requested)
            seven.relays[0].send_state(state)

        helper = Thread(target=give)
        helper.start()
        came = seven.relays[5].request_state()
        helper.join()
        np.testing.assert_array_equal(came, state)
        assert seven.relays[1].state_requested()


@pytest.mark.slow
def test_who_needs_a_state_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 and 4 ask each other, 2 and 3 don't look: it is 6 that has one, whom no other is near."""
    monkeypatch.setattr(tree_relay, "STATE_REQUEST_RETRY_SECONDS", 0.1)
    with ranks(SEVEN) as seven, ThreadPoolExecutor(3) as threads:
        state = np.arange(1000, dtype=np.uint8)
        asking = [threads.submit(seven.relays[rank].request_state) for rank in (0, 1, 4)]
        wait_until(seven.relays[6].state_requested)
        assert not any(future.done() for future in asking)
        seven.relays[6].send_state(state, from_now_on=True)
        for future in asking:
            np.testing.assert_array_equal(future.result(PATIENCE), state)
        assert not seven.relays[1].state_requested()


@pytest.mark.slow
def test_results_that_were_lost_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 lost the last one: nothing comes after it that would tell."""
    with ranks(SEVEN) as seven:
        dropped: list[BestEffortMessage] = []
        send = seven.relays[1]._messages.send

        def send_all_but_the_first(message: BestEffortMessage) -> bool:
            if message.peer == 5 and message.kind is MessageKind.RESULT and not dropped:
                dropped.append(message)
                return False
            return send(message)

        monkeypatch.setattr(seven.relays[1]._messages, "send", send_all_but_the_first)
        seven.contribute(0, *range(7))
        seven.assert_result(0)
        assert dropped


def test_who_is_through_needs_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root ends when its own neighbours are through; 5, below 1, is late and gets all."""
    monkeypatch.setattr(tree_relay, "ROOT_RECONNECT_SECONDS", 0.1)
    with ranks(SEVEN) as seven:
        state = np.arange(1000, dtype=np.uint8)
        for rank in (0, 1, 2, 3, 6):
            seven.relays[rank].send_state(state, from_now_on=True)
        seven.contribute(0, *range(5))
        seven.assert_result(0, *range(5))
        seven.relays.pop(0).close()
        wait_until(lambda: seven.relays[1]._messages.seconds_down(0) > 0.5)
        seven.assert_result(0, 4, 5)
        np.testing.assert_array_equal(seven.relays[5].request_state(), state)


def test_nobody_has_a_state() -> None:
    with ranks(SEVEN) as seven:
        seven.relays[5].timeout = 0.1
        with pytest.raises(RunError, match="rank 5 requested the state of the run"):
            seven.relays[5].request_state()


def test_nothing_is_waited_for_without_end() -> None:
    with ranks(SEVEN) as seven:
        seven.relays[3].timeout = 0.2
        with pytest.raises(
            RunError, match=r"rank 3 timed out after 0.2 s waiting for the result of step 0; look"
        ):
            seven.relays[3].result(0)


def test_after_close() -> None:
    with ranks(SEVEN) as seven:
        pass
    with pytest.raises(TransportClosed, match=r"rank 3 communicates after close\(\)"):
        seven.contribute(0, 3)


class Killer:
    """Kills these ranks, each once it has come so far."""

    def __init__(self, victims: dict[int, int]) -> None:
        self.victims = victims
        self.killed: list[int] = []

    def prepare(self) -> None:
        pass

    def poll(self, workers: WorkerGroup) -> None:
        for rank, step in self.victims.items():
            if rank not in self.killed and workers.steps.get(rank, -1) >= step:
                workers.kill(rank)
                self.killed.append(rank)


STEPS, SURVIVORS = 40, 4


def train(rank: int, report: SendMessage) -> dict[str, int]:
    """As many steps as the root's."""
    world = World.join(PATIENCE)
    seven = Ranks(SEVEN)
    schedule = tree_schedule(SEVEN, ELEMENTS)
    one = join_tree(world, world.abort_flag(), SEVEN, [schedule], [DOUBLE])
    seven.relays = {rank: one}
    exact = 0
    for step in range(STEPS):
        seven.contribute(step, rank)
        seven.assert_result(step)
        exact += 1
        report({"step": step})
        sleep(0.01)
    world.store_client.call(lambda store: store.add("done", 1))
    wait_until(lambda: world.store_client.call(lambda store: store.add("done", 0)) >= SURVIVORS)
    one.close()
    return {"exact": exact}


def test_killed_ranks_cost_no_step() -> None:
    """One in the middle with one of its children, and one below the root's own worker: processes,
    killed at different steps. The others get every step's exact sum."""
    killer = Killer({1: 8, 4: 16, 3: 24})
    results = run_workers(7, train, timeout=60, grace=1, director=killer, debug=True)
    assert sorted(killer.killed) == [1, 3, 4]
    assert [results[rank].get("exact") for rank in (0, 2, 5, 6)] == [STEPS] * SURVIVORS


def test_an_answer_that_was_lost_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the root would wait for ever: nobody else has these samples."""
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(tree_relay, "RELAY_ABORT_POLL_SECONDS", 0.1)
    with ranks(planted("fractional", 3, 3, 0)) as three:
        send, lost = three.relays[2]._messages.send, []

        def lose_the_first(message: BestEffortMessage) -> bool:
            if message.kind is MessageKind.ANSWER and not lost:
                lost.append(message)
                return False
            return send(message)

        monkeypatch.setattr(three.relays[2]._messages, "send", lose_the_first)
        three.contribute(0, 0, 1, 2)
        at_once(lambda rank: three.assert_result(0, rank), (0, 1, 2))
        assert lost


def test_a_silent_parent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stands, and nothing comes: the results are had from another."""
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(tree_relay, "RELAY_ABORT_POLL_SECONDS", 0.1)
    with ranks(SEVEN) as seven:
        silent = seven.relays[1]
        monkeypatch.setattr(silent._messages, "send", lambda message: True)
        seven.contribute(0, 0, 2, 3, 4, 5, 6)
        seven.assert_result(0, 0, 2, 3, 6)
        seven.assert_result(0, 4, 5)


def test_a_deadline_holds_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a run that was resumed."""
    monkeypatch.setattr(arrivals, "FIRST_DEADLINE_SECONDS", 0.3)
    with ranks(STAR, beyond="raise", first=500) as seven:
        seven.contribute(500, 0)
        with pytest.raises(RunError, match=r"step 500 takes longer than 0\.3 s"):
            seven.relays[0].result(500)
