"""A file of stories: what happened to every request of a run that is over (`kvactors replay --stories FILE`).

JSON lines. The first says what the file is: `{"kvactors_stories": 1, "run": …}`. Each further line has a request and some of
its events, `{"request": "r17", "events": [[seconds, group, block, what], …]}`, with seconds since the run began, and a group of
-1 for the whole request. A request has several lines if it had more events than are kept in memory; they are in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from kvactors.core.story import StoryEvent
from kvactors.errors import ConfigError
from kvactors.live.view import StoryPart

SCHEMA = 1

Row = TypeVar("Row")


class Sink(Protocol):
    """A binary file, or what takes its place."""

    def write(self, line: bytes, /) -> object: ...


class _Head(msgspec.Struct, frozen=True):
    kvactors_stories: int
    run: str


class _Name(msgspec.Struct, frozen=True):
    request: str


class StoryWriter:
    """Writes what a `StoryBook` lets go of.

    Args:
        run: what was run, for people.
        since_s: when it began, on the clock of the events.
    """

    def __init__(self, sink: Sink, run: str, since_s: float) -> None:
        self._sink, self._since_s = sink, since_s
        self._line(_Head(SCHEMA, run))

    def write(self, request: str, events: Sequence[StoryEvent]) -> None:
        """The next events of a request."""
        rows = [(round(e.at_s - self._since_s, 6), e.group_id, e.block_index, e.what) for e in events]
        self._line(StoryPart(request, rows))

    def _line(self, row: msgspec.Struct) -> None:
        self._sink.write(msgspec.json.encode(row) + b"\n")


class StoryFile:
    """Reads a file of stories.

    Attributes:
        cut: the last reading met a last line that breaks off, which is left alone: the run was killed, or the file was cut.

    Raises (each method):
        ConfigError: the file cannot be read, or is no file of stories.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut = False

    def __str__(self) -> str:
        return self.path

    def names(self) -> list[str]:
        """The requests that it tells of; the one that was silent longest comes first."""
        return list(dict.fromkeys(name for name, _ in self._lines()))

    def story(self, request: str) -> list[StoryPart]:
        """What happened to a request, with seconds since its first event; empty if the file has nothing of it."""
        parts = [self._decoded(line, StoryPart) for name, line in self._lines() if name == request]
        events = [event for part in parts for event in part.events]
        return (
            [StoryPart(request, [(round(at_s - events[0][0], 6), g, b, what) for at_s, g, b, what in events])] if events else []
        )

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Each line but the first, with the request that it is of."""
        try:
            with open(self.path, "rb") as file:
                schema = self._decoded(file.readline(), _Head).kvactors_stories
                if schema != SCHEMA:
                    raise ConfigError(
                        f"{self.path}: stories of schema {schema}, this is {SCHEMA}; use the kvactors that wrote it"
                    )
                self.cut = False
                for line in file:
                    if line.endswith(b"\n"):
                        yield self._decoded(line, _Name).request, line
                    else:
                        self.cut = True
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _decoded(self, line: bytes, kind: type[Row]) -> Row:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = "is no file of stories" if kind is _Head else f"is a damaged file of stories ({error})"
            raise ConfigError(f"{self.path}: {why}; `kvactors replay --stories FILE` writes one") from error
