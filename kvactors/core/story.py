"""What happened to the sessions of a request, in order: the memory behind `engine.story(request_id)`.

Nothing is kept unless somebody asked for it (`Engine.keep_stories`). Then memory is bounded three times: in requests, in events
of one request, and in events of all of them; what is oldest goes first. Whoever wants all of it takes it meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from kvactors.core.clock import Clock

MOST_REQUESTS = 1024
MOST_EVENTS_EACH = 4096
MOST_EVENTS = 1 << 17
"""Of all requests together: some 25 MB."""

LONG_CHARACTERS = 80
MOST_LONG_TEXTS = 64
"""Texts longer than that (what a store said in its own words) are kept once, and so many of them, not once for every block."""

WHOLE_REQUEST = -1
"""In the place of a group and a block: the event is the whole request's."""


class StoryEvent(NamedTuple):
    """One event of one request.

    Attributes:
        at_s: on the engine's clock.
        group_id, block_index: where; `WHOLE_REQUEST` if it is about all of the request.
        what: what happened, and in parentheses why.
    """

    at_s: float
    group_id: int
    block_index: int
    what: str

    def line(self, since_s: float) -> str:
        """The event as a line: seconds since then, group, block, what happened."""
        where = "request" if self.group_id == WHOLE_REQUEST else f"group {self.group_id} block {self.block_index}"
        return f"+{self.at_s - since_s:.6f}s {where}: {self.what}"


Page = deque[tuple[float, int, int, str]]

Taker = Callable[[str, list[StoryEvent]], None]


class StoryBook:
    """The last requests that had something happen, each with its last events. Written by the engine's loop alone; read by any
    thread.

    Attributes:
        problem: what a taker raised; it was not called again.
    """

    def __init__(self, clock: Clock) -> None:
        self.problem: Exception | None = None
        self._clock = clock
        self._long: dict[str, str] = {}
        self._pages: OrderedDict[str, Page] = OrderedDict()
        """plain tuples: the garbage collector lets go of these at its first look, and of no others"""
        self._events = 0
        self._taker: Taker | None = None
        self._new: dict[str, int] = {}
        """how many events at the end of each page the taker has not got yet; only while there is one"""

    def record(self, request_id: str, group_id: int, block_index: int, what: str) -> None:
        """Notes an event, and forgets the oldest request if there are too many of either."""
        page = self._pages.get(request_id)
        if page is None:
            page = self._pages[request_id] = deque(maxlen=MOST_EVENTS_EACH)
            if len(self._pages) > MOST_REQUESTS:
                self._drop_oldest()
        else:
            self._pages.move_to_end(request_id)
        if self._taker is not None:
            new = self._new.get(request_id, 0)
            if new == MOST_EVENTS_EACH:  # the page would lose one that was not handed on
                self._hand_on(request_id, page)
                new = 0
            self._new[request_id] = new + 1
        if len(page) < MOST_EVENTS_EACH:
            self._events += 1
        if len(what) > LONG_CHARACTERS:
            what = self._kept_once(what)
        page.append((self._clock.now(), group_id, block_index, what))
        while self._events > MOST_EVENTS:
            self._drop_oldest()

    def _kept_once(self, what: str) -> str:
        if len(self._long) >= MOST_LONG_TEXTS and what not in self._long:
            self._long.clear()
        return self._long.setdefault(what, what)

    def _drop_oldest(self) -> None:
        request_id, page = self._pages.popitem(last=False)
        self._events -= len(page)
        self._hand_on(request_id, page)

    # -- whoever wants all of it ---------------------------------------------------------------------------------------

    def hand_to(self, taker: Taker) -> None:
        """From now on every event goes to this taker, once and in its request's order: when it is forgotten, or at `hand_on`.

        The taker is called on the engine's loop, which waits for it. One that raises is called no more: see `problem`.
        """
        self._taker = taker

    def hand_on(self) -> None:
        """Gives the taker what it has not got yet. Only where the engine's loop is, or has ended."""
        for request_id in list(self._new):
            self._hand_on(request_id, self._pages[request_id])

    def _hand_on(self, request_id: str, page: Page) -> None:
        new = self._new.pop(request_id, 0)
        if self._taker is None or not new:
            return
        try:
            self._taker(request_id, _told(islice(page, len(page) - new, None)))
        except Exception as error:  # a reader's trouble is none of the engine's
            self._taker, self.problem = None, error

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._pages)

    def requests(self) -> list[str]:
        """The requests that have a page; the last one written to comes last."""
        return list(self._pages)

    def events(self, request_id: str) -> list[StoryEvent]:
        """The events of one request, oldest first; empty if there is no page of it."""
        return _told(list(self._pages.get(request_id, ())))

    def tell(self, request_id: str) -> list[str]:
        """One line per event: seconds since the request's first, group, block, what happened."""
        events = self.events(request_id)
        return [event.line(events[0].at_s) for event in events]


def _told(page: Iterable[tuple[float, int, int, str]]) -> list[StoryEvent]:
    return [StoryEvent(*event) for event in page]
