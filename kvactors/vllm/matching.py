"""How much of a prompt the store has: asked without ever holding the scheduler up for longer than a budget.

A lookup that is not answered within the budget is asked for again in the next scheduling step. One that the engine answers late
or with an error is a miss. Asking changes nothing; the scheduler may ask for a request as often as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvactors.core.clock import Clock
from kvactors.engine import PendingHit

LOOKUP_DEADLINE_S = 5.0
"""After this a lookup counts as a miss."""

FRESH_S = 5.0
"""How long an answer may be used while vLLM has no blocks for the request."""


class Asks(Protocol):
    """The part of an engine that lookups need."""

    def start_lookup(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float | None = None) -> PendingHit: ...


@dataclass(slots=True)
class Question:
    """What was asked for a request, and when its answer was first seen."""

    pending: PendingHit
    limit_tokens: int
    answered_at: float | None = None

    def stale(self, now: float) -> bool:
        return self.answered_at is not None and now - self.answered_at > FRESH_S


class Matches:
    """The scheduler's open questions, one per request.

    Args:
        budget_s: how long all calls between two `new_step` may wait together, seconds.
    """

    def __init__(self, engine: Asks, clock: Clock, budget_s: float) -> None:
        self._engine, self._clock, self._budget_s = engine, clock, budget_s
        self._left_s = budget_s
        self._open: dict[str, Question] = {}
        self.asked = 0
        self.deferred = 0
        """times that an answer was not there in time, so that vLLM asks again"""

    def new_step(self) -> None:
        """The next scheduling step begins: the budget is whole again."""
        self._left_s = self._budget_s

    def ask(self, request_id: str, hashes: Sequence[bytes], limit_tokens: int) -> Question:
        """Asks and returns at once, unless there is a question, or an answer that may still be used."""
        question = self._open.get(request_id)
        if question is None or question.limit_tokens != limit_tokens or question.stale(self._clock.now()):
            pending = self._engine.start_lookup(list(hashes), limit_tokens, LOOKUP_DEADLINE_S)
            question = self._open[request_id] = Question(pending, limit_tokens)
            self.asked += 1
        return question

    def tokens(self, request_id: str, hashes: Sequence[bytes], limit_tokens: int) -> int | None:
        """Tokens that can be loaded, at most `limit_tokens` - 1 and on a boundary; None: ask again in the next step."""
        question = self.ask(request_id, hashes, limit_tokens)
        now = self._clock.now()
        if not question.pending.done and self._left_s > 0:
            question.pending.wait(self._left_s)
            self._left_s -= self._clock.now() - now
        if not question.pending.done:
            self.deferred += 1
            return None
        if question.answered_at is None:
            question.answered_at = self._clock.now()
        return question.pending.hit.tokens

    def forget_all(self) -> None:
        """What was answered holds no more."""
        self._open.clear()

    def forget(self, request_id: str) -> bool:
        """The request was scheduled, or is gone: the next question is a new one. Whether one was open."""
        return self._open.pop(request_id, None) is not None
