"""Over torch.distributed: the point-to-point operations of a process group.

Gloo can't tell whether a receive has completed, and a timed wait that expires closes all
connections of the group for good. So each peer has a thread here that blocks in `recv`, first for a
header (label, number of bytes), then for the bytes, and puts them into the inbox; deadlines are
kept at the inbox. Connections don't come back: a peer that is gone is lost to this group.

Gloo sends nothing before the other side asks for it, and these threads always do.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from threading import Lock, Thread
from time import monotonic

import torch
import torch.distributed as dist

from thalweg.errors import PeerLost, TransportError
from thalweg.transports.inbox import Inbox, late
from thalweg.transports.line import Store
from thalweg.transports.transport import Address, Array, Label, Sending, in_bytes

GOODBYE = -1  # in place of the number of bytes
PATIENCE = 1.0  # seconds for a peer's goodbye
FOR_EVER = timedelta(days=365)
MESSAGES, NOTHING = 0, 1  # tags


class C10dTransport:
    """`group` is this transport's own: nobody else sends or receives on it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._inbox = Inbox(self._rank)
        self._receivers: dict[int, Thread] = {}
        self._sending = Lock()  # nothing may come between a header and its bytes
        atexit.register(self.close)  # a thread in C++ at the interpreter's end ends in abort()

    @property
    def rank(self) -> int:
        return self._rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        header = torch.tensor([*label, array.nbytes])
        payload = torch.from_numpy(in_bytes(array))
        with self._sending:
            self._inbox.refuse_if_closed("sends")
            self._listen_to(peer)
            try:
                works = [self._group.send([part], peer, MESSAGES) for part in (header, payload)]
            except RuntimeError:
                raise _lost_at(self._rank, Address(peer, label)) from None
        return _Works(works, (header, payload), self._inbox, Address(peer, label))

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        for address in wanted:
            self._listen_to(address.peer)
        return self._inbox.take(wanted, deadline)

    def enter(self, formation: int, members: Collection[int]) -> None:
        raise TransportError(
            f"rank {self._rank} can't enter formation {formation}: c10d's connections don't come "
            "back",
            "use transport=zeromq",
        )

    def look_about(self) -> None:
        """Who waits is told."""

    def meet_at(self, store: Store) -> None:
        """They have found one another, and nobody comes later."""

    def close(self) -> None:
        """Also lets what was sent last leave, for a moment, and tells the others that it was the
        last. None of the threads is left after this."""
        goodbye = torch.tensor([0, 0, 0, 0, GOODBYE])
        works = []
        with self._sending:
            if self._inbox.closed:
                return
            self._inbox.close()
            for peer in list(self._receivers):
                with suppress(RuntimeError):
                    works.append(self._group.send([goodbye], peer, MESSAGES))
        atexit.unregister(self.close)
        deadline = monotonic() + PATIENCE
        for thread in list(self._receivers.values()):
            thread.join(max(0.0, deadline - monotonic()))
        for work in works:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, deadline - monotonic())))
        self._break_off()

    def _break_off(self) -> None:
        """End the threads that no goodbye has ended: nothing else than a wait that expires does."""
        left = [peer for peer, thread in self._receivers.items() if thread.is_alive()]
        for peer in left[:1]:
            with suppress(RuntimeError):
                soon = timedelta(milliseconds=1)
                self._group.recv([torch.empty(1)], peer, NOTHING).wait(soon)
        for peer in left:
            self._receivers[peer].join(PATIENCE)

    def _listen_to(self, peer: int) -> None:
        if peer in self._receivers:
            return
        name = f"thalweg-from-{peer}"
        self._receivers[peer] = Thread(target=self._take_in, args=(peer,), name=name, daemon=True)
        self._receivers[peer].start()

    def _take_in(self, peer: int) -> None:
        header = torch.empty(5, dtype=torch.int64)
        try:
            next_header = self._group.recv([header], peer, MESSAGES)
            while True:
                next_header.wait(FOR_EVER)
                *label, nbytes = header.tolist()
                if nbytes == GOODBYE:
                    break
                payload = torch.empty(nbytes, dtype=torch.uint8)
                coming = self._group.recv([payload], peer, MESSAGES)
                next_header = self._group.recv([header], peer, MESSAGES)  # asked for in time
                coming.wait(FOR_EVER)
                self._inbox.put(Address(peer, Label(*label)), payload.numpy())
        except RuntimeError as error:
            self._inbox.lose(peer, _lost(self._rank, peer, _reason(error)))
        else:
            self._inbox.lose(
                peer,
                PeerLost(
                    f"rank {peer} has closed its connection to rank {self._rank}",
                    f"look at why rank {peer} ended",
                    peer=peer,
                ),
            )


class _Works:
    """Gloo reads the tensors until the works are done."""

    def __init__(
        self, works: list[dist.Work], tensors: tuple[torch.Tensor, ...], inbox: Inbox, to: Address
    ) -> None:
        self._works = works
        self._tensors = tensors  # kept alive
        self._inbox = inbox
        self._to = to

    def wait(self, deadline: float) -> None:
        while self._works:  # each once: Gloo would wait for a second message
            left = deadline - monotonic()
            try:
                self._works.pop(0).wait(timedelta(seconds=max(0.001, left)))
            except RuntimeError:
                if monotonic() >= deadline:
                    raise late(self._inbox.rank, (self._to,)) from None
                self._inbox.refuse_if_closed("sends")
                raise _lost_at(self._inbox.rank, self._to) from None


def _lost_at(rank: int, to: Address) -> PeerLost:
    return _lost(rank, to.peer, f"at step {to.label.step}")


def _lost(rank: int, peer: int, circumstance: str) -> PeerLost:
    return PeerLost(
        f"rank {rank} lost its connection to rank {peer} ({circumstance})",
        f"look at what happened to rank {peer}",
        peer=peer,
    )


def _reason(error: RuntimeError) -> str:
    """Gloo's first sentence, without the place in its source."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[\S*\] ", "", text).partition(". ")[0]
