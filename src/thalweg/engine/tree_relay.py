"""The communication thread of one rank of a coded tree, and how the rank joins the tree.

It runs the rank's node whatever the training thread does: a rank whose computation is slow or
paused still forwards answers to the root and results to the leaves. The training thread contributes
its part of a step and picks up the step's results; for a straggler they are kept.

If the parent is lost, results come from one of its siblings or the next ancestor that is connected
(`FOLLOW`), until the parent is back. If the root is lost, the run ends; if members may change, they
rendezvous and build another tree.

If more ranks straggle than the code tolerates, the root waits for one more. After a deadline, which
follows from the step times so far, it does what the plan says: it waits until the run's timeout,
raises an error, or uses the parts that have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic

from thalweg.codes import TREE_ROOT, Allocation
from thalweg.engine.arrivals import StepDeadlines
from thalweg.engine.tree_node import ElementType, Node, Piece, Results, pieces_of
from thalweg.errors import PeerLost, RunError, ThalwegError, TransportClosed, ranks_text
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.schedules import Schedule
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, BestEffortTransport, MessageKind

ROOT_RECONNECT_SECONDS = 2.0
STATE_REQUEST_RETRY_SECONDS = 1.0  # until another rank is asked for its state
STATE_REFUSED_RETRY_SECONDS = 0.02  # the same, after a refusal
STATE_REQUEST_BACK_OFF_FACTOR = 1.5  # growth of the wait: the state may be in flight
RELAY_ABORT_POLL_SECONDS = 0.5  # between two reads of the abort flag
RELAY_RENDEZVOUS_CHECK_SECONDS = 0.1  # the same, if members may change
PARTIAL_RESULT_GRACE_SECONDS = 0.25  # for partial sums to reach the root
CHILDREN_GRACE_SECONDS = 30.0  # a rank starts without children that need longer to connect
MIN_POST_QUEUE_COUNT = 64  # messages queued for one peer
FOLLOW = MessageKind.FOLLOW


class Relay:
    """The relay of one rank. `beyond` is the reaction to a step beyond its deadline: wait, raise or
    partial. The timeout of `world` limits every wait."""

    def __init__(
        self,
        world: World,
        abort_flag: AbortFlag,
        transport: BestEffortTransport,
        node: Node,
        allocation: Allocation,
        beyond: str,
    ) -> None:
        self.rank = node.rank
        self.timeout = world.timeout
        self.pieces = node.pieces
        self.spare = allocation.tree.codes[TREE_ROOT].stragglers  # tolerated by the root's code
        self.is_closed = False
        self._messages = transport
        self._node = node
        self._abort_flag = abort_flag
        self._membership = world.membership
        self._host = allocation.host
        self._sources = sources(allocation, self.rank)
        self._below = allocation.below[self.rank]
        self._all = allocation.ranks
        self._source = 0  # index of the source that results come from
        self._poll_seconds = (
            RELAY_ABORT_POLL_SECONDS if world.membership is None else RELAY_RENDEZVOUS_CHECK_SECONDS
        )
        self._deadlines = StepDeadlines()
        self.arrivals = self._deadlines.arrivals
        self._beyond = beyond
        self._partial_until: tuple[int, float] | None = None  # step and deadline
        self._work_items: SimpleQueue[Callable[[], list[BestEffortMessage]]] = SimpleQueue()
        self._changed = Condition()
        self._state_requests = StateRequests()
        self._broken: ThalwegError | None = None
        self._thread = Thread(target=self._work, name="thalweg-relay", daemon=True)
        self._thread.start()

    # For the training thread

    def contribute(self, step: int, round_number: int, vector: Array) -> None:
        """Contribute this rank's part of a round; the vector must not change from now on."""
        ready = monotonic()

        def contribute() -> list[BestEffortMessage]:
            self._deadlines.ready(step, round_number, ready)
            return self._node.contribute(step, round_number, vector)

        self._submit(contribute)

    def has(self, step: int) -> bool:
        """True if the step's results have arrived and are still kept."""
        with self._changed:
            return step in self._node.finished

    def result_expired(self, step: int) -> bool:
        """True if the step is over and its results are no longer kept."""
        with self._changed:
            return step < self._node.floor and step not in self._node.finished

    @property
    def newest(self) -> int:
        """The first step that isn't over, as far as this rank knows."""
        with self._changed:
            return self._node.floor

    def result(
        self, step: int, seconds: float | None = None, when_asked: Callable[[], None] | None = None
    ) -> Results | None:
        """Wait for the step's results. None after `seconds`, or if they have expired.
        `when_asked` is called meanwhile if a rank requests this rank's state."""
        asked = monotonic()

        def ask_again() -> None:
            """Request results again once they are overdue; earlier, all would arrive twice."""
            nonlocal asked
            with self._changed:
                due = asked + self._deadlines.deadline
            if monotonic() >= due:
                asked = monotonic()
                self.follow_from(step, another=True)

        while not self._wait(
            lambda: step < self._node.floor, seconds, ask_again, heeds=when_asked is not None
        ):
            if when_asked is None or not self.state_requested():
                if seconds is not None:
                    return None
                raise RunError(
                    f"rank {self.rank} timed out after {self.timeout:g} s waiting for the result "
                    f"of step {step}",
                    "look at the output of the other ranks, or allow more time with timeout=",
                )
            when_asked()
        with self._changed:
            return self._node.finished.get(step)

    def state_requested(self) -> bool:
        """True if a rank has requested this rank's state."""
        with self._changed:
            return bool(self._state_requests.requesters)

    def send_state(self, state: Array, *, from_now_on: bool = False) -> None:
        """Send this rank's state to all requesters, and to later ones too if `from_now_on`."""
        with self._changed:
            if from_now_on:
                self._state_requests.final_state = state
            messages = self._state_requests.answer(state)
        self._submit(lambda: messages)

    def request_state(self, suits: Callable[[Array], bool] = lambda state: True) -> Array:
        """Request the state of another rank, the parent's first, until one `suits`: some ranks may
        be behind themselves."""
        requests = self._state_requests
        deadline, wait = monotonic() + self.timeout, STATE_REQUEST_RETRY_SECONDS
        with self._changed:
            requests.pop_state()  # left from an earlier request
        for peer in self._donors():
            with self._changed:
                requests.start(peer)
            self._submit(partial(self._request_from, peer))
            if not self._wait(lambda: requests.refused or requests.received is not None, wait):
                wait *= STATE_REQUEST_BACK_OFF_FACTOR
            self._wait(lambda: requests.received is not None, STATE_REFUSED_RETRY_SECONDS)
            with self._changed:
                state = requests.pop_state()
            if state is not None and suits(state):
                with self._changed:
                    requests.asking = None
                return state
            if monotonic() >= deadline:
                break
        raise RunError(
            f"rank {self.rank} requested the state of the run, and no rank answered",
            "look at the output of the other ranks, or allow more time with timeout=",
        )

    def follow_from(self, step: int, *, another: bool = False) -> None:
        """Request the results from this step on once more, and answer once more, as messages may
        have been lost. `another` switches to another source: the current one may hang though its
        connection is up. Earlier results that still arrive are forwarded to the children."""

        def follow() -> list[BestEffortMessage]:
            again = self._node.answer_again(step)
            if not self._sources:
                return again
            left = self._move_on() if another else []
            return [*again, *left, *self._with_hello(self._sources[self._source], FOLLOW, step)]

        self._submit(follow)

    @property
    def is_overdue(self) -> bool:
        """True if the current step is beyond its deadline."""
        with self._changed:
            return (deadline := self._deadline()) is not None and monotonic() > deadline

    def present(self) -> list[int]:
        """The connected peers among this rank's source, children and followers."""
        with self._changed:
            source = self._sources[self._source : self._source + 1]
            neighbours = [*source, *self._below, *self._node.followers]
            return [peer for peer in neighbours if not self._messages.is_down(peer)]

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._messages.wake()
        self._thread.join(ROOT_RECONNECT_SECONDS)
        self._messages.close()

    def _submit(self, work: Callable[[], list[BestEffortMessage]]) -> None:
        """Run `work` in the communication thread, and send the messages that it returns."""
        if self.is_closed:
            raise TransportClosed(f"rank {self.rank} communicates after close()", "do so before it")
        self._work_items.put(work)
        self._messages.wake()

    def _wait(
        self,
        over: Callable[[], bool],
        seconds: float | None,
        on_poll: Callable[[], None] = lambda: None,
        *,
        heeds: bool = False,
    ) -> bool:
        """Wait until `over`. False after `seconds`, by default the timeout, or if a rank requests a
        state and this rank `heeds` requests. Raises the run's failure."""
        deadline = monotonic() + (self.timeout if seconds is None else seconds)

        def is_asked() -> bool:
            return heeds and bool(self._state_requests.requesters)

        while (left := deadline - monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(
                    lambda: over() or self._broken is not None or is_asked(),
                    min(left, self._poll_seconds),
                )
                if over():
                    return True
                if self._broken is not None:
                    raise self._broken
                if is_asked():
                    return False
            if self._membership is not None:
                self._membership.raise_if_rendezvous()
            abort = self._abort_flag.poll()
            if abort is not None:
                raise abort
            on_poll()
        return False

    # In the communication thread

    def _work(self) -> None:
        try:
            while not self.is_closed:
                messages = self._messages.receive(self._seconds_to_next_check())
                with self._changed:
                    floor = self._node.floor
                    out = []
                    while not self._work_items.empty():
                        out += self._work_items.get()()
                    for message in messages:
                        out += self._arrive(message)
                    out += self._check_source()
                    self._check_peers()
                    out += self._check_deadline()
                    for message in out:
                        self._messages.send(message)
                    if self._node.floor != floor:
                        last = self._node.floor - 1
                        hurried = self._partial_until is not None and self._partial_until[0] == last
                        self._deadlines.finish_step(last, monotonic(), usual=not hurried)
                        self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        left = []
        if message.kind in (MessageKind.REQUEST, MessageKind.STATE):
            self._changed.notify_all()
            return self._state_requests.arrive(message)
        if message.kind is MessageKind.HELLO:
            return []
        if message.kind is MessageKind.LEAVE:
            self._node.followers.discard(message.peer)
            return []
        if message.kind is not FOLLOW:
            self._deadlines.seen(message.step, monotonic(), message.peer)
            is_result = message.kind is MessageKind.RESULT
            if self._source and is_result and message.peer == self._sources[0]:
                left = [BestEffortMessage(self._sources[self._source], MessageKind.LEAVE, 0)]
                self._source = 0
        return [*left, *self._node.arrive(message)]

    def _check_source(self) -> list[BestEffortMessage]:
        """Follow the next connected source if the current one is lost. A rank that has finished
        only waits for its children, and the root may have ended."""
        finished = self._state_requests.final_state is not None
        if finished or not self._sources or not self._source_is_down():
            return []
        left = self._move_on()
        if not self._source_is_down():
            source, floor = self._sources[self._source], self._node.floor
            return [*left, *self._with_hello(source, FOLLOW, floor)]
        seconds = self._messages.seconds_down(self._host)
        if self._membership is None and seconds > ROOT_RECONNECT_SECONDS:
            raise PeerLost(
                f"the root of the coded tree, rank {self._host}, failed: no other rank can decode",
                "start the run again: it resumes from its last checkpoint",
            )
        return []

    def _source_is_down(self) -> bool:
        return self._messages.is_down(self._sources[self._source])

    def _check_deadline(self) -> list[BestEffortMessage]:
        """React to a step beyond its deadline as the plan says, at the root."""
        now, step = monotonic(), self._node.floor
        if self._partial_until is not None and self._partial_until[0] != step:
            self._partial_until = None
        if self._partial_until is not None:
            if now < self._partial_until[1]:
                return []
            self._partial_until = step, now + PARTIAL_RESULT_GRACE_SECONDS
            return self._node.finish_partial(step) or []
        deadline = self._deadline() if self.rank == self._host else None
        if deadline is None or now <= deadline or self._beyond == "wait":
            return []
        if self._beyond == "partial":
            self._partial_until = step, now + PARTIAL_RESULT_GRACE_SECONDS
            return self._node.request_partial(step)
        raise RunError(
            f"step {step} takes longer than {self._deadlines.deadline:.1f} s: the root waits for "
            f"{ranks_text(self._node.missing(step))}, more stragglers than the code tolerates",
            "tolerate more stragglers, or set beyond= to wait or partial",
        )

    def _deadline(self) -> float | None:
        """The time at which the current step is overdue; None before its first message."""
        began = self._deadlines.first_seen(self._node.floor)
        return None if began is None else began + self._deadlines.deadline

    def _seconds_to_next_check(self) -> float | None:
        """The longest wait for a message; None if only messages matter."""
        due = []
        if self._sources and self._source_is_down():
            due.append(monotonic() + RELAY_ABORT_POLL_SECONDS)
        if self._partial_until is not None:
            due.append(self._partial_until[1])
        elif self.rank == self._host and self._beyond != "wait":
            due += [deadline for deadline in [self._deadline()] if deadline is not None]
        return max(0.0, min(due) - monotonic()) + 0.001 if due else None

    def _move_on(self) -> list[BestEffortMessage]:
        """Switch to the next connected source, if there is one; messages to the previous one."""
        before = self._source
        for turn in range(1, len(self._sources)):
            index = (before + turn) % len(self._sources)
            if not self._messages.is_down(self._sources[index]):
                self._source = index
                leave = BestEffortMessage(self._sources[before], MessageKind.LEAVE, 0)
                return [leave] if before else []
        return []

    def _with_hello(self, peer: int, kind: MessageKind, step: int) -> list[BestEffortMessage]:
        """A message to a peer that may not know this rank's address, preceded by a greeting."""
        return [self._messages.hello(peer), BestEffortMessage(peer, kind, step)]

    def _request_from(self, peer: int) -> list[BestEffortMessage]:
        """A request for the peer's state, and refusals to the ranks that requested this one's."""
        request = self._with_hello(peer, MessageKind.REQUEST, 0)
        return [*request, *self._state_requests.answer(None)]

    def _donors(self) -> Iterator[int]:
        """The ranks to request a state from, without end: in each turn the nearest ones, then one
        of the others."""
        nearest = list(dict.fromkeys([*self._sources, *self._below]))
        others = [rank for rank in self._all if rank not in (self.rank, *nearest)]
        for other in cycle([[rank] for rank in others] or [[]]):
            yield from (*nearest, *other)

    def _check_peers(self) -> None:
        if self._membership is not None:
            known = (*self._sources, *self._below)
            down = (peer for peer in known if self._messages.is_down(peer))
            self._membership.note_broken_connections(*down)
        requests = self._state_requests
        peer = requests.asking
        if peer is not None and self._messages.is_down(peer) and not requests.refused:
            requests.refused = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Make waits raise this error. It ends the run for all ranks if it is the root's, or if
        more ranks have lost the root than the code tolerates stragglers."""
        kind = type(error).__name__
        meant = (
            error
            if isinstance(error, ThalwegError)
            else RunError(f"the relay of rank {self.rank} ended: {kind}: {error}", "report this")
        )
        if not self.is_closed and (
            self.rank == self._host
            or (
                isinstance(error, PeerLost)
                and self._abort_flag.count_report("no root") > self.spare
            )
        ):
            self._abort_flag.publish(meant.problem)
        with self._changed:
            self._broken = meant
            self._changed.notify_all()


def join_tree(
    world: World,
    abort_flag: AbortFlag,
    allocation: Allocation,
    schedules: Sequence[Schedule],
    element_types: Sequence[ElementType],
    *,
    beyond: str = "wait",
    make: Callable[[int, Sequence[Piece], Allocation], Node] = Node,
    first: int = 0,
) -> Relay:
    """Connect to parent and children, send them this rank's address in case it rejoins, and start
    with the step `first`. Children may connect later, or never."""
    pieces = pieces_of(schedules, element_types, world.rank)
    node = make(world.rank, pieces, allocation)
    node.skip_to(first)
    # The queue bridges a peer's absence.
    queue_length = max(MIN_POST_QUEUE_COUNT, (1 + node.kept) * len(pieces))
    transport = world.best_effort_transport(queue_length)
    try:
        above, below = sources(allocation, world.rank)[:1], allocation.below[world.rank]
        transport.wait_for_peers(above, monotonic() + world.timeout)
        with suppress(PeerLost):
            patience = min(world.timeout, CHILDREN_GRACE_SECONDS)
            transport.wait_for_peers(below, monotonic() + patience)
        for neighbour in (*above, *below):
            transport.send(transport.hello(neighbour))
    except BaseException:
        transport.close()
        raise
    return Relay(world, abort_flag, transport, node, allocation, beyond)


def sources(allocation: Allocation, rank: int) -> list[int]:
    """The ranks that results may come from: the parent, its siblings, and so on up to the root.
    Children of one parent begin with different siblings of it, which spreads the load."""
    tree, parents = allocation.tree, allocation.tree.parents
    ranks: list[int] = []
    node = rank
    while rank != allocation.host and node != TREE_ROOT:
        above = parents[node]
        if above == TREE_ROOT:
            ranks.append(allocation.host)
            break
        beside = [n for n in tree.children[parents[above]] if n != above]
        turn = tree.children[above].index(node) % max(1, len(beside))
        ranks += [above, *beside[turn:], *beside[:turn]]
        node = above
    return [peer for peer in dict.fromkeys(ranks) if peer != rank]


class StateRequests:
    """Requests for the state of the run that one rank receives and sends. A rank answers when its
    training thread provides its state; at once if that is final; and with an empty message if it
    requests a state itself, so that the other asks elsewhere. The caller holds the relay's lock."""

    def __init__(self) -> None:
        self.requesters: set[int] = set()
        self.final_state: Array | None = None  # this rank's, once it has finished
        self.asking: int | None = None  # the rank asked; meanwhile this rank can't help others
        self.refused = False  # the rank asked has no state either, or is gone
        self.received: Array | None = None

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """Handle a request or an answer; the messages to send."""
        if message.kind is MessageKind.REQUEST:
            if self.final_state is not None or self.asking is not None:
                return [
                    BestEffortMessage(message.peer, MessageKind.STATE, 0, array=self.final_state)
                ]
            self.requesters.add(message.peer)
        elif message.array is not None:
            self.received = message.array
        elif message.peer == self.asking:
            self.refused = True
        return []

    def answer(self, state: Array | None) -> list[BestEffortMessage]:
        """The answers to all requests so far; None refuses them."""
        requesters, self.requesters = sorted(self.requesters), set()
        return [BestEffortMessage(peer, MessageKind.STATE, 0, array=state) for peer in requesters]

    def start(self, peer: int) -> None:
        """Begin a request to this peer."""
        self.asking, self.refused = peer, False

    def pop_state(self) -> Array | None:
        """The state that was received, once."""
        state, self.received = self.received, None
        return state
