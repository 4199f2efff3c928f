from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256
from itertools import product
from time import monotonic, sleep

import numpy as np
import pytest
import torch

from tests.running import execute, mean_sets
from tests.schedules.test_topologies import TOPOLOGIES, VARIANTS, build
from tests.threads import run_threads
from tests.transports.ranks import run_ranks
from thalweg.engine.arithmetic import arithmetic_of
from thalweg.engine.execute import RankProgram, flat
from thalweg.errors import PeerLate
from thalweg.facts import Cluster
from thalweg.schedules import Group
from thalweg.transports import Address, Array, Label, Sending, Transport

GROUP = Group.everybody(Cluster.flat(4))


def test_rounds_do_not_mix() -> None:
    """A fast rank may be a round ahead; labels keep the rounds apart."""
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> list[Array]:
        results = []
        for number in range(5):
            vector = np.full(100, float(transport.rank + 10 * number))
            part = RankProgram.of(schedule, transport.rank)
            execute(part, transport, flat(schedule, vector), round_number=number, timeout=10)
            results.append(vector)
        return results

    for results in run_threads(GROUP.ranks, work).values():
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result, 0 + 1 + 2 + 3 + 40.0 * number)


def test_a_rank_that_never_comes_is_named_by_the_deadline() -> None:
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> None:
        if transport.rank != 2:
            vector = np.ones(100)
            execute(
                RankProgram.of(schedule, transport.rank),
                transport,
                flat(schedule, vector),
                timeout=0.3,
            )

    with pytest.raises(PeerLate, match=r"timed out waiting for .* \(step 0, round 0\)"):
        run_threads(GROUP.ranks, work)


def test_an_error_on_one_rank_stops_the_others_at_once() -> None:
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> None:
        if transport.rank == 2:
            raise ValueError("mine")
        vector = np.ones(100)
        execute(
            RankProgram.of(schedule, transport.rank),
            transport,
            flat(schedule, vector),
            timeout=3600,
        )

    with pytest.raises(ValueError, match="mine"):
        run_threads(GROUP.ranks, work)


def test_every_dtype_that_numpy_adds() -> None:
    schedule = build("hierarchical", GROUP, 100)
    for dtype in (np.float16, np.float32, np.float64, np.int32):

        def work(transport: Transport, dtype: type = dtype) -> Array:
            vector = np.full(100, transport.rank, dtype=dtype)
            execute(
                RankProgram.of(schedule, transport.rank),
                transport,
                flat(schedule, vector),
                timeout=10,
            )
            return vector

        for result in run_threads(GROUP.ranks, work).values():
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, np.full(100, 6, dtype=dtype))


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (5, 40_000)


def seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def whole_numbers(rank: int, step: int, elements: int) -> torch.Tensor:
    """So small that four of them add up without rounding in any type."""
    return torch.randint(-60, 60, (elements,), generator=seeded(rank, step))


def floats(rank: int, step: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=seeded(rank, step))


def is_gossip(variant: str) -> bool:
    """Each rank adds its own neighbours in an order of its own."""
    topology = TOPOLOGIES[VARIANTS[variant][0]]
    return topology.mixes and not topology.groups


def run_round(
    part: RankProgram, transport: Transport, tensor: torch.Tensor, step: int
) -> torch.Tensor:
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    execute(
        part,
        transport,
        flat(part.schedule, bits.numpy()),
        step=step,
        timeout=20,
        arithmetic=arithmetic_of(tensor.dtype),
    )
    return tensor


@pytest.mark.parametrize("racks", [[1, 2], [2, 2]])
def test_every_topology_in_real_processes(racks: list[int]) -> None:
    """Whole numbers add up exactly, floats to the same bits on all ranks that hold their sum."""
    group = Group.everybody(Cluster.regular(racks))

    def work(transport: Transport) -> dict[str, str]:
        digests = {}
        step = 0
        for variant, dtype, elements in product(VARIANTS, DTYPES, SIZES):
            case = f"{variant} {dtype} {elements}"
            schedule = build(variant, group, elements, dtype.itemsize)
            part = RankProgram.of(schedule, transport.rank)
            members = mean_sets(schedule, transport.rank)
            for _ in range(2):
                own = whole_numbers(transport.rank, step, elements).to(dtype)
                result = run_round(part, transport, own, step)
                expected = sum(whole_numbers(member, step, elements) for member in members)
                assert torch.equal(result, torch.as_tensor(expected).to(dtype)), case
                own = floats(transport.rank, step, elements).to(dtype)
                result = run_round(part, transport, own, step + 1)
                bits = sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest()
                if not is_gossip(variant):
                    digests[f"{case} {members} {step}"] = bits
                step += 2
        return digests

    agreed: dict[str, str] = {}
    for digests in run_ranks("tcp", group.size, work):
        for case, bits in digests.items():
            assert agreed.setdefault(case, bits) == bits, case


class Log:
    """A transport that writes down when what was sent."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.sent: list[tuple[float, int, Label]] = []

    @property
    def rank(self) -> int:
        return self.inner.rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        self.sent.append((monotonic(), peer, label))
        return self.inner.send(peer, label, array, deadline)

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        return self.inner.receive_any(wanted, deadline)

    def enter(self, epoch: int, members: Collection[int]) -> None:
        self.inner.enter_epoch(epoch, members)

    def close(self) -> None:
        self.inner.close()


def shaking_hands(
    late: int, seconds: float
) -> dict[int, tuple[list[tuple[float, int, Label]], float]]:
    """Of a ring in which one is late: what each rank sent when, and when it had finished."""
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> tuple[list[tuple[float, int, Label]], float]:
        log = Log(transport)
        if transport.rank == late:
            sleep(seconds)
        vector = np.full(100, float(transport.rank))
        part = RankProgram.of(schedule, transport.rank, handshake=True)
        execute(part, log, flat(schedule, vector), timeout=10)
        np.testing.assert_array_equal(vector, 6.0)
        return log.sent, monotonic()

    return run_threads(GROUP.ranks, work)


def test_nothing_is_sent_to_one_who_is_not_ready() -> None:
    found = shaking_hands(late=2, seconds=0.3)
    came = min(moment for moment, _, _ in found[2][0])  # its own first word
    for rank, (sent, _) in found.items():
        to_it = [moment for moment, peer, label in sent if peer == 2 and label.start < label.stop]
        assert all(moment > came for moment in to_it), rank
    assert any(peer == 2 for sent, _ in found.values() for _, peer, label in sent)


def test_who_has_finished_knows_that_its_messages_are_there() -> None:
    found = shaking_hands(late=0, seconds=0.2)
    for rank, (sent, finished) in found.items():
        [last] = {peer for _, peer, label in sent if label.start < label.stop}
        reported = [
            moment for moment, peer, label in found[last][0] if peer == rank and label[2:] == (1, 1)
        ]
        assert len(reported) == 1
        assert reported[0] < finished


def test_hands_are_shaken_over_tcp() -> None:
    schedule = build("ring", GROUP, 1000)

    def work(transport: Transport) -> list[float]:
        results = []
        for number in range(3):
            vector = np.full(1000, float(transport.rank + number))
            part = RankProgram.of(schedule, transport.rank, handshake=True)
            execute(part, transport, flat(schedule, vector), round_number=number, timeout=20)
            results += [float(vector.min()), float(vector.max())]
        return results

    for results in run_ranks("tcp", GROUP.size, work):
        assert results == [6.0, 6.0, 10.0, 10.0, 14.0, 14.0]
