"""Everything that the dashboard and the alert rules ask for, asked of a real Prometheus that scrapes real exporters.

One is of a replay on a store that fails now and then; the other has the counts that only vLLM's scheduler and a hand-off have.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kvactors.core.metrics import COUNTERS
from kvactors.live import Address, LiveView
from tests.live.prometheus import SCRAPE_S, Server, free_port, prometheus, tool, until
from tests.live.test_dashboards import DASHBOARD, FOLDER, PANELS, RULES, used
from tests.live.test_dashboards import parsed as parsed_promql

ROOT = Path(__file__).parents[2]
PROMETHEUS = tool("prometheus")
REPLAY = "examples/sample_trace.jsonl --layout gemma-3-27b --scale 4096 --speed 20 --faults flaky-store --live"

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus: .ci/install-prometheus VENV, or apt-get install prometheus"),
]

LEAST_SCRAPES = 8
NEEDED = (
    "rate(kvactors_loaded_blocks_total[3s]) > 0",
    "rate(kvactors_revoked_blocks_total[3s]) > 0",
    "rate(kvactors_exposed_wait_seconds_count[3s]) > 0",
    "rate(kvactors_save_wait_seconds_count[3s]) > 0",
    "rate(kvactors_handoff_sent_total[3s]) > 0",
    f"count_over_time(kvactors_steps_total[1m]) >= {LEAST_SCRAPES}",
)
"""Where these have something, everything can be asked."""

QUERIES = {f"{panel['title']}, {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}


class Scraped(NamedTuple):
    server: Server
    ports: list[int]
    start_s: float
    end_s: float


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Two exporters that were scraped for some seconds, and still are."""
    assert PROMETHEUS is not None
    folder, ports, start_s = tmp_path_factory.mktemp("prometheus"), [free_port(), free_port()], time.time()
    counted: Counter[str] = Counter()

    def totals() -> Counter[str]:
        counted.update(key for key, metric in COUNTERS.items() if not metric.label)
        return counted

    command = [sys.executable, "-m", "kvactors", "replay", *REPLAY.split(), f"127.0.0.1:{ports[0]}"]
    with (
        LiveView(None, Address.of(f"127.0.0.1:{ports[1]}"), rank="scheduler", totals=totals, gauges=lambda: {"pinned": 1}),
        prometheus(PROMETHEUS, folder, ports, FOLDER / "alerts.yaml") as server,
        (folder / "replay").open("wb") as said,
        subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said) as replay,
    ):
        try:
            for expression in NEEDED:
                until(f"{expression} has data", partial(server.has, expression))
            until("the rules were evaluated", lambda: all(rule["lastEvaluation"] > "1" for rule in rules(server)))
            assert replay.poll() is None, (folder / "replay").read_text()
            yield Scraped(server, ports, start_s, time.time())
        finally:
            replay.send_signal(signal.SIGTERM)
            try:
                replay.wait(20)
            except subprocess.TimeoutExpired:
                replay.kill()


def rules(server: Server) -> list[dict[str, str]]:
    return [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]


def filled(text: str, chosen: dict[str, str] | None = None) -> str:
    """An expression as Grafana asks it: with the variables' values, or what stands for all of them."""
    text = text.replace("$__rate_interval", f"{int(4 * SCRAPE_S)}s")
    return re.sub(r"\$(\w+)", lambda match: (chosen or {}).get(match[1], ".*"), text)


@pytest.mark.parametrize("name", QUERIES)
def test_a_panels_query_has_data(scraped: Scraped, name: str) -> None:
    assert scraped.server.series(filled(QUERIES[name]), scraped.start_s, scraped.end_s)


def test_all_rules_are_evaluated_and_what_they_ask_for_is_there(scraped: Scraped) -> None:
    found = rules(scraped.server)
    assert {rule["name"]: (rule["health"], rule.get("lastError")) for rule in found} == {
        rule["alert"]: ("ok", None) for rule in RULES
    }
    for rule in RULES:
        scraped.server.ask("query", query=rule["expr"])
        for selector, _, _ in used(parsed_promql(rule["expr"])):
            assert scraped.server.ask("series", **{"match[]": selector.name, "start": scraped.start_s}), selector.name


def test_the_variables_have_what_there_is_to_choose(scraped: Scraped) -> None:
    instances = {f"127.0.0.1:{port}" for port in scraped.ports}
    for variable, values in (("job", {"kvactors"}), ("instance", instances), ("rank", {"0", "scheduler"})):
        definition = next(v["definition"] for v in DASHBOARD["templating"]["list"] if v["name"] == variable)
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", definition)
        assert match is not None, definition
        found = scraped.server.ask(f"label/{match[2]}/values", **{"match[]": filled(match[1]), "start": scraped.start_s})
        assert set(found) == values


@pytest.mark.parametrize(("rank", "running"), [("0", 1), ("(0|scheduler)", 1), ("scheduler", 0)])
def test_a_choice_of_ranks_leaves_the_others_out(scraped: Scraped, rank: str, running: int) -> None:
    """Grafana puts several choices in as (a|b), and escapes the dots of an instance."""
    chosen = {"rank": rank, "instance": "|".join(f"127\\\\.0\\\\.0\\\\.1:{port}" for port in scraped.ports)}
    found = scraped.server.series(filled(QUERIES["Engines running, A"], chosen), scraped.start_s, scraped.end_s)
    assert len(found) == running


def test_every_target_is_up_and_its_text_is_as_prometheus_wants_it(scraped: Scraped) -> None:
    targets = scraped.server.ask("targets")["activeTargets"]
    assert {target["health"] for target in targets} == {"up"}
    assert len(targets) == len(scraped.ports)
