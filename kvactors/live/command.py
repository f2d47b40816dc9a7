"""`kvactors top` and `kvactors story`: look into running engines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Protocol

import click
import msgspec
from rich.console import Console
from rich.live import Live

from kvactors.console import plain_console
from kvactors.errors import ConfigError, LiveViewError
from kvactors.live.address import VARIABLE, Address, found_addresses, is_file
from kvactors.live.client import NotFoundError, read_names, read_story
from kvactors.live.printable import printable
from kvactors.live.snapshot import Snapshot
from kvactors.live.stories import lines
from kvactors.live.story_file import StoryFile
from kvactors.live.top import Seen, look_at, render
from kvactors.live.view import StoryPart

MOST_MATCHES = 8
"""Requests whose names begin alike that are told at once."""


def _finite(_: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.UsageError(f"{parameter.opts[0]} {value}: must be a finite number")
    return value


@click.command(epilog="\b\nExample:\n  kvactors top /run/kvactors/live.sock --once")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print snapshots as JSON, a line for each look.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.2, max=3600),
    default=1.0,
    show_default=True,
    callback=_finite,
    metavar="SECONDS",
    help="How often to look.",
)
def top(paths: tuple[str, ...], once: bool, as_json: bool, every: float) -> int:
    """Show what running engines do: groups, sessions, queues, hits, waits, trouble.

    PATH: a socket, a directory of sockets, a base name of several ranks' sockets, or HOST:PORT; by default what KVACTORS_LIVE
    names.
    """
    addresses = found_addresses(paths)
    if as_json:
        return _print_json(addresses, once, every)
    console = plain_console()
    if once or not console.is_terminal:
        return _print(console, addresses, once, every)
    before: dict[Address, Snapshot] = {}
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            seen = look_at(addresses)
            live.update(render(seen, before), refresh=True)
            before = _remembered(seen, before)
            time.sleep(every)  # the rate at which a person looks
    return 0


def _print(console: Console, addresses: Sequence[Address], once: bool, every: float) -> int:
    before: dict[Address, Snapshot] = {}
    while True:
        seen = look_at(addresses)
        console.print(render(seen, before))
        if once or _nobody_reads():
            return _code(seen)
        before = _remembered(seen, before)
        time.sleep(every)


def _print_json(addresses: Sequence[Address], once: bool, every: float) -> int:
    while True:
        seen = look_at(addresses)
        row = [
            {"address": str(s.address), "problem": s.problem} if s.snapshot is None
            else {"address": str(s.address), **msgspec.to_builtins(s.snapshot)}
            for s in seen
        ]  # fmt: skip
        click.echo(json.dumps(row))
        if once or _nobody_reads():
            return _code(seen)
        time.sleep(every)


def _nobody_reads() -> bool:
    sys.stdout.flush()
    return getattr(sys.stdout, "lost", None) is not None


def _remembered(seen: Sequence[Seen], before: dict[Address, Snapshot]) -> dict[Address, Snapshot]:
    return before | {s.address: s.snapshot for s in seen if s.snapshot is not None}


def _code(seen: Sequence[Seen]) -> int:
    return 1 if any(s.snapshot is None for s in seen) else 0


@click.command(epilog="\b\nExample:\n  kvactors story r17 /run/kvactors/live.sock")
@click.argument("request")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--all", "every", is_flag=True, help="A line for every block, also where the same happened to several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def story(request: str, paths: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Tell what happened to a request, and why.

    What it loaded and saved, step by step, how each session ended, and what went wrong; blocks to which the same happened one
    after another are one line.

    PATH: as of `kvactors top`, or a file that `kvactors replay --stories` wrote. With several, what each of them knows.
    """
    told: list[tuple[Teller, StoryPart]] = []
    trouble: list[ConfigError | LiveViewError] = []
    unknown: list[Teller] = []
    tellers = _tellers(paths)
    for teller in tellers:
        try:
            found = _stories(teller, request)
            told += [(teller, part) for part in found]
            unknown += [] if found else [teller]
        except (ConfigError, LiveViewError) as error:
            trouble.append(error)
    if not told:
        raise trouble[0] if trouble else LiveViewError(_no_story(request, unknown))
    for problem in [*map(str, trouble), *filter(None, map(_cut_off, tellers))]:
        click.echo(f"kvactors: {printable(problem, 500)}", err=True)
    if as_json:
        click.echo(json.dumps([{"address": str(teller), **msgspec.to_builtins(part)} for teller, part in told], indent=2))
        return 1 if trouble else 0
    several = len({str(teller) for teller, _ in told}) > 1
    for teller, part in told:
        click.echo(
            f"{printable(part.request)}{f' on {printable(str(teller))}' if several else ''}, {len(part.events):,} events"
        )
        for line in lines(part, every=every):
            click.echo(line)
    return 1 if trouble else 0


class Teller(Protocol):
    """Who knows stories: a running engine, or a file."""

    def names(self) -> list[str]: ...
    def story(self, request: str) -> list[StoryPart]: ...


class _Running:
    def __init__(self, address: Address) -> None:
        self._address = address

    def __str__(self) -> str:
        return str(self._address)

    def names(self) -> list[str]:
        return read_names(self._address)

    def story(self, request: str) -> list[StoryPart]:
        try:
            return read_story(self._address, request)
        except NotFoundError:
            return []


def _tellers(paths: Sequence[str]) -> list[Teller]:
    """Files of stories, and then the engines that are meant."""
    texts = list(paths) or list(filter(None, [os.environ.get(VARIABLE)]))
    files = list(dict.fromkeys(text for text in texts if is_file(text)))
    others = [text for text in texts if text not in files]
    running = found_addresses(others) if others or not files else []
    return [*map(StoryFile, files), *map(_Running, running)]


def _stories(teller: Teller, request: str) -> list[StoryPart]:
    """The stories of a request. If there is none under its name, of those whose names begin with it: vLLM appends a random end
    to the id that a client knows."""
    if found := teller.story(request):
        return found
    names = [name for name in teller.names() if name.startswith(f"{request}-") and "#" not in name]
    return [part for name in names[:MOST_MATCHES] for part in teller.story(name)]


def _no_story(request: str, tellers: Sequence[Teller]) -> str:
    names = [name for teller in tellers for name in teller.names()]
    cut = "".join(f"; {text}" for text in map(_cut_off, tellers) if text)
    if not names:
        yet = " yet since the live view was opened" if any(isinstance(teller, _Running) for teller in tellers) else ""
        return f"{printable(request)}: there is no story; nothing has happened there{yet}{cut}"
    near = ", ".join(map(printable, get_close_matches(request, names, 3) or names[:-4:-1]))
    return f"{printable(request)}: there is no story of it; {len(names):,} are kept, such as {near}{cut}"


def _cut_off(teller: Teller) -> str:
    """That a file ends before its stories do; empty if it does not."""
    if isinstance(teller, StoryFile) and teller.cut:
        return f"{teller} has no end: its run was killed or still goes on, or the file was cut, and there may be more to tell"
    if isinstance(teller, StoryFile) and teller.interrupted:
        return f"{teller} is of a run that was interrupted, and did not come to the end of its trace"
    return ""


assert VARIABLE in (top.help or "")
