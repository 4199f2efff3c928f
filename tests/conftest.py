"""How hypothesis runs here: no deadline for an example, since machines are noisy. And who needs a
lab is skipped where none can be had, and says why."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from thalweg.errors import LabError
from thalweg.lab import Lab

# Torch asks for the name behind every connection; a resolver that doesn't answer costs 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Some virtual machines announce AMX and don't have it: torch's bfloat16 then ends with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

settings.register_profile("thalweg", deadline=None, print_blob=True)
settings.load_profile("thalweg")


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Found out by building one."""
    try:
        with Lab(hosts=1, name=f"t{os.getpid()}-0"):
            pass
    except LabError as error:
        pytest.skip(str(error))
