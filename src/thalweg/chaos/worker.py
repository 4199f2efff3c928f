"""What each worker does while things go wrong: it trains as scripts do, and tells of its steps."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
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
    Event,
    Named,
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

UNBOUNDED_EPOCHS = 1 << 30  # until it is told to stop
STARVATION_POLL_SECONDS, MIN_STARVATION_SECONDS = (
    0.05,
    0.3,
)  # seconds between two looks at the clock, and lateness worth telling


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosTask:
    sync: str
    seed: int  # of the order of samples
    folder: Path  # of this run; a file `stop` in it ends it
    disk: Path | None = None  # where checkpoints go
    compute: float = 0.02  # seconds that a step takes, at least
    timeout: float = 60.0  # seconds that a rank waits for others
    stuck: float = 40.0  # seconds without a step, until it is written down where each thread is

    @property
    def stop(self) -> Path:
        return self.folder / "stop"


def work(task: ChaosTask, rank: int, report: SendMessage) -> Mapping[str, Any]:
    life = int(os.environ.get(RESTARTS_VARIABLE, "0"))
    stacks = (task.folder / f"stacks-{rank}-{life}.txt").open("w")
    Thread(target=_watch_the_clock, args=(rank, report), daemon=True).start()
    plan = parse_plan(task.sync)
    at_own_pace = plan.cadence.staleness is not None
    counts = at_own_pace or is_compensated(plan)
    model = Counted(int(os.environ["WORLD_SIZE"])) if counts else Linear()
    optimizer = optimizer_of(model)
    own: list[tuple[float, ...]] = []  # sums after this rank's own step, before it is averaged
    optimizer.register_step_post_hook(lambda *_: own.append(sums(model)))
    faulthandler.dump_traceback_later(task.stuck, file=stacks)
    run = thalweg.attach(
        model,
        optimizer,
        sync=task.sync,
        data=samples(),
        batch=CHAOS_BATCH_SAMPLES,
        seed=task.seed,
        timeout=task.timeout,
    )
    tell = _EventReporter(run, life, report)
    stops = False
    for epoch in run.epochs(UNBOUNDED_EPOCHS):
        for inputs, numbers in run.batches(epoch):
            faulthandler.dump_traceback_later(task.stuck, file=stacks)
            began_in = run.formation
            sleep(task.compute)
            optimizer.zero_grad()
            loss = run.mean(model(inputs))
            if isinstance(model, Counted):
                tell.sent()
                loss = loss + model.counters[rank]
            loss.backward()  # type: ignore[no-untyped-call]
            snap(model)
            counted = run.counts
            own.clear()
            optimizer.step()
            tell.incidents()
            if not (counted and run.counts):
                continue
            tell.commit(model, began_in, numbers.tolist(), own[-1])
            if task.disk is not None and run.step % CHECKPOINT_PERIOD_STEPS == 0:
                tell.save(task.disk)
            if not stops and task.stop.exists():
                stops = True
                run.stop()
    tell.incidents()
    with run.consensus() if at_own_pace else nullcontext():
        tell(Ended(time=time(), rank=rank, life=life, step=run.step, digest=digest(model)))
    faulthandler.dump_traceback_later(task.stuck, file=stacks)
    run.close()
    faulthandler.cancel_dump_traceback_later()
    return {"step": run.step}


def _watch_the_clock(rank: int, report: SendMessage) -> None:
    """Tell when this process didn't get to run: then it is the machine that keeps it silent."""
    last = monotonic()
    while True:
        sleep(STARVATION_POLL_SECONDS)
        late, last = monotonic() - last - STARVATION_POLL_SECONDS, monotonic()
        if late > MIN_STARVATION_SECONDS:
            report(as_dict(Starved(time=time(), rank=rank, seconds=late)))


class _EventReporter:
    """Sends events to the supervisor."""

    def __init__(self, run: Run, life: int, report: SendMessage) -> None:
        self._run = run
        self._life = life
        self._report = report
        self._reported_incidents = 0  # incidents

    def __call__(self, event: Event) -> None:
        self._report(as_dict(event))

    def sent(self) -> None:
        if not self._run.catching_up:
            self(Sent(time=time(), rank=self._run.rank, step=self._run.step))

    def commit(
        self, model: Linear, began_in: int, numbers: list[int], own: tuple[float, ...]
    ) -> None:
        run = self._run
        self(
            Commit(
                time=time(),
                rank=run.rank,
                life=self._life,
                step=run.step,
                formation=run.formation,
                began_in=began_in,
                members=run.members,
                digest=digest(model),
                samples=len(numbers),
                checksum=checksum(numbers),
                process=os.getpid(),
                before=own,
                after=sums(model),
                counted=tuple(-c for c in model.counters.tolist())
                if isinstance(model, Counted)
                else (),
            )
        )

    def incidents(self) -> None:
        """Those that haven't been told of."""
        found = self._run.incidents
        for change in found[self._reported_incidents :]:
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
        self._reported_incidents = len(found)

    def save(self, disk: Path) -> None:
        """A disk that is full is no reason to end a run."""
        step = self._run.step
        try:
            self._run.save(disk)
        except CheckpointError as error:
            self(Refused(time=time(), rank=self._run.rank, text=str(error)))
        else:
            self(Saved(time=time(), rank=self._run.rank, step=step))
