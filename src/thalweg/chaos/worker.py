"""The training loop of a worker during fault injection, and its reports to the history."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
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
    stacks = (folder / f"stacks-{rank}-{life}.txt").open("w")
    Thread(target=_report_starvation, args=(rank, report), daemon=True).start()
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
    )
    recorder = _Recorder(run, life, report)
    stops = False
    for epoch in run.epochs(UNBOUNDED_EPOCHS):
        for inputs, indices in run.batches(epoch):
            faulthandler.dump_traceback_later(STUCK_STEP_SECONDS, file=stacks)
            began_in = run.members.epoch
            sleep(MIN_CHAOS_STEP_SECONDS)
            optimizer.zero_grad()
            loss = run.mean(model(inputs))
            if isinstance(model, Counted):
                recorder.sent()
                loss = loss + model.counters[rank]
            loss.backward()  # type: ignore[no-untyped-call]
            snap(model)
            counted = run._session.applies
            local_sums.clear()
            optimizer.step()
            recorder.incidents()
            if not (counted and run._session.applies):
                continue
            recorder.commit(model, began_in, indices.tolist(), local_sums[-1])
            if disk is not None and run.step % CHECKPOINT_PERIOD_STEPS == 0:
                recorder.save(disk)
            if not stops and (folder / STOP_FILE_NAME).exists():
                stops = True
                run.stop()
    recorder.incidents()
    with run.consensus() if asynchronous else nullcontext():
        recorder(Ended(time=time(), rank=rank, life=life, step=run.step, digest=digest(model)))
    faulthandler.dump_traceback_later(STUCK_STEP_SECONDS, file=stacks)
    run.close()
    faulthandler.cancel_dump_traceback_later()
    return {"step": run.step}


def _report_starvation(rank: int, report: SendMessage) -> None:
    """Report when this process got no processor time: then its silence is the machine's fault."""
    last = monotonic()
    while True:
        sleep(STARVATION_POLL_SECONDS)
        delay, last = monotonic() - last - STARVATION_POLL_SECONDS, monotonic()
        if delay > MIN_STARVATION_SECONDS:
            report(as_dict(Starved(time=time(), rank=rank, seconds=delay)))


class _Recorder:
    """Sends records for the history to the supervisor."""

    def __init__(self, run: Run, life: int, report: SendMessage) -> None:
        self._run = run
        self._life = life
        self._report = report
        self._reported_incidents = 0

    def __call__(self, record: Record) -> None:
        self._report(as_dict(record))

    def sent(self) -> None:
        if self._run.counts:
            self(Sent(time=time(), rank=self._run.rank, step=self._run.step))

    def commit(
        self, model: Linear, began_in: int, indices: list[int], before: tuple[float, ...]
    ) -> None:
        run = self._run
        self(
            Commit(
                time=time(),
                rank=run.rank,
                life=self._life,
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
                counted=tuple(-c for c in model.counters.tolist())
                if isinstance(model, Counted)
                else (),
            )
        )

    def incidents(self) -> None:
        """Report the changes of members since the last call."""
        changes = [event.data for event in self._run.events if event.kind == "incident"]
        for change in changes[self._reported_incidents :]:
            self(
                Named(
                    time=change.over,
                    noticed=change.noticed,
                    rank=self._run.rank,
                    life=self._life,
                    step=change.step,
                    formation=change.formation,
                    left=change.left,
                    joined=change.joined,
                    lost=change.samples,
                    reason=change.reason,
                )
            )
        self._reported_incidents = len(changes)

    def save(self, disk: Path) -> None:
        """Save a checkpoint; the run continues if the disk is full."""
        step = self._run.step
        try:
            self._run.save(disk)
        except CheckpointError as error:
            self(Refused(time=time(), rank=self._run.rank, text=str(error)))
        else:
            self(Saved(time=time(), rank=self._run.rank, step=step))
