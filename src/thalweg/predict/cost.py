"""What one synchronisation costs, put together from phases.

A phase moves all S bytes one stage further; it takes the longer of its busiest NIC's and its
busiest uplink's bytes. One after the other, phases add up. In k chunks that follow one another, the
first goes through all phases alone, and each further one is held up only by the busiest link, which
serves all phases, and by the phase with the most messages:

    latency  = L [ sum(moves) + (k-1) max(moves) ] alpha  +  L sum(crossings) crossing
    transfer = sum(phases) / k  +  (1 - 1/k) busiest

With k = 1 nothing overlaps; with many chunks only the busiest link counts. For h equal hops over
links of their own this is the pipeline's (k + h - 1)(alpha + S beta / k), which `schedules.chunks`
cuts by.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.predict.symbols import Symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`moves` messages one after the other, of which so many `crossings` lead into another rack;
    bytes are those on the busiest NIC and the busiest uplink, in one direction."""

    moves: int = 0
    crossings: int = 0
    nic: float = 0.0
    uplink: float = 0.0

    def seconds(self, x: Symbols) -> float:
        return max(self.nic * x.beta1, self.uplink * x.beta2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    moves: int  # sequential, of one chunk
    nic: float  # bytes on the busiest NIC, in one direction
    uplink: float
    latency: float  # seconds
    transfer: float
    busiest: float  # seconds that the busiest link is at work, of `transfer`
    each: float  # seconds of latency that one more chunk costs

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


def cost(x: Symbols, *phases: Phase, busiest: Phase | None = None) -> Cost:
    """Of these phases of all S bytes in x.k chunks. `busiest` is the load of the busiest links over
    all phases, and the moves of one more chunk; if absent, all phases load the same links."""
    if busiest is None:
        busiest = Phase(
            moves=max((phase.moves for phase in phases), default=0),
            nic=sum(phase.nic for phase in phases),
            uplink=sum(phase.uplink for phase in phases),
        )
    moves = sum(phase.moves for phase in phases)
    crossings = sum(phase.crossings for phase in phases)
    at_work = busiest.seconds(x)
    each = x.L * busiest.moves * x.alpha
    return Cost(
        moves=moves,
        nic=busiest.nic,
        uplink=busiest.uplink,
        latency=x.L * (moves * x.alpha + crossings * x.crossing) + (x.k - 1) * each,
        transfer=sum(p.seconds(x) for p in phases) / x.k + (1 - 1 / x.k) * at_work,
        busiest=at_work,
        each=each,
    )
