"""Real vLLM while the store loses reads: every request ends with the tokens of a cold run, and nothing wrong is published."""

from __future__ import annotations

import json

import pytest

from tests.vllm.engine import ask_alone


@pytest.mark.parametrize(
    ("model", "more"),
    [("qwen3", []), ("qwen3", ["load_async=true"]), ("gptoss", []), ("granite", [])],
    ids=["inside a step", "between steps", "windows", "states"],
)
def test_lost_reads_change_no_output_and_publish_nothing_wrong(model: str, more: list[str]) -> None:
    found = json.loads(ask_alone("tests.vllm.fuzz", model, "7", "600", "0.1", "0.03", *more))
    assert found["wrong"] == []
    assert found["stored wrong"] == []
    assert found["left"] == {"requests": 0, "tracked": 0, "pins": 0, "reset": True}
    totals = found["totals"]
    assert totals["hit_tokens"] > 0
    assert totals["failed_loads"] > 0, "the test would prove nothing"
