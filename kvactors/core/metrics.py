"""Every metric: name, type, meaning and labels. The one list behind vLLM's metrics and behind the exporter of a live view.

In vLLM's Prometheus a name begins with `vllm:kvactors_`, in the exporter with `kvactors_`; counters end in `_total` in both.
Names and types are stable: dashboards and alerts of users rest on them. Units are seconds, bytes and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvactors.core.store import Outcome


class Metric(NamedTuple):
    """One metric without its prefix; with `label`, it is kept by that label (several: divided by blanks)."""

    name: str
    meaning: str
    label: str = ""


REVOKE_CAUSES = (
    Outcome.TRANSFER_FAILED.value,
    Outcome.CALL_FAILED.value,
    "a load of its request failed",
    "preparation failed",
    "aborted",
)
"""The usual ones, in the words of `stats.cause_label`, are exported at 0 from the start: `rate` does not see the first count of
a series that is born with it. The others come with their first, so that a panel does not name a score of them for nothing."""

COUNTERS: Mapping[str, Metric] = {
    "saved_bytes": Metric("saved_bytes", "Payload bytes of blocks that were saved and committed."),
    "loaded_bytes": Metric("loaded_bytes", "Payload bytes that loads delivered."),
    "steps": Metric("steps", "Steps in which the engine had something to move, counted by each rank."),
    "steps_passed_through": Metric("steps_passed_through", "Steps that went on without saving or loading."),
    "lost_workers": Metric("lost_workers", "Transfer workers lost to store calls that passed their deadline."),
    "lookups": Metric("lookups", "Prompts that were looked up in the store."),
    "lookup_errors": Metric("lookup_errors", "Lookups that ended in an error or too late, and so are misses."),
    "lookup_misses": Metric("lookup_misses", "Lookups that found nothing to load."),
    "lookup_deferred": Metric("lookup_deferred", "Lookups put off to a later step, because the step's budget was spent."),
    "hit_tokens": Metric("hit_tokens", "Tokens that loads brought in whole, beyond what vLLM had."),
    "failed_loads": Metric("failed_loads", "Requests whose load failed, in part or whole; counted by whoever saw it."),
    "recovered_loads": Metric("recovered_loads", "Loads that failed, and went well the second time."),
    "aborted_steps": Metric("aborted_steps", "Steps of which nothing was published, counted by each rank."),
    "no_block_table": Metric("no_block_table", "Requests not saved because vLLM had no blocks for them any more."),
    "load_deadlines": Metric("load_deadlines", "Loads given up because they passed their deadline."),
    "handoff_sent": Metric("handoff_sent", "Requests sent to decode workers, counted by each pair of ranks."),
    "handoff_sent_bytes": Metric("handoff_sent_bytes", "Bytes written into the memory of decode workers."),
    "handoff_expired": Metric("handoff_expired", "Requests that no decode worker fetched in time, counted by each rank."),
    "handoff_received": Metric("handoff_received", "Requests whose blocks came from prefill, counted by each rank."),
    "handoff_received_bytes": Metric("handoff_received_bytes", "Bytes of blocks that came from prefill."),
    "handoff_failed": Metric("handoff_failed", "Requests whose blocks did not come from prefill, counted by each rank."),
    "handoff_fenced_blocks": Metric("handoff_fenced_blocks", "Blocks held back after a failed hand-off, for late writes."),
    "saved_blocks": Metric("saved_blocks", "Blocks saved and committed.", "group"),
    "loaded_blocks": Metric("loaded_blocks", "Blocks of hits that were loaded whole.", "group"),
    "skipped_existing": Metric("skipped_existing_blocks", "Blocks not saved because the store had them.", "group"),
    "skipped_no_space": Metric("skipped_no_space_blocks", "Blocks not saved because the store was full.", "group"),
    "skipped_tainted": Metric(
        "skipped_tainted_blocks", "Blocks not saved because a load of their request had failed.", "group"
    ),
    "load_failed": Metric("load_failed_blocks", "Blocks that did not arrive.", "group"),
    "revoked_by": Metric("revoked_blocks", "Blocks whose save was begun and had to be revoked.", "cause"),
}
"""A sum each, or with a label a sum by the label's value."""

WAITS: Mapping[str, Metric] = {
    "exposed_wait_s": Metric("exposed_wait_seconds", "How long a rank's forward pass waited for loads, of steps that waited."),
    "save_wait_s": Metric("save_wait_seconds", "How long a rank waited for saves at the end of a step, of steps that waited."),
}
"""A list each: seconds, one entry per rank and step that waited. Ranks wait at the same time, so their sum says little."""

GAUGES: Mapping[str, Metric] = {
    "queue_depth": Metric("queue_depth", "Store calls that wait for a transfer worker.", "rank"),
    "pending_saves": Metric("pending_saves", "Saves of a layer that are not finished.", "rank"),
    "sessions_open": Metric("sessions_open", "Store sessions that are open.", "rank"),
    "circuit_open": Metric("circuit_open", "1 while the store cannot be reached and is left alone, else 0.", "rank"),
}
"""The last value by rank."""

WAIT_BUCKETS_S = [10**e * m for e in range(-4, 1) for m in (1, 2.5, 5)] + [10, 30]

# -- only in the exporter of a live view ---------------------------------------------------------------------------------

LIVE_COUNTERS: Mapping[str, Metric] = {
    "lookup_tokens": Metric("lookup_tokens", "Tokens of the prompts that the engine looked up."),
    "lookup_hit_tokens": Metric("lookup_hit_tokens", "Tokens that the hits of the engine's lookups cover."),
    "put_opened": Metric("put_sessions_opened", "Saves of a block that the store let begin."),
    "put_ended": Metric("put_sessions_ended", "Saves of a block that ended, by how.", "end"),
    "get_opened": Metric("get_sessions_opened", "Reads of a key that the store let begin."),
    "get_closed": Metric("get_sessions_closed", "Reads of a key that were closed."),
    "get_expired": Metric("get_sessions_expired", "Reads of a key whose lease or session was over before they were."),
    "paused_no_space": Metric("paused_no_space_blocks", "Blocks not saved without asking a store that stays full.", "group"),
    "bad_requests": Metric("bad_requests", "Requests left out of a step because their blocks contradict themselves."),
    "stale_messages": Metric("stale_messages", "Messages of a step that was over already."),
    "joined_transfers": Metric("joined_transfers", "Transfers that went in the store call of an earlier layer."),
}

LIVE_GAUGES: Mapping[str, Metric] = {
    "info": Metric("info", "Always 1; what runs here.", "version name model"),
    "state": Metric("state", "1 for the state that the engine is in, 0 for all others.", "state"),
    "uptime_s": Metric("uptime_seconds", "Since the live view was opened."),
    "puts": Metric("open_put_sessions", "Saves of a block under way, by state.", "group state"),
    "gets": Metric("open_get_sessions", "Reads of a key under way, by state.", "group state"),
    "oldest_s": Metric("oldest_session_seconds", "Age of the oldest session that is open in the store; 0 if none is.", "group"),
    "unusable": Metric("unusable_keys", "Keys that this process never writes again.", "group why"),
    "mailbox": Metric("mailbox_messages", "Messages that wait for an actor.", "actor"),
    "queued": Metric("queued_calls", "Store calls that wait for a worker, by priority.", "priority"),
    "gated": Metric("gated_calls", "Store calls that wait for a device event."),
    "running": Metric("running_calls", "Store calls under way."),
    "longest_call_s": Metric("longest_call_seconds", "How long the oldest store call has been under way; 0 if none is."),
    "late": Metric("late_calls", "Store calls past their deadline that have not returned."),
    "missing_workers": Metric("missing_workers", "Lost transfer workers that were not replaced."),
    "fenced": Metric("fenced_blocks", "Local blocks that a late store call may still write."),
    "pinned": Metric("pinned_blocks", "Local blocks that vLLM holds back until a late store call has returned."),
    "stories": Metric("stories", "Requests whose story is kept."),
}

EXPORT_PREFIX = "kvactors_"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Family(NamedTuple):
    """A metric as the exporter has it: its whole name, with `_total` if it is a counter."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...]


def _families() -> dict[str, Family]:
    kinds = ((COUNTERS, COUNTER), (LIVE_COUNTERS, COUNTER), (WAITS, HISTOGRAM), (GAUGES, GAUGE), (LIVE_GAUGES, GAUGE))
    found: dict[str, Family] = {}
    for metrics, kind in kinds:
        for key, metric in metrics.items():
            name = EXPORT_PREFIX + metric.name + ("_total" if kind == COUNTER else "")
            own = tuple(label for label in metric.label.split() if label != "rank")
            found[key] = Family(name, kind, metric.meaning, ("rank", *own))
    return found


FAMILIES: Mapping[str, Family] = _families()
"""All metrics of the exporter, by the keys of the lists above. Every one has the label `rank`."""
