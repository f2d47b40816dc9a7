"""A file of stories: what happened to every request of a run that is over (`kvactors replay --stories FILE`).

JSON lines. The first says what the file is: `{"kvactors_stories": 1, "run": …}`. Each further line has a request and some of
its events, `{"request": "r17", "events": [[seconds, group, block, what], …]}`, with seconds since the run began, and a group of
-1 for the whole request. A request has a line for each step that it took part in, or more; they are in order. The last
line of a run that was not killed is `{"end": true, "interrupted": false}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from kvactors.core.story import StoryEvent
from kvactors.errors import ConfigError
from kvactors.live.printable import encoded
from kvactors.live.view import StoryPart

SCHEMA = 1

Row = TypeVar("Row")


class Sink(Protocol):
    """A binary file, or what takes its place."""

    def write(self, line: bytes, /) -> object: ...


class _Head(msgspec.Struct, frozen=True):
    kvactors_stories: int
    run: str


class _Row(msgspec.Struct, frozen=True):
    """As much of a line as says what it is: a request's events, or the end."""

    request: str = ""
    end: bool = False
    interrupted: bool = False


class _End(msgspec.Struct, frozen=True):
    end: bool
    interrupted: bool


class StoryWriter:
    """Writes what a `StoryBook` hands on.

    Args:
        run: what was run, for people.
        since_s: when it began, on the clock of the events.
    """

    def __init__(self, sink: Sink, run: str, since_s: float) -> None:
        self._sink, self._since_s = sink, since_s
        self._sink.write(encoded(_Head(SCHEMA, run)))

    def write(self, request: str, events: Sequence[StoryEvent]) -> None:
        """The next events of a request."""
        rows = [(round(e.at_s - self._since_s, 6), e.group_id, e.block_index, e.what) for e in events]
        self._sink.write(encoded(StoryPart(request, rows)))

    def end(self, *, interrupted: bool = False) -> None:
        """Nothing follows; there might have, if the run was interrupted."""
        self._sink.write(encoded(_End(True, interrupted)))


class StoryFile:
    """Reads a file of stories.

    Attributes:
        cut: the last reading met no end: the run was killed or still goes on, or the file was cut. A last line that breaks off
            is left alone.
        interrupted: the last reading met an end before that of the run's trace.

    Raises (each method):
        ConfigError: the file cannot be read, or is no file of stories.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut = self.interrupted = False

    def __str__(self) -> str:
        return self.path

    def names(self) -> list[str]:
        """The requests that it tells of, in the order in which they began."""
        return list(dict.fromkeys(name for name, _ in self._lines()))

    def story(self, request: str) -> list[StoryPart]:
        """What happened to a request, with seconds since its first event; empty if the file has nothing of it."""
        parts = [self._decoded(line, StoryPart) for name, line in self._lines() if name == request]
        events = [event for part in parts for event in part.events]
        if not events:
            return []
        return [StoryPart(request, [(round(at_s - events[0][0], 6), g, b, what) for at_s, g, b, what in events])]

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Each line of events, with the request that it is of."""
        self.cut, self.interrupted = True, False
        try:
            with open(self.path, "rb") as file:
                schema = self._decoded(file.readline(), _Head).kvactors_stories
                if schema != SCHEMA:
                    raise ConfigError(
                        f"{self.path}: stories of schema {schema}, this is {SCHEMA}; use the kvactors that wrote it"
                    )
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    row = self._decoded(line, _Row)
                    self.cut, self.interrupted = not row.end, row.interrupted
                    if not row.end:
                        yield row.request, line
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _decoded(self, line: bytes, kind: type[Row]) -> Row:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why = "is no file of stories" if kind is _Head else f"is a damaged file of stories ({error})"
            raise ConfigError(f"{self.path}: {why}; `kvactors replay --stories FILE` writes one") from error
