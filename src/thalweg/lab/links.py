"""Changes to the links of a lab that is up, from any process: degraded, cut, with competing flows.

The lab's folder has what differs from the declared cluster, so that any process can heal a link. A
competing TCP flow is a process that sends to itself, from one namespace into the next, as fast as
TCP allows: a socket stays in the namespace in which it was made, so one process holds both ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NoReturn

from thalweg.errors import LabError
from thalweg.facts import Link, Rate
from thalweg.lab.addressing import Port
from thalweg.lab.event import links_of
from thalweg.lab.fabric import Sockets, read_qdisc_stats, shape
from thalweg.lab.namespaces import enter, processes
from thalweg.lab.registry import LabChanges, LabRecord
from thalweg.lab.shaping import BOTH_DIRECTIONS, Direction, Shape, declared
from thalweg.launch.worker_process import fork

SEND_CHUNK_BYTES = 1 << 18  # bytes that a flow sends at once
SO_MAX_PACING_RATE_OPTION = 47  # the socket module has no name for it
FLOW_PARENT_POLL_SECONDS = 0.5  # how often a flow looks for its parent


class LabLinks:
    def __init__(self, record: LabRecord) -> None:
        self._record = record
        self._wiring = record.wiring
        self._declared = declared(record.cluster, loss=record.loss, netem=record.netem)

    def all(self) -> list[Link]:
        return list(self._declared)

    def of(
        self,
        *,
        rack: int | str | None = None,
        host: int | str | None = None,
        directions: Sequence[Direction] = BOTH_DIRECTIONS,
    ) -> list[Link]:
        """The uplink of a rack or the NIC of a host, in these directions."""
        return links_of(self._record.cluster, rack=rack, host=host, directions=directions)

    def declared_ports(self) -> dict[Port, Shape]:
        return {self._port(link): wanted for link, wanted in self._declared.items()}

    def _port(self, link: Link) -> Port:
        """The interface at which this direction of a link is shaped."""
        return self._wiring.ends(link)[0]

    def degrade(self, links: Iterable[Link], rate: Rate) -> None:
        Shape(rate=rate)  # raises if the rate is out of range
        self._change(links, lambda state, link: state.rates.update({str(link): str(rate)}))

    def restore(self, links: Iterable[Link]) -> None:
        """Restore the declared state of links, and end the competing flows in them."""

        def forget_changes(state: LabChanges, link: Link) -> None:
            self._end_flows(state, link)
            state.rates.pop(str(link), None)
            _heal(state, link)

        self._change(links, forget_changes)

    def cut(self, links: Iterable[Link]) -> None:
        self._change(links, lambda state, link: state.cuts.append(str(link)))

    def heal(self, links: Iterable[Link]) -> None:
        self._change(links, _heal)

    def _change(self, links: Iterable[Link], change: Callable[[LabChanges, Link], None]) -> None:
        """Apply `change` to the record of each link, and shape a link anew if its shape differs."""
        with self._record.changing() as state:
            for link in links:
                before = self._shape(link, state)
                change(state, link)
                wanted = self._shape(link, state)
                if wanted != before:
                    with Sockets() as sockets:
                        shape(sockets, self._port(link), wanted)

    def _shape(self, link: Link, state: LabChanges) -> Shape:
        """The declared shape of a link with the changes that are recorded for it."""
        wanted = replace(self._declared[link], cut=str(link) in state.cuts)
        rate = state.rates.get(str(link))
        return wanted if rate is None else replace(wanted, rate=Rate.parse(rate))

    def fill(
        self,
        links: Iterable[Link],
        *,
        flows: int = 1,
        rate: Rate | None = None,
        detached: bool = False,
    ) -> None:
        """Start competing TCP flows, each through one of these links alone."""
        with ExitStack() as after_error:
            with self._record.changing() as state:
                for link in (link for link in links for _ in range(flows)):
                    pid = start_flow(*self._wiring.ends(link), rate, detached=detached)
                    after_error.callback(stop_flow, pid, self._port(link))
                    state.flows.setdefault(str(link), []).append(pid)
            after_error.pop_all()

    def end_flows(self) -> None:
        self._change(self._declared, self._end_flows)

    def _end_flows(self, state: LabChanges, link: Link) -> None:
        for pid in state.flows.pop(str(link), []):
            stop_flow(pid, self._port(link))

    def status(self) -> dict[Link, dict[str, Any]]:
        """The declared and the current state of every link, with the kernel's counters."""
        state, rows = self._record.state(), {}
        with Sockets() as sockets:
            for link, wanted in self._declared.items():
                measured = read_qdisc_stats(sockets, self._port(link))
                rates = [q.bits_per_second for q in measured if q.bits_per_second is not None]
                rows[link] = {
                    "declared": None if wanted.rate is None else str(wanted.rate),
                    "rate": str(Rate(rates[0])) if rates else None,
                    "cut": str(link) in state.cuts,
                    "flows": len(state.flows.get(str(link), [])),
                    "latency_ms": 1000 * wanted.delay,
                    "loss": wanted.loss,
                    "sent_bytes": measured[0].sent_nbytes if measured else None,
                    "drops": sum(q.drops for q in measured),
                }
        return rows


def _heal(state: LabChanges, link: Link) -> None:
    state.cuts = [cut for cut in state.cuts if cut != str(link)]


def start_flow(source: Port, target: Port, rate: Rate | None, *, detached: bool) -> int:
    """Start a flow between two namespaces, and return its process id. Unless it is detached it
    ends with the process that started it."""
    reads, writes = os.pipe()
    parent = None if detached else os.getpid()
    pid = fork(lambda: _be_flow(source, target, rate, parent, writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        error = pipe.read()
    if error:
        os.waitpid(pid, 0)
        raise LabError(f"no flow to {target.address}: {error}", "check that the lab is up")
    return pid


def stop_flow(pid: int, source: Port) -> None:
    """Kill a flow, if the process id is still that of the flow."""
    runs = pid in processes([source.namespace]).get(source.namespace, ())
    if runs:
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # another process started it
        os.waitpid(pid, 0 if runs else os.WNOHANG)


def _be_flow(
    source: Port, target: Port, rate: Rate | None, parent: int | None, pipe: int
) -> NoReturn:
    try:
        os.setsid()
        # Inherited pipes and sockets must close when the parent process ends.
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        sender, listener = _connect(source, target, rate)
        os.close(pipe)
        _flow(sender, listener, parent)
    except (OSError, LabError) as error:
        with suppress(OSError):  # the pipe is closed once the flow runs
            os.write(pipe, str(error).encode())
    finally:
        os._exit(0)


def _connect(source: Port, target: Port, rate: Rate | None) -> tuple[socket.socket, socket.socket]:
    """The connecting sender and the listener that will accept it."""
    enter(target.namespace)
    listener = socket.create_server((target.address, 0))
    enter(source.namespace)
    sender = socket.socket()
    # Unbound, a rack's end would send from the gateway's address, which all racks have in common.
    sender.bind((source.address, 0))
    sender.setblocking(False)
    if rate is not None:
        pace = min(round(rate.bits_per_second / 8), 2**32 - 2)
        sender.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE_OPTION, pace)
    sender.connect_ex(listener.getsockname())
    return sender, listener


def _flow(sender: socket.socket, listener: socket.socket, parent: int | None) -> None:
    """Send until the parent has ended or TCP times out; on a cut link the flow waits."""
    receiver: socket.socket | None = None
    data, buffer = bytes(SEND_CHUNK_BYTES), bytearray(SEND_CHUNK_BYTES)
    while parent is None or os.getppid() == parent:
        readable, writable, _ = select.select(
            [receiver or listener], [sender], [], FLOW_PARENT_POLL_SECONDS
        )
        with suppress(BlockingIOError):
            if readable and receiver is None:
                receiver, _ = listener.accept()
                receiver.setblocking(False)
            elif readable and receiver is not None:
                receiver.recv_into(buffer)
        with suppress(BlockingIOError):
            if writable:
                sender.send(data)
