"""What people compress with today: measured beside our methods, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from thalweg.bench.compress_costs import Exchange
from thalweg.bench.compress_hooks import alone_in_a_group, fp16_hook, powersgd_hook
from thalweg.bench.compress_scripts import (
    RANK,
    RATIO,
    ByteSigns,
    Casts,
    FloatSigns,
    PowerSGD,
    TopK,
    on_our_tensors,
)
from thalweg.facts import Bucket
from thalweg.probing.codec_trials import Gradients, Trial

DIVIDES = (
    "torch's hooks are one call, which also divides by the number of workers; it isn't known which "
    "part of it is decoding"
)


@dataclass(frozen=True, slots=True)
class Peer:
    """`trial` also says how many bytes of a bucket go as they are."""

    name: str
    exchange: Exchange
    trial: Callable[[Gradients, Bucket], tuple[Trial | None, int]]


@contextmanager
def peers(workers: int) -> Iterator[tuple[list[Peer], list[str]]]:
    """Those that can run here, and a note on each that can't."""
    found = _scripts(workers)
    notes = [DIVIDES]
    with ExitStack() as stack:
        try:
            stack.enter_context(alone_in_a_group())
            found = [*_hooks(), *found]
        except (RuntimeError, ValueError) as reason:
            said = str(reason).splitlines()[0]
            notes = [f"torch's hooks are left out: no process group to be had here ({said})"]
        yield found, notes


def _hooks() -> list[Peer]:
    powersgd = partial(powersgd_hook, rank=RANK)
    return [
        Peer("torch fp16 hook", Exchange.SUM, fp16_hook),
        Peer(f"torch powersgd hook (rank={RANK})", Exchange.SUM, powersgd),
    ]


def _scripts(workers: int) -> list[Peer]:
    on_ours = partial(partial, on_our_tensors, workers)
    gathered = Exchange.ALL_GATHER
    return [
        Peer("bare fp16 casts", Exchange.SUM, on_ours("fp16", Casts)),
        Peer(f"torch.topk ({100 * RATIO:g} %)", gathered, on_ours("topk", TopK)),
        Peer("uint8 signs", gathered, on_ours("sign", ByteSigns)),
        Peer("signs unpacked to floats", gathered, on_ours("sign", FloatSigns)),
        Peer("powersgd, straightforward products", Exchange.SUM, on_ours("powersgd", PowerSGD)),
    ]
