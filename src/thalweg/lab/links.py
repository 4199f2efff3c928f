"""Changing the links of a lab that is up, from whichever process: degraded, cut, filled by others.

What differs from the declared cluster is kept in the lab's folder, so that whoever heals a link
knows at which rate it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from thalweg.facts import Link, Rate
from thalweg.lab.event import BOTH, Direction
from thalweg.lab.fabric import Sockets, look, shape
from thalweg.lab.flow import End, start_flow, stop_flow
from thalweg.lab.registry import Record, State
from thalweg.lab.shaping import Shape, declared
from thalweg.lab.targets import links_of
from thalweg.lab.wiring import SPINE_ADDRESS, Port, Wiring


class Links:
    def __init__(self, record: Record, wiring: Wiring) -> None:
        self._record = record
        self._wiring = wiring
        self._declared = declared(record.cluster, loss=record.loss, netem=record.netem)

    def all(self) -> list[Link]:
        return list(self._declared)

    def of(
        self,
        *,
        rack: int | str | None = None,
        host: int | str | None = None,
        directions: Sequence[Direction] = BOTH,
    ) -> list[Link]:
        """The uplink of a rack, or the NIC of a host."""
        return links_of(self._record.cluster, rack=rack, host=host, directions=directions)

    def declared_ports(self) -> dict[Port, Shape]:
        return {self._wiring.port(link): wanted for link, wanted in self._declared.items()}

    def degrade(self, links: Iterable[Link], rate: Rate) -> None:
        Shape(rate=rate)  # refuses what can't be had
        with self._record.changing() as state:
            for link in links:
                state.rates[str(link)] = str(rate)
                self._apply(link, state)

    def restore(self, links: Iterable[Link]) -> None:
        """As they were declared: whole, and nobody else's flows in them."""
        with self._record.changing() as state:
            for link in links:
                self._end_flows(link, state.flows.pop(str(link), []))
                changed = state.rates.pop(str(link), None) is not None
                if str(link) in state.cuts:
                    state.cuts.remove(str(link))
                    changed = True
                if changed:
                    self._apply(link, state)

    def cut(self, links: Iterable[Link]) -> None:
        with self._record.changing() as state:
            for link in links:
                if str(link) not in state.cuts:
                    state.cuts.append(str(link))
                    self._apply(link, state)

    def heal(self, links: Iterable[Link]) -> None:
        with self._record.changing() as state:
            for link in links:
                if str(link) in state.cuts:
                    state.cuts.remove(str(link))
                    self._apply(link, state)

    def fill(
        self,
        links: Iterable[Link],
        *,
        flows: int = 1,
        rate: Rate | None = None,
        detached: bool = False,
    ) -> None:
        """Competing TCP flows, each through one of these links alone."""
        started: list[tuple[Link, int]] = []
        try:
            with self._record.changing() as state:
                for link in (link for link in links for _ in range(flows)):
                    pid = start_flow(*self._ends(link), rate, detached=detached)
                    started.append((link, pid))
                for link, pid in started:
                    state.flows.setdefault(str(link), []).append(pid)
        except BaseException:
            for link, pid in started:
                self._end_flows(link, [pid])
            raise

    def end_flows(self) -> None:
        with self._record.changing() as state:
            for link in self._declared:
                self._end_flows(link, state.flows.pop(str(link), []))

    def _end_flows(self, link: Link, pids: Iterable[int]) -> None:
        for pid in pids:
            stop_flow(pid, self._ends(link)[0])

    def status(self) -> dict[Link, dict[str, Any]]:
        """Every link as it is now: what was declared, what is, and what the kernel counts."""
        state = self._record.state()
        with Sockets() as sockets:
            return {link: self._row(sockets, link, state) for link in self._declared}

    def _row(self, sockets: Sockets, link: Link, state: State) -> dict[str, Any]:
        wanted = self._declared[link]
        measured = look(sockets, self._wiring.port(link))
        rates = [q.bits_per_second for q in measured if q.bits_per_second is not None]
        return {
            "declared": None if wanted.rate is None else str(wanted.rate),
            "rate": str(Rate(rates[0])) if rates else None,
            "cut": str(link) in state.cuts,
            "flows": len(state.flows.get(str(link), [])),
            "latency_ms": 1000 * wanted.delay,
            "loss": wanted.loss,
            "sent_bytes": measured[0].sent_nbytes if measured else None,
            "drops": sum(q.drops for q in measured),
        }

    def _apply(self, link: Link, state: State) -> None:
        wanted = replace(self._declared[link], cut=str(link) in state.cuts)
        if str(link) in state.rates:
            wanted = replace(wanted, rate=Rate.parse(state.rates[str(link)]))
        with Sockets() as sockets:
            shape(sockets, self._wiring.port(link), wanted)

    def _ends(self, link: Link) -> tuple[End, End]:
        """From and to of a flow through this link alone."""
        wiring = self._wiring
        if link.kind == "uplink":
            number = [rack.name for rack in self._record.cluster.racks].index(link.owner)
            near = End(wiring.rack(number), wiring.rack_address(number))
            far = End(wiring.spine, SPINE_ADDRESS)
        else:
            number, _ = wiring.hosts[link.owner]
            near = End(wiring.host(link.owner), wiring.address(link.owner))
            far = End(wiring.rack(number), wiring.rack_address(number))
        return (near, far) if link.direction == "out" else (far, near)
