"""What the connector counts: added up over ranks and over time, and the same in the log and in Prometheus."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvactors.core.metrics import REVOKE_CAUSES
from kvactors.core.stats import EngineStats, GroupStats, SessionStats
from kvactors.vllm import scheduler, worker
from kvactors.vllm.stats import COUNTERS, GAUGES, PREFIX, WAITS, Collector, ConnectorStats, build_prom_metrics


def engine(saved: int = 0, loaded: int = 0, steps: int = 0, **sessions: Any) -> EngineStats:
    groups = {
        0: GroupStats(saved=saved, loaded=loaded, bytes_saved=100 * saved, bytes_loaded=100 * loaded),
        1: GroupStats(saved=2 * saved, bytes_saved=20 * saved),
    }
    return EngineStats(groups=groups, steps=steps, sessions=SessionStats(**sessions))


# -- what moved --------------------------------------------------------------------------------------------------------


def test_a_collector_gives_what_moved_since_the_last_call_and_every_gauge_of_its_rank() -> None:
    collector = Collector(rank=3)
    own = {"lookups": 5, "exposed_wait_s": 0.25}
    first = collector.collect(engine(saved=4, steps=1, open_now=2, revoked_by={"no space": 1}), own, 7, 1)
    assert first is not None
    assert first.data == {
        "lookups": 5,
        "exposed_wait_s": [0.25],
        "saved_bytes": 480,
        "steps": 1,
        "saved_blocks": {"0": 4, "1": 8},
        "revoked_by": {"no space": 1},
        "sessions_open": {"3": 2},
        "circuit_open": {"3": 0},
        "queue_depth": {"3": 7},
        "pending_saves": {"3": 1},
    }
    now = engine(saved=4, loaded=1, steps=2, open_now=2, revoked_by={"no space": 1, "unreachable": 3})
    second = collector.collect(now, {"lookups": 5, "exposed_wait_s": 0.75}, 7, 1)
    assert second is not None
    assert second.data == {
        "exposed_wait_s": [0.5],
        "loaded_bytes": 100,
        "steps": 1,
        "loaded_blocks": {"0": 1},
        "revoked_by": {"unreachable": 3},
        "sessions_open": {"3": 2},
        "circuit_open": {"3": 0},
        "queue_depth": {"3": 7},
        "pending_saves": {"3": 1},
    }


def test_every_counter_of_the_engine_is_collected_under_its_name() -> None:
    group = GroupStats(1, 2, 3, 4, 0, 5, 6, 7, 8)
    now = EngineStats(
        "running", {0: group}, steps=9, steps_passed_through=10, lookup_errors=11, lost_workers=12, circuit="open"
    )
    stats = Collector(0).collect(now, {"lookup_errors": 1, "failed_loads": 2}, 0, 0)
    assert stats is not None
    assert {k: v for k, v in stats.data.items() if k not in GAUGES} == {
        "lookup_errors": 12,
        "failed_loads": 2,
        "saved_bytes": 7,
        "loaded_bytes": 8,
        "steps": 9,
        "steps_passed_through": 10,
        "lost_workers": 12,
        "saved_blocks": {"0": 1},
        "loaded_blocks": {"0": 2},
        "skipped_existing": {"0": 3},
        "skipped_no_space": {"0": 4},
        "skipped_tainted": {"0": 5},
        "load_failed": {"0": 6},
    }
    assert stats.data["circuit_open"] == {"0": 1}


def test_nothing_is_reported_while_nothing_changes_and_a_gauge_alone_is_a_change() -> None:
    collector = Collector(0)
    assert collector.collect(engine(), {"lookups": 0, "save_wait_s": 0.0}, 0, 0) is None
    full = collector.collect(engine(), {}, 4, 0)
    assert full is not None
    assert full.data == {
        "sessions_open": {"0": 0},
        "circuit_open": {"0": 0},
        "queue_depth": {"0": 4},
        "pending_saves": {"0": 0},
    }
    assert collector.collect(engine(), {}, 4, 0) is None
    drained = collector.collect(engine(), {}, 0, 0)
    assert drained is not None
    assert drained.data["queue_depth"] == {"0": 0}, "the end of a queue is told too"


def test_a_counter_that_starts_again_is_not_negative() -> None:
    collector = Collector(0)
    collector.collect(engine(saved=9), {"lookups": 9}, 0, 0)
    again = collector.collect(engine(saved=2), {"lookups": 2}, 0, 0)
    assert again is not None
    assert (again.data["lookups"], again.data["saved_blocks"], again.data["saved_bytes"]) == (2, {"0": 2, "1": 4}, 240)


def test_the_scheduler_counts_without_an_engine_and_without_gauges() -> None:
    collector = Collector(None)
    assert collector.collect(None, {"lookups": 0}) is None
    stats = collector.collect(None, {"lookups": 2, "hit_tokens": 64})
    assert stats is not None
    assert stats.data == {"lookups": 2, "hit_tokens": 64}


@pytest.mark.parametrize("name", ["lockups", "saved_blocks", "queue_depth"])
def test_a_sum_of_the_caller_needs_a_name_that_is_known(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Collector(0).collect(None, {name: 1})


@pytest.mark.parametrize("counters", [scheduler.Counters(), worker.Counters()], ids=["scheduler", "worker"])
def test_both_sides_count_by_names_that_are_known(counters: Any) -> None:
    assert Collector(0).collect(None, asdict(counters)) is None


def test_a_report_does_not_change_with_the_snapshot_or_the_next_report() -> None:
    collector, now, own = Collector(0), engine(saved=1, revoked_by={"no space": 1}), {"lookups": 1.0}
    stats = collector.collect(now, own, 0, 0)
    assert stats is not None
    before = json.dumps(stats.data)
    now.sessions.revoked_by["no space"] += 5
    own["lookups"] += 1
    collector.collect(now, own, 3, 0)
    assert json.dumps(stats.data) == before


# -- ranks and time ----------------------------------------------------------------------------------------------------


def test_counters_add_up_and_of_a_gauge_the_last_value_of_each_rank_counts() -> None:
    def step(rank: int, queue: int) -> ConnectorStats:
        return ConnectorStats(
            {
                "steps": 1,
                "saved_blocks": {"0": 2, str(rank): 1},
                "save_wait_s": [0.1 * (rank + 1)],
                "queue_depth": {str(rank): queue},
            }
        )

    first = step(0, 5).aggregate(step(1, 6))
    second = step(0, 0).aggregate(step(1, 9))
    total = ConnectorStats(first.data).aggregate(second)
    assert total.data == {
        "steps": 4,
        "saved_blocks": {"0": 6, "1": 2},
        "save_wait_s": pytest.approx([0.1, 0.2, 0.1, 0.2]),
        "queue_depth": {"0": 0, "1": 9},
    }
    assert total.reduce()["Queue depth"] == 9


def test_aggregate_and_the_constructor_share_nothing_with_their_arguments() -> None:
    data: dict[str, Any] = {"saved_blocks": {"0": 1}, "save_wait_s": [0.5], "queue_depth": {"0": 1}, "steps": 1}
    source = ConnectorStats(data)
    total = ConnectorStats()
    assert total.aggregate(source) is total
    total.aggregate(ConnectorStats({"saved_blocks": {"0": 1, "1": 1}, "save_wait_s": [1.0], "queue_depth": {"0": 2}}))
    assert source.data == data == {"saved_blocks": {"0": 1}, "save_wait_s": [0.5], "queue_depth": {"0": 1}, "steps": 1}
    source.aggregate(source)
    assert data["saved_blocks"] == {"0": 1}


def test_reset_and_empty() -> None:
    stats = ConnectorStats()
    assert stats.is_empty()
    assert stats.reduce() == {"Saved MB": 0, "Loaded MB": 0}
    stats.aggregate(ConnectorStats({"queue_depth": {"0": 0}}))
    assert not stats.is_empty(), "a gauge that fell to zero is news"
    stats.reset()
    assert stats.is_empty()


def output(stats: ConnectorStats | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_connector_stats=stats))


def test_vllm_joins_the_ranks_of_a_step() -> None:
    ranks = [
        None,
        ConnectorStats({"steps": 1, "queue_depth": {"1": 4}}),
        ConnectorStats({"steps": 1, "queue_depth": {"2": 5}, "revoked_by": {"no space": 2}}),
    ]
    joined = KVOutputAggregator(len(ranks)).aggregate([output(pickle.loads(pickle.dumps(s))) for s in ranks])
    assert joined is not None
    assert joined.kv_connector_output is not None
    stats = joined.kv_connector_output.kv_connector_stats
    assert isinstance(stats, ConnectorStats)
    assert stats.to_dict() == {"steps": 2, "queue_depth": {"1": 4, "2": 5}, "revoked_by": {"no space": 2}}


class Connector:
    """What vLLM's logger asks the connector's class for."""

    @staticmethod
    def build_kv_connector_stats(data: dict[str, Any]) -> ConnectorStats:
        return ConnectorStats(data)


def test_vllm_logs_an_interval_and_two_loggers_do_not_count_for_each_other() -> None:
    loggers = [KVConnectorLogging(None), KVConnectorLogging(None)]
    for logger in loggers:
        logger.connector_cls = Connector
    steps: list[dict[str, Any]] = [
        {"saved_bytes": 1_500_000, "saved_blocks": {"0": 2, "1": 1}, "exposed_wait_s": [0.001, 0.003], "queue_depth": {"0": 3}},
        {"loaded_bytes": 500_000, "loaded_blocks": {"0": 1}, "exposed_wait_s": [0.002], "queue_depth": {"0": 1, "1": 1}},
        {"load_failed": {"1": 2}, "revoked_by": {"no space": 1, "unreachable": 1}, "lookups": 4, "hit_tokens": 32},
    ]
    for data in json.loads(json.dumps(steps)):
        for logger in loggers:
            logger.observe(data)
    lines: list[str] = []
    for logger in loggers:
        logger.log(lambda text, values: lines.append(text % values))
    assert set(lines) == {
        "KV Transfer metrics: Saved MB=1.5, Loaded MB=0.5, Lookups=4, Hit tokens=32, Blocks saved=3, Blocks loaded=1, "
        "Blocks revoked=2, Blocks not loaded=2, Queue depth=2, Mean wait for loads (ms)=2.0, Longest wait for loads (ms)=3.0"
    }


# -- Prometheus --------------------------------------------------------------------------------------------------------


@pytest.fixture
def metrics() -> Iterator[Any]:
    made: list[Any] = []

    def kept(kind: type) -> Any:
        def make(**arguments: Any) -> Any:
            made.append(kind(**arguments))
            return made[-1]

        return make

    types: Any = {Gauge: kept(Gauge), Counter: kept(Counter), Histogram: kept(Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    yield build_prom_metrics(config, types, ["model_name", "engine"], engines)
    for metric in made:
        REGISTRY.unregister(metric)


def sample(name: str, engine_idx: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(PREFIX + name, {"model_name": "m", "engine": str(engine_idx), **labels})


def test_the_usual_causes_of_revokes_are_there_before_the_first(metrics: Any) -> None:
    """`rate` does not see the first count of a series that is born with it."""
    for engine_idx in (0, 1):
        assert {cause: sample("revoked_blocks_total", engine_idx, cause=cause) for cause in REVOKE_CAUSES} == dict.fromkeys(
            REVOKE_CAUSES, 0
        )
    metrics.observe({"revoked_by": {REVOKE_CAUSES[0]: 2}}, 1)
    assert [sample("revoked_blocks_total", n, cause=REVOKE_CAUSES[0]) for n in (0, 1)] == [0, 2]


def test_prometheus_gets_every_number_by_engine_and_label(metrics: Any) -> None:
    step = {
        "saved_bytes": 100,
        "saved_blocks": {"0": 2, "3": 1},
        "skipped_no_space": {"0": 4},
        "revoked_by": {"no space": 1},
        "exposed_wait_s": [0.003, 0.2],
        "queue_depth": {"0": 5, "1": 6},
        "circuit_open": {"0": 1},
    }
    metrics.observe(step, 1)
    metrics.observe({"saved_bytes": 11, "saved_blocks": {"0": 1}, "queue_depth": {"0": 0}, "circuit_open": {"0": 0}}, 1)
    assert sample("saved_bytes_total", 1) == 111
    assert sample("saved_bytes_total", 0) == 0
    assert sample("saved_blocks_total", 1, group="0") == 3
    assert sample("saved_blocks_total", 1, group="3") == 1
    assert sample("saved_blocks_total", 0, group="0") is None
    assert sample("skipped_no_space_blocks_total", 1, group="0") == 4
    assert sample("revoked_blocks_total", 1, cause="no space") == 1
    assert sample("exposed_wait_seconds_count", 1) == 2
    assert sample("exposed_wait_seconds_sum", 1) == pytest.approx(0.203)
    assert sample("exposed_wait_seconds_bucket", 1, le="0.005") == 1
    assert sample("queue_depth", 1, rank="0") == 0
    assert sample("queue_depth", 1, rank="1") == 6
    assert sample("circuit_open", 1, rank="0") == 0


def test_what_a_collector_reports_can_be_observed_whole(metrics: Any) -> None:
    own = dict.fromkeys([*(n for n, m in COUNTERS.items() if not m.label), *WAITS], 1.0)
    now = EngineStats("running", {0: GroupStats(*[1] * 9)}, SessionStats(revoked_by={"no space": 1}), circuit="open")
    stats = Collector(0).collect(now, own, 1, 1)
    assert stats is not None
    assert set(stats.data) == {*COUNTERS, *WAITS, *GAUGES}
    metrics.observe(json.loads(json.dumps(stats.to_dict())))
    assert sample("saved_bytes_total") == 2
    assert sample("circuit_open", rank="0") == 1
