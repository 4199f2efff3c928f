"""A network that exists only as a cluster: flows share its links fairly, figures are noisy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from thalweg.facts import Cluster, Link
from thalweg.probing.coordinator import HostInfo, ProbeCoordinator, ProbeFlow


class Simulated(ProbeCoordinator):
    """A network whose hosts are on machines of their own.

    `hop` is what crossing an uplink adds to a round trip of 100 us; `noise` the spread of rates,
    and `jitter` that of round trips, as shares."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        noise: float = 0.02,
        jitter: float = 0.1,
        hop: float = 0.0,
        at_once: int = 4,
        seed: int = 0,
    ) -> None:
        self.cluster = cluster
        self.tests = 0
        self.pings = 0
        self._noise = noise
        self._jitter = jitter
        self._hop = hop
        self._at_once = at_once
        self._draw = Random(seed)
        hosts = sorted(cluster.hosts, key=lambda host: host.ranks)
        self.host_infos = [
            HostInfo(name=host.name, machine=host.name, cores=1, ranks=host.ranks) for host in hosts
        ]
        self.measurements = 0
        self._rates = {link: rate.bits_per_second for link, rate in cluster.rates().items()}

    @property
    def at_once(self) -> int:
        return self._at_once

    def round_trip(self, source: int, target: int) -> float:
        self.pings += 1
        self.measurements += 1
        racks = [self.cluster.rack(self._first_rank(host)) for host in (source, target)]
        across = racks[0] is not racks[1]
        return (1e-4 + self._hop * across) * (1 + self._jitter * self._draw.random())

    def rates(self, flows: Sequence[ProbeFlow], *, short: bool = False) -> list[float]:
        self.tests += 1
        self.measurements += 1
        busy = [host for flow in flows for host in flow]
        assert len(busy) == len(set(busy)), flows
        paths = [
            self.cluster.path(self._first_rank(flow.source), self._first_rank(flow.target))
            for flow in flows
        ]
        return [
            rate * (1 + self._noise * self._draw.uniform(-1, 1))
            for rate in max_min_fair([list(path) for path in paths], self._rates)
        ]

    def round_trip_of_ranks(self, one: int, other: int) -> float:
        return 2e-5


def max_min_fair(paths: list[list[Link]], rates: dict[Link, float]) -> list[float]:
    """Fill all flows at the same pace; who meets a full link stops."""
    left = dict(rates)
    found: dict[int, float] = {}
    while len(found) < len(paths):
        running = [i for i in range(len(paths)) if i not in found]
        shares = {
            link: left[link] / users
            for link in left
            if (users := sum(link in paths[i] for i in running))
        }
        tightest = min(shares, key=lambda link: shares[link])
        for i in running:
            if tightest in paths[i]:
                found[i] = shares[tightest]
                for link in paths[i]:
                    if link in left and link != tightest:
                        left[link] -= shares[tightest]
        del left[tightest]
    return [found[i] for i in range(len(paths))]
