"""Checks how often gradients count under plans that don't wait for every rank.

Every rank has a counter among the parameters that each of its gradients raises by one
(`exact_job.py`), so parameters show which gradients they contain.

    asp   Each gradient counts once: with every step that a rank commits its own counter rises by
          one, whatever happens to other ranks or to the server. No counter ever exceeds the number
          of gradients sent. Only what a rank had sent before it failed or was evicted may be lost.
    lgc   Of N gradients the first k count N/k at once. Of the others the l that arrive by the next
          step count (N-k)/l each, less (N-k)/k of each of the k; the rest never count. So each
          gradient counts at once, one step later or never, and all have the same total weight:

              counters(t) - counters(t-1) = N/k 1_U + [l > 0] (N-k')/N (N/l 1_L - N/k' 1_U')

          with U the first k of step t, U' the first k' of step t-1, and L the l late ones of t-1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations
from operator import attrgetter

from thalweg.chaos.history import Commit, Ended, History, Sent, Starved
from thalweg.chaos.recovery_times import FaultTimes
from thalweg.facts import grouped

SAMPLE_COUNT_TOLERANCE = 1e-6
FAULT_LINGER_SECONDS = 3.0  # after recovery, in which a fault may still have effects
Ranks = frozenset[int]


# asp


def once_each(history: History) -> Iterator[str]:
    """Each gradient of every rank counts once, under `asp`."""
    sent = _sent(history)
    for last, commit in history.successive():
        for rank, count in enumerate(commit.counted):
            most = bisect_right(sent[rank], (commit.time, 1 << 62))
            if count > most + SAMPLE_COUNT_TOLERANCE:
                text = f"{count:g} gradients of rank {rank} are applied, but {most} were sent"
                yield f"{_after(commit)}: {text}"
        if last is None or history.came_in(last, commit):
            continue
        rose = commit.counted[commit.rank] - last.counted[last.rank]
        if abs(rose - 1) > SAMPLE_COUNT_TOLERANCE:
            text = f"one gradient was sent since step {last.step}, and it counts {rose:g} times"
            yield f"{_after(commit)}: {text}"
        if last.formation == commit.formation and any(
            now < then - SAMPLE_COUNT_TOLERANCE
            for now, then in zip(commit.counted, last.counted, strict=True)
        ):
            yield f"{_after(commit)}: gradients applied at step {last.step} are lost"
    if len({record.digest for record in history.of(Ended)}) > 1:
        yield "after the final consensus ranks hold different parameters"


def within_bounds(history: History, faults: Sequence[FaultTimes], staleness: int) -> Iterator[str]:
    """No rank gets more than `staleness` steps ahead of another member, under `asp`."""
    sent = _sent(history)
    for commit in history.commits:
        if any(times.injected <= commit.time <= _over(times) for times in faults):
            continue
        for rank in commit.members:
            place = bisect_right(sent[rank], (commit.time, 1 << 62))
            steps = sent[rank][place - 1][1] + 1 if place else 0
            if commit.step > steps + staleness and not _is_away(history, rank, commit.time):
                text = f"rank {rank} has sent {steps} gradients, more than {staleness} behind"
                yield f"{_after(commit)}: {text}"


def _over(times: FaultTimes) -> float:
    return float("inf") if times.recovered is None else times.recovered + FAULT_LINGER_SECONDS


def _is_away(history: History, rank: int, time: float) -> bool:
    """True if the rank left, joined or got no processor time around this time."""
    named = any(
        rank in (*record.left, *record.joined)
        and record.noticed - FAULT_LINGER_SECONDS <= time <= record.time + FAULT_LINGER_SECONDS
        for record in history.named
    )
    return named or any(
        record.rank == rank
        and record.time - record.seconds <= time <= record.time + FAULT_LINGER_SECONDS
        for record in history.of(Starved)
    )


# lgc


def counted_now_or_next_step(history: History, first: Callable[[int], int]) -> Iterator[str]:
    """Gradients of every step count as the formula says, under `lgc`; of n ranks a step waits for
    `first(n)`."""
    computed = {(record.rank, record.step + 1) for record in history.of(Sent)}
    possible: dict[tuple[int, int], set[Ranks]] = {}  # of each step: the ranks that may be U
    for commit, rose in _rises(history):
        ranks, step = commit.members, commit.step
        if (commit.formation, step) in possible:
            continue
        any_of_them = {
            frozenset(chosen)
            for number in range(first(len(ranks)), len(ranks) + 1)
            for chosen in combinations(ranks, number)
        }
        now, then = (
            frozenset(rank for rank in ranks if (rank, number) in computed)
            for number in (step, step - 1)
        )
        used = {
            chosen
            for before in possible.get((commit.formation, step - 1), any_of_them)
            for chosen in any_of_them
            if chosen <= now and _is_explained(rose, ranks, chosen, before, then - before)
        }
        if not used:
            counts = ", ".join(f"rank {rank} {count:g}" for rank, count in enumerate(rose))
            text = f"gradients count {counts}, which no set of first and late ranks explains"
            yield f"{_after(commit)}: {text}"
        possible[commit.formation, step] = used or any_of_them


def _rises(history: History) -> Iterator[tuple[Commit, list[float]]]:
    """Each commit after a process's previous step, with the rise of the counters."""
    for last, commit in history.successive():
        if last and commit.step == last.step + 1 and not history.came_in(last, commit):
            pairs = zip(commit.counted, last.counted, strict=True)
            yield commit, [now - then for now, then in pairs]


def _is_explained(
    rose: Sequence[float], ranks: Collection[int], used: Ranks, before: Ranks, could: Ranks
) -> bool:
    """True if the counters rose as the formula says with U = `used`, U' = `before` and some L among
    the ranks that `could` be late."""
    rest, of = len(ranks) - len(before), len(ranks)
    for late in range(len(could) + 1):
        share = rest / of if late else 0.0
        left = [
            count - of / len(used) * (rank in used) + share * of / len(before) * (rank in before)
            for rank, count in enumerate(rose)
        ]
        each = share * of / late if late else 0.0
        are_late = {
            rank for rank in could if late and abs(left[rank] - each) < SAMPLE_COUNT_TOLERANCE
        }
        others = [value for rank, value in enumerate(left) if rank not in are_late]
        if len(are_late) == late and all(abs(value) < SAMPLE_COUNT_TOLERANCE for value in others):
            return True
    return False


# Both


def _sent(history: History) -> dict[int, list[tuple[float, int]]]:
    """The gradients that each rank sent: their times and the steps before them, in order."""
    in_order = sorted(history.of(Sent), key=attrgetter("time", "step"))
    sent = grouped((record.rank, (record.time, record.step)) for record in in_order)
    return defaultdict(list, sent)


def _after(commit: Commit) -> str:
    return f"rank {commit.rank} after step {commit.step} of membership epoch {commit.formation}"
