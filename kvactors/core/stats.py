"""Counters of an engine, in the words of the JSON report."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupStats:
    """Blocks (objects) and payload bytes of one group since the engine started."""

    saved: int = 0
    """put sessions committed"""
    loaded: int = 0
    """blocks whose every layer arrived, counted per destination"""
    skipped_existing: int = 0
    """blocks not saved because their key was readable, being written, or existed at open"""
    skipped_no_space: int = 0
    paused_no_space: int = 0
    """those of `skipped_no_space` that were skipped without a call: the store stayed full, and saves paused"""
    skipped_tainted: int = 0
    """blocks not saved because a load of their request had failed (I12)"""
    load_failed: int = 0
    bytes_saved: int = 0
    """committed payload"""
    bytes_loaded: int = 0
    """payload delivered by loads, counted per destination"""


def cause_label(cause: str) -> str:
    """A cause of a revoke without what is different every time, so that a label has few values: without the layer in front, and
    without the details (an exception, a caller's words) after a colon."""
    return re.sub(r"^layer \d+: ", "", cause).partition(": ")[0] or "unknown"


@dataclass(slots=True)
class SessionStats:
    """Ends of sessions; `put_opened` = committed + revoked + poisoned + abandoned + still open (I2)."""

    put_opened: int = 0
    put_refused: int = 0
    put_committed: int = 0
    put_revoked: int = 0
    put_poisoned: int = 0
    put_abandoned: int = 0
    get_opened: int = 0
    get_closed: int = 0
    get_expired: int = 0
    open_now: int = 0
    revoked_by: dict[str, int] = field(default_factory=dict)
    """puts that had to be revoked, whatever the revoke then answered; by cause, in the words of `cause_label`"""


@dataclass(slots=True)
class EngineStats:
    """A snapshot of `Engine.stats()`."""

    state: str = "running"
    """running | degraded | draining | drained | dead"""
    groups: dict[int, GroupStats] = field(default_factory=dict)
    sessions: SessionStats = field(default_factory=SessionStats)
    steps: int = 0
    steps_passed_through: int = 0
    stale_messages: int = 0
    """messages of a closed step, dropped"""
    lookup_errors: int = 0
    bad_requests: int = 0
    """requests of a step that were left out because their block lists contradict themselves"""
    lost_workers: int = 0
    joined_transfers: int = 0
    """layers' transfers that went in the store call of an earlier layer"""
    circuit: str = "closed"
    queued: int = 0
    """transfers and other store calls that wait for a worker now"""
    peak_pending_saves: int = 0
    poisoned_keys: list[str] = field(default_factory=list)
    abandoned_keys: list[str] = field(default_factory=list)
    lookups: int = 0
    """answered, by the store or as a miss because it took too long or failed"""
    lookup_misses: int = 0
    lookup_tokens: int = 0
    """of the prompts that were looked up"""
    lookup_hit_tokens: int = 0
    """of those, covered by the hits"""
