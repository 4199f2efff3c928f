"""A run as a trace: what is in it, that it adds up, and that both forms of it say the same."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter as Multiset
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import BUCKETS, Run
from thalweg.errors import UsageError
from thalweg.observe.records import StepRecord
from thalweg.observe.run_report import RunReport, run_report
from thalweg.observe.timeline import timeline
from thalweg.report.trace import Trace, trace, write_trace

MEANT = Run(ranks=8, steps=30, slow={3: 3.0}, since=8, until=22)
ENOUGH = 0.02  # of a step, by which it may be missed
Found = tuple[str, str, str, int, int]
"""Rank, track, name, start and end of a slice in microseconds."""


def of(run: Run) -> RunReport:
    return run_report(timeline(run.records()))


def slices_of(found: Trace) -> list[Found]:
    return [
        (process.name, track.name, each.name, each.start, each.end)
        for process in found.processes
        for track in process.tracks
        for each in track.slices
        if each.end > each.start
    ]


def parsed(path: Path) -> tuple[list[Found], dict[int, Any], list[Any]]:
    """What the protocol's own messages make of it: slices, whose begins and ends are matched here
    as a viewer does; descriptions of tracks by their number; all other events."""
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    whole = protos.Trace()
    whole.ParseFromString(path.read_bytes())
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in whole.packet
        if packet.HasField("track_descriptor")
    }
    kinds = protos.TrackEvent
    found: list[Found] = []
    others = []
    open_: dict[int, list[tuple[str, int]]] = {}
    events = [packet for packet in whole.packet if packet.HasField("track_event")]
    for packet in events:
        event = packet.track_event
        assert event.track_uuid in tracks
        assert packet.timestamp % 1000 == 0
        stack = open_.setdefault(event.track_uuid, [])
        if event.type == kinds.TYPE_SLICE_BEGIN:
            stack.append((event.name, packet.timestamp // 1000))
        elif event.type == kinds.TYPE_SLICE_END:
            name, start = stack.pop()  # or there was no begin
            track = tracks[event.track_uuid]
            rank = tracks[track.parent_uuid].name
            found.append((rank, track.name, name, start, packet.timestamp // 1000))
        else:
            others.append(packet)
    assert not any(open_.values())  # every begin has its end
    return found, tracks, others


def from_json(path: Path) -> tuple[list[Found], list[dict[str, Any]]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    found = [
        (
            named["process_name", event["pid"], 0],
            named["thread_name", event["pid"], event["tid"]],
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        for event in events
        if event["ph"] == "X"
    ]
    return found, [event for event in events if event["ph"] not in "MX"]


@pytest.fixture(scope="module")
def perfetto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "run.pftrace"
    pytest.importorskip("perfetto")
    write_trace(path, trace(of(MEANT)))
    return path


def steps_of(run: Run) -> dict[tuple[str, int], StepRecord]:
    """As they were recorded, by each rank's own clock."""
    return {
        (f"rank {rank} on host{rank}", record.step): record
        for rank, records in run.records().items()
        for record in records
        if isinstance(record, StepRecord)
    }


@pytest.mark.parametrize("parameters", [False, True])
def test_compute_and_wait_add_up_to_the_recorded_step(parameters: bool, tmp_path: Path) -> None:
    meant = Run(ranks=8, steps=30, slow={3: 3.0}, parameters=parameters)
    write_trace(tmp_path / "run.pftrace", trace(of(meant)))
    slices, _, _ = parsed(tmp_path / "run.pftrace")
    whole = {(rank, int(n.split()[1])): (s, e) for rank, t, n, s, e in slices if t == "steps"}
    recorded = steps_of(meant)
    assert whole.keys() == recorded.keys()
    for (rank, number), (start, end) in whole.items():
        seconds = recorded[rank, number].seconds
        inside = [
            each
            for each in slices
            if each[0] == rank
            and each[1] in ("compute", "exposed communication")
            and start <= each[3] < end
        ]
        together = sum(each[4] - each[3] for each in inside) / 1e6
        assert together == pytest.approx(seconds, rel=ENOUGH)
        assert (end - start) / 1e6 == pytest.approx(seconds, rel=ENOUGH)
        assert all(each[4] <= end for each in inside)
        waits = {each[2] for each in inside if each[1] == "exposed communication"}
        assert waits == {f"wait for {'parameters' if parameters else 'gradients'}"}


def test_tracks_of_every_rank(perfetto: Path) -> None:
    slices, tracks, others = parsed(perfetto)
    children: dict[str, list[str]] = {}
    for track in sorted(tracks.values(), key=lambda track: track.sibling_order_rank):
        if track.parent_uuid:
            children.setdefault(tracks[track.parent_uuid].name, []).append(track.name)
    common = [
        "steps",
        "compute",
        "exposed communication",
        "encode",
        "rounds",
        "rounds 2",
        "exposed",
        "sent",
    ]
    assert sorted(children) == [f"rank {rank} on host{rank}" for rank in range(8)]
    assert children["rank 0 on host0"] == ["events", *common]
    assert children["rank 1 on host1"] == common
    assert children["rank 3 on host3"] == ["straggler", *common]
    [late] = [each for each in slices if each[1] == "straggler"]
    assert late[2].startswith("rank 3 on host3: compute time")
    [note] = [packet for packet in others if packet.track_event.name]
    assert note.track_event.name == "incident: it is over"


def test_slices_of_a_track_follow_one_another(perfetto: Path) -> None:
    slices, _, _ = parsed(perfetto)
    assert min(start for *_, start, _ in slices) == 0
    assert all(end > start for *_, start, end in slices)
    for place in {each[:2] for each in slices}:
        spans = sorted(each[3:] for each in slices if each[:2] == place)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_ranks_whose_clocks_were_seconds_apart_are_at_the_same_step(perfetto: Path) -> None:
    slices, _, _ = parsed(perfetto)
    own = [step.begin for (_, number), step in steps_of(MEANT).items() if number == 5]
    assert max(own) - min(own) > 50  # seven seconds a rank
    for number in range(MEANT.steps):
        spans = [each[3:] for each in slices if each[2] == f"step {number}"]
        assert len(spans) == MEANT.ranks
        common = min(end for _, end in spans) - max(start for start, _ in spans)
        longest = max(end - start for start, end in spans)
        assert common > 0.9 * longest


def test_both_forms_say_the_same(perfetto: Path, tmp_path: Path) -> None:
    made = trace(of(MEANT))
    for name in ("run.json", "run.json.gz"):
        write_trace(tmp_path / name, made)
        slices, others = from_json(tmp_path / name)
        assert slices == parsed(perfetto)[0] == slices_of(made)
        kinds = Multiset(event["ph"] for event in others)
        assert kinds == {"C": 2 * 8 * (MEANT.steps + 1), "i": 1}
        assert len(parsed(perfetto)[2]) == len(others)


def test_a_round_has_the_last_arrival() -> None:
    [zero] = [p for p in trace(of(MEANT)).processes if p.rank == 0]
    rounds = [
        each for track in zero.tracks if track.name.startswith("rounds") for each in track.slices
    ]
    assert len(rounds) == BUCKETS * MEANT.steps
    slow = [each for each in rounds if each.arguments["step"] == 15]
    for each in slow:
        assert each.arguments["last_arrival"] == "rank 3"
        assert each.arguments["ready_ms"] == pytest.approx(-1.0, abs=0.01)
        came = each.arguments["first_of_rank_3_ms"]
        assert isinstance(came, float)
        assert came > 50


def test_ranks_are_in_order_though_viewers_sort_by_name() -> None:
    names = [process.name for process in trace(of(Run(ranks=12, steps=3))).processes]
    assert names == sorted(names)
    assert names[2] == "rank 02 on host2"


def test_a_part_of_a_run_begins_at_zero() -> None:
    found = slices_of(trace(run_report(timeline(MEANT.records()), first=10, last=12)))
    assert {name for _, track, name, *_ in found if track == "steps"} == {
        "step 10", "step 11", "step 12",
    }  # fmt: skip
    assert min(each[3] for each in found) == 0


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("perfetto.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(UsageError, match=r"needs the package perfetto; pip install 'thalweg\[trac"):
        write_trace(tmp_path / "run.pftrace", trace(of(Run(steps=3))))
    assert not (tmp_path / "run.pftrace").exists()


def test_a_name_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"use one of \.json, \.json\.gz, \.pftrace"):
        write_trace(tmp_path / "run.xml", Trace(processes=()))
