"""Orders, pings and flows between ranks that are threads: no network, but real waiting."""

from __future__ import annotations

from threading import current_thread
from typing import Any

import pytest
import torch.distributed as dist

from tests.threads import run_threads
from thalweg.errors import PeerFailed, PeerLate
from thalweg.members.abort import AbortFlag
from thalweg.probing import coordinator
from thalweg.probing.coordinator import Effort, ProbeCoordinator, ProbeFlow, serve
from thalweg.probing.flow import ProbeMessenger
from thalweg.transports import Transport

QUICK = Effort(pings=5, short=0.05, long=0.1)


@pytest.fixture
def on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 are on one host, all on one machine."""

    def host_description() -> dict[str, Any]:
        rank = _RANKS[current_thread().name]
        return {"name": f"h{min(rank, 1)}{rank // 3}", "machine": "m", "stack": "", "cores": 1}

    monkeypatch.setattr(coordinator, "host_description", host_description)


_RANKS: dict[str, int] = {}


@pytest.mark.usefixtures("on_hosts")
def test_rank_0_gathers_what_others_measure() -> None:
    store = dist.HashStore()
    counted: list[int] = []

    def work(transport: Transport) -> Any:
        _RANKS[current_thread().name] = transport.rank
        exchange = ProbeMessenger(transport, AbortFlag(store, transport.rank, 4), 20.0)
        if transport.rank:
            return serve(exchange)
        conductor = ProbeCoordinator(exchange, 4, QUICK, counted.append)
        assert [host.ranks for host in conductor.host_infos] == [(0,), (1, 2), (3,)]
        assert (conductor.size, conductor.at_once) == (3, 1)
        assert 0 < conductor.round_trip(0, 2) < 1
        assert 0 < conductor.round_trip(2, 1) < 1
        assert 0 < conductor.round_trip_of_ranks(1, 2) < 1
        assert conductor.rates([ProbeFlow(1, 2)])[0] > 1e6
        assert conductor.rates([ProbeFlow(0, 1)], short=True)[0] > 1e6
        conductor.end({"found": 7})
        return None

    results = run_threads(range(4), work)
    assert [results[rank] for rank in (1, 2, 3)] == [{"found": 7}] * 3
    assert counted == list(range(1, 7))


def test_who_waits_for_an_order_hears_the_alarm() -> None:
    store = dist.HashStore()

    def work(transport: Transport) -> None:
        abort_flag = AbortFlag(store, transport.rank, 2)
        if transport.rank == 0:
            abort_flag.publish("the disk is full")
        else:
            serve(ProbeMessenger(transport, abort_flag, 20.0))

    with pytest.raises(PeerFailed, match="rank 0 aborted: the disk is full"):
        run_threads(range(2), work)


def test_who_does_not_answer_is_late() -> None:
    store = dist.HashStore()

    def work(transport: Transport) -> None:
        if transport.rank == 0:
            exchange = ProbeMessenger(transport, AbortFlag(store, 0, 2), 0.2)
            ProbeCoordinator(exchange, 2, QUICK, lambda done: None)

    with pytest.raises(PeerLate, match=r"rank 0 timed out waiting for rank 1 \(before step 0\)"):
        run_threads(range(2), work)
