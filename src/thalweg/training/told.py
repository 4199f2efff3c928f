"""What another rank has put into the store."""

from __future__ import annotations

from thalweg.errors import PeerFailed
from thalweg.runtime import Alarm, World


def told(world: World, alarm: Alarm, key: str, timeout: float) -> bytes | None:
    """None if it isn't there in time; PeerFailed if a rank gives up before it is.

    Who gives up afterwards, because of what it says, isn't heard: all are to read the same."""
    try:
        return world.wait_for(key, timeout, alarm)
    except PeerFailed:
        if world.store.check([key]):
            return bytes(world.store.get(key))
        raise
