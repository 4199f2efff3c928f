"""Advice: the order, the reasons, and what other clusters would change."""

from dataclasses import replace
from functools import cache
from math import sqrt

import pytest

from tests.clusters import with_late
from thalweg import Cluster, Situation, Size, Workload, advise
from thalweg.declarations import Promise
from thalweg.errors import UsageError
from thalweg.facts import Costs, Duration, Rate, StragglerDelay, Tensor
from thalweg.facts.situation import scaled, slowest_nic, suppose, with_workers
from thalweg.predict import predict
from thalweg.predict.advisor import crossovers
from thalweg.predict.estimate import Advice

RACKS = Cluster.regular([4, 4], nic="200mbit", uplink="50mbit", latency=Duration(1e-4))
SMALL = Cluster.regular([2, 2], nic="200mbit", uplink="50mbit", latency=Duration(1e-4))


@cache
def advised(allow: Promise) -> Advice:
    return advise(situation(), allow=allow)


def job(size: str = "2MB", compute: float = 0.05) -> Workload:
    costs = Costs(forward=Duration(compute / 3), backward=Duration(2 * compute / 3))
    return replace(Workload.of_size(Size.parse(size)), costs=costs)


def situation(cluster: Cluster = SMALL, workload: Workload | None = None) -> Situation:
    return Situation(cluster=cluster, workload=workload or job())


def test_best_first_and_ddp_among_them() -> None:
    advice = advise(situation(RACKS))
    seconds = [ranked.estimate.seconds for ranked in advice.ranking]
    assert seconds == sorted(seconds)
    assert "ddp" in {ranked.plan.text.preset.name for ranked in advice.ranking}
    assert {ranked.promise for ranked in advice.ranking} == {Promise.EXACT}
    assert advice.best.vs_ddp > 1.2
    assert str(advice.best.plan) in advice.verdict
    assert all(ranked.why and ranked.survives for ranked in advice.ranking)


def test_parts_of_a_step_add_up_and_are_in_the_interval() -> None:
    for ranked in advised(Promise.EVENTUAL).ranking:
        estimate = ranked.estimate
        assert estimate.low <= estimate.seconds <= estimate.high
        assert (
            min(
                estimate.parts.compute,
                estimate.parts.encode,
                estimate.parts.decode,
                estimate.parts.transfer,
                estimate.parts.waiting,
            )
            >= -1e-12
        )


def test_what_is_not_allowed_is_not_advised() -> None:
    lossy = advised(Promise.LOSSY)
    assert {ranked.promise for ranked in lossy.ranking} == {Promise.EXACT, Promise.LOSSY}
    eventual = advised(Promise.EVENTUAL)
    assert {ranked.promise for ranked in eventual.ranking} == set(Promise)


def test_plain_ddp_is_right_where_computing_is_all() -> None:
    advice = advise(situation(Cluster.regular([4], nic="100gbit"), job("1MB", compute=1.0)))
    assert "Keep DDP" in advice.verdict


def test_more_steps_for_lossy_plans_put_exact_ones_first() -> None:
    dear = advise(situation(), allow=Promise.LOSSY, extra_steps={Promise.LOSSY: 100.0})
    assert dear.best.promise is Promise.EXACT
    assert any("10000%" in text for text in dear.assumed)


def test_codes_are_left_out_without_data_and_it_is_said() -> None:
    advice = advise(situation(), has_data=False)
    assert not [ranked for ranked in advice.ranking if ranked.plan.redundancy is not None]
    assert "data=" in advice.left_out["gc(stragglers=1)"]


def test_late_workers_are_worth_a_code() -> None:
    delay = StragglerDelay(probability=0.05, delay=Duration(5.0))
    punctual = situation(Cluster.regular([6], nic="1gbit"), job("100KB"))
    best = advise(suppose(punctual, late=delay)).best
    assert best.plan.redundancy is not None


def test_smaller_buckets_where_backward_hides_them() -> None:
    """Layers that are ready one after the other, and links that take as long as backward."""
    cluster = Cluster.regular([4], nic="100mbit", latency=Duration(1e-5))
    layers = tuple(Tensor(name=f"t{i}", shape=(125, 1000)) for i in range(16))
    advice = advise(situation(cluster, replace(job(compute=1.5), tensors=layers)))
    assert "bucket=" in str(advice.best.plan)


def test_where_curves_cross() -> None:
    """1/x and the constant 1 cross at 1; on a line of logarithms exactly."""
    rates = (0.25, 1.0 / 2, 2.0, 4.0)
    curves = {"links": tuple(1 / rate for rate in rates), "computing": (1.0,) * 4}
    [found] = crossovers(rates, curves)
    assert (found.slower_links, found.faster_links) == ("computing", "links")
    assert found.bits_per_second == pytest.approx(sqrt(0.5 * 2.0))


def test_a_sweep_goes_down_with_faster_links() -> None:
    sweep = advise(situation(), sweep=True).sweep
    assert sweep is not None
    for seconds in sweep.seconds.values():
        assert list(seconds) == sorted(seconds, reverse=True)


def test_what_if_the_links_were_faster() -> None:
    faster = suppose(situation(RACKS), bandwidth=Rate.parse("1gbit")).cluster
    assert slowest_nic(faster) == pytest.approx(1e9)
    [uplink] = {rack.uplink for rack in faster.racks}
    assert uplink is not None
    assert uplink.out.bits_per_second == pytest.approx(250e6)
    assert scaled(RACKS, 1.0) == RACKS


def test_what_if_there_were_more_workers() -> None:
    more = with_workers(RACKS, 13)
    assert [len(rack.ranks) for rack in more.racks] == [7, 6]
    assert sorted(rank for rack in more.racks for rank in rack.ranks) == list(range(13))
    assert with_workers(RACKS, 1).workers == 1


def test_what_if_computing_were_faster() -> None:
    slow = situation(workload=job(compute=0.3))
    faster = suppose(slow, compute=2.0).workload
    assert faster.costs.backward.seconds == pytest.approx(0.1)


def test_what_is_supposed_holds_for_the_declared_cluster_too() -> None:
    declared = replace(situation(), declared=RACKS)
    supposed = suppose(declared, workers=3)
    assert (supposed.cluster.workers, supposed.laid_out_for.workers) == (3, 3)


@pytest.mark.parametrize("workers", [0, -3, 10**9])
def test_impossible_workers(workers: int) -> None:
    with pytest.raises(UsageError, match="workers are not possible"):
        with_workers(RACKS, workers)


@pytest.mark.parametrize("times", [0.0, -1.0, float("nan")])
def test_impossible_computing(times: float) -> None:
    with pytest.raises(UsageError, match="times as fast"):
        suppose(situation(), compute=times)


def with_one_late(workers: int, seconds: float, nic: str = "1gbit") -> Cluster:
    late = StragglerDelay(probability=1.0, delay=Duration(seconds))
    return with_late(Cluster.regular([workers], nic=nic, latency=Duration(1e-4)), {1: late})


def test_a_straggler_is_waited_for_only_while_nothing_is_left_to_do() -> None:
    """20 MB take 0.16 s: the others reduce-scatter 6/7 of that, and it is late for 0.3 s."""
    given = situation(with_one_late(8, 0.3), job("20MB"))
    ring, around = (predict(sync, given).parts for sync in ("ring", "stragglar"))
    assert ring.waiting == pytest.approx(0.3)
    assert 0.3 - 0.16 < around.waiting < 0.3 - 0.16 * 6 / 7 + 0.02
    assert around.transfer + around.waiting < ring.transfer + ring.waiting - 0.1
    by_form = predict("stragglar", given, by_form=True).parts
    assert by_form.waiting == pytest.approx(0.3 - 0.16 * 6 / 7, abs=0.005)


def late_by(cluster: Cluster, seconds: float) -> Cluster:
    late = StragglerDelay(probability=0.1, delay=Duration(seconds))
    return with_late(cluster, dict.fromkeys(range(cluster.workers), late))


def test_a_plan_for_stragglers_is_advised_where_one_was_measured() -> None:
    on_time = advise(situation(Cluster.regular([8], nic="1gbit"), job("20MB")))
    all_late = advise(situation(late_by(SMALL, 0.3)))
    for advice in (on_time, all_late):
        assert "stragglar" not in {str(ranked.plan).split()[0] for ranked in advice.ranking}
    one_late = advise(situation(with_one_late(8, 0.3), job("20MB")))
    assert one_late.best.plan.topology.name == "stragglar"
