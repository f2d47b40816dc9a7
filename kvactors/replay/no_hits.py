"""Why a replay hit nothing: the likeliest reason, from the counts of its report."""

from __future__ import annotations

from kvactors.replay.report import NoHitsPart, Report

HIDES_NOTHING = ("latency", "freeze")
"""Kinds of injected faults that do not take away what is stored; a call that returns too late is told otherwise."""


def blocks_without_space(report: Report) -> int:
    """Blocks of all groups that were not saved because the store was full."""
    return sum(b.skipped_no_space for b in report.blocks.values())


def why_no_hits(report: Report, shortest_hit_tokens: int) -> str:
    """The likeliest reason why no token was served from the store; `shortest_hit_tokens` is the layout's boundary."""
    saved = sum(b.saved for b in report.blocks.values())
    if not any(b.looked_up for b in report.blocks.values()):
        return f"every prompt is shorter than one boundary of {shortest_hit_tokens} tokens plus one"
    known = report.no_hits or NoHitsPart(shared_prefix=None, faults={"*": report.failures.injected})
    if known.shared_prefix is False and report.store == "memory" and report.requests.completed > 1:
        return f"no two prompts share a prefix of {shortest_hit_tokens} tokens"
    if report.failures.load_failed:
        return f"loads failed for {report.failures.load_failed} requests"
    timed_out = report.failures.lost_calls and not report.failures.outages
    if (report.sessions.put_abandoned or report.sessions.put_poisoned) and not (timed_out and not saved):
        return f"the store was lost; {saved:,} objects had been saved by then"
    if report.sessions.put_revoked > saved or not saved:
        return _why_so_little(report, saved)
    if report.failures.lost_calls or report.failures.lookup_errors:
        return f"the store did not answer: {_unanswered(report)}"
    if report.interrupted:
        return "the run was interrupted before a load was over"
    if report.requests.completed == 1:
        return "a single request has nobody before it to share a prefix with"
    return _why_not_there(report, known, f"a prefix of {shortest_hit_tokens} tokens")


def _why_not_there(report: Report, known: NoHitsPart, prefix: str) -> str:
    """Why what was saved was not found: what is known to have happened, and where that is not known, what may have."""
    reasons = []
    if known.evictions is None:
        reasons.append("the store evicted it before it was asked for")
    elif known.evictions:
        reasons.append(f"the store evicted it before it was asked for (evictions: {known.evictions:,})")
    hiding = {what: n for what, n in known.faults.items() if n and what not in HIDES_NOTHING}
    if hiding:
        counts = ", ".join(f"{what}: {n:,}" for what, n in sorted(hiding.items()) if what != "*")
        reasons.append(f"the faults that were injected hid it{f' ({counts})' if counts else ''}")
    if blocks := blocks_without_space(report):
        reasons.append(f"it found no space (blocks: {blocks:,})")
    if known.together:
        reasons.append("the requests that share it were in play at the same time")
    if known.retention:
        reasons.append("--retention did not keep it")
    if known.shared_prefix:
        return f"prompts share {prefix}, but {' or '.join(reasons) or 'the store did not have it when it was asked'}"
    alone = f"no two prompts share {prefix}"
    if known.shared_prefix is False:  # in a store that may hold what earlier runs saved
        return f"{alone}, and earlier runs left none of them in the store"
    return ", or ".join([alone, *reasons]) if reasons else f"most likely {alone}"


def _why_so_little(report: Report, saved: int) -> str:
    """Why nothing was saved, or less than was given up."""
    sessions, failures = report.sessions, report.failures
    what = f"only {saved:,} blocks were saved" if saved else "nothing was saved"
    if failures.lost_calls:
        return f"{what}: the store did not answer in time ({_unanswered(report)})"
    if sessions.revoked_by:
        causes = sorted(sessions.revoked_by.items(), key=lambda item: -item[1])
        told = ", ".join(f"{cause}: {n:,}" for cause, n in causes[:3])
        slow = "; the store is too slow: what was begun grew too old to be published" if "stale session" in causes[0][0] else ""
        return f"{what}: {sessions.put_revoked:,} of {sessions.put_opened:,} put sessions were revoked ({told}){slow}"
    if failures.outages:
        return f"{what}: the store could not be reached (outages: {failures.outages:,})"
    if blocks_without_space(report):
        if report.store == "mooncake":
            return (
                "no block found space; most likely nobody gives memory to the pool "
                "(global_segment_size is 0 in the configuration of every client)"
            )
        return "no block found space: the store has too little capacity"
    if failures.lookup_errors:
        return f"{what}: the store's calls failed ({_unanswered(report)})"
    if existing := sum(b.skipped_existing for b in report.blocks.values()):
        return f"{what}: the store says of {existing:,} blocks that they are there already, and finds none when it is asked"
    if sessions.put_refused:
        return f"{what}: the store refused to begin any of {sessions.put_refused:,} saves"
    if report.interrupted:
        return f"{what}: the run ended before"
    return f"{what}: no prompt has a block to save (--retention keeps none of them)"


def _unanswered(report: Report) -> str:
    counts = (
        ("calls that did not return in time", report.failures.lost_calls),
        ("lookups that failed", report.failures.lookup_errors),
    )
    return ", ".join(f"{what}: {n:,}" for what, n in counts if n)
