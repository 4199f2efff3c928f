"""A description of a cluster: hosts in racks, the rates of their links, straggler delays.

The network is a leaf-spine: every host has a NIC, every rack an uplink to a spine that never
blocks, and both have a rate in each direction. A message between two hosts of a rack crosses two
NICs; between racks it crosses both uplinks as well; between two ranks of one host it crosses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Self, TypeAlias, TypeVar

from thalweg.errors import ClusterError
from thalweg.facts.units import Duration, Rate

T = TypeVar("T")
AnyRate: TypeAlias = "Rate | Duplex | str"
ASSUMED_NIC = Rate.parse("1gbit")
ASSUMED_LATENCY = Duration.parse("100us")
MAX_WORKERS = 200_000


class Link(NamedTuple):
    """One direction of one NIC or uplink; `out` leaves the host or the rack."""

    kind: Literal["nic", "uplink"]
    owner: str
    direction: Literal["out", "in"]

    def __str__(self) -> str:
        return f"{self.kind} of {self.owner}, {self.direction}"


@dataclass(frozen=True, slots=True)
class Duplex:
    """The rates of a link, out of its owner and into it."""

    out: Rate
    into: Rate

    @classmethod
    def both(cls, rate: AnyRate) -> Self:
        """The rates of a link from one rate for both directions, or from a `Duplex`."""
        if isinstance(rate, Duplex):
            return cls(rate.out, rate.into)
        rate = Rate.parse(rate) if isinstance(rate, str) else rate
        return cls(rate, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerDelay:
    """The probability that a host is a straggler at a step, and the delay if it is one."""

    probability: float = 0.0
    delay: Duration = Duration(0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ClusterError(
                f"a host can't be late with probability {self.probability}", "give one from 0 to 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine and the ranks that run on it."""

    name: str
    ranks: tuple[int, ...]
    nic: Duplex = Duplex.both(ASSUMED_NIC)
    late: StragglerDelay = StragglerDelay()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """Hosts behind one uplink; crossing the uplink adds `latency` to a message."""

    name: str
    hosts: tuple[Host, ...]
    uplink: Duplex | None = None  # None: never the bottleneck
    latency: Duration = Duration(0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for host in self.hosts for rank in host.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Racks of hosts; `latency` is that of one small message between two hosts of a rack.

    `assumed` lists the figures that were neither measured nor declared.
    """

    racks: tuple[Rack, ...]
    latency: Duration = ASSUMED_LATENCY
    assumed: tuple[str, ...] = field(default=(), compare=False)
    _places: dict[int, tuple[Rack, Host]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {
            rank: (rack, host) for rack in self.racks for host in rack.hosts for rank in host.ranks
        }
        object.__setattr__(self, "_places", places)
        self._refuse_contradictions()

    @classmethod
    def flat(cls, workers: int) -> Self:
        """A cluster of one host per worker, all in one rack; rates and latency are assumed."""
        return cls.regular([workers])

    @classmethod
    def of_hosts(cls, names: Sequence[str]) -> Self:
        """A cluster of one rack from the host name of each rank; rates and latency are assumed."""
        flat = cls.flat(len(names))
        hosts = tuple(
            Host(name=name, ranks=tuple(r for r, own in enumerate(names) if own == name))
            for name in dict.fromkeys(names)
        )
        return replace(flat, racks=(replace(flat.racks[0], hosts=hosts),))

    @classmethod
    def regular(
        cls,
        rack_sizes: Sequence[int],
        *,
        nic: AnyRate | Sequence[AnyRate] | None = None,
        uplink: AnyRate | Sequence[AnyRate] | None = None,
        latency: Duration | None = None,
        uplink_latency: Duration | Sequence[Duration] | None = None,
        interleaved: bool = False,
    ) -> Self:
        """A cluster from the number of hosts in each rack. A single value holds for all; a list of
        NICs has one entry for each host, rack by rack, and the other lists have one for each rack.
        Interleaved ranks go round the racks, 0 to the first, 1 to the second, as a scheduler that
        spreads a job would number them."""
        if not rack_sizes or min(rack_sizes) < 1:
            raise ClusterError("a cluster needs at least one worker in every rack", "give more")
        if sum(rack_sizes) > MAX_WORKERS:
            raise ClusterError(
                f"{sum(rack_sizes)} workers are too many", f"give at most {MAX_WORKERS}"
            )
        slots = [(rack, slot) for rack, size in enumerate(rack_sizes) for slot in range(size)]
        numbered = sorted(slots, key=lambda slot: slot[::-1]) if interleaved else slots
        ranks = {slot: rank for rank, slot in enumerate(numbered)}
        nics = _one_each(ASSUMED_NIC if nic is None else nic, len(slots), "the hosts' NICs")
        hosts = {
            slot: Host(name=f"host{ranks[slot]}", ranks=(ranks[slot],), nic=its_nic)
            for slot, its_nic in zip(slots, nics, strict=True)
        }
        number = len(rack_sizes)
        uplinks = [None] * number if uplink is None else _one_each(uplink, number, "the uplinks")
        crossing = Duration(0.0) if uplink_latency is None else uplink_latency
        crossing = [crossing] * number if isinstance(crossing, Duration) else crossing
        latencies = _as_many(crossing, number, "the uplinks' latencies")
        return cls(
            racks=tuple(
                Rack(
                    name=f"rack{rack}",
                    hosts=tuple(hosts[rack, slot] for slot in range(size)),
                    uplink=uplinks[rack],
                    latency=latencies[rack],
                )
                for rack, size in enumerate(rack_sizes)
            ),
            latency=latency or ASSUMED_LATENCY,
            assumed=assumptions(nic=nic is None, latency=latency is None),
        )

    @property
    def rates_are_assumed(self) -> bool:
        """True if the rates of NICs were neither measured nor declared."""
        return any(text.endswith("NICs") for text in self.assumed)

    @property
    def latency_is_assumed(self) -> bool:
        """True if the latency was neither measured nor declared."""
        return any(text.endswith("latency") for text in self.assumed)

    @property
    def workers(self) -> int:
        """The number of ranks on all hosts."""
        return len(self._places)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of all racks, rack by rack."""
        return tuple(host for rack in self.racks for host in rack.hosts)

    def host(self, rank: int) -> Host:
        """The host of this rank; ClusterError if there is no such rank."""
        return self._place(rank)[1]

    def rack(self, rank: int) -> Rack:
        """The rack of this rank; ClusterError if there is no such rank."""
        return self._place(rank)[0]

    def path(self, source: int, target: int) -> tuple[Link, ...]:
        """The links that a message between two ranks crosses, in order."""
        source_rack, source_host = self._place(source)
        target_rack, target_host = self._place(target)
        if source_host is target_host:
            return ()
        out, into = Link("nic", source_host.name, "out"), Link("nic", target_host.name, "in")
        if source_rack is target_rack:
            return (out, into)
        up = Link("uplink", source_rack.name, "out")
        down = Link("uplink", target_rack.name, "in")
        return (out, up, down, into)

    def rates(self) -> dict[Link, Rate]:
        """The rate of every link that has one."""
        owners: list[tuple[Literal["nic", "uplink"], str, Duplex | None]] = []
        owners += [("nic", host.name, host.nic) for host in self.hosts]
        owners += [("uplink", rack.name, rack.uplink) for rack in self.racks]
        rates: dict[Link, Rate] = {}
        for kind, owner, duplex in owners:
            if duplex is not None:
                rates[Link(kind, owner, "out")] = duplex.out
                rates[Link(kind, owner, "in")] = duplex.into
        return rates

    def busy_seconds(self, links: Mapping[Link, float]) -> dict[Link, float]:
        """The time for which these bytes occupy each link that has a rate."""
        rates = self.rates()
        return {link: rates[link].seconds(n) for link, n in links.items() if link in rates}

    def with_rates(self, rates: Mapping[Link, Rate]) -> Cluster:
        """The cluster with these rates of its links. A rack without one for its uplink has none
        that is a bottleneck; a host without one keeps its own."""

        def duplex(kind: Literal["nic", "uplink"], owner: str) -> Duplex | None:
            out, into = Link(kind, owner, "out"), Link(kind, owner, "in")
            return Duplex(rates[out], rates[into]) if out in rates else None

        racks = (replace(rack, uplink=duplex("uplink", rack.name)) for rack in self.racks)
        return replace(self, racks=tuple(racks)).with_hosts(
            lambda host: replace(host, nic=duplex("nic", host.name) or host.nic)
        )

    def with_hosts(self, change: Callable[[Host], Host]) -> Cluster:
        """The cluster with each of its hosts changed."""
        racks = (replace(rack, hosts=tuple(map(change, rack.hosts))) for rack in self.racks)
        return replace(self, racks=tuple(racks))

    def seconds_between(self, source: int, target: int) -> float:
        """The latency of one small message between two ranks."""
        source_rack, target_rack = self.rack(source), self.rack(target)
        if source_rack is target_rack:
            return self.latency.seconds
        return self.latency.seconds + source_rack.latency.seconds + target_rack.latency.seconds

    def _place(self, rank: int) -> tuple[Rack, Host]:
        try:
            return self._places[rank]
        except KeyError:
            raise ClusterError(
                f"the cluster has no rank {rank}", f"it has 0 to {self.workers - 1}"
            ) from None

    def _refuse_contradictions(self) -> None:
        for kind, names in (
            ("rack", [rack.name for rack in self.racks]),
            ("host", [host.name for host in self.hosts]),
        ):
            for name in _repeated(names):
                raise ClusterError(f"two {kind}s are called {name!r}", f"rename one {kind}")
        for rack in self.racks:
            if not rack.hosts:
                raise ClusterError(f"rack {rack.name!r} has no hosts", "add one or remove the rack")
        ranks = [rank for rack in self.racks for rank in rack.ranks]
        for rank in _repeated(ranks):
            owners = [host.name for host in self.hosts if rank in host.ranks]
            raise ClusterError(
                f"rank {rank} is on {' and on '.join(owners)}", "give every rank to one host"
            )
        missing = sorted(set(range(len(ranks))) - set(ranks))
        if missing or not ranks:
            raise ClusterError(
                f"no host has rank {missing[0] if missing else 0}, though there are {len(ranks)}",
                "number the ranks 0, 1, 2, ... without a gap",
            )


def _one_each(links: AnyRate | Sequence[AnyRate], number: int, which: str) -> Sequence[Duplex]:
    if isinstance(links, str | Rate | Duplex):
        return [Duplex.both(links)] * number
    return [Duplex.both(rate) for rate in _as_many(links, number, which)]


def _as_many(values: Sequence[T], number: int, which: str) -> Sequence[T]:
    if len(values) != number:
        raise ClusterError(
            f"{which} are {len(values)}, not {number}", f"list {number}, or give one"
        )
    return values


def _repeated(names: Iterable[T]) -> list[T]:
    return [name for name, times in Counter(names).items() if times > 1]


def assumptions(*, nic: bool, latency: bool) -> tuple[str, ...]:
    """The assumed figures in words, for `Cluster.assumed`."""
    words = ((nic, f"{ASSUMED_NIC} NICs"), (latency, f"{ASSUMED_LATENCY} latency"))
    return tuple(text for assumed, text in words if assumed)


def rack_sizes(text: str) -> list[int]:
    """The rack sizes in a layout: `2x4` is two racks of four, `5+3+4` three uneven ones."""
    racks, cross, hosts = text.strip().partition("x")
    try:
        number = min(int(racks), MAX_WORKERS + 1) if cross else 0
        sizes = [int(hosts)] * number if cross else [int(part) for part in text.split("+")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ClusterError(f"{text!r} is not a layout of racks", "write it like 2x4 or 5+3+4")
    return sizes
