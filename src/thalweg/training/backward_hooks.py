"""Hooks. One on a module stays behind when the module is copied or pickled.

`copy.deepcopy(model)` for a moving average and `torch.save(model)` take a module's hooks along;
what Thalweg puts there belongs to this process and this model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable


class Hook:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @_disable_dynamo  # compiled models call it as it is; torch.compiler's takes a second to import
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return nothing, ()


def nothing() -> Callable[..., None]:
    """What a copy has in a hook's place."""
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


def after_gradient(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> Any:
    """Whenever its gradient is there; `remove()` of what is returned ends it."""
    register: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
    return register(call)


class AfterBackward:
    """Calls when the running backward is through; never, if it fails."""

    def __init__(self, call: Callable[[], None]) -> None:
        callback = _Callback(call)
        self._callback = ref(callback)  # only autograd holds it, and lets go of it on failure
        Variable._execution_engine.queue_callback(callback)

    def is_to_come(self) -> bool:
        return self._callback() is not None


class _Callback:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()
