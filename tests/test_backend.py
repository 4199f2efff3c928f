"""The backend of torch.distributed, beside Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thalweg_backend
from tests.training.workers import fingerprint, on_ranks, one_value, raised
from thalweg.errors import ThalwegError
from thalweg.facts import Cluster

thalweg_backend.register()
torch.set_num_threads(1)  # ranks are forked, which OpenMP's threads don't survive
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
STEPS = 6


@contextmanager
def group(folder: Path, rank: int, size: int, backend: str, **options: Any) -> Iterator[None]:
    store = dist.FileStore(str(folder / backend), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def reducer(of: Any = None) -> Any:
    return (of or dist.group.WORLD)._reducer


def train(rank: int, hook: Callable[[DistributedDataParallel], None] = lambda ddp: None) -> str:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return fingerprint(ddp.module)


def by_both(
    folder: Path, size: int, work: Callable[[int], Any], **options: Any
) -> list[dict[str, Any]]:
    """What `work` returns under Gloo and under Thalweg, and the number of our all-reduces."""

    def on_one(rank: int) -> dict[str, Any]:
        with group(folder, rank, size, "gloo"):
            found = {"gloo": work(rank)}
        with group(folder, rank, size, "thalweg", **options):
            return {**found, "thalweg": work(rank), "count": reducer().count}

    return on_ranks(size, on_one)


def test_every_operation_and_type(tmp_path: Path) -> None:
    """Two ranks have one order of addition, so results are equal to the last bit."""

    def work(rank: int) -> list[str]:
        results = []
        for dtype, op in product(DTYPES, OPS):
            tensor = torch.arange(1, 12).to(dtype) + rank
            try:
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
                results.append(f"{dtype} {op} {tensor.tolist()}")
            except RuntimeError as error:
                results.append(f"{dtype} {op} {str(error).splitlines()[0]}")
        return results

    results = by_both(tmp_path, 2, work)
    assert one_value(results, "thalweg") == results[0]["gloo"]
    assert one_value(results, "count") == 8  # SUM and AVG of four types


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5, 7), (1000, 33)])
def test_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        whole = torch.full(shape, rank + 1.0)
        dist.all_reduce(whole)
        turned = (torch.arange(6.0).reshape(2, 3) * (rank + 1)).T  # isn't contiguous
        dist.all_reduce(turned, op=dist.ReduceOp.AVG)
        return [whole.sum().item(), turned.tolist()]

    results = by_both(tmp_path, 3, work)
    assert one_value(results, "thalweg") == results[0]["gloo"]


@pytest.mark.parametrize("size", [2, 3])
def test_ddp(size: int, tmp_path: Path) -> None:
    results = by_both(tmp_path, size, train)
    if size == 2:
        assert one_value(results, "thalweg") == one_value(results, "gloo")
    assert one_value(results, "thalweg")
    assert results[0]["count"] >= STEPS


@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=["replicas of shards", "shards alone"])
def test_sharded_models(shape: tuple[int, ...], tmp_path: Path) -> None:
    """With two replicas each sum has two terms, so that results are equal to the last bit."""

    def work(rank: int) -> str:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        return str([p.full_tensor().tolist() for p in model.parameters()])  # type: ignore[attr-defined]

    results = by_both(tmp_path, 4, work)
    assert one_value(results, "thalweg") == results[0]["gloo"]


def halved(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def test_a_hook_of_ddp(tmp_path: Path) -> None:
    results = by_both(tmp_path, 2, lambda rank: train(rank, halved))
    assert one_value(results, "thalweg") == one_value(results, "gloo")


def test_a_callback_that_reduces_again_is_refused(tmp_path: Path) -> None:
    """It would come at another moment on each rank, and its number be another all-reduce's."""

    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 2, "thalweg"):
            first = dist.all_reduce(torch.ones(1 << 22), async_op=True).get_future()
            again = first.then(lambda _: dist.all_reduce(torch.ones(3)))
            try:
                again.wait()
            except RuntimeError as error:
                return {"text": str(error)}
            return {"text": ""}

    for result in on_ranks(2, work):
        assert "issued by a callback" in result["text"]


def test_groups_are_issued_in_any_order(tmp_path: Path) -> None:
    """Each has its own order; a rank may be elsewhere in another."""

    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 3, "thalweg"):
            groups = [dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([1, 2])]
            opened = [reducer(g).count for g in groups if isinstance(g, dist.ProcessGroup)]
            assert not any(opened)
            tensors = [torch.full((1000,), float(10**n)) * (rank + 1) for n in range(3)]
            own = [n for n, members in enumerate([(0, 1), (0, 1), (1, 2)]) if rank in members]
            order = own if rank == 0 else own[::-1]
            works = [dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in order]
            for done in works:
                done.wait()
            return {"sums": {str(n): tensors[n].unique().tolist() for n in own}}

    zero, one, two = on_ranks(3, work)
    assert zero["sums"] == {"0": [3.0], "1": [30.0]}
    assert one["sums"] == {**zero["sums"], "2": [500.0]}
    assert two["sums"] == {"2": [500.0]}


def test_a_group_beside_one_of_gloo(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 3, "gloo"):
            part = dist.new_group([0, 2], backend="thalweg")
            tensor = torch.ones(5) * (rank + 1)
            if rank != 1:
                dist.all_reduce(tensor, group=part)
                assert reducer(part).count == 1
            dist.all_reduce(tensor)
            return {"sum": tensor[0].item()}

    assert one_value(on_ranks(3, work), "sum") == 4 + 2 + 4


def test_a_second_group_in_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        sums = []
        for number in range(3):
            with group(tmp_path, rank, 2, "thalweg"):
                tensor = torch.ones(5) * number
                dist.all_reduce(tensor)
                sums.append(tensor.sum().item())
        return {"sums": sums}

    assert one_value(on_ranks(2, work), "sums") == [0.0, 10.0, 20.0]


def test_forked_loaders(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 2, "thalweg"):
            dist.all_reduce(torch.ones(3))  # threads and connections are there
            data = TensorDataset(torch.arange(8.0))
            total = torch.zeros(1)
            for (x,) in DataLoader(data, batch_size=2, num_workers=2):
                total += x.sum()
            dist.all_reduce(total)
            return {"total": total.item()}

    assert one_value(on_ranks(2, work), "total") == 56.0


def test_a_peer_that_dies_is_named_in_backward(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        dist.init_process_group(
            "thalweg", store=dist.FileStore(str(tmp_path / "s"), 2), rank=rank, world_size=2
        )
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(3):
            if rank == 1 and step == 2:
                reducer().close()  # as if the process was gone
                return {"text": ""}
            try:
                ddp(torch.ones(2, 4)).sum().backward()
            except RuntimeError as error:
                return {"text": str(error)}
        return {"text": "no error"}

    text = on_ranks(2, work)[0]["text"]
    assert "rank 0" in text
    assert "rank 1" in text
    assert "look at what happened to rank 1" in text


def test_a_rank_that_ends_with_an_all_reduce_under_way_says_so(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 3, "thalweg"):
            dist.all_reduce(torch.ones(3))
            if rank == 2:
                return {"text": ""}
            if rank == 1:
                dist.all_reduce(torch.ones(3), async_op=True)
                return {"text": ""}
            return raised(lambda: dist.all_reduce(torch.ones(3)))

    text = on_ranks(3, work)[0]["text"]
    assert "all-reduce 2 of 3 x float32 failed" in text
    assert "rank 1 ended while all-reduce 2 was under way" in text or "rank 2" in text


def test_errors_of_a_single_all_reduce(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 2, "thalweg"):
            dist.all_reduce(torch.ones(3))
            if rank == 1:
                reducer().close()
                return raised(lambda: dist.all_reduce(torch.ones(3)))
            return raised(lambda: dist.all_reduce(torch.ones(3)))

    zero, one = on_ranks(2, work)
    assert zero["kind"] == "RunError"
    assert (
        "all-reduce 2 of 3 x float32 failed: rank 0 lost its connection to rank 1" in zero["text"]
    )
    assert "the process group is destroyed" in one["text"]


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ("dssync", "can't run dssync: an all-reduce alone carries exact plans"),
        ("ring+powersgd", "can't run ring+powersgd"),
        ("gc(stragglers=1)", "can't run gc(stragglers=1)"),
        ("auto(allow=lossy)", "can't run auto(allow=lossy)"),
        ("rign", "there is no plan 'rign'"),
    ],
)
def test_plans_that_are_refused(plan: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ThalwegError) as caught, group(tmp_path, 0, 1, "thalweg", pg_options=plan):
        pass
    assert problem in str(caught.value)
    if "rign" not in plan:
        assert f'thalweg.attach(model, optimizer, plan="{plan}")' in str(caught.value)


@pytest.mark.parametrize("plan", ["ring", "tree", "halving_doubling", "double_tree", "ddp"])
def test_plans(plan: str, tmp_path: Path) -> None:
    results = by_both(tmp_path, 3, train, pg_options=plan)
    assert one_value(results, "thalweg")
    assert one_value(results, "count") == 0 if plan == "ddp" else results[0]["count"] > STEPS


def test_the_part_of_a_cluster(tmp_path: Path) -> None:
    """A group of ranks 1 and 3 finds its hosts in the cluster of all."""
    cluster = Cluster.regular([2, 2], nic="1gbit", uplink="100mbit")

    def work(rank: int) -> dict[str, Any]:
        with group(tmp_path, rank, 4, "thalweg", pg_options={"cluster": cluster}):
            part = dist.new_group([1, 3], pg_options={"cluster": cluster})
            tensor = torch.ones(10) * rank
            if rank in (1, 3):
                dist.all_reduce(tensor, group=part)
                assert [len(rack) for rack in reducer(part).group.racks] == [1, 1]
            dist.all_reduce(tensor)
            return {"sum": tensor[0].item()}

    assert one_value(on_ranks(4, work), "sum") == 0 + 4 + 2 + 4


def test_unprotected_parts_are_refused_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THALWEG_PROTECT", "required")
    monkeypatch.setenv("THALWEG_ENCRYPTION", "on")
    with (
        pytest.raises(ThalwegError, match="Gloo's part of the backend is neither"),
        group(tmp_path, 0, 1, "thalweg"),
    ):
        pass


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("thalweg")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
for _ in range(3):
    model(torch.ones(2, 100)).sum().backward()
print("rank", dist.get_rank(), "done", flush=True)
"""


def test_a_script_that_neither_imports_nor_destroys(tmp_path: Path) -> None:
    """Torch finds the backend by its entry point."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    assert ended.stderr.count("backend thalweg, plan auto(allow=exact): 2 workers on 1 host") == 1


def test_the_entry_point_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where warnings are errors, as here."""
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    thalweg_backend.register()
    assert "the backend thalweg is not registered" in caplog.text
