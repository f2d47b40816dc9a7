"""What a store did to a run as a whole, in words, from the engine's counts."""

from __future__ import annotations

from kvactors.core.stats import EngineStats


def store_events(stats: EngineStats, outages: int) -> list[str]:
    """At most two events: that the store was lost, and that it had no space; each once, with counts."""
    return [event for event in (_lost(stats, outages), _no_space(stats)) if event]


def _lost(stats: EngineStats, outages: int) -> str:
    """An open circuit says only that no probe has found the store well again, not that it is unreachable still."""
    s = stats.sessions
    counts = [
        f"{what}: {n:,}"
        for n, what in (
            (outages, "outages"),
            (stats.lost_workers, "calls that did not return in time"),
            (s.put_abandoned, "put sessions abandoned"),
        )
        if n
    ]
    if not counts:
        return ""
    end = "; it was still left alone at the end" if stats.circuit != "closed" else ""
    return f"the store was lost ({', '.join(counts)}){end}"


def _no_space(stats: EngineStats) -> str:
    groups = stats.groups.values()
    skipped, paused = sum(g.skipped_no_space for g in groups), sum(g.paused_no_space for g in groups)
    if not skipped:
        return ""
    asked = f", {paused:,} of them without asking because it stayed full" if paused else ""
    return f"the store had no space for {skipped:,} blocks{asked}"
