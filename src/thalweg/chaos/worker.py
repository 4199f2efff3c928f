"""The training loop of a worker during fault injection, and its reports to the history."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from time import monotonic, sleep, time
from typing import Any

import thalweg
from thalweg.catalog import parse_plan
from thalweg.chaos.exact_job import (
    CHAOS_BATCH_SAMPLES,
    CHECKPOINT_PERIOD_STEPS,
    Counted,
    Linear,
    checksum,
    digest,
    optimizer_of,
    samples,
    snap,
    sums,
)
from thalweg.chaos.history import (
    Commit,
    Ended,
    Named,
    Record,
    Refused,
    Saved,
    Sent,
    Starved,
    as_dict,
)
from thalweg.errors import CheckpointError
from thalweg.launch.supervisor import SendMessage
from thalweg.launch.worker_process import RESTARTS_VARIABLE
from thalweg.redundancy import is_compensated
from thalweg.training import Run
from thalweg.training.events import RunEvent
from thalweg.training.rendezvous import MembershipChange

UNBOUNDED_EPOCHS = 1 << 30  # the stop file ends the run
STOP_FILE_NAME = "stop"
MIN_CHAOS_STEP_SECONDS = 0.02
CHAOS_TIMEOUT_SECONDS = 60.0  # that a rank waits for others
STUCK_STEP_SECONDS = 40.0  # without a step, after which all stacks are written
STARVATION_POLL_SECONDS = 0.05
MIN_STARVATION_SECONDS = 0.3  # a shorter delay isn't recorded


def work(
    rank: int, report: SendMessage, *, sync: str, seed: int, folder: Path, disk: Path | None
) -> Mapping[str, Any]:
    """Train until there is a file `STOP_FILE_NAME` in the folder of this run. `seed` is that of the
    order of samples; with a `disk`, checkpoints are written to that folder."""
    life = int(os.environ.get(RESTARTS_VARIABLE, "0"))

    def record(each: Record) -> None:
        report(as_dict(each))

    def on_event(event: RunEvent) -> None:
        if event.kind == "incident":
            record(_named(rank, life, event.data))

    stacks = (folder / f"stacks-{rank}-{life}.txt").open("w")
    Thread(target=_record_starvation, args=(rank, record), daemon=True).start()
    plan = parse_plan(sync)
    asynchronous = plan.cadence.staleness is not None
    counts = asynchronous or is_compensated(plan)
    model = Counted(int(os.environ["WORLD_SIZE"])) if counts else Linear()
    optimizer = optimizer_of(model)
    local_sums: list[tuple[float, ...]] = []  # after the optimizer's step, before averaging
    optimizer.register_step_post_hook(lambda *_: local_sums.append(sums(model)))
    faulthandler.dump_traceback_later(STUCK_STEP_SECONDS, file=stacks)
    run = thalweg.attach(
        model,
        optimizer,
        plan=sync,
        data=samples(),
        batch=CHAOS_BATCH_SAMPLES,
        seed=seed,
        timeout=CHAOS_TIMEOUT_SECONDS,
        on_event=on_event,
    )
    stops = False
    for epoch in run.epochs(UNBOUNDED_EPOCHS):
        for inputs, indices in run.batches(epoch):
            faulthandler.dump_traceback_later(STUCK_STEP_SECONDS, file=stacks)
            began_in = run.members.epoch
            sleep(MIN_CHAOS_STEP_SECONDS)
            optimizer.zero_grad()
            loss = run.mean(model(inputs))
            if isinstance(model, Counted):
                if run.counts:
                    record(Sent(time=time(), rank=rank, step=run.step))
                loss = loss + model.counters[rank]
            loss.backward()  # type: ignore[no-untyped-call]
            snap(model)
            counted = run._session.applies
            local_sums.clear()
            optimizer.step()
            if not (counted and run._session.applies):
                continue
            record(_commit(run, model, life, began_in, indices.tolist(), local_sums[-1]))
            if disk is not None and run.step % CHECKPOINT_PERIOD_STEPS == 0:
                record(_save(run, disk))
            if not stops and (folder / STOP_FILE_NAME).exists():
                stops = True
                run.stop()
    with run.consensus() if asynchronous else nullcontext():
        record(Ended(time=time(), rank=rank, life=life, step=run.step, digest=digest(model)))
    faulthandler.dump_traceback_later(STUCK_STEP_SECONDS, file=stacks)
    run.close()
    faulthandler.cancel_dump_traceback_later()
    return {"step": run.step}


def _record_starvation(rank: int, record: Callable[[Record], None]) -> None:
    """Record when this process got no processor time: then its silence is the machine's fault."""
    last = monotonic()
    while True:
        sleep(STARVATION_POLL_SECONDS)
        delay, last = monotonic() - last - STARVATION_POLL_SECONDS, monotonic()
        if delay > MIN_STARVATION_SECONDS:
            record(Starved(time=time(), rank=rank, seconds=delay))


def _commit(
    run: Run,
    model: Linear,
    life: int,
    began_in: int,
    indices: list[int],
    before: tuple[float, ...],
) -> Commit:
    return Commit(
        time=time(),
        rank=run.rank,
        life=life,
        step=run.step,
        formation=run.members.epoch,
        began_in=began_in,
        members=run.members.ranks,
        digest=digest(model),
        samples=len(indices),
        checksum=checksum(indices),
        process=os.getpid(),
        interrupted=run._recovery.is_interrupted,
        before=before,
        after=sums(model),
        counted=tuple(-c for c in model.counters.tolist()) if isinstance(model, Counted) else (),
    )


def _named(rank: int, life: int, change: MembershipChange) -> Named:
    return Named(
        time=change.over,
        noticed=change.noticed,
        rank=rank,
        life=life,
        step=change.step,
        formation=change.formation,
        left=change.left,
        joined=change.joined,
        lost=change.samples,
        reason=change.reason,
    )


def _save(run: Run, disk: Path) -> Saved | Refused:
    """Save a checkpoint; the run continues if the disk is full."""
    step = run.step
    try:
        run.save(disk)
    except CheckpointError as error:
        return Refused(time=time(), rank=run.rank, text=str(error))
    return Saved(time=time(), rank=run.rank, step=step)
