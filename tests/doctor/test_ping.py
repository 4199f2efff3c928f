"""One rank calls another, over real sockets of this machine."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from dataclasses import replace
from time import time

import pytest

from thalweg.doctor.finding import RankFacts
from thalweg.doctor.ping import (
    PING_HELLO_STRUCT,
    PING_OK,
    PINGS_REQUEST,
    PingServer,
    ping,
    ping_all,
    reason,
    send_flow,
)

HERE = "127.0.0.1"
PATIENCE = 5.0


def peer(server: PingServer, rank: int = 1) -> RankFacts:
    return RankFacts(rank=rank, address=HERE, port=server.port, token=server.token)


def test_a_round_trip_and_the_others_clock() -> None:
    with PingServer(1, HERE) as server:
        server.clock = lambda: time() - 40
        call = ping(0, peer(server), PATIENCE)
    assert (call.caller, call.peer, call.outcome) == (0, 1, PING_OK)
    assert 0 < call.round_trip < 1
    assert abs(call.ahead + 40) <= call.round_trip


def test_a_flow_has_a_rate_and_ends() -> None:
    with PingServer(1, HERE) as server:
        rate = send_flow(peer(server), 0.2, PATIENCE)
    assert rate is not None
    assert rate > 1e6


@pytest.mark.parametrize("change", [{"token": "0" * 32}, {"rank": 2}])
def test_who_answers_as_another_is_a_stranger(change: dict[str, str | int]) -> None:
    with PingServer(1, HERE) as server:
        wrong = replace(peer(server), **change)  # type: ignore[arg-type]
        assert ping(0, wrong, PATIENCE).outcome == "somebody else has that address here"
        assert send_flow(wrong, 0.1, PATIENCE) is None


def test_a_stranger_gets_nothing() -> None:
    with PingServer(1, HERE) as server:
        for said in (
            b"GET / HTTP/1.1\r\n" * 9,
            PING_HELLO_STRUCT.pack(b"x" * 32, PINGS_REQUEST, 0.0),
        ):
            with socket.create_connection((HERE, server.port), timeout=PATIENCE) as stranger:
                stranger.sendall(said)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert ping(0, peer(server), PATIENCE).outcome == PING_OK  # and others are served


def test_refused_silent_and_ended() -> None:
    with socket.create_server((HERE, 0)) as mute:
        port = mute.getsockname()[1]
        silent = RankFacts(rank=1, address=HERE, port=port, token="0" * 32)
        assert ping(0, silent, 0.2).outcome == "connected, but nobody answers"
    assert ping(0, silent, 0.2).outcome == "refused"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "timed out"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "timed out"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "forbidden here"),
        (ConnectionResetError(), "connected, and then broken off"),
        (OSError(errno.ENOBUFS, "No buffer space available"), "No buffer space available"),
    ],
)
def test_reasons_have_names(error: OSError, words: str) -> None:
    assert reason(error) == words


def test_many_at_once() -> None:
    servers = [PingServer(rank, HERE) for rank in range(40)]
    for server in servers:
        server.__enter__()
    pings = ping_all(99, [peer(server, rank) for rank, server in enumerate(servers)])
    for server in servers:
        server.__exit__(None, None, None)
    assert [call.outcome for call in pings] == [PING_OK] * 40
    assert [call.peer for call in pings] == list(range(40))
