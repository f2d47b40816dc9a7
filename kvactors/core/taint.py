"""Which requests hold wrong bytes, and when they are clean again (I12).

Once a load of a request failed, what the model computes for it is computed from missing KV. Nothing of it may be published,
in this step or in later ones, until the request starts again from a boundary whose blocks are known to be right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvactors.core.reachability import Reachability
from kvactors.core.steps import NULL_BLOCK, FailedLoad, StepRequest


@dataclass(slots=True)
class Taints:
    """request id -> first token that is wrong.

    Attributes:
        reachability: says which blocks a boundary needs.
    """

    reachability: Reachability
    _first_wrong: dict[str, int] = field(default_factory=dict)
    _loaded_since: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """(group, block index) that loads outside steps brought in since a tainted request failed"""

    def add(self, failure: FailedLoad) -> None:
        known = self._first_wrong.get(failure.request_id)
        first = failure.first_token if known is None else min(known, failure.first_token)
        self._first_wrong[failure.request_id] = first
        self._loaded_since.pop(failure.request_id, None)

    def loaded(self, request: StepRequest) -> None:
        """A load outside steps brought in every block that the request asked for."""
        if request.request_id in self._first_wrong:
            self._loaded_since.setdefault(request.request_id, set()).update(_loads(request))

    def check(self, request: StepRequest) -> bool:
        """Whether the request is (still) tainted in this step; a verified restart clears it.

        A restart is verified if it lies at or before the first wrong token, or if every block that the boundary needs from
        there on is loaded by this step (a load that fails again taints again), or was loaded outside steps since.
        """
        first = self._first_wrong.get(request.request_id)
        if first is None:
            return False
        at = request.restarted_at
        if at is None or (at > first and not self._reloads(request, first, at)):
            return True
        self.forget(request.request_id)
        return False

    def _reloads(self, request: StepRequest, first: int, at: int) -> bool:
        if at % self.reachability.boundary_tokens:
            return False
        loaded = _loads(request) | self._loaded_since.get(request.request_id, set())
        for group, needed in zip(self.reachability.groups, self.reachability.load_mask(at), strict=True):
            start = first // group.block_tokens
            if any(needed[i] and (group.id, i) not in loaded for i in range(start, len(needed))):
                return False
        return True

    def forget(self, request_id: str) -> None:
        self._first_wrong.pop(request_id, None)
        self._loaded_since.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._first_wrong


def _loads(request: StepRequest) -> set[tuple[int, int]]:
    return {(g, i) for g, b in request.groups.items() for i in b.load if b.block_ids[i] != NULL_BLOCK}
