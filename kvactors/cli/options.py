"""Options and checks that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvactors.core.layout import KVLayout

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

TRACE = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)
"""A trace: a file, or "-" for standard input."""


def size(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from kvactors.stores import parse_size

    return None if value is None else parse_size(value, parameter.opts[0])


def rate(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    bandwidth = size(context, parameter, None if value is None else value.strip().removesuffix("/s"))
    if bandwidth == 0:
        raise click.UsageError(f"{parameter.opts[0]} {value}: must be more than 0 bytes a second")
    return bandwidth


def file_name(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and ("\0" in value or not value.strip()):
        raise click.UsageError(f"{parameter.opts[0]} {value!r}: give the name of a file")
    if value == "-":
        raise click.UsageError(
            f"{parameter.opts[0]} -: this is written to a file, not to standard output, which has the results; "
            "give a name (./- if it is to be that one)"
        )
    return value


def finite(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.UsageError(f"{parameter.opts[0]} {value}: must be a finite number")
    return value


def layout_options(command: F) -> F:
    """`--block-tokens` and `--scale`."""
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


def resolve_layout(name: str, block_tokens: int | None, factor: int) -> tuple[KVLayout, Any]:
    """The layout of a name or a file, as `layout_options` change it, and its family; None for a file."""
    from kvactors.layouts import find_layout, scale, with_block_tokens

    layout, family = find_layout(name)
    if block_tokens is not None:
        layout = with_block_tokens(layout, block_tokens)
    return scale(layout, factor), family


def check_outputs(inputs: dict[str, str | None], outputs: dict[str, str | None]) -> None:
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
