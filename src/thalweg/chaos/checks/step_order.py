"""Is no step lost, or applied twice?

A process takes step after step. Where it leaves one out or takes one again it must have taken over
another's state: then the members have met anew in between, or, under a code, it has caught up. And
who goes back has been let in again, which is told.

The samples of a step's members are together the batch, each of them once. Where a step that was
broken off isn't redone, since every rank keeps its own, those of who left are lost, which is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from thalweg.chaos.history import Commit, History, Violation


def in_order(history: History, *, jumps: bool = False) -> list[Violation]:
    """`jumps`: whether ranks may leave steps out that they got from others, as under a code."""
    found = []
    for before, commit in history.successive():
        if before is None or commit.step == before.step + 1:
            continue
        met = commit.formation > before.formation
        forward = commit.step > before.step
        if forward and (met or jumps):
            continue
        if not forward and met and history.came_in(before, commit):
            continue
        what = "left out" if forward else "took again"
        found.append(
            Violation(
                check="steps",
                text=f"rank {commit.rank} {what} steps between {before.step} (formation "
                f"{before.formation}) and {commit.step} (formation {commit.formation}), and "
                "nothing says that it took over another's state",
            )
        )
    return found


def batches_whole(history: History, batch: int, foretold: Mapping[int, int]) -> list[Violation]:
    """`foretold` are the checksums of the batches, by step. The first of a formation may lack as
    many samples as were told to be lost with those who left."""
    lost: dict[int, int] = defaultdict(int)
    for event in history.named:
        lost[event.formation] = max(lost[event.formation], event.lost)
    taken: dict[tuple[int, int], list[Commit]] = defaultdict(list)
    first: dict[int, int] = {}
    for commit in history.commits:
        if commit.began_in == commit.formation:
            taken[commit.formation, commit.step].append(commit)
            first[commit.formation] = min(commit.step, first.get(commit.formation, commit.step))
    found = []
    for (formation, step), commits in taken.items():
        if len(commits) != len(commits[0].members):
            continue  # one of them died before it could tell
        samples = sum(commit.samples for commit in commits)
        if step == first[formation] and 0 < batch - samples <= lost[formation]:
            continue
        if samples != batch or sum(c.checksum for c in commits) != foretold[step]:
            found.append(
                Violation(
                    check="samples",
                    text=f"the members of formation {formation} took {samples} samples at step "
                    f"{step}, which aren't the batch of {batch}",
                )
            )
    return found
