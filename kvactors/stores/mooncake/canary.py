"""Whether the master is still the one that gave us our sessions.

Ranges go to an object's memory without the master, and a master that was restarted knows no session any more: it gives the
memory to others, while range calls on old sessions go on "succeeding". No call says which master answers, and asking for one's
own keys proves nothing: another client may be writing the same blocks by now. So each client keeps a put open that nobody else
can own: while the master says of that key that it is being written, it is the one that knew our sessions too. Nobody ends the
last one: the master forgets it after its release timeout.

A canary is renewed long before a master would discard it: the new one is opened, then the old one revoked, and only if that
worked the chain is unbroken. Each break begins a new life; a session belongs to the life in which it was opened.
"""

from __future__ import annotations

import threading
import uuid

from kvactors.core.clock import Clock
from kvactors.core.store import Outcome
from kvactors.errors import StoreUnreachableError
from kvactors.stores.mooncake.client import Client
from kvactors.stores.mooncake.codes import OK, REPLICA_NOT_READY, UNREACHABLE, outcome_of

FRESH_S = 0.02
"""What the master said of the canary holds for so long, seconds: less than a master takes to be killed and start again (45 ms
measured), let alone to get a segment back (2 s)."""

PREFIX = "kvactors-canary/"


class Canary:
    """Thread-safe; a call that waits for the master lets the others wait for the same answer.

    Args:
        renew_s: how old a canary may grow; less than the master's discard timeout.
    """

    def __init__(self, client: Client, clock: Clock, renew_s: float) -> None:
        self._client, self._clock, self._renew_s = client, clock, renew_s
        self._lock = threading.Lock()
        self._life = 0
        self._key: str | None = None
        self._opened = self._known = 0.0

    def life(self) -> int | None:
        """The life that a session which is opened now belongs to; None: the pool has no space for a canary, so that
        nothing is known of the master. Asks for the canary, opens or renews it.

        Raises:
            StoreUnreachableError: the master does not answer.
        """
        with self._lock:
            now = self._clock.now()
            if self._ask(now) is Outcome.UNREACHABLE:
                raise StoreUnreachableError("the master did not answer whether it knows our sessions")
            if self._key is None or now >= self._opened + self._renew_s:
                self._renew(now)
            return None if self._key is None else self._life

    def check(self, life: int) -> Outcome:
        """OK: the master knows the sessions of that life. NOT_FOUND: it does not. UNREACHABLE: it does not answer, and what it
        knows of them will never be known."""
        with self._lock:
            if life != self._life or self._key is None:
                return Outcome.NOT_FOUND
            return self._ask(self._clock.now())

    def _ask(self, now: float) -> Outcome:
        """Asks for the canary, unless it is known to be well; a break ends the life."""
        if self._key is None or now <= self._known + FRESH_S:
            return Outcome.OK
        code = self._client.ask("batch_get_session_start", [self._key])[0]
        if code == REPLICA_NOT_READY:
            self._known = now
            return Outcome.OK
        self._break()
        return outcome_of(code) if code in UNREACHABLE else Outcome.NOT_FOUND

    def _renew(self, now: float) -> None:
        fresh, old = f"{PREFIX}{uuid.uuid4().hex}", self._key
        code = self._client.ask("batch_put_session_start", [fresh], [1])[0]
        if code in UNREACHABLE:
            self._break()
            raise StoreUnreachableError(f"the master did not answer ({code})")
        if code != OK:
            return
        if old is None or self._client.ask("batch_put_session_revoke", [old])[0] != OK:
            self._life += 1
        self._key, self._opened, self._known = fresh, now, now

    def _break(self) -> None:
        self._key = None
        self._life += 1
