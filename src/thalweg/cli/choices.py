"""What `auto` has chosen, in a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.facts import about


def told_choice(chosen: Mapping[str, Any]) -> str:
    text = (
        f"from step {chosen['step']}: {chosen['sync']}, predicted {about(chosen['predicted'], 's')}"
    )
    text += f" ({about(chosen['low'], 's')} to {about(chosen['high'], 's')})"
    if chosen["measured"] is not None:
        text += f", measured {about(chosen['measured'], 's')}"
    return f"{text}: {chosen['reason']}"
