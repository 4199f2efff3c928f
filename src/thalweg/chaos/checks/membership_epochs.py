"""Checks that there is one group of members at a time.

The number of a membership epoch identifies one set of members. A process never returns to an
earlier epoch, and two successive epochs have members in common, since at least half of the members
continue. An evicted rank may finish the steps in progress; after that it commits nothing until it
has joined again. And each rank is one process at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from thalweg.chaos.history import Commit, History
from thalweg.errors import ranks_text


def one_epoch_at_a_time(history: History, under_way: int) -> Iterator[str]:
    """A rank takes at most `under_way` steps without a message from the others."""
    commits = sorted(history.commits, key=lambda commit: commit.time)
    first: dict[int, Commit] = {}  # of each epoch
    for commit in commits:
        first.setdefault(commit.formation, commit)
    yield from dict.fromkeys(_ambiguous(commits, first))
    yield from _disjoint(first)
    yield from _turned_back(commits)
    yield from _evicted(commits, first, under_way)


def _ambiguous(commits: list[Commit], first: dict[int, Commit]) -> Iterator[str]:
    for commit in commits:
        epoch, members = commit.formation, first[commit.formation].members
        if commit.members != members:
            yield (
                f"membership epoch {epoch} consists of {ranks_text(members)} and also of "
                f"{ranks_text(commit.members)}"
            )
        if commit.rank not in commit.members:
            yield f"rank {commit.rank} commits in membership epoch {epoch} and isn't a member"


def _disjoint(first: dict[int, Commit]) -> Iterator[str]:
    for before, after in pairwise(sorted(first)):
        one, other = first[before].members, first[after].members
        if not set(one) & set(other):
            yield (
                f"membership epochs {before} ({ranks_text(one)}) and {after} ({ranks_text(other)}) "
                "have no member in common"
            )


def _turned_back(commits: list[Commit]) -> Iterator[str]:
    """Commits of processes in an earlier epoch, or after another process took their rank."""
    last: dict[int, Commit] = {}  # of each rank
    replaced: set[tuple[int, int, int]] = set()
    for commit in commits:
        before = last.get(commit.rank, commit)
        last[commit.rank] = commit
        if _process(before) != _process(commit):
            replaced.add(_process(before))
        if _process(commit) in replaced:
            yield f"rank {commit.rank} commits step {commit.step} in a process that was replaced"
        elif commit.formation < before.formation:
            yield (
                f"rank {commit.rank} returns from membership epoch {before.formation} to "
                f"{commit.formation} at step {commit.step}"
            )


def _evicted(commits: list[Commit], first: dict[int, Commit], under_way: int) -> Iterator[str]:
    alone: Counter[tuple[int, int]] = Counter()
    for commit in commits:
        rank, own = commit.rank, commit.formation
        later = [n for n in first if n > own and first[n].time < commit.time]
        joined = [n for n in later if rank in first[n].members]
        alone[rank, own] += bool(later)
        if joined or alone[rank, own] == under_way + 1:
            what = f"it had joined epoch {joined[0]}" if joined else "its eviction"
            yield f"rank {rank} commits step {commit.step} in membership epoch {own} after {what}"


def _process(commit: Commit) -> tuple[int, int, int]:
    return commit.rank, commit.life, commit.process
