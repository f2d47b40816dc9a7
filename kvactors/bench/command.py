"""`kvactors bench`: what each benchmark prints."""

from __future__ import annotations

import importlib.util
import json

import click

from kvactors.console import plain_console


@click.group("bench")
def bench() -> None:
    """Measure ways to do the same thing side by side, in one run."""


@bench.command("mooncake")
@click.option("--quick", is_flag=True, help="8 layers instead of 32, and fewer rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_mooncake(quick: bool, as_json: bool) -> None:
    """Puts and gets of 64 blocks on a real Mooncake: the engine beside the raw client and memcpy.

    Starts a master on 127.0.0.1. Needs about 7 GiB of memory for the time of the run, or 2 GiB with --quick.
    """
    from rich.table import Table

    from kvactors.bench.mooncake import BLOCKS, ENGINE, LAYERS, MEMCPY, RAW, WHOLE, run

    err = plain_console(stderr=True)
    rows = run(quick=quick, say=lambda size: err.print(f"measuring ranges of {size}"))
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    layers = 8 if quick else LAYERS
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


@bench.command("staging")
@click.option("--quick", is_flag=True, help="Fewer rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_staging(quick: bool, as_json: bool) -> None:
    """Range calls of a real Mooncake with and without staging, by size and number of the pieces of a row."""
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


@bench.command("state-rows")
@click.option("--quick", is_flag=True, help="Fewer rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_state_rows(quick: bool, as_json: bool) -> None:
    """Gather and scatter of padded recurrent states, beside memcpy of as many bytes. Needs torch."""
    from rich.table import Table

    from kvactors.bench.state_rows import CRITERION, CRITERION_KIB, FRESH_GATHER, GATHER, MEMCPY, SCATTER, run

    if importlib.util.find_spec("torch") is None:
        raise click.ClickException("state rows are torch tensors: pip install 'kvactors[torch]'")
    err = plain_console(stderr=True)
    rows = run(quick=quick, say=lambda size: err.print(f"measuring rows of {size}"))
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
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
