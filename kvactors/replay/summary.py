"""What a replay prints at its end: a table, and why nothing was hit when nothing was."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvactors.replay.no_hits import blocks_without_space, why_no_hits
from kvactors.replay.report import Report


def si_bytes(n: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


def print_summary(report: Report, console: Console, shortest_hit_tokens: int, elapsed_s: float | None = None) -> None:
    """Prints the summary on a console without markup; `shortest_hit_tokens` is the shortest possible hit (the boundary B).

    `elapsed_s`: real seconds of a run on virtual time.
    """
    wall = max(report.time.wall_s, 1e-9)
    moved = report.bytes.saved + report.bytes.loaded
    table = Table(title=f"{report.layout.name} on the {report.store} store", title_justify="left", show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    table.add_column(overflow="fold")
    table.add_row(
        "requests",
        f"{report.requests.completed:,} of {report.requests.total:,}",
        f"{report.requests.failed:,} failed, {report.requests.completed / wall:,.0f} requests/s",
    )
    table.add_row(
        "tokens hit",
        f"{report.tokens.hit:,} of {report.tokens.input:,}",
        f"{report.tokens.hit_ratio:.1%}, {report.tokens.computed:,} computed",
    )
    for group in report.layout.groups:
        b = report.blocks[str(group.id)]
        table.add_row(
            f"group {group.id}",
            f"{b.hit:,} of {b.looked_up:,} blocks hit",
            f"{group.kind}, {group.block_tokens} tokens; {b.saved:,} saved, {b.skipped_existing:,} there already",
        )
    table.add_row("saved", si_bytes(report.bytes.saved), f"{si_bytes(moved / wall)}/s moved in all")
    table.add_row(
        "loaded",
        si_bytes(report.bytes.loaded),
        f"{si_bytes(report.bytes.verified)} compared, {report.bytes.mismatched:,} bytes wrong",
    )
    no_space = blocks_without_space(report)
    if no_space:
        table.add_row("no space", f"{no_space:,} blocks", "computed, and not saved")
    s = report.sessions
    table.add_row(
        "put sessions",
        f"{s.put_opened:,}",
        f"{s.put_committed:,} committed, {s.put_revoked:,} revoked, {s.put_poisoned + s.put_abandoned:,} lost, "
        f"{s.open_at_end:,} open at the end",
    )
    table.add_row("get sessions", f"{s.get_opened:,}", f"{s.get_closed:,} closed, {s.get_expired:,} expired")
    if report.failures.injected or report.failures.load_failed or report.preemptions:
        table.add_row(
            "failures",
            f"{report.failures.injected:,} injected",
            f"{report.failures.load_failed:,} requests with a failed load, {report.failures.recomputed_tokens:,} tokens "
            f"recomputed, {report.preemptions:,} preemptions",
        )
    table.add_row(
        "time",
        f"{report.time.wall_s:.2f} s",
        f"compute {report.time.compute_s:.2f} s, waiting for loads {report.time.exposed_load_s:.2f} s, "
        f"for saves {report.time.exposed_save_s:.2f} s",
    )
    if report.clock == "virtual":
        speed = (
            ""
            if elapsed_s is None
            else f"; it took {elapsed_s:.2f} s, {report.requests.completed / max(elapsed_s, 1e-9):,.0f} requests/s"
        )
        table.add_row("clock", "virtual", f"seed {report.seed}: all times above are virtual{speed}")
    console.print(table)
    if report.tokens.hit == 0 and report.requests.completed:
        console.print(f"No hits: {why_no_hits(report, shortest_hit_tokens)}")
    for text in report.events[:5]:
        console.print(f"! {text}")
    if len(report.events) > 5:
        console.print(f"! … {len(report.events) - 5} more in the report's events")
    for text in report.invariants.violations[:10]:
        console.print(f"BROKEN: {text}", style="bold red")
    if report.interrupted:
        console.print("Interrupted: the numbers are those of what ran.")
