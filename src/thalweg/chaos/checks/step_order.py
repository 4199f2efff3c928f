"""Checks that no step and no sample is lost or applied twice.

A process takes one step after the other. If it skips or repeats steps it must have received another
rank's state: then its membership epoch has changed in between, or it has caught up in a coded tree.
A process that repeats steps must have joined again, which the history records.

The samples of a step's members are together the batch, each once. Where an interrupted step isn't
repeated, since every rank keeps its own result, the samples of ranks that left are lost, and the
history records how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thalweg.chaos.history import History
from thalweg.facts import grouped


def in_order(history: History, *, jumps: bool = False) -> Iterator[str]:
    """Processes take steps in order. `jumps` is True if ranks may skip steps whose results others
    sent them, as in a coded tree."""
    for before, commit in history.successive():
        if before is None or commit.step == before.step + 1:
            continue
        epoch_changed = commit.formation > before.formation
        forward = commit.step > before.step
        if forward and (epoch_changed or jumps):
            continue
        if not forward and epoch_changed and history.came_in(before, commit):
            continue
        what = "skipped" if forward else "repeated"
        yield (
            f"rank {commit.rank} {what} steps between {before.step} (membership epoch "
            f"{before.formation}) and {commit.step} (membership epoch {commit.formation}), and no "
            "record shows that it received another rank's state"
        )


def batches_whole(history: History, batch: int, checksums: Mapping[int, int]) -> Iterator[str]:
    """`checksums` are those of the batches, by step. The first step of an epoch may lack as many
    samples as were recorded as lost with the ranks that left."""
    lost = grouped((record.formation, record.lost) for record in history.named)
    taken = grouped(
        ((commit.formation, commit.step), commit)
        for commit in history.commits
        if commit.began_in == commit.formation
    )
    first = {epoch: min(steps) for epoch, steps in grouped(taken).items()}
    for (epoch, step), commits in taken.items():
        if len(commits) != len(commits[0].members):
            continue  # one of them failed before it could report
        samples = sum(commit.samples for commit in commits)
        if step == first[epoch] and 0 < batch - samples <= max(lost.get(epoch, [0])):
            continue
        if samples != batch or sum(c.checksum for c in commits) != checksums[step]:
            yield (
                f"the members of membership epoch {epoch} read {samples} samples at step {step}, "
                f"which aren't the batch of {batch}"
            )
