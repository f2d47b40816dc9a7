"""`kvactors simulate`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvactors.cli.groups import example
from kvactors.cli.names import Named, check_name, simulated_faults, simulated_models, suggestion
from kvactors.cli.options import as_json
from kvactors.console import log_from
from kvactors.errors import LayoutError

if TYPE_CHECKING:
    from kvactors.simulate.run import Totals

MOST_SEED_DIGITS = 18


@click.command(epilog=example("kvactors simulate --seeds 7:8 --faults lost-master --requests 5"))
@click.option("--seeds", default="0:100", show_default=True, metavar="A:B", help="Seeds A to B - 1.")
@click.option(
    "--faults",
    default="all",
    show_default=True,
    metavar="PRESET",
    type=Named(simulated_faults),
    help="A preset of the simulator's own, or all: each in turn and combined.",
)
@click.option(
    "--layout",
    metavar="NAME|FILE",
    type=Named(simulated_models, files=True),
    help="A simulated model, a built-in layout or a layout file. [default: drawn]",
)
@click.option("--requests", default=20, show_default=True, type=click.IntRange(1), metavar="N", help="Prompts in a run.")
@click.option("--most-faults", type=click.IntRange(0), metavar="N", help="Inject no more than that many.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), metavar="N", help="Processes.")
@click.option(
    "--most-failures",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Stop after that many failing seeds.",
)
@as_json
def simulate(
    seeds: str,
    faults: str,
    layout: str | None,
    requests: int,
    most_faults: int | None,
    jobs: int,
    most_failures: int,
    as_json: bool,
) -> int:
    """Run seeded simulations with faults, checking the invariants.

    The last line of the output is the summary. Exit code 1 if a seed failed; each failing one is made smaller and printed with
    the command that repeats it.
    """
    from kvactors.simulate.progress import progress_for
    from kvactors.simulate.run import scenario
    from kvactors.simulate.run import simulate as run_all

    low, high = _seed_range(seeds)
    _check_model(layout)
    _check_faults(faults)
    plans = (scenario(n, faults, requests=requests, most_faults=most_faults, model=layout) for n in range(low, high))
    log_from(logging.CRITICAL)
    told: list[str] = []
    with progress_for(high - low, quiet=as_json) as progress:
        say = told.append if as_json else progress.say
        totals = run_all(plans, jobs=jobs, most_failures=most_failures, say=say, on_progress=progress.update)
    click.echo(json.dumps(_as_dict(totals, told), indent=2) if as_json else totals.line())
    return totals.exit_code if totals.interrupted else 1 if totals.failing else 0


def _as_dict(totals: Totals, told: list[str]) -> dict[str, Any]:
    """`told`: what the text output says of failing seeds, line by line."""
    return {
        "seeds": totals.seeds,
        "failing": totals.failing,
        "presets": dict(totals.presets),
        "events": totals.events,
        "steps": totals.steps,
        "blocks_saved": totals.saved,
        "blocks_loaded": totals.loaded,
        "injected": dict(totals.injected),
        "wall_s": totals.wall_s,
        "stopped": totals.stopped,
        "interrupted": totals.interrupted,
        "told": told,
    }


def _check_model(name: str | None) -> None:
    from kvactors.simulate.models import instance

    if name is None:
        return
    try:
        instance(name)
    except LayoutError as error:
        hint = suggestion(name, simulated_models())
        if not str(error).startswith("unknown layout") or not hint:
            raise
        raise click.UsageError(f"--layout {name}: unknown model or layout{hint}") from None


def _check_faults(name: str) -> None:
    known = tuple(simulated_faults())
    if name not in known and (name.endswith((".yaml", ".yml", ".json")) or Path(name).is_file()):
        raise click.UsageError(
            f"--faults {name}: a plan file is for `kvactors replay`; the presets of simulate are {', '.join(known)}"
        )
    check_name("--faults", name, known, "preset")


def _seed_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    whole = all(n.isascii() and n.isdigit() and len(n) <= MOST_SEED_DIGITS for n in (low, high))
    if not (colon and whole and int(low) < int(high)):
        raise click.UsageError(
            f"--seeds {text:.60}: give A:B with A < B, of at most {MOST_SEED_DIGITS} digits; seeds A to B - 1 are run"
        )
    return int(low), int(high)
