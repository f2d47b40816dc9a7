"""The page about live views says what is there, and its program prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvactors.core.metrics import FAMILIES
from kvactors.core.story import MOST_EVENTS, MOST_EVENTS_EACH, MOST_REQUESTS
from kvactors.live import Address, LiveView, server
from kvactors.live import snapshot as snapshots
from tests.live.test_dashboards import RULES

PAGE = (Path(__file__).parents[2] / "docs/live.md").read_text()


def part(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_program_prints_what_it_says(tmp_path: Path) -> None:
    text = part("In a program of your own")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    (shown,) = re.findall(r"It prints\n\n((?:    .*\n)+)", text)
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert ran.stdout == re.sub(r"^    ", "", shown, flags=re.MULTILINE), ran.stderr


def test_every_metric_has_its_row() -> None:
    kind, rows = "", {}
    for line in part("Metrics").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[1] == "labels":
            kind = cells[0]
        elif len(cells) == 3 and cells[0].startswith("`"):
            rows[f"kvactors_{cells[0].strip('`')}"] = (kind, tuple(re.findall(r"`(\w+)`", cells[1])), cells[2])
    assert rows == {f.name: (f.kind, f.labels[1:], f.meaning) for f in FAMILIES.values()}


def test_every_alert_and_every_path_is_there(tmp_path: Path) -> None:
    assert re.findall(r"^\| `(Kvactors\w+)`", part("Dashboard and alerts"), re.MULTILINE) == [rule["alert"] for rule in RULES]
    with LiveView(None, Address.of(str(tmp_path / "live.sock"))) as view:
        paths = list(view._server._routes)
    assert [path.partition("?")[0] for path in re.findall(r"^\| `(/[^`]*)`", part("The endpoint"), re.MULTILINE)] == paths


@pytest.mark.parametrize(
    ("heading", "said"),
    [
        ("The endpoint", f"at most {server.MOST_REQUEST_BYTES:,} bytes"),
        ("The endpoint", f"at most {server.MOST_READS} pieces"),
        ("The endpoint", f"has {server.WRITE_S:g} seconds to go"),
        ("The endpoint", f"{server.MOST_CLIENTS} clients are heard at once"),
        ("The endpoint", f"{snapshots.SLICE:,} at a time"),
        ("The endpoint", f"rests {server.REST_FACTOR} times"),
        ("`kvactors story REQUEST`", f"last {MOST_REQUESTS:,} requests"),
        ("`kvactors story REQUEST`", f"up to {MOST_EVENTS_EACH:,} events each and {MOST_EVENTS:,} in all"),
    ],
)
def test_limits_are_those_of_the_code(heading: str, said: str) -> None:
    assert said in " ".join(part(heading).split())
