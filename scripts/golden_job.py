"""Small training runs whose every step is the same each time: prints their digests as JSON.

    python scripts/golden_job.py [NAME ...]

A case is a plan, or two in a row with a checkpoint in between, and at most one event. After each
step every worker, a fork of this process, writes down a digest of its parameters, buffers and
optimizer state. A case trains one of two models:

- a perceptron with batch norm on normal random numbers. Every change in the order of a sum shows
  in the bits of its parameters.
- `exact`: a linear model on small integers, whose gradients are rounded to what exact sums give
  (`thalweg/chaos/exact_job.py` has the reason). Its parameters don't depend on who computes which
  sample, so they are the same each time even if workers die, or if the fastest answers count.

`scripts/golden-runs` runs this file on several revisions: it uses nothing but what all have.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # the same kernels on every machine
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import thalweg
from thalweg.launch.supervisor import run_workers

SECONDS = 240.0  # after which a case has failed
SAMPLES, BATCH, WIDTH = 320, 64, 24
EVENT_STEP = 5
RACKS = """
[[rack]]
name = "A"
nic = "1gbit"
uplink = "1gbit"
hosts = ["A1", "A2"]

[[rack]]
name = "B"
nic = "1gbit"
uplink = "1gbit"
hosts = ["B1", "B2"]
"""

Digests = dict[str, dict[str, str]]
"""The digest of each step of each rank, or of rank "all" where which ranks take a step varies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Training under a plan up to a step; it resumes from the checkpoint of the phase before."""

    sync: str
    workers: int = 3
    until: int = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is run, in which model, and which event it meets."""

    name: str
    phases: tuple[Phase, ...]
    exact: bool = False
    racks: bool = False  # two of two hosts each
    loader: bool = True  # False: the script has its own
    adam: bool = False
    event: str = ""  # kill, rejoin, nonfinite, ddp, or alone: only one worker has gradients
    rank: int = 2  # of the worker that the event concerns
    switches: tuple[str, ...] = ()  # plans, from steps 8, 16, ... on
    merged: bool = False  # which ranks take a step varies, but all that do agree


def of(name: str, sync: str, *, workers: int = 3, until: int = 20, **options: Any) -> Case:
    return Case(name=name, phases=(Phase(sync=sync, workers=workers, until=until),), **options)


def resumed(name: str, first: str, second: str, *, fewer: bool = False) -> Case:
    then = Phase(sync=second, workers=2 if fewer else 3)
    return Case(name=name, phases=(Phase(sync=first, until=8), then))


POWERSGD = "ring+powersgd(rank=2, warmup=3) @ bucket=8KB"
TREE = "codedreduce(fanout=3, stragglers=1)"
PLANS = (
    "ring+powersgd(rank=2)",
    "local_sgd(every=4)",
    "codedreduce(fanout=3, stragglers=0)",
    "ring",
)
CASES = (
    of("ring", "ring @ bucket=4KB"),
    of(
        "hierarchical-powersgd",
        "hierarchical+powersgd(rank=2, warmup=3) @ bucket=8KB",
        workers=4,
        racks=True,
        adam=True,
    ),
    of("ring-int8", "ring+int8 @ bucket=8KB, overlap=true"),
    of("ring-topk", "ring+topk(ratio=0.05, feedback=true) @ bucket=8KB, overlap=false"),
    of("dssync-int8", "dssync(adjust=false)+int8 @ bucket=8KB", workers=4, racks=True),
    of("dssync-averaged", "dssync(adjust=false, optimizer=averaged)", workers=4, adam=True),
    of("gossip", "gossip", workers=4),
    of("gossip-late", "gossip(graph=exponential, delay=1)", workers=4),
    of("codedreduce", TREE, workers=4, exact=True, merged=True),
    of("gc", "gc(stragglers=1)", exact=True, merged=True),
    of("codedreduce-all", "codedreduce(fanout=3, stragglers=0)", workers=4),
    of("gc-all", "gc(stragglers=0)"),
    of("local-sgd", "local_sgd(every=4)"),
    of("local-sgd-racks", "local_sgd(every=1, levels=rack, delay=1)", workers=4, racks=True),
    of("lgc", "lgc(k=3)", exact=True),
    of("asp", "asp(staleness=2)", exact=True, event="alone"),
    of("ddp", "ddp @ bucket=8KB"),
    of("ddp-object", POWERSGD, loader=False, event="ddp"),
    of("own-loader", "ring @ bucket=4KB", loader=False),
    of("switch", "ring", workers=4, until=44, exact=True, switches=PLANS),
    resumed("resume", POWERSGD, POWERSGD),
    resumed("resume-other-plan", POWERSGD, "ring+int8"),
    resumed("resume-fewer", POWERSGD, POWERSGD, fewer=True),
    of("nonfinite", "ring+topk(ratio=0.05) @ bucket=8KB", event="nonfinite"),
    of("kill", "ring", workers=4, exact=True, event="kill"),
    of("kill-first", "ring", workers=4, exact=True, event="kill", rank=0),
    of("kill-hierarchical", "hierarchical", workers=4, racks=True, exact=True, event="kill"),
    of("kill-powersgd", POWERSGD, workers=4, exact=True, event="kill"),
    of("kill-own-loader", "ring", workers=4, exact=True, loader=False, event="kill"),
    of("kill-rejoin", "ring", workers=4, until=150, exact=True, event="rejoin", merged=True),
    of("kill-codedreduce", TREE, workers=4, exact=True, event="kill", merged=True),
)


def data_of(exact: bool) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    if exact:
        return TensorDataset(torch.randint(-8, 9, (SAMPLES, WIDTH**2), generator=generator).float())
    return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=generator))


class Exact(nn.Module):
    """A linear model, in several parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(WIDTH // 4, WIDTH) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ torch.cat([part.reshape(-1) for part in self.parts])

    @torch.no_grad()
    def round_gradients(self) -> None:
        for part in self.parts:
            if part.grad is not None:
                part.grad.mul_(BATCH).round_().div_(BATCH).add_(0.0)  # -0.0 becomes 0.0


def model_of(exact: bool) -> nn.Module:
    if exact:
        return Exact()
    hidden = 4 * WIDTH
    return nn.Sequential(
        *(nn.Linear(WIDTH, hidden), nn.BatchNorm1d(hidden), nn.ReLU()),
        *(nn.Linear(hidden, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 4)),
    )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of all parameters, buffers and optimizer state."""
    slots = optimizer.state_dict()["state"]
    state = {f"{key}.{name}": slots[key][name] for key in slots for name in slots[key]}
    found = sha256()
    for name, value in sorted({**model.state_dict(), **state}.items()):
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def train(case: Case, number: int, folder: Path, rank: int) -> None:
    """One worker's part of a phase; writes a line with its digest after each step."""
    phase = case.phases[number]
    life = int(os.environ.get("THALWEG_RESTARTS", "0"))
    torch.manual_seed(0)
    module = model_of(case.exact)
    alone = case.event == "alone"
    momentum = 0.0 if alone else 0.5  # without it, gradients of zero change nothing
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(module.parameters(), 2**-6, momentum=momentum)
    if case.adam:
        optimizer = torch.optim.AdamW(module.parameters(), 2**-6)
    model = module
    if case.event == "ddp":
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(module)
    data = data_of(case.exact)
    run = thalweg.attach(
        model,
        optimizer,
        sync=phase.sync,
        data=data if case.loader else None,
        batch=BATCH if case.loader else None,
        resume=folder / "checkpoint",
        cluster=folder / "racks.toml" if case.racks else None,
        timeout="2min",
        nonfinite="skip" if case.event == "nonfinite" else "raise",
    )
    lines = (folder / f"{rank}-{life}-{number}").open("w", buffering=1)
    back = folder / "back"
    last = run.step

    def step(inputs: torch.Tensor) -> None:
        nonlocal last
        if run.step % 8 == 1 and rank == 0 and case.switches[run.step // 8 :]:
            run.switch(case.switches[run.step // 8])
        if case.event in ("kill", "rejoin") and (rank, run.step, life) == (
            case.rank,
            EVENT_STEP,
            0,
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if case.event == "rejoin" and life:
            back.touch()
        if case.event == "rejoin" and run.step > EVENT_STEP and not back.exists():
            sleep(0.25)
        outputs = model(inputs)
        losses = outputs if case.exact else outputs.square().mean(1)
        loss = run.mean(losses) if case.loader else losses.mean()
        if case.event == "nonfinite" and (rank, run.step) == (case.rank, EVENT_STEP):
            loss = loss * torch.nan
        if alone and rank != case.rank:
            loss = loss * 0.0
        optimizer.zero_grad()
        loss.backward()
        if isinstance(module, Exact) and case.loader:
            module.round_gradients()
        optimizer.step()
        if run.step > last and (rank == case.rank or not alone):
            last = run.step
            lines.write(f"{last} {digest(module, optimizer)}\n")

    def batches() -> Iterator[torch.Tensor]:
        share = BATCH // 4
        while not case.loader:
            first = (4 * run.step + rank) * share % SAMPLES
            yield data.tensors[0][first : first + share]
        for epoch in run.epochs(phase.until):
            yield from (inputs for (inputs,) in run.batches(epoch))

    for inputs in batches():
        step(inputs)
        if run.step >= phase.until:
            break
    if number + 1 < len(case.phases):
        run.save(folder / "checkpoint")
    if case.event == "rejoin" and not back.exists():
        raise RuntimeError("the killed worker didn't rejoin in time")
    run.close()
    if case.event == "ddp":
        dist.destroy_process_group()


def run_case(case: Case) -> Digests:
    found: Digests = {}
    with TemporaryDirectory(prefix="thalweg-golden-") as name:
        folder = Path(name)
        (folder / "racks.toml").write_text(RACKS)
        for number, phase in enumerate(case.phases):

            def work(rank: int, report: Any, number: int = number) -> dict[str, Any]:
                train(case, number, folder, rank)
                return {"done": True}

            run_workers(
                phase.workers,
                work,
                timeout=SECONDS,
                spare=range(phase.workers) if case.event in ("kill", "rejoin") else (),
                survives=case.event in ("kill", "rejoin"),
                restarts=int(case.event == "rejoin"),
                on_line=lambda *_: None,
            )
        for file in sorted(folder.glob("[0-9]*-*")):
            of_rank = found.setdefault("all" if case.merged else file.name.partition("-")[0], {})
            for step, value in map(str.split, file.read_text().splitlines()):
                if of_rank.setdefault(step, value) != value:
                    of_rank[step] += f" or {value}"
    return found


def main() -> None:
    chosen = [case for case in CASES if case.name in sys.argv[1:] or not sys.argv[1:]]
    results: dict[str, Any] = {}
    for case in chosen:
        print(case.name, file=sys.stderr, flush=True)
        try:
            results[case.name] = run_case(case)
        except Exception as error:
            results[case.name] = {"failed": f"{type(error).__name__}: {error}"}
    with suppress(BrokenPipeError):
        print(json.dumps(results))


if __name__ == "__main__":
    main()
