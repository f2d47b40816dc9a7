"""`kvactors replay`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvactors.cli.groups import example
from kvactors.cli.names import (
    Named,
    check_name,
    fault_plans,
    layout_names,
    simulated_faults,
    store_names,
    suggestion,
    trace_formats,
)
from kvactors.cli.options import TRACE, check_outputs, file_name, finite, layout_options, rate, resolve_layout, size
from kvactors.console import log_from

if TYPE_CHECKING:
    from kvactors.stores import FaultPlan

_AT_LEAST_1 = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0)


@click.command(epilog=example("kvactors replay examples/sample_trace.jsonl --layout gemma-3-27b --scale 4096 --html run.html"))
@click.argument("trace", type=TRACE)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    type=Named(trace_formats),
    help="Of the trace: mooncake, bailian, jsonl, csv. [default: by its first row]",
)
@click.option(
    "--layout",
    "layout_name",
    default="seed-example",
    show_default=True,
    metavar="NAME|FILE",
    type=Named(layout_names, files=True),
    help="The model.",
)
@layout_options
@click.option(
    "--store",
    default="memory",
    show_default=True,
    metavar="NAME",
    type=Named(store_names),
    help="Where the blocks go: memory or mooncake.",
)
@click.option("--local-master", is_flag=True, help="With --store mooncake: a master on 127.0.0.1 for this run.")
@click.option("--namespace", metavar="NAME", help="Prefix of every key: an epoch of the weights, a tenant.")
@click.option("--capacity", metavar="SIZE", callback=size, help='Store capacity ("1.5GB"). [default: none; own master: 4GB]')
@click.option("--retention", type=click.IntRange(min=0), metavar="TOKENS", help="Keep windows and states only this often.")
@click.option("--local-blocks", type=_AT_LEAST_1, metavar="N", help="Bound of the local pool, in blocks of all groups.")
@click.option("--concurrency", type=_AT_LEAST_1, default=1, show_default=True, metavar="N", help="Requests in a step.")
@click.option("--chunk-tokens", type=_AT_LEAST_1, default=8192, show_default=True, metavar="N", help="Prefill chunk.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    metavar="X",
    help="Play by timestamps, X times as fast. [default: each at once]",
)
@click.option("--requests", type=_AT_LEAST_1, metavar="N", help="Only the first N requests.")
@click.option("--skip-bad", is_flag=True, help="Count and skip bad trace lines.")
@click.option(
    "--faults",
    metavar="PRESET|FILE",
    type=Named(fault_plans, files=True),
    help="Inject faults: a preset of replay's own, or a plan (YAML).",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="A fault plan's own seed wins."
)
@click.option("--report", "report_file", metavar="FILE", callback=file_name, help="Write the JSON report.")
@click.option("--html", "html_file", metavar="FILE", callback=file_name, help="Write a page with charts.")
@click.option("--timeline", "timeline_file", metavar="FILE", callback=file_name, help="Write a trace for Perfetto.")
@click.option("--stories", "stories_file", metavar="FILE", callback=file_name, help="Write all that `kvactors story` can tell.")
@click.option("--virtual", is_flag=True, help="Virtual time, simulated workers: repeatable byte for byte.")
@click.option("--bandwidth", metavar="SIZE/s", callback=rate, help="With --virtual: of a worker. [default: 10GB]")
@click.option(
    "--latency",
    type=_SECONDS,
    callback=finite,
    metavar="SECONDS",
    help="With --virtual: of a store call. [default: 0.0002]",
)
@click.option(
    "--layer-time",
    type=_SECONDS,
    callback=finite,
    metavar="SECONDS",
    help="With --virtual: compute of a layer. [default: 0.001]",
)
@click.option("--event-log", metavar="FILE", callback=file_name, help="With --virtual: write every event, a line each.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON report in place of the summary.")
@click.option("--live", metavar="PATH", callback=file_name, help="A socket for `kvactors top` and `story` while it runs.")
def replay(
    trace: str,
    format_name: str | None,
    layout_name: str,
    block_tokens: int | None,
    scale: int,
    store: str,
    local_master: bool,
    namespace: str | None,
    capacity: int | None,
    retention: int | None,
    local_blocks: int | None,
    concurrency: int,
    chunk_tokens: int,
    speed: float | None,
    requests: int | None,
    skip_bad: bool,
    faults: str | None,
    seed: int,
    report_file: str | None,
    html_file: str | None,
    timeline_file: str | None,
    stories_file: str | None,
    virtual: bool,
    bandwidth: int | None,
    latency: float | None,
    layer_time: float | None,
    event_log: str | None,
    as_json: bool,
    live: str | None,
) -> int:
    """Play a recorded trace through the engine, with real bytes.

    Prints what happened. Exit code 1 if a request failed, a byte was wrong or an invariant broke.
    """
    for option, value in (
        ("--bandwidth", bandwidth),
        ("--latency", latency),
        ("--layer-time", layer_time),
        ("--event-log", event_log),
    ):
        if value is not None and not virtual:
            real = "--local-master" if local_master else "--store mooncake" if store == "mooncake" else "--live"
            hint = "give --virtual too"
            if local_master or store == "mooncake" or live is not None:
                hint = f"{real} needs a real one, so leave {option} out"
            raise click.UsageError(f"{option}: belongs to the virtual clock; {hint}")
    if live is not None and virtual:
        raise click.UsageError(
            "--live: virtual time has nothing to look at while it runs; leave --virtual out, or give --stories FILE and read "
            "that with `kvactors story` afterwards"
        )
    layout, family = resolve_layout(layout_name, block_tokens, scale)
    if namespace is not None:
        layout = layout.with_namespace(namespace)
    inputs = {"the trace": trace, "the layout": None if family else layout_name, "the fault plan": faults}
    outputs = {
        "--report": report_file,
        "--html": html_file,
        "--timeline": timeline_file,
        "--stories": stories_file,
        "--event-log": event_log,
    }
    check_outputs(inputs, outputs)
    for option, name in outputs.items():
        if live is not None and name is not None and Path(name).resolve() == Path(live).resolve():
            raise click.UsageError(f"{option} {name}: is the same file as --live")
    check_name("--store", store, tuple(store_names()), "store")
    if format_name is not None:
        check_name("--format", format_name, tuple(trace_formats()), "trace format")

    from kvactors.live.address import Address
    from kvactors.replay.plan import ReplayOptions, VirtualOptions, plan_replay

    machine = VirtualOptions()
    if virtual:
        machine = VirtualOptions(
            machine.bandwidth if bandwidth is None else bandwidth,
            machine.latency_s if latency is None else latency,
            machine.layer_time_s if layer_time is None else layer_time,
        )
    options = ReplayOptions(
        trace=trace,
        layout=layout,
        store=store,
        local_master=local_master,
        capacity=capacity,
        retention=retention,
        local_blocks=local_blocks,
        concurrency=concurrency,
        chunk_tokens=chunk_tokens,
        speed=speed,
        requests=requests,
        skip_bad=skip_bad,
        faults=_faults(faults),
        seed=seed,
        virtual=machine if virtual else None,
        format=format_name,
    )
    address = None if live is None else Address.of(live)
    plan = plan_replay(options)
    if faults is not None:  # things break on purpose, and often
        log_from(logging.ERROR)

    from kvactors.replay.command import run_and_show

    return run_and_show(
        plan,
        report_file=report_file,
        html_file=html_file,
        timeline_file=timeline_file,
        event_log_file=event_log,
        stories_file=stories_file,
        as_json=as_json,
        live=address,
    )


def _faults(text: str | None) -> FaultPlan | None:
    if text is None:
        return None
    from kvactors.stores import PRESETS, FaultPlan

    if not text.strip():
        raise click.UsageError(f"--faults {text!r}: give a preset ({', '.join(PRESETS)}) or the name of a plan file")
    if text in PRESETS:
        return FaultPlan.preset(text)
    if text.endswith((".yaml", ".yml", ".json")) or Path(text).exists():
        return FaultPlan.load(text)
    if text == "-":
        raise click.UsageError("--faults -: is no preset and no file; for standard input give /dev/stdin")
    known = f"the presets of replay are {', '.join(PRESETS)}"
    if text in simulated_faults():
        raise click.UsageError(f"--faults {text}: is a preset of `kvactors simulate`, which are others; {known}")
    raise click.UsageError(f"--faults {text}: no such preset or file{suggestion(text, PRESETS) or ';'} {known}")
