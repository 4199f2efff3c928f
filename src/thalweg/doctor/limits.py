"""Limits of the system and its processor, compared with what N workers need.

Open files: 64 for anything, and 4 for each of the N - 1 others: two connections of ours, one in
each direction, and two of Gloo's. The store's host takes 6 connections from each of the N workers
on top. (Counted in /proc/self/fd: 29 to 44 with up to 8 workers, 2 more for each.)

Buffers: TCP keeps at most a window in flight, half of what tcp_rmem allows; more is needed if rate
times round trip, the bandwidth-delay product, is larger (RFC 7323).

Some virtual machines announce AMX without having it, and a product of bfloat16 then ends the
process (SIGILL). So a child process tries one.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import NoReturn

import torch

from thalweg.doctor.finding import Finding, RankFacts, by_host, fail, ok, warn
from thalweg.facts import about
from thalweg.launch.root_cause import signal_name
from thalweg.launch.worker_process import fork

BASE_OPEN_FILE_COUNT = 64
OPEN_FILES_PER_PEER = 4
OPEN_FILES_PER_STORE_CLIENT = 6
SYSCTL_NET_PATH = Path("/proc/sys/net")
BUFFER_SETTINGS = ("ipv4/tcp_rmem", "ipv4/tcp_wmem", "core/rmem_max", "core/wmem_max")
CHILD_TIMEOUT_SECONDS = 10.0
TEST_MATRIX_SIDE_ELEMENTS = 64  # large enough for oneDNN to use its kernels


def files_needed(size: int, *, hosts_store: bool = False) -> int:
    needed = BASE_OPEN_FILE_COUNT + OPEN_FILES_PER_PEER * (size - 1)
    return needed + (OPEN_FILES_PER_STORE_CLIENT * size if hosts_store else 0)


def open_files(size: int, *, hosts_store: bool = False) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(size, hosts_store=hosts_store)
    unlimited = soft == resource.RLIM_INFINITY
    if not unlimited and soft < needed:
        formula = f"{BASE_OPEN_FILE_COUNT}, {OPEN_FILES_PER_PEER} for each other one"
        if hosts_store:
            formula += f" and {OPEN_FILES_PER_STORE_CLIENT} for each as the store's host"
        raised = hard == resource.RLIM_INFINITY or hard >= needed
        return fail(
            "open files",
            f"{soft} may be open, and a worker of {size} needs {needed}: {formula}",
            f"run ulimit -n {needed} before starting"
            + ("" if raised else f" as root: the hard limit is {hard}"),
        )
    detail = f"{'unlimited' if unlimited else soft}, and {needed} are needed"
    if size == 1 and not unlimited:
        most = (soft - BASE_OPEN_FILE_COUNT) // OPEN_FILES_PER_PEER + 1
        detail += f", enough for {most} workers"
    return ok("open files", detail)


def backlog(size: int) -> Finding | None:
    """The finding on the store's host, to which all workers connect at once."""
    with suppress(OSError, ValueError):
        allowed = int((SYSCTL_NET_PATH / "core" / "somaxconn").read_text())
        if allowed < size:
            return warn(
                "backlog",
                f"net.core.somaxconn is {allowed}, and {size} workers connect at once",
                f"run sysctl -w net.core.somaxconn={max(512, size)} on this host",
            )
        return ok("backlog", f"net.core.somaxconn is {allowed}")
    return None


def buffers() -> dict[str, int]:
    """The largest buffers in bytes, by setting; of tcp_rmem and tcp_wmem the last of three."""
    sizes = {}
    for setting in BUFFER_SETTINGS:
        path = SYSCTL_NET_PATH / setting
        with suppress(OSError, ValueError, IndexError):
            sizes[path.name] = int(path.read_text().split()[-1])
    return sizes


def buffers_for(
    ranks: Sequence[RankFacts],
    rates: Mapping[tuple[int, int], float],
    round_trips: Mapping[tuple[int, int], float],
) -> list[Finding]:
    """Findings on buffers, given rates (bits per second) and round trips (seconds) by sender and
    receiver."""
    known = {facts.rank: facts for facts in ranks}
    findings = []
    products = {flow: rate / 8 * round_trips.get(flow, 0.0) for flow, rate in rates.items()}
    for (source, target), nbytes in products.items():
        for facts, setting in ((known[source], "tcp_wmem"), (known[target], "tcp_rmem")):
            allowed = facts.buffers.get(setting)
            if allowed is not None and 2 * nbytes > allowed:
                detail = (
                    f"net.ipv4.{setting} allows {about(allowed, 'B')}, and rate x round trip is "
                    f"{about(nbytes, 'B')}: TCP can't fill the link"
                )
                wanted = 1 << (int(4 * nbytes) - 1).bit_length()
                remedy = f"run sysctl -w net.ipv4.{setting}='4096 131072 {wanted}'"
                findings.append(warn("buffers", detail, remedy, [facts]))
    if findings or not ranks:
        return findings
    sizes = [f"{name} {about(nbytes, 'B')}" for name, nbytes in ranks[0].buffers.items()]
    listed = ", ".join(sizes) or "unknown on this system"
    if products:
        listed += f"; {about(2 * max(products.values()), 'B')} are needed for rate x round trip"
    return [ok("buffers", listed)]


def bfloat16() -> Finding:
    """Try a product; call it before this process has threads: a fork keeps its parent's locks."""
    code = os.waitstatus_to_exitcode(os.waitpid(fork(_try), 0)[1])
    if code == 0:
        return ok("bfloat16", "a product works")
    announced = ""
    with suppress(OSError):
        if "amx_tile" in Path("/proc/cpuinfo").read_text():
            announced = " (AMX is announced)"
    died = f"dies of {signal_name(-code) if code < 0 else f'exit code {code}'}"
    if code == -signal.SIGALRM:
        died = "hangs"
    return fail(
        "bfloat16",
        f"a product of bfloat16 matrices {died} on this processor{announced}",
        "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (or AVX2) on this host",
    )


def threads(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Findings on hosts whose workers have more threads of torch than cores."""
    findings = []
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
            findings.append(warn("threads", detail, remedy, there))
    first = ranks[0]
    detail = f"{first.threads} for a worker, {first.cores} cores on {first.name}"
    return findings or [ok("threads", detail)]


def _try() -> NoReturn:
    """Try a product in the child process, which leaves no core dump, and ends by SIGALRM if the
    product hangs."""
    code = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, CHILD_TIMEOUT_SECONDS)
        code = 0 if product_is_right() else 1
    finally:
        os._exit(code)


def product_is_right() -> bool:
    torch.set_num_threads(1)
    ones = torch.ones(TEST_MATRIX_SIDE_ELEMENTS, TEST_MATRIX_SIDE_ELEMENTS, dtype=torch.bfloat16)
    return float((ones @ ones)[0, 0]) == TEST_MATRIX_SIDE_ELEMENTS
