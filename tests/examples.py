"""The number of examples that hypothesis draws for a property.

The profile `quick`, which is the default, draws at most 25 for each; `thorough`, which `make
test-all` takes, draws as many as the test asks for.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

QUICK, THOROUGH = "quick", "thorough"
AT_MOST = 25


def register() -> None:
    """Examples have no deadline, since machines are noisy."""
    settings.register_profile(QUICK, deadline=None, print_blob=True, max_examples=AT_MOST)
    settings.register_profile(THOROUGH, deadline=None, print_blob=True)
    settings.load_profile(QUICK)


def examples(count: int, **more: Any) -> settings:
    """So many examples under `thorough`; in place of `settings(max_examples=count)`."""
    is_quick = settings.get_current_profile_name() == QUICK
    return settings(max_examples=min(count, AT_MOST) if is_quick else count, **more)
