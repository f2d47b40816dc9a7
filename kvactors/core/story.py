"""What happened to the sessions of a request, in order: the memory behind `engine.story(request_id)`."""

from __future__ import annotations

from collections import OrderedDict, deque

from kvactors.core.clock import Clock

MOST_REQUESTS = 1024
MOST_LINES = 4096


class StoryBook:
    """The last `MOST_REQUESTS` requests that had something happen, each with its last `MOST_LINES` events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pages: OrderedDict[str, deque[tuple[float, int, int, str]]] = OrderedDict()

    def record(self, request_id: str, group_id: int, block_index: int, what: str) -> None:
        page = self._pages.get(request_id)
        if page is None:
            page = self._pages[request_id] = deque(maxlen=MOST_LINES)
            if len(self._pages) > MOST_REQUESTS:
                self._pages.popitem(last=False)
        else:
            self._pages.move_to_end(request_id)
        page.append((self._clock.now(), group_id, block_index, what))

    def tell(self, request_id: str) -> list[str]:
        """One line per event: seconds since the request's first, group, block, what happened."""
        page = list(self._pages.get(request_id, ()))
        start = page[0][0] if page else 0.0
        return [f"+{at - start:.6f}s group {group} block {block}: {what}" for at, group, block, what in page]
