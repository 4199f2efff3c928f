"""What a compressor left out and the next plan has no place for: added to the next gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from thalweg.transports import Array


def pay_back(
    parameters: Mapping[str, nn.Parameter], residuals: Mapping[str, Array], ranks: int
) -> None:
    """Once, in the next backward that comes to a parameter. Residuals are those of gradients
    divided by the number of ranks."""
    for name, residual in residuals.items():
        if name in parameters and residual.any():
            parameter = parameters[name]
            amount = torch.from_numpy(residual * ranks).view(parameter.shape)
            _Debt(parameter, amount.to(parameter.device, parameter.dtype))


class _Debt:
    def __init__(self, parameter: nn.Parameter, amount: torch.Tensor) -> None:
        register: Callable[[Any], Any] = parameter.register_hook
        self._hook = register(partial(self._pay, amount))

    def _pay(self, amount: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._hook.remove()
        return gradient + amount
