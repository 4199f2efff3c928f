"""Hooks on modules, gradients and the end of backward.

`copy.deepcopy(model)` for a moving average and `torch.save(model)` take a module's hooks along. The
hooks of Thalweg belong to this process and this model, so a copy gets one that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable


class Hook:
    """A hook that becomes a no-op when its module is copied or pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @_disable_dynamo  # compiled models call it as it is; torch.compiler's takes a second to import
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return nothing, ()


def nothing() -> Callable[..., None]:
    """The no-op that a copy has in a hook's place."""
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


def after_gradient(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> Any:
    """Call `call` whenever the parameter's gradient is ready; `remove()` of the result ends
    this."""
    register: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
    return register(call)


def after_backward(call: Callable[[], None]) -> Callable[[], object]:
    """Call `call` at the end of the running backward; never, if that fails. The result returns None
    once the call was made, or is no longer to come."""
    callback = partial(call)  # only autograd holds it, and lets go of it on failure
    Variable._execution_engine.queue_callback(callback)
    return ref(callback)
