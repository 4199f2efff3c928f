"""Who meets whom over one period, what is kept apart and why, what to expect of the replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import median

from thalweg.catalog import Catalog
from thalweg.convergence import Outlook, crossing, outlook
from thalweg.facts import Rate, Size, Workload
from thalweg.plan import Plan
from thalweg.rounds import compile_rounds, cycle
from thalweg.schedules import Contention, Group, Meeting
from thalweg.schedules.contention import declared

MOST_TURNS_SHOWN = 16
MOST_WORKERS_MIXED = 128  # for more, matrices take long
MOST_NAMES = 6  # in a line
ONE_VALUE = Workload.of_size(Size.parse("4B"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """A rack or a host that is too slow to meet the others at every step."""

    kind: str  # rack or host
    name: str
    rate: Rate  # of its uplink or NIC, for one exchange
    usual: Rate
    wanted: int  # how many steps it needs for a pair
    steps: int  # how many it is given

    def __str__(self) -> str:
        """Why, and what is done about it; without its name, which others may share it with."""
        why = f"{'uplink' if self.kind == 'rack' else 'NIC'} {self.rate}, usual is {self.usual}"
        if self.steps == 1:
            return f"{why}; not kept apart all the same, or not everybody would mix"
        with_whom = "one of another rack" if self.kind == "rack" else "others of the rack"
        who = "one worker meets" if self.kind == "rack" else "meets"
        met = f"{who} {with_whom} by turns, {self.steps} steps each"
        less = f" ({self.wanted} would leave some alone too long)"
        return f"{why}; {met}{less if self.steps < self.wanted else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`turns`: the meetings that begin at the first steps of a period; none if it is always the
    same neighbours. `pairs`: racks don't meet all at once."""

    group: Group
    period: int
    turns: tuple[tuple[Meeting, ...], ...]
    apart: tuple[Apart, ...]
    pairs: bool
    outlook: Outlook | None  # None for many workers
    crossing: float | None  # bytes that leave the busiest rack a step, in units of the model

    @property
    def left_out(self) -> int:
        """Steps of the period that aren't shown."""
        return self.period - len(self.turns) if self.turns else 0

    def is_slow(self, kind: str, name: str) -> bool:
        return any((each.kind, each.name) == (kind, name) for each in self.apart)

    def facts(self) -> list[tuple[str, str]]:
        """A line each, and the name of the first of its kind."""
        lines = [] if self.outlook is None else _expected(self.outlook)
        if self.crossing is not None:
            busiest = f"{self.crossing:.3g}x the model leaves the busiest rack a step, on average"
            lines.append(("uplinks", busiest))
        alike: dict[str, list[str]] = {}
        for each in self.apart:
            alike.setdefault(str(each), []).append(each.name)
        kept = [f"{_few(members)}: {text}" for text, members in alike.items()]
        if self.pairs:
            kept.append("racks meet in pairs by turns: uplinks are too slow for all at once")
        names = ["kept apart", *[""] * len(kept)]
        return [*lines, *zip(names, kept, strict=False)]


def _few(members: list[str]) -> str:
    more = len(members) - MOST_NAMES
    return ", ".join(members[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def groups_of(plan: Plan, group: Group, catalog: Catalog) -> Groups | None:
    """None for plans whose replicas never differ."""
    if not plan.averages_parameters:
        return None
    plain = replace(plan, precision=None)
    topology = catalog.topologies[plan.topology.name]
    found = outlook(plan, group, catalog) if group.size <= MOST_WORKERS_MIXED else None
    period = cycle(plain, group, catalog) if found is None else found.period
    by_turns = topology.groups is not None or not topology.mixes
    shown = range(min(period, MOST_TURNS_SHOWN)) if by_turns else ()
    kept = topology.keeps_apart(group) if topology.keeps_apart is not None else Contention()
    turns = tuple(
        tuple(
            Meeting(round_.group, round_.lasts)
            for round_ in compile_rounds(plain, group, ONE_VALUE, step, catalog)
        )
        for step in shown
    )
    return Groups(
        group=group,
        period=period,
        turns=turns,
        apart=_apart(group, kept, turns) if topology.keeps_apart is not None else (),
        pairs=kept.pairs,
        outlook=found,
        crossing=None if found is None else crossing(plan, group, catalog, period),
    )


def _apart(
    group: Group, kept: Contention, turns: tuple[tuple[Meeting, ...], ...]
) -> tuple[Apart, ...]:
    rates, wanted = declared(group), group.contended
    usual_nic = median(rates.nics.values())
    crossing = {
        name: min(rates.uplinks.get(name, inf), usual_nic)
        for name in (group.cluster.rack(rack[0]).name for rack in group.racks)
    }
    usual_crossing, given = median(crossing.values()), dict(kept.racks)
    racks = [
        Apart(
            kind="rack",
            name=name,
            rate=Rate(8 * crossing[name]),
            usual=Rate(8 * max(usual_crossing, usual_nic * (crossing[name] >= usual_crossing))),
            wanted=steps,
            steps=given.get(name, 1),
        )
        for name, steps in wanted.racks
    ]
    hosts = [
        Apart(
            kind="host",
            name=name,
            rate=Rate(8 * rates.nics[name]),
            usual=Rate(8 * usual_nic),
            wanted=steps,
            steps=_longest(group, name, turns),
        )
        for name, steps in wanted.hosts
    ]
    return (*racks, *hosts)


def _longest(group: Group, host: str, turns: tuple[tuple[Meeting, ...], ...]) -> int:
    """The longest window of a host; in a small rack it may be shorter than it was to be."""
    return max(
        (
            meeting.lasts
            for meetings in turns
            for meeting in meetings
            if any(group.cluster.host(rank).name == host for rank in meeting.ranks)
        ),
        default=1,
    )


def _expected(found: Outlook) -> list[tuple[str, str]]:
    if not found.connected:
        return [("connected", "no: some never hear of some others, and drift apart without end")]
    steps = f"{found.period} steps" if found.period > 1 else "1 step"
    part = f", of which the first {found.looked_at} are" if found.looked_at < found.period else ""
    pause = found.longest_pause
    return [
        ("connected", "yes: what one learns reaches everybody"),
        ("contraction", _contraction(found)),
        ("spectral gap", f"{found.gap:.3f} over {steps}{part}; by singular values "
         f"{found.sigma_gap:.3f}"),
        (
            "expected drift",
            f"{sqrt(found.drift):.2f} of one step's noise (variance {found.drift:.2f}); before "
            f"averaging {sqrt(found.drift_before):.2f} ({found.drift_before:.2f})",
        ),
        ("longest pause", "nobody to meet" if pause is None else f"{pause} "
         f"{'step' if pause == 1 else 'steps'} from a worker's meeting to its next"),
    ]  # fmt: skip


def _contraction(found: Outlook) -> str:
    if found.contraction < 1e-6:
        after = found.steps_to_little
        return f"replicas are equal after {after} {'step' if after == 1 else 'steps'}"
    return (
        f"a step leaves {found.contraction:.3f} of what replicas differ by; a thousandth is left "
        f"after {found.steps_to_little} steps"
    )
