"""The live views of a worker and of a scheduler in real vLLM."""

from __future__ import annotations

import json

from tests.vllm.engine import ask_alone


def test_a_worker_and_its_scheduler_can_be_looked_at() -> None:
    seen = json.loads(ask_alone("tests.vllm.looked_at", "gptoss"))
    assert seen["sockets"] == ["live.rank0.sock", "live.scheduler.sock"]
    worker, scheduler = seen["worker"], seen["scheduler"]
    assert (worker["name"], worker["rank"], scheduler["rank"]) == ("gptoss kv_both", "0", "scheduler")
    assert seen["states"] == ["running", ""]
    for group in worker["groups"]:
        assert group["saved"] == group["loaded"] > 0
    assert worker["waits"]["save_wait_s"]["count"] > 0
    counters = scheduler["counters"]
    assert (counters["lookups"], counters["lookup_misses"], counters["failed_loads"]) == (2, 1, 0)
    assert counters["hit_tokens"] == 384
    assert scheduler["gauges"] == {"pinned": 0}
    assert seen["names"] == ["0", "1"], "vLLM's own ids, each with a random end"
    assert seen["story"][0] == "load 3 begins: 4 blocks to load, 0 to save"
    assert seen["story"][-1] == "get released (loaded)"
    assert seen["left"] == [], "an engine that ends takes its sockets away"
