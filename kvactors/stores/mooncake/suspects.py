"""What is known not to be readable for a while: keys whose read failed, and segments whose reads time out.

The owner of a segment that froze costs its time-out, half a minute, for every range that is read from it. So a read that takes
too long makes its segment a suspect, even before it has come back, and keys that lie there alone count as not readable for
some time; after it one read tries again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

_MOST_KEYS = 1 << 16

Segments = frozenset[str]


class Suspects:
    """Thread-safe. Times are seconds on the caller's clock."""

    def __init__(self, after_s: float, negative_s: float) -> None:
        self._after_s, self._negative_s = after_s, negative_s
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, float] = OrderedDict()
        self._segments: dict[str, float] = {}
        self._reading: dict[int, tuple[float, Segments]] = {}
        self._last = 0

    def begin(self, segments: Iterable[Segments], now: float) -> int:
        """A read from these segments starts; returns what `end` takes."""
        with self._lock:
            self._last += 1
            self._reading[self._last] = (now, frozenset().union(*segments))
            return self._last

    def end(self, read: int, failed: Iterable[tuple[str, Segments]], now: float) -> None:
        """A read came back; `failed` are the keys it failed for, and where they lie."""
        with self._lock:
            began, _ = self._reading.pop(read)
            slow = now - began > self._after_s
            for key, segments in failed:
                self._keys[key] = now + self._negative_s
                self._keys.move_to_end(key)
                if slow:
                    self._segments.update(dict.fromkeys(segments, now + self._negative_s))
            while len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)

    def written(self, keys: Iterable[str]) -> None:
        """This client has just written these keys: whatever failed before was another object."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def key(self, key: str, now: float) -> bool:
        """Whether a read of the key failed a short while ago."""
        with self._lock:
            return self._is_in(self._keys, key, now)

    def any(self, now: float) -> bool:
        """Whether any segment is a suspect."""
        with self._lock:
            return bool(self._bad(now))

    def holds(self, segments: Segments, now: float) -> bool:
        """Whether all segments of an object are suspects."""
        with self._lock:
            return bool(segments) and segments <= self._bad(now)

    def _bad(self, now: float) -> set[str]:
        slow = (s for began, segments in self._reading.values() if now - began > self._after_s for s in segments)
        return {s for s in list(self._segments) if self._is_in(self._segments, s, now)}.union(slow)

    def _is_in(self, table: dict[str, float], name: str, now: float) -> bool:
        until = table.get(name)
        if until is None:
            return False
        if now < until:
            return True
        del table[name]
        return False
