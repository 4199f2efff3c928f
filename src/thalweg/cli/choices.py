"""What `auto` has chosen, in a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def told_choice(chosen: Mapping[str, Any]) -> str:
    from thalweg.training.steering import Chosen  # torch takes a second: not at import

    made = Chosen(**chosen)
    return f"from step {made.step}: {made} ({made.reason})"
