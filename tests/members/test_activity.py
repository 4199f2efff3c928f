from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thalweg.members.activity import Activity, activity_text, key_of, last_seen, script_line


def test_what_a_thread_is_doing_is_told_with_its_line() -> None:
    there, go_on = threading.Event(), threading.Event()
    made: list[Activity] = []

    def collate() -> None:
        made.append(Activity())
        made[0].enter_phase("forward", 41)
        there.set()
        go_on.wait(20)  # where it hangs

    thread = threading.Thread(target=collate)
    thread.start()
    assert there.wait(20)
    found = made[0].entries(locate_after=-1.0)
    assert found["where"].startswith("test_activity.py:")
    assert found["where"].endswith("(collate)")
    assert "in forward of step 41 for " in activity_text(found)
    assert ", at test_activity.py:" in activity_text(found)
    assert made[0].entries(locate_after=60.0)["where"] == ""  # not long enough to look
    go_on.set()
    thread.join()
    assert script_line(thread.ident or 0) == ""  # it has ended


def test_a_library_whose_name_begins_with_torch_is_not_torch() -> None:
    path = f"{Path(torch.__file__).parent.resolve()}vision/transforms.py"
    names = {"line": lambda: script_line(threading.get_ident())}
    exec(compile("def resize():\n    return line()\n", path, "exec"), names)
    names["line"].__code__ = names["line"].__code__.replace(co_filename="<string>")
    assert names["resize"]() == "transforms.py:2 (resize)"


def test_it_is_found_in_the_store() -> None:
    store = dist.HashStore()
    assert last_seen(store, key_of(3)) == ""
    activity = {"phase": "backward", "step": 7, "lasts": 2.5, "where": "a.py:1 (f)"}
    store.set(key_of(3), json.dumps({"activity": activity}))
    assert last_seen(store, key_of(3)) == "in backward of step 7 for 2.5 s, at a.py:1 (f)"


@pytest.mark.parametrize("text", ["", "{", "{}"])
def test_nonsense_in_the_store_is_nothing(text: str) -> None:
    store = dist.HashStore()
    store.set(key_of(3), text)
    assert last_seen(store, key_of(3)) == ""
