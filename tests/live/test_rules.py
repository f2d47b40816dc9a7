"""The alert rules in Prometheus's own checker: each fires on what it is for, and not on what is near it (alerts_test.yaml)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.live.prometheus import tool
from tests.live.test_dashboards import FOLDER, RULES

CASES = Path(__file__).parent / "alerts_test.yaml"
PROMTOOL = tool("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: .ci/install-prometheus VENV, or apt-get install prometheus")
@pytest.mark.parametrize("words", [["check", "rules", FOLDER / "alerts.yaml"], ["test", "rules", CASES]], ids=["check", "test"])
def test_promtool_finds_nothing(words: list[str | Path]) -> None:
    assert PROMTOOL is not None
    run = subprocess.run([PROMTOOL, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, "SUCCESS" in run.stdout) == (0, True), run.stdout + run.stderr


def test_every_alert_has_a_time_when_it_fires_and_one_when_it_does_not() -> None:
    seen: dict[str, set[bool]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for moment in case["alert_rule_test"]:
            seen.setdefault(moment["alertname"], set()).add(bool(moment["exp_alerts"]))
    assert seen == {rule["alert"]: {True, False} for rule in RULES}
