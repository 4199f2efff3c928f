"""The plan `asp`: everybody goes at its own pace.

At the end of backward a worker sends its gradients to the root, which takes a step with them
(`parameter_server.py`), and is answered with the parameters. The script's own optimizer finds no
gradients, and so does nothing; when it has "stepped", the new parameters are put in place.

    worker    backward ── gradients ──> root: takes a step
              parameters in place <── parameters as they are then

The root is a worker too: the server has a thread of its own there. When the members of the run meet
anew, whoever has the newest parameters is the root from then on: the one before, if it is left. A
gradient whose answer has not come by then is sent again, and applied if it was not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Protocol

import numpy as np
import torch
from torch import nn

from thalweg.errors import PeerLost, RunError
from thalweg.facts import Size
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.exchanges.rounds import Fill, StatelessExchange
from thalweg.training.exchanges.server_state import UNKNOWN_CLOCK, ParameterServer
from thalweg.training.sources.gradients import GradientSynchronizer, layout_of
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, BestEffortTransport, MessageKind

SERVER_ABORT_POLL_SECONDS = 0.1  # seconds of waiting after which the alarm is listened to
MIN_ANSWER_TIMEOUT_SECONDS = 2.0  # seconds without an answer after which it is asked for, at least
# ... and so many times what the longest answer took from its first byte on.
ANSWER_TRANSFER_FACTOR = 4.0
# Seconds since the last letter of one that gives no sign of life either.
CLIENT_SILENCE_SECONDS = 1.0
CLIENTS_LEFT_POLL_SECONDS = 0.01  # seconds between two looks at who is through
log = logging.getLogger("thalweg")


@dataclass(slots=True)
class Ledger:
    """Which gradients are in this rank's parameters: of each worker all up to a number. `own` is
    the number of its own last one, which may be on its way."""

    applied: dict[int, int] = field(default_factory=dict)
    own: int = 0

    @property
    def version(self) -> int:
        """The higher, the newer are the parameters."""
        return sum(self.applied.values())


class ServerLink(Protocol):
    """The way to the server and back; letters may be lost."""

    def send(self, message: BestEffortMessage) -> bool: ...

    def receive(self, seconds: float | None) -> list[BestEffortMessage]: ...


class AsynchronousSynchronizer(GradientSynchronizer):
    """`root` is the rank that has the server; this one has taken so many `steps`, and so have the
    others, unless they have met `anew`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        world: World,
        abort_flag: AbortFlag,
        *,
        root: int,
        staleness: int,
        bucket: Size,
        steps: int,
        anew: bool,
        ledger: Ledger,
        broken_off: Callable[[], None] = lambda: None,
    ) -> None:
        layout = layout_of(parameters, bucket)
        self._optimizer = optimizer
        held = {id(p) for settings in optimizer.param_groups for p in settings["params"]}
        self._served = {name for name, p in parameters.items() if id(p) in held}
        self._ledger = ledger
        self._answered = self._closed = False
        self._world, self._abort_flag, self._root = world, abort_flag, root
        self._messages = world.best_effort_transport(4 * (1 + len(layout.buckets)))
        self._server: ServerThread | None = None
        if world.rank == root:
            buffers = layout_of(parameters, bucket)
            clocks = dict.fromkeys(world.members, UNKNOWN_CLOCK if anew else steps)
            server = ParameterServer(
                parameters, optimizer, buffers, clocks, staleness, ledger.applied
            )
            self._server = ServerThread(server, self._messages, abort_flag, world)
        self._requests = ServerExchange(
            self._server or self._messages,
            root,
            world.rank,
            layout,
            ledger,
            self._raise_if_aborted,
            world.timeout,
        )
        super().__init__(parameters, layout, self._requests, broken_off)
        try:
            self._find_the_root()
            if anew:
                self._requests.request(MessageKind.REQUEST, steps)
                self._put_in_place()
        except BaseException:
            self.abort()
            raise

    @property
    def behind(self) -> int:
        """Steps that this worker is to leave out: the others did without it meanwhile."""
        behind, self._requests.behind = self._requests.behind, 0
        return behind

    def after_step(self) -> None:
        """The script's optimizer had nothing to do; here is what the server made of it."""
        if self._answered:
            self._put_in_place()
            self._answered = False

    def wait_and_apply(self) -> None:
        """Meet all others: everybody has the same parameters then, and the root the optimizer's
        state."""
        self._requests.request(MessageKind.BARRIER)
        self._put_in_place()
        if self._server is not None:
            self._load(self._server.server.optimizer_state)

    def repeat(self) -> None:
        self._ledger.own -= 1  # it is the same gradient
        super().repeat()

    def leave(self, seconds: float) -> bool:
        """Leave; the root waits for the others to do so, and says whether they did."""
        if self._closed:
            return True
        self._requests.leave()
        left = self._server is None or self._server.is_left(monotonic() + seconds)
        self._close()
        return left

    @torch.no_grad()
    def abort(self) -> None:
        """The root has the newest parameters of all, with the optimizer's state."""
        super().abort()
        self._close()
        if self._server is not None:
            server = self._server.server
            for name, parameter in server.parameters.items():
                self._parameters[name].copy_(parameter)
            self._ledger.applied = dict(server.applied)
            self._load(server.optimizer.state_dict()["state"])

    def _load(self, slots: dict[str, object]) -> None:
        own = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**own, "state": slots})

    def _close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._messages.close()

    def _commit(self) -> None:
        self.is_good = not self.bad
        self._answered = True
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _put_in_place(self) -> None:
        for bucket in self._layout.buckets:
            for name, view in bucket.views.items():
                if name in self._served:
                    self._parameters[name].copy_(view)

    def _find_the_root(self) -> None:
        deadline = monotonic() + self._world.timeout
        while self._server is None:
            with suppress(PeerLost):
                self._messages.wait_for_peers(
                    [self._root], min(deadline, monotonic() + SERVER_ABORT_POLL_SECONDS)
                )
                return
            if monotonic() >= deadline:
                self._messages.wait_for_peers([self._root], deadline)
            self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        """Now and then while this rank waits: raises what is reason to stop."""
        if self._server is not None and self._server.broken is not None:
            raise self._server.broken
        membership = self._world.membership
        if membership is not None:
            if self._messages.is_down(self._root):
                membership.note_broken_connections(self._root)
            membership.raise_if_rendezvous()
        abort = self._abort_flag.poll()
        if abort is not None:
            raise abort


class ServerExchange(StatelessExchange):
    """The carrier of gradients to the server. Each request has a number, and one answer. One that
    is overdue is asked for, ever less often; the request itself goes again only if it was lost."""

    def __init__(
        self,
        letters: ServerLink,
        root: int,
        rank: int,
        layout: Layout,
        ledger: Ledger,
        look: Callable[[], None],
        timeout: float,
        patience: float = MIN_ANSWER_TIMEOUT_SECONDS,
    ) -> None:
        self.behind = 0
        self._link = letters
        self._root = root
        self._rank = rank
        self._layout = layout
        self._ledger = ledger
        self._raise_if_aborted = look
        self._timeout = timeout
        self._patience = patience
        self._number = 0
        self._said: list[BestEffortMessage] = []

    def begin(self) -> None:
        self._number += 1
        self._ledger.own += 1
        self._said = []

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        fill(1.0)
        gradient = bucket.vector.copy()
        self._send_request(MessageKind.ANSWER, bucket.index, self._ledger.own, gradient)

    def finish(self) -> None:
        """Wait for the parameters, and put them into the buckets."""
        came: dict[int, Array] = {}
        serial, first, patience = -1, 0.0, self._patience
        last = asked = monotonic()
        while len(came) <= len(self._layout.buckets):
            messages = self._link.receive(SERVER_ABORT_POLL_SECONDS)
            for message in messages:
                if message.step != self._number:
                    continue
                if message.kind is MessageKind.REQUEST_PARTIAL:
                    for said in self._said:
                        self._link.send(said)
                elif message.covered >= serial and message.array is not None:
                    last = asked = monotonic()
                    if message.covered > serial:  # of several answers the last, and all of that
                        serial, first, came = message.covered, last, {}
                    came[message.piece] = message.array
            if not messages:
                self._raise_if_aborted()
            if monotonic() >= asked + patience:
                self._link.send(BestEffortMessage(self._root, MessageKind.FOLLOW, self._number))
                asked, patience = monotonic(), 2 * patience
            if monotonic() >= last + self._timeout:
                raise RunError(
                    f"rank {self._rank} waited {self._timeout:g} s for the parameters",
                    "look at what the others do, or allow more time with timeout=",
                )
        self._patience = max(self._patience, ANSWER_TRANSFER_FACTOR * (last - first))
        self._receive_answer([came[piece] for piece in sorted(came)])

    def request(self, sort: MessageKind, steps: int = 0) -> None:
        """The same without gradients."""
        self._number += 1
        self._said = []
        self._send_request(sort, 0, steps)
        self.finish()

    def leave(self) -> None:
        self._link.send(BestEffortMessage(self._root, MessageKind.LEAVE, 0))

    def release(self) -> None:
        self._said = []

    def drop(self) -> None:
        """What travels is a copy; what the server has of it waits for the rest, in vain."""

    def _send_request(
        self, sort: MessageKind, piece: int, covered: int, array: Array | None = None
    ) -> None:
        message = BestEffortMessage(self._root, sort, self._number, piece, covered, array)
        self._said.append(message)
        self._link.send(message)

    def _receive_answer(self, arrays: list[Array]) -> None:
        behind, *applied = arrays[0].view(np.int64).tolist()
        self.behind += behind
        self._ledger.applied = dict(zip(applied[::2], applied[1::2], strict=True))
        self._ledger.own = max(self._ledger.own, self._ledger.applied.get(self._rank, 0))
        for bucket, array in zip(self._layout.buckets, arrays[1:], strict=True):
            bucket.load(array)


class ServerThread:
    """The server at work. To the root's own worker it is the way to the server."""

    def __init__(
        self,
        server: ParameterServer,
        transport: BestEffortTransport,
        abort_flag: AbortFlag,
        world: World,
    ) -> None:
        self.server = server
        self.broken: BaseException | None = None
        self._messages = transport
        self._abort_flag = abort_flag
        self._rank = world.rank
        self._membership = world.membership
        self._in: SimpleQueue[BestEffortMessage] = SimpleQueue()
        self._out: SimpleQueue[BestEffortMessage] = SimpleQueue()
        self._last_received: dict[int, float] = {}  # when each worker's last letter came
        self._closed = False
        self._thread = Thread(target=self._work, name="thalweg-server", daemon=True)
        self._thread.start()

    def send(self, message: BestEffortMessage) -> bool:
        self._in.put(message)
        self._messages.wake()
        return True

    def receive(self, seconds: float | None) -> list[BestEffortMessage]:
        with suppress(Empty):
            return [self._out.get(timeout=seconds)]
        return []

    def is_left(self, deadline: float) -> bool:
        """Wait until all workers have left; whether they have."""
        while self.server.clocks and self.broken is None and monotonic() < deadline:
            sleep(CLIENTS_LEFT_POLL_SECONDS)
        return not self.server.clocks or self.broken is not None

    def close(self) -> None:
        self._closed = True
        self._messages.wake()
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closed:
                messages = self._messages.receive(SERVER_ABORT_POLL_SECONDS)
                with suppress(Empty):
                    while True:
                        messages.append(self._in.get_nowait())
                for message in messages:
                    self._last_received[message.peer] = monotonic()
                    self._deliver(self.server.arrive(message))
                for rank in list(self.server.clocks):
                    if self._is_gone(rank):
                        log.warning("rank %d is gone, and its share of the data", rank)
                        self._deliver(self.server.remove_worker(rank))
        except BaseException as error:
            self._abort_flag.raise_flag(f"the server of asp ended: {type(error).__name__}: {error}")
            self.broken = error

    def _is_gone(self, rank: int) -> bool:
        if self._membership is None:
            return False
        if self._messages.is_down(rank):
            self._membership.note_broken_connections(rank)
        silent = monotonic() - self._last_received.get(rank, 0.0) > CLIENT_SILENCE_SECONDS
        return silent and rank in self._membership.suspected

    def _deliver(self, messages: list[BestEffortMessage]) -> None:
        for message in messages:
            if message.peer == self._rank:
                self._out.put(message)
            else:
                self._messages.send(message)
