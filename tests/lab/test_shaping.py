"""What is asked of the kernel for a link, which needs no kernel."""

from __future__ import annotations

import pytest

from thalweg.errors import LabError
from thalweg.facts import Cluster, Duplex, Duration, Link, Rate
from thalweg.lab.shaping import MAX_LINK_RATE, MIN_LINK_RATE, Shape, declared, qdiscs


def rate(text: str) -> Rate:
    return Rate.parse(text)


def test_a_link_without_a_rate_has_no_discipline() -> None:
    assert qdiscs(Shape()) == []


def test_a_rate_is_a_token_bucket() -> None:
    assert qdiscs(Shape(rate=rate("50mbit"))) == [
        {
            "kind": "tbf",
            "handle": "1:",
            "rate": 6_250_000,
            "burst": 128 * 1024,
            "limit": 1_000_000,
        }
    ]


@pytest.mark.parametrize("text", ["8kbit", "1mbit", "200mbit", "1gbit", "10gbit", "34gbit"])
def test_a_bucket_holds_two_of_the_kernels_largest_packets_and_two_milliseconds(text: str) -> None:
    [bucket] = qdiscs(Shape(rate=rate(text)))
    bytes_per_second = rate(text).bits_per_second / 8
    assert bucket["burst"] == max(128 * 1024, bytes_per_second * 0.002)
    assert bucket["limit"] == max(1_000_000, bytes_per_second * 0.05)
    assert bucket["rate"] < 2**32


def test_a_cut_link_takes_nothing_whatever_else_it_was() -> None:
    nothing = [{"kind": "pfifo", "handle": "1:", "limit": 0}]
    assert qdiscs(Shape(cut=True)) == nothing
    shape = Shape(rate=rate("1gbit"), delay=0.01, loss=0.1, cut=True)
    assert qdiscs(shape) == nothing
    assert not shape.needs_netem


def test_delay_and_loss_come_first_and_the_bucket_is_within() -> None:
    netem, bucket = qdiscs(Shape(rate=rate("50mbit"), delay=0.0255, loss=0.01))
    assert (netem["kind"], netem["handle"], netem["delay"]) == ("netem", "1:", 25_500)
    assert netem["loss"] == pytest.approx(1.0)  # per cent
    assert "parent" not in netem
    assert (bucket["kind"], bucket["handle"], bucket["parent"]) == ("tbf", "2:", "1:1")


@pytest.mark.parametrize("shape", [Shape(delay=0.001), Shape(loss=0.5)])
def test_delay_or_loss_alone(shape: Shape) -> None:
    assert shape.needs_netem
    assert [qdisc["kind"] for qdisc in qdiscs(shape)] == ["netem"]


@pytest.mark.parametrize("text", ["1bit", "7.9kbit", "34.1gbit", "1tbit"])
def test_rates_that_the_kernel_cannot_count(text: str) -> None:
    with pytest.raises(LabError) as caught:
        Shape(rate=rate(text))
    assert str(caught.value) == (
        f"the lab can't emulate a link of {text}; give {MIN_LINK_RATE} to {MAX_LINK_RATE}"
    )
    assert (str(MIN_LINK_RATE), str(MAX_LINK_RATE)) == ("8kbit", "34gbit")


def test_every_link_as_the_cluster_has_it() -> None:
    cluster = Cluster.regular(
        [2, 1],
        nic=["10mbit", Duplex(rate("100mbit"), rate("20mbit")), "30mbit"],
        uplink=["5mbit", Duplex(rate("7mbit"), rate("9mbit"))],
    )
    assert declared(cluster, loss=0.0, netem=True) == {
        Link("nic", "host0", "out"): Shape(rate=rate("10mbit")),
        Link("nic", "host0", "in"): Shape(rate=rate("10mbit")),
        Link("nic", "host1", "out"): Shape(rate=rate("100mbit")),
        Link("nic", "host1", "in"): Shape(rate=rate("20mbit")),
        Link("nic", "host2", "out"): Shape(rate=rate("30mbit")),
        Link("nic", "host2", "in"): Shape(rate=rate("30mbit")),
        Link("uplink", "rack0", "out"): Shape(rate=rate("5mbit")),
        Link("uplink", "rack0", "in"): Shape(rate=rate("5mbit")),
        Link("uplink", "rack1", "out"): Shape(rate=rate("7mbit")),
        Link("uplink", "rack1", "in"): Shape(rate=rate("9mbit")),
    }


def test_delay_and_loss_are_the_uplinks_and_only_by_netem() -> None:
    latencies = [Duration.parse("5ms"), Duration.parse("0s")]
    cluster = Cluster.regular([1, 1], nic="10mbit", uplink_latency=latencies)
    shapes = declared(cluster, loss=0.25, netem=True)
    for way in ("out", "in"):
        assert shapes[Link("uplink", "rack0", way)] == Shape(delay=0.005, loss=0.25)
        assert shapes[Link("uplink", "rack1", way)] == Shape(loss=0.25)
        assert shapes[Link("nic", "host0", way)] == Shape(rate=rate("10mbit"))
    without = declared(cluster, loss=0.25, netem=False)
    assert not any(shape.needs_netem for shape in without.values())
