"""One browser for all tests that look at pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Error, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, as `scripts/browser` finds it; skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found)
        except Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        with opened:
            yield opened
