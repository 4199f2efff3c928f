"""Links as token buckets: after a rest, a link carries so many bytes at once.

A link holds up to `burst` tokens, a byte each, and gains them at the rate that it has for the flows
on it. While it has some it doesn't limit; flows that nothing else limits take them in an instant,
in equal parts as far as they need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

from thalweg.predict.fairness import Channel, Flow

NOTHING = 1e-6  # bytes: less is a matter of rounding


def refill(channels: Iterable[Channel], now: float) -> None:
    """What each has by now, its flows having been as they were since it was last looked at."""
    for channel in channels:
        if channel.burst:
            gained = (channel.gain - channel.used) * (now - channel.since)
            channel.tokens = min(channel.burst, channel.tokens + gained)
            if channel.tokens < NOTHING:
                channel.tokens = 0.0
        channel.since = now


def burst_through(flows: Iterable[Flow]) -> None:
    """Let through at once what no channel limits."""
    free = [flow for flow in flows if all(channel.tokens for channel in flow.channels)]
    while free:
        crossing = Counter(channel for flow in free for channel in flow.channels)
        level = min(channel.tokens / number for channel, number in crossing.items())
        level = min(level, *(flow.left for flow in free))
        for flow in free:
            flow.left = _less(flow.left, level)
        for channel, number in crossing.items():
            channel.tokens = _less(channel.tokens, level * number)
        free = [
            flow for flow in free if flow.left and all(channel.tokens for channel in flow.channels)
        ]


def run_down(channels: Iterable[Channel], rates: dict[Flow, float]) -> list[Channel]:
    """From now on its flows have these rates: the channels whose tokens they will use up."""
    emptying = []
    for channel in channels:
        channel.used = sum(rates.get(flow, 0.0) for flow in channel.flows)
        channel.gain = channel.capacity(len(channel.flows))
        if not channel.tokens and channel.used > channel.gain * (1 - 1e-9):
            channel.gain = channel.used  # full: what it lacks or has left is rounding
        channel.dry_at = inf
        if channel.tokens and channel.used > channel.gain:
            channel.dry_at = channel.since + channel.tokens / (channel.used - channel.gain)
            emptying.append(channel)
    return emptying


def _less(what: float, by: float) -> float:
    return what - by if what - by > NOTHING else 0.0
