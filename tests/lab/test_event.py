"""Events as a scenario file has them."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.errors import LabError
from thalweg.facts import Duration, Rate
from thalweg.lab.event import LINK_ACTIONS, WORKER_ACTIONS, Event

MBIT50 = Rate.parse("50mbit")


@pytest.mark.parametrize(
    ("data", "event", "text"),
    [
        (
            {"at_step": 20, "action": "degrade", "rack": 0, "rate": "50mbit", "direction": "in"},
            Event(action="degrade", at_step=20, rack=0, rate=MBIT50, directions=("in",)),
            "step 20: degrade rack 0 at 50mbit (in)",
        ),
        (
            {"at": "1.5s", "action": "degrade", "host": "host3", "rate": "50mbit"},
            Event(action="degrade", at=Duration(1.5), host="host3", rate=MBIT50),
            "1.5s: degrade host host3 at 50mbit",
        ),
        (
            {"at_step": 0, "action": "restore", "rack": "rack1", "direction": "both"},
            Event(action="restore", at_step=0, rack="rack1"),
            "step 0: restore rack rack1",
        ),
        (
            {"at_step": 3, "action": "flow", "host": 0, "flows": 4, "direction": "out"},
            Event(action="flow", at_step=3, host=0, flows=4, directions=("out",)),
            "step 3: flow host 0 (out)",
        ),
        (
            {"at": "0s", "action": "flow", "rack": 1, "rate": "50mbit"},
            Event(action="flow", at=Duration(0.0), rack=1, rate=MBIT50),
            "0s: flow rack 1 at 50mbit",
        ),
        (
            {"at_step": 1, "action": "cut", "host": 2, "direction": "out"},
            Event(action="cut", at_step=1, host=2, directions=("out",)),
            "step 1: cut host 2 (out)",
        ),
        (
            {"at_step": 1, "action": "heal", "rack": 0},
            Event(action="heal", at_step=1, rack=0),
            "step 1: heal rack 0",
        ),
        *(
            (
                {"at_step": 7, "action": action, "host": 1},
                Event(action=action, at_step=7, host=1),
                f"step 7: {action} host 1",
            )
            for action in WORKER_ACTIONS
        ),
    ],
)
def test_every_action(data: dict[str, Any], event: Event, text: str) -> None:
    assert Event.parse(data) == event
    assert Event.parse(event) is event
    assert str(Event.parse(data)) == text


def test_no_action_was_forgotten() -> None:
    assert LINK_ACTIONS == ("degrade", "restore", "flow", "cut", "heal")
    assert WORKER_ACTIONS == ("kill", "restart", "pause", "resume")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"action": "explode"},
            "the event has no action 'explode'; give one of degrade, restore, flow, cut, heal, "
            "kill, restart, pause, resume",
        ),
        ({"action": None}, "the event has no action None; give one of degrade, "),
        ({"action": ["cut"]}, "the event has no action ['cut']; give one of degrade, "),
        ({"hosts": 1}, "the event has an unknown key 'hosts'; it takes action, at_step, at, "),
        ({"rack": None}, "cut needs one target; give rack or host"),
        ({"host": 1}, "cut needs one target; give rack or host"),
        ({"rack": -1}, "rack of the event is -1; give a number from 0, or a rack's name"),
        ({"rack": True}, "rack of the event is True; give a number from 0, or a rack's name"),
        ({"rack": ""}, "rack of the event is ''; give a number from 0, or a rack's name"),
        (
            {"rack": None, "host": 0.5},
            "host of the event is 0.5; give a number from 0, or a host's name",
        ),
        (
            {"rack": None, "host": ""},
            "host of the event is ''; give a number from 0, or a host's name",
        ),
        ({"at": "1s"}, "cut needs one time; give at_step or at"),
        ({"at_step": None}, "cut needs one time; give at_step or at"),
        ({"at_step": -1}, "at_step of the event is -1; give a whole number from 0"),
        ({"at_step": "3"}, "at_step of the event is '3'; give a whole number from 0"),
        ({"at_step": 1.0}, "at_step of the event is 1.0; give a whole number from 0"),
        ({"at_step": None, "at": 3}, "at of the event: '3' is not a duration; write it like 50ms "),
        ({"action": "kill"}, "kill applies to workers; give host instead of rack"),
        ({"action": "pause"}, "pause applies to workers; give host instead of rack"),
        ({"action": "degrade"}, 'degrade needs a rate; give rate = "50mbit"'),
        (
            {"action": "degrade", "rate": "50mpps"},
            "rate of the event: '50mpps' is not a rate; write it like 200mbit ",
        ),
        ({"direction": "up"}, "'up' is not a direction; give out, in or both"),
        ({"direction": ["in"]}, "['in'] is not a direction; give out, in or both"),
        ({"action": "flow", "flows": 0}, "flows of the event is 0; give a whole number from 1"),
        ({"flows": True}, "flows of the event is True; give a whole number from 1"),
    ],
)
def test_mistakes_are_told_in_one_line_with_a_remedy(change: dict[str, Any], message: str) -> None:
    data = {"at_step": 1, "action": "cut", "rack": 0} | change
    with pytest.raises(LabError) as caught:
        Event.parse({key: value for key, value in data.items() if value is not None})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_a_mistake_says_where_it_is() -> None:
    with pytest.raises(LabError, match=r"^flows of event 3 of x.toml is 'many'; "):
        Event.parse({"action": "flow", "rack": 0, "flows": "many"}, "event 3 of x.toml")
