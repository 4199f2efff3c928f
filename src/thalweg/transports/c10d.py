"""Over torch.distributed: the point-to-point operations of a process group.

Gloo can't tell whether a receive has completed, and a timed wait that expires closes the connection
for good. So each peer has a thread here that blocks in `recv`, first for a header (label, number of
bytes), then for the bytes, and puts them into the inbox; deadlines are kept at the inbox.
Connections don't come back: a peer that is gone is lost to this group.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from time import monotonic

import numpy as np
import torch
import torch.distributed as dist

from thalweg.errors import PeerLate, PeerLost, TransportClosed
from thalweg.transports.inbox import Inbox
from thalweg.transports.transport import Address, Array, Label, Sending

GOODBYE = -1  # in place of the number of bytes
PATIENCE = 1.0  # seconds for a peer's goodbye


class C10dTransport:
    """`group` is this transport's own: nobody else sends or receives on it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._inbox = Inbox(self._rank)
        self._receivers: dict[int, Thread] = {}
        self._sent_to: set[int] = set()

    @property
    def rank(self) -> int:
        return self._rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        if self._inbox.closed:
            raise TransportClosed(f"rank {self._rank} sends after close()", "send before it")
        self._sent_to.add(peer)
        header = torch.tensor([*label, array.nbytes])
        payload = torch.from_numpy(array.view(np.uint8))
        try:
            works = [self._group.send([part], peer, 0) for part in (header, payload)]
        except RuntimeError:
            raise _lost(self._rank, peer, label) from None
        return _Works(works, (header, payload), self._rank, peer, label)

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        for address in wanted:
            if address.peer not in self._receivers:
                self._listen_to(address.peer)
        return self._inbox.take(wanted, deadline)

    def forget(self, step: int, round_number: int) -> None:
        self._inbox.forget(step, round_number)

    def close(self) -> None:
        """Also tells those who listen to this rank that nothing more will come."""
        if self._inbox.closed:
            return
        self._inbox.close()
        for peer in self._sent_to:
            with suppress(RuntimeError):
                self._group.send([torch.tensor([0, 0, 0, 0, GOODBYE])], peer, 0)
        for thread in self._receivers.values():
            thread.join(PATIENCE)

    def _listen_to(self, peer: int) -> None:
        name = f"thalweg-from-{peer}"
        self._receivers[peer] = Thread(target=self._take_in, args=(peer,), name=name, daemon=True)
        self._receivers[peer].start()

    def _take_in(self, peer: int) -> None:
        header = torch.empty(5, dtype=torch.int64)
        try:
            while True:
                self._group.recv([header], peer, 0).wait()
                *label, nbytes = header.tolist()
                if nbytes == GOODBYE:
                    break
                payload = torch.empty(nbytes, dtype=torch.uint8)
                self._group.recv([payload], peer, 0).wait()
                self._inbox.put(Address(peer, Label(*label)), payload.numpy())
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            self._inbox.lose(
                peer,
                PeerLost(
                    f"rank {self._rank} lost its connection to rank {peer} ({reason})",
                    f"look at what happened to rank {peer}",
                ),
            )
        else:
            self._inbox.lose(
                peer,
                PeerLost(
                    f"rank {peer} has closed its connection to rank {self._rank}",
                    f"look at why rank {peer} ended",
                ),
            )


class _Works:
    """Gloo reads the tensors until the works are done."""

    def __init__(
        self,
        works: list[dist.Work],
        tensors: tuple[torch.Tensor, ...],
        rank: int,
        peer: int,
        label: Label,
    ) -> None:
        self._works = works
        self._tensors = tensors  # kept alive
        self._rank = rank
        self._peer = peer
        self._label = label

    def wait(self, deadline: float) -> None:
        while self._works:  # each once: Gloo would wait for a second message
            left = deadline - monotonic()
            try:
                self._works.pop(0).wait(timedelta(seconds=max(0.001, left)))
            except RuntimeError:
                if monotonic() < deadline:
                    raise _lost(self._rank, self._peer, self._label) from None
                raise PeerLate(
                    rank=self._rank,
                    peers=(self._peer,),
                    step=self._label.step,
                    round_number=self._label.round,
                ) from None


def _lost(rank: int, peer: int, label: Label) -> PeerLost:
    return PeerLost(
        f"rank {rank} lost its connection to rank {peer} at step {label.step}",
        f"look at what happened to rank {peer}",
    )
