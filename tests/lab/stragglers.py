"""A training in which one thing after another is made slow, and who was named meanwhile.

0 to 20      all is well
20 to 40     a rank computes for 200 ms longer
40 to 60     all is well
60 to 80     a host's NIC is degraded to a quarter, or a fifth
80 to 100    all is well
100 to 120   a rack's uplink is

Or one of them alone, earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import thalweg
from thalweg.facts import Cluster
from thalweg.lab import Lab
from thalweg.launch.supervisor import SendMessage
from thalweg.workloads import find_job

COMPUTE = 0.05  # seconds a step
SLOWER = 0.2
LASTS = 20  # steps
Named = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """From `step` on, for 20 steps; `named` is who is to be named."""

    step: int
    named: Named
    rank: int | None = None  # that computes slowly
    events: tuple[dict[str, Any], ...] = ()


def troubles(lab: Lab, rank: int, host: int, rack: int, rate: str) -> list[Trouble]:
    cluster = lab.cluster
    return [
        slow_rank(20, rank),
        slow_nic(60, cluster, host, rate),
        slow_uplink(100, cluster, rack, rate),
    ]


def slow_rank(step: int, rank: int) -> Trouble:
    return Trouble(step=step, named=("compute", (str(rank),)), rank=rank)


def slow_nic(step: int, cluster: Cluster, host: int, rate: str) -> Trouble:
    events: list[dict[str, Any]] = [
        {"at_step": step, "action": "degrade", "host": host, "rate": rate},
        {"at_step": step + LASTS, "action": "restore", "host": host},
    ]
    return Trouble(step=step, named=("nic", (cluster.host(host).name,)), events=tuple(events))


def slow_uplink(step: int, cluster: Cluster, rack: int, rate: str) -> Trouble:
    event = {"at_step": step, "action": "degrade", "rack": rack, "rate": rate}
    return Trouble(step=step, named=("uplink", (cluster.racks[rack].name,)), events=(event,))


def observed(
    lab: Lab,
    sync: str,
    params: str,
    troubles: Sequence[Trouble],
    steps: int,
    ddp: bool = False,
    records: str | None = None,
) -> dict[str, Any]:
    """`changes`: from which step on who was named; and what observing took, of each rank."""
    results = lab.run(
        _train,
        sync,
        params,
        ddp,
        {t.step: t.rank for t in troubles if t.rank is not None},
        steps,
        records,
        events=[event for trouble in troubles for event in trouble.events],
        process_group=ddp,
        timeout="10min",
        on_line=lambda *_: None,
    )
    return {**results[0], "costs": [result["cost"] for result in results]}


def _train(
    rank: int,
    report: SendMessage,
    sync: str,
    params: str,
    ddp: bool,
    slow: dict[int, int],
    steps: int,
    records: str | None,
) -> dict[str, Any]:
    job = find_job(f"synthetic(params={params})")
    inner = job.model(0)
    optimizer = job.optimizer(inner.parameters())
    model = DistributedDataParallel(inner) if ddp else inner
    run = thalweg.attach(model, optimizer, data=job.data, batch=32, plan=sync, records=records)
    for epoch in run.epochs(steps):
        for batch in run.batches(epoch):
            late = any(s <= run.step < s + LASTS and rank == r for s, r in slow.items())
            sleep(COMPUTE + SLOWER * late)
            loss = run.mean(job.losses(model, batch))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            report({"step": run.step})
            if run.step == steps:
                run.stop()
    seconds = run.report().totals[rank].seconds
    run.close()
    spent = run._timer.monitor.cpu_seconds + run._timer.blocked
    return {
        "changes": [
            (step, [(straggler.kind.value, straggler.who) for straggler in lates])
            for step, lates in run.report().changes
        ],
        "cost": spent / seconds,
    }


def verdicts(changes: Sequence[Any], troubles: Sequence[Trouble], steps: int) -> list[str]:
    """What is wrong with who was named; empty if all was right."""
    wrong = []
    names = _by_step(changes, steps)
    allowed: dict[int, set[Named]] = {step: set() for step in range(steps + 1)}
    for trouble in troubles:
        window = range(trouble.step, min(trouble.step + LASTS, steps + 1))
        if not any(trouble.named in names[step] for step in window):
            found = {name for step in window for name in names[step]}
            wrong.append(f"{trouble.named} isn't named within {LASTS} steps, but {found}")
        for step in range(trouble.step, min(trouble.step + 2 * LASTS, steps + 1)):
            allowed[step].add(trouble.named)
    for step, named in names.items():
        if named - allowed[step]:
            wrong.append(f"step {step} names {named - allowed[step]}")
            break
    return wrong


def _by_step(changes: Sequence[Any], steps: int) -> dict[int, set[Named]]:
    names: dict[int, set[Named]] = {}
    now: set[Named] = set()
    known = {step: {(kind, tuple(who)) for kind, who in lates} for step, lates in changes}
    for step in range(steps + 1):
        now = known.get(step, now)
        names[step] = now
    return names
