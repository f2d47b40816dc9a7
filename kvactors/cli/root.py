"""The root of the command line, and how its process ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from kvactors import __version__
from kvactors.cli.completion import completion
from kvactors.cli.doctor import doctor
from kvactors.cli.groups import HELP_COLUMNS, Lazy, Root, example
from kvactors.cli.layout import layout_group
from kvactors.cli.replay import replay
from kvactors.cli.simulate import simulate
from kvactors.cli.store import store_group
from kvactors.cli.trace import trace_group


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
    epilog=example("kvactors replay examples/sample_trace.jsonl"),
)
@click.version_option(__version__, prog_name="kvactors")
def cli() -> None:
    """KV-cache blocks of hybrid models, moved layer by layer between a worker and a store."""


for _command in (completion, doctor, layout_group, replay, simulate, store_group, trace_group):
    cli.add_command(_command)
cli.lazy["top"] = Lazy("kvactors.live.command", "top", "Show what running engines do.", "")
cli.lazy["story"] = Lazy("kvactors.live.command", "story", "Tell what happened to a request, and why.", "")
cli.lazy["bench"] = Lazy(
    "kvactors.bench.command",
    "bench",
    "Measure what kvactors does beside the plainest way to do the same.",
    example("kvactors bench copy hooks --quick"),
)


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
