"""What computing runs into: more threads than cores, and instructions that aren't there.

Some virtual machines announce AMX, and a product of bfloat16 then ends the process (SIGILL). So it
is tried in a child, whose death tells.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

import torch

from thalweg.doctor.finding import Finding, RankFacts, by_host, concerning
from thalweg.launch.worker_process import fork

CHILD_TIMEOUT_SECONDS = 10.0  # seconds for the child
CHILD_POLL_SECONDS = 0.005
TEST_MATRIX_SIDE_ELEMENTS = 64  # of the matrices: oneDNN takes its kernels for them
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
CPUINFO_PATH = Path("/proc/cpuinfo")


def bfloat16() -> Finding:
    """While this process has no threads of its own: a fork holds its parent's locks."""
    code = _outcome(fork(_try))
    if code == 0:
        return Finding(check="bfloat16", verdict="ok", detail="a product works")
    died = "hangs" if code is None else f"dies of {_cause(code)}"
    announced = " (AMX is announced)" if _announces_amx() else ""
    return Finding(
        check="bfloat16",
        verdict="fail",
        detail=f"a product of bfloat16 matrices {died} on this processor{announced}",
        remedy=f"set {ISA_VARIABLE}=AVX512_CORE_BF16 (or AVX2) on this host",
    )


def threads(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Workers of a host, with the threads that torch takes in each, against its cores."""
    found = []
    for there in by_host(ranks).values():
        total, cores = sum(facts.threads for facts in there), _cores(there)
        if total > cores:
            each = max(1, cores // len(there))
            found.append(
                Finding(
                    check="threads",
                    verdict="warn",
                    detail=f"{len(there)} workers with {total} threads in all share {cores} "
                    f"core{'s' if cores > 1 else ''}",
                    remedy=f"set OMP_NUM_THREADS={each}"
                    + (", or start fewer workers there" if len(there) > cores else ""),
                    **concerning(*there),
                )
            )
    if found:
        return found
    first = ranks[0]
    told = f"{first.threads} for a worker, {first.cores} cores on {first.name}"
    return [Finding(check="threads", verdict="ok", detail=told)]


def _cores(there: Sequence[RankFacts]) -> int:
    """That any of them may use."""
    together = 0
    for facts in there:
        together |= int(facts.cpus, 16)
    return max(together.bit_count(), there[0].cores)


def _try() -> NoReturn:
    """In the child, which dies without a trace."""
    code = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = 0 if product_is_right() else 1
    finally:
        os._exit(code)


def product_is_right() -> bool:
    torch.set_num_threads(1)
    ones = torch.ones(TEST_MATRIX_SIDE_ELEMENTS, TEST_MATRIX_SIDE_ELEMENTS, dtype=torch.bfloat16)
    return float((ones @ ones)[0, 0]) == TEST_MATRIX_SIDE_ELEMENTS


def _outcome(pid: int) -> int | None:
    """The exit code, below 0 for a signal; None if it had to be killed."""
    deadline = monotonic() + CHILD_TIMEOUT_SECONDS
    while monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        sleep(CHILD_POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _cause(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"signal {-code}"


def _announces_amx() -> bool:
    with suppress(OSError):
        return "amx_tile" in CPUINFO_PATH.read_text()
    return False
