"""What `kvactors replay` shows and writes around a run."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

from kvactors.devices import MonotonicClock
from kvactors.replay.html import write_page
from kvactors.replay.live import Plan, run_live
from kvactors.replay.progress import progress_for
from kvactors.replay.summary import print_summary
from kvactors.replay.timeline import MOST_SPANS, SpanLog, write_timeline

_PAGE_SPANS = 50_000


def run_and_show(plan: Plan, *, report_file: str | None, html_file: str | None, timeline_file: str | None) -> int:
    """Runs a plan with progress on stderr and the summary on stdout, writes the files; the exit code."""
    out, err = _console(sys.stdout), _console(sys.stderr)
    if plan.summary.skipped:
        err.print(f"{plan.summary.skipped} bad trace lines are skipped", highlight=False)
    spans = SpanLog(MOST_SPANS if timeline_file else _PAGE_SPANS) if timeline_file or html_file else None
    try:
        with progress_for(err, plan.summary.requests, MonotonicClock()) as progress:
            outcome = run_live(
                plan,
                spans=spans,
                on_progress=progress.update,
                on_stopping=lambda: err.print("stopping: draining what is in flight (Ctrl-C again to give up)"),
            )
    except KeyboardInterrupt:
        err.print("given up: the drain was not awaited")
        return 130
    report = outcome.report
    print_summary(report, out, plan.rules.boundary_tokens)
    failed = False
    for path, write in (
        (report_file, report.write),
        (html_file, lambda path: write_page(path, report, outcome.samples, spans.spans if spans else ())),
        (timeline_file, lambda path: write_timeline(path, spans) if spans else None),
    ):
        try:
            if path is not None:
                write(path)
        except OSError as error:
            failed = True
            err.print(f"kvactors: {path}: cannot be written: {error.strerror}", highlight=False, markup=False)
    if timeline_file and spans and spans.dropped:
        err.print(f"the timeline holds the first {len(spans.spans):,} spans; {spans.dropped:,} more were left out")
    if outcome.interrupted:
        return 130
    return 1 if report.broken or failed else 0


def _console(file: TextIO) -> Console:
    """As wide as the terminal; 120 columns into a file or a pipe."""
    return Console(file=file, width=None if file.isatty() else 120)
