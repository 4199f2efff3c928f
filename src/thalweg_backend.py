"""Registers `thalweg` as a backend of torch.distributed.

Torch loads this module when it is imported (the entry point group `torch.backends`), so it imports
nothing else: what the backend needs is imported when a process group is made.
"""

import logging
import sys
from typing import Any

BACKEND_NAME = "thalweg"


def register() -> None:
    """Register the backend, once. Torch itself could not be imported if this raised an error."""
    try:
        backend = sys.modules["torch.distributed"].Backend
        if BACKEND_NAME not in backend.backend_list:
            backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])
    except Exception as error:  # a torch without distributed, for instance
        logging.getLogger("thalweg").warning("the backend thalweg is not registered: %s", error)


def _create(options: Any, given: Any) -> Any:
    from thalweg.backend import ThalwegProcessGroup

    return ThalwegProcessGroup(options, given)
