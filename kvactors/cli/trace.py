"""`kvactors trace`."""

from __future__ import annotations

import click

from kvactors.cli.groups import Group, example


@click.group("trace", cls=Group, epilog=example("kvactors trace stats examples/sample_trace.jsonl"))
def trace_group() -> None:
    """Look into recorded traces, and convert them."""
