"""A job whose end is known exactly, to be killed at any moment; and what it leaves on paper.

The gradient of a sample is 64 times a whole number, a batch has 64 samples, and the learning rate
and the momentum are powers of two: nothing is ever rounded, on any number of workers. So the
parameters tell whether every sample was counted once, and in which order steps were taken.

Which samples each step used is written into a file by every rank when the step is taken, so that
what dead ones did is known too.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.training.workers import TIMEOUT, on_ranks, values
from thalweg.training import Run, attach

SAMPLES, BATCH, EPOCHS = 5 * 64, 64, 2
STEPS = EPOCHS * SAMPLES // BATCH
Act = Callable[[Run, str], None]
"""Called "before" and "after" each step."""


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        return 64.0 * torch.randint(-8, 9, (5,), generator=draw).double(), index


def nothing(run: Run, when: str) -> None:
    pass


def train(
    sync: str,
    notes: Path,
    act: Act = nothing,
    *,
    folder: Path | None = None,
    save: bool = False,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """On every rank; with a checkpoint after every step if it is to `save`."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 2**-10, momentum=0.5)
    run = attach(
        model, optimizer, plan=sync, data=Numbered(), batch=BATCH, resume=folder, timeout=TIMEOUT
    )
    first = run.step
    for epoch in run.epochs(epochs):
        for x, indices in run.batches(epoch):
            act(run, "before")
            optimizer.zero_grad()
            note = Note(run.rank, run.members.epoch, epoch, run.step, False, indices.tolist())
            counts = run.counts
            if counts:
                write_down(notes, note)
            run.mean(model(x).squeeze(1)).backward()
            optimizer.step()
            if counts and run.counts:
                write_down(notes, note._replace(taken=True))
            act(run, "after")
            if save:
                assert folder is not None
                run.save(folder)
    with run.consensus():
        ended = values(model)
    incidents = [
        {"step": i.step, "left": i.left, "joined": i.joined, "samples": i.samples}
        for i in (e.data for e in run.events if e.kind == "incident")
    ]
    run.close()
    return {
        "values": ended,
        "first": first,
        "steps": run.step,
        "members": run.members.ranks,
        "incidents": incidents,
    }


class Note(NamedTuple):
    """A rank computes these samples for a step, or has taken that."""

    rank: int
    formation: int
    epoch: int
    step: int
    taken: bool
    samples: list[int]


def write_down(notes: Path, note: Note) -> None:
    """In one write, so that a killed one leaves a whole line or none."""
    with (notes / f"{note.rank}").open("ab", buffering=0) as file:
        os.write(file.fileno(), json.dumps(note).encode() + b"\n")


def noted(notes: Path) -> Iterator[Note]:
    for file in sorted(notes.iterdir()):
        for line in file.read_text().splitlines():
            yield Note(*json.loads(line))


def times_used(notes: Path, epoch: int, *, by_all: bool = False) -> Counter[int]:
    """How often each sample was used in an epoch: in the steps that its own rank has taken; or, if
    a step is of all ranks, in those that any has, since it has all ranks' samples then."""
    listed = [note for note in noted(notes) if note.epoch == epoch]
    taken = {(note.formation, note.step) for note in listed if note.taken}
    return Counter(
        sample
        for note in listed
        if note.taken != by_all and (note.formation, note.step) in taken
        for sample in note.samples
    )


def main(sync: str, size: int, folder: Path, notes: Path, epochs: int) -> None:
    """The whole job in a process of its own, which tells what came of it."""

    def work(rank: int) -> dict[str, Any]:
        return train(sync, notes, folder=folder, save=True, epochs=epochs)

    print(json.dumps(on_ranks(size, work)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
