"""Under plans that wait for nobody: is every gradient counted as often as the plan says?

Every rank has a counter among the parameters, which its gradients raise by one each (`job.py`). So
whoever holds parameters knows which gradients are in them.

    asp   each gradient counts once: with every step that a rank commits its own counter goes up by
          one, whatever happens to others or to the server. No counter is ever above what was sent.
          Only what a rank had sent before it died, or was left out, may be lost.
    lgc   of N gradients those of the first k count N/k now, and of the others those that come by
          the next step (N-k)/l of it each, if they are l, less (N-k)/k of each of the k; the rest
          never do. So each that was computed is counted now, late or never, and as often in all:

              counters(t) - counters(t-1) = N/k 1_U + [l > 0] (N-k')/N (N/l 1_L - N/k' 1_U')

          with U the first k of step t, U' the first k' of step t-1, and L the l late ones of that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations

from thalweg.chaos.history import Commit, Ended, History, Sent, Starved, Violation
from thalweg.chaos.recovery_times import FaultTimes

SAMPLE_COUNT_TOLERANCE = 1e-6
FAULT_LINGER_SECONDS = 3.0  # seconds after a fault is over in which it may still be felt
Ranks = frozenset[int]


# asp


def once_each(history: History) -> list[Violation]:
    """The gradients of every rank, under `asp`."""
    sent = _sent(history)
    found = []
    for last, commit in history.successive():
        for rank, count in enumerate(commit.counted):
            most = bisect_right(sent[rank], (commit.time, 1 << 62))
            if count > most + SAMPLE_COUNT_TOLERANCE:
                text = f"{count:g} gradients of rank {rank} are applied, and {most} were sent"
                found.append(_violation(commit, text))
        if last is None or history.came_in(last, commit):
            continue
        rose = commit.counted[commit.rank] - last.counted[last.rank]
        if abs(rose - 1) > SAMPLE_COUNT_TOLERANCE:
            text = f"its gradients since step {last.step} count {rose:g} times, and it sent one"
            found.append(_violation(commit, text))
        if last.formation == commit.formation and any(
            now < then - SAMPLE_COUNT_TOLERANCE
            for now, then in zip(commit.counted, last.counted, strict=True)
        ):
            found.append(_violation(commit, f"gradients are lost that it had at step {last.step}"))
    if len({event.digest for event in history.of(Ended)}) > 1:
        text = "at the end, when all have met, ranks hold different parameters"
        found.append(Violation(check="counted", text=text))
    return found


def within_bounds(history: History, felt: Sequence[FaultTimes], staleness: int) -> list[Violation]:
    """Under `asp`, no rank gets further ahead of another that is there."""
    sent = _sent(history)
    found = []
    for commit in history.commits:
        if any(each.injected <= commit.time <= _over(each) for each in felt):
            continue
        for rank in commit.members:
            place = bisect_right(sent[rank], (commit.time, 1 << 62))
            steps = sent[rank][place - 1][1] + 1 if place else 0
            if commit.step > steps + staleness and not _is_away(history, rank, commit.time):
                text = f"rank {rank} has sent {steps}, which is more than {staleness} behind"
                found.append(_violation(commit, text))
    return found


def _over(each: FaultTimes) -> float:
    return float("inf") if each.recovered is None else each.recovered + FAULT_LINGER_SECONDS


def _is_away(history: History, rank: int, moment: float) -> bool:
    """Whether it was named, or couldn't run, shortly before."""
    named = any(
        rank in (*event.left, *event.joined)
        and event.noticed - FAULT_LINGER_SECONDS <= moment <= event.time + FAULT_LINGER_SECONDS
        for event in history.named
    )
    return named or any(
        event.rank == rank
        and event.time - event.seconds <= moment <= event.time + FAULT_LINGER_SECONDS
        for event in history.of(Starved)
    )


# lgc


def counted_now_or_next_step(history: History, first: Callable[[int], int]) -> list[Violation]:
    """The gradients of every step, under `lgc`; `first` is how many of so many are waited for."""
    computed = {(event.rank, event.step + 1) for event in history.of(Sent)}
    possible: dict[tuple[int, int], set[Ranks]] = {}  # of each step: who may have been the first
    found = []
    for commit, rose in _rises(history):
        ranks, step = commit.members, commit.step
        if (commit.formation, step) in possible:
            continue
        any_of_them = set(_choices(ranks, first(len(ranks))))
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
            text = f"gradients count {counts}, which isn't what was computed, now or late"
            found.append(_violation(commit, text))
        possible[commit.formation, step] = used or any_of_them
    return found


def _rises(history: History) -> Iterator[tuple[Commit, list[float]]]:
    """What each step that a process has taken after another added to the counters."""
    for last, commit in history.successive():
        if last and commit.step == last.step + 1 and not history.came_in(last, commit):
            pairs = zip(commit.counted, last.counted, strict=True)
            yield commit, [now - then for now, then in pairs]


def _is_explained(
    rose: Sequence[float], ranks: Collection[int], used: Ranks, before: Ranks, could: Ranks
) -> bool:
    """Whether the gradients of `used` count now, and late ones of those who `could` be, where those
    of `before` had counted."""
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


def _choices(ranks: Sequence[int], least: int) -> Iterator[Ranks]:
    for number in range(least, len(ranks) + 1):
        yield from map(frozenset, combinations(ranks, number))


# Both


def _sent(history: History) -> dict[int, list[tuple[float, int]]]:
    """When each rank sent the gradients after which steps."""
    sent: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in history.of(Sent):
        sent[event.rank].append((event.time, event.step))
    for of_rank in sent.values():
        of_rank.sort()
    return sent


def _violation(commit: Commit, text: str) -> Violation:
    where = f"rank {commit.rank} after step {commit.step} of formation {commit.formation}"
    return Violation(check="counted", text=f"{where}: {text}")
