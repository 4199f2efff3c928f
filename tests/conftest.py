"""What several tests need: clusters drawn at random, and schedules run for real on threads."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("thalweg", deadline=None, print_blob=True)
settings.load_profile("thalweg")
