"""How hypothesis runs here: no deadline for an example, since machines are noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("thalweg", deadline=None, print_blob=True)
settings.load_profile("thalweg")
