"""The server of asp by its messages alone. All gradients are 1, and the learning rate is the number
of workers: the parameters themselves tell how many gradients were applied."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from queue import Empty, SimpleQueue
from random import Random
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.facts import Size
from thalweg.training.buckets import FlatBucket
from thalweg.training.exchanges.parameter_server import UNKNOWN_CLOCK, ParameterServer
from thalweg.training.exchanges.server import ServerClient
from thalweg.training.plan_context import Ledger
from thalweg.training.sources.gradients import PARTICIPATION_FLAGS, layout_of
from thalweg.transports.best_effort import BestEffortMessage, MessageKind

BUCKET = Size.parse("8B")  # a bucket for the weight, and one for the bias and the flags
PIECES = 3  # of an answer: its head and two buckets


class Setup:
    """A server for a line of one weight and one bias, and the messages of its workers."""

    def __init__(self, workers: int, staleness: int, **options: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        settings = {"lr": float(workers), **options}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)
        self.parameters = dict(self.model.named_parameters())
        self.staleness = staleness
        self.layout = layout_of(self.parameters, BUCKET)
        self.server = self.another(dict.fromkeys(range(workers), 0), {})
        self.requests = dict.fromkeys(range(workers), 0)
        self.gradients = dict.fromkeys(range(workers), 0)

    def another(self, clocks: dict[int, int], applied: dict[int, int]) -> ParameterServer:
        layout = layout_of(self.parameters, BUCKET)
        return ParameterServer(
            self.parameters, self.optimizer, layout, clocks, self.staleness, applied
        )

    def gradient(
        self, worker: int, weight: float = 1.0, bias: float | None = 1.0, number: int | None = None
    ) -> list[BestEffortMessage]:
        """The messages of a worker's next gradient."""
        self.requests[worker] += 1
        self.gradients[worker] = self.gradients[worker] + 1 if number is None else number
        for bucket in self.layout.buckets:
            for name, view in bucket.views.items():
                if name == PARTICIPATION_FLAGS:
                    view.copy_(torch.tensor([1.0, 0.0 if bias is None else 1.0, 0.0]))
                else:
                    view.fill_(weight if name == "weight" else bias or 0.0)
        return [
            BestEffortMessage(
                worker,
                MessageKind.ANSWER,
                self.requests[worker],
                b.index,
                self.gradients[worker],
                a,
            )
            for b in self.layout.buckets
            for a in (b.vector.copy(),)
        ]

    def push(self, worker: int, *values: float | None) -> list[int]:
        return answered(self.all(self.gradient(worker, *values)))  # type: ignore[arg-type]

    def says(
        self, worker: int, sort: MessageKind, covered: int = 0, *, again: bool = False
    ) -> BestEffortMessage:
        self.requests[worker] += not again
        return BestEffortMessage(worker, sort, self.requests[worker], 0, covered)

    def meet(self, worker: int) -> list[int]:
        return answered(self.server.arrive(self.says(worker, MessageKind.BARRIER)))

    def all(self, messages: Iterable[BestEffortMessage]) -> list[BestEffortMessage]:
        return [out for message in messages for out in self.server.arrive(message)]

    @property
    def weight(self) -> float:
        return float(self.server.parameters["weight"].detach())

    @property
    def applied(self) -> float:
        """How many gradients."""
        assert self.server.parameters["bias"].item() == self.weight
        return -self.weight


def answered(messages: Iterable[BestEffortMessage]) -> list[int]:
    """Who is answered, with all pieces."""
    answered = [message.peer for message in messages if message.kind is MessageKind.RESULT]
    workers = sorted(set(answered))
    assert sorted(answered) == sorted(workers * PIECES)
    return workers


def head(messages: Iterable[BestEffortMessage], worker: int) -> list[int]:
    [first] = [
        message.array for message in messages if (message.peer, message.piece) == (worker, 0)
    ]
    assert first is not None
    return list(first.view(np.int64))


# What a step is


def test_every_gradient_is_a_step_with_its_share_of_the_learning_rate() -> None:
    setup = Setup(workers=2, staleness=9, lr=1.0)
    setup.push(0, 0.5)
    setup.push(1, 0.25)
    assert setup.weight == -0.5 * 0.75
    assert float(setup.model.weight.detach()) == 0.0  # the script's own is left alone
    assert setup.server.clocks == {0: 1, 1: 1}


def test_the_scripts_learning_rate_is_followed() -> None:
    setup = Setup(workers=1, staleness=9)
    setup.optimizer.param_groups[0]["lr"] = 0.125
    setup.push(0)
    assert setup.weight == -0.125


def test_who_took_no_part_has_no_gradient() -> None:
    """Momentum would move it otherwise."""
    setup = Setup(workers=1, staleness=9, momentum=0.9)
    setup.push(0, 1.0, 1.0)
    between = float(setup.server.parameters["bias"].detach())
    setup.push(0, 1.0, None)
    assert float(setup.server.parameters["bias"].detach()) == between


def test_one_worker_alone_trains_as_without() -> None:
    setup = Setup(workers=1, staleness=0, momentum=0.9)
    twin = deepcopy(setup.model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0, momentum=0.9)
    for step in range(5):
        for parameter in twin.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * step)
        optimizer.step()
        setup.push(0, 0.1 * step, 0.1 * step)
    for name, parameter in twin.named_parameters():
        assert torch.equal(setup.server.parameters[name], parameter)


# Who waits for whom


def test_nobody_gets_too_far_ahead() -> None:
    setup = Setup(workers=3, staleness=1)
    assert setup.push(0) == [0]  # a step ahead
    assert setup.push(0) == []  # two
    assert setup.push(1) == [1]
    assert setup.push(2) == [0, 2]
    assert setup.server.clocks == {0: 2, 1: 1, 2: 1}


def test_without_staleness_all_go_in_step() -> None:
    setup = Setup(workers=3, staleness=0)
    assert setup.push(0) == []
    assert setup.push(1) == []
    assert setup.push(2) == [0, 1, 2]


def test_nobody_waits_for_one_who_is_gone() -> None:
    setup = Setup(workers=3, staleness=0)
    setup.push(0)
    setup.push(1)
    assert answered(setup.server.remove_worker(2)) == [0, 1]
    assert setup.server.remove_worker(2) == []


def test_all_are_given_the_same_at_a_meeting() -> None:
    setup = Setup(workers=3, staleness=1)
    assert setup.push(0) == [0]
    assert setup.meet(0) == []
    assert setup.push(1) == [1]
    assert setup.push(2) == [2]
    assert setup.meet(1) == []
    assert setup.meet(2) == [0, 1, 2]
    assert setup.meet(0) == []  # another one


def test_who_is_at_a_meeting_holds_nobody_up() -> None:
    setup = Setup(workers=2, staleness=0)
    assert setup.meet(0) == []
    assert setup.push(1) == [0, 1]  # it has missed the meeting
    assert setup.push(0) == [0]


def test_a_meeting_goes_on_without_one_who_is_gone() -> None:
    setup = Setup(workers=3, staleness=1)
    setup.meet(0)
    setup.meet(1)
    assert answered(setup.server.remove_worker(2)) == [0, 1]


def test_nobody_goes_on_until_all_have_said_where_they_are() -> None:
    setup = Setup(workers=2, staleness=3)
    setup.server = setup.another(dict.fromkeys(range(2), UNKNOWN_CLOCK), {})
    assert answered(setup.server.arrive(setup.says(0, MessageKind.REQUEST, 7))) == [0]
    assert setup.push(0) == []
    assert answered(setup.server.arrive(setup.says(1, MessageKind.REQUEST, 6))) == [0, 1]
    assert setup.server.clocks == {0: 8, 1: 6}


# Each gradient once


def test_a_repetition_is_applied_once_and_answered_when_it_is_due() -> None:
    setup = Setup(workers=2, staleness=0)
    messages = setup.gradient(0)
    assert answered(setup.all(messages)) == []  # it is ahead of the other
    for _ in range(3):
        assert setup.all([*messages, setup.says(0, MessageKind.FOLLOW, again=True)]) == []
    assert setup.applied == 1
    assert setup.server.clocks == {0: 1, 1: 0}
    assert setup.push(1) == [0, 1]
    assert setup.all(messages) == []
    again = setup.server.arrive(setup.says(0, MessageKind.FOLLOW, again=True))
    assert answered(again) == [0]  # its answer was lost
    assert setup.applied == 2


def test_a_request_that_was_lost_in_part_is_sent_again() -> None:
    setup = Setup(workers=1, staleness=0)
    messages = setup.gradient(0)
    assert setup.server.arrive(messages[0]) == []
    assert setup.applied == 0
    [asked] = setup.server.arrive(setup.says(0, MessageKind.FOLLOW, again=True))
    assert (asked.kind, asked.step) == (MessageKind.REQUEST_PARTIAL, messages[0].step)
    assert answered(setup.all(messages)) == [0]
    assert setup.applied == 1


def test_a_backward_that_failed_is_never_applied() -> None:
    setup = Setup(workers=1, staleness=0)
    failed, whole = setup.gradient(0, 100.0, 100.0), setup.gradient(0)
    setup.server.arrive(failed[0])
    setup.server.arrive(whole[0])
    assert setup.server.arrive(failed[1]) == []  # late
    assert answered(setup.server.arrive(whole[1])) == [0]
    assert setup.applied == 1


def test_one_that_was_given_up_is_registered_by_its_next_request() -> None:
    setup = Setup(workers=2, staleness=1)
    setup.push(1)
    setup.server.remove_worker(1)
    for _ in range(6):
        assert setup.push(0) == [0]
    back = setup.all(setup.gradient(1))
    assert answered(back) == [1]
    assert head(back, 1) == [5, 0, 6, 1, 2]  # it leaves five steps out; who has how many applied
    assert setup.server.clocks == {0: 6, 1: 7}
    assert setup.applied == 8
    assert setup.push(1) == []  # the bound holds again
    assert setup.push(0) == [0, 1]


def test_one_that_is_held_back_and_given_up_comes_back_to_its_answer() -> None:
    setup = Setup(workers=2, staleness=0)
    messages = setup.gradient(1)
    assert setup.all(messages) == []
    assert setup.server.remove_worker(1) == []
    assert setup.push(0) == [0]
    assert answered(setup.all(messages)) == [1]
    assert setup.applied == 2
    assert setup.server.clocks == {0: 1, 1: 1}


def test_another_server_goes_on_from_what_was_applied() -> None:
    """Worker 0's gradient was applied but not answered, worker 1's was lost with its server."""
    setup = Setup(workers=2, staleness=2)
    setup.push(0)
    setup.push(1)
    with torch.no_grad():
        for name, parameter in setup.parameters.items():
            parameter.copy_(setup.server.parameters[name])
    setup.server = setup.another(dict.fromkeys(range(2), UNKNOWN_CLOCK), setup.server.applied)
    for worker in range(2):
        setup.server.arrive(setup.says(worker, MessageKind.REQUEST, 1))
    setup.all(setup.gradient(0, number=1))
    setup.all(setup.gradient(1, number=2))
    assert setup.applied == 3
    assert setup.server.clocks == {0: 2, 1: 2}
    assert setup.server.applied == {0: 1, 1: 2}


# Over a link on which messages are lost, doubled and late


class LossyNetwork:
    """A network that loses, doubles and delays messages to and from the server."""

    def __init__(self, server: ParameterServer, workers: int, seed: int) -> None:
        self._server = server
        self._random = Random(seed)
        self._up: SimpleQueue[BestEffortMessage | None] = SimpleQueue()
        self._down = {worker: SimpleQueue[BestEffortMessage]() for worker in range(workers)}
        self._late: list[BestEffortMessage] = []
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def of(self, worker: int) -> LossyLink:
        return LossyLink(worker, self._up, self._down[worker])

    def close(self) -> None:
        self._up.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (message := self._up.get()) is not None:
            for came in self._delivered(message):
                for out in self._server.arrive(came):
                    for sent in self._delivered(out):
                        self._down[sent.peer].put(sent)

    def _delivered(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """The messages that arrive now: this one, none, or earlier ones to the same side."""
        luck = self._random.random()
        if message.kind is MessageKind.LEAVE:
            return [message]
        if luck < 0.1:
            return []
        if luck < 0.2:
            return [message, message]
        if luck < 0.3:
            self._late.append(message)
            return []
        down = message.kind in (MessageKind.RESULT, MessageKind.REQUEST_PARTIAL)
        late = [
            one
            for one in self._late
            if (one.kind in (MessageKind.RESULT, MessageKind.REQUEST_PARTIAL)) == down
        ]
        self._late = [one for one in self._late if one not in late]
        return [message, *late]


class LossyLink:
    def __init__(
        self,
        worker: int,
        up: SimpleQueue[BestEffortMessage | None],
        down: SimpleQueue[BestEffortMessage],
    ):
        self._worker = worker
        self._up = up
        self._down = down

    def send(self, message: BestEffortMessage) -> bool:
        self._up.put(message._replace(peer=self._worker))
        return True

    def receive(self, seconds: float | None) -> list[BestEffortMessage]:
        try:
            return [self._down.get(timeout=0.002)]
        except Empty:
            return []


@pytest.mark.parametrize("seed", range(3))
def test_each_gradient_counts_once_whatever_becomes_of_the_messages(seed: int) -> None:
    workers, steps, staleness = 3, 12, 1
    setup = Setup(workers=workers, staleness=staleness)
    network = LossyNetwork(setup.server, workers, seed)
    seen: dict[int, list[float]] = {worker: [] for worker in range(workers)}

    def train(worker: int) -> None:
        layout, ledger = layout_of(setup.parameters, BUCKET), Ledger()
        requests = ServerClient(
            network.of(worker), 0, worker, layout, ledger, lambda: None, 60.0, patience=0.004
        )

        def fill(bucket: FlatBucket) -> None:
            for name, view in bucket.views.items():
                view.fill_(1.0)
                if name == PARTICIPATION_FLAGS:
                    view[-1] = 0.0  # all gradients are finite

        for step in range(1, steps + 1):
            requests.begin()
            for bucket in layout.buckets:
                fill(bucket)
                requests.send(bucket)
            requests.finish()
            values = {
                float(v)
                for b in layout.buckets
                for n, v in b.views.items()
                if n != PARTICIPATION_FLAGS
            }
            assert len(values) == 1  # of one answer, not of several
            assert -values.pop() == sum(ledger.applied.values())
            assert ledger.applied[worker] == step == ledger.own
            assert max(ledger.applied.values()) - min(ledger.applied.values()) <= staleness + 1
            seen[worker].append(sum(ledger.applied.values()))
        requests.leave()

    threads = [Thread(target=train, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    network.close()
    assert all(len(of_one) == steps and of_one == sorted(of_one) for of_one in seen.values())
    assert setup.applied == workers * steps
