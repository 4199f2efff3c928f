from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.errors import UnitError
from thalweg.facts import Count, Duration, Rate, Size, about, counted


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("25MB", 25_000_000),
        ("4MiB", 4 << 20),
        ("1.5KB", 1500),
        ("1.5kB", 1500),
        ("0B", 0),
        (" 7 GB ", 7 * 10**9),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Size.parse(text) == Size(nbytes)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("200mbit", 2e8), ("200Mbit", 2e8), ("1gbit/s", 1e9), ("25MB/s", 2e8), ("2.5gbit", 2.5e9)],
)
def test_rates(text: str, bits: float) -> None:
    assert Rate.parse(text).bits_per_second == bits


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("2s", 2), ("100us", 1e-4), ("100µs", 1e-4), ("1min", 60)]
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration.parse(text).seconds == seconds


def test_counts() -> None:
    assert Count.parse("2.5M").value == 2_500_000


def test_a_rate_knows_how_long_bytes_take() -> None:
    assert Rate.parse("200mbit").seconds(25_000_000) == 1.0


@pytest.mark.parametrize("kind", [Size, Rate, Duration, Count])
@pytest.mark.parametrize("text", ["", "fast", "-1MB", "1.2.3s", "MB", "5 furlongs", "1e", "nan"])
def test_nonsense_is_refused(kind: type[Size], text: str) -> None:
    with pytest.raises(UnitError, match=r" is not .*; write it like "):
        kind.parse(text)


@pytest.mark.parametrize("text", ["200mbps", "200Mbps", "200Mb/s", "200 mb/s", "200Mbit/s"])
def test_a_small_b_is_a_bit(text: str) -> None:
    assert Rate.parse(text) == Rate.parse("200mbit")
    assert str(Rate.parse(text)) == text


def test_a_letter_without_a_unit_counts_bytes() -> None:
    assert Size.parse("800K") == Size.parse("800KB")
    assert str(Size(800_000)) == "800KB"
    assert Count.parse("800K").value == 800_000
    assert Count.parse("7B").value == 7_000_000_000


@pytest.mark.parametrize(
    ("kind", "text", "meant"), [(Size, "25mb", "25MB"), (Rate, "25mB/s", "25MB/s")]
)
def test_what_differs_in_capitals_alone_is_proposed(
    kind: type[Size], text: str, meant: str
) -> None:
    with pytest.raises(UnitError, match=rf"is not .*; did you mean {meant}\? write it like"):
        kind.parse(text)


def test_one_and_many() -> None:
    assert [counted(n, "worker") for n in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert counted(3, "process") == "3 processes"


@pytest.mark.parametrize("text", ["1e30", "1e99999999", "9" * 400])
@pytest.mark.parametrize(
    ("kind", "unit"), [(Size, "B"), (Rate, "gbit"), (Duration, "s"), (Count, "")]
)
def test_what_is_beyond_reason_is_refused(kind: type[Size], unit: str, text: str) -> None:
    with pytest.raises(UnitError, match="is too large; write it like"):
        kind.parse(text + unit)


def test_a_rate_of_less_than_a_bit_is_refused() -> None:
    with pytest.raises(UnitError, match="moves nothing"):
        Rate.parse("1e-400gbit")


@pytest.mark.parametrize("kind", [Size, Count])
def test_halves_of_bytes_are_refused(kind: type[Size]) -> None:
    with pytest.raises(UnitError, match="whole"):
        kind.parse("0.3B" if kind is Size else "0.3")


def test_no_rate_is_refused() -> None:
    with pytest.raises(UnitError, match=r"a rate of '0mbit' moves nothing; give at least 1bit"):
        Rate.parse("0mbit")


@pytest.mark.parametrize(
    ("kind", "text"), [(Size, "4096KB"), (Rate, "0.2gbit"), (Duration, "1000us"), (Count, "2500k")]
)
def test_a_quantity_prints_as_it_was_written(kind: type[Size], text: str) -> None:
    assert str(kind.parse(text)) == text


@given(st.integers(0, 10**15))
def test_what_is_printed_is_read_again(number: int) -> None:
    assert Size.parse(str(Size(number))) == Size(number)
    assert Count.parse(str(Count(number))) == Count(number)
    assert Duration.parse(str(Duration(number / 1000))) == Duration(number / 1000)
    if number:
        assert Rate.parse(str(Rate(float(number)))) == Rate(float(number))


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (Size(25_000_000), "25MB"),
        (Size(4 << 20), "4MiB"),
        (Rate(2e8), "200mbit"),
        (Duration(5e-5), "50us"),
    ],
)
def test_the_shortest_spelling_is_chosen(quantity: Size, text: str) -> None:
    assert str(quantity) == text


def test_measured_figures_are_rounded() -> None:
    assert about(12_345_678, "B") == "12.3 MB"
    assert about(999_999, "B") == "1 MB"
    assert about(0, "B") == "0 B"
    assert about(0.000297, "s") == "297 us"
    assert about(1.6, "s") == "1.6 s"
    assert about(7200, "s") == "7200 s"
    assert about(6.4e-8, "s") == "64 ns"
