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

    def add(self, failure: FailedLoad) -> None:
        known = self._first_wrong.get(failure.request_id)
        first = failure.first_token if known is None else min(known, failure.first_token)
        self._first_wrong[failure.request_id] = first

    def check(self, request: StepRequest) -> bool:
        """Whether the request is (still) tainted in this step; a verified restart clears it.

        A restart is verified if it lies at or before the first wrong token, or if this step loads every block that the
        boundary needs from there on (a load that fails again taints again).
        """
        first = self._first_wrong.get(request.request_id)
        if first is None:
            return False
        at = request.restarted_at
        if at is None or (at > first and not self._reloads(request, first, at)):
            return True
        del self._first_wrong[request.request_id]
        return False

    def _reloads(self, request: StepRequest, first: int, at: int) -> bool:
        if at % self.reachability.boundary_tokens:
            return False
        for group, needed in zip(self.reachability.groups, self.reachability.load_mask(at), strict=True):
            blocks = request.groups.get(group.id)
            loaded = set() if blocks is None else {i for i in blocks.load if blocks.block_ids[i] != NULL_BLOCK}
            start = first // group.block_tokens
            if any(needed[i] and i not in loaded for i in range(start, len(needed))):
                return False
        return True

    def forget(self, request_id: str) -> None:
        self._first_wrong.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._first_wrong
