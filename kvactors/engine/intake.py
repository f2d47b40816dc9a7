"""What comes in: requests are admitted into numbered steps, answers go out once."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvactors.actors.latch import Latch
from kvactors.actors.step_state import StepState
from kvactors.core.admission import LocalBlocks, problem_of
from kvactors.core.answers import shown
from kvactors.core.layout import KVLayout
from kvactors.core.stats import EngineStats
from kvactors.core.steps import GroupBlocks, StepRequest
from kvactors.errors import StepError
from kvactors.log import get_logger

log = get_logger("kvactors.engine")

T = TypeVar("T")


class Intake:
    """Makes the state of each step. Requests that make no sense are left out, and named."""

    def __init__(
        self, layout: KVLayout, hash_tokens: int, group_layers: Mapping[int, Sequence[int]], stats: EngineStats
    ) -> None:
        self._layout, self._hash_tokens, self._group_layers, self._stats = layout, hash_tokens, group_layers, stats
        self._block_tokens = {g.id: g.block_tokens for g in layout.groups}
        self._last_step = 0

    def state(self, requests: Sequence[StepRequest], *, windowed: bool = True) -> StepState:
        """The state of a new step, or of a load outside steps: there every request left out has failed."""
        call = "begin_step" if windowed else "load"
        if not isinstance(requests, Sequence):
            raise StepError(f"{call}: requests is {shown(requests)}; give a sequence of StepRequest")
        strange = next((i for i, r in enumerate(requests) if not isinstance(r, StepRequest)), None)
        if strange is not None:
            raise StepError(f"{call}: item {strange} of requests is {shown(requests[strange])}; give a StepRequest")
        for i, request in enumerate(requests):
            try:
                hash(request.request_id)
            except TypeError:  # it cannot even be named as left out
                raise StepError(f"{call}: the request_id of item {i} is {shown(request.request_id)}; give a text") from None
        good: dict[str, StepRequest] = {}
        problems: dict[str, str] = {}
        rejected_loads: list[str] = []
        local_blocks = LocalBlocks(self._block_tokens, self._hash_tokens)
        for request in requests if windowed else map(_only_loads, requests):
            problem = problem_of(request, self._layout, self._hash_tokens)
            if not problem and request.request_id in good:
                problem = "is named twice in one step"
            problem = problem or local_blocks.take(request)
            if problem:
                problems[request.request_id] = problem
                self._stats.bad_requests += 1
                if not windowed or (request.request_id not in good and _loads_something(request)):
                    rejected_loads.append(request.request_id)
                log.warning("a request takes no part in a step", request=request.request_id, problem=problem)
            else:
                here = {g: b for g, b in request.groups.items() if g in self._group_layers}
                whole = len(here) == len(request.groups)
                good[request.request_id] = request if whole else dataclasses.replace(request, groups=here)
        self._last_step += 1
        return StepState(
            self._last_step, good, problems, rejected_loads, self._group_layers, self._block_tokens, windowed=windowed
        )


def _only_loads(request: StepRequest) -> StepRequest:
    """Less what it saves; as it is, if it makes no sense."""
    given: Any = request.groups  # whatever the annotations say
    if not isinstance(given, Mapping) or not all(isinstance(b, GroupBlocks) for b in given.values()):
        return request
    return dataclasses.replace(request, groups={g: dataclasses.replace(b, save=()) for g, b in given.items()})


def _loads_something(request: Any) -> bool:
    """Whether a request that makes no sense asked for a load, as far as one can tell."""
    groups = request.groups if isinstance(request.groups, Mapping) else {}
    return any(len(load) > 0 for load in (getattr(b, "load", ()) for b in groups.values()) if hasattr(load, "__len__"))


class Answer(Generic[T]):
    """A value that arrives once, with the latch that says so. Of two that give one, as the engine may when it ends, the first
    counts."""

    __slots__ = ("_given", "_lock", "latch", "value")

    def __init__(self, default: T) -> None:
        self.value = default
        self.latch = Latch()
        self._given = False
        self._lock = threading.Lock()

    def give(self, value: T) -> None:
        with self._lock:
            first, self._given = not self._given, True
            if first:
                self.value = value
        if first:
            self.latch.open()
