"""`kvactors bench`: which benchmarks to run, and what is printed of them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvactors.bench.figures import Figure, Skipped
from kvactors.bench.rows import NAMES, OBSERVED, Settings, run
from kvactors.console import plain_console
from kvactors.errors import KVActorsError, LocalError

if TYPE_CHECKING:
    from rich.console import Console

STAGING = "staging"


@click.command("bench")
@click.argument("rows", nargs=-1, metavar=f"[{'|'.join((*NAMES, STAGING))}]...", type=click.Choice((*NAMES, STAGING)))
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds: all benchmarks in less than two minutes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pin", "pinned", is_flag=True, help="Put each thread on a core of its own, as far as there are so many.")
@click.option("--check", is_flag=True, help="Exit with 1 if a target is missed.")
@click.option("--trace", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="A Mooncake trace for replay.")
@click.option(
    "--timeline",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    help="Write a trace for Perfetto of one more step of step and overlap, which is not measured.",
)
def bench(
    rows: Sequence[str],
    quick: bool,
    as_json: bool,
    pinned: bool,
    check: bool,
    trace: str | None,
    timeline: str | None,
) -> int:
    """Measure what kvactors does beside the plainest way to do the same, in one run: all benchmarks, or those named.

    A ratio is ours / baseline, medians of interleaved repeats; a target without a unit is the ratio's, one with a unit is
    that of our own figure. A benchmark that needs what is not installed is skipped, and says so.

    `mooncake` starts a master on 127.0.0.1 and needs about 7 GiB of memory for the time of the run, or 2 GiB with --quick;
    the others need up to 7 GiB, or 2 GiB. `staging` stands alone: range calls of a real Mooncake with and without staging.
    """
    from kvactors.bench.machine import check_quiet, facts
    from kvactors.replay.timeline import SpanLog, write_timeline

    check_quiet()
    if STAGING in rows:
        if len(rows) > 1:
            raise click.UsageError(f"{STAGING} is a measurement of its own: name it alone")
        _staging(quick, as_json)
        return 0
    names = [name for name in NAMES if name in rows or not rows]
    if timeline is not None and not set(names) & set(OBSERVED):
        raise click.UsageError(f"--timeline: only {' and '.join(OBSERVED)} have one")
    if trace is not None and "replay" not in names:
        raise click.UsageError("--trace: only replay plays one")
    spans = None if timeline is None else SpanLog()
    settings = Settings(quick=quick, pinned=pinned, trace=trace, observer=spans)
    machine = facts(pinned=pinned, quick=quick)
    err = plain_console(stderr=True, soft_wrap=True)
    if machine["traced"]:
        err.print("a debugger or a coverage tool traces this process: the figures are those of the traced program")
    if len(names) == 1 and not as_json and not check and names[0] in _TABLES:
        return _table(names[0], quick, err)
    found = _measure(names, settings, err)
    if spans is not None and timeline is not None:
        write_timeline(timeline, spans)
    if as_json:
        click.echo(json.dumps({"machine": machine, **found.as_dict()}, indent=2))
    else:
        _show(machine, found.figures, plain_console(soft_wrap=True))
    return 1 if found.failed or (check and not all(figure.ok for figure in found.figures)) else 0


@dataclass(slots=True)
class _Found:
    """What came of all benchmarks; `skipped` and `failed`: name -> why."""

    figures: list[Figure] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Rows; and what is missing from them, where something is."""
        answer: dict[str, Any] = {"rows": [figure.as_dict() for figure in self.figures]}
        for what, names in (("skipped", self.skipped), ("failed", self.failed)):
            if names:
                answer[what] = [{"bench": name, "reason": reason} for name, reason in names.items()]
        return answer


def _measure(names: Sequence[str], settings: Settings, err: Console) -> _Found:
    """Runs all benchmarks, also after one that failed. Progress and notes go to stderr."""
    found = _Found()
    notes: list[str] = []
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to standard output, which is the answer's alone
                answer = run(name, settings, partial(_say, err, name))
        except Skipped as reason:
            found.skipped[name] = str(reason)
            err.print(f"{name}: skipped: {reason}")
        except LocalError:
            raise
        except KVActorsError as error:
            found.failed[name] = str(error)
            err.print(f"{name}: failed: {error}")
        else:
            found.figures += answer.figures
            notes += answer.notes
    for note in notes:
        err.print(note)
    return found


def _say(err: Console, name: str, what: str) -> None:
    err.print(f"{name}: {what}")


def _show(machine: Mapping[str, Any], figures: Sequence[Figure], out: Console) -> None:
    from rich.table import Table

    for key, value in machine.items():
        out.print(f"{key:18}{value}")
    table = Table(title="ours beside the baseline: medians of interleaved repeats")
    for column in ("bench", "case", "ratio", "target", "", "ours", "baseline", "unit"):
        table.add_column(column, justify="right" if column in ("ratio", "ours", "baseline") else "left")
    for figure in figures:
        target = "" if figure.target is None else str(figure.target)
        verdict = "" if figure.target is None else "met" if figure.ok else "missed"
        baseline = "" if figure.baseline is None else f"{figure.baseline:.4g}"
        cells = (figure.bench, figure.case, f"{figure.ratio:.3g}", target, verdict, f"{figure.ours:.4g}", baseline, figure.unit)
        table.add_row(*cells)
    out.print(table)


# -- benchmarks with a table of their own ------------------------------------------------------------------------------


def _table(name: str, quick: bool, err: Console) -> int:
    try:
        return _TABLES[name](quick)
    except Skipped as reason:
        err.print(f"{name}: skipped: {reason}")
        return 0


def _mooncake(quick: bool) -> int:
    from rich.table import Table

    from kvactors.bench.mooncake import BLOCKS, ENGINE, LAYERS, MEMCPY, QUICK_LAYERS, RAW, WHOLE, check_mooncake, run

    check_mooncake()
    err = plain_console(stderr=True)
    rows = run(quick=quick, say=lambda size: err.print(f"measuring ranges of {size}"))
    layers = QUICK_LAYERS if quick else LAYERS
    table = Table(title=f"{BLOCKS} blocks of {layers} layers, K and V: medians, and their ratio to the raw client's ranges")
    for column in ("range", "call", RAW, WHOLE, ENGINE, MEMCPY):
        table.add_column(column, justify="left" if column == "call" else "right")
    for row in rows:
        for call, measured in (("put", row.put), ("get", row.get)):
            cells = [
                f"{measured.median(way) * 1000:.1f} ms ({measured.ratio(way, RAW):.2f})" for way in (WHOLE, ENGINE, MEMCPY)
            ]
            table.add_row(f"{row.kib} KiB", call, f"{measured.median(RAW) * 1000:.1f} ms", *cells)
    plain_console(soft_wrap=True).print(table)
    return 0


def _state_rows(quick: bool) -> int:
    from rich.table import Table

    from kvactors.bench.state_rows import CRITERION, CRITERION_KIB, FRESH_GATHER, GATHER, MEMCPY, SCATTER, check_torch, run

    check_torch()
    err = plain_console(stderr=True)
    rows = run(quick=quick, say=lambda size: err.print(f"measuring rows of {size}"))
    table = Table(title=f"{rows[0].moved_bytes >> 20} MiB in padded rows: medians, and their part of the memcpy's rate")
    for column in ("row", GATHER, SCATTER, MEMCPY, FRESH_GATHER, ""):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row.measured.median(way) * 1000:.1f} ms ({row.rate(way):.2f})" for way in (GATHER, SCATTER)]
        cells += [f"{row.measured.median(MEMCPY) * 1000:.1f} ms", f"{row.rate(FRESH_GATHER):.2f}"]
        table.add_row(f"{row.kib} KiB", *cells, "" if row.meets() else f"below {CRITERION}")
    plain_console(soft_wrap=True).print(table)
    err.print(
        f"criterion: gather and scatter at {CRITERION} of the memcpy's rate or more, for rows of {CRITERION_KIB} KiB and more"
    )
    return 0


def _staging(quick: bool, as_json: bool) -> None:
    from rich.table import Table

    from kvactors.bench.staging import PLAIN, ROWS, STAGED, run

    rows = run(quick=quick)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    table = Table(title=f"{ROWS} keys in a call: medians of staged to not staged calls")
    for column in ("pieces of a row", "put", "get", "a range, not staged"):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = (f"{measured.ratio(STAGED, PLAIN):.2f}" for measured in (row.put, row.get))
        table.add_row(f"{row.pieces} of {row.kib} KiB", *ratios, f"{row.range_us:.0f} µs")
    plain_console(soft_wrap=True).print(table)


_TABLES = {"mooncake": _mooncake, "state-rows": _state_rows}
