"""The command line: `kvactors replay`, `simulate`, `layout`, `store`, `bench` and `doctor`.

Exit codes: 0 = all well; 1 = a request failed, a byte was wrong or an invariant broke; 2 = bad usage or input, with one
line on stderr; 130 = interrupted (after a drain and the partial report); 143 and 129 = the same by SIGTERM and SIGHUP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvactors import __version__
from kvactors.bench.command import bench
from kvactors.console import lasting_streams, log_from, logging_to_stderr, plain_console
from kvactors.core.layout import KVLayout
from kvactors.errors import KVActorsError, LocalError

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Without a command it shows its help, but on stderr: that is bad usage."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise _NoCommand(ctx.get_help())
        return super().parse_args(ctx, args)


class _NoCommand(click.UsageError):
    pass


class _Commands(_Group):
    """Turns our own errors into one line on stderr and exit code 2, and outlives the streams it prints on."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        standalone = kwargs.pop("standalone_mode", True)
        with lasting_streams() as (out, _), logging_to_stderr():
            code = self._code(args, kwargs)
            out.flush()
            if out.problem is not None:
                _complain(f"standard output cannot be written: {out.problem}")
                code = code or 1
        if not standalone:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def _code(self, args: Any, kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except _NoCommand as error:
            click.echo(error.message, err=True)
            return 2
        except click.exceptions.Exit as error:
            return error.exit_code
        except click.ClickException as error:
            _complain(error.format_message())
            return 2
        except (click.Abort, KeyboardInterrupt):
            return 130
        except LocalError as error:
            _complain(str(error))
            return 2
        except KVActorsError as error:
            _complain(str(error))
            return 1


def _complain(text: str) -> None:
    click.echo(f"kvactors: {' '.join(text.split())}", err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvactors")
def cli() -> None:
    """KV-cache blocks of hybrid models, moved layer by layer between a worker and a store."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; `kvactors.__main__` is the command's entry point."""
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="kvactors")
    except (SystemExit, KeyboardInterrupt) as end:
        if _native_calls_are_left():
            _end_here(end.code if isinstance(end, SystemExit) else 130)
        raise


def _native_calls_are_left() -> bool:
    """Whether a native client may be in use by a call that does not return: its destructor would crash the process."""
    client = sys.modules.get("kvactors.stores.mooncake.client")
    leaving = sys.modules.get("kvactors.replay.leaving")
    return bool((client and client.clients_left_open()) or (leaving and leaving.left_in_a_hurry()))


def _end_here(code: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


# -- layouts -------------------------------------------------------------------------------------------------------------


def _size(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from kvactors.stores import parse_size

    return None if value is None else parse_size(value, parameter.opts[0])


def _rate(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    bandwidth = _size(context, parameter, None if value is None else value.strip().removesuffix("/s"))
    if bandwidth == 0:
        raise click.UsageError(f"{parameter.opts[0]} {value}: must be more than 0 bytes a second")
    return bandwidth


def _file(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and ("\0" in value or not value.strip()):
        raise click.UsageError(f"{parameter.opts[0]} {value!r}: give the name of a file")
    return value


def _finite(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.UsageError(f"{parameter.opts[0]} {value}: must be a finite number")
    return value


def _layout_options(command: F) -> F:
    command = click.option(
        "--block-tokens", type=click.IntRange(min=1), metavar="N", help="Block size of every group, in tokens."
    )(command)
    return click.option(
        "--scale",
        type=click.IntRange(min=1),
        default=1,
        metavar="F",
        help="Divide every entry's bytes by F (rounded up to 16).",
    )(command)


def _resolve(name: str, block_tokens: int | None, factor: int) -> tuple[KVLayout, Any]:
    from kvactors.layouts import find_layout, scale, with_block_tokens

    layout, family = find_layout(name)
    if block_tokens is not None:
        layout = with_block_tokens(layout, block_tokens)
    return scale(layout, factor), family


@cli.group("layout", cls=_Group)
def layout_group() -> None:
    """Show the built-in layouts, and layout files."""


@layout_group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def layout_list(as_json: bool) -> None:
    """List the built-in layouts."""
    from kvactors.layouts.show import list_layouts

    click.echo(list_layouts(as_json), nl=False)


@layout_group.command("show")
@click.argument("name", metavar="NAME|FILE")
@_layout_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def layout_show(name: str, block_tokens: int | None, scale: int, as_json: bool) -> None:
    """Show a layout: groups, their entries as ranges of an object and as views of memory, digest, an example key."""
    from kvactors.layouts.show import describe, show_layout

    layout, family = _resolve(name, block_tokens, scale)
    if as_json:
        click.echo(json.dumps(describe(layout, family), indent=2))
    else:
        show_layout(layout, family, plain_console(soft_wrap=True))


# -- replay --------------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, readable=True))
@click.option("--layout", "layout_name", default="seed-example", show_default=True, metavar="NAME|FILE", help="The model.")
@_layout_options
@click.option("--store", default="memory", show_default=True, metavar="memory|mooncake", help="Where the blocks go.")
@click.option("--local-master", is_flag=True, help="With --store mooncake: start a master on 127.0.0.1 for this run.")
@click.option("--namespace", metavar="NAME", help="Prefix of every key: an epoch of the weights, or a tenant.")
@click.option(
    "--capacity", metavar="SIZE", callback=_size, help='Store capacity ("1.5GB"). [default: no bound; --local-master: 4GB]'
)
@click.option("--retention", type=click.IntRange(min=0), metavar="TOKENS", help="Keep windows and states only this often.")
@click.option(
    "--local-blocks", type=click.IntRange(min=1), metavar="N", help="Bound of the local pool, in blocks of all groups."
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Requests in a step; 1 is repeatable without --capacity and --faults.",
)
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=8192, show_default=True, metavar="N", help="Prefill chunk.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    metavar="X",
    help="Play by timestamps, X times as fast; default: each request at once.",
)
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="Only the first N requests.")
@click.option("--skip-bad", is_flag=True, help="Count and skip bad trace lines.")
@click.option("--faults", metavar="PRESET|FILE", help="Inject faults: a preset or a plan (YAML).")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="For faults and chance; a fault plan's own seed wins.",
)
@click.option("--report", "report_file", metavar="FILE", callback=_file, help="Write the JSON report.")
@click.option("--html", "html_file", metavar="FILE", callback=_file, help="Write a page with charts.")
@click.option("--timeline", "timeline_file", metavar="FILE", callback=_file, help="Write a Chrome/Perfetto trace.")
@click.option("--virtual", is_flag=True, help="Virtual time and simulated workers: repeatable byte for byte from --seed.")
@click.option(
    "--bandwidth", metavar="SIZE/s", callback=_rate, help="With --virtual: bytes a second of a worker. [default: 10GB]"
)
@click.option(
    "--latency",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="SECONDS",
    help="With --virtual: of every store call. [default: 0.0002]",
)
@click.option(
    "--layer-time",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="SECONDS",
    help="With --virtual: compute of each layer of a step. [default: 0.001]",
)
@click.option("--event-log", metavar="FILE", callback=_file, help="With --virtual: write every event, a line each.")
def replay(
    trace: str,
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
    virtual: bool,
    bandwidth: int | None,
    latency: float | None,
    layer_time: float | None,
    event_log: str | None,
) -> int:
    """Run a recorded request trace through the engine, with real bytes, and print what happened."""
    for option, value in (
        ("--bandwidth", bandwidth),
        ("--latency", latency),
        ("--layer-time", layer_time),
        ("--event-log", event_log),
    ):
        if value is not None and not virtual:
            raise click.UsageError(f"{option}: belongs to the virtual clock; give --virtual too")
    layout, family = _resolve(layout_name, block_tokens, scale)
    if namespace is not None:
        layout = layout.with_namespace(namespace)
    inputs = {"the trace": trace, "the layout": None if family else layout_name, "the fault plan": faults}
    outputs = {"--report": report_file, "--html": html_file, "--timeline": timeline_file, "--event-log": event_log}
    _check_outputs(inputs, outputs)

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
    )
    plan = plan_replay(options)
    if faults is not None:  # things break on purpose, and often
        log_from(logging.ERROR)

    from kvactors.replay.command import run_and_show

    return run_and_show(
        plan, report_file=report_file, html_file=html_file, timeline_file=timeline_file, event_log_file=event_log
    )


@cli.command()
@click.option("--seeds", default="0:100", show_default=True, metavar="A:B", help="seeds A to B - 1")
@click.option(
    "--faults", default="all", show_default=True, metavar="PRESET", help="a preset, or all: each in turn and combined"
)
@click.option("--layout", metavar="NAME|FILE", help="a simulated model, a built-in layout or a layout file [default: drawn]")
@click.option("--requests", default=20, show_default=True, type=click.IntRange(1), help="prompts in a run")
@click.option("--most-faults", type=click.IntRange(0), help="inject no more than that many")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="processes")
@click.option(
    "--most-failures", default=5, show_default=True, type=click.IntRange(1), help="stop after that many failing seeds"
)
def simulate(
    seeds: str, faults: str, layout: str | None, requests: int, most_faults: int | None, jobs: int, most_failures: int
) -> int:
    """Run seeded simulations with faults on virtual time, checking the invariants after every event.

    The last line of the output is the summary. Exit code 1 if a seed failed; each failing one is made smaller and printed with
    the command that repeats it.
    """
    from kvactors.simulate.models import instance
    from kvactors.simulate.run import scenario
    from kvactors.simulate.run import simulate as run_all

    low, high = _seed_range(seeds)
    if layout is not None:
        instance(layout)
    scenario(low, faults)
    plans = (scenario(n, faults, requests=requests, most_faults=most_faults, model=layout) for n in range(low, high))
    log_from(logging.CRITICAL)
    totals = run_all(plans, jobs=jobs, most_failures=most_failures, say=click.echo)
    click.echo(totals.line())
    return 130 if totals.interrupted else 1 if totals.failing else 0


MOST_SEED_DIGITS = 18


def _seed_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    whole = all(n.isascii() and n.isdigit() and len(n) <= MOST_SEED_DIGITS for n in (low, high))
    if not (colon and whole and int(low) < int(high)):
        raise click.UsageError(
            f"--seeds {text:.60}: give A:B with A < B, of at most {MOST_SEED_DIGITS} digits; seeds A to B - 1 are run"
        )
    return int(low), int(high)


def _faults(text: str | None) -> Any:
    if text is None:
        return None
    from kvactors.stores import PRESETS, FaultPlan

    if not text.strip():
        raise click.UsageError(f"--faults {text!r}: give a preset ({', '.join(PRESETS)}) or the name of a plan file")
    if text in PRESETS:
        return FaultPlan.preset(text)
    if text.endswith((".yaml", ".yml", ".json")) or Path(text).exists():
        return FaultPlan.load(text)
    raise click.UsageError(f"--faults {text}: no such preset or file; presets are {', '.join(PRESETS)}")


def _check_outputs(inputs: dict[str, str | None], outputs: dict[str, str | None]) -> None:
    """Refuses an output that cannot be written, before the run."""
    seen = {Path(name).resolve(): what for what, name in inputs.items() if name and Path(name).is_file()}
    for option, name in outputs.items():
        if name is None:
            continue
        path = Path(name)
        if path.resolve() in seen:
            raise click.UsageError(f"{option} {name}: is the same file as {seen[path.resolve()]}")
        seen[path.resolve()] = option
        if path.is_dir():
            raise click.UsageError(f"{option} {name}: is a directory")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise click.UsageError(f"{option} {name}: there is no directory {folder}")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise click.UsageError(f"{option} {name}: cannot be written")


# -- stores --------------------------------------------------------------------------------------------------------------


@cli.group("store", cls=_Group)
def store_group() -> None:
    """Look after a Mooncake pool."""


@store_group.command("flush")
@click.option("--namespace", required=True, metavar="NAME", help="Whose objects go.")
@click.option("--master", metavar="HOST:PORT", help="The pool's master. [default: as in MOONCAKE_CONFIG_PATH's file]")
def store_flush(namespace: str, master: str | None) -> None:
    """Remove a namespace's objects that nobody reads (those under a lease stay)."""
    from dataclasses import replace

    from kvactors.core.layout import namespace_pattern
    from kvactors.stores import MooncakeConfig, MooncakeStore

    pattern = namespace_pattern(namespace)
    where: dict[str, Any] = {} if master is None else {"master_server_address": master}
    config = replace(MooncakeConfig.from_environment(**where), global_segment_size=0, staging_bytes=0)
    store = MooncakeStore(config)
    try:
        count = store.remove_matching(pattern)
    finally:
        store.close()
    click.echo(f"{count} object{'s' if count != 1 else ''} of namespace {namespace} removed")
    click.echo(f"what was looked up or read in the last {config.lease_s:g} s stays; run it again to remove that too", err=True)


# -- doctor --------------------------------------------------------------------------------------------------------------


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> int:
    """What is installed, in which version; a loopback self-test; what is missing and how to install it."""
    from kvactors.doctor import examine, print_findings

    log_from(logging.ERROR)
    findings = examine()
    if as_json:
        click.echo(json.dumps([f.as_dict() for f in findings], indent=2))
    else:
        print_findings(findings)
    return 1 if any(f.broken for f in findings) else 0


cli.add_command(bench)


if __name__ == "__main__":
    main()
