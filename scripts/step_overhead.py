"""What synchronising adds to a training step of about 5 ms: prints one line of JSON.

    thalweg run --workers 2 scripts/step_overhead.py

Every worker trains two equal models by turns, a block of steps each: one alone, the other attached
under `ring`. Both see the same noise of the machine, so their ratio says what a step costs more.
`scripts/bench-against` runs this file on several revisions: it uses nothing but what all have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import nn

import thalweg

WIDTH, LAYERS, BATCH = 256, 8, 160  # about 5 ms a step on one core
BLOCK = 10  # steps of one model in a row; the first of each isn't counted


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    inputs = torch.ones(BATCH, WIDTH)

    def step() -> float:
        began = perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return perf_counter() - began

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=20, metavar="N", help="of each model")
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in "ab"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    run = thalweg.attach(models[1], optimizers[1], sync="ring")  # former revisions, too
    alone, attached = (step_of(*pair) for pair in zip(models, optimizers, strict=True))
    seconds: tuple[list[float], list[float]] = ([], [])
    for block in range(blocks + 1):
        for index, step in enumerate((alone, attached)):
            taken = [step() for _ in range(BLOCK)]
            if block:  # the first pair of blocks sets things up
                seconds[index].extend(taken[1:])
    rank = run.rank
    run.close()
    if rank == 0:
        plain, synchronised = map(median, seconds)
        line = {"alone": plain, "attached": synchronised, "ratio": synchronised / plain}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
