"""The communication thread of one rank of a coded tree.

It keeps its node of the tree going whatever the training thread does: a host that is late, or
paused in its own computation, still passes answers up and results down. The training thread hands
in its own part of a step and picks up the step's results; if it comes late, they are waiting for
it.

Who is above may go away. Then the results come from one beside it, or the next one further up that
is still there (`FOLLOW`), until the parent is back. If the root itself is gone, the run is over; or
its members meet to plant another tree, where they may change.

If too many are late for the code, the root waits for one more. After a deadline, which follows from
how long steps have taken so far, it does what the plan says: it goes on waiting until the run's own
timeout, or gives up, or takes what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from time import monotonic

from thalweg.codes import TREE_ROOT, Allocation
from thalweg.engine.arrivals import Arrivals
from thalweg.engine.state_requests import StateRequests
from thalweg.engine.step_deadlines import StepDeadlines
from thalweg.engine.tree_node import Node, Results
from thalweg.errors import PeerLost, RunError, ThalwegError, TransportClosed, ranks_text
from thalweg.members.abort import AbortFlag
from thalweg.members.membership import Membership
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, BestEffortTransport, MessageKind

ROOT_RECONNECT_SECONDS = 2.0  # seconds for a root to come back
STATE_REQUEST_RETRY_SECONDS = 1.0  # seconds until somebody else is asked for a state
STATE_REFUSED_RETRY_SECONDS = 0.02  # the same, if who was asked needs one itself
STATE_REQUEST_BACK_OFF_FACTOR = 1.5  # times as long, each time: the state may be on its way
RELAY_ABORT_POLL_SECONDS = 0.5  # seconds of waiting after which the alarm is listened to
RELAY_RENDEZVOUS_CHECK_SECONDS = 0.1  # the same, where members may be called to meet
# Seconds for what is there to reach the root, once it is in a hurry.
PARTIAL_RESULT_GRACE_SECONDS = 0.25


class Relay:
    """`beyond` is what to do if a step takes longer than its deadline: wait, raise or partial.
    `timeout` is how many seconds anything may take at all."""

    def __init__(
        self,
        transport: BestEffortTransport,
        node: Node,
        allocation: Allocation,
        abort_flag: AbortFlag,
        *,
        timeout: float,
        beyond: str = "wait",
        membership: Membership | None = None,
    ) -> None:
        self.rank = node.rank
        self.timeout = timeout
        self._messages = transport
        self._node = node
        self._abort_flag = abort_flag
        self._membership = membership
        self._host = allocation.host
        self._sources = sources(allocation, self.rank)
        self._below = allocation.below[self.rank]
        self._all = allocation.ranks
        self.spare = allocation.tree.codes[TREE_ROOT].stragglers  # that it can do without
        self._source = 0  # which of them results come from
        self._check_seconds = (
            RELAY_ABORT_POLL_SECONDS if membership is None else RELAY_RENDEZVOUS_CHECK_SECONDS
        )
        self._deadlines = StepDeadlines()
        self._beyond = beyond
        self._partial_until: tuple[int, float] | None = None  # step, and until when
        self._own: SimpleQueue[Callable[[], list[BestEffortMessage]]] = SimpleQueue()
        self._changed = Condition()
        self._state_requests = StateRequests()
        self._broken: ThalwegError | None = None
        self._closed = False
        self.pieces = node.pieces
        self._thread = Thread(target=self._work, name="thalweg-relay", daemon=True)
        self._thread.start()

    # For the training thread

    def contribute(self, step: int, round_number: int, vector: Array) -> None:
        """This rank's own part of a round; the vector is left alone from now on."""
        ready = monotonic()

        def contribute() -> list[BestEffortMessage]:
            self._deadlines.ready(step, round_number, ready)
            return self._node.contribute(step, round_number, vector)

        self._do(contribute)

    @property
    def arrivals(self) -> Arrivals:
        return self._deadlines.arrivals

    def has(self, step: int) -> bool:
        """Whether the step's results are here."""
        with self._changed:
            return step in self._node.finished

    def result_expired(self, step: int) -> bool:
        """Whether the step is over, and its results aren't here any more."""
        with self._changed:
            return step < self._node.floor and step not in self._node.finished

    @property
    def newest(self) -> int:
        """The first step that isn't over, as far as it is known here."""
        with self._changed:
            return self._node.floor

    def result(
        self, step: int, seconds: float | None = None, when_asked: Callable[[], None] | None = None
    ) -> Results | None:
        """Wait for the step's results. None if `seconds` are over first, or if it was missed.
        `when_asked` is called meanwhile if somebody wants this rank's state."""
        what = f"the result of step {step}"
        asked = monotonic()

        def ask_again() -> None:
            """Not before it is overdue: it may be on its way, and everything would come twice."""
            nonlocal asked
            with self._changed:
                due = asked + self._deadlines.deadline
            if monotonic() >= due:
                asked = monotonic()
                self.follow_from(step, another=True)

        def is_over() -> bool:
            return step < self._node.floor

        while not self._wait(is_over, seconds, what, ask_again, heeds=when_asked is not None):
            if when_asked is None or not self.state_requested():
                return None
            when_asked()
        with self._changed:
            return self._node.finished.get(step)

    def state_requested(self) -> bool:
        """Whether somebody wants this rank's state."""
        with self._changed:
            return bool(self._state_requests.requesters)

    def send_state(self, state: Array, *, from_now_on: bool = False) -> None:
        """To all who have asked, or also to those who will."""
        with self._changed:
            messages = self._state_requests.send_state(state, from_now_on=from_now_on)
        self._do(lambda: messages)

    def request_state(self, suits: Callable[[Array], bool] = lambda state: True) -> Array:
        """Another rank's, the parent's or that of whoever else answers, if it suits: some may be
        behind themselves."""
        requests = self._state_requests
        deadline, patience = monotonic() + self.timeout, STATE_REQUEST_RETRY_SECONDS
        with self._changed:
            requests.pop_state()  # what came too late the last time
        for peer in self._who_could_help():
            with self._changed:
                requests.start(peer)
            self._do(partial(self._ask, peer))
            if not self._wait(lambda: requests.refused or requests.has_arrived, patience):
                patience *= STATE_REQUEST_BACK_OFF_FACTOR
            self._wait(lambda: requests.has_arrived, STATE_REFUSED_RETRY_SECONDS)
            with self._changed:
                state = requests.pop_state()
            if state is not None and suits(state):
                with self._changed:
                    requests.finish()
                return state
            if monotonic() >= deadline:
                break
        raise RunError(
            f"rank {self.rank} asked the others for the state of the run, and nobody answered",
            "look at what they do, or allow more time with timeout=",
        )

    def follow_from(self, step: int, *, another: bool = False) -> None:
        """Ask for the results from this step on once more, and answer once more: some letters may
        have been lost on the way. From `another` source than so far, which may be silent though
        its connection stands. Earlier results that still come are passed on to those below."""

        def follow() -> list[BestEffortMessage]:
            again = self._node.answer_again(step)
            if not self._sources:
                return again
            left = self._move_on() if another else []
            message = BestEffortMessage(self._sources[self._source], MessageKind.FOLLOW, step)
            return [*again, *left, *self._speaking_up(message)]

        self._do(follow)

    @property
    def is_overdue(self) -> bool:
        """Whether a step takes longer than steps do."""
        with self._changed:
            began = self._deadlines.first_seen(self._node.floor)
            return began is not None and monotonic() > began + self._deadlines.deadline

    def present(self) -> list[int]:
        """The neighbours that aren't gone: who has this rank's results, and who gives it its."""
        with self._changed:
            source = self._sources[self._source : self._source + 1]
            neighbours = [*source, *self._below, *self._node.followers]
            return [peer for peer in neighbours if not self._messages.is_down(peer)]

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._messages.wake()
        self._thread.join(ROOT_RECONNECT_SECONDS)
        self._messages.close()

    def _do(self, work: Callable[[], list[BestEffortMessage]]) -> None:
        """In the communication thread."""
        if self._closed:
            raise TransportClosed(f"rank {self.rank} communicates after close()", "do so before it")
        self._own.put(work)
        self._messages.wake()

    def _wait(
        self,
        over: Callable[[], bool],
        seconds: float | None,
        what: str = "",
        now_and_then: Callable[[], None] = lambda: None,
        *,
        heeds: bool = False,
    ) -> bool:
        """Until this is so; False if the seconds, where they are given, are over first, or if
        somebody asks for a state and this rank `heeds` it. RunError after the timeout, and whatever
        broke the run."""
        deadline = monotonic() + (self.timeout if seconds is None else seconds)
        while monotonic() < deadline:
            with self._changed:
                listened = min(deadline, monotonic() + self._check_seconds)
                while not over():
                    if self._broken is not None:
                        raise self._broken
                    if heeds and self._state_requests.requesters:
                        return False
                    left = listened - monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                else:
                    return True
            if self._membership is not None:
                self._membership.raise_if_rendezvous()
            abort = self._abort_flag.poll()
            if abort is not None:
                raise abort
            now_and_then()
        if seconds is None:
            raise RunError(
                f"rank {self.rank} waited {self.timeout:g} s for {what}",
                "look at what the others print, or allow more time with timeout=",
            )
        return False

    # In the communication thread

    def _work(self) -> None:
        try:
            while not self._closed:
                messages = self._messages.receive(self._until_something_is_due())
                with self._changed:
                    floor = self._node.floor
                    out = self._own_messages()
                    for message in messages:
                        out += self._arrive(message)
                    out += self._look_after_the_source()
                    self._check_peers()
                    out += self._keep_the_deadline()
                    for message in out:
                        self._messages.send(message)
                    if self._node.floor != floor:
                        last = self._node.floor - 1
                        hurried = self._partial_until is not None and self._partial_until[0] == last
                        self._deadlines.finish_step(last, monotonic(), usual=not hurried)
                        self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _own_messages(self) -> list[BestEffortMessage]:
        out = []
        with suppress(Empty):
            while True:
                out += self._own.get_nowait()()
        return out

    def _arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        if message.kind in (MessageKind.REQUEST, MessageKind.STATE):
            self._changed.notify_all()
            return self._state_requests.arrive(message)
        if message.kind is MessageKind.LEAVE:
            self._node.followers.discard(message.peer)
        elif message.kind is MessageKind.FOLLOW:
            return self._node.arrive(message)
        elif message.kind is not MessageKind.HELLO:
            self._deadlines.seen(message.step, monotonic(), message.peer)
            if (
                self._source
                and message.kind is MessageKind.RESULT
                and message.peer == self._sources[0]
            ):
                left, self._source = self._sources[self._source], 0
                return [BestEffortMessage(left, MessageKind.LEAVE, 0), *self._node.arrive(message)]
            return self._node.arrive(message)
        return []

    def _look_after_the_source(self) -> list[BestEffortMessage]:
        """If it is gone, follow the next one that is there. Once this rank is through, it only
        waits for those below, and the root may have ended."""
        through = self._state_requests.final_state is not None
        if through or not self._sources or not self._messages.is_down(self._sources[self._source]):
            return []
        left = self._move_on()
        if not self._messages.is_down(self._sources[self._source]):
            message = BestEffortMessage(
                self._sources[self._source], MessageKind.FOLLOW, self._node.floor
            )
            return [*left, *self._speaking_up(message)]
        if (
            self._membership is None
            and self._messages.seconds_down(self._host) > ROOT_RECONNECT_SECONDS
        ):
            raise PeerLost(
                f"the root, on rank {self._host}, is gone, and nobody else can decode",
                "start the run again: it goes on from its last checkpoint",
            )
        return []

    def _keep_the_deadline(self) -> list[BestEffortMessage]:
        """At the root: if a step takes too long, do as the plan says."""
        now, step = monotonic(), self._node.floor
        if self._partial_until is not None and self._partial_until[0] != step:
            self._partial_until = None
        if self._partial_until is not None:
            if now < self._partial_until[1]:
                return []
            self._partial_until = step, now + PARTIAL_RESULT_GRACE_SECONDS
            return self._node.finish_partial(step) or []
        if not self._is_late(now) or self._beyond == "wait":
            return []
        if self._beyond == "partial":
            self._partial_until = step, now + PARTIAL_RESULT_GRACE_SECONDS
            return self._node.request_partial(step)
        raise RunError(
            f"step {step} takes longer than {self._deadlines.deadline:.1f} s: the root waits for "
            f"{ranks_text(self._node.missing(step))}, more than the code can do without",
            "allow more stragglers, or let it wait or take what is there (beyond=)",
        )

    def _is_late(self, now: float) -> bool:
        began = self._deadlines.first_seen(self._node.floor)
        return (
            self.rank == self._host and began is not None and now > began + self._deadlines.deadline
        )

    def _until_something_is_due(self) -> float | None:
        """Seconds; None if only letters matter."""
        due = []
        if self._sources and self._messages.is_down(self._sources[self._source]):
            due.append(monotonic() + RELAY_ABORT_POLL_SECONDS)
        if self._partial_until is not None:
            due.append(self._partial_until[1])
        elif self.rank == self._host and self._beyond != "wait":
            began = self._deadlines.first_seen(self._node.floor)
            if began is not None:
                due.append(began + self._deadlines.deadline)
        return max(0.0, min(due) - monotonic()) + 0.001 if due else None

    def _move_on(self) -> list[BestEffortMessage]:
        """To the next source that is there, if there is one; what to tell the last."""
        before = self._source
        for turn in range(1, len(self._sources)):
            index = (before + turn) % len(self._sources)
            if not self._messages.is_down(self._sources[index]):
                self._source = index
                return (
                    [BestEffortMessage(self._sources[before], MessageKind.LEAVE, 0)]
                    if before
                    else []
                )
        return []

    def _speaking_up(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """To one who may not know where this rank is now."""
        return [self._messages.hello(message.peer), message]

    def _ask(self, peer: int) -> list[BestEffortMessage]:
        """For its state."""
        return [self._messages.hello(peer), *self._state_requests.request(peer)]

    def _who_could_help(self) -> Iterator[int]:
        """Whom to ask for a state, without end: the nearest, and one of the others after each
        turn."""
        nearest = list(dict.fromkeys([*self._sources, *self._below]))
        others = [rank for rank in self._all if rank not in (self.rank, *nearest)]
        for other in cycle([[rank] for rank in others] or [[]]):
            yield from (*nearest, *other)

    def _check_peers(self) -> None:
        if self._membership is not None:
            known = (*self._sources, *self._below)
            self._membership.note_broken_connections(
                *(peer for peer in known if self._messages.is_down(peer))
            )
        asking = self._state_requests.asking
        if (
            asking is not None
            and self._messages.is_down(asking)
            and not self._state_requests.refused
        ):
            self._state_requests.refused = True
            self._changed.notify_all()

    def _ends_all(self, error: BaseException) -> bool:
        """Nobody but the root is needed by all; it is gone if more say so than may be late."""
        if self.rank == self._host:
            return True
        return isinstance(error, PeerLost) and self._abort_flag.witness("no root") > self.spare

    def _fail(self, error: BaseException) -> None:
        kind = type(error).__name__
        meant = (
            error
            if isinstance(error, ThalwegError)
            else RunError(f"the relay of rank {self.rank} ended: {kind}: {error}", "report this")
        )
        if not self._closed and self._ends_all(error):
            self._abort_flag.raise_flag(meant.problem)
        with self._changed:
            self._broken = meant
            self._changed.notify_all()


def sources(allocation: Allocation, rank: int) -> list[int]:
    """Whom results may come from: the parent, those beside it, and so on up to the root. Children
    of one parent begin with different ones beside it, so that nobody has to feed them all."""
    tree, parents = allocation.tree, allocation.tree.parents
    found: list[int] = []
    node = rank
    while rank != allocation.host and node != TREE_ROOT:
        above = parents[node]
        if above == TREE_ROOT:
            found.append(allocation.host)
            break
        beside = [n for n in tree.children[parents[above]] if n != above]
        turn = tree.children[above].index(node) % max(1, len(beside))
        found += [above, *beside[turn:], *beside[:turn]]
        node = above
    return [peer for peer in dict.fromkeys(found) if peer != rank]
