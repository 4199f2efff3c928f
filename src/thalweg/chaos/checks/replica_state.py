"""Are the replicas what the plan promises after every committed step?

    promise             the parameters after a step
    exact               the same bits on all members, and those of one process that trains alone
    lossy               the same bits on all members
    eventual            they differ; averaging leaves their mean as it was, and they stay close

Under an exact plan it doesn't matter who took a step together: the result is the same, so a step
that was redone by others, after one member had committed it and died, is checked too. Under a
lossy one only those are compared that were in the same formation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from thalweg.chaos.history import Commit, Ended, History, Violation

REPLICA_MEAN_TOLERANCE = 1e-4  # of a mean, relative to the sums that make it up
# Times the distance from the mean to which a step usually takes a replica.
MAX_REPLICA_DISTANCE_FACTOR = 20.0
MIN_REPLICA_DISTANCE_STEPS = 5  # steps that tell what is usual


def equal(history: History) -> list[Violation]:
    """The same bits on all members of a formation, after every step, and at the end on all."""
    found = []
    for (formation, step), commits in _together(history.commits).items():
        if len({commit.digest for commit in commits}) > 1:
            told = ", ".join(f"rank {c.rank} {c.digest}" for c in commits)
            found.append(Violation("equal", f"after step {step} of formation {formation}: {told}"))
    last = {event.rank: event.digest for event in history.of(Ended)}
    if len(set(last.values())) > 1:
        told = ", ".join(f"rank {rank} {digest}" for rank, digest in sorted(last.items()))
        found.append(Violation("equal", f"at the end: {told}"))
    return found


def as_expected(history: History, foretold: Mapping[int, str]) -> list[Violation]:
    """What one process holds that trains alone on the same batches; the first departure of each
    process, since all later steps follow from it."""
    found = []
    wrong: set[tuple[int, int]] = set()
    for commit in sorted(history.commits, key=lambda c: (c.step, c.time)):
        who = commit.rank, commit.life
        if commit.digest != foretold[commit.step] and who not in wrong:
            wrong.add(who)
            found.append(
                Violation(
                    "foretold",
                    f"rank {commit.rank} holds {commit.digest} after step {commit.step} of "
                    f"formation {commit.formation}, and {foretold[commit.step]} is right: a step "
                    "or a sample was lost, or counted twice",
                )
            )
    return found


def mean_preserved(history: History) -> list[Violation]:
    """By every averaging that no change of members broke off."""
    found = []
    for (formation, step), commits in _together(history.commits).items():
        if any(c.began_in != formation for c in commits) or not _complete(commits):
            continue
        for before, after in zip(
            _columns(commits, "before"), _columns(commits, "after"), strict=True
        ):
            scale = max(1.0, *map(abs, before))
            if abs(sum(after) - sum(before)) > REPLICA_MEAN_TOLERANCE * scale * len(commits):
                found.append(
                    Violation(
                        "mean",
                        f"averaging after step {step} of formation {formation} took the sum over "
                        f"ranks from {sum(before):.6g} to {sum(after):.6g}",
                    )
                )
                break
    return found


def close(history: History) -> list[Violation]:
    """No replica is ever many times as far from the mean as its own steps usually take it. What is
    usual after averaging would tell nothing: some plans make some numbers of replicas equal."""
    complete = {
        place: commits
        for place, commits in _together(history.commits).items()
        if _complete(commits) and len(commits) > 1
    }
    if len(complete) < MIN_REPLICA_DISTANCE_STEPS:
        return []
    distances = {place: _farthest(commits, "after") for place, commits in complete.items()}
    own = median(_farthest(commits, "before") for commits in complete.values())
    bound = MAX_REPLICA_DISTANCE_FACTOR * max(own, 1e-9)
    return [
        Violation(
            "drift",
            f"after step {step} of formation {formation} a rank is {distance:.3g} from the mean, "
            f"and {bound:.3g} is {MAX_REPLICA_DISTANCE_FACTOR:g} times the usual",
        )
        for (formation, step), distance in distances.items()
        if distance > bound
    ]


def _together(commits: Iterable[Commit]) -> dict[tuple[int, int], list[Commit]]:
    found: dict[tuple[int, int], list[Commit]] = defaultdict(list)
    for commit in commits:
        found[commit.formation, commit.step].append(commit)
    return found


def _complete(commits: list[Commit]) -> bool:
    """All members told of it."""
    return len(commits) == len(commits[0].members)


def _farthest(commits: list[Commit], name: str) -> float:
    """The distance of a replica from the mean of all, in these sums."""
    columns = _columns(commits, name)
    return max(abs(value - sum(column) / len(column)) for column in columns for value in column)


def _columns(commits: list[Commit], name: str) -> list[tuple[float, ...]]:
    """One sum, over the ranks."""
    return list(zip(*(getattr(commit, name) for commit in commits), strict=True))
