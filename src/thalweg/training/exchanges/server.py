"""The plan `asp`: every worker steps at its own pace.

At the end of backward a worker sends its gradients to the root, which takes a step with them
(`parameter_server.py`) and answers with the parameters. The script's own optimizer finds no
gradients, and so does nothing; after its step the new parameters are put in place.

    worker    backward ── gradients ──> root: takes a step
              parameters in place <── parameters at that time

The root is a worker too: the server has a thread of its own there. After a rendezvous the rank with
the newest parameters is the root: the one before, if it is left. A gradient without an answer by
then is sent again, and applied if it was not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Protocol

import numpy as np
import torch
from torch import nn

from thalweg.errors import PeerLost, RunError
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.exchanges.parameter_server import UNKNOWN_CLOCK, ParameterServer
from thalweg.training.plan_context import Ledger, PlanContext
from thalweg.training.snapshot import Snapshot
from thalweg.training.sources.gradients import layout_of
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, BestEffortTransport, MessageKind

SERVER_ABORT_POLL_SECONDS = 0.1
# An answer is requested again after this time, or a multiple of the longest transfer of an answer.
MIN_ANSWER_TIMEOUT_SECONDS, ANSWER_TRANSFER_FACTOR = 2.0, 4.0
CLIENT_SILENCE_SECONDS = 1.0  # since the last message of a suspected worker
CLIENTS_LEFT_POLL_SECONDS = 0.01
log = logging.getLogger("thalweg")


class ServerLink(Protocol):
    """The connection to the server, on which messages may be lost."""

    def send(self, message: BestEffortMessage) -> bool: ...

    def receive(self, seconds: float | None) -> list[BestEffortMessage]: ...


class ServerExchange(Exchange):
    """The exchange of gradients for parameters with the server on one rank, the root. This rank has
    taken the clock's steps, and so have the others, unless they come from a rendezvous."""

    returns_gradients = waits_for_all = False

    def __init__(
        self,
        context: PlanContext,
        plan: Plan,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        steps, ledger, abort_flag = context.clock.step, context.ledger, context.abort_flag
        world = context.world.namespace(f"server/{max(steps, context.first_step)}")
        after_rendezvous = context.root is not None
        root = context.checkpoint_writer(plan)
        self._layout = layout
        self._parameters = parameters
        self._optimizer = optimizer
        stepped = {id(p) for settings in optimizer.param_groups for p in settings["params"]}
        self._served = {name for name, p in parameters.items() if id(p) in stepped}
        self._ledger = ledger
        self._answered = self._closed = False
        self._world, self._abort_flag, self._root = world, abort_flag, root
        self._messages = world.best_effort_transport(4 * (1 + len(layout.buckets)))
        self._server: ServerThread | None = None
        if world.rank == root:
            assert plan.cadence.staleness is not None
            buffers = layout_of(parameters, plan.settings.bucket)
            clocks = dict.fromkeys(world.members, UNKNOWN_CLOCK if after_rendezvous else steps)
            server = ParameterServer(
                parameters, optimizer, buffers, clocks, plan.cadence.staleness, ledger.applied
            )
            self._server = ServerThread(server, self._messages, abort_flag, world)
        self._client = ServerClient(
            self._server or self._messages,
            root,
            world.rank,
            layout,
            ledger,
            self._raise_if_aborted,
            world.timeout,
        )
        try:
            self._find_root()
            if after_rendezvous:
                self._client.request(MessageKind.REQUEST, steps)
                self._load_parameters()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        self._client.begin()

    def repeat(self) -> None:
        self._ledger.own -= 1  # the same gradient is sent again

    def send(self, bucket: FlatBucket, *, is_finite: bool) -> None:
        self._client.send(bucket)

    def finish(self) -> None:
        self._client.finish()
        self._answered = True

    def apply(self) -> None:
        """Put the server's parameters in place; the script's optimizer had no gradients."""
        if self._answered:
            self._load_parameters()
            self._answered = False

    def make_equal(self) -> None:
        """Wait at a barrier: all workers have the same parameters then, and the root has the
        optimizer's state."""
        self._client.request(MessageKind.BARRIER)
        self._load_parameters()
        if self._server is not None:
            self._load_optimizer(self._server.server.optimizer_state)

    def take_skipped_steps(self) -> int:
        behind, self._client.behind = self._client.behind, 0
        return behind

    def needs(self, rank: int, absent: Mapping[int, float]) -> bool:
        return rank == self._root

    def leave(self, seconds: float, last: Callable[[], Snapshot | None]) -> bool:
        """Leave the server; the root waits for the other workers, and returns False if they
        stay."""
        if self._closed:
            return True
        self._client.leave()
        left = self._server is None or self._server.is_left(monotonic() + seconds)
        self._disconnect()
        return left

    @torch.no_grad()
    def close(self) -> None:
        """Close the connections; the root keeps the newest parameters, with the optimizer's
        state."""
        left = self._closed
        self._disconnect()
        if self._server is not None and not left:
            server = self._server.server
            for name, parameter in server.parameters.items():
                self._parameters[name].copy_(parameter)
            self._ledger.applied = dict(server.applied)
            self._load_optimizer(server.optimizer.state_dict()["state"])

    def _disconnect(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._messages.close()

    @torch.no_grad()
    def _load_parameters(self) -> None:
        for bucket in self._layout.buckets:
            for name, view in bucket.views.items():
                if name in self._served:
                    self._parameters[name].copy_(view)

    def _load_optimizer(self, state: dict[str, object]) -> None:
        own = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**own, "state": state})

    def _find_root(self) -> None:
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
        """Raise an error, while this rank waits, if there is a reason to stop."""
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


class ServerClient:
    """The requests of one worker to the server. Each request has a number and one answer. An
    overdue answer is requested again, ever less often; the gradient itself is repeated only if it
    was lost."""

    def __init__(
        self,
        link: ServerLink,
        root: int,
        rank: int,
        layout: Layout,
        ledger: Ledger,
        raise_if_aborted: Callable[[], None],
        timeout: float,
        patience: float = MIN_ANSWER_TIMEOUT_SECONDS,
    ) -> None:
        self.behind = 0
        self._link = link
        self._root = root
        self._rank = rank
        self._layout = layout
        self._ledger = ledger
        self._raise_if_aborted = raise_if_aborted
        self._timeout = timeout
        self._patience = patience
        self._number = 0
        self._sent: list[BestEffortMessage] = []

    def begin(self) -> None:
        self._number += 1
        self._ledger.own += 1
        self._sent = []

    def send(self, bucket: FlatBucket) -> None:
        gradient = bucket.vector.copy()
        self._send_request(MessageKind.ANSWER, bucket.index, self._ledger.own, gradient)

    def finish(self) -> None:
        """Wait for the parameters, and put them into the buckets."""
        pieces: dict[int, Array] = {}
        serial, first, patience = -1, 0.0, self._patience
        last = asked = monotonic()
        while len(pieces) <= len(self._layout.buckets):
            messages = self._link.receive(SERVER_ABORT_POLL_SECONDS)
            for message in messages:
                if message.step != self._number:
                    continue
                if message.kind is MessageKind.REQUEST_PARTIAL:
                    for sent in self._sent:
                        self._link.send(sent)
                elif message.covered >= serial and message.array is not None:
                    last = asked = monotonic()
                    if message.covered > serial:  # only the last of several answers counts
                        serial, first, pieces = message.covered, last, {}
                    pieces[message.piece] = message.array
            if not messages:
                self._raise_if_aborted()
            if monotonic() >= asked + patience:
                self._link.send(BestEffortMessage(self._root, MessageKind.FOLLOW, self._number))
                asked, patience = monotonic(), 2 * patience
            if monotonic() >= last + self._timeout:
                raise RunError(
                    f"rank {self._rank} timed out waiting for the parameters ({self._timeout:g} s)",
                    f"look at the output of rank {self._root}, or allow more time with timeout=",
                )
        self._patience = max(self._patience, ANSWER_TRANSFER_FACTOR * (last - first))
        self._receive_answer([pieces[piece] for piece in sorted(pieces)])

    def request(self, kind: MessageKind, steps: int = 0) -> None:
        """Send a request without gradients, and wait for the parameters."""
        self._number += 1
        self._sent = []
        self._send_request(kind, 0, steps)
        self.finish()

    def leave(self) -> None:
        self._link.send(BestEffortMessage(self._root, MessageKind.LEAVE, 0))

    def _send_request(
        self, kind: MessageKind, piece: int, covered: int, array: Array | None = None
    ) -> None:
        message = BestEffortMessage(self._root, kind, self._number, piece, covered, array)
        self._sent.append(message)
        self._link.send(message)

    def _receive_answer(self, arrays: list[Array]) -> None:
        behind, *applied = arrays[0].view(np.int64).tolist()
        self.behind += behind
        self._ledger.applied = dict(zip(applied[::2], applied[1::2], strict=True))
        self._ledger.own = max(self._ledger.own, self._ledger.applied.get(self._rank, 0))
        for bucket, array in zip(self._layout.buckets, arrays[1:], strict=True):
            bucket.load(array)


class ServerThread:
    """The server's thread on the root, and the link of the root's own worker to it."""

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
        self._last_received: dict[int, float] = {}  # the time of each worker's last message
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
        """Wait until all workers have left; False after the deadline."""
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
                        log.warning("rank %d failed; its part of the data is lost", rank)
                        self._deliver(self.server.remove_worker(rank))
        except BaseException as error:
            self._abort_flag.publish(f"the server of asp failed: {type(error).__name__}: {error}")
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
