"""Ranks as forked processes, each with a small job, and what they bring home."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # optimizers ask for it: once here, not in every fork
from torch import nn

from thalweg.bench.training import fingerprint
from thalweg.errors import ThalwegError
from thalweg.launch.supervisor import SendMessage, run_workers

assert torch._dynamo
# Torch asks for the name behind every connection; a resolver that doesn't answer costs 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
TIMEOUT = "20s"
SECONDS = 60.0


def on_ranks(
    size: int, work: Callable[[int], dict[str, Any]], seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """What `work(rank)` returned on every rank, within so many seconds."""

    def reported(rank: int, report: SendMessage) -> dict[str, Any]:
        return work(rank)

    return run_workers(size, reported, timeout=seconds, debug=True)


def raised(work: Callable[[], Any]) -> dict[str, Any]:
    """The error that it ends in; an empty text if it doesn't."""
    try:
        work()
    except ThalwegError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "", "text": ""}


def listen(heard: list[str]) -> None:
    """All warnings that are logged, except stragglers, which a busy machine may cause."""

    def hear(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and not text.startswith("straggler"):
            heard.append(text)
        return True

    logging.getLogger("thalweg").addFilter(hear)


def values(module: nn.Module) -> list[float]:
    """All parameters, in one list."""
    return [float(x) for p in module.parameters() for x in p.detach().double().reshape(-1)]


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p.detach().double() - q.detach().double()).abs().max()) for p, q in pairs)


def one_value(results: list[dict[str, Any]], key: str) -> Any:
    """What all ranks have under this key."""
    assert all(result[key] == results[0][key] for result in results), [r[key] for r in results]
    return results[0][key]


def same_bits(results: list[dict[str, Any]], key: str = "print") -> bool:
    return len({result[key] for result in results}) == 1


__all__ = [
    "SECONDS",
    "TIMEOUT",
    "apart",
    "fingerprint",
    "listen",
    "on_ranks",
    "one_value",
    "raised",
    "same_bits",
    "values",
]
