"""`kvactors store flush`."""

from __future__ import annotations

import json
from typing import Any

import click

from kvactors.cli.groups import Group, example
from kvactors.cli.options import as_json


@click.group("store", cls=Group, epilog=example("kvactors store flush --namespace epoch-7"))
def store_group() -> None:
    """Look after a Mooncake pool."""


@store_group.command("flush", epilog=example("kvactors store flush --namespace epoch-7 --master 10.0.0.5:50051"))
@click.option("--namespace", required=True, metavar="NAME", help="Whose objects go.")
@click.option("--master", metavar="HOST:PORT", help="The pool's master. [default: as in MOONCAKE_CONFIG_PATH's file]")
@as_json
def store_flush(namespace: str, master: str | None, as_json: bool) -> None:
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
    if as_json:
        click.echo(json.dumps({"namespace": namespace, "removed": count, "lease_s": config.lease_s}))
    else:
        click.echo(f"{count} object{'s' if count != 1 else ''} of namespace {namespace} removed")
    click.echo(f"what was looked up or read in the last {config.lease_s:g} s stays; run it again to remove that too", err=True)
