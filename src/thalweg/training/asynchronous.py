"""The plan `asp`: everybody goes at its own pace.

At the end of backward a worker sends its gradients to the root, which takes a step with them
(`parameter_server.py`), and is answered with the parameters. The script's own optimizer finds no
gradients, and so does nothing; when it has "stepped", the new parameters are put in place.

    worker    backward ── gradients ──> root: takes a step
              parameters in place <── parameters as they are then

The root is a worker too: the server has a thread of its own there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from time import monotonic
from typing import Any, Protocol

import torch
from torch import nn

from thalweg.compress import arrange
from thalweg.errors import PeerLost, RunError
from thalweg.facts import Size
from thalweg.runtime import Alarm, World
from thalweg.training.carriers import Fill
from thalweg.training.compression import CompressedBucket, Compression
from thalweg.training.gradients import GradientAverager, layout_of
from thalweg.training.held import Slots
from thalweg.training.layout import FlatBucket
from thalweg.training.parameter_server import ParameterServer
from thalweg.training.parcel import Parcels
from thalweg.transports import Array
from thalweg.transports.post import Letter, Post, Sort

GRACE = 2.0  # seconds for a peer whose connection is down to come back
LOOK_AROUND = 0.5  # seconds of waiting after which the alarm is listened to
OVERDUE = 5.0  # seconds without an answer after which a request is repeated
log = logging.getLogger("thalweg")


class Box(Protocol):
    """Where a worker's letters go: each push of all buckets, and each meeting, has one answer."""

    def push(self, bucket: int, gradients: Array) -> None: ...

    def meet(self) -> None: ...

    def answer(self) -> list[Array]:
        """Wait for the parameters, bucket by bucket."""
        ...

    def part(self, seconds: float) -> bool:
        """Leave; the root waits for the others to do so, and says whether they did."""
        ...


class AsynchronousAverager(GradientAverager):
    """`root` is the rank that has the server."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        world: World,
        alarm: Alarm,
        *,
        root: int,
        staleness: int,
        bucket: Size,
        compression: Compression | None = None,
        broken_off: Callable[[], None] = lambda: None,
    ) -> None:
        arranged = arrange if compression is None else compression.arrange
        layout = layout_of(parameters, bucket, arranged)
        post = world.post(4 * len(layout.buckets))
        try:
            others = [rank for rank in world.members if rank != root]
            post.meet(others if world.rank == root else [root], monotonic() + world.timeout)
        except BaseException:
            post.close()
            raise
        self._optimizer = optimizer
        held = {id(p) for settings in optimizer.param_groups for p in settings["params"]}
        self._served = {name for name, p in parameters.items() if id(p) in held}
        self._near: NearBox | None = None
        if world.rank == root:
            buffers = layout_of(parameters, bucket, arranged)
            server = ParameterServer(parameters, optimizer, buffers, world.members, staleness)
            if compression is not None:
                server.unpack = Parcels(buffers, compression, root).unpack
            self._near = NearBox(post, server, alarm, world)
        self._box: Box = self._near or FarBox(post, root, alarm, world, len(layout.buckets))
        parcels = None if compression is None else Parcels(layout, compression, world.rank)
        super().__init__(parameters, layout, _Carrier(self._box, parcels), broken_off)
        self._answered = False

    def after_step(self) -> None:
        """The script's optimizer had nothing to do; here is what the server made of it."""
        if self._answered:
            self._put_in_place()
            self._answered = False

    def settle(self) -> None:
        """Meet all others: everybody has the same parameters then, and the root the optimizer's
        state."""
        self._box.meet()
        for bucket, array in zip(self._layout.buckets, self._box.answer(), strict=True):
            bucket.take(array)
        self._put_in_place()
        if self._near is not None:
            own = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**own, "state": self._near.optimizer_state})

    def part(self, seconds: float) -> bool:
        return self._box.part(seconds)

    def _commit(self) -> None:
        self._answered = True
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _put_in_place(self) -> None:
        for bucket in self._layout.buckets:
            for name, view in bucket.views.items():
                if name in self._served:
                    self._parameters[name].copy_(view)


class _Carrier:
    def __init__(self, box: Box, parcels: Parcels | None) -> None:
        self._box = box
        self._parcels = parcels
        self._sent: list[FlatBucket] = []
        self._step = 0  # of this worker

    @property
    def compressed(self) -> Collection[CompressedBucket]:
        return ()

    @property
    def held_before(self) -> Slots:
        return {}

    def begin(self) -> None:
        self._sent.clear()

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        fill(1.0)
        self._sent.append(bucket)
        if self._parcels is None:
            self._box.push(bucket.index, bucket.vector.copy())
        else:
            self._box.push(bucket.index, self._parcels.pack(bucket, self._step))

    def finish(self) -> None:
        self._step += 1
        answer = self._box.answer()
        for bucket in self._sent:
            bucket.take(answer[bucket.index])

    def let_go(self) -> None:
        self._sent.clear()

    def drop(self) -> None:
        """What travels is a copy; what the server has of it waits for the rest."""


class FarBox:
    """Of a worker on another rank than the server: letters to that."""

    def __init__(self, post: Post, root: int, alarm: Alarm, world: World, buckets: int) -> None:
        self._post = post
        self._root = root
        self._alarm = alarm
        self._world = world
        self._buckets = buckets
        self._number = 0  # of the request
        self._said: list[Letter] = []

    def push(self, bucket: int, gradients: Array) -> None:
        self._say(Letter(self._root, Sort.ANSWER, self._number, bucket, array=gradients))

    def meet(self) -> None:
        self._say(Letter(self._root, Sort.ASK, self._number))

    def answer(self) -> list[Array]:
        came: dict[int, Array] = {}
        deadline, overdue = monotonic() + self._world.timeout, monotonic() + OVERDUE
        while len(came) < self._buckets:
            for letter in self._post.receive(LOOK_AROUND):
                current = letter.sort is Sort.RESULT and letter.step == self._number
                if current and letter.array is not None:
                    came[letter.piece] = letter.array
            self._listen(deadline)
            if monotonic() > overdue:
                overdue = monotonic() + OVERDUE
                for letter in self._said:
                    self._post.send(letter)
        self._number += 1
        self._said.clear()
        return [came[bucket] for bucket in range(self._buckets)]

    def _say(self, letter: Letter) -> None:
        """Letters may be lost: what isn't answered is said again."""
        self._said.append(letter)
        self._post.send(letter)

    def part(self, seconds: float) -> bool:
        self._post.send(Letter(self._root, Sort.LEAVE, 0))
        self._post.close()
        return True

    def _listen(self, deadline: float) -> None:
        membership = self._world.membership
        if membership is not None:
            membership.refuse_if_called()
        elif self._post.is_down(self._root) and self._post.seconds_down(self._root) > GRACE:
            raise PeerLost(
                f"the root, on rank {self._root}, is gone, with the parameters",
                "start the run again: it goes on from its last checkpoint",
            )
        heard = self._alarm.heard()
        if heard is not None:
            raise heard
        if monotonic() >= deadline:
            raise RunError(
                f"rank {self._world.rank} waited {self._world.timeout:g} s for the parameters",
                "look at what the others do, or allow more time with timeout=",
            )


class NearBox:
    """Of the root's own worker; and the server's thread, which answers all."""

    def __init__(self, post: Post, server: ParameterServer, alarm: Alarm, world: World) -> None:
        self.optimizer_state: dict[str, Any] = {}
        self._meets = False
        self._post = post
        self._server = server
        self._alarm = alarm
        self._world = world
        self._requests: SimpleQueue[Callable[[], list[int]]] = SimpleQueue()
        self._changed = Condition()
        self._answer: list[Array] | None = None
        self._served: dict[int, int] = {}  # how many requests of each worker were answered
        self._broken: BaseException | None = None
        self._closed = False
        self._thread = Thread(target=self._work, name="thalweg-server", daemon=True)
        self._thread.start()

    def push(self, bucket: int, gradients: Array) -> None:
        self._do(lambda: self._server.push(self._world.rank, bucket, gradients))

    def meet(self) -> None:
        def meet() -> list[int]:
            self._meets = True
            return self._server.meet(self._world.rank)

        self._do(meet)

    def answer(self) -> list[Array]:
        deadline = monotonic() + self._world.timeout
        while monotonic() < deadline:
            with self._changed:
                self._changed.wait_for(self._has_news, LOOK_AROUND)
                if self._broken is not None:
                    raise self._broken
                if self._answer is not None:
                    answer, self._answer = self._answer, None
                    return answer
            if self._world.membership is not None:
                self._world.membership.refuse_if_called()
            heard = self._alarm.heard()
            if heard is not None:
                raise heard
        raise RunError(
            f"the server waited {self._world.timeout:g} s for other workers",
            "look at what they do, or allow more time with timeout=",
        )

    def part(self, seconds: float) -> bool:
        deadline = monotonic() + seconds
        self._do(lambda: self._server.lose(self._world.rank))
        with self._changed:
            left = self._changed.wait_for(
                lambda: not self._server.clocks or self._broken is not None,
                max(0.0, deadline - monotonic()),
            )
        self._closed = True
        self._post.wake()
        self._thread.join(GRACE)
        self._post.close()
        return left

    def _has_news(self) -> bool:
        return self._answer is not None or self._broken is not None

    def _do(self, request: Callable[[], list[int]]) -> None:
        self._requests.put(request)
        self._post.wake()

    # In the server's thread

    def _work(self) -> None:
        try:
            while not self._closed:
                letters = self._post.receive(LOOK_AROUND)
                with self._changed:
                    self._serve(letters)
                    self._changed.notify_all()
        except BaseException as error:
            self._alarm.sound(f"the server of asp ended: {type(error).__name__}: {error}")
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _serve(self, letters: list[Letter]) -> None:
        try:
            while True:
                self._tell(self._requests.get_nowait()())
        except Empty:
            pass
        for letter in letters:
            if letter.sort is Sort.LEAVE:
                self._tell(self._server.lose(letter.peer))
            elif letter.step < self._served.get(letter.peer, 0):  # repeated: the answer was lost
                self._tell([letter.peer], letter.step)
            elif letter.sort is Sort.ANSWER and letter.array is not None:
                self._tell(self._server.push(letter.peer, letter.piece, letter.array))
            elif letter.sort is Sort.ASK:
                self._tell(self._server.meet(letter.peer))
        for rank in list(self._server.clocks):
            if self._is_gone(rank):
                log.warning("rank %d is gone, and its share of the data", rank)
                self._tell(self._server.lose(rank))

    def _is_gone(self, rank: int) -> bool:
        down = self._post.is_down(rank)
        if self._world.membership is None:
            return down and self._post.seconds_down(rank) > GRACE
        if down:
            self._world.membership.broke(rank)
        return rank in self._world.membership.absent

    def _tell(self, whom: list[int], number: int | None = None) -> None:
        """The parameters as they are now, to these; in answer to their next request, or one that
        was answered before."""
        if not whom:
            return
        parameters = self._server.answer()
        for rank in whom:
            if rank == self._world.rank:
                self._answer = parameters
                if self._meets:
                    self.optimizer_state = deepcopy(self._server.optimizer.state_dict()["state"])
                    self._meets = False
                continue
            answered = self._served.get(rank, 0) if number is None else number
            self._served[rank] = max(self._served.get(rank, 0), answered + 1)
            for bucket, array in enumerate(parameters):
                self._post.send(Letter(rank, Sort.RESULT, answered, bucket, array=array))
