"""Lookups on their way: each is answered once, by its worker or by its deadline. An error or a late answer is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.core.answers import reason
from kvactors.core.queue import Priority
from kvactors.core.reachability import Hit
from kvactors.core.stats import EngineStats
from kvactors.core.store import Outcome, Store
from kvactors.log import get_logger
from kvactors.messages import Ask, Lookup, TransferDone

log = get_logger("kvactors.lookups")

Find = Callable[[Sequence[bytes], int, Store], Hit]
"""Asks the store and decides the longest hit; runs on a transfer worker."""


@dataclass(slots=True)
class LookupExpired:
    """Timer to the coordinator: a lookup's deadline passed."""

    number: int


@dataclass(slots=True)
class LookupDone:
    number: int
    done: TransferDone


class Lookups:
    """The coordinator's open lookups."""

    def __init__(self, find: Find, miss: Hit, pool: TransferPool, stats: EngineStats, mailbox: Mailbox[Any]) -> None:
        self.miss = miss
        self._find, self._pool, self._stats, self._mailbox = find, pool, stats, mailbox
        self._open: dict[int, tuple[Lookup, asyncio.TimerHandle]] = {}
        self._last = 0

    def begin(self, message: Lookup, later: Callable[[float, Any], asyncio.TimerHandle]) -> None:
        self._last += 1
        number = self._last
        self._open[number] = (message, later(message.deadline_s, LookupExpired(number)))
        self._mailbox.reserve()
        self._pool.submit(
            Ask(
                reply=lambda done: self._mailbox.post(LookupDone(number, done)),
                priority=Priority.DEMANDED,
                run=partial(self._find, message.hashes, message.prompt_tokens),
            )
        )

    def done(self, message: LookupDone) -> None:
        done = message.done
        if done.late:
            return
        self._mailbox.replied()
        result = done.job.result if isinstance(done.job, Ask) else None
        if done.outcomes[0] is Outcome.OK and isinstance(result, Hit):
            self._answer(message.number, result)
        else:
            why = done.outcomes[0].value if done.error is None else reason(done.error)
            log.warning("a lookup failed; it counts as a miss", error=why)
            self.fail(message.number)

    def fail(self, number: int) -> None:
        """Answers a miss, and counts the error; nothing if the lookup was answered."""
        if number in self._open:
            self._stats.lookup_errors += 1
            self._answer(number, self.miss)

    def _answer(self, number: int, hit: Hit) -> None:
        waiting = self._open.pop(number, None)
        if waiting is not None:
            message, timer = waiting
            timer.cancel()
            self._count(message, hit)
            message.answer(hit)

    def refuse(self, message: Lookup) -> None:
        """Answers a miss without asking the store."""
        self._count(message, self.miss)
        message.answer(self.miss)

    def _count(self, message: Lookup, hit: Hit) -> None:
        stats = self._stats
        stats.lookups += 1
        stats.lookup_misses += not hit.tokens
        stats.lookup_tokens += message.prompt_tokens
        stats.lookup_hit_tokens += hit.tokens

    def fail_all(self) -> None:
        for number in list(self._open):
            self.fail(number)
