"""Prometheus of this machine, for tests: its tools by name, and a server that scrapes exporters of ours."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

SCRAPE_S = 0.5
PATIENCE_S = 30.0
"""How long a server may take to be ready, and series to come."""


def tool(name: str) -> str | None:
    """The path of `prometheus` or `promtool`: the environment's (.ci/install-prometheus), or the machine's; None without."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(what: str, true: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Asks another process again and again, until it is so."""
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s} s")
        time.sleep(0.1)


class Server:
    """A Prometheus that runs."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, **words: object) -> Any:
        """What the HTTP API answers.

        Raises:
            RuntimeError: it calls the question wrong; its words.
            OSError: it does not answer.
        """
        client = HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            client.request("GET", f"/api/v1/{path}?{urlencode(words, doseq=True)}")
            answer = json.loads(client.getresponse().read())
        finally:
            client.close()
        if answer["status"] != "success" or answer.get("warnings"):
            raise RuntimeError(f"{words}: {answer}")
        return answer["data"]

    def ready(self) -> bool:
        try:
            self.ask("status/buildinfo")
        except (OSError, ValueError):
            return False
        return True

    def has(self, expression: str) -> bool:
        """Whether an expression has a value now."""
        return bool(self.ask("query", query=expression)["result"])

    def series(self, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """The series of an expression over a time, less those that are nothing but NaN."""
        found = self.ask("query_range", query=expression, start=start_s, end=end_s, step=SCRAPE_S)["result"]
        return [one for one in found if any(math.isfinite(float(value)) for _, value in one["values"])]


@contextmanager
def prometheus(path: str, folder: Path, ports: list[int], rules: Path, scrape_s: float = SCRAPE_S) -> Iterator[Server]:
    """A Prometheus on a free port of 127.0.0.1, which scrapes exporters and evaluates rules until the context ends."""
    config = {
        "global": {"scrape_interval": f"{int(scrape_s * 1000)}ms", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "kvactors", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen([path, *words], stdout=log, stderr=log) as process:
        try:
            server = Server(port)
            until("Prometheus answers", server.ready)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
