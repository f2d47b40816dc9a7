"""What `kvactors replay` shows and writes around a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console

from kvactors.console import plain_console
from kvactors.devices import MonotonicClock
from kvactors.live import Address
from kvactors.replay.html import write_page
from kvactors.replay.interrupts import Interrupts
from kvactors.replay.live import run_live
from kvactors.replay.log_file import LogFile
from kvactors.replay.memory_need import available_bytes, memory_warning
from kvactors.replay.onlooker import Onlooker
from kvactors.replay.plan import Plan
from kvactors.replay.progress import progress_for
from kvactors.replay.run import Outcome, Watchers
from kvactors.replay.stories import StoryLog
from kvactors.replay.summary import print_summary
from kvactors.replay.tally import Tally
from kvactors.replay.timeline import MOST_SPANS, SpanLog, write_timeline
from kvactors.replay.virtual import run_on_virtual_time

_PAGE_SPANS = 50_000

_Output = tuple[str | None, Callable[[str], None]]
"""A file's name, if it was asked for, and who writes it."""


def run_and_show(
    plan: Plan,
    *,
    report_file: str | None = None,
    html_file: str | None = None,
    timeline_file: str | None = None,
    event_log_file: str | None = None,
    stories_file: str | None = None,
    as_json: bool = False,
    live: Address | None = None,
) -> int:
    """Runs a plan with progress on stderr, writes the files, prints the summary (or the JSON report) on stdout; the exit code.

    The event log and the stories are written while the run goes on, the other files before anything is printed, so that they
    are there whatever becomes of stdout; and all that before the store is left, which may take long. A signal meanwhile is
    remembered, and changes the exit code alone.
    """
    err = plain_console(stderr=True)
    if plan.summary.skipped:
        err.print(f"{plan.summary.skipped} bad trace lines are skipped")
    if (warning := memory_warning(plan, available_bytes())) is not None:
        err.print(warning, soft_wrap=True)
    spans = SpanLog(MOST_SPANS if timeline_file else _PAGE_SPANS) if timeline_file or html_file else None
    began, failed = time.monotonic(), False
    virtual = plan.options.virtual is not None
    with Interrupts() as interrupts, contextlib.ExitStack() as running:
        progress = running.enter_context(progress_for(err, plan.summary.requests, MonotonicClock(), plain=virtual))
        log = LogFile(event_log_file, partial(_cannot_write, err, event_log_file))
        told = LogFile(stories_file, partial(_cannot_write, err, stories_file))
        running.callback(log.close)
        running.callback(told.close)
        stories = None if stories_file is None else StoryLog(told, plan)
        if stories is not None:
            running.callback(stories.finish)

        def show(outcome: Outcome) -> None:
            nonlocal failed
            elapsed_s = time.monotonic() - began
            if stories is not None:
                stories.complete = not outcome.interrupted
            running.close()
            report = outcome.report
            failed = _write(
                err,
                (report_file, report.write),
                (html_file, lambda path: write_page(path, report, outcome.samples, spans.spans if spans else ())),
                (timeline_file, lambda path: write_timeline(path, spans) if spans else None),
            )
            failed = failed or log.lost or told.lost
            if stories is not None and stories.problem is not None:
                failed = True
                _cannot_write(err, stories_file, stories.problem)
            if timeline_file and spans and spans.dropped:
                err.print(f"the timeline holds the first {len(spans.spans):,} spans; {spans.dropped:,} more were left out")
            if as_json:
                sys.stdout.write(report.to_json().decode())
            else:
                print_summary(report, plain_console(), plan.rules.boundary_tokens, elapsed_s)
            sys.stdout.flush()

        onlooker = None if live is None else Onlooker(live)

        def stepped(tally: Tally) -> None:
            progress.update(tally)
            if onlooker is not None:
                onlooker.progress(tally)
            if stories is not None:
                stories.progress()

        watchers = Watchers(
            observers=() if spans is None else (spans,),
            on_progress=stepped,
            on_stopping=lambda: err.print("stopping: draining what is in flight (Ctrl-C again to give up)"),
            on_giving_up=lambda calls: err.print(
                "giving up; calls of the store that have not returned: " + ("; ".join(calls) or "none"), soft_wrap=True
            ),
            on_outcome=show,
            on_leaving=lambda: err.print("leaving the store, which takes its time (Ctrl-C to end at once)"),
            looks=[watcher.look for watcher in (onlooker, stories) if watcher is not None],
            interrupts=interrupts,
        )
        if virtual:
            outcome = run_on_virtual_time(plan, watchers, None if event_log_file is None else log)
        else:
            outcome = run_live(plan, watchers)
    if outcome.interrupted or interrupts.count:
        return interrupts.exit_code
    return 1 if outcome.report.broken or failed else 0


def _write(err: Console, *outputs: _Output) -> bool:
    """Writes each output that was asked for; whether one of them failed."""
    failed = False
    for path, write in outputs:
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            failed = True
            _cannot_write(err, path, error)
    return failed


def _cannot_write(err: Console, path: str | None, error: Exception) -> None:
    why = getattr(error, "strerror", None) or error
    err.print(f"kvactors: {path}: cannot be written: {why}", soft_wrap=True)
