"""`kvactors layout list` and `show`."""

from __future__ import annotations

import json

import click

from kvactors.cli.groups import Group, example
from kvactors.cli.names import Named, layout_names
from kvactors.cli.options import as_json, layout_options, resolve_layout
from kvactors.console import plain_console


@click.group("layout", cls=Group, epilog=example("kvactors layout show llama-3.1-8b"))
def layout_group() -> None:
    """Show the built-in layouts, and layout files."""


@layout_group.command("list", epilog=example("kvactors layout list"))
@as_json
def layout_list(as_json: bool) -> None:
    """List the built-in layouts."""
    from kvactors.layouts.show import list_layouts

    click.echo(list_layouts(as_json), nl=False)


@layout_group.command("show", epilog=example("kvactors layout show gemma-3-27b --scale 64"))
@click.argument("name", metavar="NAME|FILE", type=Named(layout_names, files=True))
@layout_options
@as_json
def layout_show(name: str, block_tokens: int | None, scale: int, as_json: bool) -> None:
    """Show a layout: groups, their entries as ranges of an object and as views of memory, digest, an example key."""
    from kvactors.layouts.show import describe, show_layout

    layout, family = resolve_layout(name, block_tokens, scale)
    if as_json:
        click.echo(json.dumps(describe(layout, family), indent=2))
    else:
        show_layout(layout, family, plain_console(soft_wrap=True))
