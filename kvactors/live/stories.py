"""`kvactors story`: a request's events as lines, where neighbours that say the same of other blocks are one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvactors.core.story import WHOLE_REQUEST
from kvactors.live.printable import printable
from kvactors.live.view import StoryPart

Event = tuple[float, int, int, str]
"""Seconds since the first, group, block, what happened."""


def lines(part: StoryPart, *, every: bool = False) -> Iterator[str]:
    """A story, one line for each run of blocks to which the same happened one after another.

    Args:
        every: one line for each event.
    """
    for run in _runs(part.events, every=every):
        at_s, group, _, what = run[0]
        where = "request" if group == WHOLE_REQUEST else f"group {group} {_blocks([block for _, _, block, _ in run])}"
        yield f"{at_s:>12.6f} s  {where:<24} {printable(what, 500)}"


def _runs(events: Iterable[Event], *, every: bool) -> Iterator[list[Event]]:
    run: list[Event] = []
    for event in events:
        if run and not every and event[1] == run[-1][1] != WHOLE_REQUEST and event[3] == run[-1][3]:
            run.append(event)
            continue
        if run:
            yield run
        run = [event]
    if run:
        yield run


def _blocks(blocks: Sequence[int]) -> str:
    """Block numbers, those that follow on each other as a span."""
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    spans: list[list[int]] = []
    for block in sorted(blocks):
        if spans and block == spans[-1][1] + 1:
            spans[-1][1] = block
        else:
            spans.append([block, block])
    return "blocks " + ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in spans)
