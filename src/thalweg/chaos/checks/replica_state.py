"""Checks that the replicas keep the plan's promise after every committed step.

    promise             the parameters after a step
    exact               bitwise identical on all members, and to those of a single process
    lossy               bitwise identical on all members
    eventual            they differ; averaging preserves their mean, and they stay close

Under an exact plan the result of a step doesn't depend on the members that took it, so a step that
others repeated, after one member had committed it and failed, is checked too. Under a lossy plan
only members of the same membership epoch are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from thalweg.chaos.history import Commit, Ended, History
from thalweg.facts import grouped

REPLICA_MEAN_TOLERANCE = 1e-4  # of a mean, relative to the largest term
MAX_REPLICA_DISTANCE_FACTOR = 20.0  # relative to the median distance before averaging
MIN_REPLICA_DISTANCE_STEPS = 5  # for that median


def equal(history: History) -> Iterator[str]:
    """Members hold identical bits after every step of an epoch, and all ranks do at the end."""
    digests = {
        f"after step {step} of membership epoch {epoch}": {c.rank: c.digest for c in commits}
        for (epoch, step), commits in _by_step(history).items()
    }
    ended = sorted(history.of(Ended), key=lambda record: record.rank)
    digests["at the end"] = {record.rank: record.digest for record in ended}
    for when, of_ranks in digests.items():
        if len(set(of_ranks.values())) > 1:
            yield f"{when}: {', '.join(f'rank {r} {d}' for r, d in of_ranks.items())}"


def as_expected(history: History, expected: Mapping[int, str]) -> Iterator[str]:
    """Parameters equal those of a single process with the same batches; only the first difference
    of each process counts, since all later ones follow from it."""
    wrong: set[tuple[int, int]] = set()
    for commit in sorted(history.commits, key=lambda c: (c.step, c.time)):
        process = commit.rank, commit.life
        if commit.digest != expected[commit.step] and process not in wrong:
            wrong.add(process)
            yield (
                f"rank {commit.rank} holds {commit.digest} after step {commit.step} of membership "
                f"epoch {commit.formation}, expected {expected[commit.step]}: a step or a sample "
                "was lost or counted twice"
            )


def mean_preserved(history: History) -> Iterator[str]:
    """Every averaging that no change of members interrupted preserves the mean."""
    for (epoch, step), commits in _by_step(history).items():
        interrupted = any(c.interrupted or c.began_in != epoch for c in commits)
        if interrupted or not _is_complete(commits):
            continue
        sums = zip(_sums(commits, "before"), _sums(commits, "after"), strict=True)
        for before, after in sums:
            scale = max(1.0, *map(abs, before))
            if abs(sum(after) - sum(before)) > REPLICA_MEAN_TOLERANCE * scale * len(commits):
                yield (
                    f"averaging after step {step} of membership epoch {epoch} changed the sum over "
                    f"ranks from {sum(before):.6g} to {sum(after):.6g}"
                )
                break


def close(history: History) -> Iterator[str]:
    """No replica is ever many times farther from the mean than replicas are before averaging. The
    distance after averaging is no measure: some plans make some numbers of replicas equal."""
    complete = {
        place: commits
        for place, commits in _by_step(history).items()
        if _is_complete(commits) and len(commits) > 1
    }
    if len(complete) < MIN_REPLICA_DISTANCE_STEPS:
        return
    usual = median(_max_distance(commits, "before") for commits in complete.values())
    bound = MAX_REPLICA_DISTANCE_FACTOR * max(usual, 1e-9)
    for (epoch, step), commits in complete.items():
        distance = _max_distance(commits, "after")
        if distance > bound:
            yield (
                f"after step {step} of membership epoch {epoch} a rank is {distance:.3g} from the "
                f"mean (limit {bound:.3g}: {MAX_REPLICA_DISTANCE_FACTOR:g} times the median "
                "distance)"
            )


def _by_step(history: History) -> dict[tuple[int, int], list[Commit]]:
    return grouped(((commit.formation, commit.step), commit) for commit in history.commits)


def _is_complete(commits: list[Commit]) -> bool:
    """True if all members have committed the step."""
    return len(commits) == len(commits[0].members)


def _max_distance(commits: list[Commit], name: str) -> float:
    """The largest distance of a replica from the mean of all, in the signed sums."""
    columns = _sums(commits, name)
    return max(abs(value - sum(column) / len(column)) for column in columns for value in column)


def _sums(commits: list[Commit], name: str) -> list[tuple[float, ...]]:
    """The signed sums of a step, each over all ranks."""
    return list(zip(*(getattr(commit, name) for commit in commits), strict=True))
