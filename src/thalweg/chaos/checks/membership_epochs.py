"""Is there one group of members at a time?

The number of a formation stands for one set of members. Formations follow one another: a process
never goes back to an earlier one, and two in succession have members in common, since at least half
of the members go on. A rank that is left out may end the steps that were under way then; after that
it commits nothing until it has joined again. And each rank is one process at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from thalweg.chaos.history import Commit, History, Violation

MEMBERS_CHECK_NAME = "members"


def one_epoch_at_a_time(history: History, under_way: int) -> list[Violation]:
    """`under_way` steps are the most that a rank takes without a word from the others."""
    commits = sorted(history.commits, key=lambda commit: commit.time)
    first: dict[int, Commit] = {}  # of each formation
    for commit in commits:
        first.setdefault(commit.formation, commit)
    texts = [
        *dict.fromkeys(_two_sets(commits, first)),
        *_apart(first),
        *_turned_back(commits),
        *_left_out(commits, first, under_way),
    ]
    return [Violation(check=MEMBERS_CHECK_NAME, text=text) for text in texts]


def _two_sets(commits: list[Commit], first: dict[int, Commit]) -> Iterator[str]:
    for commit in commits:
        number, members = commit.formation, first[commit.formation].members
        if commit.members != members:
            yield f"formation {number} is {_ranks(members)}, and also {_ranks(commit.members)}"
        if commit.rank not in commit.members:
            yield f"rank {commit.rank} commits in formation {number}, and isn't a member of it"


def _apart(first: dict[int, Commit]) -> Iterator[str]:
    for before, after in pairwise(sorted(first)):
        one, other = first[before].members, first[after].members
        if not set(one) & set(other):
            yield (
                f"formation {before} of {_ranks(one)} and formation {after} of {_ranks(other)} "
                "follow each other, and have no member in common"
            )


def _turned_back(commits: list[Commit]) -> Iterator[str]:
    """Processes that commit in an earlier formation again, or after another took their rank."""
    last: dict[int, Commit] = {}  # of each rank
    replaced: set[tuple[int, int, int]] = set()
    for commit in commits:
        before = last.get(commit.rank, commit)
        last[commit.rank] = commit
        if _process(before) != _process(commit):
            replaced.add(_process(before))
        if _process(commit) in replaced:
            yield f"rank {commit.rank} commits step {commit.step} by a process that was replaced"
        elif commit.formation < before.formation:
            yield (
                f"rank {commit.rank} goes back from formation {before.formation} to "
                f"{commit.formation} at step {commit.step}"
            )


def _left_out(commits: list[Commit], first: dict[int, Commit], under_way: int) -> Iterator[str]:
    alone: Counter[tuple[int, int]] = Counter()
    for commit in commits:
        rank, own = commit.rank, commit.formation
        later = [n for n in first if n > own and first[n].time < commit.time]
        came = [n for n in later if rank in first[n].members]
        alone[rank, own] += bool(later)
        if came or alone[rank, own] == under_way + 1:
            what = f"had come to formation {came[0]}" if came else "was left out"
            yield f"rank {rank} commits step {commit.step} in formation {own} after it {what}"


def _process(commit: Commit) -> tuple[int, int, int]:
    return commit.rank, commit.life, commit.process


def _ranks(members: tuple[int, ...]) -> str:
    return f"ranks {', '.join(map(str, members))}"
