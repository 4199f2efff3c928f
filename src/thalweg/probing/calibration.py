"""Calibration: the rates of the links, what messages, bytes and crowds cost, and the compressors,
measured by all ranks of a run together in a few seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from thalweg.errors import BETWEEN_STEPS, NotFitted, RunError
from thalweg.facts import (
    Cluster,
    CodecCost,
    Machine,
    Size,
    Tensor,
    format_cluster,
    format_machine,
    parse_cluster,
    parse_machine,
)
from thalweg.plan import Choice, Settings
from thalweg.predict.fitting import fit
from thalweg.predict.trial import Trial
from thalweg.probing.codecs import measure_codecs
from thalweg.probing.quick import quick_survey
from thalweg.probing.together import Claim, Together
from thalweg.probing.trials import run_trials
from thalweg.probing.worker import LEADER
from thalweg.runtime import Alarm, Engine, World

USUAL_BUCKET = Settings().bucket
FITTED = "fitted"  # in the store
Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and of how much (0: not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """`cluster` has the latency that messages have in use; `surveyed` is the one that the trials'
    schedules were made for."""

    cluster: Cluster
    machine: Machine
    surveyed: Cluster
    trials: tuple[Trial, ...]


def calibrate(
    world: World,
    alarm: Alarm,
    engine: Engine,
    declared: Cluster | None,
    *,
    tensors: Sequence[Tensor] = (),
    codecs: Sequence[Choice] = (),
    native: bool = False,
    bucket: Size = USUAL_BUCKET,
    name: str = "calibration",
    step: int = 0,
    claim: Claim | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Calibrated:
    """The same on all ranks, which call this together, at a moment at which nothing else is sent.

    declared   its racks are kept; a whole probe finds them if it is None
    codecs     compressors that are tried on such `tensors`
    bucket     the largest that they will travel in
    native     try the backend's own all-reduce too, where Gloo connects
    name       of a part of the store that nothing else uses: another one each time
    step, claim  number the rounds, on an engine that trains: `Clock.step`, `Clock.claim_between`

    Raises NotFitted on all ranks if what was measured makes no sense together.
    """
    room = world.room(name)
    surveyed = quick_survey(room, alarm, declared, counted=lambda done: progress("links", done, 0))
    numbers = count(BETWEEN_STEPS)
    together = Together(engine, surveyed, claim or (lambda: next(numbers)), step)
    trials = run_trials(
        room,
        together,
        surveyed,
        native=native,
        typical=min(bucket.nbytes, sum(tensor.nbytes for tensor in tensors)) or None,
        progress=lambda done, total: progress("trials", done, total),
    )
    progress("compressors", 0, len(codecs))
    costs = measure_codecs(together, codecs, tensors)
    progress("compressors", len(codecs), len(codecs))
    if world.rank == LEADER:  # one is enough, and then all have the same to the last bit
        room.put(FITTED, json.dumps(_fitted(surveyed, trials, costs)))
    said = room.wait_for(FITTED, room.timeout, alarm)
    if said is None:
        raise RunError(f"rank {LEADER} hasn't fitted what was measured", "allow more time")
    found = json.loads(said)
    if "problem" in found:
        raise NotFitted(found["problem"], "measure again, when less else runs there")
    return Calibrated(
        cluster=parse_cluster(found["cluster"]),
        machine=parse_machine(found["machine"]),
        surveyed=surveyed,
        trials=tuple(trials),
    )


def _fitted(
    surveyed: Cluster, trials: Sequence[Trial], codecs: Mapping[str, CodecCost]
) -> dict[str, str]:
    """As files, or the problem: nobody else would know of one, and all wait for this."""
    try:
        found = fit(surveyed, trials)
        machine = replace(found.machine, codecs=codecs)
        return {"cluster": format_cluster(found.cluster), "machine": format_machine(machine)}
    except Exception as error:
        return {"problem": f"what was measured can't be fitted ({type(error).__name__}: {error})"}
