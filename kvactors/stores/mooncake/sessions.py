"""What this client knows of its sessions: since when each runs, where its object lies, and when the master last knew it.

Ranges go to an object's memory without the master. One that was restarted knows no object any more, and gives the memory to
others; so what it said of an object holds for a short while only, and then it is asked again: before a put, and after a read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvactors.core.clock import Clock
from kvactors.core.store import Outcome
from kvactors.stores.mooncake.client import NOWHERE, Client, Placed
from kvactors.stores.mooncake.codes import OK, REPLICA_NOT_READY, outcome_of

FRESH_S = 0.02
"""What the master said of an object holds for so long, seconds: less than a master takes to be killed, start again and get a
segment back."""


class Reading:
    """A get session: since when its lease runs, where the object lies, and when it was known to lie there."""

    __slots__ = ("known", "placed", "since")

    def __init__(self, since: float, placed: Placed) -> None:
        self.since, self.known, self.placed = since, since, placed


class Sessions:
    """Thread-safe.

    Args:
        lease_s: how long a get session lasts.
        alive: whether the master answers; asked when an empty answer may mean that it does not.
    """

    def __init__(self, client: Client, clock: Clock, lease_s: float, alive: Callable[[], bool]) -> None:
        self._client, self._clock, self._lease_s, self._alive = client, clock, lease_s, alive
        self._lock = threading.Lock()
        self._readings: dict[str, Reading] = {}
        self._puts: dict[str, float] = {}
        """open puts, and when the master last knew each"""

    # Puts

    def put(self, keys: Iterable[str], now: float) -> None:
        """Puts were opened."""
        with self._lock:
            self._puts.update((key, now) for key in keys)

    def end_puts(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)

    def unknown_puts(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Which of these open puts the master does not know any more. The oldest stands for all: a master that still knows it
        was not restarted since."""
        now = self._clock.now()
        with self._lock:
            old = sorted((known, key) for key in set(keys) if now > (known := self._puts.get(key, now)) + FRESH_S)
        if not old:
            return {}
        asked = [key for _, key in old]
        gone = self._not_being_written(asked[:1]) and self._not_being_written(asked)
        with self._lock:
            self._puts.update((key, now) for key in asked if key in self._puts and key not in gone)
        return gone

    def _not_being_written(self, keys: Sequence[str]) -> dict[str, Outcome]:
        codes = self._client.ask("batch_get_session_start", keys)
        told = list(zip(keys, codes, strict=True))
        with self._lock:
            read = [key for key, code in told if code == OK and key not in self._readings]
        if read:  # another client took the key over and has committed it
            self.end_gets(read)
        return {key: Outcome.INVALID if code == OK else outcome_of(code) for key, code in told if code != REPLICA_NOT_READY}

    # Gets

    @property
    def gets_open(self) -> int:
        return len(self._readings)

    def begin_get(self, key: str, since: float, placed: Placed) -> None:
        """Renews a session that is alive; a read that began under one that is not, or at another place, must not profit from
        the new one."""
        with self._lock:
            reading = self._readings.get(key)
            if reading is None or not self.alive(reading, since) or reading.placed != placed:
                self._readings[key] = Reading(since, placed)
            else:
                reading.since, reading.known = max(since, reading.since), max(since, reading.known)

    def end_gets(self, keys: Iterable[str]) -> int:
        """Ends sessions here and in the native client, whose code is the answer."""
        different = list(dict.fromkeys(keys))
        with self._lock:
            for key in different:
                self._readings.pop(key, None)
        return self._client.tell("batch_get_session_end", different)

    def end_refused(self, keys: Iterable[str], found: Mapping[str, Placed]) -> None:
        """Ends the sessions of gets that were refused; who asked with a wrong size does not end that of another who asked with
        the right one."""
        with self._lock:
            over = [
                key
                for key in keys
                if (reading := self._readings.get(key)) is None or reading.placed.nbytes != found.get(key, NOWHERE).nbytes
            ]
        if over:
            self.end_gets(over)

    def readings(self, keys: Sequence[str], rows: Iterable[int]) -> dict[int, Reading]:
        """The sessions of these rows' keys, as far as there are any."""
        with self._lock:
            return {row: reading for row in rows if (reading := self._readings.get(keys[row])) is not None}

    def alive(self, reading: Reading, now: float) -> bool:
        """Whether its lease still runs."""
        return now < reading.since + self._lease_s

    def moved_away(self, read: Mapping[str, Reading], now: float) -> dict[str, Outcome]:
        """Which of these objects do not lie any more where they were read. As with puts, the oldest stands for all."""
        old = sorted((r.known, key) for key, r in read.items() if now > r.known + FRESH_S)
        if not old:
            return {}
        asked = [key for _, key in old]
        gone = self._not_in_place(asked[:1], read) and self._not_in_place(asked, read)
        for key in asked:
            if key not in gone:
                read[key].known = max(now, read[key].known)
        return gone

    def _not_in_place(self, keys: Sequence[str], read: Mapping[str, Reading]) -> dict[str, Outcome]:
        found = self._client.replicas(keys)
        answer = Outcome.NOT_FOUND if found or self._alive() else Outcome.UNREACHABLE
        return {key: answer for key in keys if found.get(key, NOWHERE).places != read[key].placed.places}
