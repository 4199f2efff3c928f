"""The closed form of a data-parallel step (Agarwal et al., "On the Utility of Gradient Compression
in Distributed Training Systems", MLSys 2022), and of one that compresses.

Buckets are sent during backward, which slows it down by lambda (measured: 1.04 to 1.1). Of k
buckets, k-1 can overlap with it; the last has the gradients that backward computes last:

    T_obs = max(lambda T_comp, (k-1) T_comm(b)) + T_comm(b^)

b^ stands outside the maximum because it is always exposed. The paper prints it inside, where it
would overlap with a backward that has ended. Nor is b^ the remainder after k-1 full buckets:
tensors aren't split, so BERT's last one holds its embedding, 91 MiB with a limit of 25. Take
buckets from real shapes (`Workload.buckets`).

Compression is serial: it competes with backward for the same processor, and overlapping them was
slower. So all its payloads are exposed:

    T = T_comp + T_ed + sum of T_comm of the payloads

T_comm is alpha-beta: alpha for a message, and bytes at the *effective* rate of the slowest link,
which TCP keeps below the nominal one. The model assumes equal workers without stragglers, links
without other traffic, and one bottleneck link at a time. It leaves out model parallelism and
asynchrony: there is one barrier per step. T_comp is backward; forward and optimizer are extra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

OVERLAP_SLOWDOWN_FACTOR = 1.07  # slowdown of backward while gradients are sent
MAX_SECONDS_PER_BYTE = 1e12  # makes everything but bytes negligible


@dataclass(frozen=True, slots=True)
class AlphaBetaNetwork:
    alpha: float  # seconds per message
    bytes_per_second: float  # effective

    @classmethod
    def of_gbps(cls, gbps: float, alpha: float) -> AlphaBetaNetwork:
        return cls(alpha, gbps * 1e9 / 8)

    def transfer(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_second


Collective = Callable[[AlphaBetaNetwork, float, int], float]
"""The seconds of a collective, from the bytes of each worker and the number of workers p."""


def ring(network: AlphaBetaNetwork, nbytes: float, workers: int) -> float:
    """The ring all-reduce: 2(p-1) alpha + 2(p-1)/p b/BW."""
    hops = 2 * (workers - 1)
    return hops * network.alpha + network.transfer(hops / workers * nbytes)


def all_gather(network: AlphaBetaNetwork, nbytes: float, workers: int) -> float:
    """The ring all-gather: (p-1)(alpha + b/BW)."""
    return (workers - 1) * (network.alpha + network.transfer(nbytes))


@dataclass(frozen=True, slots=True)
class SentPayload:
    """The bytes of one worker's payload, and the collective that exchanges it."""

    nbytes: float
    collective: Collective = ring

    def seconds(self, network: AlphaBetaNetwork, workers: int) -> float:
        return self.collective(network, self.nbytes, workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpStep:
    """A step that sends some payloads during backward and the others after it."""

    backward: float  # seconds
    overlapped: Sequence[SentPayload] = ()
    codec: float = 0.0  # the seconds of T_ed
    exposed: Sequence[SentPayload]
    workers: int

    @classmethod
    def uncompressed(cls, backward: float, buckets: Sequence[float], workers: int) -> DdpStep:
        """The step of DDP; buckets have their bytes in the order in which they are sent."""
        payloads = [SentPayload(nbytes) for nbytes in buckets]
        slowdown = OVERLAP_SLOWDOWN_FACTOR if workers > 1 else 1.0  # one worker sends nothing
        return cls(
            backward=backward * slowdown,
            overlapped=payloads[:-1],
            exposed=payloads[-1:],
            workers=workers,
        )

    @property
    def payloads(self) -> list[SentPayload]:
        """All payloads in the order in which they are sent."""
        return [*self.overlapped, *self.exposed]

    def seconds(self, network: AlphaBetaNetwork) -> float:
        hidden = self._sent(self.overlapped, network)
        return max(self.backward, hidden) + self.codec + self._sent(self.exposed, network)

    def corner(self, alpha: float) -> float:
        """The seconds per byte at which overlapped communication takes as long as backward."""
        at_once, slowly = (
            self._sent(self.overlapped, AlphaBetaNetwork(alpha, rate)) for rate in (inf, 1.0)
        )
        rises = slowly > at_once
        return max(0.0, (self.backward - at_once) / (slowly - at_once)) if rises else 0.0

    def _sent(self, payloads: Sequence[SentPayload], network: AlphaBetaNetwork) -> float:
        return sum(payload.seconds(network, self.workers) for payload in payloads)


def pays_below(dense: DdpStep, compressed: DdpStep, alpha: float) -> float:
    """The rate in bytes per second below which the compressed step is always shorter: 0 if it is on
    no link, inf if it is on all.

    In x = 1 / rate both are linear but for one corner of the dense step's, which bends upwards. So
    their difference is convex: least at the corner or at x = 0, and beyond that it changes sign
    once at most."""

    def gain(x: float) -> float:
        network = AlphaBetaNetwork(alpha, 1 / x if x else inf)
        return dense.seconds(network) - compressed.seconds(network)

    fast, slow = min((0.0, dense.corner(alpha)), key=gain), MAX_SECONDS_PER_BYTE
    if gain(slow) <= 0:
        return 0.0
    if gain(fast) >= 0:
        return inf
    while slow - fast > 1e-9 * slow:
        middle = (fast + slow) / 2
        if gain(middle) < 0:
            fast = middle
        else:
            slow = middle
    return 1 / slow


def sufficient_ratio(dense: DdpStep, network: AlphaBetaNetwork) -> float:
    """The compression ratio, at no cost, with which the network keeps up with backward: sum of
    T_comm(b / ratio) <= lambda T_comp. inf if messages alone take longer."""
    backward, sent = dense.backward, dense.payloads
    latency = sum(payload.collective(network, 0.0, dense.workers) for payload in sent)
    whole = sum(payload.seconds(network, dense.workers) for payload in sent)
    return max(1.0, (whole - latency) / (backward - latency)) if latency < backward else inf
