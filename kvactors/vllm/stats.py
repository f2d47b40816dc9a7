"""What the connector counts, for vLLM's log and Prometheus.

Each side reports what moved since its last report (`Collector`). vLLM joins the reports of all ranks of a step, and later those
of all steps until the next log line, with the same `aggregate`: so counters add up, and a gauge is kept by rank, where another
rank's value comes beside it and a later value of the same rank takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvactors.core.metrics import COUNTERS, GAUGES, REVOKE_CAUSES, WAIT_BUCKETS_S, WAITS, Metric
from kvactors.core.stats import EngineStats

PREFIX = "vllm:kvactors_"

_TITLES = {
    "lookups": "Lookups",
    "lookup_misses": "Lookup misses",
    "hit_tokens": "Hit tokens",
    "saved_blocks": "Blocks saved",
    "loaded_blocks": "Blocks loaded",
    "skipped_existing": "Blocks the store had",
    "skipped_no_space": "Blocks without space",
    "skipped_tainted": "Blocks not saved after a failed load",
    "revoked_by": "Blocks revoked",
    "load_failed": "Blocks not loaded",
    "failed_loads": "Failed loads",
    "recovered_loads": "Recovered loads",
    "load_deadlines": "Loads past their deadline",
    "handoff_sent": "Hand-offs sent",
    "handoff_received": "Hand-offs received",
    "handoff_failed": "Hand-offs failed",
    "handoff_expired": "Hand-offs expired",
    "handoff_fenced_blocks": "Blocks fenced after hand-offs",
    "lookup_errors": "Lookup errors",
    "lookup_deferred": "Lookups put off",
    "no_block_table": "Requests without blocks to save",
    "steps_passed_through": "Steps passed through",
    "aborted_steps": "Aborted steps",
    "lost_workers": "Lost workers",
    "queue_depth": "Queue depth",
    "pending_saves": "Pending saves",
    "sessions_open": "Sessions open",
    "circuit_open": "Circuits open",
}
"""Words of the log line, for what is a sum (over groups, causes or ranks)."""


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """What moved in a time, as plain JSON: `data` has only the names of `COUNTERS`, `WAITS` and `GAUGES` that moved.

    Args:
        data: is copied.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__({})
        self._add(data or {})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Adds another rank's report, or a later one; nothing of `other` is shared afterwards."""
        self._add(other.data)
        return self

    def _add(self, data: Mapping[str, Any]) -> None:
        mine = self.data
        for name, value in data.items():
            if name in GAUGES:
                mine.setdefault(name, {}).update(value)
            elif isinstance(value, Mapping):
                sums = mine.setdefault(name, {})
                for label, count in value.items():
                    sums[label] = sums.get(label, 0) + count
            elif isinstance(value, list):
                mine.setdefault(name, []).extend(value)
            else:
                mine[name] = mine.get(name, 0) + value

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The log line: megabytes, then every sum that is not zero, and mean and longest waits in milliseconds."""
        line: dict[str, int | float] = {
            "Saved MB": round(self.data.get("saved_bytes", 0) / 1e6, 3),
            "Loaded MB": round(self.data.get("loaded_bytes", 0) / 1e6, 3),
        }
        for name, title in _TITLES.items():
            value = self.data.get(name, 0)
            if total := sum(value.values()) if isinstance(value, Mapping) else value:
                line[title] = total
        for name, title in (("exposed_wait_s", "wait for loads"), ("save_wait_s", "wait for saves")):
            if waits := self.data.get(name):
                line[f"Mean {title} (ms)"] = round(1e3 * sum(waits) / len(waits), 3)
                line[f"Longest {title} (ms)"] = round(1e3 * max(waits), 3)
        return line


class Collector:
    """Turns counters that only grow into what moved since the last call.

    Args:
        rank: the worker's rank among all of its vLLM engine; None for the scheduler, which has no gauges.
    """

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._before: dict[str, Any] = {}
        self._gauges = dict.fromkeys(GAUGES, 0)

    @property
    def at_rest(self) -> bool:
        """Whether every gauge was 0 when it was last reported: nothing changes while nothing moves."""
        return not any(self._gauges.values())

    def collect(
        self, now: EngineStats | None, own: Mapping[str, float], queue_depth: int = 0, pending_saves: int = 0
    ) -> ConnectorStats | None:
        """What moved since the last call; None if nothing did, and no gauge either.

        Args:
            now: a snapshot of the engine; None where there is none.
            own: the caller's own sums since its start, by the names of `COUNTERS` (without a label) and `WAITS` (seconds); what
                the engine counts by the same name is added.
            queue_depth: store calls that wait for a worker (`EngineStats.queued`).
            pending_saves: save tasks that are not finished.

        Raises:
            ValueError: `own` has a name that is none of these.
        """
        totals = _totals(own, now)
        data: dict[str, Any] = {}
        for name, total in totals.items():
            moved = _moved(total, self._before.get(name))
            if moved:
                data[name] = [moved] if name in WAITS else moved
        self._before = totals
        gauges = dict.fromkeys(GAUGES, 0)
        if now is not None:
            gauges |= {"sessions_open": now.sessions.open_now, "circuit_open": int(now.circuit == "open")}
            gauges |= {"queue_depth": queue_depth, "pending_saves": pending_saves}
        if not data and gauges == self._gauges:
            return None
        self._gauges = gauges
        if self._rank is not None:
            data |= {name: {str(self._rank): value} for name, value in gauges.items()}
        return ConnectorStats(data)


def _totals(own: Mapping[str, float], now: EngineStats | None) -> dict[str, Any]:
    """Every counter since the start, in the shape of `ConnectorStats.data`; waits as their sum."""
    unknown = [n for n in own if n not in WAITS and (n not in COUNTERS or COUNTERS[n].label)]
    if unknown:
        raise ValueError(f"{unknown}: no such counters; the names are those of COUNTERS without a label, and of WAITS")
    totals: dict[str, Any] = dict(own)
    if now is None:
        return totals
    groups = {str(g): s for g, s in now.groups.items()}
    sums = {
        "saved_bytes": sum(s.bytes_saved for s in groups.values()),
        "loaded_bytes": sum(s.bytes_loaded for s in groups.values()),
        "steps": now.steps,
        "steps_passed_through": now.steps_passed_through,
        "lost_workers": now.lost_workers,
        "lookup_errors": now.lookup_errors,
    }
    totals |= {name: total + own.get(name, 0) for name, total in sums.items()}
    return totals | {
        "saved_blocks": {g: s.saved for g, s in groups.items()},
        "loaded_blocks": {g: s.loaded for g, s in groups.items()},
        "skipped_existing": {g: s.skipped_existing for g, s in groups.items()},
        "skipped_no_space": {g: s.skipped_no_space for g, s in groups.items()},
        "skipped_tainted": {g: s.skipped_tainted for g, s in groups.items()},
        "load_failed": {g: s.load_failed for g, s in groups.items()},
        "revoked_by": dict(now.sessions.revoked_by),
    }


def _moved(total: Any, before: Any) -> Any:
    """What was added to a sum, or to sums by label; one that is smaller than before has started again from zero."""
    if isinstance(total, dict):
        moved = {label: _moved(count, (before or {}).get(label)) for label, count in total.items()}
        return {label: count for label, count in moved.items() if count}
    return total - before if before is not None and before <= total else total


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same numbers in Prometheus, by vLLM engine; `COUNTERS`, `WAITS` and `GAUGES` are the list of metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._sums: dict[str, dict[int, Any]] = {}
        self._sums_by_label: dict[str, Any] = {}
        for key, metric in COUNTERS.items():
            counter = self._counter_cls(**self._described(metric))
            if metric.label:
                self._sums_by_label[key] = counter
                for cause in REVOKE_CAUSES if key == "revoked_by" else ():
                    for engine in per_engine_labelvalues.values():
                        counter.labels(*engine, cause)
            else:
                self._sums[key] = create_metric_per_engine(counter, per_engine_labelvalues)
        self._waits = {
            key: create_metric_per_engine(
                self._histogram_cls(**self._described(metric), buckets=WAIT_BUCKETS_S), per_engine_labelvalues
            )
            for key, metric in WAITS.items()
        }
        self._gauges = {
            key: self._gauge_cls(**self._described(metric), multiprocess_mode="mostrecent") for key, metric in GAUGES.items()
        }

    def _described(self, metric: Metric) -> dict[str, Any]:
        labels = [*self._labelnames, metric.label] if metric.label else self._labelnames
        return {"name": PREFIX + metric.name, "documentation": metric.meaning, "labelnames": labels}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the `data` of one `ConnectorStats`."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key in self._sums:
                self._sums[key][engine_idx].inc(value)
            elif key in self._waits:
                for wait in value:
                    self._waits[key][engine_idx].observe(wait)
            elif key in self._gauges:
                for rank, current in value.items():
                    self._gauges[key].labels(*engine, rank).set(current)
            else:
                for label, count in value.items():
                    self._sums_by_label[key].labels(*engine, label).inc(count)


def build_prom_metrics(
    vllm_config: Any,
    metric_types: dict[Any, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> ConnectorPromMetrics:
    """What the connector's method of this name answers."""
    return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
