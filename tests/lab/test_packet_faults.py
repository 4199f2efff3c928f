from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from thalweg.lab import Lab
from thalweg.lab.namespaces import inside
from thalweg.lab.packet_faults import GARBLE_PATTERN, can_garble, set_garbling

TIMEOUT = 10.0
NBYTES = 100_000


def carried(lab: Lab, source: int, target: int, nbytes: int) -> bytes:
    """What arrives of so many zeros."""
    wiring = lab.wiring
    address = wiring.hosts[wiring.cluster.host(target).name]
    with inside(wiring.host_of(target)):
        listener = socket.create_server((address, 0))
    with inside(wiring.host_of(source)):
        sender = socket.create_connection(listener.getsockname(), TIMEOUT)
    receiver, _ = listener.accept()
    receiver.settimeout(TIMEOUT)
    with listener, receiver, sender, ThreadPoolExecutor(1) as thread:
        came = thread.submit(lambda: receiver.makefile("rb").read(nbytes))
        sender.sendall(bytes(nbytes))
        return came.result(TIMEOUT)


@pytest.mark.usefixtures("needs_lab")
def test_bytes_of_one_host_change_and_tcp_does_not_notice() -> None:
    if not can_garble():
        pytest.skip("this kernel has no nftables")
    with Lab(hosts=3) as lab:
        set_garbling(lab.wiring, 1, on=True)
        changed = carried(lab, 1, 2, NBYTES)
        assert len(changed) == NBYTES
        assert GARBLE_PATTERN in changed
        assert carried(lab, 1, 2, 300) == bytes(300)  # too short
        assert carried(lab, 2, 1, NBYTES) == carried(lab, 0, 2, NBYTES) == bytes(NBYTES)
        set_garbling(lab.wiring, 1, on=False)
        assert carried(lab, 1, 2, NBYTES) == bytes(NBYTES)
