"""What this client knows of its sessions: since when each runs, where its object lies, in which life of the master it began.

A session is good while the master of its life answers (`canary.py`). Where the pool has no space for a canary, a read is good
if all of its objects still lie afterwards where they were read: keys name contents, so an object that was written anew at the
same place has the same bytes. Nothing is written without a canary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from kvactors.core.store import Outcome
from kvactors.stores.mooncake.canary import Canary
from kvactors.stores.mooncake.client import NOWHERE, Client, Placed


class Reading:
    """A get session: since when its lease runs, where the object lies, and the life of the master (None: not known)."""

    __slots__ = ("life", "placed", "since")

    def __init__(self, since: float, placed: Placed, life: int | None) -> None:
        self.since, self.placed, self.life = since, placed, life


class Sessions:
    """Thread-safe. `lease_s`: how long a get session lasts."""

    def __init__(self, client: Client, canary: Canary, lease_s: float) -> None:
        self._client, self._canary, self._lease_s = client, canary, lease_s
        self._lock = threading.Lock()
        self._readings: dict[str, Reading] = {}
        self._puts: dict[str, int] = {}
        """open puts, and the life in which each began"""

    # Puts

    def begin_puts(self, keys: Iterable[str], life: int) -> None:
        with self._lock:
            self._puts.update(dict.fromkeys(keys, life))

    def end_puts(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)

    def lost_puts(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Which of these open puts the master does not know, or cannot be asked about, any more."""
        with self._lock:
            lives = {key: life for key in set(keys) if (life := self._puts.get(key)) is not None}
        verdicts = {life: self._canary.check(life) for life in set(lives.values())}
        return {key: verdicts[life] for key, life in lives.items() if verdicts[life] is not Outcome.OK}

    # Gets

    @property
    def gets_open(self) -> int:
        return len(self._readings)

    def begin_get(self, key: str, since: float, placed: Placed, life: int | None) -> None:
        """Renews a session that is alive; a read that began under one that is not, at another place, or in another life, must
        not profit from the new one."""
        with self._lock:
            reading = self._readings.get(key)
            if reading is None or not self.alive(reading, since) or reading.placed != placed or reading.life != life:
                self._readings[key] = Reading(since, placed, life)
            else:
                reading.since = max(since, reading.since)

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

    def end_readings(self, keys: Sequence[str], over: Mapping[int, Reading]) -> None:
        """Ends these sessions, unless another one of the key has taken their place."""
        with self._lock:
            mine = [keys[row] for row, reading in over.items() if self._readings.get(keys[row]) is reading]
        if mine:
            self.end_gets(mine)

    def readings(self, keys: Sequence[str], rows: Iterable[int]) -> dict[int, Reading]:
        """The sessions of these rows' keys, as far as there are any."""
        with self._lock:
            return {row: reading for row in rows if (reading := self._readings.get(keys[row])) is not None}

    def alive(self, reading: Reading, now: float) -> bool:
        """Whether its lease still runs."""
        return now < reading.since + self._lease_s

    def lost_reads(self, keys: Sequence[str], read: Mapping[int, Reading]) -> dict[int, Outcome]:
        """Which of the rows that were just read may hold another object's bytes, because the master changed meanwhile."""
        verdicts = {life: self._canary.check(life) for life in {r.life for r in read.values()} if life is not None}
        lost = {row: verdicts[r.life] for row, r in read.items() if r.life is not None and verdicts[r.life] is not Outcome.OK}
        unknown = {row: r for row, r in read.items() if r.life is None}
        if unknown:
            found = self._client.replicas(list(dict.fromkeys(keys[row] for row in unknown)))
            moved = [row for row, r in unknown.items() if found.get(keys[row], NOWHERE).places != r.placed.places]
            lost.update(dict.fromkeys(moved, Outcome.NOT_FOUND))
        return lost
