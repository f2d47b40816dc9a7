"""`kvactors trace stats` and `convert`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, TypeVar

import click

from kvactors.cli.groups import Group, example
from kvactors.cli.names import Choice, Named, check_name, trace_formats
from kvactors.cli.options import TRACE, as_json, check_outputs, file_name
from kvactors.console import plain_console

F = TypeVar("F", bound=Callable[..., Any])

_AT_LEAST_1 = click.IntRange(min=1)


@click.group("trace", cls=Group, epilog=example("kvactors trace stats examples/sample_trace.jsonl"))
def trace_group() -> None:
    """Say what a recorded trace holds; convert it."""


def _reading_options(command: F) -> F:
    for option in (
        click.option("--skip-bad", is_flag=True, help="Count and skip bad lines."),
        click.option("--requests", type=_AT_LEAST_1, metavar="N", help="Only the first N requests."),
        click.option(
            "--format",
            "format_name",
            metavar="NAME",
            type=Named(trace_formats),
            help="mooncake, bailian, jsonl or csv. [default: as the first row tells]",
        ),
    ):
        command = option(command)
    return command


@trace_group.command("stats", epilog=example("kvactors trace stats examples/sample_trace.jsonl --plot trace.html"))
@click.argument("trace", metavar="FILE", type=TRACE)
@_reading_options
@click.option("--plot", metavar="FILE", callback=file_name, help="Write charts: a page (.html) or a picture (.svg).")
@as_json
def trace_stats(
    trace: str, format_name: str | None, requests: int | None, skip_bad: bool, plot: str | None, as_json: bool
) -> int:
    """Count requests, lengths and reuse; say what a cache can serve at most, by boundary size."""
    _check(format_name)
    if plot is not None and not plot.lower().endswith((".html", ".htm", ".svg")):
        raise click.UsageError(f"--plot {plot}: the name must end in .html or .svg")
    check_outputs({"the trace": trace}, {"--plot": plot})

    from kvactors.replay import trace_stats as stats
    from kvactors.replay.trace_page import print_stats, write_plot

    failed = 0
    found = stats.trace_stats(trace, format=format_name, skip_bad=skip_bad, limit=requests)
    if plot is not None:
        try:
            write_plot(plot, found)
        except OSError as error:
            failed = _cannot_write(plot, error)
    if as_json:
        click.echo(found.to_json())
    else:
        print_stats(found, plain_console())
    return failed


@trace_group.command("convert", epilog=example("kvactors trace convert examples/sample_trace.jsonl mooncake.jsonl.gz"))
@click.argument("trace", metavar="IN", type=TRACE)
@click.argument("out", metavar="OUT", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--to", "target", type=Choice(("mooncake",)), default="mooncake", show_default=True, help="The format of OUT.")
@_reading_options
@as_json
def trace_convert(
    trace: str, out: str, target: str, format_name: str | None, requests: int | None, skip_bad: bool, as_json: bool
) -> int:
    """Write a trace in another format, row by row, and say what of it is lost. OUT is packed if its name ends in .gz.

    "-" is standard input and standard output.
    """
    _check(format_name)
    to_stdout = out == "-"
    if to_stdout and as_json:
        raise click.UsageError("OUT -: with --json standard output has the JSON; give OUT a name")
    check_outputs({"IN": trace}, {"OUT": "/dev/stdout" if to_stdout else out})

    from kvactors.replay.interrupts import Interrupts
    from kvactors.replay.trace import TraceReader
    from kvactors.replay.trace_convert import appears_whole, convert

    interrupts = Interrupts()
    try:
        with ExitStack() as stack:
            if appears_whole(out):
                stack.enter_context(interrupts)
                stack.enter_context(interrupts.passed_to(_stop))
            done = convert(TraceReader(trace, format=format_name, skip_bad=skip_bad, limit=requests), out)
    except KeyboardInterrupt:  # what was written is gone
        return interrupts.exit_code
    except BrokenPipeError:  # whoever read it has enough
        return 0
    except OSError as error:
        return _cannot_write("standard output" if to_stdout else out, error)
    if as_json:
        click.echo(json.dumps({"to": target, **asdict(done)}, indent=2))
        return 0
    err = plain_console(stderr=True, soft_wrap=True)
    err.print(f"{done.requests:,} requests: {done.format}, {done.block_tokens} tokens an id, to {target}, 512")
    for what in done.lost:
        err.print(f"lost: {what}")
    if not done.lost:
        err.print("nothing is lost")
    return 0


def _stop(signals: int) -> None:
    """Ends a conversion at the first signal; further ones must not keep it from removing what it has written."""
    if signals == 1:
        raise KeyboardInterrupt


def _cannot_write(path: str, error: OSError) -> int:
    click.echo(f"kvactors: {path}: cannot be written: {error.strerror or error}", err=True)
    return 1


def _check(format_name: str | None) -> None:
    if format_name is not None:
        check_name("--format", format_name, tuple(trace_formats()), "trace format")
