"""Checks of the processor: more threads than cores, and missing instructions.

Some virtual machines announce AMX without having it, and a product of bfloat16 then ends the
process (SIGILL). So a child process tries one.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

import torch

from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, warn
from thalweg.launch.worker_process import fork

CHILD_TIMEOUT_SECONDS = 10.0
CHILD_POLL_SECONDS = 0.005
TEST_MATRIX_SIDE_ELEMENTS = 64  # large enough for oneDNN to use its kernels
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
CPUINFO_PATH = Path("/proc/cpuinfo")


def bfloat16() -> Finding:
    """Try a product; call it before this process has threads: a fork keeps its parent's locks."""
    code = _outcome(fork(_try))
    if code == 0:
        return ok("bfloat16", "a product works")
    died = "hangs" if code is None else f"dies of {_cause(code)}"
    announced = " (AMX is announced)" if _announces_amx() else ""
    return fail(
        "bfloat16",
        f"a product of bfloat16 matrices {died} on this processor{announced}",
        f"set {ISA_VARIABLE}=AVX512_CORE_BF16 (or AVX2) on this host",
    )


def threads(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Findings on hosts whose workers have more threads of torch than cores."""
    found = []
    for there in by_host(ranks).values():
        total = sum(facts.threads for facts in there)
        cpus = reduce(or_, (int(facts.cpus, 16) for facts in there))  # of any of these ranks
        cores = max(cpus.bit_count(), there[0].cores)
        if total > cores:
            shared = f"{cores} core{'s' if cores > 1 else ''}"
            detail = f"{len(there)} workers with {total} threads in all share {shared}"
            remedy = f"set OMP_NUM_THREADS={max(1, cores // len(there))}"
            if len(there) > cores:
                remedy += ", or start fewer workers there"
            found.append(warn("threads", detail, remedy, there))
    first = ranks[0]
    detail = f"{first.threads} for a worker, {first.cores} cores on {first.name}"
    return found or [ok("threads", detail)]


def _try() -> NoReturn:
    """Try a product in the child process, which leaves no core dump."""
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
    """The exit code of the child, negative for a signal; None if it hung and was killed."""
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
