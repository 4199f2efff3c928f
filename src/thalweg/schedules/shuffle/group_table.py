"""The table of averaging groups at each step, as a function of the step alone.

Contended links (`contended_links.py`) average in pairs that take several steps: a window. In it the
two members are in no other group, and no rank waits for them.

    a slow rack (Figure 5)   a delegate of it and one of another rack, both of them rotating; the
                             other ranks of the rack average among themselves
    a slow host (Figure 6)   it and another host of its rack in rotation; it is never a delegate

Windows last 2, 4 or 8 steps and begin at multiples of that, so they nest, and the ranks in them are
known from the step alone. Longer ones choose first. All others average as usual (Figure 4): the
delegates of racks, all together or in pairs, and the rest of each rack.

A table is adopted only if the union of its groups over one period is connected, so that information
of every rank reaches all others, and if no rank is without a group for more than 8 steps. Otherwise
(all racks of two, several slow hosts in a small rack), every second step is left to whole racks,
windows are made shorter, and at last no link is treated as contended.

Figures are those of DS-Sync (Wang et al., 2022).

Pairs rotate by the circle method: every pair occurs once in as few turns as possible. One member
has a fixed seat, the others move by one seat at each turn, and opposite seats form pairs. With an
odd number the fixed seat is empty, and the opposite member is in no pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm
from typing import TypeVar

from thalweg.schedules.group import Group
from thalweg.schedules.shuffle.contended_links import MAX_WINDOW_STEPS, ContendedLinks

MAX_EXAMINED_PERIOD_STEPS = 2048

Members = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AveragingGroup:
    """Members that average among themselves; the result is applied after `lasts` steps. Meanwhile
    they are in no other group, so the duration of the exchange doesn't affect the result."""

    group: Group
    lasts: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group.ranks


@lru_cache(maxsize=64)
def choose_table(group: Group) -> GroupTable:
    """The first sound table of the candidates for a group, the best first."""
    wanted = group.contended
    tables = [
        GroupTable(group, wanted.at_most(steps), whole_racks=whole_racks)
        for steps in (MAX_WINDOW_STEPS, MAX_WINDOW_STEPS // 2, 2, 1)
        for whole_racks in (False, True)
    ]
    return next((table for table in tables if table.is_sound), tables[-1])


@dataclass(frozen=True)
class GroupTable:
    """A table of averaging groups; with `whole_racks` whole racks average at every second step."""

    group: Group
    contention: ContendedLinks
    whole_racks: bool

    @property
    def is_sound(self) -> bool:
        """True if the groups connect all ranks, and no rank is alone for long."""
        steps = range(min(self.period, MAX_EXAMINED_PERIOD_STEPS))
        groups = ([members for members, _ in self.begin(step)] for step in steps)
        mixes = connected(self.group.ranks, groups)
        into_the_next = range(steps.stop + MAX_WINDOW_STEPS)
        return mixes and (
            not self.contention or self._longest_pause(into_the_next) <= MAX_WINDOW_STEPS
        )

    def _longest_pause(self, steps: range) -> int:
        """The most steps from one group of a rank to its next, from the beginning to its first, or
        from its last to the end."""
        last = dict.fromkeys(self.group.ranks, -1)
        pauses = [1]
        for step in steps:
            for members, _ in self.begin(step):
                for rank in members:
                    pauses.append(step - last[rank])
                    last[rank] = step
        return max(*pauses, *(steps.stop - step for step in last.values()))

    @property
    def period(self) -> int:
        racks = self.group.racks
        fast = [len(rack) - sum(map(self._is_slow, rack)) for rack in racks]
        shuffled = lcm(*map(len, racks), *(number for number in fast if number))
        between = circle_turns(len(self._near)) if self.contention.pairs else 1
        steps = (2 if self.whole_racks else 1) * lcm(shuffled, between)
        windows = [window * lcm(shuffled, circle_turns(len(racks))) for window in self._windows]
        rests = 2 * max(self._windows, default=1) if any(map(self._rests, racks)) else 1
        return lcm(steps, rests, *windows)

    def begin(self, step: int) -> Iterator[tuple[Members, int]]:
        """The groups that begin at this step, and the steps that each one lasts."""
        away: set[int] = set()
        for window in self._windows:
            for members in self._kept_apart(window, step // window, away):
                away.update(members)
                if step % window == 0:
                    yield members, window
        for members in self._usual(step, away):
            yield members, 1

    # Contended links

    @cached_property
    def _windows(self) -> list[int]:
        """The lengths of windows in steps, the longest first."""
        paces = {*self._paces.values(), *map(self._inner_pace, self.group.racks)}
        return sorted(paces - {1}, reverse=True)

    def _kept_apart(self, window: int, turn: int, away: set[int]) -> Iterator[Members]:
        for rack in self.group.racks:
            if self._inner_pace(rack) == window:
                yield from self._partners(rack, turn, away)
        if max(self._paces.values()) == window:
            yield from self._envoys(turn, away)

    def _partners(self, rack: Members, turn: int, away: set[int]) -> Iterator[Members]:
        """Pairs of a slow host with another one. Slow hosts without a partner, and a host that
        would be left alone, join the last pair. One host that isn't slow stays as delegate of the
        rack; where there is one at most, slow hosts have a window only every second time."""
        if self._rests(rack) and turn % 2:
            return
        slow = [rank for rank in rack if self._is_slow(rank)]
        fast = tuple(rank for rank in rack if rank not in slow)
        if not fast:
            there = tuple(rank for rank in rack if rank not in away)
            if len(there) > 1:
                yield there
            return
        others = [rank for rank in _from(fast, turn) if rank not in away]
        if not others:
            return
        number = min(len(slow), max(1, len(others) - 1))
        pairs = list(zip(slow[:number], others, strict=False))
        is_slow = self._paces[rack] > 1
        has_delegate = not is_slow and len(self._near) > 1
        alone = len(others) - number - is_slow == 1 and not has_delegate
        yield from pairs[:-1]
        yield (*pairs[-1], *slow[number:], *others[number : number + alone])

    @cached_property
    def _near(self) -> list[Members]:
        """The racks that aren't slow."""
        return [rack for rack in self.group.racks if self._paces[rack] == 1]

    def _envoys(self, turn: int, away: set[int]) -> Iterator[Members]:
        for pair in circle_pairs(self.group.racks, turn):
            if max(self._paces[rack] for rack in pair) > 1:
                yield from self._delegates(pair, turn, away)

    def _is_slow(self, rank: int) -> bool:
        return rank in self._host_paces

    @cached_property
    def _host_paces(self) -> dict[int, int]:
        """The number of steps between two groups of each rank on a slow host."""
        paces = dict(self.contention.hosts)
        hosts = ((rank, self.group.cluster.host(rank).name) for rank in self.group.ranks)
        return {rank: paces[name] for rank, name in hosts if name in paces}

    @cached_property
    def _paces(self) -> dict[Members, int]:
        """The number of steps between two groups of each rack with others."""
        if len(self.group.racks) == 1:
            return {self.group.racks[0]: 1}
        own = dict(self.contention.racks)
        return {
            rack: max(
                own.get(self.group.cluster.rack(rack[0]).name, 1),
                self._inner_pace(rack) if all(map(self._is_slow, rack)) else 1,
            )
            for rack in self.group.racks
        }

    def _inner_pace(self, rack: Members) -> int:
        """The number of steps between two groups of the slow hosts in a rack."""
        most = MAX_WINDOW_STEPS // 2 if self._rests(rack) else MAX_WINDOW_STEPS
        return min(most, max(self._host_paces.get(rank, 1) for rank in rack))

    def _rests(self, rack: Members) -> bool:
        """True if the slow hosts of a rack have a window only every second time."""
        slow = sum(map(self._is_slow, rack))
        return slow > 0 and len(rack) - slow <= 1

    # The other links

    def _usual(self, step: int, away: set[int]) -> Iterator[Members]:
        turn, whole = divmod(step, 2) if self.whole_racks else (step, 0)
        chosen = [] if whole or len(self.group.racks) == 1 else list(self._between(turn, away))
        yield from chosen
        met = away.union(self._slow_among_others, *chosen)
        for rack in self.group.racks:
            staying = tuple(rank for rank in rack if rank not in met)
            if len(staying) > 1:
                yield staying

    def _between(self, turn: int, away: set[int]) -> Iterator[Members]:
        """The groups of the delegates of racks that aren't slow."""
        near = self._near
        for racks in circle_pairs(near, turn) if self.contention.pairs else [near]:
            yield from self._delegates(racks, turn, away)

    def _delegates(self, racks: Iterable[Members], turn: int, away: set[int]) -> Iterator[Members]:
        """The group of the next delegates of these racks, without those all of whose ranks are in
        windows or slow; none if it has only one member."""
        busy = away | self._slow_among_others
        free = ([rank for rank in _from(rack, turn) if rank not in busy] for rack in racks)
        there = tuple(ranks[0] for ranks in free if ranks)
        if len(there) > 1:
            yield there

    @cached_property
    def _slow_among_others(self) -> set[int]:
        """The ranks on slow hosts in racks whose other hosts aren't all slow."""
        mixed = (rack for rack in self.group.racks if not all(map(self._is_slow, rack)))
        return {rank for rack in mixed for rank in rack if self._is_slow(rank)}


def connected(ranks: Iterable[int], steps: Iterable[Iterable[tuple[int, ...]]]) -> bool:
    """True if information of one rank reaches all others through the groups of these steps; stops
    at the first step at which it does."""
    root = {rank: rank for rank in ranks}
    apart = len(root)

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for groups in steps:
        for members in groups:
            for member in members:
                one, other = find(member), find(members[0])
                root[one] = other
                apart -= one != other
        if apart == 1:
            return True
    return apart <= 1


def _from(rack: Members, turn: int) -> Members:
    first = turn % len(rack)
    return (*rack[first:], *rack[:first])


def circle_pairs(members: Sequence[T], turn: int) -> list[tuple[T, T]]:
    """The pairs of the circle method at this turn."""
    if len(members) < 2:
        return []
    moving: list[T | None] = [*members, *[None] * (len(members) % 2)]
    standing = moving.pop()
    shift = turn % len(moving)
    seats = [*moving[shift:], *moving[:shift]]
    opposite = [(seats[i], seats[-i]) for i in range(1, (len(seats) + 1) // 2)]
    met = [(seats[0], standing), *opposite]
    return [(one, other) for one, other in met if one is not None and other is not None]


def circle_turns(number: int) -> int:
    """The number of turns after which all pairs have occurred once."""
    return max(1, number if number % 2 else number - 1)
