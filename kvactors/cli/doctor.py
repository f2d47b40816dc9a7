"""`kvactors doctor`."""

from __future__ import annotations

import json
import logging

import click

from kvactors.cli.groups import example
from kvactors.cli.options import as_json
from kvactors.console import log_from


@click.command(epilog=example("kvactors doctor"))
@as_json
def doctor(as_json: bool) -> int:
    """Say what is installed, and how to get what is missing."""
    from kvactors.doctor import examine, print_findings

    log_from(logging.ERROR)
    findings = examine()
    if as_json:
        click.echo(json.dumps([f.as_dict() for f in findings], indent=2))
    else:
        print_findings(findings)
    return 1 if any(f.broken for f in findings) else 0
