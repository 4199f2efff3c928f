from __future__ import annotations

import os
import signal
from threading import Event, Thread
from time import monotonic, sleep

import pytest

from thalweg.launch.worker_process import signals_blocked


def test_held_signals_come_afterwards_though_another_thread_takes_them() -> None:
    passed: list[bool] = []

    def interrupted() -> None:
        with signals_blocked():
            os.kill(os.getpid(), signal.SIGINT)
            deadline = monotonic() + 0.2
            while monotonic() < deadline:
                sleep(0.01)
            passed.append(True)

    over = Event()
    thread = Thread(target=over.wait)  # as a library's: the kernel gives it what the mask keeps out
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        over.set()
        thread.join()
    assert passed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
