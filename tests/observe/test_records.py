from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.observe.steps import step_of
from thalweg.observe.records import (
    BucketRecord,
    ClockSample,
    EncodeRecord,
    EventRecord,
    FlowRecord,
    Record,
    RunHeader,
    StepRecord,
    covered,
    parsed,
    written,
)

MOMENTS = st.integers(0, 10**12).map(lambda microseconds: microseconds / 10**6)
STEPS = st.builds(
    StepRecord,
    step=st.integers(0, 10**9),
    begin=MOMENTS,
    settled=MOMENTS,
    first=MOMENTS,
    last=MOMENTS,
    averaged=MOMENTS,
    optimized=MOMENTS,
    end=MOMENTS,
    store=MOMENTS,
    rounds=st.lists(
        st.builds(
            BucketRecord,
            st.integers(0, 99),
            MOMENTS,
            MOMENTS,
            MOMENTS,
            st.dictionaries(st.integers(0, 99), MOMENTS, max_size=3),
        ),
        max_size=3,
    ).map(tuple),
    encodings=st.lists(
        st.builds(EncodeRecord, st.integers(0, 9), MOMENTS, MOMENTS), max_size=2
    ).map(tuple),
    flows=st.lists(
        st.builds(FlowRecord, st.integers(0, 99), st.integers(0), MOMENTS), max_size=3
    ).map(tuple),
)


@given(STEPS)
def test_what_is_written_is_read(step: StepRecord) -> None:
    assert parsed(written(step)) == step
    assert "\n" not in written(step)


@pytest.mark.parametrize(
    "record",
    [
        RunHeader(
            rank=1,
            size=2,
            host="a",
            rack="r",
            members=(0, 1),
            sync="ring",
            at=1.5,
            thalweg="1",
        ),
        ClockSample(at=1.0, offset=2.0, error=0.1),
        EventRecord(at=1.0, step=3, topic="late", text="ä\nb"),
    ],
)
def test_others_too(record: Record) -> None:
    assert parsed(written(record)) == record


def test_kinds_of_a_newer_version_are_passed_over() -> None:
    assert parsed('{"kind": "dream", "at": 1}') is None


@pytest.mark.parametrize("line", ["", "3", "{", '{"kind": "step"}', '{"kind":"clock","what":1}'])
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        parsed(line)


def test_the_parts_of_a_step_add_up() -> None:
    """To all of its time, whatever they are."""
    step = step_of(0, computing=0.3, gradients=0.2, parameters=0.1, settled=0.05)
    assert step.computing == pytest.approx(0.3)
    assert step.exposed == pytest.approx(0.3)
    assert step.seconds == pytest.approx(step.computing + step.exposed + step.settled)


def test_what_is_hidden_is_what_is_exchanged_and_not_exposed() -> None:
    rounds = [
        BucketRecord(0, 0, 0.0, 1.0, {}),
        BucketRecord(1, 0, 0.5, 1.5, {}),
        BucketRecord(2, 0, 2.0, 2.1, {}),
    ]
    step = step_of(0, computing=2.0, gradients=0.4, rounds=rounds)
    assert step.exchanging == pytest.approx(1.6)
    assert step.hidden == pytest.approx(1.2)


def test_under_torchs_own_the_busiest_connection_tells() -> None:
    step = step_of(
        0, computing=1.0, gradients=0.1, flows=[FlowRecord(1, 5, 0.7), FlowRecord(2, 5, 0.3)]
    )
    assert step.hidden == pytest.approx(0.6)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=9))
def test_covered_counts_every_second_once(spans: list[list[int]]) -> None:
    inside = {second for start, stop in spans for second in range(start, stop)}
    assert covered([(start, stop) for start, stop in spans]) == len(inside)


def test_a_line_is_short() -> None:
    """A rank's 64 MB last for a hundred thousand steps of a few buckets."""
    rounds = [BucketRecord(b, 1e6 + 0.1234567, 1e6, 1e6, {1: 1e6}) for b in range(4)]
    line = written(
        step_of(10**6, computing=0.1, rounds=rounds, flows=[FlowRecord(1, 10**8, 0.123)])
    )
    assert len(line) < 640
    assert json.loads(line)["kind"] == "step"
