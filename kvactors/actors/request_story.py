"""What the coordinator notes about whole requests, for their stories; see `core/story.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvactors.actors.step_state import StepState
from kvactors.core.sessions import Record
from kvactors.core.steps import FailedLoad
from kvactors.core.story import WHOLE_REQUEST


class RequestStory:
    """Tells `record`; nothing while that is None, for then nobody wants to know."""

    def __init__(self) -> None:
        self.record: Record | None = None

    def begins(self, state: StepState) -> None:
        if self.record is None:
            return
        kind = "step" if state.windowed else "load"
        for request_id, problem in state.problems.items():
            self._tell(request_id, f"left out of {kind} {state.id} ({problem})")
        for r in state.requests.values():
            loads, saves = _count(b.load for b in r.groups.values()), _count(b.save for b in r.groups.values())
            self._tell(r.request_id, f"{kind} {state.id} begins: {loads} blocks to load, {saves} to save")

    def passes_through(self, state: StepState, reason: str) -> None:
        self._tell_all(state, f"step {state.id} passes through ({reason})")

    def rolled_back(self, state: StepState, reason: str) -> None:
        self._tell_all(state, f"step {state.id} is rolled back (preparation failed: {reason})")

    def aborted(self, state: StepState, reason: str) -> None:
        self._tell_all(state, f"step {state.id} is aborted ({reason})")

    def load_failed(self, failure: FailedLoad) -> None:
        self._tell(failure.request_id, f"load failed from token {failure.first_token} on ({failure.reason})")

    def released(self, request_id: str, reason: str) -> None:
        self._tell(request_id, f"released ({reason})")

    def forgotten(self, request_id: str) -> None:
        self._tell(request_id, "forgotten")

    def _tell_all(self, state: StepState, what: str) -> None:
        for request_id in state.requests:
            self._tell(request_id, what)

    def _tell(self, request_id: str, what: str) -> None:
        if self.record is not None:
            self.record(request_id, WHOLE_REQUEST, WHOLE_REQUEST, what)


def _count(blocks: Iterable[Sequence[int]]) -> int:
    return sum(map(len, blocks))
