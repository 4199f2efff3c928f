"""Links as token buckets: after a rest, a link carries so many bytes at once.

A link holds up to `burst` tokens, a byte each, and gains them at the rate that it has for the flows
on it. While it has some it doesn't limit; flows that nothing else limits take them in an instant,
in equal parts as far as they need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf, isclose

from thalweg.predict.fairness import Channel, Flow

NOTHING = 1e-6  # bytes: less is a matter of rounding
ROUNDING = 1e-9  # and so is less than this part of a rate


def refill(channels: Iterable[Channel], now: float) -> None:
    """What each has by now, its flows having been as they were since it was last looked at."""
    for channel in channels:
        if channel.burst:
            gained = channel.spare * (now - channel.since)
            channel.tokens = min(channel.burst, channel.tokens + gained)
            if channel.tokens < NOTHING:
                channel.tokens = 0.0
        channel.since = now


def burst_through(flows: Iterable[Flow]) -> set[Flow]:
    """Let through at once what no channel limits; the flows of which that is some."""
    free = [flow for flow in flows if all(channel.tokens for channel in flow.channels)]
    moved = set(free)
    while free:
        crossing = Counter(channel for flow in free for channel in flow.channels)
        level = min(channel.tokens / number for channel, number in crossing.items())
        level = min(level, *(flow.left for flow in free))
        for flow in free:
            flow.left = _less(flow.left, level)
        for channel, number in crossing.items():
            channel.tokens = _less(channel.tokens, level * number)
        free = [flow for flow in free if flow.left and all(c.tokens for c in flow.channels)]
    return moved


def run_down(channels: Iterable[Channel]) -> list[Channel]:
    """After `fair_rates`: the channels whose tokens will be used up, if that is news."""
    emptying = []
    for channel in channels:
        if channel.burst:
            full = abs(channel.room) < ROUNDING * channel.rate
            channel.spare = 0.0 if full else channel.room
            if not channel.tokens or channel.spare >= 0:
                channel.dry_at = inf
                continue
            dry_at = channel.since - channel.tokens / channel.spare
            if not isclose(dry_at, channel.dry_at, rel_tol=1e-12):
                channel.dry_at = dry_at
                emptying.append(channel)
    return emptying


def _less(what: float, by: float) -> float:
    return what - by if what - by > NOTHING else 0.0
