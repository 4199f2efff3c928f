"""A run's steps as scalars for TensorBoard: one TensorBoard run per rank, by the run's clock."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from thalweg.errors import UsageError
from thalweg.observe.records import StepRecord
from thalweg.observe.timeline import Timeline
from thalweg.report.trace import mbit

EVENTS = "events.out.tfevents.*"


def scalars(step: StepRecord) -> dict[str, float]:
    return {
        "step/seconds": step.seconds,
        "step/computing": step.computing,
        "step/exposed": step.exposed,
        "step/hidden": step.hidden,
        "step/encoding": sum(record.ended - record.began for record in step.encodings),
        "step/waiting": step.settled,
        "network/mbit_per_second": mbit(step),
    }


def write_scalars(folder: Path, run: Timeline) -> None:
    """Write the scalars into folders `rank-0003`, which must be new: TensorBoard would mix them."""
    made = writer_class()
    places = {rank: folder / f"rank-{rank:04}" for rank in run.rank_timelines}
    for place in places.values():
        if any(place.glob(EVENTS)):
            raise UsageError(f"{place} has events already", "name another folder, or remove it")
    for rank, place in places.items():
        try:
            writer = made(str(place))
            for step in run.rank_timelines[rank].steps:
                for name, value in scalars(step).items():
                    writer.add_scalar(name, value, step.step, walltime=step.end)
            writer.close()
        except OSError as reason:
            raise UsageError(
                f"can't write {place}: {reason.strerror}", "name another folder"
            ) from None


def writer_class() -> Any:
    """TensorBoard's writer; raises UsageError if the package is absent."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from its dependencies
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "scalars for TensorBoard need the package tensorboard",
            "pip install 'thalweg[tensorboard]'",
        ) from None
    return SummaryWriter
