"""Objects that travel with the training."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """A scheduler, a scaler, or anything else that has to travel with the training."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...
